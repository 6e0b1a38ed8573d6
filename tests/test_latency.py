"""Times of whole models, what is predicted out of them, and the commands that measure both; no time has an upper bound.
"""
from __future__ import annotations

from itertools import chain

import pytest

from eval.dsi.command import main
from eval.dsi.formulas import dsi_rate, least_lookahead, si_rate
from eval.dsi.latency import LatencyConfig, paces, spread_of
from eval.dsi.table import predict
from eval.pairs import open_model
from tests.json_files import load_json

SMALL = ["dtype=float64", "template=none", "num_examples=1", "max_new_tokens=3", "repeats=1"]


@pytest.fixture(scope="module")
def folder(saved):
    return str(saved / "base")


@pytest.fixture(scope="module")
def model(folder):
    return open_model(folder, LatencyConfig(dtype="float64"))


def test_a_spread_is_the_median_with_quartiles_in_milliseconds():
    assert spread_of([0.001, 0.002, 0.003, 0.004, 0.010]) == pytest.approx((3, 2, 4))


def test_each_answer_of_each_turn_that_counts_has_its_times(model, monkeypatch):
    monkeypatch.setattr("eval.dsi.latency.spread_of", list)
    config = LatencyConfig(max_new_tokens=3, repeats=2)
    seconds = [*chain(*paces([model.whole, model.whole], [[1, 5, 7], [1, 4]], config))]
    assert [len(times) for times in seconds] == [4, 4, 4, 4] and min(chain(*seconds)) > 0


def test_a_prediction_is_the_best_of_each_way_of_decoding():
    found = predict(10, 1.5, 0.8, num_servers=2)
    k = int(least_lookahead(10, 1.5, 2))
    assert found.dsi_lookahead == k == 4
    assert found.dsi == dsi_rate(10, 1.5, 0.8, k)
    assert found.si == pytest.approx(min(float(si_rate(10, 1.5, 0.8, look)) for look in range(1, 201)))


def test_the_latency_command_shows_what_it_measured(folder, output_of):
    shown = output_of(main, ["latency", f"model={folder}", *SMALL, "sets=qa,sum"])
    assert [line.split()[0] for line in shown.splitlines() if "TPOT" in line] == ["qa", "sum"]
    assert shown.count("TTFT") == shown.count("  n=1\n") == 2


def test_a_table_goes_from_models_to_predictions_and_keeps_the_rows_that_it_has(
        folder, tmp_path, output_of, error_of, capsys, monkeypatch):
    output = tmp_path / "rows.json"
    words = ["table", f"target={folder}", f"drafts={folder}", *SMALL, f"output={output}"]
    assert main([*words, "sets=qa"]) == 0
    first = load_json(output)["rows"]
    assert main([*words, "sets=qa,sum"]) == 0
    rows = load_json(output)["rows"]
    assert rows[:1] == first and [row["set"] for row in rows] == ["qa", "sum"]
    assert [row["acceptance"][0] for row in rows] == [1, 1]  # the drafter is the target
    monkeypatch.setattr("eval.dsi.table.open_model", None)  # measures nothing
    capsys.readouterr()
    assert output_of(main, [*words, "sets=sum", "num_target_servers=2"]).count("\nbase") == 1
    assert "was recorded with seed=42, and seed=1 is requested" in error_of(main, [*words, "seed=1"])


@pytest.mark.parametrize("text, message", [
    ('{"rows": []}', "is not a file of rows"), ('{"keys": {}, "rows": [{"set": "qa"}]}', "is not a file of rows"),
    ("[", "rows.json")])
def test_a_file_that_holds_no_rows_is_not_written_over(text, message, tmp_path, sentence_of):
    (tmp_path / "rows.json").write_text(text)
    assert message in sentence_of(main, ["table", f"output={tmp_path / 'rows.json'}"])
    assert (tmp_path / "rows.json").read_text() == text
