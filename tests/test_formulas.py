"""What a token costs in the long run: the formulas against sums over runs, known values and each other."""
from __future__ import annotations

import numpy as np
import pytest

from eval.dsi import cases
from eval.dsi.formulas import (
    ACCOUNTINGS,
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
def test_dsi_costs_what_a_sum_over_its_runs_gives(case, accounting, bare):
    assert dsi_rate(*case, accounting, bare) == pytest.approx(summed(*case, accounting, bare), rel=1e-12)


@pytest.mark.parametrize("accounting", ACCOUNTINGS)
def test_where_no_draft_or_every_draft_is_right_it_is_exact(accounting):
    for bare in (False, True):
        assert dsi_rate(1.0, 0.1, 0.0, 5, accounting, bare) == 1
        assert dsi_rate(1.0, 0.1, 1.0, 5, accounting, bare) == pytest.approx(0.1, rel=1e-15)
    assert si_rate(1.0, 0.1, 0.0, 5) == 1.5
    assert si_rate(1.0, 0.1, 1.0, 5) == 0.25
    near = dsi_rate(1.0, 0.1, 1 - 1e-12, 5, accounting)
    assert near == pytest.approx(0.1, rel=1e-10) and near > 0.1


def test_dsi_is_never_slower_than_si_or_plain_decoding_at_the_same_lookahead():
    c = np.arange(1, 21)[:, None, None] / 20
    a = np.arange(21)[:, None] / 20
    k = np.arange(1, 21)
    dsi = dsi_rate(1.0, c, a, k)
    assert (dsi <= si_rate(1.0, c, a, k) * (1 + 1e-12)).all()
    assert (dsi <= 1 + 1e-12).all()
    assert (dsi <= dsi_rate(1.0, c, a, k, "original") * (1 + 1e-12)).all()


def test_the_servers_that_no_verification_waits_for():
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


def test_the_examples_of_the_paper():
    assert visible_fraction(0.8, 2) == pytest.approx(0.36) and visible_fraction(0.0, 3) == 1
    assert visible_fraction(1.0, 3) == 0
    counted = cases.forwards(30.0, 6.0, 5, 1.5, 100)["expected"]
    assert counted == {"target_forwards": 40, "drafter_forwards": 200, "si": 2400, "nonsi": 3000, "speedup": 1.25}
    perfect = [cases.perfect(d, k)["expected"] for d, k in ((0.05, 2),
                                                            (0.01, 5), (0.05, 5), (0.01, 2))]
    assert [round(float(one), 6) for one in perfect] == [7.333333, 17.5, 4.166667, 34]
    assert progress(0.5, 3) == 1.75
    assert progress(1.0, 3) == 3 and progress(0.0, 3) == 1
