"""A results folder becomes tables and plots that say where their figures come from, and what is missing."""
from __future__ import annotations

import csv
import gzip
import io
import json
import sys

import pytest

from config.methods import METHODS
from eval import report as reporting
from eval import results_index as results
from eval.plots import styles_of
from tests.json_files import save_json, save_json_lines
from tests.test_metrics import answer, line

CONFIG = {"data": "", "draft": "eagle", "drafts": "", "baseline_draft": ""}
START = {"methods": "ar,naive,continuous", "draft": "eagle", "drafts": "", "sets": "qa,gsm8k",
         "temperatures": "0,1", "questions": "2", "repeats": 1}
SECONDS = {"ar": 8.0, "naive": 4.0, "continuous": 2.0}


def put(folder, **more):
    """Add one answer to a results folder."""
    entry = answer(**more)
    path = folder / "answers" / entry["method"] / f"{entry['set']}-t{entry['temperature']:g}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry, ensure_ascii=False) + "\n")


def put_environment(folder, start, **config):
    """Write the env.json of a results folder: one start, and changes of the configuration."""
    environment = {"starts": [start], "config": {**CONFIG, **config}, "machine": {}}
    save_json(folder / "env.json", environment)


@pytest.fixture
def folder(tmp_path):
    """Two questions of two sets at temperature 0, of three methods, and what two ranks did meanwhile."""
    for number, (method, seconds) in enumerate(SECONDS.items()):
        for name in ("qa", "gsm8k"):
            for question in (1, 2):
                put(tmp_path, method=method, set=name, question=question,
                    tokens=(16,), seconds=(seconds * question,),
                    requests=[number], misses=[5],
                    settled=[[[1.0, 1], [seconds, 15]]])
        for rank in (0, 1):
            path = tmp_path / "tally" / "0-ar" / f"rank_{rank}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                found = line(rank, number, 10.0, forward=2.5 * number, wait=2.0)
                file.write(json.dumps({key: value
                                       for key, value in found.items() if key != "launch"}) + "\n")
    put_environment(tmp_path, START)
    return tmp_path


def report_text(folder):
    """The report that is written for a results folder."""
    return reporting.report(folder).read_text(encoding="utf-8")


def csv_rows(path):
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_summary_has_a_row_for_each_method_set_and_temperature(folder):
    reporting.report(folder)
    rows = csv_rows(folder / "summary.csv")
    assert [(row["method"], row["set"], row["temperature"]) for row in rows] == [
        (method, name, "0") for name in ("gsm8k", "qa", "mean") for method in SECONDS]
    assert list(rows[0])[:3] == ["method", "draft", "set"]
    assert {"xi", "sr_naive", "sr_ar", "accepted_length", "tokens_per_miss", "ttft", "equal"} <= set(rows[0])
    for row in rows:
        seconds = SECONDS[row["method"]]
        assert float(row["xi"]) == pytest.approx(32 / (3 * seconds), rel=1e-5)
        assert float(row["sr_naive"]) == 4 / seconds and float(row["sr_ar"]) == 8 / seconds
        assert (float(row["accepted_length"]), float(row["tokens_per_miss"])) == (3, 3)
        assert (float(row["ttft"]), row["n"], row["equal"]) == (0.5, "4" if row["set"] == "mean" else "2", "same")
        assert float(row["tpt_p50"]) == pytest.approx((seconds - 1) / 15, rel=1e-5)
        assert (row["emulated"], row["profile"]) == ("true", "jetson-7b")
    assert [row["computed"] for row in rows[:3]] == ["0", "0.25", "0.5"]
    assert rows[2]["waited"] == "0.2"


def test_each_of_several_seeds_has_its_speed_and_its_ratio_to_naive(folder):
    reporting.report(folder)
    assert {row["xi_by_seed"] for row in csv_rows(folder / "summary.csv")} == {""}
    for method, seconds in (("naive", 3.0), ("continuous", 1.0)):
        for set_name in ("qa", "gsm8k"):
            put(folder, method=method, set=set_name, tokens=(16,), seconds=(seconds,), seed=1, repeat=1)

    reporting.report(folder)
    rows = {(row["method"], row["set"]): row for row in csv_rows(folder / "summary.csv")}
    for set_name in ("qa", "mean"):
        row = rows["continuous", set_name]
        assert (row["xi_by_seed"], row["sr_naive_same_by_seed"]) == ("5.333, 16.000", "2.000, 3.000")
    assert rows["ar", "qa"]["xi_by_seed"] == ""
    put(folder, method="ar", set="qa", tokens=(16,), seconds=(8.0,), seed=1, repeat=1)
    reporting.report(folder)
    alone = csv_rows(folder / "summary.csv")[3]
    assert (alone["method"], alone["xi_by_seed"], alone["sr_naive_same_by_seed"]) == ("ar", "1.333, 2.000", "")


