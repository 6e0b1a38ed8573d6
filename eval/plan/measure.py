"""What a pipeline's own devices take: stages by rows and context, draft levels, verdicts, messages; kept in a file.

Stages are measured one after the other, alone in this process, or on the boards of a hosts file; levels, verdicts and
messages in a pipeline that runs here.
"""
from __future__ import annotations

import io
import sys
import time
from contextlib import redirect_stderr
from pathlib import Path
from statistics import median
from typing import Any, Sequence

import numpy as np
from tqdm import tqdm

from config.profiles import Profile, read, write
from config.run_config import RunConfig
from eval.plan.check import opened
from eval.plan.hosts import Measured, boards_of, measured_boards
from eval.plan.keys import PlanConfig
from launch.build import build_stage
from launch.folder import private_folder
from launch.hosts.timing import Passed, passes
from launch.prepare import prepare
from launch.spec import RankSpec
from model.sample import Sampler
from pipeline.decode import Request
from pipeline.trace import OFF
from pipeline.trace import read as read_trace

FREE = (0, 16, 32, 64)  # rows that may cost nothing
KEPT = ([0], [0, 1], [0, 2], [0, 1, 2])  # which of a pass, a row and a token may take time
TOKENS = 24  # of an answer in which levels and messages are measured
ALIKE = 0.1  # by which times of one board may differ from one measurement to another
STEP = 1.4  # ms: by which a step of a collective is longer than a message
RATES = 10.0, 100_000.0  # Mbit/s, between which a measured rate is believed
PROMPT = list(range(1, 33))


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
    others: list[Measured] = []
    if config.run.hosts:
        others = measured_boards(config.run.hosts, _asked(parts[0], len(boards_of(config.run.hosts))))
        stages = [other.passes for other in others]
    else:
        stages = [_passes(spec) for spec in tqdm(parts, desc="stages", leave=False, file=sys.stderr)]
    with private_folder() as trace:
        levels = _run(config, run, trace)
        verdict, latency, rate = _messages(read_trace(trace), world, sizes.hidden * width)
    base = min(stages, key=lambda passes: sum(one.took for one in passes))
    whole, row, free, token = fit(base)
    links = tuple((0, rank, other.latency, _believed(other.mbps)) for rank, other in enumerate(others, 1))
    if links:
        latency, rate = (median(link[place] for link in links) for place in (2, 3))
    return Profile(
        f"measured {'over ssh' if others else 'here'} with {model}", sizes.layers, sizes.hidden * width, whole, row,
        free, token, min(levels.values(), default=0.0), verdict, latency, rate, latency + STEP,
        weights=_gigabytes(parts), factors=tuple(times_as_long(passes, base) for passes in stages),
        levels=tuple(levels.items()), links=links, model_of=model)


def _gigabytes(parts: Sequence[RankSpec]) -> float:
    """GB of all layers, as they are kept."""
    return sum(spec.part.weights.form(name).bytes for spec in parts for name in spec.part.weights.names()) / 1e9


def _believed(rate: float) -> float:
    """A measured rate in Mbit/s, within what a wire may have."""
    return min(max(rate, RATES[0]), RATES[1])


# --- stages -----------------------------------------------------------------------------------------------------------

def _passes(spec: RankSpec) -> list[Passed]:
    """Passes of one stage of this machine."""
    first, last = spec.part.layers
    inputs = spec.like.new_zeros(1, spec.sizes.hidden) if first else None
    stage = build_stage(spec, OFF)
    return list(passes(stage, inputs, spec.sizes.layers / (last - first), spec.context))


