"""The reference cases of the paper's offline simulator: all are met, and one that is not is named."""
from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

import pytest

from config.presets import ROOT
from eval.dsi.cases import half_unit
from eval.dsi.command import main

FILE = ROOT / "tests" / "golden" / "dsi" / "cases.json"
GROUPS = json.loads(FILE.read_text())["groups"]
ALL = [case for cases in GROUPS.values() for case in cases]


def write(folder: Path, groups: object) -> str:
    path = folder / "cases.json"
    path.write_text(json.dumps({"groups": groups}))
    return str(path)


def test_all_reference_cases_agree(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cases", str(FILE)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0].split() for line in lines] == [
        ["offline_deterministic", "36", "of", "36", "agree"], ["offline_traces", "24", "of", "24", "agree"],
        ["analytic", "40", "of", "40", "agree"], ["all", "100", "of", "100", "agree"]]


def numbers(value: object, path: tuple = ()):
    """Where the numbers of an expected value stand."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from numbers(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from numbers(inner, (*path, index))
    elif not isinstance(value, (str, bool)):
        yield path


@pytest.mark.parametrize("case", ALL[::6] + ALL[-5:], ids=lambda case: case["id"])
def test_every_single_value_of_a_case_is_compared(case: dict, tmp_path: Path,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    outside = ("params", "inputs", "accept_draws", "pad_with", "rel_tol")
    expected = {key: value for key, value in case.items() if key not in outside}
    for path in numbers(expected):
        changed = deepcopy(case)
        place = changed
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = place[path[-1]] * 1.02 + (1 if isinstance(place[path[-1]], int) else 0.01)
        assert main(["cases", write(tmp_path, {"mine": [case, changed]})]) == 1
        shown = capsys.readouterr().out
        assert f"\n{case['id']}: {path[0]}" in shown and "1 of 2 agree" in shown.splitlines()[-1]


def test_names_are_free_and_a_group_may_say_the_kind(tmp_path: Path) -> None:
    trace = {key: value for key, value in GROUPS["offline_traces"][2].items() if key != "kind"}
    assert main(["cases", write(tmp_path,
                                {"offline_trace": [trace], "offline_traces": [{**trace, "id": 7}]})]) == 0
    other = {"kind": "analytic", "quantity": "long-run cost per token", "expected": {"dsi_ideal": 0.2889},
             "inputs": {"c": 0.1, "a": 0.8, "k": 2, "failure_cost": 1}}
    assert main(["cases",
                 write(tmp_path, {"whatever": [other, {**trace, "kind": "offline_trace"}]})]) == 0


def test_an_analytic_value_may_be_rounded_and_a_counted_one_may_not(tmp_path: Path) -> None:
    case = {"id": "x", "kind": "analytic", "quantity": "fraction of target forwards that cost latency",
            "inputs": {"a": 0.7, "lookahead": 3}, "expected": {"visible_fraction": 0.66, "mp_breakeven": 1.52}}
    assert main(["cases", write(tmp_path, {"mine": [case]})]) == 0
    case["expected"] = {"visible_fraction": 0.66, "mp_breakeven": 1.53}
    assert main(["cases", write(tmp_path, {"mine": [case]})]) == 1
    counted = deepcopy(GROUPS["offline_traces"][1])
    counted["dsi"]["cost"] = 2.91
    assert main(["cases", write(tmp_path, {"mine": [counted]})]) == 1
    counted["rel_tol"] = 0.01
    assert main(["cases", write(tmp_path, {"mine": [counted]})]) == 0
    assert half_unit(0.36) == pytest.approx(0.005) and half_unit(1e-6) == pytest.approx(5e-7)
    assert half_unit(40) == pytest.approx(0.5)


def test_what_a_file_rounds_is_no_deviation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = {"id": "x", "kind": "analytic", "quantity": "fraction of target forwards that cost latency",
            "inputs": {"a": 0.5, "lookahead": 2}, "expected": {"visible_fraction": 0.75, "mp_breakeven": 1.33}}
    assert main(["cases", write(tmp_path, {"mine": [case]})]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "all                         1 of 1 agree, worst deviation 0.0e+00, not counting 1 rounded in the file")
    case["expected"] = {"visible_fraction": 0.6, "mp_breakeven": 1.33}
    assert main(["cases", write(tmp_path, {"mine": [case]})]) == 1
    assert "0 of 1 agree, worst deviation 2.5e-01, not counting 1 rounded" in capsys.readouterr().out


def test_servers_that_are_too_few_are_waited_for(tmp_path: Path) -> None:
    """Two servers, a verification after every draft of 0.3, the newest first: of 0, 1, 3, 4, 6 and 7 drafts."""
    case = {"kind": "analytic", "quantity": "number of output tokens",
            "inputs": {"target_latency": 1, "drafter_latency": 0.3, "lookahead": 1, "SP": 2,
                       "times": {"a": 0.5, "b": 1, "c": 1.5, "d": 2.2, "e": 2.5, "f": 3}},
            "expected": {"best": {"dsi": [0, 1, 2, 4, 5, 7],
                                  "si": [0, 0, 2, 2, 2, 4]},
                         "worst": {"dsi": [0, 1, 1, 2, 2, 3]}}}
    assert main(["cases", write(tmp_path, {"mine": [case]})]) == 0


def test_a_moment_that_is_a_whole_number_of_forwards_but_for_rounding_has_them_all(tmp_path: Path) -> None:
    assert 0.3 // 0.1 == 2
    case = {"kind": "analytic", "quantity": "number of output tokens",
            "inputs": {"target_latency": 0.1, "drafter_latency": 0.1, "lookahead": 2, "times": {"a": 0.3, "b": 0.09}},
            "expected": {"best": {"nonsi": [3, 0],
                                  "si": [3, 0], "dsi": [3, 0]},
                         "worst": {"nonsi": [3, 0], "si": [1, 0], "dsi": [3, 0]}}}
    assert main(["cases", write(tmp_path, {"mine": [case]})]) == 0
    case["inputs"]["times"]["a"] = 1e9
    assert main(["cases", write(tmp_path, {"mine": [case]})]) == 2


WRONG = {
    "kind": ({"a": [{"id": 1, "kind": "online"}]}, "has kind 'online', which is unknown: give one of offline_determin"),
    "group": ({"a": [{"id": 1}]}, "the case 1 has kind 'a', which is unknown"),
    "quantity": ({"a": [{"kind": "analytic", "quantity": "luck"}]}, "has quantity 'luck', which is unknown"),
    "missing": ({"analytic": [{"quantity": "Proposition 1",
                               "inputs": {"t1": 1, "t2": 1, "p": 1}}]},
                "in its inputs, does not give N; correct the case"),
    "draws": ({"offline_trace": [{"params": {"c": 1,
                                             "k": 1, "S": 1, "failure_cost": 1}}]},
              "not give accept_draws"),
    "range": ({"analytic": [{"quantity": "Proposition 1",
                             "inputs": {"t1": 1, "t2": 1, "p": 2, "N": 1}}]},
              "says p=2, which should be a number from 0 to 1"),
    "chance": ({"a": [{**GROUPS["offline_deterministic"][0], "params": {
        "c": 1, "a": 0.5, "k": 1, "S": 1, "failure_cost": 1}}]}, "with which its cost is random: give 0 or 1"),
    "nothing": ({"a": [{key: GROUPS["offline_traces"][0][key]
                        for key in ("kind", "params", "accept_draws")}]},
                "has no expected value: add one"),
    "unknown": ({"a": [{**GROUPS["analytic"][20], "expected": {"dsi_best": 1}}]},
                "expects 'dsi_best', which is unkn"),
    "length": ({"a": [{**GROUPS["analytic"][-1], "expected": [1]}]},
               "expected=[1]: give it the form"),
    "late": ({"offline_trace": [GROUPS["offline_traces"][0]],
              "b": [{"kind": "no"}]}, "which is unknown"),
    "nan": ({"a": [{**GROUPS["analytic"][0], "expected": float("nan")}]},
            "give it the form of the result"),
    "tolerance": ({"a": [{**GROUPS["analytic"][0], "rel_tol": -1}]}, "has rel_tol=-1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_makes_no_sense_is_refused_in_one_sentence(name: str, tmp_path: Path,
                                                            capsys: pytest.CaptureFixture[str]) -> None:
    groups, said = WRONG[name]
    assert main(["cases", write(tmp_path, groups)]) == 2
    shown = capsys.readouterr()
    assert said in shown.err and shown.err.count("\n") == 1 and shown.out == ""


def test_the_help_names_the_file_of_the_reference_cases(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["cases", "--help"])
    assert "tests/golden/dsi/cases.json" in capsys.readouterr().out
