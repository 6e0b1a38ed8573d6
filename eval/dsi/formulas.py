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

from typing import Any, Callable, NamedTuple, Union

import numpy as np
import numpy.typing as npt

from eval.dsi import simulation
from eval.dsi.simulation import SLACK

Array = npt.NDArray[np.float64]
Numbers = Union[float, npt.NDArray[Any]]
ACCOUNTINGS = ("corrected", "original")
NEGLIGIBLE = 1e-18  # share of a cost that no double of it shows


# --- how many servers, how many drafts --------------------------------------------------------------------------------

def servers_needed(target: Numbers, drafter: Numbers, lookahead: Numbers) -> npt.NDArray[np.int64]:
    """The target servers with which no verification waits: ceil(T / (k d)) (Eq. 1)."""
    return _each(simulation.servers_needed)(target, drafter, lookahead)[()]


def least_lookahead(target: Numbers, drafter: Numbers, servers: Numbers) -> npt.NDArray[np.int64]:
    """The smallest lookahead for which this many target servers are enough (Eq. 1); `servers` may be infinite."""
    return _each(simulation.least_lookahead)(target, drafter, servers)[()]


# --- cost per token ---------------------------------------------------------------------------------------------------

def nonsi_rate(target: Numbers) -> Array:
    """Plain decoding: one forward of the target for each token."""
    return doubles(target)[()]


def si_rate(target: Numbers, drafter: Numbers, acceptance: Numbers, lookahead: Numbers) -> Array:
    """Draft k tokens, then verify them: rounds of k d + T.

    A round yields min(n, k) + 1 tokens, in the mean the sum of acceptance^i for i from 0 to k.
    """
    return (target + lookahead * drafter) / progress(acceptance, lookahead + 1)


