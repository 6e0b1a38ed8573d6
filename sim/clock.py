"""The virtual clock: time that passes only because somebody spends it."""
from __future__ import annotations


class VirtualClock:
    """Moments in seconds from 0; nobody sleeps."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def sleep_until(self, due: float) -> None:
        self._now = max(self._now, due)
