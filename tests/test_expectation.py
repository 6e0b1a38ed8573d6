"""Exact moments of what a text costs, against formulas, and against counting text by text."""
from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from eval.dsi import cost_model as rounds
from eval.dsi.cost_model import Decoding, moments
from eval.dsi.counting import Times, count_dsi, count_si, drawn, recorded, resampled, settled, simulate
from eval.dsi.formulas import ACCOUNTINGS, PIPELINES, dsi_rate, proposition_bound, si_rate

COSTS = (1.0, 0.3, 3)  # target, drafter, lookahead
DEVICES = (1.0, 0.1, 6, 4, 0.03)  # with stages and hop
DECODINGS: dict[str, Decoding] = {
    "si": rounds.si(*COSTS), "original": rounds.dsi(*COSTS, "original"), "corrected": rounds.dsi(*COSTS),
    "unbounded": rounds.dsi(*COSTS, "original", bare=False),
    **{method: rounds.pipeline(method, *DEVICES) for method in PIPELINES}}


def enumerated(decoding: Decoding, acceptance: float, tokens: int) -> tuple[float, float]:
    """Mean and standard deviation over every pattern of right and wrong drafts."""
    patterns = np.array(list(product([False, True], repeat=tokens)))
    chance = np.where(patterns, acceptance, 1 - acceptance).prod(axis=1)
    costs = simulate(decoding, recorded(patterns), tokens, len(patterns)).costs[0]
    mean = (chance * costs).sum()
    return mean, np.sqrt((chance * (costs - mean) ** 2).sum())


