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
from eval.bench import QUESTIONS, request_for
from launch.pipeline import Pipeline
from launch.run import Command, run
from model.drafts.draft import NoDraft
from pipeline.decode import Decoder, PipelineLimits
from pipeline.strategies import autoregressive
from pipeline.trace import NoTrace, read

LARGE_TREES = "64 nodes"  # name of the decoder whose turns are measured
WIDE_ROWS = 48  # from which a segment counts as wide
TraceSpan = Dict[str, Any]
LayersForward = Callable[..., Any]


def overhead(argv: list[str]) -> int:
    """Execute `python3 -m scripts.bench overhead`; return its exit code."""
    default_keys = {"max_new_tokens": "64"}
    is_launcher = "RANK" not in os.environ  # else this is one of the ranks, which was given the folder of the traces
    if is_launcher:
        default_keys["trace"] = tempfile.mkdtemp(prefix="flowspec-")

    all_words = with_defaults(argv, default_keys, TOY_PRESET)
    exit_code = run(Command("scripts.bench overhead", compare), all_words)
    if exit_code == 0 and is_launcher:
        report(raw_values(all_words)["trace"])
    return exit_code


def compare(pipeline: Pipeline) -> None:
    """Answer, on rank 0, a few questions with ar, with trees of 64 nodes and with the preset's trees in turn."""
    preset, limits = pipeline.decoder, PipelineLimits(pipeline.decoder.max_length)
    large_run = replace(RunConfig(), init_total_token=64, expand_total_token=64)
    _add_model_spans(preset.draft.networks, pipeline.ring, pipeline.rank.trace)
    decoders = {
        "ar": Decoder(preset.ring, NoDraft(), autoregressive, pipeline.config.tree, limits),
        LARGE_TREES: Decoder(preset.ring, preset.draft, preset.strategy, large_run.tree, limits),
        "preset": preset}

    # answers
    speeds: dict[str, list[float]] = {name: [] for name in decoders}
    for i, question in enumerate([QUESTIONS[0], *QUESTIONS]):  # the first round warms up
        question_request, texts = request_for(pipeline, question), set()
        for name, decoder in decoders.items():
            with pipeline.rank.trace.span(name if i else "warm-up"):
                answer = decoder.complete(question_request)
            texts.add(tuple(answer.token_ids))
            if i:
                speeds[name].append(answer.tokens_per_second)
        assert len(texts) == 1, f"{', '.join(decoders)} wrote {len(texts)} different texts for {question!r}"

    # table
    print("tokens/s, median of five answers in one run")
    for name, decoder_speeds in speeds.items():
        label = name if name == "ar" else f"{pipeline.config.pipeline_type}, {name}"
        ratio = median(speed / ar_speed for speed, ar_speed in zip(decoder_speeds, speeds["ar"]))
        print(f"  {label:<36}{median(decoder_speeds):8.1f}   {ratio:.2f}x ar")


def _add_model_spans(networks: Sequence[Any], ring: Any, trace: NoTrace) -> None:
    """Add a span around the models' work on rank 0: the drafts' reading and guessing, and the target's LM head."""
    def with_span(forward: LayersForward) -> LayersForward:
        def traced_forward(*args: Any) -> Any:
            with trace.span("model"):
                return forward(*args)
        return traced_forward

    for network in networks:
        for name in ("read", "guess", "predict"):
            setattr(network, name, with_span(getattr(network, name)))
    ring.lm_head = with_span(ring.lm_head)


def report(trace_dir: str) -> None:
    """Print the table of times during decoding with large trees, from the spans of all ranks in this folder."""
    all_spans = read(trace_dir)
    windows = [(span["t0"], span["t1"]) for span in all_spans if span["name"] == LARGE_TREES]
    spans = [span for span in all_spans
             if any(begin <= span["t0"] and span["t1"] <= end for begin, end in windows)]
    ranks = sorted({span["rank"] for span in spans})

    print("\nmedian, and 90th percentile, in milliseconds")
    _print_row("rank 0, own time per turn", own_times(spans, 0, "model"))
    for rank in ranks[1:]:
        _print_row(f"rank {rank}, own time per segment", own_times(spans, rank, "forward"))

    for sender, receiver in zip(ranks, [*ranks[1:], ranks[0]]):
        link = f"link {sender} -> {receiver}"
        _print_row(link, flights(spans, sender, receiver, 1))
        _print_row(f"{link}, {WIDE_ROWS} rows or more", flights(spans, sender, receiver, WIDE_ROWS))


def own_times(spans: list[TraceSpan], rank_number: int, model_span: str) -> list[float]:
    """Return a rank's seconds between two waits, without its spans named `model_span`; only turns with these count."""
    rank_spans = [span for span in spans if span["rank"] == rank_number]
    waits = [span for span in rank_spans if span["name"] == "wait"]
    forwards = [span for span in rank_spans if span["name"] == model_span]

    seconds = []
    for before, after in zip(waits, waits[1:]):
        begin, end = before["t1"], after["t0"]
        model_seconds = [span["t1"] - span["t0"]
                         for span in forwards if begin <= span["t0"] <= end]
        if model_seconds:
            seconds.append(end - begin - sum(model_seconds))
    return seconds


def flights(spans: list[TraceSpan], sender: int,
            receiver: int, min_rows: int) -> list[float]:
    """Return the seconds from the call that sends a segment of at least `min_rows` rows to its arrival at the next
    rank."""
    sends = [span for span in spans if span["name"] == "send" and span["rank"] == sender]
    sent_at = {tuple(span["nodes"]): span["t0"] for span in sends if len(span["nodes"]) >= min_rows}
    arrivals = [span for span in spans if span["name"] == "recv" and span["rank"] == receiver]
    return [span["t1"] - sent_at[tuple(span["nodes"])]
            for span in arrivals if tuple(span["nodes"]) in sent_at]


def _print_row(label: str, seconds: Iterable[float]) -> None:
    milliseconds = sorted(1e3 * value for value in seconds)
    if milliseconds:
        high = milliseconds[int(0.9 * len(milliseconds))]
        print(f"  {label:<36}{median(milliseconds):8.3f}{high:9.3f}   of {len(milliseconds)}")
