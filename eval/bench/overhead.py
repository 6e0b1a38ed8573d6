"""The cost of the pipeline without the model: the processor time of rank 0, and the time of a stage and of each link.

Rank 0 answers a few questions by several methods. What it does is fitted to its own time, for `own_times` of a profile
(config/profiles.py). The other times are read from the spans of a trace of all ranks.
"""
from __future__ import annotations

import os
import tempfile
import time
from statistics import median
from typing import Any, Callable, Dict, Iterable, NamedTuple, Sequence

import numpy as np

from config.keys import raw_values, with_defaults
from config.presets import TOY_PRESET
from eval.bench import QUESTIONS, decoders_of, request_for
from launch.pipeline import Pipeline
from launch.run import Command, run
from model.drafts.draft import Read, Reading
from pipeline.answers import Request
from pipeline.decode import Decoder
from pipeline.messages import Message, segments_of
from pipeline.trace import OFF, read

METHODS = ("ar", "serial", "continuous", "streaming")
WIDE_ROWS = 48  # from which a segment counts as wide
TraceSpan = Dict[str, Any]


class OwnWork(NamedTuple):
    """What rank 0 did for an answer."""

    own_seconds: float  # of the processor, for its main thread without models
    num_messages: int  # that came back
    num_rows: int  # that it sent
    num_guesses: int  # after which networks guessed


def overhead(argv: list[str]) -> int:
    """Execute `python3 -m scripts.bench overhead`; return its exit code."""
    default_keys = {"max_new_tokens": "64", "link": "sockets", "stages": "4", "draft": "eagle+suffix",
                    "min_probability": "0", "ablate": "thrift"}
    is_launcher = "RANK" not in os.environ  # else this is one of the ranks, which was given the folder of the traces
    if is_launcher:
        default_keys["trace"] = tempfile.mkdtemp(prefix="flowspec-")

    all_words = with_defaults(argv, default_keys, TOY_PRESET)
    exit_code = run(Command("scripts.bench overhead", compare), all_words)
    if exit_code == 0 and is_launcher:
        report(raw_values(all_words)["trace"])
    return exit_code


def compare(pipeline: Pipeline) -> None:
    """Answer, on rank 0, a few questions by each method in turn; print the own times that fit all answers."""
    watch = Watch(pipeline)
    decoders = {method: watch.counted(decoder) for method, decoder in decoders_of(pipeline, METHODS).items()}

    # the first round is traced, which would count as rank 0's own time in the others
    works: dict[str, list[OwnWork]] = {method: [] for method in decoders}
    for i, question in enumerate([QUESTIONS[0], *QUESTIONS]):
        question_request, texts = request_for(pipeline, question), set()
        for method, decoder in decoders.items():
            with pipeline.ring.trace.span(method):
                token_ids, work = watch.answered(decoder, question_request)
            texts.add(tuple(token_ids))
            if i:
                works[method].append(work)
        pipeline.ring.trace = OFF
        assert len(texts) == 1, f"{', '.join(decoders)} wrote {len(texts)} different texts for {question!r}"

    own_seconds = fitted([work for method_works in works.values() for work in method_works])
    message, row, guess = 1e3 * own_seconds
    print("rank 0's own time, in milliseconds of its processor")
    print(f"  a message that came back {message:.3f}, a row sent {row:.4f}, a guess of which networks read {guess:.4f}")
    for method, method_works in works.items():
        measured, *counts = np.sum(method_works, 0)
        print(f"  {method:<36}{1e3 * measured / len(method_works):8.1f}   an answer; these explain "
              f"{counts @ own_seconds / measured:.2f} of it")


class Watch:
    """A watch of rank 0's processor time, and counts of its work."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._ring = pipeline.ring
        self._model_seconds, self._num_rows, self._num_guesses = 0.0, 0, 0

        link_send = self._ring.link.send

        def send(message: Message) -> None:
            self._num_rows += sum(len(segment.nodes) for segment in segments_of(message))
            link_send(message)

        self._ring.link.send = send  # type: ignore[method-assign, assignment]
        self._ring.lm_head = self._as_model(self._ring.lm_head)
        for network in pipeline.decoder.draft.networks:
            for name in ("read", "guess", "predict"):
                setattr(network, name, self._as_model(getattr(network, name)))

    def _as_model(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def timed_forward(*args: Any) -> Any:
            begun_at = time.thread_time()
            outputs = forward(*args)
            self._model_seconds += time.thread_time() - begun_at
            return outputs
        return timed_forward

    def counted(self, decoder: Decoder) -> Decoder:
        """Return the decoder, whose readings are counted from now on."""
        passes = decoder.passes

        def counted_passes(readings: Sequence[Reading]) -> list[Read]:
            self._num_guesses += sum(reading.num_logit_rows for reading in readings)
            return passes(readings)

        decoder.passes = counted_passes
        return decoder

    def answered(self, decoder: Decoder, request: Request) -> tuple[list[int], OwnWork]:
        """Return the token ids of an answer, and the work for it."""
        before = self._so_far()
        token_ids = decoder.complete(request).token_ids
        return token_ids, OwnWork(*np.subtract(self._so_far(), before))

    def _so_far(self) -> OwnWork:
        own_seconds = time.thread_time() - self._model_seconds
        return OwnWork(own_seconds, self._ring.returned_messages, self._num_rows, self._num_guesses)


def fitted(works: Sequence[OwnWork]) -> np.ndarray:
    """Return the seconds of a message, a row and a guess with the least squared relative error over these works."""
    own_seconds, *counts = np.array(works).T
    columns = np.stack(counts, -1) / own_seconds[:, None]
    times, *_ = np.linalg.lstsq(columns, np.ones_like(own_seconds), rcond=None)
    return times


def report(trace_dir: str) -> None:
    """Print the table of times of stages and links, from the spans of all ranks in this folder."""
    all_spans = read(trace_dir)
    windows = [(span["t0"], span["t1"]) for span in all_spans if span["name"] in METHODS]
    spans = [span for span in all_spans
             if any(begin <= span["t0"] and span["t1"] <= end for begin, end in windows)]
    ranks = sorted({span["rank"] for span in spans})

    print("\nmedian, and 90th percentile, in milliseconds")
    for rank in ranks[1:]:
        _print_row(f"rank {rank}, own time per segment", own_times(spans, rank))

    for sender, receiver in zip(ranks, [*ranks[1:], ranks[0]]):
        link = f"link {sender} -> {receiver}"
        _print_row(link, flights(spans, sender, receiver, 1))
        _print_row(f"{link}, {WIDE_ROWS} rows or more", flights(spans, sender, receiver, WIDE_ROWS))


def own_times(spans: list[TraceSpan], rank_number: int) -> list[float]:
    """Return a stage's seconds between two waits without its layers; only those with layers count."""
    rank_spans = [span for span in spans if span["rank"] == rank_number]
    waits = [span for span in rank_spans if span["name"] == "wait"]
    forwards = [span for span in rank_spans if span["name"] == "forward"]

    seconds = []
    for before, after in zip(waits, waits[1:]):
        begin, end = before["t1"], after["t0"]
        layer_seconds = [span["t1"] - span["t0"] for span in forwards if begin <= span["t0"] <= end]
        if layer_seconds:
            seconds.append(end - begin - sum(layer_seconds))
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
