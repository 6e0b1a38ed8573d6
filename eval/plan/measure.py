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
from eval.plan.record import Book, Written
from eval.plan.trial import Trial, values
from eval.recorded import sampler_of
from launch.build import build_stage
from launch.pipeline import Pipeline
from launch.prepare import prepare
from launch.progress import ProgressBar
from launch.spec import RankSpec
from launch.timing import Passed, inputs, passes
from model.sample import Sampler
from pipeline.decode import Answer, Request
from pipeline.trace import OFF
from pipeline.trace import read as read_trace

FREE = (0, 16, 32, 64)  # numbers of free rows to try
KEPT = [[0, *more] for count in range(4)
        for more in combinations((1, 2, 3), count)]  # sets of columns of `fit` that may take time
TOKENS = 24  # most tokens of an answer
ALIKE = 0.1  # relative difference below which times count as equal
STEP = 1.4  # ms of a step of a collective in addition to a message
Span = Dict[str, Any]  # of a trace
Moments = Dict[str, Tuple[float, float]]  # begin and end of the answer with a network, by its name
RATES = 10.0, 100_000.0  # Mbit/s, bounds of a plausible rate
PROMPT = list(range(1, 33))
ANSWERS = 3  # recorded questions that candidates answer on this machine
ROUNDS = 2  # times that each question is answered; the shorter time counts


def measured(config: PlanConfig) -> Profile:
    """Return the measured cluster, from the file if it exists, or measure now. Raise ValueError for another model's."""
    model = Path(config.run.base_dir or config.run.model_dir).name
    if config.measured and Path(config.measured).is_file():
        found = read(config.measured)
        if found.model_of != model:
            raise ValueError(f"{config.measured} was measured with {found.model_of or 'no model'}, but the model is "
                             f"{model}: name another measured=, and add measure=true")
        return found
    if not config.measure:
        raise ValueError(f"there is no file {config.measured}: add measure=true to write it")
    made = measure(config, model)
    if config.measured:
        write(config.measured, made)
    return made


def measure(config: PlanConfig, model: str) -> Profile:
    """Measure the pipeline of a run with these keys; with a hosts file, measure its boards in place of the stages."""
    hosts = config.run.hosts
    run = config.single(pipeline_type="serial", draft=(*config.kinds, "suffix")[0])
    prepared = prepare(run)
    world = prepared.placement.world
    parts = [prepared.spec(rank) for rank in range(1, world)]
    sizes = parts[0].sizes
    row_bytes = sizes.hidden * parts[0].like.element_size()
    if hosts:
        boards = measured_boards(hosts, _asked(parts[0], len(boards_of(hosts))))
        stages = [board.passes for board in boards]
    else:
        boards, stages = [], list(map(_passes, ProgressBar(parts, desc="stages", leave=False)))
    with private_folder() as trace:
        moments = _run(config, run, trace)
        spans = [span for span in read_trace(trace) if span.get("nodes")]
    levels = {name: _took(spans, "grow", *moment) for name, moment in moments.items()}
    latency, rate = _messages(spans, world, row_bytes)
    links = tuple((0, rank, board.latency, _believed(board.mbps))
                  for rank, board in enumerate(boards, 1))
    if links:
        _, _, latencies, rates = zip(*links)
        latency, rate = median(latencies), median(rates)
    base = min(stages, key=lambda passes: sum(one.took for one in passes))
    whole, row, free, token, expert = fit(base, sizes.experts, sizes.chosen)
    return Profile(
        f"measured {'over ssh' if hosts else 'here'} with {model}", sizes.layers, row_bytes, whole, row, free, token,
        level=min(levels.values(), default=0.0), verdict=_took(spans, "judge"),
        latency=latency, mbps=rate, step=latency + STEP,
        expert=expert, experts=sizes.experts, chosen=sizes.chosen, weights=sum(map(_gigabytes, parts)),
        factors=tuple(times_as_long(passes, base) for passes in stages),
        levels=tuple(levels.items()), links=links, model_of=model)


def _gigabytes(spec: RankSpec) -> float:
    """Return the GB of a stage's layers, as stored."""
    weights = spec.part.weights
    return sum(weights.form(name).bytes for name in weights.names()) / 1e9


def _believed(rate: float) -> float:
    """Return a measured rate in Mbit/s, clipped to plausible bounds."""
    return min(max(rate, RATES[0]), RATES[1])


# --- stages -----------------------------------------------------------------------------------------------------------

def _passes(spec: RankSpec) -> list[Passed]:
    """Return the measured passes of one stage on this machine."""
    first, last = spec.part.layers
    share = spec.sizes.layers / (last - first)
    rows = inputs(spec.sizes, spec.like, first == 0)
    return list(passes(build_stage(spec, OFF), rows, share, spec.context))


def _asked(spec: RankSpec, boards: int) -> dict[str, Any]:
    """Return the message to each board, with the layers of an even split of the model to time."""
    run, layers = spec.config, spec.sizes.layers // boards
    return {"config": spec.part.config, "layers": max(1, layers),
            "dtype": run.dtype, "device": run.device, "quant": spec.quant,
            "threads": run.threads_per_rank, "context": spec.context}


