"""The tally: what each rank spent its time on, one line of sums per request.

It knows nothing about methods. It is a trace that keeps no spans, so it may stay on while speed is measured.
"""
from __future__ import annotations

import json
import threading
from collections import Counter, defaultdict
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator

from config.files import lines
from eval.metrics import COMPUTING
from eval.observe.replay import Heard, Record, Sent, replay
from pipeline.interfaces import REAL, Clock
from pipeline.trace import OFF, NoTrace, rank_files

BEGIN = ("grow", "send", "forward")  # a request begins with one of these …
TIMED = (*BEGIN, "wait", "verify", "prune")  # … and spends its time in these
SETTLES = ("prune", "send", "reset")  # the first of these after an answer of the target comes when a token has settled
Facts = dict  # what a span has besides its time
WIRES = ("wire", "sent")  # notes of what left, through an emulated wire in its model's bytes, and through a real one


def lateness(folder: str | Path) -> float:
    """By how much emulated devices and wires were too late so far, in seconds per second of computing on all ranks."""
    computed = late = 0.0
    for path in rank_files(folder):
        for _, line in lines(path, growing=True):
            computed += sum(line["spans"].get(name, 0.0) for name in COMPUTING)
            late += line["late"]
    return late / computed if computed else 0.0


class Tally(NoTrace):
    """One rank's sums, written to `folder/rank_<rank>.jsonl`; `behind` is a trace that gets every span as well.

    A line has `rank`, `request` (how many came before it), `seconds` (from its first span to its last), `spans` (the
    seconds in each kind of span, as they passed), `late` (seconds by which emulated devices and wires were too late)
    and, of what this rank sent, `segments`, their `rows`, `bytes`, and those of prunes apart as `control`. That of
    the rank that hears the answers also has `first` (seconds until the first token had settled), `decoding` (the
    `spans` after that), and `flight`: what `eval/observe/replay.py` finds of its rows. All times are of `clock`.
    """

    def __init__(self, folder: str | Path, rank: int, behind: NoTrace = OFF, clock: Clock = REAL) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.rank, self.behind, self._clock = rank, behind, clock
        self._file = open(Path(folder) / f"rank_{rank}.jsonl", "w", encoding="utf-8", buffering=1)
        self._lock = threading.Lock()  # a rank's threads share all that follows
        self._requests = 0
        self._clear()

    @contextmanager
    def span(self, name: str, **facts: Any) -> Iterator[None]:
        """Add the time that passes inside to the sums; the first span of a kind in BEGIN begins a request."""
        since = self._clock.now()
        if name in SETTLES and self._heard and self._first is None:
            self._settle(since)
        self._begin(name, since, facts)
        try:
            with self.behind.span(name, **facts):
                yield
        finally:
            self._add(name, since, self._clock.now(), facts)

    def note(self, name: str, since: float, until: float | None = None, **facts: Any) -> None:
        """Add what began at `since`, seconds of the clock, and ended at `until`, or ends now."""
        now = self._clock.now() if until is None else until
        self._begin(name, since, facts)
        self._add(name, since, now, facts)
        self.behind.note(name, since, until, **facts)

    def close(self) -> None:
        """Write the last request, if it ended, and close the trace behind."""
        with self._lock:
            self._write()
            self._file.close()
        self.behind.close()

    def _clear(self) -> None:
        """Begin the sums again."""
        self._start: float | None = None  # of the first span of a request
        self._end: float | None = None  # of its last one; a sender may still be busy with what went before
        self._late = 0.0
        self._spans: dict[str, float] = defaultdict(float)
        self._sums: Counter[str] = Counter()
        self._bytes: dict[str, Counter[str]] = {name: Counter() for name in WIRES}  # by kinds of messages
        self._records: list[Record] = []
        self._heard = False  # whether the target has said a token
        self._first: float | None = None  # when the first token had settled …
        self._before: dict[str, float] = {}  # … and the spans until then
        self._account: dict[str, Any] = {}

    def _begin(self, name: str, since: float, facts: Facts) -> None:
        """Begin a request, if this span does and none is under way; one that ended is written first."""
        if name not in BEGIN or (name == "send" and not facts["nodes"]):
            return
        with self._lock:
            if self._end is not None:
                self._write()
            if self._start is None:
                self._start = since

    def _settle(self, now: float) -> None:
        """The first token of the request has settled."""
        with self._lock:
            self._first, self._before = now, dict(self._spans)

    def _add(self, name: str, since: float, now: float, facts: Facts) -> None:
        """Add a span or a note of the request that is under way or ended last."""
        with self._lock:
            if self._start is None:
                return  # between requests
            if name in WIRES:
                self._bytes[name][facts["kind"]] += facts["bytes"]
            elif name == "late":
                self._late += now - since
            elif self._end is None:
                self._spend(name, since, now, facts)

    def _spend(self, name: str, since: float, now: float, facts: Facts) -> None:
        """Add a span of a request that is under way; a `Reset` ends it."""
        if name == "reset":  # rank 0 has the whole answer when it begins
            self._end = since
            self._account = self._closed(since)
        elif name in TIMED:
            self._spans[name] += now - since
            self._record(name, since, facts)
            if name == "send" and facts["nodes"]:
                self._sums.update(segments=1, rows=len(facts["nodes"]))
            if facts.get("kind") == "Reset":
                self._end = now

    def _record(self, name: str, since: float, facts: Facts) -> None:
        """Keep what left rank 0 and what it heard, for the replay."""
        if name == "send" and "parents" in facts:
            self._records.append(Sent(since, facts["nodes"], facts["tokens"], facts["parents"], facts["text"]))
        elif name == "verify":
            self._records.append(Heard(since, facts["nodes"], facts["said"]))
            self._heard = self._heard or bool(facts["said"])

    def _closed(self, end: float) -> dict[str, Any]:
        """What the line of the rank that hears the answers has beside. It is made while nothing is measured."""
        if self._start is None or self._first is None:
            return {}
        decoding = {name: spent - self._before.get(name, 0.0) for name, spent in self._spans.items()}
        flight = replay(self._records, self._first, end)
        return {"first": self._first - self._start, "decoding": decoding, "flight": flight._asdict()}

    def _write(self) -> None:
        """Write the line of the request that ended, if one did, and begin the sums again."""
        if self._start is not None and self._end is not None and not self._file.closed:
            assert self._end >= self._start, f"rank {self.rank}: a request of {self._end - self._start} seconds"
            sent = self._bytes["wire"] or self._bytes["sent"]
            control = sent["Prune"]
            line = {"rank": self.rank, "request": self._requests, "seconds": self._end - self._start,
                    "spans": dict(self._spans), "late": self._late,
                    "segments": self._sums["segments"], "rows": self._sums["rows"],
                    "bytes": sum(sent.values()) - control, "control": control, **self._account}
            self._file.write(json.dumps(line) + "\n")
            self._requests += 1
        self._clear()
