"""What decoding costs by formulas, out of measured times and a measured acceptance rate.

It knows nothing about models. Results are predictions: nothing of them was run.
"""
from __future__ import annotations

from typing import Mapping, NamedTuple

import numpy as np

from eval.dsi.formulas import dsi_rate, least_lookahead, nonsi_rate, si_rate

LOOKAHEADS = 200  # of SI, the best of which is taken; as many as in the paper
FLAT = {1: 1.0}  # a pass over many tokens takes as long as one over a single token
ROUNDS = 4  # in which the lookahead of DSI and the time of its verification settle


class Measures(NamedTuple):
    """Times of a token of target and drafter in milliseconds, and the acceptance rate."""

    target: float
    draft: float
    acceptance: float


class Prediction(NamedTuple):
    """The best lookaheads, and milliseconds per token in the long run; `original` is DSI in the accounting of the
    simulator that was published with the paper."""

    dsi_lookahead: int
    si_lookahead: int
    nonsi: float
    si: float
    dsi: float
    original: float

    @property
    def best(self) -> str:
        """The way of decoding that costs least; the plainer one of equals."""
        return min(("nonsi", "si", "dsi"), key=lambda name: getattr(self, name))


def predict(measures: Measures, servers: int, growth: Mapping[int, float] = FLAT) -> Prediction:
    """SI with its best lookahead, DSI with the smallest one for which these target servers are enough (Eq. 1).

    `growth` says how many times as long a pass over m tokens takes as one over a single token: a verification of SI
    reads k + 1 tokens, and one of DSI those that its server has not seen, about T / d + k. Between the sizes of
    `growth` it is interpolated; SI tries no lookahead beyond them, and DSI takes the last one for all that are larger.
    """
    target, draft, acceptance = measures
    rows = sorted(growth)
    factors = [growth[size] for size in rows]
    most = LOOKAHEADS if len(rows) == 1 else max(1, rows[-1] - 1)
    looks = np.arange(1, min(most, LOOKAHEADS) + 1)
    verify = target * np.interp(looks + 1, rows, factors)
    si = si_rate(verify, draft, acceptance, looks)
    best = int(np.argmin(si))
    verification = target
    for _ in range(ROUNDS):
        lookahead = int(least_lookahead(verification, draft, servers))
        missed = verification / draft + lookahead
        verification = target * float(np.interp(missed, rows, factors))
    dsi, original = (float(dsi_rate(verification, draft, acceptance, lookahead, accounting=name))
                     for name in ("corrected", "original"))
    plain = float(nonsi_rate(target))
    return Prediction(lookahead, int(looks[best]), plain, float(si[best]), dsi, original)
