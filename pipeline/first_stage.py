"""When the first stage is free: rank 0's own model of it, from what it sent and when that came back.

It needs no message, and so is right for every link: a segment spends about as long in each stage, so the first one is
busy for a share of the time after which a segment comes back that waited for no other.
"""
from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import AbstractSet

SLACK = 0.1  # of a segment's time in the stage: as early as that, a segment may be sent
NEWS = 0.25  # the weight of a new time on the way beside all before it
FADING = 1.02  # by which the shortest time seen grows with each new one, so that a slower pipeline is believed


@dataclass
class Stay:
    """A segment in the first stage."""

    nodes: frozenset[int]
    rows: int
    sent: float
    begins: float
    ends: float


class FirstStage:
    """The stays that are not over. `share` is the part of a segment's way that it spends in the first stage."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._seconds: dict[int, float] = {}  # rows -> the shortest time seen
        self._stays: deque[Stay] = deque()  # of the segments that are not back
        self._left = 0.0  # when the newest of the others had left the stage
        self._way: float | None = None  # how long segments were on their way of late

    def send(self, nodes: list[int], now: float) -> None:
        """A segment was sent."""
        begins = max(now, self.free_at)
        ends = begins + self._takes(len(nodes))
        stay = Stay(frozenset(nodes), len(nodes), now, begins, ends)
        self._stays.append(stay)

    def back(self, rows: int, now: float) -> None:
        """The oldest segment is back, with so many of its rows."""
        stay = self._stays.popleft()
        self._left = min(stay.ends, now)
        begins = stay.begins if stay.ends <= now else stay.sent  # what was reckoned too late is not believed
        if rows:
            way = now - begins if self._way is None else self._way
            self._way = way + NEWS * (now - begins - way)
        if rows == stay.rows:
            took = (now - begins) * self._share
            known = self._seconds.get(rows, took)
            self._seconds[rows] = min(took, FADING * known)

    def prune(self, dead: AbstractSet[int], now: float) -> None:
        """These nodes died: a segment without others is given up, and those behind it come earlier."""
        free = self._left
        for stay in self._stays:
            takes = stay.ends - stay.begins
            given_up = stay.ends > now and stay.nodes <= dead
            stay.begins = max(stay.sent, free)
            stay.ends = max(stay.begins, now) if given_up else stay.begins + takes
            free = stay.ends

    @property
    def free_at(self) -> float:
        """The moment at which everything that was sent has left the stage."""
        return self._stays[-1].ends if self._stays else 0.0

    @property
    def due(self) -> float:
        """The moment at which the oldest segment should be back; infinite if none is under way."""
        if not self._stays or self._way is None:
            return math.inf
        return self._stays[0].begins + self._way

    @property
    def ready_at(self) -> float:
        """The moment from which on a segment may be sent, since it would hardly wait."""
        if not self._stays:
            return 0.0
        last = self._stays[-1]
        return last.ends - SLACK * (last.ends - last.begins)

    def _takes(self, rows: int) -> float:
        """Seconds of a segment: the shortest known of one with as many rows or more, else the longest known."""
        larger = [seconds for known, seconds in self._seconds.items() if known >= rows]
        return min(larger) if larger else max(self._seconds.values(), default=0.0)
