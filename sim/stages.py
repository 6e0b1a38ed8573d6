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

SecondsOf = Callable[[int, int], float]  # from the number of rows and of text tokens before them
Schedule = Callable[[float, Callable[[float], None]], None]  # schedules an event, which is called with its time
SendAt = Callable[[Message, float], None]  # sends a message at a time


@dataclass(frozen=True)
class Work:
    """The work of a stage on a segment."""

    seconds: SecondsOf
    layers: int  # after each of them a dead segment may be given up; 1: never
    num_inner: int = 0  # layers whose inputs the draft needs as inner features
    rank: int = 0  # the stage's rank, if wires differ; 0: any


class StageShare(NamedTuple):
    """The part of the model that a stage computes."""

    ranks: Sequence[int]  # of the stage, the leader first
    layer_share: float  # of the model's layers, from 0 to 1
    num_inner: int = 0  # layers whose inputs the draft needs as inner features
    largest_share: float = 1.0  # of a layer, the largest part that one rank computes
    is_tiled: bool = False  # whether products and transfers overlap, as in Galaxy


def no_layers() -> TreeCache:
    """Return a cache that holds no keys and values."""
    return TreeCache((0, 1, sys.maxsize, 1), torch.float32, "cpu")


def work_of(profile: Profile, stage_share: StageShare) -> Work:
    """Return the work of a stage on a segment."""
    board = slowest(profile, stage_share.ranks)
    num_layers = stage_share.layer_share * profile.layers
    num_members, leader = len(stage_share.ranks), stage_share.ranks[0]

    if num_members == 1:
        rank_seconds = partial(board.stage, stage_share.layer_share)
        return Work(rank_seconds, max(1, round(num_layers)), stage_share.num_inner, leader)

    times = Times(board, stage_share.largest_share, num_members)

    def group_seconds(num_rows: int, num_text_tokens: int) -> float:
        """Return the seconds in which the leader forwards a segment, and the group computes it."""
        is_tiled = stage_share.is_tiled and num_rows >= TILE * num_members
        forward_seconds = board.latency / 1e3 + board.transfer(num_rows * board.row_bytes)
        return forward_seconds + num_layers * times.layer(is_tiled, num_rows, num_text_tokens)

    return Work(group_seconds, 1, stage_share.num_inner, leader)


class StageTrace(NoTrace):
    """A trace with spans of a stage, by the stage's own clock."""

    def __init__(self, trace: NoTrace, clock: VirtualClock) -> None:
        self._trace, self._clock = trace, clock

    @contextmanager
    def span(self, name: str, **facts: Any) -> Iterator[None]:
        begins_at = self._clock.now()
        yield
        self._trace.note(name, begins_at, self._clock.now(), **facts)


class VirtualStage:
    """A `Stage` in modelled time; `send` passes on a message at a given time.

    A prune is applied when it arrives. Segments are computed at the end of their time, since a prune may shorten it.
    """

    def __init__(self, schedule: Schedule, work: Work, send: SendAt, trace: NoTrace) -> None:
        self._schedule, self._work = schedule, work
        self._send, self._trace = send, trace
        self._clock = VirtualClock()
        stage_trace = StageTrace(trace, self._clock)
        self.stage = Stage(self._slice, no_layers, stage_trace, range(work.num_inner))
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
            if self._computing and not self._has_live_row():
                self._give_up(now)
        else:
            self._queue.append(msg)
            self._work_on(now)

    def _has_live_row(self) -> bool:
        """Return whether a row in computation is alive."""
        return any(self.stage.live_rows(segment).nodes for segment in self._computing)

    def _give_up(self, now: float) -> None:
        """End the computation after the current layer."""
        seconds, num_layers = self._ends_at - self._started_at, self._work.layers
        num_begun = math.ceil((now - self._started_at) / seconds * num_layers) if seconds else 0
        layer_ends_at = self._started_at + seconds * min(max(1, num_begun), num_layers) / num_layers

        if layer_ends_at < self._ends_at:
            self._ends_at = layer_ends_at
            self._schedule(layer_ends_at, self._finish)

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
        with_rows = [segment for segment in segments if segment.nodes]
        num_rows = sum(len(segment.nodes) for segment in with_rows)
        num_text_tokens = sum(max(segment.pos) for segment in with_rows)

        self._computing = segments
        self._started_at, self._ends_at = now, now + self._work.seconds(num_rows, num_text_tokens)
        self._schedule(self._ends_at, self._finish)

    def _finish(self, now: float) -> None:
        if not self._computing or now != self._ends_at:  # the segments were given up earlier
            return
        self._clock.set(self._started_at)
        computed = self.stage.compute(self._computing)
        self._computing, self._idle_since = [], now

        result = self.stage.without_dead_rows(joined(computed))
        self._pass_on(result, now)
        self._work_on(now)

    def _slice(self, x: Tensor, pos_T: Tensor, cache: SegmentCache, inputs: dict[int, Tensor],
               still_needed: Callable[[], bool]) -> Tensor | None:
        """Take the modelled time; return one column in place of hidden states, which no stage reads."""
        self._clock.set(self._ends_at)
        x_T1 = torch.empty(len(x), 1)
        inputs.update(dict.fromkeys(inputs, x_T1))
        return x_T1 if self._has_live_row() else None

    def _pass_on(self, msg: Message, now: float) -> None:
        self._trace.note("send", now, now, **facts_of(msg))
        self._send(msg, now)
