"""Exact means of what a text costs, against formulas, and against counting text by text."""
from __future__ import annotations

from itertools import product, takewhile
from typing import Sequence

import numpy as np
import pytest

from eval.dsi import cost_model as rounds
from eval.dsi.cost_model import DecodingRounds, counted, mean_cost
from eval.dsi.formulas import dsi_rate, si_rate

COSTS = (1.0, 0.3, 3)  # target, drafter, lookahead
DECODINGS: dict[str, DecodingRounds] = {
    "si": rounds.si(*COSTS),
    "original": rounds.dsi(*COSTS, "original"), "corrected": rounds.dsi(*COSTS),
    "non-si": rounds.si(1.0, 0.3, 0)}


def windows_of(right: Sequence[bool], decoding: DecodingRounds) -> np.ndarray:
    """How many drafts of window after window are right, for a text that says of each position whether its draft is."""
    lookahead, place, found = int(decoding.lookahead.item()), 0, []
    while place < len(right):
        accepted = len(list(takewhile(bool, right[place:place + lookahead])))
        found.append(accepted)
        place += accepted + (accepted < lookahead or not decoding.are_runs)
    return np.pad(found, (0, len(right)))


def enumerated(decoding: DecodingRounds, acceptance: float, tokens: int) -> float:
    """The mean over every pattern of right and wrong drafts."""
    patterns = np.array(list(product([False, True], repeat=tokens)))
    chance = np.where(patterns, acceptance, 1 - acceptance).prod(axis=1)
    costs = np.array([counted(decoding, windows_of(right, decoding), tokens).cost for right in patterns])
    return (chance * costs).sum()


@pytest.mark.parametrize("name", DECODINGS)
def test_means_are_those_over_all_patterns_of_a_short_text(name):
    for tokens in (1, 2, 3, 9):
        for acceptance in (0.0, 0.35, 0.8, 1.0):
            mean = enumerated(DECODINGS[name], acceptance, tokens)
            assert mean_cost(DECODINGS[name], acceptance, tokens) == pytest.approx(mean, rel=1e-12)


def test_one_more_token_of_a_long_text_costs_what_the_formulas_say():
    costs = {name: (mean_cost(decoding, 0.8, 300) - mean_cost(decoding, 0.8, 299)).item()
             for name, decoding in DECODINGS.items()}
    T, d, k = COSTS
    wanted = {"si": si_rate(T, d, 0.8, k),
              "original": dsi_rate(T, d, 0.8, k, "original"),
              "corrected": dsi_rate(T, d, 0.8, k), "non-si": T}
    assert costs == {name: pytest.approx(float(rate), rel=1e-9)
                     for name, rate in wanted.items()}


def test_configurations_stand_side_by_side():
    lookahead = np.array([5, 1, 9])
    for make, a in product((rounds.si, rounds.dsi), (0.0, 0.6, 1.0)):
        alone = [mean_cost(make(1.0, 0.2, k), a, 40).item() for k in lookahead]
        assert mean_cost(make(1.0, 0.2, lookahead), a, 40) == pytest.approx(alone, rel=1e-13)


def test_counting_knows_two_accountings():
    found = {name: counted(rounds.dsi(1.0, 0.1, 1, name),
                           np.array([1, 0, 0]), 3)
             for name in ("original", "corrected")}
    assert found["original"].cost == pytest.approx(2.2)
    assert found["corrected"].cost == pytest.approx(2.1)
    with pytest.raises(KeyError):
        rounds.dsi(1.0, 0.1, 1, "exact")


def test_a_run_goes_on_until_a_window_is_not_full_and_a_round_is_a_window():
    draws = np.pad([2, 2, 1, 0, 2], (0, 20))  # runs of 5, 0, 2 and then of none
    assert counted(rounds.dsi(1.0, 0.1, 2), draws, 20) == pytest.approx((1.6 + 1 + 1.2 + 10, 3 + 1 + 2 + 10))
    draws[5:] = 2
    assert counted(rounds.si(1.0, 0.1, 2), draws, 12) == pytest.approx((5 * 1.2, 5))
    assert counted(rounds.si(1.0, 0.1, 2), np.append(0, draws[5:]), 12) == pytest.approx((4 * 1.2 + 1.1, 5))
