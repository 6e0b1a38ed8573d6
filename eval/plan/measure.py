"""Measure the devices of a pipeline, as a profile in a file, and the candidates of a plan on this machine.

The profile has stages by rows and context, draft levels, verdicts and messages.

Stages are measured one by one, in this process only, or on the boards of a hosts file; levels, verdicts and messages in
a pipeline that runs here.
"""
from __future__ import annotations

import io
import math
import time
from contextlib import redirect_stderr
from itertools import combinations
from operator import attrgetter, itemgetter
from pathlib import Path
from statistics import median
from typing import Any, Dict, Sequence, Tuple

import numpy as np

from cluster.folder import private_folder
from config.failure import PeerLost
from config.profiles import Profile, read, touched, write
from config.run_config import RunConfig
from eval.plan.candidates import Candidate
from eval.plan.hosts import boards_of, measured_boards
from eval.plan.keys import PlanConfig
from eval.plan.record import PlanRecord, RecordedAnswer
from eval.plan.trial import Trial, values
from eval.recorded import sampler_of
from launch.build import build_stage
from launch.pipeline import Pipeline
from launch.prepare import prepare
from launch.progress import ProgressBar
from launch.spec import RankSpec
from launch.timing import Passed, inputs, passes
from model.sample import Sampler
from pipeline.answers import Answer, Request
from pipeline.trace import OFF
from pipeline.trace import read as read_trace

FREE_ROWS = (0, 16, 32, 64)  # numbers of rows without a cost of their own, to try
COLUMN_SETS = [[0, *others] for count in range(4)
               for others in combinations((1, 2, 3), count)]  # sets of columns of `fit` that may take time
MAX_TOKENS = 24  # of an answer
EQUAL_WITHIN = 0.1  # relative difference below which times count as equal
STEP_EXTRA = 1.4  # ms of a step of a collective in addition to a message
Span = Dict[str, Any]  # of a trace
AnswerTimes = Dict[str, Tuple[float, float]]  # begin and end of the answer with a network, by its name
MIN_RATE, MAX_RATE = 10.0, 100_000.0  # Mbit/s, of a plausible rate
PROMPT = list(range(1, 33))
NUM_ANSWERS = 3  # recorded questions that candidates answer on this machine
NUM_ROUNDS = 2  # times that each question is answered; the shorter time counts


def measured(config: PlanConfig) -> Profile:
    """Return the measured cluster, from the file if it exists, or measure now. Raise ValueError for another model's."""
    model = Path(config.run.base_dir or config.run.model_dir).name
    if config.measured and Path(config.measured).is_file():
        profile = read(config.measured)
        if profile.model_of != model:
            raise ValueError(f"{config.measured} was measured with {profile.model_of or 'no model'}, but the model is "
                             f"{model}: name another measured=, and add measure=true")
        return profile

    if not config.measure:
        raise ValueError(f"there is no file {config.measured}: add measure=true to write it")
    profile = measure(config, model)
    if config.measured:
        write(config.measured, profile)
    return profile


def measure(config: PlanConfig, model: str) -> Profile:
    """Measure the pipeline of a run with these keys; with a hosts file, measure its boards in place of the stages."""
    hosts = config.run.hosts
    run = config.single(pipeline_type="serial", draft=(*config.kinds, "suffix")[0])
    prepared = prepare(run)
    world = prepared.placement.world
    specs = [prepared.spec(rank) for rank in range(1, world)]
    sizes = specs[0].sizes
    row_bytes = sizes.hidden * specs[0].like.element_size()

    # stages
    if hosts:
        boards = measured_boards(hosts, _timing_request(specs[0], len(boards_of(hosts))))
        stages = [board.passes for board in boards]
    else:
        boards, stages = [], list(map(_passes, ProgressBar(specs, desc="stages", leave=False)))

    # levels, verdicts and messages
    with private_folder() as trace_dir:
        answer_times = _run(config, run, trace_dir)
        spans = [span for span in read_trace(trace_dir) if span.get("nodes")]
    levels = {name: _median_ms(spans, "grow", *times) for name, times in answer_times.items()}
    latency, rate = _messages(spans, world, row_bytes)

    # links
    links = tuple((0, rank, board.latency, _plausible_rate(board.mbps))
                  for rank, board in enumerate(boards, 1))
    if links:
        _, _, latencies, rates = zip(*links)
        latency, rate = median(latencies), median(rates)

    fastest_stage = min(stages, key=lambda passes: sum(timed.took for timed in passes))
    pass_ms, row_ms, free_rows, token_ms, expert_ms = fit(fastest_stage, sizes.experts, sizes.chosen)
    factors = tuple(times_as_long(passes, fastest_stage) for passes in stages)
    return Profile(
        f"measured {'over ssh' if hosts else 'here'} with {model}", sizes.layers, row_bytes,
        model=pass_ms, row=row_ms, free=free_rows, token=token_ms,
        level=min(levels.values(), default=0.0), verdict=_median_ms(spans, "judge"),
        latency=latency, mbps=rate, step=latency + STEP_EXTRA,
        expert=expert_ms, experts=sizes.experts, chosen=sizes.chosen, weights=sum(map(_gigabytes, specs)),
        factors=factors, levels=tuple(levels.items()), links=links, model_of=model)


