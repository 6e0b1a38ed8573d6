"""When a rank did what: the clock that it reads, its meter, and its trace, one JSON line per span.

It knows nothing about what is timed. A trace that is off is one shared object that does nothing; of one that is on, the
lines of all ranks are merged into a Chrome trace that https://ui.perfetto.dev opens, or become the page of
scripts/timeline.
"""
from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections import deque
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, ContextManager, Iterator, Protocol

from config.files import fits, lines
from config.schema.untrusted import plain

RECENT = 2.0  # seconds of which a share of work is given
OFTEN = 0.5  # seconds: what a rank that is killed has not written yet
RANK_FILE = re.compile(r"rank_([0-9]+)(_[0-9]+)?\.jsonl")
CLOCK = "clock"  # a note of a rank on another machine: `ahead`, the seconds by which rank 0's clock is ahead of its own
SPAN = {"rank": int, "name": str, "t0": float, "t1": float, "thread": str}  # what each has; see config/files.py
DELETE = "delete this line, or trace once more"


class Clock(Protocol):
    """Where time is read and spent: real, or modelled."""

    def now(self) -> float:
        """Seconds of a clock that never goes back."""

    def sleep_until(self, due: float) -> None:
        """Return once `now()` is `due` or later."""


class RealClock:
    """The machine's monotonic clock, in seconds."""

    def now(self) -> float:
        return time.monotonic()

    def sleep_until(self, due: float) -> None:
        while (left := due - time.monotonic()) > 0:
            time.sleep(left)


REAL = RealClock()


class Meter:
    """For how much of its last seconds a rank was at work, and did not wait for messages.

    What happens inside `with meter:` is work, but for what happens inside `with meter.idle():` there. One thread works,
    and another may look.
    """

    def __init__(self) -> None:
        self._counted: tuple[float, float | None] = (0.0, None)  # seconds so far; since when there is more, if there is
        self._looks: deque[tuple[float, float]] = deque([(time.monotonic(), 0.0)])  # moments, and seconds until then

    @property
    def seconds(self) -> float:
        """The seconds of work since the start."""
        done, since = self._counted
        return done if since is None else done + time.monotonic() - since

    def __enter__(self) -> None:
        self._counted = self.seconds, time.monotonic()

    def __exit__(self, *error: object) -> None:
        self._counted = self.seconds, None

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Nothing is done meanwhile."""
        working = self._counted[1] is not None
        self.__exit__()
        try:
            yield
        finally:
            if working:
                self.__enter__()

    def share(self) -> float:
        """The share of work, from 0 to 1, since a look `RECENT` seconds ago, or since the oldest after that."""
        now, seconds = time.monotonic(), self.seconds
        self._looks.append((now, seconds))
        while len(self._looks) > 2 and self._looks[1][0] <= now - RECENT:
            self._looks.popleft()
        then, before = self._looks[0]
        return min(1.0, (seconds - before) / max(now - then, 1e-9))


class NoTrace:
    """A trace that is off."""

    _nothing = nullcontext()

    def span(self, name: str, **facts: Any) -> ContextManager[Any]:
        """A context around what takes time; `facts` may be filled until it ends."""
        return self._nothing

    def note(self, name: str, since: float, until: float | None = None, **facts: Any) -> None:
        """Note what took time, after it did: since a moment of this trace's clock, in seconds, until another or now."""

    def close(self) -> None:
        """Write what is left."""


OFF = NoTrace()


class Trace(NoTrace):
    """One rank's spans, written to `folder/rank_<rank>.jsonl`; times are seconds of `clock`.

    What is there stays, as a rank that was started again goes on in a file of its own, `rank_<rank>_<number>.jsonl`.
    """

    def __init__(self, folder: str, rank: int, clock: Clock = REAL) -> None:
        self.rank, self._clock = rank, clock
        before = len(rank_files(folder, rank))
        self._path = Path(folder) / (f"rank_{rank}_{before}.jsonl" if before else f"rank_{rank}.jsonl")
        with writable(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, "w", encoding="utf-8")
        self._spans: list[dict[str, Any]] = []  # written many at a time, since writing takes longer than a span
        self._due = 0.0  # when they are written next
        self._lock = threading.Lock()  # a rank's threads share all three

    @contextmanager
    def span(self, name: str, **facts: Any) -> Iterator[None]:
        since = self._clock.now()
        try:
            yield
        finally:
            self.note(name, since, **facts)

    def note(self, name: str, since: float, until: float | None = None, **facts: Any) -> None:
        now = self._clock.now() if until is None else until
        thread = threading.current_thread().name
        span = {"rank": self.rank, "name": name, "t0": since, "t1": now, "thread": thread, **facts}
        with self._lock:
            self._spans.append(span)
            if now >= self._due:
                self._write()
                self._due = now + OFTEN

    def close(self) -> None:
        with self._lock:
            self._write()
            self._file.close()

    def _write(self) -> None:
        spans, self._spans = self._spans, []
        if self._file.closed:  # a listener may outlive the work
            return
        try:
            with writable(self._path):
                self._file.writelines(json.dumps(span) + "\n" for span in spans)
                self._file.flush()
        except ValueError as error:  # no answer is given up for its trace
            with suppress(OSError):
                self._file.close()
            with suppress(OSError):  # the terminal may be gone
                print(plain(f"flowspec: {error}; the trace of rank {self.rank} ends here"), file=sys.stderr)