def test_the_raw_answers_have_all_texts_and_times_and_other_texts_have_another_hash(folder):
    reporting.report(folder)
    raw = (folder / "answers.jsonl.gz").read_bytes()
    answers = [json.loads(text) for text in gzip.decompress(raw).splitlines()]
    assert len(answers) == 12 and all(each["token_ids"] == [list(range(16))] for each in answers)
    assert {each["method"]: each["settled"] for each in answers} == {
        method: [[[1.0, 1], [seconds, 15]]] for method, seconds in SECONDS.items()}
    before = {row["texts"] for row in csv_rows(folder / "summary.csv") if row["set"] == "qa"}
    assert len(before) == 1 and len(before.pop()) == 12

    put(folder, method="naive", set="qa", question=3, tokens=(16,), seconds=(4.0,))
    put(folder, method="continuous", set="qa", question=3, tokens=(15,), seconds=(4.0,))
    reporting.report(folder)
    after = {row["method"]: row["texts"] for row in csv_rows(folder / "summary.csv") if row["set"] == "qa"}
    assert len(set(after.values())) == 3
    assert (folder / "answers.jsonl.gz").read_bytes() != raw


def test_the_edits_are_a_set_that_no_mean_with_others_contains(folder, tmp_path_factory):
    reporting.report(folder)
    means = [row for row in csv_rows(folder / "summary.csv") if row["set"] == "mean"]
    edits_folder = tmp_path_factory.mktemp("edits")
    for results_folder in (folder, edits_folder):
        for method in SECONDS:
            put(results_folder, method=method, set="edits", tokens=(16,), seconds=(0.5,))
        reporting.report(results_folder)

    rows = csv_rows(folder / "summary.csv")
    assert [row["set"] for row in rows[::3]] == ["gsm8k", "qa", "edits", "mean"]
    assert rows[-3:] == means and {row["xi"] for row in rows[6:9]} == {"32"}
    assert {row["xi"] for row in csv_rows(edits_folder / "summary.csv") if row["set"] == "mean"} == {"32"}


def test_the_ranks_have_rows_of_their_own(folder):
    reporting.report(folder)
    rows = csv_rows(folder / "stages.csv")
    assert len(rows) == 3 * 2 * 3
    (row,) = [row for row in rows
              if (row["method"], row["set"], row["rank"]) == ("continuous", "qa", "1")]
    assert [row[key] for key in ("computed", "waited", "other", "bytes", "rows")] == ["0.5", "0.2", "0.3", "1000", "31"]


def test_every_table_and_plot_names_its_world(folder):
    text = report_text(folder)
    for block in text.split("\n\n"):
        if block.startswith("| method"):
            lead = text[:text.index(block)].rstrip().splitlines()[-1]
            assert "(emulated, profile jetson-7b)" in lead or "same text" in lead
    assert "| naive | 2.67 (1.00) | 2.67 (1.00) | 2.67 (1.00; 1.00 to 1.00) |" in text
    assert "| continuous | 5.33 (2.00) | 5.33 (2.00) | 5.33 (2.00; 2.00 to 2.00) |" in text
    assert "](speedup-t0.png)" in text and (folder / "speedup-t0.png").read_bytes().startswith(b"\x89PNG")


def test_the_speeds_are_on_the_screen_in_columns(folder):
    screen = io.StringIO()
    reporting.report(folder, screen)
    assert screen.getvalue().splitlines() == [
        "",
        "Tokens per second (ξ) at temperature 0, and the ratio of the mean to naive (SR) "
        "(emulated, profile jetson-7b):",
        "",
        "method      gsm8k    qa  mean    SR",
        "ar           1.33  1.33  1.33  0.50",
        "naive        2.67  2.67  2.67  1.00",
        "continuous   5.33  5.33  5.33  2.00"]


@pytest.mark.parametrize("more, world", [
    ({"emulated": False, "profile": "none"}, "measured"),
    ({"emulated": True, "profile": "wifi"}, "emulated, profile wifi"),
    ({"emulated": False, "profile": "lan-1g", "simulated": True}, "simulated, profile lan-1g")])
def test_figures_are_measured_emulated_or_simulated(more, world):
    assert results.provenance([answer(**more)]) == world


def test_what_is_missing_is_said(folder):
    text = report_text(folder)
    assert "missing: answers of 6 groups" in text
    assert "ar has 0 of 2 answers on qa at temperature 1" in text
    (folder / "answers" / "continuous" / "qa-t0.jsonl").write_text(json.dumps(answer()) + "\n" + '{"method": "conti')
    gaps = results.missing(results.read(folder))
    assert "continuous has 1 of 2 answers on qa at temperature 0" in gaps and len(gaps) == 7


