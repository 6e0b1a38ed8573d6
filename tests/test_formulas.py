"""What a token costs in the long run: the formulas against sums over runs, known values and each other."""
from __future__ import annotations

import numpy as np
import pytest

from config.presets import ROOT
from eval.dsi import cases
from eval.dsi import cost_model as rounds
from eval.dsi.cost_model import moments
from eval.dsi.formulas import (
    ACCOUNTINGS,
    TargetPipeline,
    dsi_rate,
    least_lookahead,
    progress,
    servers_needed,
    si_rate,
    visible_fraction,
)

CASES = [(1.0, 0.1, 0.9, 5), (1.0, 0.5, 0.5, 1), (1.0, 0.33, 0.93, 5), (1.0, 0.9, 0.3, 3), (1.0, 1.0, 0.5, 1),
         (26.0, 2.5, 0.59, 5), (52.2, 34.3, 0.94, 1), (1.0, 0.97, 0.98, 7), (1.0, 0.01, 0.41, 15), (1.0, 0.6, 0.99, 40)]


def summed(target: float, drafter: float, acceptance: float,
           lookahead: int, accounting: str, bare: bool) -> float:
    """The cost per token as its definition says it: run by run, up to runs that nobody will see."""
    n = np.arange(20_000)
    windows = n // lookahead + 1 if accounting == "original" else np.ceil(n / lookahead)
    cost = np.where(n > 0, windows * lookahead * drafter, 0) + target
    if bare:
        cost = np.minimum(cost, (n + 1) * target)
    return float(np.sum(acceptance ** n * (1 - acceptance) * cost) * (1 - acceptance))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("accounting", ACCOUNTINGS)
@pytest.mark.parametrize("bare", [False, True])
def test_dsi_costs_what_a_sum_over_its_runs_gives(case: tuple, accounting: str, bare: bool) -> None:
    assert dsi_rate(*case, accounting, bare) == pytest.approx(summed(*case, accounting, bare), rel=1e-12)


def test_the_bare_chain_is_worth_something_in_some_cases_and_never_costs() -> None:
    for accounting in ACCOUNTINGS:
        with_it = [float(dsi_rate(*case, accounting)) for case in CASES]
        without = [float(dsi_rate(*case, accounting, bare=False)) for case in CASES]
        assert all(a <= b for a, b in zip(with_it, without)) and with_it != without


@pytest.mark.parametrize("accounting", ACCOUNTINGS)
def test_where_no_draft_or_every_draft_is_right_it_is_exact(accounting: str) -> None:
    for bare in (False, True):
        assert dsi_rate(1.0, 0.1, 0.0, 5, accounting, bare) == 1
        assert dsi_rate(1.0, 0.1, 1.0, 5, accounting, bare) == pytest.approx(0.1, rel=1e-15)
    assert si_rate(1.0, 0.1, 0.0, 5) == 1.5
    assert si_rate(1.0, 0.1, 1.0, 5) == 0.25
    near = dsi_rate(1.0, 0.1, 1 - 1e-12, 5, accounting)
    assert near == pytest.approx(0.1, rel=1e-10) and near > 0.1


@pytest.mark.parametrize("accounting", ACCOUNTINGS)
def test_a_drafter_as_slow_as_the_target_leaves_plain_decoding(accounting: str) -> None:
    acceptance = np.linspace(0, 1, 11)
    assert np.array_equal(dsi_rate(2.0, 2.0, acceptance, 4, accounting), np.full(11, 2.0))
    assert dsi_rate(2.0, 3.0, 0.5, 1, accounting) == 2


def test_arguments_broadcast_and_each_cell_is_that_of_its_numbers() -> None:
    c = np.array([0.1, 0.5, 1.0])[:, None, None]
    a = np.linspace(0, 1, 5)[:, None]
    k = np.array([1, 2, 9])
    for accounting in ACCOUNTINGS:
        grid = dsi_rate(1.0, c, a, k, accounting)
        assert grid.shape == (3, 5, 3)
        for (i, j, m), value in np.ndenumerate(grid):
            assert value == dsi_rate(1.0, float(c[i, 0, 0]),
                                     float(a[j, 0]), int(k[m]), accounting)
    assert np.ndim(dsi_rate(1.0, 0.1, 0.5, 2)) == 0
    with pytest.raises(ValueError, match="accounting=exact is unknown: choose one of corrected, original"):
        dsi_rate(1.0, 0.1, 0.5, 2, "exact")


