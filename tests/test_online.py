"""The command that simulates SI and DSI by events: what it prints, writes and refuses."""
from __future__ import annotations

import dataclasses
from math import isnan

import numpy as np
import pytest

from eval.dsi import command as simulate
from eval.dsi.events import decode
from eval.dsi.keys import Online
from eval.dsi.online import ForwardLatencies, accepted_runs, online_mean, plan_of, published, spread, texts_of

FAST = ["S=12", "num_repeats=2", "c=0.004", "c_sub=0.002", "failure_cost=0.02",
        "failure_cost_sub=0.01", "k=2"]


def rows(shown):
    """The cells of each method's line."""
    return {line.split()[0]: line[8:].replace(" +- ", "+-").split()
            for line in shown.splitlines()
            if line.startswith(("non-SI", "SI ", "DSI "))}


def ticks(config, method):
    """What the first text takes."""
    return decode(method, plan_of(config, 0), next(texts_of(config))).ticks


@pytest.mark.parametrize("words", [[], ["maximum_correct_tokens=4"], ["preemption=none", "num_target_servers=3"]])
def test_all_is_predicted_the_same_twice(words, output_of):
    shown = output_of(simulate.main, ["online", *FAST, *words])
    assert shown == output_of(simulate.main, ["online", *FAST, *words])
    assert list(rows(shown)) == ["non-SI", "SI", "DSI"]


def test_the_published_accounting_stands_beside_the_prediction_where_it_ends():
    config = Online(S=50, k=2, a=0.8, c_sub=0.02)
    times = ForwardLatencies(0.1, 0.02, 1.0, 0.1)
    assert published(config, "DSI") == online_mean(times, 0.8, 2, 7, 50)
    assert published(config, "SI") == online_mean(times, 0.8, 2, None, 50) > online_mean(times, 0.8, 2, 7, 50)
    assert isnan(published(config, "non-SI"))
    for keys in ({"a": 0.0}, {"S": 20}, {"maximum_correct_tokens": 0}, {"traces": "matches.json"}):
        assert isnan(published(dataclasses.replace(config, **keys), "DSI"))


def test_times_are_those_of_the_keys_to_the_nanosecond():
    config = Online(c=0.4, c_sub=0.03, failure_cost=2.0,
                    failure_cost_sub=0.2, S=9, k=2, a=0.0)
    assert ticks(config, "non-SI") == 2_000_000_000 + 8 * 200_000_000
    assert ticks(config, "DSI") == 2_000_000_000 + 8 * 200_000_000
    assert ticks(config, "SI") == 2_000_000_000 + 8 * 200_000_000 + 400_000_000 + 14 * 30_000_000
    assert plan_of(config, 3).seed == config.random_seed + 3


def test_every_draft_may_be_right_or_wrong():
    for a, most in ((0.0, 20), (1.0, 1000), (0.5, 0)):
        config = Online(a=a, maximum_correct_tokens=most, S=20)
        assert next(texts_of(config)) == [a == 1.0] * 20
    capped = next(texts_of(Online(a=1.0, maximum_correct_tokens=3, S=9)))
    assert capped == [True, True, True, False] * 2 + [True]


def test_runs_are_those_that_the_published_simulator_draws():
    chance = np.random.RandomState(7)
    lengths = [next(accepted_runs(0.8, 9, chance)) for _ in range(5)]
    assert lengths == [min(n - 1, 9)
                       for n in np.random.RandomState(7).geometric(1 - 0.8, size=5)]
    assert next(accepted_runs(1.0, 20, chance)) == 20
    assert next(accepted_runs(0.0, 20, chance)) == 0
    assert spread([2, 0, 1, 5], 8) == [True,
                                       True, False, False, True, False, True, True]


def test_recorded_matches_take_the_place_of_chance(tmp_path):
    traces = tmp_path / "matches.json"
    traces.write_text("[[1, 1, 0], [], [0, 1]]")
    texts = texts_of(Online(traces=str(traces), S=7))
    assert [next(texts) for _ in range(3)] == [
        [True, True, False] * 2 + [True],
        [False, True] * 3 + [False], [True, True, False] * 2 + [True]]


@pytest.mark.parametrize("content", ["[1, 0]", "[[2]]", "[[]]"])
def test_a_file_without_matches_is_refused(tmp_path, sentence_of, content):
    traces = tmp_path / "matches.json"
    traces.write_text(content)
    assert "holds no matches" in sentence_of(simulate.main, ["online", f"traces={traces}"])
