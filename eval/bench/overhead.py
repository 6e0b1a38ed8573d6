"""The cost of the pipeline without the model: the time of rank 0 in a turn, of a stage in a segment, of each link.

Rank 0 answers a few questions with a trace, and the times are read from the spans of all ranks.
"""
from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from statistics import median
from typing import Any, Callable, Dict, Iterable, Sequence

from config.keys import raw_values, with_defaults
from config.presets import TOY_PRESET
from config.run_config import RunConfig
from eval.bench import QUESTIONS, request
from launch.pipeline import Pipeline
from launch.run import Command, run
from model.drafts.draft import NoDraft
from pipeline.decode import Decoder, PipelineLimits
from pipeline.strategies import autoregressive
from pipeline.trace import NoTrace, read

LARGE = "64 nodes"  # the decoder whose turns are measured
WIDE = 48  # rows from which a segment counts as wide
Span = Dict[str, Any]
Forward = Callable[..., Any]


def overhead(argv: list[str]) -> int:
    """Execute `python3 -m scripts.bench overhead`; return its exit code."""
    defaults = {"max_new_tokens": "64"}
    launches = "RANK" not in os.environ  # else this is one of the ranks, which was given the folder of the traces
    if launches:
        defaults["trace"] = tempfile.mkdtemp(prefix="flowspec-")
    asked = with_defaults(argv, defaults, TOY_PRESET)
    code = run(Command("scripts.bench overhead", compare), asked)
    if code == 0 and launches:
        report(raw_values(asked)["trace"])
    return code


def compare(pipeline: Pipeline) -> None:
    """Answer, on rank 0, a few questions with ar, with trees of 64 nodes and with the preset's trees in turn."""
    preset, limits = pipeline.decoder, PipelineLimits(pipeline.decoder.max_length)
    large = replace(RunConfig(), init_total_token=64, expand_total_token=64)
    _watch(preset.draft.networks, pipeline.ring, pipeline.rank.trace)
    decoders = {
        "ar": Decoder(preset.ring, NoDraft(), autoregressive, pipeline.config.tree, limits),
        LARGE: Decoder(preset.ring, preset.draft, preset.strategy, large.tree, limits),
        "preset": preset}
    speeds: dict[str, list[float]] = {name: [] for name in decoders}
    for i, question in enumerate([QUESTIONS[0], *QUESTIONS]):  # the first round warms up
        asked, texts = request(pipeline, question), set()
        for name, decoder in decoders.items():
            with pipeline.rank.trace.span(name if i else "warm-up"):
                answer = decoder.complete(asked)
            texts.add(tuple(answer.token_ids))
            speeds[name].append(answer.tokens_per_second)
        assert len(texts) == 1, f"{', '.join(decoders)} wrote {len(texts)} different texts for {question!r}"
    print("tokens/s, median of five answers in one run")
    for name, speed in speeds.items():
        label = name if name == "ar" else f"{pipeline.config.pipeline_type}, {name}"
        ratio = median(a / b
                       for a, b in zip(speed[1:], speeds["ar"][1:]))
        print(f"  {label:<36}{median(speed[1:]):8.1f}   {ratio:.2f}x ar")


def _watch(networks: Sequence[Any], ring: Any, trace: NoTrace) -> None:
    """Add a span around the models' work on rank 0: the drafts' reading and guessing, and the target's LM head."""
    def watched(forward: Forward) -> Forward:
        def watching(*args: Any) -> Any:
            with trace.span("model"):
                return forward(*args)
        return watching

    for network in networks:
        for name in ("read", "guess", "predict"):
            setattr(network, name, watched(getattr(network, name)))
    ring.lm_head = watched(ring.lm_head)


def report(folder: str) -> None:
    """Print the table of times during decoding with large trees, from the spans of all ranks in this folder."""
    spans = read(folder)
    windows = [(span["t0"], span["t1"])
               for span in spans if span["name"] == LARGE]
    spans = [span for span in spans
             if any(begin <= span["t0"] and span["t1"] <= end for begin, end in windows)]
    ranks = sorted({span["rank"] for span in spans})
    print("\nmedian, and 90th percentile, in milliseconds")
    _print_row("rank 0, own time per turn", own_times(spans, 0, "model"))
    for number in ranks[1:]:
        _print_row(f"rank {number}, own time per segment", own_times(spans, number, "forward"))
    for number, following in zip(ranks, [*ranks[1:], ranks[0]]):
        link = f"link {number} -> {following}"
        _print_row(link, flights(spans, number, following, 1))
        _print_row(f"{link}, {WIDE} rows or more", flights(spans, number, following, WIDE))


def own_times(spans: list[Span], number: int, model: str) -> list[float]:
    """Return a rank's seconds between two waits, without its spans named `model`; only turns with such spans count."""
    mine = [span for span in spans if span["rank"] == number]
    waits = [span for span in mine if span["name"] == "wait"]
    forwards = [span for span in mine if span["name"] == model]
    own = []
    for before, after in zip(waits, waits[1:]):
        begin, end = before["t1"], after["t0"]
        inside = [span["t1"] - span["t0"]
                  for span in forwards if begin <= span["t0"] <= end]
        if inside:
            own.append(end - begin - sum(inside))
    return own


def flights(spans: list[Span], sender: int,
            receiver: int, rows: int) -> list[float]:
    """Return the seconds from the call that sends a segment of at least `rows` rows to its arrival at the next rank."""
    sent = {tuple(span["nodes"]): span["t0"] for span in spans
            if span["name"] == "send" and span["rank"] == sender and len(span["nodes"]) >= rows}
    arrivals = [span for span in spans if span["name"] == "recv" and span["rank"] == receiver]
    return [span["t1"] - sent[tuple(span["nodes"])]
            for span in arrivals if tuple(span["nodes"]) in sent]


def _print_row(name: str, seconds: Iterable[float]) -> None:
    values = sorted(1e3 * value for value in seconds)
    if values:
        high = values[int(0.9 * len(values))]
        print(f"  {name:<36}{median(values):8.3f}{high:9.3f}   of {len(values)}")
