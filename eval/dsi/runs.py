"""Runs of accepted drafts: drawn by chance, or recorded. A run is n accepted drafts, which a rejected one ends.

What is recorded are traces: for each text whether the draft of every position was the target's token.
"""
from __future__ import annotations

from itertools import cycle, islice
from typing import Iterable, Iterator, Sequence

import numpy as np

from config.files import fits, whole
from config.schema.untrusted import Name


def read_traces(path: Name) -> list[list[bool]]:
    """The traces of a JSON file, those without a position left out. Raises ValueError if it holds none."""
    found = whole(path)
    if not fits(found, [[lambda value: value in (0, 1)]]) or not any(found):
        raise ValueError(f"{path} holds no matches: write a JSON list with a list of 0 and 1 for each text, "
                         "as [[1, 1, 0, 1], [0, 1]]")
    return [list(map(bool, text)) for text in found if text]


def drawn(acceptance: float, most: int, chance: np.random.RandomState) -> Iterator[int]:
    """Lengths of runs without end: each draft is accepted with this chance, and no run has more than `most`.

    Where every draft is accepted each run has `most`. The lengths are those that the simulator published with the paper
    on DSI draws from a generator of the same seed.
    """
    while True:
        yield most if acceptance == 1 else min(int(chance.geometric(1 - acceptance)) - 1, most)


def spread(runs: Iterable[int], tokens: int) -> list[bool]:
    """For each of so many positions whether its draft is right, as runs without end say."""
    endless = (right for length in runs for right in [True] * length + [False])
    return list(islice(endless, tokens))


def gathered(right: Sequence[bool]) -> Iterator[int]:
    """The lengths of the runs of positions that are recorded, which begin anew at their end."""
    length = 0
    for hit in cycle(right):
        if not hit:
            yield length
        length = length + 1 if hit else 0


def until(runs: Iterable[int], tokens: int) -> list[int]:
    """The first runs whose accepted drafts are more than so many tokens."""
    some, total = [], 0
    for length in runs:
        some.append(length)
        total += length
        if total > tokens:
            break
    return some
