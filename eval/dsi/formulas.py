"""Cost per token in the long run: closed forms for speculative and distributed decoding.

Symbols of the paper on DSI (arXiv 2405.14105): `target` and `drafter` are the times of a forward of the target and of
the drafter, in one unit, which is also the unit of every result. `acceptance` is the probability that a draft is
correct, the same for each draft and independent. `lookahead` is the number of drafts per verification. Arguments are
numbers or arrays that broadcast; results have the broadcast shape.

A *run* is n accepted drafts and the rejected position after them: n + 1 tokens, with probability
acceptance^n (1 - acceptance). Cost per token is the mean cost of a run divided by the mean number of its tokens,
1 / (1 - acceptance); where every draft is accepted it is the limit.

Two accountings of a run of DSI: `corrected` counts ceil(n/k) k d + T, the time at which the verification of the
rejected position ends if no verification waits for a server. `original` counts (floor(n/k) + 1) k d + T for n > 0, and
T for n = 0, as the offline simulator published with the paper does. With `has_bare`, a chain of verifications without
drafts runs in parallel, and a run costs at most (n + 1) T.
"""
from __future__ import annotations

from typing import Any, Union

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Numbers = Union[float, Array]
ACCOUNTINGS = {"corrected": False, "original": True}  # whether n > 0 pays for one more window if it is a multiple of k
SLACK = 1e-9  # relative: a quotient this close to an integer counts as that integer
NEGLIGIBLE = 1e-18  # share of a cost below the precision of a double


# --- how many servers, how many drafts --------------------------------------------------------------------------------

def servers_needed(target: Numbers, drafter: Numbers, lookahead: Numbers) -> Array:
    """Return the number of target servers with which no verification waits: ceil(T / (k d)) (Eq. 1)."""
    return _ceil(doubles(target) / (lookahead * np.asarray(drafter)))


def least_lookahead(target: Numbers, drafter: Numbers, num_servers: Numbers) -> Array:
    """Return the smallest lookahead for which this many target servers are enough (Eq. 1); they may be infinite."""
    return np.maximum(1, _ceil(doubles(target) / (num_servers * np.asarray(drafter))))


# --- cost per token ---------------------------------------------------------------------------------------------------

def si_rate(target: Numbers, drafter: Numbers, acceptance: Numbers, lookahead: Numbers) -> Array:
    """Return the cost per token of SI: rounds of k d + T, each of which yields min(n, k) + 1 tokens."""
    return (target + lookahead * drafter) / progress(acceptance, lookahead + 1)


def dsi_rate(target: Numbers, drafter: Numbers, acceptance: Numbers, lookahead: Numbers,
             accounting: str = "corrected", has_bare: bool = True) -> Array:
    """Return the cost per token of DSI with enough servers for Eq. 1; `has_bare` bounds every run by plain decoding.

    This is the cost of a run (see the module docstring), summed over n. Raises KeyError for an unknown accounting.
    """
    is_original = ACCOUNTINGS[accounting]
    rejection_rate = 1 - np.asarray(acceptance)
    window_time = lookahead * drafter

    # runs with n = 0 pay for no window
    full_windows = 1 / progress(acceptance, lookahead)
    paid_windows = full_windows - rejection_rate ** 2 if is_original else full_windows * acceptance
    rate = rejection_rate * target + window_time * paid_windows
    if not has_bare:
        return rate

    T, w, a, k, _ = np.broadcast_arrays(target, window_time, acceptance, lookahead, rate)
    saved_time = rejection_rate * _saved_by_bare(T, w, a, k, late=int(is_original))
    is_no_sooner = w >= k * T  # a window takes at least as long as plain decoding of its tokens
    return np.where(is_no_sooner, T, rate - saved_time)[()]


def visible_fraction(acceptance: Numbers, lookahead: Numbers) -> Array:
    """Return the share of the target's forwards that DSI does not hide: 1 - acceptance^lookahead."""
    with np.errstate(divide="ignore"):  # the logarithm of 0
        log_acceptance = np.log1p(doubles(acceptance) - 1)
    return np.abs(np.expm1(lookahead * log_acceptance))  # never -0.0, as its inverse would be minus infinity


# --- sums -------------------------------------------------------------------------------------------------------------

def progress(acceptance: Numbers, num_positions: Numbers) -> Array:
    """Return the sum of acceptance^i for i from 0 to num_positions - 1: the mean tokens that such a round settles."""
    a = doubles(acceptance)
    with np.errstate(divide="ignore", invalid="ignore"):  # 0 / 0 where every draft is accepted
        geometric_sum = visible_fraction(a, num_positions) / (1 - a)
    return np.where(a == 1, num_positions, geometric_sum)[()]


def _saved_by_bare(target: Array, window: Array, acceptance: Array, lookahead: Array, late: int) -> Array:
    """Return the mean saving per run by plain decoding: the sum of the positive terms P(n) (windows(n) w - n T).

    All arrays have one shape. `window` is the time w from one verification to the next. `late` is 1 if a run pays for
    one more window where n is a multiple of k (original), else 0. The windows are summed one by one, each in closed
    form. As k T > w, only finitely many of them save anything.
    """
    arrays = np.array([target, window, acceptance, lookahead], dtype=float)
    runs = arrays.reshape(4, -1)
    is_random = (runs[2] > 0) & (runs[2] < 1)
    is_sooner = runs[1] < runs[3] * runs[0]

    saved_time = np.zeros(runs.shape[1])
    open_cells, num_windows = np.flatnonzero(is_random & is_sooner), 1
    while open_cells.size:
        T, w, a, k = runs[:, open_cells]
        least_accepted = (num_windows - 1) * k + 1 - late
        saves_time = least_accepted * T < num_windows * w
        is_likely = a ** least_accepted * k > NEGLIGIBLE

        open_cells = open_cells[saves_time & is_likely]
        saved_time[open_cells] += _saved_in_window(runs[:, open_cells], num_windows, late)
        num_windows += 1
    return saved_time.reshape(np.shape(target))


def _saved_in_window(runs: Array, num_windows: int, late: int) -> Array:
    """Return the part of that sum from runs of this many windows."""
    T, w, a, k = runs
    window_end = num_windows * w

    # the smallest and the largest number of accepted drafts in such a run with which plain decoding is sooner
    low = np.maximum((num_windows - 1) * k + 1 - late, 1)
    last_sooner = np.ceil(window_end / T) - 1
    high = np.minimum(num_windows * k - late, last_sooner)

    # sums of P(n) and of n P(n) between them
    low_power, high_power = a ** low, a ** (high + 1)
    total_chance = low_power - high_power
    mean_drafts = low * low_power - high * high_power + (a * low_power - high_power) / (1 - a)
    return np.where(high < low, 0.0, window_end * total_chance - mean_drafts * T)


def doubles(values: Numbers) -> Array:
    """Return numbers of any type as an array of doubles."""
    return np.asarray(values, dtype=np.float64)


def _ceil(quotients: Array) -> Array:
    """Round up to integers, except where a value exceeds an integer by a rounding error only."""
    return np.ceil(quotients * (1 - SLACK)).astype(np.int64)[()]
