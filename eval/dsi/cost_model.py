"""The cost of a text as a sum over rounds or runs, each of accepted drafts and one more token: its mean, and counted.

The costs are those of `formulas.py` (with its symbols), cut off at the end of the text. The last token is always the
target's. So with `num_left` tokens to go, at most num_left - 1 drafts are useful, and no more are drafted.

A *round* (SI) ends at its lookahead; a *run* (DSI) ends with a rejection or the text. Arrays: C configurations;
R outcomes of each.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from eval.dsi.formulas import ACCOUNTINGS, Array, Numbers, doubles

NEGLIGIBLE = 1e-20  # probability of outcomes that change no digit of a double


@dataclass(frozen=True)
class DecodingRounds:
    """Rounds that draft and then verify (SI), or runs of drafts that are verified window after window (DSI)."""

    target: float
    drafter: float
    lookahead: Array  # [C, 1]
    are_runs: bool = False  # runs continue until a rejection, while plain decoding goes on in parallel
    late: bool = False  # whether a run that accepts a multiple of k drafts pays for one more window (original)

    def cost(self, num_left: Numbers, num_accepted: Array) -> Array:
        """Return the costs [C, R] of rounds or runs by their accepted drafts [C, R], with `num_left` tokens to go."""
        num_drafts = self.lookahead
        if self.are_runs:
            num_windows = num_accepted // self.lookahead + 1 if self.late else -(-num_accepted // self.lookahead)
            num_drafts = np.where(num_accepted > 0, num_windows, 0) * self.lookahead

        num_drafts = np.minimum(num_drafts, np.asarray(num_left) - 1)
        cost: Array = self.target + num_drafts * self.drafter
        return np.minimum(cost, (num_accepted + 1) * self.target) if self.are_runs else cost

    def iterations(self, num_left: Numbers, num_accepted: Array) -> Array:
        """Return the number of windows [C, R]: one for a round; for a run, those up to the rejection or the text's end.

        At the end of the text a run has one more window, without drafts.
        """
        if not self.are_runs:
            return np.ones(num_accepted.shape)
        ends_text = num_accepted >= np.asarray(num_left) - 1
        begun_windows, full_windows = -(-num_accepted // self.lookahead), num_accepted // self.lookahead
        return np.where(ends_text, begun_windows, full_windows) + 1.0


def si(target: float, drafter: float, lookahead: Numbers) -> DecodingRounds:
    """Return SI with C lookaheads, a number or [C]; plain decoding has the lookahead 0."""
    return DecodingRounds(target, drafter, doubles(lookahead).reshape(-1, 1))


def dsi(target: float, drafter: float, lookahead: Numbers, accounting: str = "corrected") -> DecodingRounds:
    """Return DSI in one of the two accountings. Raise KeyError for any other."""
    return DecodingRounds(target, drafter, doubles(lookahead).reshape(-1, 1), True, ACCOUNTINGS[accounting])


def mean_cost(decoding: DecodingRounds, acceptance: float, num_tokens: int) -> Array:
    """Return the mean cost `[C]` of `num_tokens` tokens.

    `acceptance` is the probability that a draft is correct, the same for each draft and independent. A round or a run
    depends on nothing before it. So the mean E with some tokens left is a sum over its outcomes, which have costs C and
    probabilities p: E(left) = sum p (C + E(left - tokens)).
    """
    powers = acceptance ** np.arange(num_tokens)
    num_likely = int(np.count_nonzero(powers > NEGLIGIBLE))
    means = np.zeros((len(decoding.lookahead), num_tokens + 1))  # index: tokens left

    for num_left in range(1, num_tokens + 1):
        # outcomes: a rejection after each number of drafts, or all drafts accepted
        max_accepted = np.minimum(np.inf if decoding.are_runs else decoding.lookahead, num_left - 1)
        num_outcomes = min(num_left, num_likely, 1 + int(np.max(max_accepted)))
        num_accepted = np.arange(num_outcomes)
        chance = np.select([num_accepted < max_accepted, num_accepted == max_accepted],
                           [(1 - acceptance) * powers[num_accepted], powers[num_accepted]])

        total_cost = decoding.cost(num_left, num_accepted) + means[:, num_left - 1 - num_accepted]
        means[:, num_left] = (chance * total_cost).sum(axis=1)
    return means[:, num_tokens]


# --- texts ------------------------------------------------------------------------------------------------------------

class TextCost(NamedTuple):
    """The cost of one text, and its number of windows."""

    cost: float
    iters: float


def counted(decoding: DecodingRounds, windows: Array, num_tokens: int) -> TextCost:
    """Return the cost of a text in one configuration, from the correct drafts of its windows `[W]`, W >= `num_tokens`.

    A window of SI is a round; a run of DSI continues until a window is not full.
    """
    lookahead = decoding.lookahead.item()
    num_accepted = np.minimum(windows, lookahead)
    if decoding.are_runs:
        num_accepted = np.append(num_accepted, 0)  # a partial window, to end the last run
        run_ends = np.flatnonzero(num_accepted < lookahead)
        run_begins = np.append(0, run_ends[:-1] + 1)
        num_accepted = np.add.reduceat(num_accepted, run_begins)

    # up to the end of the text
    num_settled = np.cumsum(num_accepted + 1)
    num_left = num_tokens + num_accepted + 1 - num_settled
    num_left = num_left[num_left > 0]
    num_accepted = np.minimum(num_accepted[:num_left.size], num_left - 1)

    costs, iterations = decoding.cost(num_left, num_accepted), decoding.iterations(num_left, num_accepted)
    return TextCost(costs.sum(), iterations.sum())
