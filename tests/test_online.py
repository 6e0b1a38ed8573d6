"""The command that simulates SI and DSI by events: what it prints, writes and refuses."""
from __future__ import annotations

import dataclasses
import json

import pytest

from config.keys import help_of, options, read_keys
from eval.dsi import command as simulate
from eval.dsi.commands.online import drawn_texts, plan_of, run
from eval.dsi.online_keys import COMMAND, Online
from eval.dsi.simulation import ONLINE_RANGES, RANGES, OnlineSimulation

FAST = ["simul_type=both", "S=12", "num_repeats=2", "c=0.004", "c_sub=0.002", "failure_cost=0.02",
        "failure_cost_sub=0.01", "k=2"]


def rows(shown: str) -> dict:
    """The cells of each method's line."""
    return {line.split()[0]: line[8:].replace(" +- ", "+-").split() for line in shown.splitlines()
            if line.startswith(("non-SI", "SI ", "DSI "))}


def test_the_real_clock_stands_beside_the_virtual_one_and_never_before_it(tmp_path, capsys):
    output = tmp_path / "online.json"
    assert simulate.main(["online", *FAST, f"output={output}"]) == 0
    lines = rows(capsys.readouterr().out)
    assert list(lines) == ["non-SI", "SI", "DSI"] and lines["non-SI"].count("-") == 5
    assert float(lines["SI"][2]) >= 1 and float(lines["DSI"][2]) >= 1
    written = json.loads(output.read_text())
    assert written["simulated"] is True and written["keys"] == dataclasses.asdict(
        read_keys([*FAST, f"output={output}"], Online, COMMAND))
    assert [one["method"] for one in written["repeats"]] == ["non-SI", "SI", "DSI"] * 2
    for one in written["repeats"]:
        assert one["tokens"] == sum(count for _, count in one["settled"]) == 12
        assert one["settled"][-1][0] == one["predicted_seconds"]
        if one["method"] != "non-SI":
            assert one["measured_seconds"] >= one["predicted_seconds"] and min(one["late_seconds"]) >= 0


@pytest.mark.parametrize("words", [[], ["accounting=original"], ["preemption=layer", "hop=0.001"], ["queue=merged"],
                                   ["failure_cost_rows=0.01,0.012", "preemption=none", "num_target_servers=3"]])
def test_without_the_real_clock_all_is_predicted_the_same_twice(words: list, capsys):
    shown = []
    for _ in range(2):
        assert simulate.main(["online", *FAST, "wall=false", *words]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] and "measured s" not in shown[0] and "-" not in rows(shown[0])["DSI"]


def test_what_is_not_said_is_what_the_published_simulator_has_and_it_ends_however_few_drafts_are_right():
    usual = Online()
    assert all(getattr(usual, key.name) == key.default for key in dataclasses.fields(OnlineSimulation))
    for a in (0.01, 0.5, 1.0):
        config = Online(a=a, accounting="original", S=30, num_repeats=2)
        text = next(drawn_texts(config))
        assert sum(text.runs[:-1]) <= 30 < sum(text.runs)
        assert run(config, "SI", text, 0).ticks > run(config, "DSI", text, 0).ticks > 0


def test_times_are_those_of_the_keys_to_the_nanosecond():
    config = Online(c=0.4, c_sub=0.03, failure_cost=2.0, failure_cost_sub=0.2, S=9, k=2, a=0.0, hop=0.001)
    text = next(drawn_texts(config))
    assert run(config, "non-SI", text, 0).ticks == 2_002_000_000 + 8 * 202_000_000
    assert run(config, "DSI", text, 0).ticks == 2_002_000_000 + 8 * 202_000_000
    assert run(config, "SI", text, 0).ticks == 2_002_000_000 + 8 * 202_000_000 + 400_000_000 + 14 * 30_000_000
    assert plan_of(config, 3).seed == config.random_seed + 3


