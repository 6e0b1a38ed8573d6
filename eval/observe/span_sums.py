"""The tally: the times of each rank, as one line of sums per request.

It is a trace that keeps only the spans of one request, so it may stay on while speed is measured.
"""
from __future__ import annotations

import json
import threading
from collections import Counter, defaultdict
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, Mapping, NamedTuple, Sequence

from pipeline.trace import OFF, REAL, Clock, NoTrace

BEGIN_SPANS = ("grow", "send", "forward")  # a request begins with one of these …
TIMED_SPANS = (*BEGIN_SPANS, "wait", "judge", "prune")  # … and spends its time in these
# The first of these after an answer of the target follows the settling of a token.
SETTLING_SPANS = ("prune", "grow", "send", "reset")
# Notes of bytes sent: through an emulated wire, in bytes of its model, and through a real one.
WIRE_SPANS = ("wire", "sent")


class Span(NamedTuple):
    """An interval of a rank's time, by any clock, and its attributes."""

    name: str
    since: float
    until: float
    attributes: Mapping[str, Any]


class RowFlight(NamedTuple):
    """The flight of one request's true rows: those that are text after the prompt."""

    rows: int  # that came back
    stay: float  # seconds from sending a row until its return, all rows together
    aloft: float  # seconds of decoding that each row was in flight, all rows together
    misses: int  # rows that were sent only after the answer of their parent had come
    lost: float  # seconds of decoding in which no true row was in flight


class Tally(NoTrace):
    """One rank's sums, written to `folder/rank_<rank>.jsonl`; `behind` is a trace that gets every span as well.

    A line has `rank`, `request` (the number of earlier ones), `seconds` (from its first span to its last), `spans` (the
    elapsed seconds in each kind of span), `late` (seconds by which emulated devices and wires were late) and, of the
    messages that this rank sent, `segments`, their `rows`, `bytes` without prunes, and `control`, the bytes of prunes.
    The line of the rank that receives the answers also has `first` (seconds until the first token had settled),
    `decoding` (the `spans` after that), and `flight`: the result of `replay`. All times are of `clock`.
    """

    def __init__(self, folder: str | Path, rank: int,
                 behind: NoTrace = OFF, clock: Clock = REAL) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.rank, self.behind, self._clock = rank, behind, clock
        self._file = open(Path(folder) / f"rank_{rank}.jsonl", "w", encoding="utf-8", buffering=1)
        self._lock = threading.Lock()  # for all fields below, which a rank's threads share
        self._num_requests = 0
        self._started_at: float | None = None  # of the current request, or of the last one
        self._ended_at: float | None = None  # when it ended; a sender may still be busy with it
        self._spans: list[Span] = []

    @contextmanager
    def span(self, name: str, **attributes: Any) -> Iterator[None]:
        """Add the time inside this context; the first span of a kind in BEGIN begins a request."""
        since = self._clock.now()
        self._begin(name, since, attributes)
        try:
            yield
        finally:
            self.note(name, since, **attributes)

    def note(self, name: str, since: float,
             until: float | None = None, **attributes: Any) -> None:
        """Add a span that began at `since`, in seconds of the clock, and ended at `until`, or ends now."""
        span = Span(name, since, self._clock.now() if until is None else until, attributes)
        self._begin(name, since, attributes)
        self._add(span)
        self.behind.note(name, since, until, **attributes)

    def close(self) -> None:
        """Write the last request if it has ended, and close the trace `behind`."""
        with self._lock:
            self._write()
            self._file.close()
        self.behind.close()

    def _begin(self, name: str, since: float, attributes: dict[str, Any]) -> None:
        """Begin a request if this span does and none is under way; first write one that has ended."""
        if name not in BEGIN_SPANS or (name == "send" and not attributes["nodes"]):
            return
        with self._lock:
            if self._ended_at is not None:
                self._write()
            if self._started_at is None:
                self._started_at = since

    def _add(self, span: Span) -> None:
        """Keep a span of the current request; once that has ended, only its sender's."""
        with self._lock:
            has_ended = self._ended_at is not None and span.name not in (*WIRE_SPANS, "late")
            if self._started_at is None or has_ended:
                return
            self._spans.append(span)
            if span.name == "reset":  # rank 0 has the whole answer when it begins
                self._ended_at = span.since
            elif span.name in TIMED_SPANS and span.attributes.get("kind") == "Reset":
                self._ended_at = span.until

    def _write(self) -> None:
        """Write the line of the request that has ended, if any."""
        if self._started_at is not None and self._ended_at is not None and not self._file.closed:
            seconds = self._ended_at - self._started_at
            assert seconds >= 0, f"rank {self.rank}: a request of {seconds} seconds"
            line = {"rank": self.rank, "request": self._num_requests, "seconds": seconds,
                    **_line(self._spans, self._started_at, self._ended_at)}
            self._file.write(json.dumps(line) + "\n")
            self._num_requests += 1
        self._started_at = self._ended_at = None
        self._spans = []


