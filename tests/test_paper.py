"""Table 2 of the paper on DSI, computed again, and the accounting of the published online simulator."""
from __future__ import annotations

import numpy as np
import pytest

from eval.dsi.command import main
from eval.dsi.keys import Paper
from eval.dsi.online import ForwardLatencies, online_mean
from eval.dsi.paper import TABLE, recomputed
from tests.sources import project_text

ONLINE = (1.74, 1.77, 1.61, 1.52, 1.58, 1.53, 1.71, 1.74, 1.68, 1.69)
OFFLINE = (1.29, 1.30, 1.14, 1.14, 1.17, 1.15, 1.13, 1.14, 1.15, 1.16)
EVENTS = (1.36, 1.39, 1.24, 1.18, 1.20, 1.19, 1.19, 1.21, 1.26, 1.23)
PLAIN = (2.57, 2.48, 1.39, 1.48, 1.45, 1.46, 2.26, 2.06, 2.44, 2.03)
TIMES = ForwardLatencies(1.0, 0.25, 1.0, 0.25)


def test_the_ten_rows_are_those_that_are_known():
    found = [recomputed(row, Paper()) for row in TABLE]
    assert tuple(round(row.offline, 2) for row in found) == OFFLINE
    assert tuple(round(row.events, 2) for row in found) == EVENTS
    assert tuple(round(row.plain, 2) for row in found) == PLAIN
    assert all(abs(row.online - known) < 0.01 for row, known in zip(found, ONLINE))


def test_the_tables_are_those_of_the_page_and_of_the_paper(output_of):
    shown = output_of(main, ["paper"])
    assert shown in project_text("docs/results/dsi-tables.md")

    table_1, table_2, table_3 = shown.split("\n\nTable ")
    rows = [line.split(" | ")[2:] for line in table_1.splitlines() if line.startswith("|")][2:]
    published, computed = rows[::2], rows[1::2]
    assert len(published) == 6 and [row[1:] for row in published] == [row[1:] for row in computed]
    assert {row[0] for row in published} == {"paper"} and {row[0] for row in computed} == {"events"}
    assert table_2.count("\n| ") == 11
    assert "| Phi3-14B / 4B | CNN-DM | 4.77 | 3.88 |" in table_3


def counted(times: ForwardLatencies, acceptance: float, lookahead: int,
            waits: bool, rng: np.random.Generator) -> float:
    """The cost of 50 tokens, run by run, if no call waits; the first forward of a server is that of its first run."""
    total, cost = 0, times.first_target - times.target
    while True:
        n = 20 if acceptance == 1 else min(int(rng.geometric(1 - acceptance)) - 1, 20)
        if total + n > 50:
            return cost + times.target
        windows = n // lookahead + 1
        cost += windows * lookahead * times.drafter + times.target
        cost += (times.first_drafter - times.drafter) * (total == 0)
        cost += (windows * times.target) * waits
        total += n


@pytest.mark.parametrize("servers, times", [
    (None, ForwardLatencies(1.0, 0.25, 3.0, 2.75)),
    (7, ForwardLatencies(1.0, 0.25, 1.0, 2.75))])
def test_the_mean_of_the_online_accounting_is_that_of_drawn_runs(servers, times):
    rng, repeats = np.random.default_rng(1), 4000
    for acceptance, lookahead in ((0.3, 1), (0.8, 4), (1.0, 5)):
        costs = [counted(times, acceptance, lookahead, servers is None, rng) for _ in range(repeats)]
        exact = online_mean(times, acceptance, lookahead, servers, 50)
        assert abs(np.mean(costs) - exact) < 4 * np.std(costs) / np.sqrt(repeats) + 1e-9


def test_a_first_forward_counts_once_for_each_server_and_for_the_drafter_until_something_is_settled():
    """Where all drafts are right there are three runs, of 20, 20 and the last, which costs a verification."""
    slow = ForwardLatencies(1.0, 0.25, 3.0, 0.75)
    assert online_mean(TIMES, 1.0, 5, None, 50) == pytest.approx(2 * (1 + 5 * 2.25) + 1)
    assert online_mean(slow, 1.0, 5, None, 50) == pytest.approx(2 * (1 + 5 * 2.25) + 1 + 2 + 0.5)
    assert online_mean(TIMES, 1.0, 5, 7, 50) == pytest.approx(2 * (25 * 0.25 + 1) + 1)
    # the fifth call of 25 drafts comes at 6.75, when a server that was used is free
    assert online_mean(slow, 1.0, 5, 7, 50) == pytest.approx(2 * (25 * 0.25 + 1) + 1 + 0.5)
    # the newest first: calls of 11 and 12 drafts begin when the two servers are free, and that of 11 ends at 4
    assert online_mean(ForwardLatencies(1.0, 0.25, 3.0, 0.25), 1.0, 1, 2, 6, max_run=5) == pytest.approx(4 + 1)
    # two servers: calls of 0 and 1 draft, at 0 and 0.25, end after 1 or 3; then the newest that waits begins, for 1
    two, half = ForwardLatencies(1.0, 0.25, 3.0, 0.25), 0.5
    after = online_mean(TIMES, half, 1, 2, 2, max_run=1) - half * (1.25 + 2)
    assert online_mean(two, half, 1, 2, 2, max_run=1) == pytest.approx(half * (3.25 + 4) + after)


def test_two_servers_allow_a_lookahead_of_the_paper_for_every_row():
    assert all(recomputed(row, Paper(num_target_servers=2)).dsi_lookahead <= 10 for row in TABLE)
