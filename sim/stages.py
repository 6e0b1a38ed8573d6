"""A stage in virtual time: it computes nothing, but knows what it would hold, drop and compute, and when.

It applies messages as `pipeline/stage.py` does: a prune at once, the others in order. Dead rows cost no time, and a
segment without live rows is given up between two layers.
"""
from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from typing import Callable, NamedTuple, Sequence

import torch

from config.profiles import Profile
from model.cache import Survivors
from pipeline.messages import (
    Message,
    Prune,
    Reset,
    Segment,
    Start,
    Visit,
    facts_of,
    joined,
    newest,
    reports_of,
    segments_of,
)
from pipeline.trace import NoTrace
from sim.clock import Heat
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
    cool: Callable[[], object] = lambda: None  # resets the heat of the stage's board


class Held(NamedTuple):
    """The part of the model that a stage holds."""

    ranks: Sequence[int]  # of the stage, the leader first
    share: float  # of the model's layers, from 0 to 1
    kept: int = 0  # number of layers whose inputs the draft needs as inner features
    largest: float = 1.0  # the largest part of a layer that one rank computes
    tiles: bool = False  # whether products and transfers overlap, as in Galaxy
    reports: bool = False  # whether those inputs are reported to rank 0 at once


def work_of(profile: Profile, held: Held) -> Work:
    """Return the work of a stage on a segment."""
    board = slowest(profile, held.ranks)
    layers = held.share * profile.layers
    members, leader = len(held.ranks), held.ranks[0]
    if members == 1:
        heat = Heat(board.heat)

        def alone(rows: int, text: int) -> float:
            return heat.takes(board.stage(held.share, rows, text))

        return Work(alone, max(1, round(layers)), held.kept, held.reports, leader, heat.cool)
    times = Times(board, held.largest, members)

    def together(rows: int, text: int) -> float:
        tiled = held.tiles and rows >= TILE * members
        heard = board.latency / 1e3 + board.transfer(rows * board.row_bytes)
        return heard + layers * times.layer(tiled, rows, text)

    return Work(together, 1, held.kept, held.reports, leader)


class VirtualStage:
    """One stage; `send` passes on a message at a given time, `report` sends one to rank 0."""

    def __init__(self, at: At, work: Work, send: Send, report: Send, trace: NoTrace) -> None:
        self._at, self._cost = at, work
        self._send, self._report, self._trace = send, report, trace
        self._queue: deque[Message] = deque()
        self._survivors: dict[int, Survivors] = {}  # by open request
        self._newest = -1  # the highest request number of all segments, Starts and Resets so far
        self._work: list[Segment] = []  # segments in computation
        self._since = self._until = 0.0  # times at which their computation begins and ends
        self._idle = 0.0  # time at which the stage began to wait

    def hear(self, msg: Message, now: float) -> None:
        """Accept a message at its arrival."""
        self._trace.note("recv", now, now, **facts_of(msg))
        if isinstance(msg, Prune):
            self._prune(msg, now)
        else:
            self._queue.append(msg)
            if not self._work:
                self._next(now)

    def _prune(self, prune: Prune, now: float) -> None:
        if prune.request not in self._survivors and prune.request <= self._newest:
            return
        known = self._survivors.get(prune.request, Survivors())
        self._survivors[prune.request] = known.newer(prune.survivors)
        self._trace.note("prune", now, now, tip=prune.tip, keep=len(prune.keep))
        if self._work and not any(self._living(segment).nodes for segment in self._work):
            self._give_up(now)

    def _give_up(self, now: float) -> None:
        """End the computation after the current layer."""
        whole = self._until - self._since
        layers = self._cost.layers
        passed = math.ceil((now - self._since) / whole * layers) if whole else 0
        done = min(max(1, passed), layers)
        early = self._since + whole * done / layers
        if early < self._until:
            self._until = early
            self._at(early, self._end)

    def _living(self, segment: Segment) -> Segment:
        """Return the live rows of a segment."""
        survivors = self._survivors.setdefault(segment.request, Survivors())
        return segment.take(survivors.alive(segment.nodes))

    def _next(self, now: float) -> None:
        while self._queue and not self._work:
            msg = self._queue.popleft()
            segments = segments_of(msg)
            self._newest = max(self._newest, newest(msg))
            if isinstance(msg, Start):
                self._survivors.setdefault(msg.request, Survivors())
            if isinstance(msg, Reset):
                self._survivors.pop(msg.request, None)
            living = [self._living(segment) for segment in segments]
            if any(segment.nodes for segment in living):
                self._begin(living, now)
            else:
                self._pass_on(joined(living) if living else msg, now)

    def _begin(self, segments: list[Segment], now: float) -> None:
        self._trace.note("wait", self._idle, now)
        self._work, self._since = segments, now
        computed = [segment for segment in segments if segment.nodes]
        rows = sum(len(segment.nodes) for segment in computed)
        text = sum(max(segment.pos) for segment in computed)
        self._until = now + self._cost.seconds(rows, text)
        self._at(self._until, self._end)

    def _end(self, now: float) -> None:
        segments = self._work
        if not segments or now != self._until:  # they were given up earlier
            return
        self._work, self._idle = [], now
        nodes = joined(segments).nodes
        self._trace.note("forward", self._since, now, nodes=nodes)
        visit = Visit(len(nodes), now - self._since)
        computed = joined([self._computed(segment, visit) for segment in map(self._living, segments)])
        self._pass_on(computed, now)
        if self._cost.reports:
            for features in reports_of(computed):
                self._report(features, now)
        self._next(now)

    def _computed(self, segment: Segment, visit: Visit) -> Segment:
        """Return the segment as it leaves; one column replaces the hidden states, which no stage reads."""
        if not segment.nodes:
            return segment
        rows, inner = len(segment.nodes), segment.inner
        if inner is not None:
            inner = inner.new_empty(rows, inner.shape[1] + self._cost.kept)
        visits = (*segment.visits, visit)
        return replace(segment, x=torch.empty(rows, 1), inner=inner, visits=visits)

    def _pass_on(self, msg: Message, now: float) -> None:
        self._trace.note("send", now, now, **facts_of(msg))
        self._send(msg, now)
