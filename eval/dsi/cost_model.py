"""What a text costs: rounds or runs, each with accepted drafts, one token more, and a cost; mean and deviation.

The costs are those of `formulas.py` (with its symbols), cut off where the text ends: the last token is always the
target's, so with `left` tokens to go at most left - 1 drafts are of use, and none is drafted beyond them.

A *round* (SI, naive, pruned; ar is a round without drafts) ends at its lookahead; a *run* (DSI, pipedec, continuous)
ends with a rejection or the text. Arrays: C configurations; R outcomes or repeats of each.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Union

import numpy as np

from eval.dsi.formulas import Array, Numbers, check_accounting, doubles, latency, rows_of_share, shares

ENDLESS = 1 << 40  # more drafts than any text has tokens
NEGLIGIBLE = 1e-20  # chance of outcomes that change no digit of a double


@dataclass(frozen=True)
class Rounds:
    """Rounds of draft, then verify. Every field has the shape [C, 1]."""

    drafter: Array
    delay: Array  # from sending to the answer
    slot: Array  # for each further share of the rows; 0 if all go at once
    most: Array  # the lookahead
    stages: Array
    early: bool = False  # whether a round ends with the share that holds its last answer, or with the last share

    def cost(self, left: Numbers, accepted: Numbers) -> Array:
        """The costs [C, R] of rounds in which so many drafts `accepted` [C, R] are right, with `left` tokens to go."""
        drafts = np.minimum(self.most, np.asarray(left) - 1)
        some = np.maximum(drafts, 1)  # no share without rows
        last = shares(some, self.stages) - 1
        waited = accepted // rows_of_share(some, self.stages) if self.early else last
        follow = (drafts > 0) & (self.slot > 0)
        behind = np.where(follow, waited * self.slot, 0.0)
        return drafts * self.drafter + self.delay + behind

    def iterations(self, left: Numbers, accepted: Numbers) -> Array:
        """One each, [C, R]."""
        shape = np.broadcast_shapes(np.shape(left), np.shape(accepted), self.most.shape)
        return np.ones(shape)


@dataclass(frozen=True)
class Runs:
    """Runs of drafts without end, verified window after window. Every field has the shape [C, 1]."""

    drafter: Array
    delay: Array  # from sending to the answer
    slot: Array  # between two windows, at least
    lookahead: Array
    bare: Array  # what a token of plain decoding costs that goes on beside; infinite if none does
    late: bool = False  # whether a run whose drafts fill its windows pays for the window after them (original)
    most: int = ENDLESS

    def cost(self, left: Numbers, accepted: Numbers) -> Array:
        """The costs [C, R] of runs in which so many drafts `accepted` [C, R] are right, with `left` tokens to go."""
        accepted = np.asarray(accepted)
        whole = accepted // self.lookahead + 1 if self.late else -(-accepted // self.lookahead)
        windows = np.where(accepted > 0, whole, 0)
        run = self.delay + windows * self._window(self.lookahead)
        full, rest = np.divmod(np.asarray(left) - 1, self.lookahead)
        short = np.where(rest > 0, self._window(rest), 0.0)
        end = self.delay + full * self._window(self.lookahead) + short
        bare = (accepted + 1) * self.bare
        return np.minimum(np.minimum(run, end), bare)

    def iterations(self, left: Numbers, accepted: Numbers) -> Array:
        """The windows [C, R] that were drafted until the rejection; at the end of the text one more, without drafts."""
        ends = np.asarray(accepted) >= np.asarray(left) - 1
        begun, filled = -(-accepted // self.lookahead), accepted // self.lookahead
        return np.where(ends, begun, filled) + 1.0

    def _window(self, drafts: Numbers) -> Array:
        return np.maximum(drafts * self.drafter, self.slot)


Decoding = Union[Rounds, Runs]


def si(target: Numbers, drafter: Numbers, lookahead: Numbers) -> Rounds:
    """SI with C configurations, each argument a number or [C]."""
    T, d, k = _columns(target, drafter, lookahead)
    return Rounds(d, T, 0 * T, k, np.ones_like(T))


def dsi(target: Numbers, drafter: Numbers, lookahead: Numbers, accounting: str = "corrected",
        bare: bool = True) -> Runs:
    """DSI in one of the two accountings, without or with the bare chain. Raises ValueError for another accounting."""
    check_accounting(accounting)
    T, d, k = _columns(target, drafter, lookahead)
    beside = T if bare else np.full_like(T, np.inf)
    return Runs(d, T, 0 * T, k, beside, late=accounting == "original")


def pipeline(method: str, target: Numbers, drafter: Numbers, lookahead: Numbers, stages: Numbers,
             hop: Numbers) -> Decoding:
    """A method of this project on a pipeline, with the assumptions of its formula; `ar` drafts nothing."""
    T, d, k, P, wire = _columns(target, drafter, lookahead, stages, hop)
    delay = latency(T, P, wire)
    if method == "ar":
        return Rounds(d, delay, 0 * T, 0 * k, P)
    if method in ("naive", "pruned"):
        return Rounds(d, delay, T / P, k, P, early=method == "pruned")
    if method in ("pipedec", "continuous"):
        window = np.ones_like(k) if method == "pipedec" else k
        return Runs(d, delay, T / P, window, np.full_like(T, np.inf))
    raise ValueError(f"there is no formula for the method {method}: choose ar, naive, pruned, pipedec or continuous")


def _columns(*values: Numbers) -> list[Any]:
    """Numbers or arrays [C] as arrays [C, 1] of doubles."""
    alike = np.broadcast_arrays(*values)
    return [np.reshape(value, (-1, 1)).astype(np.float64) for value in alike]


# --- mean and deviation -----------------------------------------------------------------------------------------------

class Moments(NamedTuple):
    """Of the cost of a whole text, [C] each."""

    mean: Array
    deviation: Array


def moments(decoding: Decoding, acceptance: Numbers, tokens: int) -> Moments:
    """Mean and standard deviation of the cost of so many tokens, for C configurations.

    `acceptance` is a number or [C]: the chance that a draft is right, for each draft alike and independent. A round or
    a run depends on nothing before it, so mean E and variance V with `left` tokens to go are sums over its outcomes,
    which have costs C and chances p:

        E(left) = sum p (C + E(left - tokens))
        V(left) = sum p (V(left - tokens) + (C + E(left - tokens) - E(left))^2)
    """
    count = decoding.drafter.shape[0]
    a = np.broadcast_to(doubles(acceptance), (count,))[:, None]
    mean = np.zeros((count, tokens + 1))  # by the tokens that are left
    variance = np.zeros_like(mean)
    widest = _widest(a, decoding, tokens)
    rows = np.arange(count)[:, None]
    for left in range(1, tokens + 1):
        most = np.minimum(decoding.most, left - 1)
        last = np.broadcast_to(most, (count, 1)).astype(np.int64)
        width = min(widest, left)
        short = np.broadcast_to(np.arange(width), (count, width))
        accepted = np.concatenate([np.minimum(short, last), last], axis=1)
        rejected = np.where(short < last, (1 - a) * a ** short, 0.0)
        chance = np.concatenate([rejected, a ** last], axis=1)
        after = left - 1 - accepted
        cost = decoding.cost(left, accepted) + mean[rows, after]
        mean[:, left] = (chance * cost).sum(axis=1)
        spread = variance[rows, after] + (cost - mean[:, left, None]) ** 2
        variance[:, left] = (chance * spread).sum(axis=1)
    return Moments(mean[:, tokens], np.sqrt(variance[:, tokens]))


def _widest(acceptance: Array, decoding: Decoding, tokens: int) -> int:
    """How many numbers of accepted drafts, from 0, are likely enough to count, beside the largest."""
    between = acceptance[(acceptance > 0) & (acceptance < 1)]
    if not between.size:
        return 1
    likely = math.ceil(math.log(NEGLIGIBLE) / math.log(between.max()))
    return int(max(1, min(likely, np.max(decoding.most), tokens)))
