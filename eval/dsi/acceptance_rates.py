"""How often a drafter is right: rates out of recorded matches, with bounds, and the lengths of runs of matches.

It knows nothing about models. A record has a 1 for each place of the target's text where the drafter, which had read
the text up to there, foresees the token of the target, and a 0 for each other place. A run is what stands between two
misses; the text's end may cut off the last one.
"""
from __future__ import annotations

from collections import Counter
from typing import Callable, Iterator, NamedTuple, Sequence

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


class Sums(NamedTuple):
    """The matches of some runs, and how many runs they are. With n matches in the mean, the rate is 1 - 1 / (1 + n)."""

    matches: int
    runs: int


def prefix(record: Record) -> Sums:
    """The paper's definition (appendix F.2): the common prefix of what target and drafter write by themselves.

    Up to its first miss the drafter has read its own words, so that the prefix is the first run of a record. A text
    without a miss counts with its whole length as if a miss followed.
    """
    ended, cut = runs(record)
    return Sums(ended[0] if ended else cut, 1)


def ended_runs(record: Record) -> Sums:
    """All runs that a miss ended.

    Those that the text's end cut off are left out. These are long ones more often than not, so the rate is too small.
    """
    ended, _ = runs(record)
    return Sums(sum(ended), len(ended))


def original_runs(record: Record) -> Sums:
    """The runs that the repository of the paper counts, in a branch of it.

    It takes the run that the text's end cuts off for one that ended, and forgets one that the last token ends. So a
    text has no run if its only miss is the last token, and the rate of n matches without a miss is n / (n + 1).
    """
    ended, cut = runs(record)
    counted = [*ended, cut] if cut else ended[:-1]
    return Sums(sum(counted), len(counted))


def likeliest(record: Record) -> Sums:
    """All matches, and a run for each miss: the rate is matches by places.

    Of runs that are geometric, some of them cut off, this is the rate of the greatest likelihood.
    """
    return Sums(sum(record), len(record) - sum(record))


DEFINITIONS: dict[str, Callable[[Record], Sums]] = {
    "likeliest": likeliest, "prefix": prefix, "runs": ended_runs, "original": original_runs}


def rate(records: Records, definition: Callable[[Record], Sums] = likeliest) -> Interval:
    """The acceptance rate by a definition, with the bounds of a bootstrap over texts; NaN if no run counts."""
    counted = [definition(record) for record in records if len(record)]
    counts = np.array(counted, dtype=float).reshape(-1, 2)

    def of_sums(sums: np.ndarray) -> np.ndarray:
        matches, ended = sums[..., 0, 0], sums[..., 0, 1]
        with np.errstate(invalid="ignore"):  # a draw of texts in which no run counts
            return np.asarray(matches / (matches + ended))

    return bootstrap([counts], of_sums)


def rate_after(records: Records, match: int) -> float:
    """Matches by places, of the places behind a match (1) or behind a miss (0); NaN if there is none."""
    neighbours = [pair for record in records for pair in zip(record, record[1:])]
    behind = [here for before, here in neighbours if before == match]
    return sum(behind) / len(behind) if behind else NAN


class Length(NamedTuple):
    """How many runs of this length a miss ended, how many the text's end cut off, and how many of the former there
    would be on average if each place matched by itself: all with one rate, or those of each text with its own."""

    length: int
    ended: int
    cut: int
    expected: float
    by_text: float


def lengths(records: Records) -> Iterator[Length]:
    """All lengths of runs from 0 to the longest; a text that ends with a miss has no run that is cut off."""
    found = [runs(record) for record in records]
    ended = Counter(length for one in found for length in one.ended)
    cut = Counter(one.cut for one in found if one.cut)
    chance = rate(records).value
    texts = [record for record in records if len(record)]
    own = [(len(text), sum(text) / len(text)) for text in texts]
    for length in range(max([*ended, *cut], default=-1) + 1):
        expected = sum(_expected(size, length, chance) for size, _ in own)
        by_text = sum(_expected(size, length, chance_of_text) for size, chance_of_text in own)
        yield Length(length, ended[length], cut[length], expected, by_text)


def _expected(size: int, length: int, chance: float) -> float:
    """The mean number of runs of a length that end in a text of that size: one at its start, others behind a miss."""
    later = size - length - 1  # places behind a miss at which such a run can start
    if later < 0:
        return 0.0
    miss = 1 - chance
    return chance ** length * miss * (1 + later * miss)
