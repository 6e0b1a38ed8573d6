"""What a pipeline's own devices take: stages by rows and context, draft levels, verdicts, messages; kept in a file.

Stages are measured one after the other, alone in this process; levels, verdicts and messages in a pipeline that runs.
"""
from __future__ import annotations

import io
import sys
import tempfile
import time
from contextlib import redirect_stderr
from pathlib import Path
from statistics import median
from typing import Any, Iterator, NamedTuple, Sequence

import numpy as np
import torch
from tqdm import tqdm

from config.boards import Boards, read, write
from config.plan_config import PlanConfig
from config.run_config import RunConfig
from eval.plan.check import opened
from launch.build import build_stage
from launch.prepare import open_part, prepare
from launch.spec import RankSpec
from model.sample import Sampler
from pipeline.decode import Request
from pipeline.messages import Reset, Segment
from pipeline.stage import Stage
from pipeline.trace import OFF
from pipeline.trace import read as read_trace

ROWS = (1, 16, 32, 64, 128)
CONTEXTS = (16, 512)  # tokens of text before them
FREE = (0, 16, 32, 64)  # rows that may cost nothing
KEPT = ([0], [0, 1], [0, 2], [0, 1, 2])  # which of a pass, a row and a token may take time
ROUNDS = 4  # of each pass, of which the shortest counts
TOKENS = 24  # of an answer in which levels and messages are measured
STEP = 1.4  # ms: by which a step of a collective is longer than a message
RATES = 10.0, 100_000.0  # Mbit/s, between which a measured rate is believed
PROMPT = list(range(1, 33))


class Passed(NamedTuple):
    """A pass of a stage with all its layers, in milliseconds of the whole model."""

    rows: int
    context: int
    took: float


def measured(config: PlanConfig) -> Boards:
    """The cluster as it was measured: out of the file, if it is there, or now. Raises ValueError for another model's.
    """
    model = Path(config.base_dir or config.model_dir).name
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


def measure(config: PlanConfig, model: str) -> Boards:
    """Measure the pipeline that the keys of a run start."""
    run = config.run(pipeline_type="serial", draft=(*config.kinds, "suffix")[0])
    folder, placement = prepare(run)
    parts = [RankSpec(run, open_part(folder, rank)) for rank in range(1, placement.world)]
    stages = [list(_passes(spec)) for spec in tqdm(parts, desc="stages", leave=False, file=sys.stderr)]
    base = min(stages, key=lambda passes: sum(one.took for one in passes))
    sizes = parts[0].sizes
    width = parts[0].like.element_size()
    weights = sum(spec.part.weights.form(name).bytes for spec in parts for name in spec.part.weights.names()) / 1e9
    with tempfile.TemporaryDirectory(prefix="flowspec-") as trace:
        levels = _run(config, run, trace)
        verdict, latency, rate = _messages(read_trace(trace), placement.world, sizes.hidden * width)
    whole, row, free, token = fit(base)
    factors = tuple(round(times_as_long(passes, base), 3) for passes in stages)
    return Boards(
        f"measured here with {model}", sizes.layers, sizes.hidden * width, whole, row, int(free), token,
        min(levels.values(), default=0.0), verdict, latency, rate, latency + STEP, weights=weights,
        factors=factors, levels=tuple(levels.items()), model_of=model)


# --- stages -----------------------------------------------------------------------------------------------------------

def _passes(spec: RankSpec) -> Iterator[Passed]:
    """Passes of one stage, with the time that all layers would take."""
    first, last = spec.part.layers
    whole_model = 1e3 * spec.sizes.layers / (last - first)
    stage, inputs = build_stage(spec, OFF), spec.like.new_zeros(1, spec.sizes.hidden)
    for request, context in enumerate(context for context in CONTEXTS if context + max(ROWS) < spec.context):
        _apply(stage, request, range(context), context, inputs if first else None)
        begin = context
        for rows in (ROWS[0], *ROWS):  # the first pass warms up
            took = []
            for _ in range(ROUNDS):
                nodes = range(begin, begin + rows)
                since = time.perf_counter()
                _apply(stage, request, nodes, context, inputs if first else None)
                took.append(time.perf_counter() - since)
                begin += rows
                stage.cache(request).prune(context - 1, context - 2, [], begin)
            yield Passed(rows, context, min(took) * whole_model)
        stage.apply(Reset(request))


def _apply(stage: Stage, request: int, nodes: range, context: int, inputs: torch.Tensor | None) -> None:
    """A segment of text, or of guesses that all stand on its last token."""
    ids = list(nodes)
    is_text = ids[0] == 0
    parents = [max(0, node - 1) for node in ids] if is_text else [context - 1] * len(ids)
    pos = ids if is_text else [context] * len(ids)
    rows = len(ids)
    x = torch.ones(rows, dtype=torch.long) if inputs is None else inputs.expand(rows, -1).clone()
    text = rows if is_text else 0
    stage.apply(Segment(request, ids, parents, pos, text, x, None))


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
    """How many times as long a stage takes for a layer as another one, in the median of the same passes."""
    return median(one.took / other.took for one, other in zip(passes, others))


# --- levels, verdicts and messages ------------------------------------------------------------------------------------

def _run(config: PlanConfig, run: RunConfig, trace: str) -> dict[str, float]:
    """Milliseconds of a level of each draft, in a pipeline whose trace goes into a folder."""
    spent, moments = {}, {}
    with redirect_stderr(io.StringIO()), opened(run, trace=trace) as pipeline:  # of the trace nobody wants to hear
        for kind in config.kinds:
            decoder = pipeline.decoder_for(config.run(pipeline_type="serial", draft=kind))
            for method in (decoder, pipeline.decoder_for(config.run(pipeline_type="ar"))):
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
    return verdict, 1e3 * latency, min(max(rate, RATES[0]), RATES[1])