@pytest.mark.parametrize("name", DECODINGS)
def test_moments_are_those_over_all_patterns_of_a_short_text(name: str) -> None:
    for tokens in (1, 2, 3, 9):
        for acceptance in (0.0, 0.35, 0.8, 1.0):
            exact = moments(DECODINGS[name], acceptance, tokens)
            mean, deviation = enumerated(DECODINGS[name], acceptance, tokens)
            assert exact.mean == pytest.approx(mean, rel=1e-12)
            assert exact.deviation == pytest.approx(deviation, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", DECODINGS)
def test_drawn_texts_have_these_moments(name: str) -> None:
    exact, repeats = moments(DECODINGS[name], 0.7, 200), 4000
    costs = simulate(DECODINGS[name], drawn(0.7, seed=11), 200, repeats).costs
    if exact.deviation == 0:
        assert costs == pytest.approx(exact.mean[0])
        return
    error = exact.deviation / np.sqrt(repeats)
    assert abs(costs.mean() - exact.mean) < 4 * error
    assert abs(costs.std() / exact.deviation - 1) < 0.06


def test_one_more_token_of_a_long_text_costs_what_the_formulas_say() -> None:
    costs = {name: moments(decoding, 0.8, 300).mean[0] - moments(decoding, 0.8, 299).mean[0]
             for name, decoding in DECODINGS.items()}
    T, d, k = COSTS
    wanted = {"si": si_rate(T, d, 0.8, k), "original": dsi_rate(T, d, 0.8, k, "original"),
              "corrected": dsi_rate(T, d, 0.8, k), "unbounded": dsi_rate(T, d, 0.8, k, "original", bare=False)}
    target, drafter, *rest = DEVICES
    wanted.update({name: rate(target, drafter, 0.8, *rest) for name, rate in PIPELINES.items()})
    assert costs == {name: pytest.approx(float(rate), rel=1e-9) for name, rate in wanted.items()}


def test_proposition_1_is_the_cost_at_lookahead_1() -> None:
    for drafter, acceptance, tokens in ((0.1, 0.8, 100), (0.5, 0.5, 100), (1.0, 0.3, 10), (0.1, 1.0, 50)):
        exact = moments(rounds.dsi(1.0, drafter, 1), acceptance, tokens)
        assert exact.mean == pytest.approx(proposition_bound(1.0, drafter, acceptance, tokens), rel=1e-12)


def test_configurations_stand_side_by_side() -> None:
    drafter, lookahead, acceptance = np.array([0.1, 0.2, 0.3]), np.array([5, 1, 9]), np.array([0.0, 0.6, 1.0])
    for make in (rounds.si, rounds.dsi):
        together = moments(make(1.0, drafter, lookahead), acceptance, 40)
        for index, each in enumerate(zip(drafter, lookahead, acceptance)):
            d, k, a = map(float, each)
            alone = moments(make(1.0, d, k), a, 40)
            assert together.mean[index] == pytest.approx(alone.mean[0], rel=1e-13)
            assert together.deviation[index] == pytest.approx(alone.deviation[0], rel=1e-9, abs=1e-12)
    sample = simulate(rounds.dsi(1.0, drafter, lookahead), drawn(acceptance, seed=1), 40, 3)
    assert sample.costs.shape == (3, 3)
    assert sample.costs[0] == pytest.approx(40) and sample.costs[2] == pytest.approx(39 * 0.3 + 1)


def test_a_text_counted_window_by_window_costs_what_its_runs_cost() -> None:
    """The draws of windows, out of recorded matches, and runs over the same matches."""
    rng = np.random.default_rng(5)
    for _ in range(200):
        tokens, k = int(rng.integers(1, 40)), int(rng.integers(1, 7))
        drafter, acceptance = float(rng.choice([0.05, 0.4, 1.0])), rng.random()
        matches = rng.random((1, tokens)) < acceptance
        for accounting in ACCOUNTINGS:
            counted = count_dsi(Times(1.0, drafter), k, tokens, windows(matches[0], k), 0, accounting)
            sample = simulate(rounds.dsi(1.0, drafter, k, accounting), recorded(matches), tokens, 1)
            assert counted.cost == pytest.approx(sample.costs[0, 0], rel=1e-12)
            assert counted.iterations == sample.iterations[0, 0]
        sample = simulate(rounds.si(1.0, drafter, k), recorded(matches), tokens, 1)
        counted = count_si(Times(1.0, drafter), k, tokens, rounds_of(matches[0], k))
        assert counted.cost == pytest.approx(sample.costs[0, 0], rel=1e-12)
        assert counted.iterations == sample.iterations[0, 0]


def windows(matches: np.ndarray, lookahead: int) -> list[int]:
    """How many drafts each window of DSI accepts: a rejection, or a window without drafts, takes a position."""
    draws, place, tokens = [], 0, len(matches)
    while place < tokens:
        size = min(lookahead, tokens - 1 - place)
        right = 0
        while right < size and matches[place + right]:
            right += 1
        draws.append(right)
        place += right + (right < size or size == 0)
    return draws


def rounds_of(matches: np.ndarray, lookahead: int) -> list[int]:
    """How many drafts each round of SI accepts; every round takes one position more."""
    draws, place = [], 0
    while place < len(matches):
        right = 0
        while right < lookahead and place + right < len(matches) and matches[place + right]:
            right += 1
        draws.append(right)
        place += right + 1
    return draws


def test_counting_knows_two_accountings() -> None:
    assert count_dsi(Times(1.0, 0.1), 1, 3, [1, 0, 0]).cost == pytest.approx(2.2)
    assert count_dsi(Times(1.0, 0.1), 1, 3, [1, 0, 0], accounting="corrected").cost == pytest.approx(2.1)
    for call in (lambda: count_dsi(Times(1.0, 0.1), 1, 3, [], 0, "exact"), lambda: rounds.dsi(1.0, 0.1, 1, "exact")):
        with pytest.raises(ValueError, match="accounting=exact is unknown"):
            call()
    with pytest.raises(ValueError, match="there is no formula for the method streaming"):
        rounds.pipeline("streaming", *DEVICES)


def test_a_moment_that_is_a_whole_number_of_forwards_but_for_rounding_has_them_all() -> None:
    assert 0.3 // 0.1 == 2
    assert settled(Times(0.1, 0.1), 2, 0.3, right=True) == {"nonsi": 3, "si": 3, "dsi": 3}
    assert settled(Times(0.1, 0.1), 2, 0.3, right=False) == {"nonsi": 3, "si": 1, "dsi": 3}
    assert settled(Times(0.1, 0.1), 2, 0.09, right=True) == {"nonsi": 0, "si": 0, "dsi": 0}


def test_texts_of_the_bootstrap_are_made_of_blocks_of_the_traces() -> None:
    traces = [np.array([True, True, False, True]), np.array([False]), np.zeros(0, dtype=bool)]
    texts = resampled(traces, block=3, tokens=50, repeats=20, seed=2)
    blocks = [(True, True, False), (True, False, True), (False, True, True), (True, True, True), (False, False, False)]
    assert texts.shape == (20, 50) and all(made_of(tuple(text.tolist()), blocks) for text in texts)
    assert np.array_equal(texts, resampled(traces, 3, 50, 20, seed=2))
    assert not np.array_equal(texts, resampled(traces, 3, 50, 20, seed=3))
    assert not made_of((True, False, False), blocks) and not made_of((False, True, True, False, True, False), blocks)
    with pytest.raises(ValueError, match="no recorded position"):
        resampled([np.zeros(0, dtype=bool)], 3, 50, 20, seed=2)


def made_of(text: tuple, blocks: list[tuple]) -> bool:
    """Whether a text is blocks one after the other, the last one perhaps cut."""
    ends = {0}
    for place in range(len(text)):
        if place in ends:
            ends.update(min(place + len(block), len(text)) for block in blocks
                        if text[place:place + len(block)] == block[:len(text) - place])
    return len(text) in ends


def test_every_position_of_a_trace_is_as_likely_in_the_bootstrap() -> None:
    traces = [np.array([True, True, False, True, True, False, False]), np.array([False, True])]
    texts = resampled(traces, block=5, tokens=100, repeats=2000, seed=2)
    assert abs(texts.mean() - 5 / 9) < 0.005
    assert np.abs(texts.mean(axis=0) - 5 / 9).max() < 0.05


def test_a_bootstrap_of_independent_matches_has_the_moments_of_independent_drafts() -> None:
    traces = list(np.random.default_rng(4).random((50, 400)) < 0.8)
    texts = resampled(traces, block=40, tokens=100, repeats=2000, seed=6)
    rate = np.mean(traces)
    costs = simulate(rounds.dsi(1.0, 0.1, 3), recorded(texts), 100, 2000).costs
    exact = moments(rounds.dsi(1.0, 0.1, 3), rate, 100)
    assert abs(costs.mean() - exact.mean) < 6 * exact.deviation / np.sqrt(2000)
