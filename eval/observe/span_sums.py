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

from config.files import lines
from eval.observe.time_breakdown import COMPUTING
from pipeline.trace import OFF, REAL, Clock, NoTrace, rank_files

BEGIN = ("grow", "send", "forward")  # a request begins with one of these …
TIMED = (*BEGIN, "wait", "judge", "prune")  # … and spends its time in these
# The first of these after an answer of the target follows the settling of a token.
SETTLES = ("prune", "grow", "send", "reset")
WIRES = ("wire", "sent")  # notes of bytes sent: through an emulated wire, in bytes of its model, and through a real one


class Span(NamedTuple):
    """An interval of a rank's time, by any clock, and its facts."""

    name: str
    since: float
    until: float
    facts: Mapping[str, Any]


class RowFlight(NamedTuple):
    """The flight of one request's true rows: those that are text after the prompt."""

    rows: int  # that came back
    stay: float  # seconds from sending a row until its return, all rows together
    aloft: float  # seconds of decoding that each row was in flight, all rows together
    misses: int  # rows that were sent only after the answer of their parent had come
    lost: float  # seconds of decoding in which no true row was in flight


def lateness(folder: str | Path) -> float:
    """Return the delay of emulated devices and wires so far, in seconds per second of computing on all ranks."""
    computed = late = 0.0
    for path in rank_files(folder):
        for _, line in lines(path, growing=True):
            computed += sum(line["spans"].get(name, 0.0) for name in COMPUTING)
            late += line["late"]
    return late / computed if computed else 0.0


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
        self._requests = 0
        self._start: float | None = None  # of the current request, or of the last one
        self._end: float | None = None  # when it ended; a sender may still be busy with it
        self._spans: list[Span] = []

    @contextmanager
    def span(self, name: str, **facts: Any) -> Iterator[None]:
        """Add the time inside this context; the first span of a kind in BEGIN begins a request."""
        since = self._clock.now()
        self._begin(name, since, facts)
        try:
            yield
        finally:
            self.note(name, since, **facts)

    def note(self, name: str, since: float,
             until: float | None = None, **facts: Any) -> None:
        """Add a span that began at `since`, in seconds of the clock, and ended at `until`, or ends now."""
        span = Span(name, since, self._clock.now() if until is None else until, facts)
        self._begin(name, since, facts)
        self._add(span)
        self.behind.note(name, since, until, **facts)

    def close(self) -> None:
        """Write the last request if it has ended, and close the trace `behind`."""
        with self._lock:
            self._write()
            self._file.close()
        self.behind.close()

    def _begin(self, name: str, since: float, facts: dict[str, Any]) -> None:
        """Begin a request if this span does and none is under way; first write one that has ended."""
        if name not in BEGIN or (name == "send" and not facts["nodes"]):
            return
        with self._lock:
            if self._end is not None:
                self._write()
            if self._start is None:
                self._start = since

    def _add(self, span: Span) -> None:
        """Keep a span of the current request; once that has ended, only its sender's."""
        with self._lock:
            ended = self._end is not None and span.name not in (*WIRES, "late")
            if self._start is None or ended:
                return
            self._spans.append(span)
            if span.name == "reset":  # rank 0 has the whole answer when it begins
                self._end = span.since
            elif span.name in TIMED and span.facts.get("kind") == "Reset":
                self._end = span.until

    def _write(self) -> None:
        """Write the line of the request that has ended, if any."""
        if self._start is not None and self._end is not None and not self._file.closed:
            assert self._end >= self._start, f"rank {self.rank}: a request of {self._end - self._start} seconds"
            line = {"rank": self.rank, "request": self._requests, "seconds": self._end - self._start,
                    **_line(self._spans, self._start, self._end)}
            self._file.write(json.dumps(line) + "\n")
            self._requests += 1
        self._start = self._end = None
        self._spans = []


def _line(spans: Sequence[Span], start: float, end: float) -> dict[str, Any]:
    """Return the sums over one request's spans, from `start` to `end`; those of its flight once a token has settled."""
    seconds: dict[str, float] = defaultdict(float)
    prefill_seconds: dict[str, float] = {}
    sent_bytes: dict[str, Counter[str]] = {name: Counter() for name in WIRES}  # by kinds of messages
    segment_rows: list[int] = []
    late, has_answer = 0.0, False
    settled_at: float | None = None  # time at which the first token had settled

    for name, since, until, facts in spans:
        if has_answer and settled_at is None and name in SETTLES:
            settled_at, prefill_seconds = since, dict(seconds)
        if name in TIMED:
            seconds[name] += until - since

        if name in WIRES:
            sent_bytes[name][facts["kind"]] += facts["bytes"]
        elif name == "late":
            late += until - since
        elif name == "send" and facts["nodes"]:
            segment_rows.append(len(facts["nodes"]))
        elif name == "judge" and facts["answers"]:
            has_answer = True

    carried = sent_bytes["wire"] or sent_bytes["sent"]
    control = carried["Prune"]
    line = {"spans": seconds, "late": late, "segments": len(segment_rows), "rows": sum(segment_rows),
            "bytes": sum(carried.values()) - control, "control": control}
    if settled_at is not None:
        decoding = {name: spent - prefill_seconds.get(name, 0.0) for name, spent in seconds.items()}
        flight = replay(spans, settled_at, end)
        line.update(first=settled_at - start, decoding=decoding, flight=flight._asdict())
    return line


# --- which rows in flight became text ---------------------------------------------------------------------------------

def replay(spans: Sequence[Span], begin: float, end: float) -> RowFlight:
    """Return the flight of a request's rows, from the spans of rank 0 in order; it decoded from `begin` to `end`.

    Events are ordered by their indices in the spans, since a modelled clock may stand still between two of them.
    """
    sent: dict[int, int] = {}  # by node, as `judged`: the index of the span
    judged: dict[int, int] = {}
    answers: dict[int, int] = {}
    child_nodes: dict[tuple[int, int | None], int] = {}  # by parent and token
    text_nodes: dict[int, int] = {}  # by parent: rows that were sent as text

    for index, (name, _, _, facts) in enumerate(spans):
        if name == "judge":
            judged.update(dict.fromkeys(facts["nodes"], index))
            answers.update(facts["answers"])
        elif name == "send" and "parents" in facts:
            sent.update(dict.fromkeys(facts["nodes"], index))
            for row, (node, token, parent) in enumerate(zip(facts["nodes"], facts["tokens"], facts["parents"])):
                if node != parent:  # the root is its own parent
                    child_nodes[parent, token] = node
                    if row < facts["text"]:
                        text_nodes[parent] = node

    text: list[int] = []
    node = next(iter(sent), None)
    while node is not None:
        text.append(node)
        node = child_nodes.get((node, answers.get(node)), text_nodes.get(node))
    num_prompt = next((i for i, node in enumerate(text) if node in answers), len(text)) + 1

    rows = misses = 0
    stay, aloft, covered, reached = 0.0, 0.0, 0.0, begin
    for parent, node in zip(text[num_prompt - 1:], text[num_prompt:]):
        left, back = spans[sent[node]].since, end
        if node in judged:
            back = spans[judged[node]].since
            rows += 1
            stay += back - left
        misses += parent in judged and judged[parent] < sent[node]

        first, last = max(left, begin), min(back, end)
        aloft += max(0.0, last - first)
        covered += max(0.0, last - max(first, reached))  # rows leave in the order of the text
        reached = max(reached, last)
    return RowFlight(rows, stay, aloft, misses, max(0.0, end - begin - covered))
