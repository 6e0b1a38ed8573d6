"""What a pipeline's own devices take: stages by rows and context, draft levels, verdicts, messages; kept in a file.

What candidates of a plan take on this machine itself.

Stages are measured one after the other, alone in this process, or on the boards of a hosts file; levels, verdicts and
messages in a pipeline that runs here.
"""
from __future__ import annotations

import io
import sys
import time
from contextlib import redirect_stderr
from dataclasses import fields
from itertools import combinations
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any, Dict, NamedTuple, Sequence

import numpy as np
from tqdm import tqdm

from config.profiles import Profile, read, touched, write
from config.run_config import RunConfig
from eval.plan.candidates import Candidate
from eval.plan.hosts import boards_of, measured_boards
from eval.plan.keys import PlanConfig
from eval.plan.record import Book, Written
from eval.plan.trial import values
from eval.recorded import sampler_of
from launch.build import build_stage
from launch.folder import private_folder
from launch.hosts.timing import Passed, inputs, passes
from launch.pipeline import Pipeline
from launch.prepare import prepare
from launch.spec import RankSpec
from model.sample import Sampler
from pipeline.decode import Request
from pipeline.failure import PeerLost
from pipeline.trace import OFF
from pipeline.trace import read as read_trace

FREE = (0, 16, 32, 64)  # rows that may cost nothing
KEPT = [[0, *more] for count in range(4) for more in combinations((1, 2, 3), count)]  # which columns of `fit` take time
TOKENS = 24  # of an answer
ALIKE = 0.1  # by which times of one board may differ from one measurement to another
STEP = 1.4  # ms: by which a step of a collective is longer than a message
Span = Dict[str, Any]  # of a trace
RATES = 10.0, 100_000.0  # Mbit/s, between which a measured rate is believed
PROMPT = list(range(1, 33))
ANSWERS = 3  # how much of the record is answered by candidates that are tried here
ROUNDS = 2  # of each answer, of which the shorter counts


def measured(config: PlanConfig) -> Profile:
    """The cluster as it was measured: out of the file, if it is there, or now. Raises ValueError for another model's.
    """
    model = Path(config.run.base_dir or config.run.model_dir).name
    if config.measured and Path(config.measured).is_file():
        found = read(config.measured)
        if found.model_of != model:
            raise ValueError(f"{config.measured} was measured with {found.model_of or 'no model'}, and this is "
                             f"{model}: name another measured=, and add measure=true")
        return found
    if not config.measure:
        raise ValueError(f"there is no file {config.measured}: add measure=true to write it")
    made = measure(config, model)
    if config.measured:
        write(config.measured, made)
    return made


def measure(config: PlanConfig, model: str) -> Profile:
    """Measure the pipeline that the keys of a run start; of a hosts file the boards, in place of its stages."""
    run = config.single(pipeline_type="serial", draft=(*config.kinds, "suffix")[0])
    prepared = prepare(run)
    world = prepared.placement.world
    parts = [prepared.spec(rank) for rank in range(1, world)]
    sizes, width = parts[0].sizes, parts[0].like.element_size()
    hosts, row_bytes = config.run.hosts, sizes.hidden * width
    others = measured_boards(hosts, _asked(parts[0], len(boards_of(hosts)))) if hosts else []
    stages = [other.passes for other in others]
    if not hosts:
        stages = list(map(_passes, tqdm(parts, desc="stages", leave=False, file=sys.stderr)))
    with private_folder() as trace:
        levels = _run(config, run, trace)
        verdict, latency, rate = _messages(read_trace(trace), world, row_bytes)
    links = tuple((0, rank, other.latency, _believed(other.mbps)) for rank, other in enumerate(others, 1))
    if links:
        _, _, latencies, rates = zip(*links)
        latency, rate = median(latencies), median(rates)
    base = min(stages, key=lambda passes: sum(one.took for one in passes))
    factors = tuple(times_as_long(passes, base) for passes in stages)
    kinds = sizes.experts, sizes.chosen
    whole, row, free, token, expert = fit(base, *kinds)
    where, level = "over ssh" if hosts else "here", min(levels.values(), default=0.0)
    return Profile(
        f"measured {where} with {model}", sizes.layers, row_bytes, whole, row, free, token, level, verdict,
        latency, rate, step=latency + STEP, weights=sum(map(_gigabytes, parts)), factors=factors,
        levels=tuple(levels.items()), links=links, model_of=model,
        expert=expert, experts=kinds[0], chosen=kinds[1])


