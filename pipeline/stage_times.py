"""What each stage takes by rows, as the segments that came back tell; the newest of them count most.

It knows nothing about how that is used. A stage is taken to be a curve over rows that rises; when it gets slower or
faster, it does so for all rows.
"""
from __future__ import annotations

import math
from bisect import bisect_right
from typing import Sequence, Tuple

from pipeline.messages import Visit

NEWS = 0.25  # the weight of a new time beside all before it
LEAST, MOST = 0.5, 2.0  # by which a single new time may move the times for other numbers of rows
POINTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # rows for which sums over stages are kept
Point = Tuple[float, float]  # rows, seconds


class Curve:
    """Seconds of one stage by rows; numbers of rows between the same two powers of two count as alike."""

    def __init__(self) -> None:
        self._points: dict[int, Point] = {}

    def learn(self, visit: Visit) -> None:
        """The stage has computed so many rows in so many seconds."""
        place = visit.rows.bit_length()
        rows, seconds = self._points.get(place, visit)
        newer = seconds + NEWS * (visit.seconds - seconds)
        pace = min(max(newer / seconds, LEAST), MOST) if seconds > 0 else 1.0
        for other, (at, took) in self._points.items():
            self._points[other] = at, took * pace
        self._points[place] = rows + NEWS * (visit.rows - rows), newer

    def of(self, rows: Sequence[int]) -> list[float]:
        """Seconds for each of these numbers of rows.

        Between two that are known the curve goes on as it did before them, up to the height of the second: a stage is
        not taken to be slower for more rows before it was.
        """
        rising: list[Point] = []
        for place in sorted(self._points):
            at, seconds = self._points[place]
            least = rising[-1][1] if rising else 0.0
            rising.append((at, max(seconds, least)))
        return [_foreseen(rising, count) for count in rows]


class StageTimes:
    """The curves of all stages of a ring."""

    def __init__(self) -> None:
        self._curves: list[Curve] = []
        self._slowest: list[Point] = []  # of the stages; empty: not reckoned since the last news
        self._whole: list[Point] = []  # all stages together

    def learn(self, visits: Sequence[Visit]) -> None:
        """A message has come back that was computed by the first of the stages, as these tell."""
        while len(self._curves) < len(visits):
            self._curves.append(Curve())
        for curve, visit in zip(self._curves, visits):
            curve.learn(visit)
        self._slowest = []

    def slowest(self, rows: int) -> float:
        """Seconds of the slowest stage for so many rows; 0 before any is known."""
        self._reckon()
        return _between(self._slowest, rows)

    def more(self, rows: int) -> float:
        """Seconds that one row more takes in all stages together, beside so many rows."""
        self._reckon()
        place = min(max(bisect_right(POINTS, rows), 1), len(POINTS) - 1)
        (first, before), (last, behind) = self._whole[place - 1:place + 1]
        return (behind - before) / (last - first)

    def _reckon(self) -> None:
        if self._slowest:
            return
        curves = [curve.of(POINTS) for curve in self._curves]
        columns = list(zip(*curves)) or [(0.0,)] * len(POINTS)
        self._slowest = list(zip(POINTS, map(max, columns)))
        self._whole = list(zip(POINTS, map(sum, columns)))


def _between(points: Sequence[Point], at: float) -> float:
    """The height at a place, on straight lines between these points."""
    if at <= points[0][0]:
        return points[0][1]
    for (left, low), (right, high) in zip(points, points[1:]):
        if at <= right:
            return low + (high - low) * (at - left) / (right - left)
    return points[-1][1]


def _foreseen(points: Sequence[Point], at: float) -> float:
    """The height at a place, if the line through the two points before it goes on up to the height of the next."""
    before = [point for point in points if point[0] <= at]
    if not before:
        return points[0][1]
    behind = points[len(before):]
    highest = behind[0][1] if behind else math.inf
    left, low = before[-1]
    slope = 0.0
    if len(before) > 1:
        earlier, lower = before[-2]
        slope = (low - lower) / (left - earlier)
    return min(low + slope * (at - left), highest)
