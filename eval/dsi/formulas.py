"""What a token costs in the long run: closed forms for plain, speculative and distributed decoding, and for pipelines.

Symbols of the paper on DSI (arXiv 2405.14105): `target` and `drafter` are the times of a forward of the target and of
the drafter, in one unit, which is also that of every result; `acceptance` is the chance that a draft is right, for each
alike and independent of all others; `lookahead` is how many drafts one verification checks. Arguments are numbers or
arrays that broadcast; results have the broadcast shape.

A *run* is n accepted drafts and the rejected position after them: n + 1 tokens, with the chance
acceptance^n (1 - acceptance). Cost per token is the mean cost of a run over the mean number of its tokens,
1 / (1 - acceptance); where every draft is accepted it is the limit.

Two accountings of a run of DSI: `corrected` counts ceil(n/k) k d + T, the moment at which the verification of the
rejected position ends if no verification waits for a server. `original` counts (floor(n/k) + 1) k d + T for n > 0, and
T for n = 0, as the offline simulator published with the paper does. With `bare`, a chain of verifications without
drafts runs beside them, and a run costs no more than (n + 1) T.
"""
from __future__ import annotations

from typing import Any, NamedTuple, Union

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Numbers = Union[float, Array]
ACCOUNTINGS = ("corrected", "original")
SLACK = 1e-9  # relative: quotients that are whole but for rounding count as whole
NEGLIGIBLE = 1e-18  # share of a cost that no double of it shows


# --- how many servers, how many drafts --------------------------------------------------------------------------------

def servers_needed(target: Numbers, drafter: Numbers, lookahead: Numbers) -> Array:
    """The target servers with which no verification waits: ceil(T / (k d)) (Eq. 1)."""
    return _ceil(doubles(target) / (lookahead * np.asarray(drafter)))


def least_lookahead(target: Numbers, drafter: Numbers, servers: Numbers) -> Array:
    """The smallest lookahead for which this many target servers are enough (Eq. 1); `servers` may be infinite."""
    return np.maximum(1, _ceil(doubles(target) / (servers * np.asarray(drafter))))


# --- cost per token ---------------------------------------------------------------------------------------------------

def si_rate(target: Numbers, drafter: Numbers, acceptance: Numbers, lookahead: Numbers) -> Array:
    """Draft k tokens, then verify them: rounds of k d + T, each of which yields min(n, k) + 1 tokens."""
    return (target + lookahead * drafter) / progress(acceptance, lookahead + 1)


def dsi_rate(target: Numbers, drafter: Numbers, acceptance: Numbers, lookahead: Numbers,
             accounting: str = "corrected", bare: bool = True) -> Array:
    """DSI with servers enough for Eq. 1; `bare` bounds every run by plain decoding.

    It is the cost of a run (module docstring), summed over n. Raises ValueError for an unknown accounting.
    """
    check_accounting(accounting)
    original = accounting == "original"
    rejection = 1 - np.asarray(acceptance)
    window = lookahead * drafter
    share = 1 / progress(acceptance, lookahead)
    # runs with n = 0 pay for no window
    windows = share - rejection ** 2 if original else share * acceptance
    rate = rejection * target + window * windows
    if not bare:
        return rate
    T, w, a, k, _ = np.broadcast_arrays(target, window, acceptance, lookahead, rate)
    saved = rejection * _saved_by_bare(T, w, a, k, late=int(original))
    no_sooner = w >= k * T  # a window takes as long as its tokens one by one
    return np.where(no_sooner, T, rate - saved)[()]


def check_accounting(accounting: str) -> None:
    """Raise ValueError for an unknown accounting."""
    if accounting not in ACCOUNTINGS:
        raise ValueError(f"accounting={accounting} is unknown: choose one of {', '.join(ACCOUNTINGS)}")


def visible_fraction(acceptance: Numbers, lookahead: Numbers) -> Array:
    """The share of the target's forwards that DSI does not hide: 1 - acceptance^lookahead."""
    with np.errstate(divide="ignore"):  # the logarithm of 0
        logarithm = np.log1p(doubles(acceptance) - 1)
    return np.abs(np.expm1(lookahead * logarithm))  # not -0.0, whose inverse is below all numbers


# --- pipelines --------------------------------------------------------------------------------------------------------

