"""The virtual clock: time that passes only because somebody spends it."""
from __future__ import annotations

import math

# From here to twice as far, doubles are equally far apart: 2^-34 s. So what begins at a whole second takes the same
# time wherever it begins, to the last bit.
EVEN = 2.0 ** 18


class VirtualClock:
    """Moments in seconds from `begin` on; nobody sleeps."""

    def __init__(self, begin: float = 0.0) -> None:
        self._now = begin

    def now(self) -> float:
        return self._now

    def even(self) -> None:
        """Go to the next whole second from `EVEN` on."""
        self._now = max(EVEN, math.floor(self._now) + 1.0)

    def sleep_until(self, due: float) -> None:
        self._now = max(self._now, due)
