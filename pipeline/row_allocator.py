"""The budget of rows: which guesses of all requests go into the next segment. It knows nothing about where that goes.

Text goes before guesses, and of the prompts that are still to be sent that of the oldest request. Guesses go in the
order of their probability times the priority of their request. Those of a request whose guesses were left behind count
once more for each segment that left without any of them, so nobody is passed over for ever.

Segments take turns, so each is for a share of the requests, and has as many rows for each of those as a request alone
would send; but beyond the rows of one request a guess must be worth its row.
"""
from __future__ import annotations

import heapq
import math
from typing import Iterator, Protocol, Sequence

from model.tree import TokenTree
from pipeline.stage_times import StageTimes

GOOD = math.log(0.1)  # the worth from which a guess may go beyond the rows of one request
HALF = 0.5  # of the stages are passed by a guess that proves wrong, in the mean


class Bidder(Protocol):
    """A request that has guesses."""

    tree: TokenTree
    priority: float
    passed_over: int  # segments that left without any of its guesses, since one left with some
    thrifty: bool  # whether only guesses that pay go


class Budget:
    """The rows of the segment that is being put together."""

    def __init__(self, segments: int, times: StageTimes) -> None:
        self._segments = max(1, segments)  # that are under way at once
        self._times = times
        self._open = False  # whether it was reckoned since the last segment left
        self._least = 0.0  # the worth of the last guess that goes, as a logarithm
        self._left = 0  # rows for guesses

    def share(self, bidder: Bidder, bidders: Sequence[Bidder], size: int) -> int:
        """How many of `size` rows this one of the bidders may fill; those of its text are among them."""
        if not self._open or len(bidders) == 1:  # who is alone waits for nobody else
            self._reckon(bidders, size)
        among = worths(bidder, weighed=len(bidders) > 1)
        mine = min(self._left, sum(worth >= self._least for worth in among))
        self._left -= mine
        bidder.passed_over = 0 if mine else bidder.passed_over + bool(bidder.tree.waiting)
        return len(bidder.tree.unsent) + mine

    def close(self) -> None:
        """The segment has left."""
        self._open = False

    def _reckon(self, bidders: Sequence[Bidder], size: int) -> None:
        text = sum(len(bidder.tree.unsent) for bidder in bidders)
        served = max(1.0, len(bidders) / self._segments)
        everything = (worth for bidder in bidders for worth in worths(bidder, len(bidders) > 1))
        best = heapq.nlargest(max(0, int(size * served) - text), everything)
        good = sum(worth >= GOOD for worth in best)
        best = best[:max(size - text, good)]
        if all(bidder.thrifty for bidder in bidders):
            tips = sum(bool(bidder.tree.unsent) for bidder in bidders)
            best = best[:self._paying(best, text, tips)]
        self._open, self._left = True, len(best)
        self._least = best[-1] if best else math.inf

    def _paying(self, best: Sequence[float], rows: int, certain: int) -> int:
        """How many of these guesses pay, the best first, beside rows of text of which so many are last tokens.

        One that goes along is answered earlier by the time of a segment in the slowest stage, and each other row later
        by what one more row takes in all stages. Both count as much as the rows are likely to become text.
        """
        likely = float(certain)
        for place, worth in enumerate(best):
            chance = math.exp(min(worth, 0.0))
            gained = chance * self._times.slowest(rows + place)
            lost = HALF * likely * self._times.more(rows + place)
            if likely and gained < lost:
                return place
            likely += chance
        return len(best)


def worths(bidder: Bidder, weighed: bool) -> Iterator[float]:
    """The logarithms of what the guesses that wait are worth: their probability, and beside others what weighs it."""
    tree = bidder.tree
    weight = math.log(bidder.priority * (1 + bidder.passed_over)) if weighed else 0.0
    added = weight - tree.score[tree.tip]
    return (tree.score[node] + added for node in tree.waiting)
