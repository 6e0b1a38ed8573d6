"""The heat maps: the grids, the known figures of the paper's, the table that is drawn again, and the maps."""
from __future__ import annotations

import csv
import json
import re
from itertools import product

import numpy as np
import pytest

from config.presets import ROOT
from eval.dsi import command as simulate
from eval.dsi import formulas
from eval.dsi.heatmap import COLUMNS, MAPS, best, grid, legal, speed_up, summary, table
from eval.dsi.keys import Heatmap
from tests.sources import project_text

SMALL = Heatmap(ndim=3)
PAPER = Heatmap(grid="paper")
MAP = {one.name: one for one in MAPS}


def test_a_fixed_lookahead_is_that_of_every_cell():
    """Figure 7 of the paper; its authors read 5 to 6 times at the lower right."""
    config = Heatmap(grid="paper", lookahead=5, num_target_servers=20)
    drafters, acceptances, lookaheads = grid(config)
    found = best(config)
    assert list(lookaheads) == [5] and set(found["DSI"].lookahead.flat) == {5}
    ratio = speed_up(MAP["dsi_over_si"], found)
    assert round(ratio[list(drafters).index(1), list(acceptances).index(0.1)], 2) == 5.4
    assert np.nanmax(ratio) == pytest.approx(17.5) == ratio[list(drafters).index(0.01), list(acceptances).index(1)]
    usual = ratio[:list(drafters).index(0.2) + 1, :list(acceptances).index(0.9) + 1]
    assert usual.min() >= 1 and round(usual.max(), 1) == 2.0


@pytest.fixture(scope="module")
def original():
    """The paper's grid in the accounting of the simulator that was published with it."""
    return best(Heatmap(grid="paper", accounting="original"))


@pytest.fixture(scope="module")
def corrected():
    return best(PAPER)


def place(ratio: np.ndarray, number: int) -> tuple[float, float]:
    """Acceptance rate and drafter latency of a cell of the paper's grid."""
    i, j = np.unravel_index(number, ratio.shape)
    drafters, acceptances, _ = grid(PAPER)
    return float(acceptances[j]), float(drafters[i])


# --- grids ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("ndim, rows", [(2, 12),
                                            (4, 80), (10, 1089), (20, 8463)])
def test_a_grid_has_as_many_legal_configurations_as_that_of_the_published_simulator(ndim, rows):
    config = Heatmap(ndim=ndim)
    drafters, acceptances, lookaheads = grid(config)
    assert sum(legal(config, drafters, k).sum() for k in lookaheads) * len(acceptances) == rows


def test_the_paper_s_grid_has_its_100_drafters_101_acceptance_rates_and_200_lookaheads():
    drafters, acceptances, lookaheads = grid(PAPER)
    assert (len(drafters), len(acceptances), lookaheads) == (100, 101, range(1, 201))
    assert (drafters[0], drafters[6], drafters[-1], acceptances[0], acceptances[-1]) == (0.01, 0.07, 1, 0, 1)


# --- costs ------------------------------------------------------------------------------------------------------------

def test_every_method_is_taken_at_the_lookahead_that_a_search_finds():
    config = Heatmap(ndim=4, num_target_servers=3)
    drafters, acceptances, lookaheads = grid(config)
    bests = best(config)
    for (i, c), (j, a) in product(enumerate(drafters), enumerate(acceptances)):
        tried = {"SI": {k: formulas.si_rate(1.0, c, a, k) for k in lookaheads},
                 "DSI": {k: formulas.dsi_rate(1.0, c, a, k) for k in lookaheads
                         if formulas.servers_needed(1.0, c, k) <= 3}}
        for name, cost_by_lookahead in tried.items():
            cost, lookahead = bests[name].cost[i, j], bests[name].lookahead[i, j]
            if cost_by_lookahead:
                assert cost == pytest.approx(min(cost_by_lookahead.values()), abs=1e-12)
                assert cost == pytest.approx(cost_by_lookahead[lookahead], abs=1e-12)
            else:
                assert np.isnan(cost) and lookahead == 0
    assert np.all(bests["non-SI"].cost == 1)