def _gigabytes(spec: RankSpec) -> float:
    """GB of a stage's layers, as they are kept."""
    weights = spec.part.weights
    return sum(weights.form(name).bytes for name in weights.names()) / 1e9


def _believed(rate: float) -> float:
    """A measured rate in Mbit/s, within what a wire may have."""
    return min(max(rate, RATES[0]), RATES[1])


# --- stages -----------------------------------------------------------------------------------------------------------

def _passes(spec: RankSpec) -> list[Passed]:
    """Passes of one stage of this machine."""
    first, last = spec.part.layers
    share = spec.sizes.layers / (last - first)
    rows = inputs(spec.sizes, spec.like, first == 0)
    return list(passes(build_stage(spec, OFF), rows, share, spec.context))


def _asked(spec: RankSpec, boards: int) -> dict[str, Any]:
    """What boards are asked: the layers that each has if they share the model evenly."""
    run, layers = spec.config, spec.sizes.layers // boards
    return {"config": spec.part.config, "layers": max(1, layers), "dtype": run.dtype, "device": run.device,
            "quant": spec.quant, "threads": run.threads_per_rank, "context": spec.context}


def fit(passes: Sequence[Passed], experts: int = 0, chosen: int = 0) -> tuple[float, float, int, float, float]:
    """Milliseconds of a pass, of a row above those that are free, how many these are, of a token of the text, and of
    an expert more.

    They are those of a profile that come closest to all passes, by the share of each, none below zero.
    """
    asked, context, took = np.array(passes).T
    target = np.ones_like(took)
    more = np.zeros_like(took)
    if experts:
        more = np.array([touched(experts, chosen, rows) for rows in asked]) - chosen
    found = []
    for free in FREE:
        rows = np.maximum(0, asked - free)
        columns = np.stack([target, rows, context, more], -1) / took[:, None]
        for kept in KEPT:
            times = np.zeros(4)
            times[kept] = np.linalg.lstsq(columns[:, kept], target, rcond=None)[0]
            off = float(np.square(columns @ times - 1).sum())
            if times.min() >= 0:
                whole, row, token, expert = times.tolist()
                found.append((off, (max(whole, 1e-3), row, free, token, expert)))
    assert found, "no pass was measured"
    return min(found, key=itemgetter(0))[1]


def times_as_long(passes: Sequence[Passed], others: Sequence[Passed]) -> float:
    """How many times as long a stage takes for a layer as another one, in the median of the same passes.

    It is 1 if that is no more than two measurements of one stage may differ.
    """
    found = median(one.took / other.took for one, other in zip(passes, others))
    return 1.0 if abs(found - 1) <= ALIKE else round(found, 3)


# --- levels, verdicts and messages ------------------------------------------------------------------------------------

def _run(config: PlanConfig, run: RunConfig, trace: str) -> dict[str, float]:
    """Milliseconds of a level of each draft, in a pipeline whose trace goes into a folder."""
    request, moments = Request(PROMPT, Sampler(), TOKENS), {}
    with redirect_stderr(io.StringIO()), opened(run, trace=trace) as pipeline:  # of the trace nobody wants to hear
        plain = pipeline.decoder_for(config.single(pipeline_type="ar"))
        for kind in config.kinds:
            decoder = pipeline.decoder_for(config.single(pipeline_type="serial", draft=kind))
            since = time.monotonic()
            decoder.whole(request)
            for network in decoder.draft.networks:
                moments[getattr(network, "source", kind)] = since, time.monotonic()
            plain.whole(request)
    grown = [span for span in read_trace(trace) if span["name"] == "grow" and span["nodes"]]
    spent = {}
    for name, (since, until) in moments.items():
        took = [_seconds(span) for span in grown if since <= span["t0"] < until]
        spent[name] = 1e3 * median(took) if took else 0.0
    return spent


