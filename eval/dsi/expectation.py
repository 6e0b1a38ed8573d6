"""Mean and standard deviation of what a text costs, exactly, by dynamic programming over the tokens that are left.

What a round or a run yields depends on nothing that was before it. So the mean E and the variance V of the cost with
`left` tokens to go are sums over its outcomes, which have costs C and chances p:

    E(left) = sum p (C + E(left - tokens))
    V(left) = sum p (V(left - tokens) + (C + E(left - tokens) - E(left))^2)
"""
from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from eval.dsi.cost_model import Decoding
from eval.dsi.formulas import Array, Numbers, doubles

NEGLIGIBLE = 1e-20  # chance of outcomes that change no digit of a double


class Moments(NamedTuple):
    """Of the cost of a whole text, [C] each."""

    mean: Array
    deviation: Array


def moments(decoding: Decoding, acceptance: Numbers, tokens: int) -> Moments:
    """Mean and standard deviation of the cost of so many tokens, for C configurations.

    `acceptance` is a number or [C]: the chance that a draft is right, for each draft alike and independent.
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
