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

    layer_counts = list(map(int, text.split("+")))
    if len(layer_counts) == 1:
        num_stages, = layer_counts
        if num_stages > layers:
            raise ValueError(f"stages={text} does not fit: the model has {layers} layers, so choose 1 to {layers}")
        return [0] + [(layers + stage) // num_stages for stage in range(num_stages)]

    if sum(layer_counts) != layers:
        num_stages = min(len(layer_counts) - 1, layers)
        fitting_split = "+".join(map(str, parse_stages(str(num_stages), layers)))
        raise ValueError(f"stages={text} adds up to {sum(layer_counts)} layers, but the model has {layers}; "
                         f"try {fitting_split}")
    return layer_counts


def is_split_as(text: str, stages: list[int]) -> bool:
    """Return whether a split into `stages` matches `text`; of "auto:4" only the 4 can be compared."""
    auto = AUTO.fullmatch(text)
    if not auto:
        return parse_stages(text, sum(stages)) == stages
    return number_of(auto, len(stages) - 1) == len(stages) - 1


def number_of(auto: re.Match[str], default: int) -> int:
    """Return the number of stages of a split by bytes, or `default` if none is given."""
    return len(rooms_of(auto)) or int(auto[1] or default)


def rooms_of(auto: re.Match[str]) -> list[int]:
    """Return the memory of each stage in kilobytes; empty if a split by bytes does not give it."""
    gigabytes = (auto[2] or "").split(",")
    return [round(1e6 * float(size)) for size in gigabytes if size]


def balance(loads: Sequence[int], rooms: Sequence[int]) -> list[int]:
    """Divide consecutive loads into groups of these sizes so that the fullest is filled least; return their counts."""
    num_groups, room_product = len(rooms), prod(rooms)
    assert 0 < num_groups <= len(loads), f"{num_groups} groups of {len(loads)} loads"

    def cost(counts: list[int]) -> tuple[int, int, list[int]]:
        bounds = [0, *accumulate(counts)]
        groups = zip(bounds, bounds[1:], rooms)
        fill_levels = [sum(loads[begin:end]) * (room_product // room) for begin, end, room in groups]
        return max(fill_levels), sum(level ** 2 for level in fill_levels), counts

    best_counts: dict[int, list[int]] = {0: []}  # by the number of loads that are divided
    for num_done in range(num_groups):
        shorter_counts, best_counts = best_counts, {}
        for end in range(num_done + 1, len(loads) + 1):
            choices = [[*counts, end - begin] for begin, counts in shorter_counts.items() if begin < end]
            best_counts[end] = min(choices, key=cost)
    return best_counts[len(loads)]


def span(stages: list[int], stage: int) -> tuple[int, int]:
    """Return the layers [first, end) of a stage; the first of several stages has none."""
    first_layer = sum(stages[:stage])
    return first_layer, first_layer + stages[stage]


def placements(stages: Sequence[int], tp: int) -> list[tuple[int, int]]:
    """Return the stage of each rank and its place there, if `tp` share one; the first of several is rank 0's alone."""
    group_sizes = [tp if stage or len(stages) == 1 else 1 for stage in range(len(stages))]
    return [(stage, member) for stage, group_size in enumerate(group_sizes) for member in range(group_size)]