def _seconds(span: Span) -> float:
    took: float = span["t1"] - span["t0"]
    return took


def _messages(spans: Sequence[Span], world: int, row_bytes: int) -> tuple[float, float, float]:
    """Milliseconds of a verdict and of a message of one row, and Mbit/s."""
    verdicts, came, trips = [], {}, []
    filled = [span for span in spans if span.get("nodes")]
    for span in filled:
        if span["name"] == "judge":
            verdicts.append(_seconds(span))
        elif span["name"] == "recv":
            came[span["rank"], span["nodes"][0]] = span
    for span in filled:
        rank, nodes = span["rank"], span["nodes"]
        there = came.get(((rank + 1) % world, nodes[0]))
        if span["name"] == "send" and rank and there:
            trips.append((len(nodes), there["t1"] - span["t1"]))
    short = [seconds for rows, seconds in trips if rows == 1]
    long = [trip for trip in trips if trip[0] > 1]
    latency, rate = max(0.0, median(short)) if short else 0.0, RATES[1]
    if long:
        rows, seconds = map(median, zip(*long))
        slower = seconds - latency
        rate = rows * row_bytes * 8 / slower / 1e6 if slower > 0 else rate
    verdict = 1e3 * median(verdicts) if verdicts else 0.0
    return verdict, 1e3 * latency, _believed(rate)


# --- candidates -------------------------------------------------------------------------------------------------------
# The stages above were timed one after the other, while the ranks of one machine share its cores: what a simulation
# cannot know is in what the best candidates of a plan take there.

class Checked(NamedTuple):
    """A candidate, and the tokens per second with which it answered here, prefill included."""

    candidate: Candidate
    speed: float


def check(config: PlanConfig, book: Book, candidates: Sequence[Candidate]) -> list[Checked]:
    """Let candidates answer the first recorded questions in pipelines of this machine.

    One that does not run here, as for want of memory, is left out; plain decoding raises what is wrong.
    """
    found = []
    for one in tqdm(candidates, desc="check", unit="candidate", leave=False, file=sys.stderr):
        try:
            found.append(Checked(one, _speed(config, book, one)))
        except (ValueError, PeerLost):
            if one.plain:
                raise
    return found


def _speed(config: PlanConfig, book: Book, one: Candidate) -> float:
    answers = book.answers[:ANSWERS]
    with opened(config.single(**values(one.keys))) as pipeline:
        rounds = [seconds(pipeline, book, answers, TOKENS) for _ in range(ROUNDS)]
    tokens = sum(min(TOKENS, len(answer.text)) for answer in answers)
    return tokens / sum(map(min, zip(*rounds)))


def seconds(pipeline: Pipeline, book: Book, answers: Sequence[Written], tokens: int) -> list[float]:
    """Seconds of each of these answers of at most so many tokens, prefill included."""
    ends, sampler = frozenset(book.ends), sampler_of(pipeline.config)
    made = (pipeline.decoder.whole(Request(one.prompt, sampler, tokens, ends)) for one in answers)
    return [answer.seconds for answer in made]


def opened(run: RunConfig, **more: Any) -> Pipeline:
    """A pipeline of these keys, whatever a preset says."""
    usual = RunConfig()
    differ = {key.name: getattr(run, key.name) for key in fields(RunConfig)
              if getattr(run, key.name) != getattr(usual, key.name)}
    if "ssm" not in run.sources:
        differ.pop("ssm", None)
    return Pipeline.open("toy", **{**differ, **more})
