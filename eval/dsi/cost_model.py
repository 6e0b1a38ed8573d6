"""The cost of a text as a sum over rounds or runs, each of accepted drafts and one more token: exact, and counted.

The costs are those of `formulas.py` (with its symbols), cut off at the end of the text. The last token is always the
target's. So with `left` tokens to go, at most left - 1 drafts are useful, and no more are drafted.

A *round* (SI) ends at its lookahead; a *run* (DSI) ends with a rejection or the text. Arrays: C configurations;
R outcomes of each.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from eval.dsi.formulas import Array, Numbers, check_accounting, doubles

ENDLESS = 1 << 40  # more drafts than any text has tokens
NEGLIGIBLE = 1e-20  # probability of outcomes that change no digit of a double


@dataclass(frozen=True)
class DecodingRounds:
    """Rounds that draft and then verify (SI), or runs of drafts that are verified window after window (DSI)."""

    target: float
    drafter: float
    lookahead: Array  # [C, 1]
    runs: bool = False  # whether these are runs, which continue until a rejection while plain decoding runs in parallel
    late: bool = False  # whether a run that accepts a multiple of k drafts pays for one more window (original)

    @property
    def most(self) -> Array:
        """The most drafts that a round or run can accept, without regard to the end of the text."""
        return np.full_like(self.lookahead, ENDLESS) if self.runs else self.lookahead

    def cost(self, left: Numbers, accepted: Array) -> Array:
        """Return the costs [C, R] of rounds or runs with this many drafts `accepted` [C, R] and `left` tokens to go."""
        drafts = self.lookahead
        if self.runs:
            windows = accepted // self.lookahead + 1 if self.late else -(-accepted // self.lookahead)
            drafts = np.where(accepted > 0, windows, 0) * self.lookahead
        drafts = np.minimum(drafts, np.asarray(left) - 1)
        cost: Array = self.target + drafts * self.drafter
        return np.minimum(cost, (accepted + 1) * self.target) if self.runs else cost

    def iterations(self, left: Numbers, accepted: Array) -> Array:
        """Return the number of windows [C, R]: one for a round; for a run, those up to the rejection or the text's end.

        At the end of the text a run has one more window, without drafts.
        """
        if not self.runs:
            return np.ones(accepted.shape)
        ends = accepted >= np.asarray(left) - 1
        begun, filled = -(-accepted // self.lookahead), accepted // self.lookahead
        return np.where(ends, begun, filled) + 1.0


def si(target: float, drafter: float, lookahead: Numbers) -> DecodingRounds:
    """Return SI with C lookaheads, a number or [C]; plain decoding has the lookahead 0."""
    return DecodingRounds(target, drafter, doubles(lookahead).reshape(-1, 1))


def dsi(target: float, drafter: float, lookahead: Numbers, accounting: str = "corrected") -> DecodingRounds:
    """Return DSI in one of the two accountings. Raise ValueError for any other."""
    check_accounting(accounting)
    plain = si(target, drafter, lookahead)
    return replace(plain, runs=True, late=accounting == "original")


# --- mean and deviation -----------------------------------------------------------------------------------------------

class Moments(NamedTuple):
    """The moments of the cost of a whole text, [C] each."""

    mean: Array
    deviation: Array


def moments(decoding: DecodingRounds, acceptance: float, tokens: int) -> Moments:
    """Return mean and standard deviation of the cost of `tokens` tokens, for C configurations.

    `acceptance` is the probability that a draft is correct, the same for each draft and independent. A round or a run
    depends on nothing before it. So mean E and variance V with `left` tokens to go are sums over its outcomes, which
    have costs C and probabilities p:

        E(left) = sum p (C + E(left - tokens))
        V(left) = sum p (V(left - tokens) + (C + E(left - tokens) - E(left))^2)
    """
    a, count = acceptance, len(decoding.lookahead)
    mean = np.zeros((count, tokens + 1))  # index: tokens left
    variance = np.zeros_like(mean)
    likely = math.ceil(math.log(NEGLIGIBLE) / math.log(a)) if 0 < a < 1 else 1
    widest = int(min(likely, max(1, decoding.most.max()), tokens))
    rows = np.arange(count)[:, None]
    for left in range(1, tokens + 1):
        last = np.minimum(decoding.most, left - 1).astype(np.int64)
        short = np.arange(min(widest, left))
        accepted = np.concatenate([np.minimum(short, last), last], axis=1)
        rejected = np.where(short < last, (1 - a) * a ** short, 0.0)
        chance = np.concatenate([rejected, a ** last], axis=1)
        after = left - 1 - accepted
        cost = decoding.cost(left, accepted) + mean[rows, after]
        mean[:, left] = (chance * cost).sum(axis=1)
        spread = variance[rows, after] + (cost - mean[:, left, None]) ** 2
        variance[:, left] = (chance * spread).sum(axis=1)
    return Moments(mean[:, tokens], np.sqrt(variance[:, tokens]))


# --- texts ------------------------------------------------------------------------------------------------------------

class TextCost(NamedTuple):
    """The cost of one text, and its number of windows."""

    cost: float
    iterations: float


def counted(decoding: DecodingRounds, windows: Array, tokens: int) -> TextCost:
    """Return the cost of a text in one configuration, from the correct drafts of its windows `[W]`, W >= `tokens`.

    A window of SI is a round; a run of DSI continues until a window is not full.
    """
    lookahead = decoding.lookahead.item()
    accepted = np.minimum(windows, lookahead)
    if decoding.runs:
        accepted = np.append(accepted, 0)  # a partial window, to end the last run
        ends = np.flatnonzero(accepted < lookahead)
        begins = np.append(0, ends[:-1] + 1)
        accepted = np.add.reduceat(accepted, begins)
    settled = np.cumsum(accepted + 1)
    left = tokens + accepted + 1 - settled
    left = left[left > 0]
    accepted = np.minimum(accepted[:left.size], left - 1)
    costs, iterations = decoding.cost(left, accepted), decoding.iterations(left, accepted)
    return TextCost(costs.sum(), iterations.sum())