def test_one_method_alone_is_reported_without_ratios(tmp_path):
    put(tmp_path, method="continuous", emulated=False, profile="none")
    text = report_text(tmp_path)
    row, mean_row = csv_rows(tmp_path / "summary.csv")
    assert (row["set"], mean_row["set"], row["xi"]) == ("qa", "mean", mean_row["xi"])
    assert row["sr_naive"] == row["sr_ar"] == row["equal"] == row["computed"] == row["xi_low"] == ""
    assert "| continuous | 5.00 (–) | 5.00 (–) |" in text and "env.json" in text and "speedup" not in text


def test_a_text_that_differs_is_reported(folder):
    put(folder, method="pruned", set="qa", token_ids=[[7]], first_difference={"margin": 1e-4})
    text = report_text(folder)
    assert "1 of 1 differ, first question 1 turn 1 token 1, margin 0.0001" in text


def test_without_matplotlib_there_are_tables(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "eval.plots", raising=False)
    monkeypatch.delattr("eval.plots", raising=False)
    assert "matplotlib, which is not installed" in report_text(folder)
    assert not list(folder.glob("*.png"))


def test_a_folder_without_answers_is_one_sentence(tmp_path, sentence_of):
    sentence = sentence_of(reporting.main, [str(tmp_path)])
    assert "has no answers: make some with bash run_eval.sh results=" in sentence


JUNK = ("null", "[]", '"text"', "{cut", "[" * 100_000)
ANSWERS, TALLY = "answers/naive/qa-t0.jsonl", "tally/0-ar/rank_1.jsonl"
OTHER_ANSWERS = (
    {"choices": []},
    {"choices": [{"new_tokens": ["1"], "wall_time": [1.0], "accept_lengths": []}]},
    {"choices": [{"new_tokens": [1], "wall_time": [1.0]}]},
    {"settled": [[[1.0]]]},
    {"temperature": "0"},
    {"question_id": [1]},
    {"requests": None})
OTHER_FLIGHTS = (None, {"rows": 1}, {"rows": "1", "stay": 1.0, "aloft": 1.0, "misses": 1, "lost": 0.0})
OTHER_STARTS = ("null", {"methods": "ar"}, {**START, "temperatures": "hot"})
SPOILED = [  # a file of a results folder, and what it holds, or in what its first line consists
    *((name, junk) for name in (ANSWERS, TALLY, "env.json") for junk in JUNK),
    *((ANSWERS, json.dumps({**answer(), **other})) for other in OTHER_ANSWERS),
    *((TALLY, json.dumps({**line(0, 9, 8.0), "first": 1.6, "decoding": {}, "flight": other}))
      for other in OTHER_FLIGHTS),
    *(("env.json", json.dumps({"starts": [other], "config": CONFIG, "machine": {}})) for other in OTHER_STARTS)]


@pytest.mark.parametrize("name, content", SPOILED, ids=lambda value: value[-40:])
def test_what_is_spoiled_in_a_folder_is_named_by_file_and_line(folder, name, content, sentence_of):
    path, place = folder / name, str(folder / name)
    if path.suffix == ".jsonl":
        place, content = f"line 1 of {path}", f"{content}\n{path.read_text()}"
    path.write_text(content)

    assert sentence_of(reporting.main, [str(folder)]).startswith(f"flowspec: {place} is ")


def test_a_set_that_nobody_answered_and_that_is_gone_is_no_error(folder):
    put_environment(folder, {**START, "sets": "gone"}, data="nowhere")
    assert results.missing(results.read(folder)) == []


START_OF_DRAFTS = {**START, "methods": "ar,naive,serial,continuous", "drafts": "eagle,model:DIR", "draft": "none",
                   "sets": "qa", "temperatures": "0"}
DRAFTED = {("ar", "none"): 8.0, ("naive", "eagle"): 4.0,
           ("naive", "model:DIR"): 2.0, ("serial", "model:DIR"): 4.0,
           ("continuous", "eagle"): 2.0, ("continuous", "model:DIR"): 1.0}


@pytest.fixture
def drafted(tmp_path):
    """Two questions of one set, answered with two drafts; there is no serial with the first of them."""
    for (method, draft), seconds in DRAFTED.items():
        for question in (1, 2):
            put(tmp_path, method=method, draft=draft, question=question,
                tokens=(16,), seconds=(seconds * question,),
                ttft=[0.5 * question],
                requests=[question - 1] if (method, draft) == ("continuous", "eagle") else [9])
    put_environment(tmp_path, START_OF_DRAFTS, drafts="eagle,model:DIR")
    path = tmp_path / "tally" / "0-ar" / "rank_0.jsonl"
    path.parent.mkdir(parents=True)
    flown = {**line(0, 0, 8.0), "first": 1.6,
             "decoding": {"grow": 1.6, "judge": 0.8, "wait": 3.2},
             "flight": {"rows": 8, "stay": 4.0, "aloft": 9.6, "misses": 4, "lost": 0.32}}
    save_json_lines(path, [flown])
    return tmp_path


