"""Modelled time: the virtual clock, and the pace of an emulated rank.

This module knows nothing about the work that takes the time.
"""
from __future__ import annotations

import math
from dataclasses import dataclass

from config.profiles import Profile
from pipeline.trace import OFF, REAL, Clock, NoTrace

# From this number to twice as much, float64 numbers have a constant spacing of 2^-34 s. So the bits of time differences
# do not depend on the whole second at which they begin.
EVEN_FROM = 2.0 ** 18


class VirtualClock(Clock):
    """A clock that stands still until it is set, in seconds from `begin`."""

    def __init__(self, begin: float = 0.0) -> None:
        self._now = begin

    def now(self) -> float:
        return self._now

    def set(self, now: float) -> None:
        """Set the clock, also back."""
        self._now = now

    def even(self) -> None:
        """Advance to the next whole second, at least to `EVEN_FROM`."""
        self._now = max(EVEN_FROM, math.floor(self._now) + 1.0)

    def sleep_until(self, due: float) -> None:
        self._now = max(self._now, due)


@dataclass(frozen=True)
class Pace:
    """The profile, clock and trace that all emulated devices and wires of a rank share."""

    profile: Profile
    clock: Clock = REAL
    trace: NoTrace = OFF

    def now(self) -> float:
        return self.clock.now()

    def own_seconds(self, num_messages: int = 0, num_rows: int = 0, num_guesses: int = 0) -> float:
        """Return the seconds of rank 0's own work; 0 in real time, in which Python spends them itself."""
        is_virtual = isinstance(self.clock, VirtualClock)
        return self.profile.own_seconds(num_messages, num_rows, num_guesses) if is_virtual else 0.0

    def spend_until(self, due: float) -> None:
        """Sleep until the time `due`; the trace records the delay after it as `late`."""
        self.clock.sleep_until(due)
        self.trace.note("late", due)
