"""A stage in virtual time: what it would hold, drop and compute, and when it would be done; it computes nothing.

It obeys messages as `pipeline/stage.py` does: a prune at once, the others in order; dead rows cost nothing, and a
segment that dies is given up between two layers.
"""
from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from typing import Callable, NamedTuple, Protocol, Sequence

import torch

from config.profiles import Profile
from model.cache import Survivors
from pipeline.messages import Message, Prune, Reset, Segment, Start, Visit, joined, segments_of
from pipeline.trace import NoTrace
from sim.clock import Heat
from sim.groups import Times, slowest
from tp.comm import TILE

Seconds = Callable[[int, int], float]  # from rows and the tokens of text before them


class Events(Protocol):
    """What happens later, in the order of its moments."""

    def at(self, moment: float, event: Callable[[float], None]) -> None:
        """Call `event` with the moment when it has come."""


@dataclass(frozen=True)
class Work:
    """What a stage does with a segment."""

    seconds: Seconds  # how long it computes
    layers: int  # after each of which a segment that has died is given up; 1: never
    kept: int = 0  # how many of its layers keep their inputs for a draft that wants inner features
    rank: int = 0  # of its board, where wires differ; 0: any
    cool: Callable[[], object] = lambda: None  # lets its board be as at the start


class Held(NamedTuple):
    """What a stage holds: its ranks, the leader first, and from 0 to 1 the share of the model's layers.

    `largest` is the largest part of each layer that one of the ranks computes; with `tiles` they overlap products and
    transfers as Galaxy does.
    """

    ranks: Sequence[int]
    share: float
    kept: int = 0  # layers that keep their inputs for a draft that wants inner features
    largest: float = 1.0
    tiles: bool = False


def work_of(profile: Profile, held: Held, extra: float = 0.0) -> Work:
    """What a stage does with a segment; `extra` are the seconds that it takes beside what the profile charges."""
    board = slowest(profile, held.ranks)
    layers = held.share * profile.layers
    members, leader = len(held.ranks), held.ranks[0]
    if members == 1:
        heat = Heat(board.heat)

        def alone(rows: int, text: int) -> float:
            return heat.takes(extra + board.stage(held.share, rows, text))

        return Work(alone, max(1, round(layers)), held.kept, leader, heat.cool)
    times = Times(board, held.largest, members)

    def together(rows: int, text: int) -> float:
        tiled = held.tiles and rows >= TILE * members
        heard = board.latency / 1e3 + board.transfer(rows * board.row_bytes)
        return extra + heard + layers * times.layer(tiled, rows, text)

    return Work(together, 1, held.kept, leader)


class VirtualStage:
    """One stage; `send` takes a message that leaves, and the moment."""

    def __init__(self, events: Events, work: Work, send: Callable[[Message, float], None], trace: NoTrace) -> None:
        self._events, self._does = events, work
        self._send, self._trace = send, trace
        self._queue: deque[Message] = deque()
        self._survivors: dict[int, Survivors] = {}  # of the requests that are open here
        self._newest = -1  # the highest number of a request whose segments or Reset have come
        self._work: list[Segment] = []  # what is computed together …
        self._since = self._until = 0.0  # … and from when until when
        self._idle = 0.0  # since when nothing has been there to do

    def hear(self, msg: Message, now: float) -> None:
        """Take in a message at the moment at which it arrives."""
        nodes = getattr(msg, "nodes", [])
        self._trace.note("recv", now, now, kind=type(msg).__name__, nodes=nodes)
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
        """End what is computed at the end of the layer that it is in."""
        whole = self._until - self._since
        layers = self._does.layers
        passed = math.ceil((now - self._since) / whole * layers) if whole else 0
        done = min(max(1, passed), layers)
        early = self._since + whole * done / layers
        if early < self._until:
            self._until = early
            self._events.at(early, self._end)

    def _living(self, segment: Segment) -> Segment:
        """The rows of a segment that no prune has declared dead."""
        survivors = self._survivors.setdefault(segment.request, Survivors())
        return segment.take(survivors.alive(segment.nodes))

    def _next(self, now: float) -> None:
        while self._queue and not self._work:
            msg = self._queue.popleft()
            segments = segments_of(msg)
            if isinstance(msg, Start):
                self._newest = max(self._newest, msg.request)
                self._survivors.setdefault(msg.request, Survivors())
            if isinstance(msg, Reset):
                self._newest = max(self._newest, msg.request)
                self._survivors.pop(msg.request, None)
            for segment in segments:
                self._newest = max(self._newest, segment.request)
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
        self._until = now + self._does.seconds(rows, text)
        self._events.at(self._until, self._end)

    def _end(self, now: float) -> None:
        segments = self._work
        if not segments or now != self._until:  # they were given up earlier
            return
        self._work, self._idle = [], now
        nodes = joined(segments).nodes
        self._trace.note("forward", self._since, now, nodes=nodes)
        visit = Visit(len(nodes), now - self._since)
        living = map(self._living, segments)
        self._pass_on(joined([self._computed(segment, visit) for segment in living]), now)
        self._next(now)

    def _computed(self, segment: Segment, visit: Visit) -> Segment:
        """The segment as it leaves, with hidden states; nobody reads them on their way, so a column stands for each."""
        if not segment.nodes:
            return segment
        rows, inner = len(segment.nodes), segment.inner
        if inner is not None:
            inner = inner.new_empty(rows, inner.shape[1] + self._does.kept)
        visits = (*segment.visits, visit)
        return replace(segment, x=torch.empty(rows, 1), inner=inner, visits=visits)

    def _pass_on(self, msg: Message, now: float) -> None:
        nodes = getattr(msg, "nodes", [])
        self._trace.note("send", now, now, kind=type(msg).__name__, nodes=nodes)
        self._send(msg, now)
