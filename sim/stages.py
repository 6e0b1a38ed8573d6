"""A stage in virtual time: `pipeline/stage.py`'s own, with caches of no layers, and events at the times that it takes.

Dead rows cost no time, and a segment without live rows is given up between two layers.
"""
from __future__ import annotations

import math
import sys
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Iterator, NamedTuple, Sequence

import torch
from torch import Tensor

from config.profiles import Profile
from model.cache import SegmentCache, TreeCache
from pipeline.messages import Message, Prune, Segment, facts_of, joined
from pipeline.stage import Stage
from pipeline.trace import NoTrace
from sim.clock import VirtualClock
from sim.groups import Times, slowest
from tp.comm import TILE

Seconds = Callable[[int, int], float]  # from the number of rows and of text tokens before them
At = Callable[[float, Callable[[float], None]], None]  # schedules an event, which is called with its time
Send = Callable[[Message, float], None]


@dataclass(frozen=True)
class Work:
    """The work of a stage on a segment."""

    seconds: Seconds
    layers: int  # after each of them a dead segment may be given up; 1: never
    kept: int = 0  # number of layers whose inputs the draft needs as inner features
    reports: bool = False  # whether they are reported to rank 0 at once
    rank: int = 0  # the stage's rank, if wires differ; 0: any


class Held(NamedTuple):
    """The part of the model that a stage holds."""

    ranks: Sequence[int]  # of the stage, the leader first
    share: float  # of the model's layers, from 0 to 1
    kept: int = 0  # number of layers whose inputs the draft needs as inner features
    largest: float = 1.0  # the largest part of a layer that one rank computes
    tiles: bool = False  # whether products and transfers overlap, as in Galaxy
    reports: bool = False  # whether those inputs are reported to rank 0 at once


def no_layers() -> TreeCache:
    """Return a cache that holds no keys and values."""
    return TreeCache((0, 1, sys.maxsize, 1), torch.float32, "cpu")


def work_of(profile: Profile, held: Held) -> Work:
    """Return the work of a stage on a segment."""
    board = slowest(profile, held.ranks)
    layers = held.share * profile.layers
    members, leader = len(held.ranks), held.ranks[0]
    if members == 1:
        alone = partial(board.stage, held.share)
        return Work(alone, max(1, round(layers)), held.kept, held.reports, leader)
    times = Times(board, held.largest, members)

    def together(rows: int, text: int) -> float:
        tiled = held.tiles and rows >= TILE * members
        heard = board.latency / 1e3 + board.transfer(rows * board.row_bytes)
        return heard + layers * times.layer(tiled, rows, text)

    return Work(together, 1, held.kept, held.reports, leader)


class StageTrace(NoTrace):
    """A trace with spans of a stage, by the stage's own clock."""

    def __init__(self, trace: NoTrace, clock: VirtualClock) -> None:
        self._trace, self._clock = trace, clock

    @contextmanager
    def span(self, name: str, **facts: Any) -> Iterator[None]:
        begin = self._clock.now()
        yield
        self._trace.note(name, begin, self._clock.now(), **facts)


class VirtualStage:
    """A `Stage` in modelled time; `send` passes on a message at a given time, `report` sends one to rank 0.

    A prune is applied when it arrives. Segments are computed at the end of their time, since a prune may shorten it.
    """

    def __init__(self, at: At, work: Work, send: Send, report: Send, trace: NoTrace) -> None:
        self._at, self._work = at, work
        self._send, self._report, self._trace = send, report, trace
        self._clock = VirtualClock()
        stage_trace = StageTrace(trace, self._clock)
        self.stage = Stage(self._slice, no_layers, stage_trace, range(work.kept), reports_features=work.reports)
        self.stage.clock = self._clock
        self._queue: deque[Message] = deque()
        self._computing: list[Segment] = []
        self._started_at = self._ends_at = 0.0  # times of the computation
        self._idle_since = 0.0  # time at which the stage began to wait

    def hear(self, msg: Message, now: float) -> None:
        """Accept a message at its arrival."""
        self._trace.note("recv", now, now, **facts_of(msg))

        if isinstance(msg, Prune):
            self._clock.set(now)
            self.stage.apply(msg)
            if self._computing and not self._alive():
                self._give_up(now)
        else:
            self._queue.append(msg)
            self._work_on(now)

    def _alive(self) -> bool:
        """Return whether a row in computation is alive."""
        return any(self.stage.living(segment).nodes for segment in self._computing)

    def _give_up(self, now: float) -> None:
        """End the computation after the current layer."""
        seconds, layers = self._ends_at - self._started_at, self._work.layers
        passed = math.ceil((now - self._started_at) / seconds * layers) if seconds else 0
        early = self._started_at + seconds * min(max(1, passed), layers) / layers

        if early < self._ends_at:
            self._ends_at = early
            self._at(early, self._finish)

    def _work_on(self, now: float) -> None:
        """Apply messages up to the next one that takes time."""
        while self._queue and not self._computing:
            msg = self._queue.popleft()
            self._clock.set(now)
            segments = self.stage.accept(msg)
            if any(segment.nodes for segment in segments):
                self._start(segments, now)
            else:
                self._pass_on(joined(segments) if segments else msg, now)

    def _start(self, segments: list[Segment], now: float) -> None:
        self._trace.note("wait", self._idle_since, now)
        computed = [segment for segment in segments if segment.nodes]
        rows = sum(len(segment.nodes) for segment in computed)
        text = sum(max(segment.pos) for segment in computed)

        self._computing = segments
        self._started_at, self._ends_at = now, now + self._work.seconds(rows, text)
        self._at(self._ends_at, self._finish)

    def _finish(self, now: float) -> None:
        if not self._computing or now != self._ends_at:  # they were given up earlier
            return
        self._clock.set(self._started_at)
        computed = self.stage.compute(self._computing)
        self._computing, self._idle_since = [], now

        result = self.stage.leaving(joined(computed))
        self._pass_on(result, now)
        for features in self.stage.reports_of(result):
            self._report(features, now)
        self._work_on(now)

    def _slice(self, x: Tensor, pos_T: Tensor, cache: SegmentCache, inputs: dict[int, Tensor],
               alive: Callable[[], bool]) -> Tensor | None:
        """Take the modelled time; return one column in place of hidden states, which no stage reads."""
        self._clock.set(self._ends_at)
        x_T1 = torch.empty(len(x), 1)
        inputs.update(dict.fromkeys(inputs, x_T1))
        return x_T1 if self._alive() else None

    def _pass_on(self, msg: Message, now: float) -> None:
        self._trace.note("send", now, now, **facts_of(msg))
        self._send(msg, now)
