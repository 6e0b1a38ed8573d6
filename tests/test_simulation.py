"""The configuration of a simulation: what a person may write, and the sentence that answers a mistake."""
from __future__ import annotations

import dataclasses

import pytest

from config.keys import help_of, options, read_keys
from eval.dsi.formulas import least_lookahead, servers_needed
from eval.dsi.keys import Offline, Online, Simulation

COMMAND = "python3 -m scripts.simulate any"


def test_nothing_said_means_the_values_of_the_paper() -> None:
    asked = read_keys([], Simulation, COMMAND)
    assert asked == Simulation()
    assert vars(asked) == {"c": 0.1, "a": 0.9,
                           "k": 5, "failure_cost": 1.0, "S": 1000, "num_target_servers": 7,
                           "random_seed": 42, "num_repeats": 5}


def test_keys_are_read_over_the_defaults() -> None:
    asked = read_keys(["c=.2", "S=7", "simul_type=SI"], Online, COMMAND)
    assert (asked.c, asked.S, asked.simul_type, asked.k) == (0.2, 7, "SI", 5)


MISTAKES = {
    "c=5": "c=5 exceeds failure_cost=1, but the drafter must not be slower than the target: give c=1 or less",
    "c=0": "give a number from 0.000000001", "a=1.1": "give a number from 0 to 1", "a=nan": "a=nan is not a number",
    "k=0": "give a number from 1", "k=1.5": "k=1.5 is not a whole number", "S=0": "give a number from 1",
    "failure_cost=0.05": "target: give c=0.05 or less", "num_repeats=0": "give a number from 1",
    "k=1": "a verification every 0.1 that takes 1 needs 10: give num_target_servers=10 or more, 0 for as many as "
           "needed, or k=2 or more",
    "num_target_servers=-1": "give 0 for as many as needed or a number from 1",
    "num_target_servers=none": "num_target_servers=none is not a whole number",
    "random_seed=-1": "give a number from 0 to 4294967295",
    "servers=3": "unknown key servers", "num_repeat=3": "did you mean num_repeats?", "k": "write k=VALUE",
    "--k=3": "write k=3", "k=3 k=3": "k is given twice", "toy": '"toy" is not key=value',
    "simul_type=dsi": "choose one of DSI, SI", "c_sub=0.2": "target: give c_sub=0.1 or less",
    "maximum_correct_tokens=-1": "give a number from 0", "S=20001": "give a number from 1 to 20000",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_answered_by_one_sentence_that_names_the_fix(words: str) -> None:
    with pytest.raises(ValueError) as error:
        read_keys(words.split(), Online, COMMAND)
    assert MISTAKES[words] in str(error.value) and "\n" not in str(error.value)


def test_what_the_sentence_about_servers_names_is_enough_and_the_least() -> None:
    for c, failure_cost, k in ((0.1, 1.0, 1), (1 / 7, 1.0, 1),
                               (2.5, 37.7, 2), (0.01, 1.0, 3)):
        needed = servers_needed(failure_cost, c, k)
        Simulation(c=c, failure_cost=failure_cost, k=k, num_target_servers=needed)
        for servers in range(1, needed):
            least = least_lookahead(failure_cost, c, servers)
            with pytest.raises(ValueError, match=f"needs {needed}: .* or k={least} or more"):
                Simulation(c=c, failure_cost=failure_cost, k=k, num_target_servers=servers)
            Simulation(c=c, failure_cost=failure_cost, k=least, num_target_servers=servers)
            assert least == 1 or servers_needed(failure_cost, c, least - 1) > servers
    assert servers_needed(1.0, 1 / 7, 1) == 7
    assert servers_needed(4.2, 0.6, 1) == 7 == least_lookahead(4.2, 0.6, 1)


def test_every_number_among_the_keys_has_a_range_that_its_default_is_in() -> None:
    for kind in (Offline, Online):
        ranges = kind.RANGES
        found = {option.name: option for option in options(kind) if option.kind in ("int", "float")}
        assert set(found) == set(ranges)
        assert all(ranges[name].holds(option.default) for name, option in found.items())


def test_the_help_tells_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        read_keys(["k=3", "--help"], Online, COMMAND)
    shown = capsys.readouterr().out
    assert end.value.code == 0 and shown == help_of(Online, COMMAND) + "\n"
    assert shown.startswith(f"usage: {COMMAND} [key=value ...]\n")
    assert all(f"\n  {field.name}=" in shown for field in dataclasses.fields(Online))
    assert all(len(line) <= 120 for line in shown.splitlines())