def dsi_rate(target: Numbers, drafter: Numbers, acceptance: Numbers, lookahead: Numbers,
             accounting: str = "corrected", bare: bool = True) -> Array:
    """DSI with servers enough for Eq. 1, in one of the two accountings; `bare` bounds every run by plain decoding.

    Derived by summing the cost of a run over n (module docstring). At lookahead 1, corrected, it is what a further
    token costs in Proposition 1. Raises ValueError for an accounting that there is not.
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
    runs = _Runs(*np.broadcast_arrays(target, window, acceptance, lookahead, rate)[:4])
    saved = (1 - runs.acceptance) * _saved_by_bare(runs, late=int(original))
    no_sooner = runs.window >= runs.lookahead * runs.target  # a window takes as long as its tokens one by one
    return np.where(no_sooner, runs.target, rate - saved)[()]


def check_accounting(accounting: str) -> None:
    """Raise ValueError for an accounting that there is not."""
    if accounting not in ACCOUNTINGS:
        raise ValueError(f"accounting={accounting} is unknown: choose one of {', '.join(ACCOUNTINGS)}")


def perfect_speedup(target: Numbers, drafter: Numbers, lookahead: Numbers) -> Array:
    """How much faster DSI is than SI if every draft is accepted: (T + k d) / ((k + 1) d), out of the rates."""
    return si_rate(target, drafter, 1.0, lookahead) / dsi_rate(target, drafter, 1.0, lookahead)


# --- bounds and examples of the paper ---------------------------------------------------------------------------------

def proposition_bound(target: Numbers, drafter: Numbers, acceptance: Numbers, tokens: Numbers) -> Array:
    """Proposition 1: what DSI with lookahead 1 takes for `tokens` tokens, at most, in the mean.

    The cost by events equals it if there are servers enough.
    """
    later = np.asarray(tokens) - 1
    return drafter * acceptance * later + target * ((1 - np.asarray(acceptance)) * later + 1)


def visible_fraction(acceptance: Numbers, lookahead: Numbers) -> Array:
    """The share of the target's forwards that DSI does not hide: 1 - acceptance^lookahead.

    Its inverse is the speed-up that model parallelism on the same devices must exceed.
    """
    with np.errstate(divide="ignore"):  # the logarithm of 0
        logarithm = np.log1p(doubles(acceptance) - 1)
    return np.abs(np.expm1(lookahead * logarithm))  # not -0.0, whose inverse is below all numbers


class Forwards(NamedTuple):
    """Forwards of speculative decoding, and what they cost one after the other."""

    target_forwards: Array
    drafter_forwards: Array
    cost: Array


def si_forwards(target: Numbers, drafter: Numbers, lookahead: Numbers, accepted: Numbers,
                tokens: Numbers) -> Forwards:
    """SI by counting forwards (appendix F.3): with `accepted` drafts in the mean a round settles one token more."""
    rounds = tokens / (doubles(accepted) + 1)
    round_cost = target + lookahead * drafter
    return Forwards(rounds, rounds * lookahead, rounds * round_cost)


# --- pipelines --------------------------------------------------------------------------------------------------------
# The target is cut into `stages` of T/P each, and what goes from one to the next takes `hop`, so that a segment comes
# back after T + (P-1) hop. A stage takes T/P for a segment of any number of rows, as a forward takes T for any number
# of drafts above. Drafting is one chain of tokens on a device of its own, each right with the chance `acceptance`. What
# was pruned takes no more time. What a round of a method is stands in docs/methods.md.

def latency(target: Numbers, stages: Numbers, hop: Numbers) -> Array:
    """From sending a segment to its answer: T + (P - 1) hop, in an empty pipeline."""
    hops = doubles(stages) - 1
    return np.asarray(target + hops * hop)[()]


def ar_rate(target: Numbers, drafter: Numbers, acceptance: Numbers, lookahead: Numbers, stages: Numbers,
            hop: Numbers) -> Array:
    """`ar`: one token, once round the pipeline; nothing is drafted, so only `target`, `stages` and `hop` count."""
    return latency(target, stages, hop)


def naive_rate(target: Numbers, drafter: Numbers, acceptance: Numbers, lookahead: Numbers, stages: Numbers,
               hop: Numbers) -> Array:
    """`naive`: k drafts, then tip and drafts in equal shares that follow one another, judged when all are back.

    A round takes k d, the latency, and T/P for each share after the first; it yields what a round of SI yields.
    """
    behind = (shares(lookahead, stages) - 1) * target / stages
    round_cost = lookahead * drafter + latency(target, stages, hop) + behind
    return round_cost / progress(acceptance, lookahead + 1)


def pruned_rate(target: Numbers, drafter: Numbers, acceptance: Numbers, lookahead: Numbers, stages: Numbers,
                hop: Numbers) -> Array:
    """`pruned`: the same shares, each judged as it returns; a round ends with the share that holds its last answer.

    The row of the n-th draft says what follows n accepted ones, so share j (from 0) is waited for if j times the rows
    of a share were accepted. The sum of these chances is a geometric one.
    """
    rows = rows_of_share(lookahead, stages)
    count = shares(lookahead, stages)
    waited = progress(doubles(acceptance) ** rows, count) - 1
    round_cost = lookahead * drafter + latency(target, stages, hop) + waited * target / stages
    return round_cost / progress(acceptance, lookahead + 1)


def pipedec_rate(target: Numbers, drafter: Numbers, acceptance: Numbers, lookahead: Numbers, stages: Numbers,
                 hop: Numbers) -> Array:
    """`pipedec`: every step sends one draft more, and a step takes as long as its slower part, max(d, T/P).

    A run of n accepted drafts costs n steps and the latency; `lookahead` does not count.
    """
    step = np.maximum(drafter, target / stages)
    return (1 - np.asarray(acceptance)) * latency(target, stages, hop) + acceptance * step


def continuous_rate(target: Numbers, drafter: Numbers, acceptance: Numbers, lookahead: Numbers, stages: Numbers,
                    hop: Numbers) -> Array:
    """`continuous`: the tip at once, then k drafts after k drafts as they are there and the first stage is free.

    DSI by events with a pipeline for its servers: T becomes the latency, and windows follow one another after
    max(k d, T/P). The pipeline is taken to hold as many windows as that asks for, and the tip to leave alone. It has no
    bare chain beside it.
    """
    window = np.maximum(lookahead * drafter, target / stages)
    share = acceptance / progress(acceptance, lookahead)
    return (1 - np.asarray(acceptance)) * latency(target, stages, hop) + window * share


PIPELINES = {"ar": ar_rate, "naive": naive_rate, "pruned": pruned_rate, "pipedec": pipedec_rate,
             "continuous": continuous_rate}


def rows_of_share(lookahead: Numbers, stages: Numbers) -> npt.NDArray[np.int64]:
    """How many rows a share of `naive` and `pruned` has: k drafts are shared out among P stages."""
    return _ceil(doubles(lookahead) / stages)


def shares(lookahead: Numbers, stages: Numbers) -> npt.NDArray[np.int64]:
    """How many shares the tip and k drafts make."""
    rows = doubles(lookahead) + 1
    return _ceil(rows / rows_of_share(lookahead, stages))


# --- sums -------------------------------------------------------------------------------------------------------------

def progress(acceptance: Numbers, positions: Numbers) -> Array:
    """The sum of acceptance^i for i from 0 to positions - 1: tokens that a round with so many positions settles."""
    a = doubles(acceptance)
    with np.errstate(divide="ignore", invalid="ignore"):  # where every draft is accepted
        total = visible_fraction(a, positions) / (1 - a)
    return np.where(a == 1, positions, total)[()]


class _Runs(NamedTuple):
    """Arrays of one shape: what runs of DSI depend on. `window` is the time from one verification to the next."""

    target: Array
    window: Array
    acceptance: Array
    lookahead: Array


def _saved_by_bare(runs: _Runs, late: int) -> Array:
    """What a run saves in the mean where plain decoding is sooner: the sum of P(n) (windows(n) w - n T) where positive.

    `late` is 1 if a run whose n is a multiple of k pays for the window after it (original), else 0. Window after window
    is summed in closed form. A late window saves nothing, since k T > w: the number of those that do is finite.
    """
    flat = _Runs(*(np.ravel(value).astype(np.float64) for value in runs))
    saved = np.zeros(flat.target.shape)
    by_chance = (flat.acceptance > 0) & (flat.acceptance < 1)
    sooner = flat.window < flat.lookahead * flat.target
    left, number = np.flatnonzero(by_chance & sooner), 1
    while left.size:
        some = _Runs(*(value[left] for value in flat))
        first = (number - 1) * some.lookahead + 1 - late
        chance = some.acceptance ** first
        late_enough = first * some.target < number * some.window
        likely = chance * some.lookahead > NEGLIGIBLE
        alive = late_enough & likely
        left, some = left[alive], _Runs(*(value[alive] for value in some))
        saved[left] += _saved_in_window(some, number, late)
        number += 1
    return saved.reshape(runs.target.shape)


def _saved_in_window(runs: _Runs, number: int, late: int) -> Array:
    """The part of that sum that runs of `number` windows have."""
    a, due = runs.acceptance, number * runs.window
    low = np.maximum((number - 1) * runs.lookahead + 1 - late, 1)
    plain_is_sooner = np.ceil(due / runs.target) - 1  # up to so many accepted drafts
    high = np.minimum(number * runs.lookahead - late, plain_is_sooner)
    lows, highs = a ** low, a ** (high + 1)
    mass = lows - highs
    mean = low * lows - high * highs + (a * lows - highs) / (1 - a)
    return np.where(high < low, 0.0, due * mass - mean * runs.target)


def doubles(values: Numbers) -> Array:
    """Numbers of any type as an array of doubles."""
    return np.asarray(values, dtype=np.float64)


def _each(function: Callable[..., int]) -> Callable[..., npt.NDArray[np.int64]]:
    """A function of numbers as one of arrays that broadcast."""
    return np.vectorize(function, otypes=[np.int64])


def _ceil(quotients: Array) -> npt.NDArray[np.int64]:
    """The next whole numbers, or those that are missed by rounding alone."""
    return np.ceil(quotients * (1 - SLACK)).astype(np.int64)[()]