class Pipeline(NamedTuple):
    """The target cut into `stages` of T/P each, whatever their rows, with a `hop` from each to the next.

    Drafting is one chain of tokens on a device of its own. What was pruned takes no more time. Each method of decoding
    says what its token costs.
    """

    target: Numbers
    drafter: Numbers
    acceptance: Numbers
    lookahead: Numbers
    stages: Numbers
    hop: Numbers

    @property
    def latency(self) -> Array:
        """From sending a segment to its answer: T + (P - 1) hop, in an empty pipeline."""
        hops = doubles(self.stages) - 1
        return np.asarray(self.target + hops * self.hop)[()]

    @property
    def rows_of_share(self) -> Array:
        """How many rows a share of `naive` and `pruned` has: k drafts are shared out among P stages."""
        return _ceil(doubles(self.lookahead) / self.stages)

    @property
    def shares(self) -> Array:
        """How many shares the tip and k drafts make."""
        rows = doubles(self.lookahead) + 1
        return _ceil(rows / self.rows_of_share)

    def rate(self, method: str) -> Array:
        """What a token costs by the method of this name."""
        cost: Array = getattr(self, method)()
        return cost

    def ar(self) -> Array:
        """One token, once round the pipeline; nothing is drafted."""
        return self.latency

    def naive(self) -> Array:
        """k drafts, then tip and drafts in equal shares that follow one another, judged when all are back.

        A round takes k d, the latency, and T/P for each share after the first; it yields what a round of SI yields.
        """
        return self._round(self.shares - 1)

    def pruned(self) -> Array:
        """The same shares, each judged as it returns; a round ends with the share that holds its last answer.

        The row of the n-th draft says what follows n accepted ones, so share j (from 0) is waited for if j times the
        rows of a share were accepted. The sum of these chances is a geometric one.
        """
        chance = doubles(self.acceptance) ** self.rows_of_share
        return self._round(progress(chance, self.shares) - 1)

    def _round(self, waited: Array) -> Array:
        """A token of a round that waits for so many shares after the first."""
        cost = self.lookahead * self.drafter + self.latency + waited * self.target / self.stages
        return cost / progress(self.acceptance, self.lookahead + 1)

    def pipedec(self) -> Array:
        """Every step sends one draft more, and a step takes as long as its slower part, max(d, T/P).

        A run of n accepted drafts costs n steps and the latency; `lookahead` does not count.
        """
        step = np.maximum(self.drafter, self.target / self.stages)
        return (1 - np.asarray(self.acceptance)) * self.latency + self.acceptance * step

    def continuous(self) -> Array:
        """The tip at once, then k drafts after k drafts as they are there and the first stage is free.

        DSI by events with a pipeline for its servers: T becomes the latency, and windows follow one another after
        max(k d, T/P). The pipeline is taken to hold as many windows as that asks for, and the tip to leave alone. It
        has no bare chain beside it.
        """
        window = np.maximum(self.lookahead * self.drafter, self.target / self.stages)
        share = self.acceptance / progress(self.acceptance, self.lookahead)
        return (1 - np.asarray(self.acceptance)) * self.latency + window * share


# --- sums -------------------------------------------------------------------------------------------------------------

def progress(acceptance: Numbers, positions: Numbers) -> Array:
    """The sum of acceptance^i for i from 0 to positions - 1: tokens that a round with so many positions settles."""
    a = doubles(acceptance)
    with np.errstate(divide="ignore", invalid="ignore"):  # where every draft is accepted
        total = visible_fraction(a, positions) / (1 - a)
    return np.where(a == 1, positions, total)[()]


def _saved_by_bare(target: Array, window: Array, acceptance: Array, lookahead: Array, late: int) -> Array:
    """What a run saves in the mean where plain decoding is sooner: the sum of P(n) (windows(n) w - n T) where positive.

    All arrays have one shape; `window` is the time w from one verification to the next, and `late` is 1 if a run whose
    n is a multiple of k pays for the window after it (original), else 0. Window after window is summed in closed form.
    A late window saves nothing, since k T > w: the number of those that do is finite.
    """
    runs = np.array([target, window, acceptance, lookahead], dtype=float).reshape(4, -1)
    by_chance = (runs[2] > 0) & (runs[2] < 1)
    sooner = runs[1] < runs[3] * runs[0]
    saved = np.zeros(runs.shape[1])
    left, number = np.flatnonzero(by_chance & sooner), 1
    while left.size:
        T, w, a, k = runs[:, left]
        first = (number - 1) * k + 1 - late
        late_enough = first * T < number * w
        left = left[late_enough & (a ** first * k > NEGLIGIBLE)]
        saved[left] += _saved_in_window(runs[:, left], number, late)
        number += 1
    return saved.reshape(np.shape(target))


def _saved_in_window(runs: Array, number: int, late: int) -> Array:
    """The part of that sum that runs of `number` windows have."""
    T, w, a, k = runs
    due = number * w
    low = np.maximum((number - 1) * k + 1 - late, 1)
    plain_is_sooner = np.ceil(due / T) - 1  # up to so many accepted drafts
    high = np.minimum(number * k - late, plain_is_sooner)
    lows, highs = a ** low, a ** (high + 1)
    mass = lows - highs
    mean = low * lows - high * highs + (a * lows - highs) / (1 - a)
    return np.where(high < low, 0.0, due * mass - mean * T)


def doubles(values: Numbers) -> Array:
    """Numbers of any type as an array of doubles."""
    return np.asarray(values, dtype=np.float64)


def _ceil(quotients: Array) -> Array:
    """The next whole numbers, or those that are missed by rounding alone."""
    return np.ceil(quotients * (1 - SLACK)).astype(np.int64)[()]