def test_a_ratio_names_its_baseline_and_has_the_draft_of_the_first_or_of_the_row(drafted):
    text = report_text(drafted)
    rows = {(row["method"], row["draft"]): row for row in csv_rows(drafted / "summary.csv")}
    columns = ("sr_naive", "sr_naive_same", "sr_serial_same", "sr_ar")
    assert {key: [row[name] for name in columns] for key, row in rows.items()} == {
        ("ar", "none"): ["0.5", "", "", "1"],
        ("naive", "eagle"): ["1", "1", "", "2"],
        ("naive", "model:DIR"): ["2", "1", "2", "4"],
        ("serial", "model:DIR"): ["1", "0.5", "1", "2"],
        ("continuous", "eagle"): ["2", "2", "", "4"],
        ("continuous", "model:DIR"): ["4", "2", "4", "8"]}
    assert ("| method | ξ | ξ of decoding | SR to naive with eagle | SR to naive with the same draft | "
            "SR to serial with the same draft | SR to ar |\n") in text
    assert ("| continuous, model:DIR | 10.67; 8.00 to 16.00 | 20.00; 15.00 to 30.00 | 4.00; 4.00 to 4.00 | "
            "2.00; 2.00 to 2.00 | 4.00; 4.00 to 4.00 | 8.00; 8.00 to 8.00 |") in text
    assert "- **SR to serial with the same draft**: serial with the draft of the row" in text
    assert [row["request_p95"] for row in rows.values()][:2] == ["16", "8"]
    assert "missing: answers of 1 groups\n  - serial, eagle has 0 of 2 answers on qa at temperature 0" in text


def test_speeds_are_listed_and_drawn_by_how_many_guesses_of_a_chain_are_right(drafted):
    assert "acceptance" not in report_text(drafted) and not (drafted / "acceptance.csv").exists()
    for draft, misses in (("eagle", 6), ("model:DIR", 12)):  # of 15 tokens behind the first
        for question in (1, 2):
            put(drafted, method="windows", draft=draft, question=question,
                tokens=(16,), seconds=(8.0 * question,), misses=[misses], requests=[9])

    text = report_text(drafted)
    rows = csv_rows(drafted / "acceptance.csv")
    assert list(rows[0]) == ["profile", "draft", "set", "temperature", "acceptance",
                             "ar", "naive", "serial", "continuous", "windows"]
    shown = [[row[name] for name in ("draft", "set", "acceptance", "ar", "serial", "windows")] for row in rows]
    assert shown == [[draft, set_name, acceptance, "1.33333", serial, "1.33333"] for set_name in ("qa", "mean")
                     for draft, acceptance, serial in (("model:DIR", "0.2", "2.66667"), ("eagle", "0.6", ""))]
    assert "](acceptance-t0.png)" in text
    assert (drafted / "acceptance-t0.png").read_bytes().startswith(b"\x89PNG")


def test_another_draft_may_be_the_baseline_and_a_baseline_without_answers_has_no_column(drafted):
    put_environment(drafted, START_OF_DRAFTS, drafts="eagle,model:DIR", baseline_draft="model:DIR")
    (drafted / "answers" / "serial" / "qa-t0.jsonl").unlink()
    (drafted / "answers" / "ar" / "qa-t0.jsonl").unlink()
    text = report_text(drafted)
    assert "| method | ξ | ξ of decoding | SR to naive with model:DIR | SR to naive with the same draft |\n" in text
    assert "serial with the same draft" not in text and "SR to ar" not in text
    assert "| continuous, eagle | 5.33 (1.00) |" in text


def test_an_account_is_a_table_a_file_and_a_plot(drafted):
    text = report_text(drafted)
    assert "| continuous, eagle | 100.0 | 50.0 | 200.0 | 100.0 | 50.0 | 500.0 |" in text
    assert "| continuous, eagle | – | 1.50 | 500 | 4.00 | 20.0 |" in text
    row, mean_row = csv_rows(drafted / "account.csv")
    assert mean_row == {**row, "set": "mean"}
    assert (row["method"], row["draft"], row["drafting"], row["lost"], row["whole"]) == (
        "continuous", "eagle", "0.1", "0.02", "0.5")
    assert (drafted / "account-t0.png").read_bytes().startswith(b"\x89PNG")


def test_every_method_has_a_look_of_its_own():
    styles = styles_of([*METHODS, "naive, suffix"])
    assert len({(style.tone, style.hatch) for style in styles.values()}) == len(styles)
    assert len({style.marker for style in styles.values()}) == len(METHODS)
    alone, mixed = styles["naive"], styles["naive, suffix"]
    assert alone.marker == mixed.marker and alone.hatch != mixed.hatch
