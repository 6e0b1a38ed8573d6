"""The reference cases of the paper's offline simulator: all are met, and one that is not is named."""
from __future__ import annotations

from copy import deepcopy

import pytest

from config.presets import ROOT
from eval.dsi.cases import half_unit
from eval.dsi.command import main
from tests.json_files import load_json, save_json

FILE = ROOT / "tests" / "golden" / "dsi" / "cases.json"
GROUPS = load_json(FILE)["groups"]
ALL = [case for cases in GROUPS.values() for case in cases]


def exit_code(folder, *cases):
    """The exit code for a file of these cases."""
    path = folder / "cases.json"
    save_json(path, {"groups": {"mine": cases}})
    return main(["cases", str(path)])


def analytic(quantity, inputs, **expected):
    """A case of what a formula says."""
    return {"id": "x", "kind": "analytic", "quantity": quantity, "inputs": inputs, "expected": expected}


def visible(acceptance, lookahead, **expected):
    """A case of the share of verifications that a text waits for."""
    return analytic("fraction of target forwards that cost latency", {"a": acceptance, "lookahead": lookahead},
                    **expected)


def test_all_reference_cases_agree(output_of):
    lines = output_of(main, ["cases", str(FILE)]).splitlines()
    assert [line.split() for line in lines] == [
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
def test_every_single_value_of_a_case_is_compared(case, tmp_path,
                                                  capsys):
    outside = ("params", "inputs", "accept_draws", "pad_with", "rel_tol")
    expected = {key: value for key, value in case.items() if key not in outside}
    for path in numbers(expected):
        changed = deepcopy(case)
        place = changed
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = place[path[-1]] * 1.02 + (1 if isinstance(place[path[-1]], int) else 0.01)
        assert exit_code(tmp_path, case, changed) == 1
        shown = capsys.readouterr().out
        assert f"\n{case['id']}: {path[0]}" in shown and "1 of 2 agree" in shown.splitlines()[-1]


def test_an_analytic_value_may_be_rounded_and_a_counted_one_may_not(tmp_path):
    assert exit_code(tmp_path, visible(0.7, 3, visible_fraction=0.66, mp_breakeven=1.52)) == 0
    assert exit_code(tmp_path, visible(0.7, 3, visible_fraction=0.66, mp_breakeven=1.53)) == 1

    counted = deepcopy(GROUPS["offline_traces"][1])
    counted["dsi"]["cost"] = 2.91
    assert exit_code(tmp_path, counted) == 1
    counted["rel_tol"] = 0.01
    assert exit_code(tmp_path, counted) == 0
    assert half_unit(0.36) == pytest.approx(0.005) and half_unit(1e-6) == pytest.approx(5e-7)
    assert half_unit(40) == pytest.approx(0.5)


def test_servers_that_are_too_few_are_waited_for(tmp_path):
    """Two servers, a verification after every draft of 0.3, the newest first: of 0, 1, 3, 4, 6 and 7 drafts."""
    case = analytic("number of output tokens",
                    {"target_latency": 1, "drafter_latency": 0.3, "lookahead": 1, "SP": 2,
                     "times": {"a": 0.5, "b": 1, "c": 1.5, "d": 2.2, "e": 2.5, "f": 3}},
                    best={"dsi": [0, 1, 2, 4, 5, 7], "si": [0, 0, 2, 2, 2, 4]}, worst={"dsi": [0, 1, 1, 2, 2, 3]})
    assert exit_code(tmp_path, case) == 0


def test_a_moment_that_is_a_whole_number_of_forwards_but_for_rounding_has_them_all(tmp_path):
    assert 0.3 // 0.1 == 2
    case = analytic("number of output tokens",
                    {"target_latency": 0.1, "drafter_latency": 0.1, "lookahead": 2, "SP": 2,
                     "times": {"a": 0.3, "b": 0.09}},
                    best={"nonsi": [3, 0], "si": [3, 0], "dsi": [3, 0]},
                    worst={"nonsi": [3, 0], "si": [1, 0], "dsi": [3, 0]})
    assert exit_code(tmp_path, case) == 0


TRACE, ANALYTIC = GROUPS["offline_traces"][0], GROUPS["analytic"][0]
BOUND = {"kind": "analytic", "quantity": "Proposition 1", "expected": 1}
WRONG = {
    "quantity": ({**ANALYTIC, "quantity": "luck"}, "the case 'min_lookahead_0' is invalid"),
    "missing": ({**BOUND, "inputs": {"t1": 1, "t2": 1, "p": 1}}, "argument: 'N'"),
    "unknown": ({**BOUND, "inputs": {"t1": 1, "t2": 1, "p": 1, "N": 1, "K": 1}}, "argument 'K'"),
    "chance": ({**TRACE, "params": {"c": 1, "a": 0.5, "k": 1, "S": 1, "failure_cost": 1}},
               "its cost is random with a=0.5"),
    "name": ({**GROUPS["analytic"][20], "expected": {"dsi_best": 1}}, "expected.dsi_best"),
    "length": ({**ANALYTIC, "expected": [1]}, "expected.0"),
    "text": ({**ANALYTIC, "expected": "five"}, "must be real number, not str"),
    "NaN": ({**ANALYTIC, "expected": float("nan")}, "expected is nan"),
    "nothing": ({"id": 7}, "the case 7 is invalid (KeyError('quantity')): correct it"),
    "no value": ({**BOUND, "inputs": {"t1": 1, "t2": 1, "p": 1, "N": 1}, "expected": {}}, "it has no expected value"),
    "tolerance": ({**ANALYTIC, "rel_tol": "x"}, "could not convert"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_case_that_makes_no_sense_is_refused_in_one_sentence(name, tmp_path, sentence_of):
    case, message = WRONG[name]
    assert message in sentence_of(exit_code, tmp_path, TRACE, case)


def test_nan_is_no_expected_value(tmp_path):
    assert exit_code(tmp_path, {**ANALYTIC, "expected": float("nan")}) == 2


def test_the_help_names_the_file_of_the_reference_cases(output_of):
    assert "tests/golden/dsi/cases.json" in output_of(main, ["cases", "--help"])