def _gigabytes(spec: RankSpec) -> float:
    """Return the GB of a stage's layers, as stored."""
    weights = spec.part.weights
    return sum(weights.form(name).bytes for name in weights.names()) / 1e9


def _plausible_rate(rate: float) -> float:
    """Return a measured rate in Mbit/s, clipped to plausible bounds."""
    return min(max(rate, MIN_RATE), MAX_RATE)


# --- stages -----------------------------------------------------------------------------------------------------------

def _passes(spec: RankSpec) -> list[Passed]:
    """Return the measured passes of one stage on this machine."""
    first_layer, end_layer = spec.part.layers
    times_larger = spec.sizes.layers / (end_layer - first_layer)  # the model than the stage
    rows = inputs(spec.sizes, spec.like, first_layer == 0)
    return list(passes(build_stage(spec, OFF), rows, times_larger, spec.context))


def _timing_request(spec: RankSpec, num_boards: int) -> dict[str, Any]:
    """Return the message to each board, with the layers of an even split of the model to time."""
    run, num_layers = spec.config, spec.sizes.layers // num_boards
    return {"config": spec.part.config, "layers": max(1, num_layers),
            "dtype": run.dtype, "device": run.device, "quant": spec.quant,
            "threads": run.threads_per_rank, "context": spec.context}


def fit(passes: Sequence[Passed], num_experts: int = 0, num_chosen: int = 0
        ) -> tuple[float, float, int, float, float]:
    """Return the milliseconds of a pass, those per row beyond the free ones, the number of free rows, and the
    milliseconds per token of context and per further expert.

    These figures of a profile have the least squared relative error over all passes, and none is negative.
    """
    num_rows, context, took = np.array(passes).T
    ones = np.ones_like(took)
    further_experts = np.zeros_like(took)
    if num_experts:
        further_experts = np.array([touched(num_experts, num_chosen, rows) for rows in num_rows]) - num_chosen

    fits = []
    for free_rows in FREE_ROWS:
        paid_rows = np.maximum(0, num_rows - free_rows)
        columns = np.stack([ones, paid_rows, context, further_experts], -1)
        columns /= took[:, None]  # so that errors are relative

        for column_set in COLUMN_SETS:
            times = np.zeros(4)
            times[column_set], *_ = np.linalg.lstsq(columns[:, column_set], ones, rcond=None)
            squared_error = float(np.square(columns @ times - 1).sum())
            if times.min() >= 0:
                pass_ms, row_ms, token_ms, expert_ms = times.tolist()
                fits.append((squared_error, (max(pass_ms, 1e-3), row_ms, free_rows, token_ms, expert_ms)))

    assert fits, "no pass was measured"
    _, best_figures = min(fits, key=itemgetter(0))
    return best_figures


def times_as_long(passes: Sequence[Passed], other_passes: Sequence[Passed]) -> float:
    """Return the ratio of a stage's time per layer to that of another one, the median over the same passes.

    It is 1 if the difference is within that of two measurements of one stage.
    """
    ratio = median(timed.took / other.took for timed, other in zip(passes, other_passes))
    return 1.0 if abs(ratio - 1) <= EQUAL_WITHIN else round(ratio, 3)


# --- levels, verdicts and messages ------------------------------------------------------------------------------------