def on_the_grid(accounting: str) -> tuple[np.ndarray, np.ndarray]:
    """SI with the best of 200 lookaheads, DSI with the best that 7 servers allow; c by 0.01 from 0.01, a from 0."""
    c = np.arange(1, 101)[:, None, None] / 100
    a = np.arange(101)[:, None] / 100
    k = np.arange(1, 201)
    legal = servers_needed(1.0, c, k) <= 7
    dsi = np.where(legal, dsi_rate(1.0, c, a, k, accounting), np.inf)
    return si_rate(1.0, c, a, k).min(axis=2), dsi.min(axis=2)


@pytest.mark.parametrize(("accounting", "over_si", "over_plain", "over_both", "most"), [
    ("original", 1.20, 1.11, 1.08, 1.52), ("corrected", 1.33, 1.22, 1.16, 1.53)])
def test_the_grid_of_the_paper_has_the_speed_ups_that_are_known(
        accounting: str, over_si: float, over_plain: float, over_both: float, most: float) -> None:
    si, dsi = on_the_grid(accounting)
    faster = np.minimum(si, 1) / dsi
    assert [round(float(np.median(ratio)), 2) for ratio in (si / dsi, 1 / dsi, faster)] == [
        over_si, over_plain, over_both]
    assert [round(float(ratio.max()), 2) for ratio in (si / dsi, 1 / dsi, faster)] == [2.0, 100.0, most]
    assert [round(float(ratio.min()), 3) for ratio in (si / dsi, 1 / dsi, faster)] == [0.991, 1.0, 0.991]
    assert np.mean(si / dsi < 1) == pytest.approx(0.0045, abs=5e-5)
    assert [round(float(ratio), 2) for ratio in ((1 / si).max(), (1 / si).min(), np.median(1 / si))] == [67, 0.5, 1]


def test_the_published_offline_accounting_charges_dsi_up_to_a_sixth_more() -> None:
    ratio = on_the_grid("original")[1] / on_the_grid("corrected")[1]
    assert np.unravel_index(ratio.argmax(), ratio.shape) == (49, 59), "c = 0.5, a = 0.59"
    assert (round(float(ratio.max()), 2), round(float(np.median(ratio)), 3)) == (1.17, 1.065)
    assert ratio.min() >= 1 - 1e-12


def test_the_documentation_has_the_speed_ups_of_the_pipelines() -> None:
    page = (ROOT / "docs" / "dsi.md").read_text(encoding="utf-8")
    for hop in (0, 0.01, 0.05, 0.1):
        pipeline = TargetPipeline(1.0, 0.1, 0.8, 2, 7, hop)
        rates = [pipeline.ar(), pipeline.naive(),
                 pipeline.pruned(), pipeline.pipedec(), pipeline.continuous()]
        rates += [dsi_rate(1.0, 0.1, 0.8, 2), si_rate(1.0, 0.1, 0.8, 2)]
        assert "| " + " | ".join([str(hop), *(f"{1 / rate:.2f}" for rate in rates)]) + " |" in page


def test_dsi_is_never_slower_than_si_or_plain_decoding_at_the_same_lookahead() -> None:
    c = np.arange(1, 21)[:, None, None] / 20
    a = np.arange(21)[:, None] / 20
    k = np.arange(1, 21)
    dsi = dsi_rate(1.0, c, a, k)
    assert (dsi <= si_rate(1.0, c, a, k) * (1 + 1e-12)).all()
    assert (dsi <= 1 + 1e-12).all()
    assert (dsi <= dsi_rate(1.0, c, a, k, "original") * (1 + 1e-12)).all()


def test_with_few_servers_and_a_fast_drafter_si_at_its_best_lookahead_is_faster() -> None:
    k = least_lookahead(1.0, 0.01, 7)
    assert k == 15
    assert si_rate(1.0, 0.01, 0.41, np.arange(1, 50)).argmin() == 3
    si, dsi = (moments(decoding, 0.41, 1000)
               for decoding in (rounds.si(1.0, 0.01, 4), rounds.dsi(1.0, 0.01, k)))
    assert (round(float(si.mean[0]), 1), round(float(dsi.mean[0]), 1)) == (621.1, 626.4)