def _line(spans: Sequence[Span], started_at: float, ended_at: float) -> dict[str, Any]:
    """Return the sums over one request's spans, with those of its flight once a token has settled."""
    span_seconds: dict[str, float] = defaultdict(float)
    prefill_seconds: dict[str, float] = {}
    sent_bytes: dict[str, Counter[str]] = {name: Counter() for name in WIRE_SPANS}  # by kinds of messages
    segment_rows: list[int] = []
    late_seconds, has_answer = 0.0, False
    settled_at: float | None = None  # time at which the first token had settled

    for name, since, until, attributes in spans:
        if has_answer and settled_at is None and name in SETTLING_SPANS:
            settled_at, prefill_seconds = since, dict(span_seconds)
        if name in TIMED_SPANS:
            span_seconds[name] += until - since

        if name in WIRE_SPANS:
            sent_bytes[name][attributes["kind"]] += attributes["bytes"]
        elif name == "late":
            late_seconds += until - since
        elif name == "send" and attributes["nodes"]:
            segment_rows.append(len(attributes["nodes"]))
        elif name == "judge" and attributes["answers"]:
            has_answer = True

    carried_bytes = sent_bytes["wire"] or sent_bytes["sent"]
    control_bytes = carried_bytes["Prune"]
    line = {"spans": span_seconds, "late": late_seconds, "segments": len(segment_rows), "rows": sum(segment_rows),
            "bytes": sum(carried_bytes.values()) - control_bytes, "control": control_bytes}
    if settled_at is not None:
        decoding_seconds = {name: seconds - prefill_seconds.get(name, 0.0) for name, seconds in span_seconds.items()}
        flight = replay(spans, settled_at, ended_at)
        line.update(first=settled_at - started_at, decoding=decoding_seconds, flight=flight._asdict())
    return line


# --- which rows in flight became text ---------------------------------------------------------------------------------

def replay(spans: Sequence[Span], decoding_begin: float, decoding_end: float) -> RowFlight:
    """Return the flight of a request's rows, from the spans of rank 0 in order.

    It decoded from `decoding_begin` to `decoding_end`. Events are ordered by their indices in the spans, since a
    modelled clock may stand still between two of them.
    """
    sent_index: dict[int, int] = {}  # by node, as `judged_index`: the index of the span
    judged_index: dict[int, int] = {}
    answers: dict[int, int] = {}
    child_nodes: dict[tuple[int, int | None], int] = {}  # by parent and token
    text_nodes: dict[int, int] = {}  # by parent: rows that were sent as text

    for index, (name, _, _, attributes) in enumerate(spans):
        if name == "judge":
            judged_index.update(dict.fromkeys(attributes["nodes"], index))
            answers.update(attributes["answers"])
        elif name == "send" and "parents" in attributes:
            sent_index.update(dict.fromkeys(attributes["nodes"], index))
            sent_nodes = zip(attributes["nodes"], attributes["tokens"], attributes["parents"])
            for row, (node, token, parent) in enumerate(sent_nodes):
                if node != parent:  # the root is its own parent
                    child_nodes[parent, token] = node
                    if row < attributes["text"]:
                        text_nodes[parent] = node

    text_path: list[int] = []
    node = next(iter(sent_index), None)
    while node is not None:
        text_path.append(node)
        node = child_nodes.get((node, answers.get(node)), text_nodes.get(node))
    num_prompt = next((i for i, node in enumerate(text_path) if node in answers), len(text_path)) + 1

    num_returned = num_misses = 0
    stay_seconds, flight_seconds, covered_seconds, covered_until = 0.0, 0.0, 0.0, decoding_begin
    for parent, node in zip(text_path[num_prompt - 1:], text_path[num_prompt:]):
        left_at, back_at = spans[sent_index[node]].since, decoding_end
        if node in judged_index:
            back_at = spans[judged_index[node]].since
            num_returned += 1
            stay_seconds += back_at - left_at
        num_misses += parent in judged_index and judged_index[parent] < sent_index[node]

        flight_begin, flight_end = max(left_at, decoding_begin), min(back_at, decoding_end)
        flight_seconds += max(0.0, flight_end - flight_begin)

        # rows leave in the order of the text
        covered_seconds += max(0.0, flight_end - max(flight_begin, covered_until))
        covered_until = max(covered_until, flight_end)

    lost_seconds = max(0.0, decoding_end - decoding_begin - covered_seconds)
    return RowFlight(num_returned, stay_seconds, flight_seconds, num_misses, lost_seconds)
