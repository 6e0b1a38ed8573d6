"""The real clock. Whoever reads the time or sleeps is given a clock, so that a modelled one can take its place."""
from __future__ import annotations

import time


class RealClock:
    """The machine's monotonic clock, in seconds."""

    def now(self) -> float:
        return time.monotonic()

    def sleep_until(self, due: float) -> None:
        while (left := due - time.monotonic()) > 0:
            time.sleep(left)


REAL = RealClock()
