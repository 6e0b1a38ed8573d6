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

GOOD = math.log(0.1)  # the worth from which a guess may go beyond the rows of one request


class Bidder(Protocol):
    """A request that has guesses."""

    tree: TokenTree
    priority: float
    passed_over: int  # segments that left without any of its guesses, since one left with some


class Budget:
    """The rows of the segment that is being put together."""

    def __init__(self, segments: int) -> None:
        self._segments = max(1, segments)  # that are under way at once
        self._open = False  # whether it was reckoned since the last segment left
        self._least = 0.0  # the worth of the last guess that goes, as a logarithm
        self._left = 0  # rows for guesses

    def share(self, bidder: Bidder, bidders: Sequence[Bidder], size: int) -> int:
        """How many of `size` rows this one of the bidders may fill; those of its text are among them."""
        if not self._open:
            self._reckon(bidders, size)
        mine = min(self._left, sum(worth >= self._least for worth in worths(bidder)))
        self._left -= mine
        bidder.passed_over = 0 if mine else bidder.passed_over + bool(bidder.tree.waiting)
        return len(bidder.tree.unsent) + mine

    def close(self) -> None:
        """The segment has left."""
        self._open = False

    def _reckon(self, bidders: Sequence[Bidder], size: int) -> None:
        text = sum(len(bidder.tree.unsent) for bidder in bidders)
        served = max(1.0, len(bidders) / self._segments)
        everything = (worth for bidder in bidders for worth in worths(bidder))
        best = heapq.nlargest(max(0, int(size * served) - text), everything)
        good = sum(worth >= GOOD for worth in best)
        best = best[:max(size - text, good)]
        self._open, self._left = True, len(best)
        self._least = best[-1] if best else math.inf


def worths(bidder: Bidder) -> Iterator[float]:
    """The logarithms of what the guesses that wait are worth."""
    tree = bidder.tree
    weight = math.log(bidder.priority * (1 + bidder.passed_over)) - tree.score[tree.tip]
    return (tree.score[node] + weight for node in tree.waiting)