@contextmanager
def writable(path: Path) -> Iterator[None]:
    """Turn an OSError into a ValueError that names the file, which the system does not where a disk is full."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{path} cannot be written ({error.strerror}): make room there, or choose another trace="
                         ) from error


def rank_files(folder: str | Path, rank: int | str = "*") -> list[Path]:
    """The files of all ranks, or of one, in the folder of a trace; what else lies there is somebody else's."""
    found = []
    for path in Path(folder).glob("rank_*.jsonl"):
        match = RANK_FILE.fullmatch(path.name)
        if match and str(rank) in ("*", match[1]):
            found.append(path)
    return sorted(found)


def forget(folder: str | Path, rank: int | str = "*") -> None:
    """Delete the files of all ranks, or of one."""
    for path in rank_files(folder, rank):
        path.unlink()


def read(folder: str | Path) -> list[dict[str, Any]]:
    """The spans of all ranks by the clock of rank 0, in the order of their beginnings."""
    spans = [span for path in rank_files(folder) for span in _spans(path)]
    ahead = {span["rank"]: span["ahead"] for span in spans if span["name"] == CLOCK}
    found = []
    for span in spans:
        more = ahead.get(span["rank"], 0.0)
        if span["name"] != CLOCK:
            found.append({**span, "t0": span["t0"] + more, "t1": span["t1"] + more})
    return sorted(found, key=lambda span: span["t0"])


def _spans(path: Path) -> Iterator[dict[str, Any]]:
    """The spans of one rank; the last line of one that was killed may be half written, and then does not count."""
    for number, span in lines(path, DELETE, growing=True):
        sound = fits(span, SPAN)
        if sound and span["name"] == CLOCK:
            sound = fits(span, {"ahead": float})
        if not sound:
            raise ValueError(f"line {number} of {path} is no span of a trace: {DELETE}")
        yield span


def merge(folder: str | Path) -> Path:
    """Join the spans of all ranks into `folder/trace.json`, with an arrow along each segment's way; return its path."""
    spans = read(folder)
    start = spans[0]["t0"] if spans else 0.0
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        for rank in sorted({span["rank"] for span in spans})]
    for span in spans:
        microseconds = (span["t1"] - span["t0"]) * 1e6
        facts = {key: value for key, value in span.items() if key not in SPAN}
        event = {"ph": "X", "name": span["name"], "dur": microseconds, "args": facts}
        events.append({**_event(span, start), **event})
    events += _journeys(spans, start)
    path = Path(folder) / "trace.json"
    with writable(path):
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
    return path


def _journeys(spans: list[dict[str, Any]], start: float) -> list[dict[str, Any]]:
    """Arrows from where rank 0 sends a segment through the stages that compute it."""
    sent = [span for span in spans if span["name"] == "send" and span["rank"] == 0]
    segment = {node: number for number, span in enumerate(sent) for node in span["nodes"]}
    arrows = []
    for span in spans:
        nodes = span.get("nodes")
        begins = span["name"] == "send" and span["rank"] == 0
        if nodes and nodes[0] in segment and (begins or span["name"] == "forward"):
            arrow = {"ph": "s" if begins else "t", "name": "segment", "cat": "segment", "id": segment[nodes[0]]}
            arrows.append({**_event(span, start), **arrow})
    return arrows


def _event(span: dict[str, Any], start: float) -> dict[str, Any]:
    """Where and when a span begins, as an event of a Chrome trace says it: in microseconds since `start`."""
    microseconds = (span["t0"] - start) * 1e6
    return {"pid": span["rank"], "tid": span["thread"], "ts": microseconds}