def test_every_draft_may_be_right_or_wrong():
    for a, most in ((0.0, 20), (1.0, 1000), (0.5, 0)):
        config = Online(a=a, maximum_correct_tokens=most, S=20)
        assert next(drawn_texts(config)).right == [a == 1.0] * 20
    capped = next(drawn_texts(Online(a=1.0, maximum_correct_tokens=3, S=9)))
    assert capped.right == [True, True, True, False] * 2 + [True]


def test_recorded_matches_take_the_place_of_chance(tmp_path):
    traces = tmp_path / "matches.json"
    traces.write_text("[[1, 1, 0], [], [0, 1]]")
    config = Online(traces=str(traces), S=7)
    texts = drawn_texts(config)
    assert [next(texts).right for _ in range(3)] == [
        [True, True, False] * 2 + [True], [False, True] * 3 + [False], [True, True, False] * 2 + [True]]
    texts = drawn_texts(Online(traces=str(traces), S=4, accounting="original"))
    assert [next(texts).runs for _ in range(2)] == [[2, 2, 2], [0, 1, 1, 1, 1, 1]]


MISTAKES = {
    "simul_type=dsi": "simul_type=dsi is unknown: choose one of DSI, SI, both",
    "accounting=exact": "choose one of corrected, original", "preemption=some": "choose one of instant, layer, none",
    "queue=fifo": "choose one of newest, merged", "layers=0": "give a number from 1", "hop=-1": "give 0 for no time",
    "failure_cost_rows=a": "give a number from 0.000000001 to 1000000000 for each count of rows, as 0.1,0.1,0.12",
    "failure_cost_rows=0.1,0": "for each count of rows", "wall=perhaps": "wall=perhaps is not true or false",
    "c_sub=0.2": "so give c_sub=0.1 or less", "num_target_servers=2000": "give num_target_servers=1024 or less",
    "num_target_servers=0 k=1 c_sub=0.0001": "give num_target_servers=1024 or less, or a larger k",
    "accounting=original a=0": "accounting=original never ends without accepted drafts",
    "accounting=original a=1e-9": "it takes about 5e+12 runs for 5 texts of 1000 tokens, of which 100000 are the most",
    "accounting=original maximum_correct_tokens=1 a=0.01": "with a=0.01 it takes about 5e+05 runs",
    "S=1000000": "give num_repeats=2 or less",
    "traces=nowhere.json": "nowhere.json", "total_token=3": "did you mean total_tokens?",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_answered_by_one_sentence_that_names_the_fix(words: str, capsys):
    assert simulate.main(["online", *words.split()]) != 0
    shown = capsys.readouterr()
    assert MISTAKES[words] in shown.err and shown.err.count("\n") == 1 and shown.out == ""


@pytest.mark.parametrize(("content", "accounting", "told"), [
    ("[1, 0]", "corrected", "holds no matches"), ("[[2]]", "corrected", "holds no matches"),
    ("[[]]", "corrected", "holds no matches"), ("[[1, 1]]", "original", "all right, or all wrong"),
    (f"[[1, 0], [{'0, ' * 99}1]]", "original", "it takes about 5e+05 runs")])
def test_a_file_of_matches_that_will_not_do_is_told(tmp_path, capsys, content: str, accounting: str, told: str):
    traces = tmp_path / "matches.json"
    traces.write_text(content)
    assert simulate.main(["online", f"traces={traces}", f"accounting={accounting}"]) != 0
    assert told in capsys.readouterr().err


def test_every_number_has_a_range_and_every_key_a_line_of_help():
    numbers = {option.name for option in options(Online) if option.kind in ("int", "float")}
    assert numbers == {*RANGES, *ONLINE_RANGES, "layers", "hop"}
    shown = help_of(Online, COMMAND)
    assert all(f"\n  {field.name}=" in shown for field in dataclasses.fields(Online))
    assert all(len(line) <= 120 for line in shown.splitlines())
