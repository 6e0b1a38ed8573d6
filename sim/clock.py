"""Modelled time: the virtual clock, the pace of what is emulated, and boards that get slower while they work.

It knows nothing about what takes the time.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Sequence

from config.profiles import Profile
from pipeline.trace import OFF, REAL, Clock, NoTrace

# From here to twice as far, doubles are equally far apart: 2^-34 s. So what begins at a whole second takes the same
# time wherever it begins, to the last bit.
EVEN_FROM = 2.0 ** 18


class VirtualClock:
    """Moments in seconds from `begin` on; nobody sleeps."""

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
    """What all emulated devices and wires of a rank share. Moments are seconds of `clock`."""

    profile: Profile
    clock: Clock = REAL
    trace: NoTrace = OFF

    def now(self) -> float:
        return self.clock.now()

    def spend_until(self, due: float) -> None:
        """Sleep until a moment; the time by which it was missed goes into the trace as `late`."""
        self.clock.sleep_until(due)
        self.trace.note("late", due)


class Heat:
    """A board that lowers its clock as it gets hot: what it has computed, and how much longer it takes for that.

    `throttles` are pairs, in the order of time: after so many seconds of computing everything takes so many times as
    long as at the start.
    """

    def __init__(self, throttles: Sequence[tuple[float, float]]) -> None:
        self._throttles = throttles
        self.cool()

    def cool(self) -> None:
        """The board is as at the start."""
        self._computed = 0.0

    def takes(self, seconds: float) -> float:
        """Seconds for what would take so many at the start; the board computes that, whole or in part."""
        factor = 1.0
        for since, slower in self._throttles:
            if self._computed >= since:
                factor = slower
        self._computed += seconds * factor
        return seconds * factor