def test_dsi_has_no_cost_where_no_lookahead_of_the_grid_is_legal_and_si_has_its_own_best_one_there():
    bests = best(Heatmap())  # ten lookaheads: a drafter of 0.01 needs 15
    assert np.isnan(bests["DSI"].cost[0]).all()
    assert not np.isnan(bests["DSI"].cost[1:]).any()
    assert bests["SI"].lookahead[0].max() == 10
    assert not np.isnan(bests["SI"].cost).any()
    assert np.isnan(speed_up(MAP["dsi_over_si"], bests)[0]).all()


def test_si_over_plain_decoding_is_that_of_the_paper(original):
    ratio = speed_up(MAP["si_over_nonsi"], original)
    assert (ratio.max(), ratio.min()) == (pytest.approx(67.0, abs=0.05), 0.5)
    assert place(ratio, ratio.argmax()) == (1, 0.01)
    assert place(ratio, ratio.argmin()) == (0, 1)
    assert np.mean(ratio < 1) == 0.5


@pytest.mark.parametrize("name, most, where, median", [
    ("dsi_over_si", 2.0, (0, 1), 1.20),
    ("dsi_over_nonsi", 100, (1, 0.01), 1.11),
    ("dsi_over_best", 1.52, (0.99, 0.02), 1.08),
])
def test_dsi_in_the_original_accounting_has_the_known_values_of_the_paper_s_grid(
        original, name, most, where, median):
    ratio = speed_up(MAP[name], original)
    assert (ratio.max(), np.median(ratio)) == (pytest.approx(most, abs=0.005),
                                               pytest.approx(median, abs=0.005))
    assert place(ratio, ratio.argmax()) == where


def test_the_summary_tells_extremes_with_their_cells_and_how_often_it_is_a_slow_down(original):
    said = list(summary(PAPER, original))
    assert len(said) == len(MAPS)
    assert said[1] == ("DSI over SI: max 2.000 (a 0, c 1), median 1.203, min 0.991 (a 0.41, c 0.01), "
                       "0.45 % of 10100 cells below 1")


# --- the table --------------------------------------------------------------------------------------------------------

def test_a_table_says_its_configuration_and_has_a_row_for_each_cell_and_method():
    first_line, *lines = table(SMALL, best(SMALL)).splitlines()
    assert json.loads(first_line[2:]) == vars(SMALL)
    rows = list(csv.DictReader(lines))
    assert tuple(rows[0]) == COLUMNS
    assert len({(row["c"], row["a"], row["algorithm"]) for row in rows}) == len(rows) == 4 * 4 * 3
    assert [row["c"] for row in rows if row["algorithm"] == "DSI" and row["cost"] == "nan"] == ["0.01"] * 4


# --- the maps ---------------------------------------------------------------------------------------------------------

def test_the_documentation_shows_every_map_and_quotes_the_summary_of_its_command(corrected):
    page = project_text("docs/dsi.md")
    assert "\n".join(summary(PAPER, corrected)) in page
    shown = set(re.findall(r"\]\((dsi_\w+\.png)\)", page))
    assert {f"dsi_{name.removeprefix('dsi_')}.png" for name in MAP} <= shown
    assert {path.name for path in (ROOT / "docs").glob("dsi_*.png")} <= shown


# --- the command ------------------------------------------------------------------------------------------------------

def test_the_command_computes_and_draws(tmp_path, output_of):
    shown = output_of(simulate.main, ["heatmap", "ndim=2", "num_target_servers=1", f"output={tmp_path / 'maps'}"])
    assert "DSI over min(SI, non-SI): max " in shown and f"The maps are in {tmp_path / 'maps'}, simulated" in shown
    drawn = {path.stem: path.read_bytes() for path in (tmp_path / "maps").glob("*.png")}
    assert drawn.keys() == set(MAP)
    assert all(content.startswith(b"\x89PNG") for content in drawn.values())


def test_a_folder_that_is_a_file_is_refused_before_anything_is_computed(tmp_path, sentence_of, monkeypatch):
    monkeypatch.setattr("eval.dsi.heatmap.best", None)
    (tmp_path / "maps").write_text("mine")
    assert "cannot be written" in sentence_of(simulate.main, ["heatmap", f"output={tmp_path / 'maps'}"])
    assert (tmp_path / "maps").read_text() == "mine"
