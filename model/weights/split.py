"""The number of layers of each rank of a split, from the key `stages` or from the bytes of the layers.

It knows nothing about tensors.
"""
from __future__ import annotations

import re
from itertools import accumulate
from math import prod
from typing import Sequence

from config.forms import MEMORY_SIZES, STAGES

# a split by bytes, into N stages, or by the stages' memory
AUTO = re.compile(rf"auto(?::([1-9]\d*)|:({MEMORY_SIZES}))?")


def parse_stages(text: str, layers: int) -> list[int]:
    """Parse "0+2+2+2+2", or a number of stages (larger ones last), into layers per rank; ValueError with the fix."""
    if not STAGES.holds(text):
        raise ValueError(f"stages={text} is not possible: give {STAGES.advice}")
    counts = list(map(int, text.split("+")))
    if len(counts) == 1:
        stages, = counts
        if stages > layers:
            raise ValueError(f"stages={text} does not fit: the model has {layers} layers, so choose 1 to {layers}")
        return [0] + [(layers + i) // stages for i in range(stages)]
    if sum(counts) != layers:
        stages = min(len(counts) - 1, layers)
        fitting = "+".join(map(str, parse_stages(str(stages), layers)))
        raise ValueError(f"stages={text} adds up to {sum(counts)} layers, but the model has {layers}; try {fitting}")
    return counts


def is_split_as(text: str, stages: list[int]) -> bool:
    """Return whether a split into `stages` matches `text`; of "auto:4" only the 4 can be compared."""
    auto = AUTO.fullmatch(text)
    if not auto:
        return parse_stages(text, sum(stages)) == stages
    return number_of(auto, len(stages) - 1) == len(stages) - 1


def number_of(auto: re.Match[str], usual: int) -> int:
    """Return the number of stages of a split by bytes, or `usual` if none is given."""
    return len(rooms_of(auto)) or int(auto[1] or usual)


def rooms_of(auto: re.Match[str]) -> list[int]:
    """Return the memory of each stage in kilobytes; empty if a split by bytes does not give it."""
    named = (auto[2] or "").split(",")
    return [round(1e6 * float(room)) for room in named if room]


def balance(loads: Sequence[int], rooms: Sequence[int]) -> list[int]:
    """Divide consecutive loads into groups of these sizes so that the fullest is filled least; return their counts."""
    groups, product = len(rooms), prod(rooms)
    assert 0 < groups <= len(loads), f"{groups} groups of {len(loads)} loads"

    def cost(counts: list[int]) -> tuple[int, int, list[int]]:
        ends = [0, *accumulate(counts)]
        bounds = zip(ends, ends[1:], rooms)
        filled = [sum(loads[a:b]) * (product // room) for a, b, room in bounds]
        return max(filled), sum(part ** 2 for part in filled), counts

    best: dict[int, list[int]] = {0: []}  # the best counts for the first i loads
    for done in range(groups):
        shorter, best = best, {}
        for end in range(done + 1, len(loads) + 1):
            choices = [[*counts, end - begin] for begin, counts in shorter.items() if begin < end]
            best[end] = min(choices, key=cost)
    return best[len(loads)]


def span(stages: list[int], stage: int) -> tuple[int, int]:
    """Return the layers [first, end) of a stage; the first of several stages has none."""
    first = sum(stages[:stage])
    return first, first + stages[stage]


def placements(stages: Sequence[int], tp: int) -> list[tuple[int, int]]:
    """Return the stage of each rank and its place there, if `tp` share one; the first of several is rank 0's alone."""
    sizes = [tp if stage or len(stages) == 1 else 1 for stage in range(len(stages))]
    return [(stage, member) for stage, size in enumerate(sizes) for member in range(size)]
