"""What a head is taught one after the other, so that it neither guesses badly nor drifts.

A head that is taught on the target's features alone meets something else when it drafts: its own outputs. Its guesses
get worse with every guess that it stands on, and the better it was taught, the faster. So the first part makes it good,
and the second one feeds it its own outputs. It knows nothing about models or files.
"""
from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Sequence

from train.eagle.loss import Objective

PASSES, STARTS = 8, 10
FIRST = 3.0  # what the pass over the target's features counts beside each later one
LIKELIEST = 64  # words of the target that the second part asks for


@dataclass(frozen=True)
class Part:
    """Some steps in which a head is taught in one way."""

    steps: int
    method: Objective


def own_part(steps: int, passes: int = PASSES, starts: int = STARTS) -> Part:
    """Passes over the head's own outputs, with gradients through all of them."""
    return Part(steps, Objective(passes, first=FIRST, starts=starts, likeliest=LIKELIEST, word_weight=1.0))


def teacher_parts(steps: int, noise: float, word_weight: float) -> list[Part]:
    """The target's features, in EAGLE's way (section 3.2); in the last quarter words count as much as features."""
    short = steps // 4
    return [Part(steps - short, Objective(1, noise=noise, word_weight=word_weight)),
            Part(short, Objective(1, word_weight=1.0))]


def part_at(step: int, parts: Sequence[Part]) -> int:
    """The number of the part that a step belongs to."""
    ends = accumulate(part.steps for part in parts)
    return sum(end <= step for end in ends)
