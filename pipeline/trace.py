"""Timing of a rank: its clock, its meter of work, and its trace with one JSON line per span.

It knows nothing about the meaning of spans. A trace that is off is one shared object that does nothing. The lines of
all ranks are merged into a Chrome trace for https://ui.perfetto.dev, and read by scripts/timeline.
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
from typing import Any, ContextManager, Iterator

from config.files import as_value_error, fits, lines, write
from config.schema.untrusted import one_line

SHARE_WINDOW = 2.0  # seconds over which the share of work is measured
WRITE_INTERVAL = 0.5  # seconds between two writes
RANK_FILE = re.compile(r"rank_([0-9]+)(_[0-9]+)?\.jsonl")
CLOCK = "clock"  # span of a rank on another machine; `ahead`: seconds by which rank 0's clock is ahead
SPAN_FIELDS = {"rank": int, "name": str, "t0": float, "t1": float, "thread": str}  # of every span
DELETE_LINE = "delete this line, or trace the run again"
MAKE_ROOM = "make room there, or choose another trace="


class Clock:
    """The monotonic clock of the machine, in seconds; subclasses model time."""

    def now(self) -> float:
        return time.monotonic()

    def sleep_until(self, due: float) -> None:
        """Wait until `now()` is at least `due`."""
        while (seconds_left := due - time.monotonic()) > 0:
            time.sleep(seconds_left)


REAL = Clock()


class Rate:
    """The rise of a total per second, in about the last `SHARE_WINDOW` seconds."""

    def __init__(self) -> None:
        self._samples = deque([(time.monotonic(), 0.0)])  # times, with the totals at them

    def of(self, total: float) -> float:
        """Return the rate up to now, given the present total; a smaller one than before has begun again."""
        now = time.monotonic()
        self._samples.append((now, total))
        while len(self._samples) > 2 and self._samples[1][0] <= now - SHARE_WINDOW:
            self._samples.popleft()

        oldest_time, oldest_total = self._samples[0]
        return max(0.0, total - oldest_total) / max(now - oldest_time, 1e-9)


class Meter:
    """A meter of the share of time in which a rank works, rather than waits for messages.

    Time inside `with meter:` is work, except inside `with meter.idle():`. One thread works; another may read the share.
    """

    def __init__(self) -> None:
        self._work_times: tuple[float, float | None] = (0.0, None)  # seconds of finished work; start of present work
        self._work_rate = Rate()

    @property
    def seconds(self) -> float:
        """Seconds of work so far."""
        finished_seconds, work_begin = self._work_times
        return finished_seconds if work_begin is None else finished_seconds + time.monotonic() - work_begin

    def __enter__(self) -> None:
        self._work_times = self.seconds, time.monotonic()

    def __exit__(self, *error: object) -> None:
        self._work_times = self.seconds, None

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Return a context in which time does not count as work."""
        was_working = self._work_times[1] is not None
        self.__exit__()
        try:
            yield
        finally:
            if was_working:
                self.__enter__()

    def share(self) -> float:
        """Return the share of work, from 0 to 1, in about the last `SHARE_WINDOW` seconds."""
        return min(1.0, self._work_rate.of(self.seconds))


class NoTrace:
    """A trace that is off."""

    _nothing = nullcontext()

    def span(self, name: str, **attributes: Any) -> ContextManager[Any]:
        """Return a context that is timed; values in `attributes` may change until it ends."""
        return self._nothing

    def note(self, name: str, since: float, until: float | None = None, **attributes: Any) -> None:
        """Record a span between two times of this trace's clock, in seconds; `until` defaults to now."""

    def close(self) -> None:
        """Write the remaining spans."""


OFF = NoTrace()


