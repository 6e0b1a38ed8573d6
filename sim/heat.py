"""Boards that get slower while they work, as one does that gets hot and lowers its clock."""
from __future__ import annotations

from typing import Sequence


class Heat:
    """What a board has computed since the start, and how much longer it takes for that.

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
