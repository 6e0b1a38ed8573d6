"""The map of methods: its clusters, its table and its picture; which clusters are drawn for real emulation."""
from __future__ import annotations

import csv
from dataclasses import replace

import pytest
from PIL import Image

from config.methods import METHODS
from eval.plan import map as mapping
from eval.plan.bench import EmulatedConfig, GridConfig, clusters, compare_choice, plan_of, sampled, summary
from eval.plan.map import ALONG, STAGES, Cell, MapConfig, cell, draw, planner_map, sites
from eval.plots import styles_of
from tests.test_plan import book, config_of


def cells_of(config):
    """A made map, in which every method has cells."""
    names = list(METHODS)
    return [Cell(stage, along, names[place % len(names)], "eagle+suffix", 1 + place % 4, "init_depth=6 stages=0+8",
                 2.0 + place, 1.0 + place / 2)
            for place, (stage, along, _) in enumerate(sites(config))]


@pytest.mark.parametrize("axes", ["row", "latency"])
def test_the_clusters_of_a_map_differ_in_two_things(axes):
    config = MapConfig(axes=axes, boards=2)
    found = {(stage, along): site for stage, along, site in sites(config)}
    assert len(found) == len(STAGES) * len(ALONG[axes])
    near = found[STAGES[1], ALONG[axes][1]]
    far = found[STAGES[2], ALONG[axes][2]]
    assert (near.stage(0.5, 1, 0), far.stage(0.5, 1, 0)) == (STAGES[1] / 1e3, STAGES[2] / 1e3)
    beyond = near.free + 1
    extra = near.stage(0.5, beyond, 0) - near.stage(0.5, near.free, 0)
    if axes == "row":
        assert near.latency == far.latency
        assert extra == pytest.approx(ALONG[axes][1] / 100 * STAGES[1] / 1e3)
    else:
        assert (near.latency, far.latency) == ALONG[axes][1:3]
        assert near.step - near.latency == pytest.approx(1.4)


def test_a_cell_says_what_is_chosen_and_that_it_is_no_slower_than_ar():
    config = config_of("methods=serial", "drafts=eagle")
    stage, along, site = sites(MapConfig(boards=1))[3]
    found = cell(stage, along, site, config, book(answers=1, tokens=12))
    assert found.method in ("ar", "serial") and found.boards == 1 and "pipeline_type=" in found.keys
    assert found.tokens_per_second >= found.plain_tokens_per_second > 0


@pytest.mark.parametrize("axes", ["row", "latency"])
def test_a_map_is_written_as_a_table_and_a_picture(tmp_path, axes, capsys, monkeypatch):
    config = MapConfig(axes=axes, output=str(tmp_path / "map"))
    cells = cells_of(config)
    monkeypatch.setattr(mapping, "planned", lambda given: cells if given.base == "vicuna-7b" else [])
    assert planner_map(["vicuna-7b", f"axes={axes}", f"output={config.output}"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("56 cells: ") and "2.00 to 2.00 times as fast as ar; simulated" in out
    with (tmp_path / "map.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [(float(row["stage_ms"]), row["method"], int(row["boards"])) for row in table] == [
        (one.stage_ms, one.method, one.boards) for one in cells]
    picture = Image.open(tmp_path / "map.png")
    assert picture.size[0] > 800
    assert len(picture.getcolors(1 << 24)) > len(METHODS)
    pictures = []
    for one in (cells[0], cells[0]._replace(method="galaxy")):
        draw(config, [one])
        pictures.append((tmp_path / "map.png").read_bytes())
    assert pictures[0] != pictures[1]


def test_a_plan_is_judged_by_other_questions():
    config = config_of("methods=serial", "drafts=eagle", "max_new_tokens=12")
    site = clusters(1, seed=3)[0]
    row = compare_choice(replace(site, factors=(1.0,)), config,
                         book(answers=1, tokens=12), book(answers=2, tokens=12))
    assert row["chosen"]["pipeline_type"] in ("ar", "serial") and row["boards"] == 1
    assert 0 < row["reached"] <= 1 and row["best_speed"] >= row["plain_speed"] > 0
    assert summary([row, row]).startswith("2 clusters: the choice reaches ")


def test_clusters_are_drawn_by_their_seed_and_every_second_one_is_uneven():
    found = clusters(4, seed=1)
    assert found == clusters(6, seed=1)[:4] != clusters(4, seed=2)
    assert [bool(site.links) for site in found] == [False, True, False, True]
    with pytest.raises(ValueError, match="judges=0 is not possible"):
        GridConfig(judges=0)
    plan = plan_of(3, 16, "suffix", "vicuna-7b")
    assert plan.chosen_drafts == ("suffix",) and "vicuna" in plan.run.base_dir


def test_every_method_has_a_look_of_its_own():
    styles = styles_of([*METHODS, "naive, suffix"])
    assert len({(style.tone, style.hatch) for style in styles.values()}) == len(styles)
    assert len({style.marker for style in styles.values()}) == len(METHODS)
    alone, mixed = styles["naive"], styles["naive, suffix"]
    assert alone.marker == mixed.marker and alone.hatch != mixed.hatch


def test_clusters_for_real_emulation_are_drawn_within_the_bounds_and_always_the_same():
    config = EmulatedConfig(seed=1, least=2)
    found = sampled(config)
    assert found == sampled(config) != sampled(replace(config, seed=2))
    assert len(found) == 4
    assert all(2 <= len(site.factors) <= 4
               and site.model / len(site.factors) >= 30 for site in found)
    with pytest.raises(ValueError, match="of the clusters have 2 to 4 boards"):
        sampled(replace(config, count=64))