def _asked(spec: RankSpec, boards: int) -> dict[str, Any]:
    """What boards are asked: the layers that each has if they share the model evenly."""
    run = spec.config
    return {"config": spec.part.config, "layers": max(1, spec.sizes.layers // boards), "dtype": run.dtype,
            "device": run.device, "quant": spec.quant, "threads": run.threads_per_rank, "context": spec.context}


def fit(passes: Sequence[Passed]) -> tuple[float, float, int, float]:
    """Milliseconds of a pass, of a row above those that are free, how many these are, and of a token of the text.

    They are those of a profile that come closest to all passes, by the share of each, none below zero.
    """
    took = np.array([one.took for one in passes])
    context = np.array([one.context for one in passes])
    best: tuple[float, tuple[float, float, int, float]] | None = None
    for free in FREE:
        rows = np.array([max(0, one.rows - free) for one in passes])
        columns = np.stack([np.ones_like(took), rows, context], -1) / took[:, None]
        for kept in KEPT:
            found = np.zeros(3)
            found[kept] = np.linalg.lstsq(columns[:, kept], np.ones_like(took), rcond=None)[0]
            off = float(np.square(columns @ found - 1).sum())
            if found.min() >= 0 and (best is None or off < best[0]):
                best = off, (max(float(found[0]), 1e-3), float(found[1]), free, float(found[2]))
    assert best is not None, "no pass was measured"
    return best[1]


def times_as_long(passes: Sequence[Passed], others: Sequence[Passed]) -> float:
    """How many times as long a stage takes for a layer as another one, in the median of the same passes.

    It is 1 if that is no more than two measurements of one stage may differ.
    """
    found = median(one.took / other.took for one, other in zip(passes, others))
    return 1.0 if abs(found - 1) <= ALIKE else round(found, 3)


# --- levels, verdicts and messages ------------------------------------------------------------------------------------

def _run(config: PlanConfig, run: RunConfig, trace: str) -> dict[str, float]:
    """Milliseconds of a level of each draft, in a pipeline whose trace goes into a folder."""
    spent, moments = {}, {}
    with redirect_stderr(io.StringIO()), opened(run, trace=trace) as pipeline:  # of the trace nobody wants to hear
        for kind in config.kinds:
            decoder = pipeline.decoder_for(config.single(pipeline_type="serial", draft=kind))
            for method in (decoder, pipeline.decoder_for(config.single(pipeline_type="ar"))):
                since = time.monotonic()
                method.whole(Request(PROMPT, Sampler(), TOKENS))
                if method is decoder:
                    for network in decoder.draft.networks:
                        moments[getattr(network, "source", kind)] = since, time.monotonic()
    spans = [span for span in read_trace(trace) if span["name"] == "grow" and span["nodes"]]
    for name, (since, until) in moments.items():
        took = [span["t1"] - span["t0"] for span in spans if since <= span["t0"] < until]
        spent[name] = 1e3 * median(took) if took else 0.0
    return spent


def _by_first(spans: Sequence[dict[str, Any]], name: str) -> dict[tuple[int, int], dict[str, Any]]:
    """The spans of this name that have nodes, by their rank and their first node."""
    named = [span for span in spans if span["name"] == name and span.get("nodes")]
    return {(span["rank"], span["nodes"][0]): span for span in named}


def _messages(spans: Sequence[dict[str, Any]], world: int, row_bytes: int) -> tuple[float, float, float]:
    """Milliseconds of a verdict and of a message of one row, and Mbit/s."""
    verdicts = [span["t1"] - span["t0"] for span in spans if span["name"] == "verify" and span["nodes"]]
    left, came = (_by_first(spans, name) for name in ("send", "recv"))
    short: list[tuple[float, int]] = []  # seconds and rows of messages of one row …
    long: list[tuple[float, int]] = []  # … and of more
    for (rank, node), span in left.items():
        there = came.get(((rank + 1) % world, node))
        if there is not None and rank:
            rows = len(span["nodes"])
            (short if rows == 1 else long).append((there["t1"] - span["t1"], rows))
    latency = max(0.0, median(took for took, _ in short)) if short else 0.0
    slower = median(took for took, _ in long) - latency if long else 0.0
    more = median(rows for _, rows in long) if long else 0
    rate = more * row_bytes * 8 / slower / 1e6 if slower > 0 else RATES[1]
    verdict = 1e3 * median(verdicts) if verdicts else 0.0
    return verdict, 1e3 * latency, _believed(rate)