def _run(config: PlanConfig, run: RunConfig, trace_dir: str) -> AnswerTimes:
    """Let each draft answer in a pipeline with a trace in a folder, and return begin and end of each answer."""
    request, answer_times = Request(PROMPT, Sampler(), MAX_TOKENS), {}
    with redirect_stderr(io.StringIO()), opened(run, trace=trace_dir) as pipeline:  # no messages about the trace
        autoregressive = pipeline.decoder_for(config.single(pipeline_type="ar"))
        for kind in config.kinds:
            decoder = pipeline.decoder_for(config.single(pipeline_type="serial", draft=kind))
            begun_at = time.monotonic()
            decoder.complete(request)
            for network in decoder.draft.networks:
                answer_times[network.source or kind] = begun_at, time.monotonic()

            autoregressive.complete(request)
    return answer_times


def _median_ms(spans: Sequence[Span], name: str, since: float = 0.0, until: float = math.inf) -> float:
    """Return the median milliseconds of the spans of this name that began within an interval; 0 if none exists."""
    named_spans = [span for span in spans if span["name"] == name]
    seconds = [span["t1"] - span["t0"] for span in named_spans if since <= span["t0"] < until]
    return 1e3 * median(seconds) if seconds else 0.0


def _messages(spans: Sequence[Span], world: int, row_bytes: int) -> tuple[float, float]:
    """Return the milliseconds of a message of one row, and Mbit/s, from the messages of all ranks except rank 0."""
    arrival_times = {(span["rank"], span["nodes"][0]): span["t1"]
                     for span in spans if span["name"] == "recv"}
    one_row_seconds: list[float] = []
    longer_trips: list[tuple[int, float]] = []  # rows and seconds of longer messages

    for span in spans:
        rank, nodes = span["rank"], span["nodes"]
        arrived_at = arrival_times.get(((rank + 1) % world, nodes[0]))
        if span["name"] == "send" and rank and arrived_at:
            seconds = arrived_at - span["t1"]
            if len(nodes) == 1:
                one_row_seconds.append(seconds)
            else:
                longer_trips.append((len(nodes), seconds))

    latency = max(0.0, median(one_row_seconds)) if one_row_seconds else 0.0
    num_rows, seconds = map(median, zip(*longer_trips)) if longer_trips else (0, 0.0)
    transfer_seconds = seconds - latency
    rate = num_rows * row_bytes * 8 / transfer_seconds / 1e6 if transfer_seconds > 0 else MAX_RATE
    return 1e3 * latency, _plausible_rate(rate)


# --- candidates -------------------------------------------------------------------------------------------------------
# The stages above are timed one by one, but the ranks of one machine share its cores. So a simulation is inaccurate
# there, and the best candidates of a plan are measured.

def check(config: PlanConfig, record: PlanRecord, candidates: Sequence[Candidate]) -> list[Trial]:
    """Let candidates answer the first recorded questions in pipelines on this machine; keep the shorter time of each.

    A candidate that fails here, such as for lack of memory, is skipped; for plain decoding the error is raised.
    """
    trials = []

    for candidate in ProgressBar(candidates, desc="check", unit="candidate", leave=False):
        try:
            with opened(config.single(**values(candidate.keys))) as pipeline:
                rounds = [answers_of(pipeline, record.answers[:NUM_ANSWERS], MAX_TOKENS) for _ in range(NUM_ROUNDS)]
        except (ValueError, PeerLost):
            if candidate.plain:
                raise

        else:
            shorter_answers = [min(repeated, key=attrgetter("seconds")) for repeated in zip(*rounds)]
            trials.append(Trial(candidate, shorter_answers, {}))

    return trials


def answers_of(pipeline: Pipeline, questions: Sequence[RecordedAnswer], max_tokens: int) -> list[Answer]:
    """Return the answers to these questions, of at most `max_tokens` tokens each."""
    assert pipeline.text is not None, "questions need a tokenizer"
    end_ids, sampler = frozenset(pipeline.text.end_ids), sampler_of(pipeline.config)
    requests = [Request(question.prompt, sampler, max_tokens, end_ids) for question in questions]
    return list(map(pipeline.decoder.complete, requests))


def opened(run: RunConfig, **options: Any) -> Pipeline:
    """Open a pipeline with these keys, regardless of presets."""
    changed_keys = dict(vars(run).items() - vars(RunConfig()).items())
    if "ssm" not in run.sources:
        changed_keys.pop("ssm", None)
    return Pipeline.open("toy", **{"pipeline_type": run.pipeline_type, **changed_keys, **options})