def test_the_servers_that_no_verification_waits_for() -> None:
    assert servers_needed(1.0, 0.05, 5) == 4 and least_lookahead(1.0, 0.05, 4) == 5
    assert servers_needed(1.0, 1 / 7, 1) == 7 and servers_needed(0.3, 0.1, 1) == 3
    assert 4.2 / 0.6 > 7
    assert servers_needed(4.2, 0.6, 1) == 7 == least_lookahead(4.2, 0.6, 1)
    assert least_lookahead(1.0, 0.5, np.inf) == 1
    drafter = np.array([0.01, 0.05, 0.1, 1 / 7, 0.5])
    lookahead = np.array([[1], [2], [7]])
    assert servers_needed(1.0, drafter, lookahead).tolist() == [
        [servers_needed(1.0, d, k) for d in drafter] for k in (1, 2, 7)]
    assert least_lookahead(1.0, drafter, lookahead).tolist() == [
        [least_lookahead(1.0, d, servers) for d in drafter] for servers in (1, 2, 7)]


def test_proposition_1_is_what_a_further_token_costs_by_events() -> None:
    bound = [cases.proposition(6.8, 20.6, 0.93, tokens)["expected"] for tokens in (50, 51)]
    assert bound[0] == pytest.approx(401.134, rel=1e-12)
    assert bound[1] - bound[0] == pytest.approx(dsi_rate(20.6, 6.8, 0.93, 1, bare=False),
                                                rel=1e-12)


def test_the_examples_of_the_paper() -> None:
    assert visible_fraction(0.8, 2) == pytest.approx(0.36) and visible_fraction(0.0, 3) == 1
    assert visible_fraction(1.0, 3) == 0
    counted = cases.forwards(30.0, 6.0, 5, 1.5, 100)["expected"]
    assert counted == {"target_forwards": 40, "drafter_forwards": 200, "si": 2400, "nonsi": 3000, "speedup": 1.25}
    perfect = [cases.perfect(d, k)["expected"] for d, k in ((0.05, 2),
                                                            (0.01, 5), (0.05, 5), (0.01, 2))]
    assert [round(float(one), 6) for one in perfect] == [7.333333, 17.5, 4.166667, 34]
    assert progress(0.5, 3) == 1.75
    assert progress(1.0, 3) == 3 and progress(0.0, 3) == 1


def test_a_pipeline_is_dsi_whose_target_takes_its_latency() -> None:
    long = 1 + 3 * 0.05
    asked = TargetPipeline(1.0, 0.1, 0.8, 3, 4, 0.05)
    assert asked.ar() == asked.latency == long
    assert asked.continuous() == pytest.approx(dsi_rate(long, 0.1, 0.8, 3, bare=False),
                                               rel=1e-12)
    assert asked.pipedec() == pytest.approx(dsi_rate(long, 0.25, 0.8, 1, bare=False),
                                            rel=1e-12)
    slow = asked._replace(drafter=0.05).continuous()
    assert slow == pytest.approx(dsi_rate(long, 0.25 / 3, 0.8, 3, bare=False),
                                 rel=1e-12), "a stage takes T / 4"


def test_shares_of_tip_and_drafts_as_the_strategies_cut_them() -> None:
    """8 drafts for 4 stages: tip and 1, 2, 2, 2, 1. All rows of share j wait for j times T / P."""
    eight = TargetPipeline(1.0, 0.1, 0.8, 8, 4, 0.05)
    assert (eight.rows_of_share, eight.shares) == (2, 5)
    three = eight._replace(lookahead=3)
    assert (three.rows_of_share, three.shares) == (1, 4)
    accepted = 0.8 ** np.arange(9)
    assert eight.naive() == pytest.approx((0.8 + 1.15 + 4 * 0.25) / accepted.sum())
    chance = np.append(accepted[:8] * 0.2, accepted[8])
    waited = np.array([0, 0, 1, 1, 2, 2, 3, 3, 4]) * 0.25
    assert eight.pruned() == pytest.approx(
        (0.8 + 1.15 + (chance * waited).sum()) / accepted.sum())


def test_every_formula_of_a_pipeline_broadcasts() -> None:
    wide = TargetPipeline(1.0, np.full((3, 1), 0.1),
                          np.array([0.0, 0.5, 1.0, 0.9]), 3, 4, 0.01)
    for name in ("ar", "naive", "pruned", "pipedec", "continuous"):
        grid = getattr(wide, name)()
        assert np.broadcast_shapes(np.shape(grid), (3, 4)) == (3, 4), name
        assert np.isfinite(grid).all()
