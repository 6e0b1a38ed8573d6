"""Modelled time: the virtual clock, the pace of an emulated rank, and boards that get slower while they work.

It knows nothing about what takes the time.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Sequence

from config.profiles import Profile
from pipeline.trace import OFF, REAL, Clock, NoTrace

# From here to twice as far, doubles are equally far apart: 2^-34 s. So times do not depend on the whole second at which
# they begin, to the last bit.
EVEN_FROM = 2.0 ** 18


class VirtualClock(Clock):
    """A clock that only counts, in seconds from `begin`."""

    def __init__(self, begin: float = 0.0) -> None:
        self._now = begin

    def now(self) -> float:
        return self._now

    def even(self) -> None:
        """Go to the next whole second from `EVEN_FROM` on."""
        self._now = max(EVEN_FROM, math.floor(self._now) + 1.0)

    def sleep_until(self, due: float) -> None:
        self._now = max(self._now, due)


@dataclass(frozen=True)
class Pace:
    """The profile, clock and trace of all emulated devices and wires of a rank."""

    profile: Profile
    clock: Clock = REAL
    trace: NoTrace = OFF

    def now(self) -> float:
        return self.clock.now()

    def spend_until(self, due: float) -> None:
        """Sleep until a moment; the trace notes as `late` by how much it was missed."""
        self.clock.sleep_until(due)
        self.trace.note("late", due)


class Heat:
    """The heat of a board that lowers its clock.

    `throttles` are pairs in order: seconds of computing, and the factor by which everything takes longer after them.
    """

    def __init__(self, throttles: Sequence[tuple[float, float]]) -> None:
        self._throttles = throttles
        self.cool()

    def cool(self) -> None:
        """Begin as at the start."""
        self._computed = 0.0

    def takes(self, seconds: float) -> float:
        """Compute work that takes `seconds` at the start; returns its present seconds."""
        factor = 1.0
        for since, slower in self._throttles:
            if self._computed >= since:
                factor = slower
        self._computed += seconds * factor
        return seconds * factor