class Trace(NoTrace):
    """The trace of a rank, written to `folder/rank_<rank>.jsonl`; times are seconds of `clock`.

    A restarted rank keeps that file, and writes `rank_<rank>_<number>.jsonl`.
    """

    def __init__(self, folder: str, rank: int, clock: Clock = REAL) -> None:
        self.rank, self._clock = rank, clock
        num_earlier = len(rank_files(folder, rank))
        self._path = Path(folder) / (f"rank_{rank}_{num_earlier}.jsonl" if num_earlier else f"rank_{rank}.jsonl")
        with as_value_error(self._path, MAKE_ROOM):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, "w", encoding="utf-8")
        self._unwritten_spans: list[dict[str, Any]] = []
        self._next_write = 0.0  # time
        self._lock = threading.Lock()

    @contextmanager
    def span(self, name: str, **attributes: Any) -> Iterator[None]:
        since = self._clock.now()
        try:
            yield
        finally:
            self.note(name, since, **attributes)

    def note(self, name: str, since: float, until: float | None = None, **attributes: Any) -> None:
        now = self._clock.now() if until is None else until
        thread_name = threading.current_thread().name
        span = {"rank": self.rank, "name": name, "t0": since, "t1": now, "thread": thread_name, **attributes}

        with self._lock:
            self._unwritten_spans.append(span)
            if now >= self._next_write:
                self._write()
                self._next_write = now + WRITE_INTERVAL

    def close(self) -> None:
        with self._lock:
            self._write()
            self._file.close()

    def _write(self) -> None:
        spans, self._unwritten_spans = self._unwritten_spans, []
        if self._file.closed:  # a listener thread may still run
            return

        try:
            with as_value_error(self._path, MAKE_ROOM):
                self._file.writelines(json.dumps(span) + "\n" for span in spans)
                self._file.flush()
        except ValueError as error:  # the answer is more important than its trace
            with suppress(OSError):
                self._file.close()
            with suppress(OSError):  # the terminal may be gone
                print(one_line(f"flowspec: {error}; the trace of rank {self.rank} ends here"), file=sys.stderr)


def rank_files(folder: str | Path, rank: int | str = "*") -> list[Path]:
    """Return the trace files of all ranks, or of one rank, in a folder."""
    paths = []
    for path in Path(folder).glob("rank_*.jsonl"):
        match = RANK_FILE.fullmatch(path.name)
        if match and str(rank) in ("*", match[1]):
            paths.append(path)
    return sorted(paths)


def forget(folder: str | Path, rank: int | str = "*") -> None:
    """Delete the trace files of all ranks, or of one rank."""
    for path in rank_files(folder, rank):
        path.unlink()


def read(folder: str | Path) -> list[dict[str, Any]]:
    """Return the spans of all ranks, sorted by their beginnings, in times of rank 0's clock."""
    all_spans = [span for path in rank_files(folder) for span in _spans_in_file(path)]
    seconds_ahead = {span["rank"]: span["ahead"] for span in all_spans if span["name"] == CLOCK}

    spans = [span for span in all_spans if span["name"] != CLOCK]
    for span in spans:
        for key in ("t0", "t1"):
            span[key] += seconds_ahead.get(span["rank"], 0.0)
    return sorted(spans, key=lambda span: span["t0"])


def _spans_in_file(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the spans in one file; an incomplete last line is skipped."""
    for line_number, span in lines(path, DELETE_LINE, growing=True):
        if not fits(span, SPAN_FIELDS) or (span["name"] == CLOCK and not fits(span, {"ahead": float})):
            raise ValueError(f"line {line_number} of {path} is not a span of a trace: {DELETE_LINE}")
        yield span


def _is_departure(span: dict[str, Any]) -> bool:
    """Return whether this is a span in which rank 0 sends a segment."""
    return span["name"] == "send" and span["rank"] == 0


def merge(folder: str | Path) -> Path:
    """Write the spans of all ranks, with arrows along the segments, to `folder/trace.json`; return its path."""
    spans = read(folder)
    first_begin = spans[0]["t0"] if spans else 0.0
    departures = [span["nodes"] for span in spans if _is_departure(span)]
    segment_of_node = {node: number for number, nodes in enumerate(departures) for node in nodes}

    ranks = sorted({span["rank"] for span in spans})
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}} for rank in ranks]
    for span in spans:
        begin, end = ((span[key] - first_begin) * 1e6 for key in ("t0", "t1"))  # microseconds
        position = {"pid": span["rank"], "tid": span["thread"], "ts": begin}
        attributes = {key: value for key, value in span.items() if key not in SPAN_FIELDS}
        events.append({**position, "ph": "X", "name": span["name"], "dur": end - begin, "args": attributes})

        nodes = span.get("nodes")
        is_departure = _is_departure(span)
        if nodes and nodes[0] in segment_of_node and (is_departure or span["name"] == "forward"):
            arrow = {"ph": "s" if is_departure else "t", "name": "segment", "cat": "segment"}
            events.append({**position, **arrow, "id": segment_of_node[nodes[0]]})

    path = Path(folder) / "trace.json"
    write(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), MAKE_ROOM)
    return path
