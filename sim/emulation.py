"""The pace of what is emulated: the modelled cluster, the clock that keeps its time, and the trace of what came late.

It knows nothing about what takes the time.
"""
from __future__ import annotations

from dataclasses import dataclass

from config.profiles import Profile
from pipeline.interfaces import REAL, Clock
from pipeline.trace import OFF, NoTrace


@dataclass(frozen=True)
class Pace:
    """What all emulated devices and wires of a rank share. Moments are seconds of `clock`."""

    profile: Profile
    clock: Clock = REAL
    trace: NoTrace = OFF

    def now(self) -> float:
        """The moment that it is."""
        return self.clock.now()

    def spend_until(self, due: float) -> None:
        """Sleep until a moment; the time by which it was missed goes into the trace as `late`."""
        self.clock.sleep_until(due)
        self.trace.note("late", due)
