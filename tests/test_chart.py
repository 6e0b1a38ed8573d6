"""The map of methods: its clusters, its table and its picture; which clusters are drawn for real emulation."""
from __future__ import annotations

import io
from dataclasses import replace

import pytest
from PIL import Image

from config.methods import METHODS
from eval.plan.chart import ALONG, STAGES, Cell, ChartConfig, cell, load, sites, summary, table
from eval.plan.chart_plot import draw
from eval.plan.judge_emulated import EmulatedConfig, drawn
from eval.plan.map import planner_map
from tests.test_plan import book, config_of


def cells_of(config):
    """A made map, in which every method has cells."""
    names = list(METHODS)
    return [Cell(stage, along, names[place % len(names)], "eagle+suffix", 1 + place % 4, "init_depth=6 stages=0+8",
                 2.0 + place, 1.0 + place / 2)
            for place, (stage, along, _) in enumerate(sites(config))]


@pytest.mark.parametrize("axes", ["row", "latency"])
def test_the_clusters_of_a_map_differ_in_two_things(axes):
    config = ChartConfig(axes=axes, boards=2)
    found = {(stage, along): site for stage, along, site in sites(config)}
    assert len(found) == len(STAGES) * len(ALONG[axes])
    near, far = found[STAGES[1], ALONG[axes][1]], found[STAGES[2], ALONG[axes][2]]
    assert (near.stage(0.5, 1, 0), far.stage(0.5, 1, 0)) == (STAGES[1] / 1e3, STAGES[2] / 1e3)
    beyond = near.free + 1
    extra = near.stage(0.5, beyond, 0) - near.stage(0.5, near.free, 0)
    if axes == "row":
        assert near.latency == far.latency and extra == pytest.approx(ALONG[axes][1] / 100 * STAGES[1] / 1e3)
    else:
        assert (near.latency, far.latency) == ALONG[axes][1:3] and near.step - near.latency == pytest.approx(1.4)


def test_a_cell_says_what_is_chosen_and_that_it_is_no_slower_than_ar():
    config = config_of("methods=serial", "drafts=eagle")
    stage, along, site = sites(ChartConfig(boards=1))[3]
    found = cell(stage, along, site, config, book(answers=1, tokens=12))
    assert found.method in ("ar", "serial") and found.boards == 1 and "pipeline_type=" in found.keys
    assert found.tokens_per_second >= found.plain_tokens_per_second > 0


@pytest.mark.parametrize("axes", ["row", "latency"])
def test_a_table_is_read_as_it_was_written_and_draws_a_picture(tmp_path, axes, capsys):
    config = ChartConfig(axes=axes, output=str(tmp_path / "map"))
    cells = cells_of(config)
    path = tmp_path / "map.csv"
    path.write_text(table(config, cells))
    assert load(str(path), ChartConfig(output=config.output)) == (config, cells)
    assert planner_map([f"load={path}", f"output={tmp_path / 'again'}"]) == 0
    assert "56 cells: " in capsys.readouterr().out
    picture = Image.open(io.BytesIO((tmp_path / "again.png").read_bytes()))
    assert picture.size[0] > 800 and len(picture.getcolors(1 << 24)) > len(METHODS)
    assert draw(config, cells[:1]) != draw(config, [replace(cells[0], method="galaxy")])
    assert summary(cells).endswith("2.00 to 2.00 times as fast as ar; simulated")
    path.write_text(path.read_text().rpartition("\n2")[0])
    with pytest.raises(ValueError, match="is no map of methods"):
        load(str(path), config)


def test_every_method_has_a_look_of_its_own():
    assert len({method.look for method in METHODS.values()}) == len(METHODS)


def test_clusters_for_real_emulation_are_drawn_within_the_bounds_and_always_the_same():
    config = EmulatedConfig(seed=1, least=2)
    found = drawn(config)
    assert found == drawn(config) != drawn(replace(config, draw=1)) and len(found) == 4
    assert all(2 <= len(site.factors) <= 4 and site.model / len(site.factors) >= 30 for site in found)
    with pytest.raises(ValueError, match="of the clusters have 2 to 4 boards"):
        drawn(replace(config, count=64))
