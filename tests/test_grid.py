"""Random clusters, plans that other questions judge, and the looks of methods in plots."""
from __future__ import annotations

from dataclasses import replace

import pytest

from config.methods import METHODS
from eval.plan.bench import GridConfig, clusters, compare_choice, summary
from eval.plots import styles_of
from tests.test_plan import book, config_of


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


def test_every_method_has_a_look_of_its_own():
    styles = styles_of([*METHODS, "naive, suffix"])
    assert len({(style.tone, style.hatch) for style in styles.values()}) == len(styles)
    assert len({style.marker for style in styles.values()}) == len(METHODS)
    alone, mixed = styles["naive"], styles["naive, suffix"]
    assert alone.marker == mixed.marker and alone.hatch != mixed.hatch