def fit(passes: Sequence[Passed], experts: int = 0, chosen: int = 0
        ) -> tuple[float, float, int, float, float]:
    """Return the milliseconds of a pass, those per row beyond the free ones, the number of free rows, and the
    milliseconds per token of context and per further expert.

    These figures of a profile have the least squared relative error over all passes, and none is negative.
    """
    size, context, took = np.array(passes).T
    target = np.ones_like(took)
    more = np.zeros_like(took)
    if experts:
        more = np.array([touched(experts, chosen, rows) for rows in size]) - chosen
    found = []
    for free in FREE:
        rows = np.maximum(0, size - free)
        columns = np.stack([target, rows, context, more], -1)
        columns /= took[:, None]
        for kept in KEPT:
            times = np.zeros(4)
            times[kept], *_ = np.linalg.lstsq(columns[:, kept], target, rcond=None)
            off = float(np.square(columns @ times - 1).sum())
            if times.min() >= 0:
                whole, row, token, expert = times.tolist()
                found.append((off, (max(whole, 1e-3), row, free, token, expert)))
    assert found, "no pass was measured"
    return min(found, key=itemgetter(0))[1]


def times_as_long(passes: Sequence[Passed], others: Sequence[Passed]) -> float:
    """Return the ratio of a stage's time per layer to that of another one, the median over the same passes.

    It is 1 if the difference is within that of two measurements of one stage.
    """
    found = median(one.took / other.took for one, other in zip(passes, others))
    return 1.0 if abs(found - 1) <= ALIKE else round(found, 3)


# --- levels, verdicts and messages ------------------------------------------------------------------------------------

def _run(config: PlanConfig, run: RunConfig, trace: str) -> Moments:
    """Let each draft answer in a pipeline with a trace in a folder, and return begin and end of each one."""
    request, moments = Request(PROMPT, Sampler(), TOKENS), {}
    with redirect_stderr(io.StringIO()), opened(run, trace=trace) as pipeline:  # messages about the trace are noise
        plain = pipeline.decoder_for(config.single(pipeline_type="ar"))
        for kind in config.kinds:
            decoder = pipeline.decoder_for(config.single(pipeline_type="serial", draft=kind))
            since = time.monotonic()
            decoder.complete(request)
            for network in decoder.draft.networks:
                moments[network.source or kind] = since, time.monotonic()
            plain.complete(request)
    return moments


def _took(spans: Sequence[Span], name: str, since: float = 0.0, until: float = math.inf) -> float:
    """Return the median milliseconds of the spans of this name that began within an interval; 0 if none exists."""
    named = [span for span in spans if span["name"] == name]
    seconds = [span["t1"] - span["t0"] for span in named if since <= span["t0"] < until]
    return 1e3 * median(seconds) if seconds else 0.0


def _messages(spans: Sequence[Span], world: int, row_bytes: int) -> tuple[float, float]:
    """Return the milliseconds of a message of one row, and Mbit/s, from the messages of all ranks except rank 0."""
    came = {(span["rank"], span["nodes"][0]): span["t1"]
            for span in spans if span["name"] == "recv"}
    trips = []
    for span in spans:
        rank, nodes = span["rank"], span["nodes"]
        arrived = came.get(((rank + 1) % world, nodes[0]))
        if span["name"] == "send" and rank and arrived:
            trips.append((len(nodes), arrived - span["t1"]))
    short = [seconds for rows, seconds in trips if rows == 1]
    long = [trip for trip in trips if trip[0] > 1]
    latency = max(0.0, median(short)) if short else 0.0
    rows, seconds = map(median, zip(*long)) if long else (0, 0.0)
    slower = seconds - latency
    rate = rows * row_bytes * 8 / slower / 1e6 if slower > 0 else RATES[1]
    return 1e3 * latency, _believed(rate)


# --- candidates -------------------------------------------------------------------------------------------------------
# The stages above are timed one by one, but the ranks of one machine share its cores. So a simulation is inaccurate
# there, and the best candidates of a plan are measured.

def check(config: PlanConfig, book: Book, candidates: Sequence[Candidate]) -> list[Trial]:
    """Let candidates answer the first recorded questions in pipelines on this machine; keep the shorter time of each.

    A candidate that fails here, such as for lack of memory, is skipped; for plain decoding the error is raised.
    """
    found = []
    for one in ProgressBar(candidates, desc="check", unit="candidate", leave=False):
        try:
            with opened(config.single(**values(one.keys))) as pipeline:
                rounds = [answers_of(pipeline, book.answers[:ANSWERS], TOKENS) for _ in range(ROUNDS)]
        except (ValueError, PeerLost):
            if one.plain:
                raise
        else:
            shorter = [min(tries, key=attrgetter("seconds")) for tries in zip(*rounds)]
            found.append(Trial(one, shorter, {}))
    return found


def answers_of(pipeline: Pipeline, asked: Sequence[Written], tokens: int) -> list[Answer]:
    """Return the answers to these questions, of at most `tokens` tokens each."""
    assert pipeline.text is not None, "questions need a tokenizer"
    ends, sampler = frozenset(pipeline.text.end_ids), sampler_of(pipeline.config)
    requests = [Request(one.prompt, sampler, tokens, ends) for one in asked]
    return list(map(pipeline.decoder.complete, requests))


def opened(run: RunConfig, **more: Any) -> Pipeline:
    """Open a pipeline with these keys, regardless of presets."""
    differ = dict(vars(run).items() - vars(RunConfig()).items())
    if "ssm" not in run.sources:
        differ.pop("ssm", None)
    return Pipeline.open("toy", **{"pipeline_type": run.pipeline_type, **differ, **more})
