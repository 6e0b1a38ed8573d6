"""Curves of measured times: a few points, and straight lines between them."""
from __future__ import annotations

from typing import Sequence, Tuple

CurvePoint = Tuple[float, float]  # rows, seconds


def interpolated(points: Sequence[CurvePoint], at: float) -> float:
    """Return the height of a curve by linear interpolation between its points; before and after them it is level."""
    if at <= points[0][0]:
        return points[0][1]
    for (left, low), (right, high) in zip(points, points[1:]):
        if at <= right:
            return low + (high - low) * (at - left) / (right - left)
    return points[-1][1]


def extrapolated(points: Sequence[CurvePoint], at: float) -> float:
    """Return the height of a curve that keeps the slope between its last two points after them."""
    if len(points) < 2 or at <= points[-1][0]:
        return interpolated(points, at)

    (left, low), (right, high) = points[-2:]
    return high + (high - low) * (at - right) / (right - left)
