"""How often a drafter is right: rates out of recorded matches, with bounds, and the lengths of runs of matches.

It knows nothing about models. A record has a 1 for each place of the target's text where the drafter, which had read
the text up to there, foresees the token of the target, and a 0 for each other place. A run is what stands between two
misses; the text's end may cut off the last one.
"""
from __future__ import annotations

from collections import Counter
from itertools import takewhile
from typing import Iterator, NamedTuple, Sequence

import numpy as np

from eval.metrics import NAN, Interval, bootstrap

Record = Sequence[int]
Records = Sequence[Record]


class Runs(NamedTuple):
    """The lengths of the runs that a miss ended, 0 too, and the length of the one that the text's end cut off."""

    ended: list[int]
    cut: int


def runs(record: Record) -> Runs:
    """The runs of one text."""
    ended, length = [], 0
    for match in record:
        if match:
            length += 1
        else:
            ended.append(length)
            length = 0
    return Runs(ended, length)


def of_mean(lengths: Sequence[int]) -> float:
    """The rate of runs with the mean n of these lengths, 1 - 1 / (1 + n); NaN without any."""
    return 1 - 1 / (1 + sum(lengths) / len(lengths)) if lengths else NAN


def prefix_rate(records: Records) -> float:
    """The rate as the paper defines it (appendix F.2): by the mean common prefix of what target and drafter write.

    Up to its first miss the drafter has read its own words, so that the prefix is the first run of a record. A text
    without a miss counts with its whole length, which makes the rate n / (n + 1) at most.
    """
    return of_mean([sum(1 for _ in takewhile(bool, record)) for record in records if len(record)])


def runs_rate(records: Records) -> float:
    """The same of all runs that a miss ended; 1 without a miss, NaN without a place.

    The runs that the text's end cut off are left out. These are long ones more often than not, so it is too small.
    """
    ended = [length for record in records for length in runs(record).ended]
    return 1.0 if not ended and any(map(len, records)) else of_mean(ended)


def original_rate(records: Records) -> float:
    """The same of the runs that the repository of the paper counts, in a branch of it.

    It takes a cut run for one that ended, and forgets the run that the last token of a text ends. So it is NaN where
    the only miss is the last token, and n / (n + 1) where there is none.
    """
    counted = []
    for record in records:
        ended, cut = runs(record)
        counted += [*ended, cut] if cut else ended[:-1]
    return of_mean(counted)


def likeliest_rate(records: Records) -> Interval:
    """Matches by places, with the bounds of a bootstrap over the texts; NaN without a place.

    Of runs that are geometric, some of them cut off, this is the rate of the greatest likelihood.
    """
    counts = np.array([[sum(record), len(record)] for record in records if len(record)], dtype=float)
    return bootstrap([counts.reshape(-1, 2)], lambda sums: np.asarray(sums[..., 0, 0] / sums[..., 0, 1]))


def rate_after(records: Records, match: int) -> float:
    """Matches by places, of the places behind a match (1) or behind a miss (0); NaN if there is none."""
    behind = [here for record in records for before, here in zip(record, record[1:]) if before == match]
    return sum(behind) / len(behind) if behind else NAN


class Length(NamedTuple):
    """How many runs of this length a miss ended, how many the text's end cut off, and how many of the former there
    would be on average if each place matched with the same rate whatever came before."""

    length: int
    ended: int
    cut: int
    expected: float


def lengths(records: Records) -> Iterator[Length]:
    """All lengths of runs from 0 to the longest; a text that ends with a miss has no run that is cut off."""
    found = [runs(record) for record in records]
    ended = Counter(length for one in found for length in one.ended)
    cut = Counter(one.cut for one in found if one.cut)
    rate = likeliest_rate(records).value
    sizes = [len(record) for record in records]
    for length in range(max([*ended, *cut], default=-1) + 1):
        expected = sum(_expected(size, length, rate) for size in sizes)
        yield Length(length, ended[length], cut[length], expected)


def _expected(size: int, length: int, rate: float) -> float:
    """The mean number of runs of a length that end in a text of that size: one at its start, others behind a miss."""
    later = size - length - 1  # places behind a miss at which such a run can start
    return 0.0 if later < 0 else rate ** length * (1 - rate) * (1 + later * (1 - rate))


class Rates(NamedTuple):
    """The acceptance rate by each definition; the likeliest one has bounds of 95 %."""

    prefix: float
    runs: float
    original: float
    likeliest: Interval


def rates(records: Records) -> Rates:
    """All of them."""
    return Rates(prefix_rate(records), runs_rate(records), original_rate(records), likeliest_rate(records))
