"""Every key that is a number has a range; other values, and numbers not in plain digits, are refused."""
import pytest

from config.cli import all_options, parse
from config.keys import allowed_values
from config.presets import PRESETS
from config.run_config import RunConfig
from config.values import Range, integer, number
from eval.keys import EvalConfig
from tests.checkpoints import refused

EVERY_KEY = {**allowed_values(RunConfig), **allowed_values(EvalConfig)}
ALL = {name: allowed for name, allowed in EVERY_KEY.items() if isinstance(allowed, Range)}
NUMBERS = {option.name: option for option in all_options(EvalConfig) if option.type_name in ("int", "float")}
NONE = ("nan", "-nan", "inf", "-inf", "infinity", "1_0",
        "１", "+5", " 5", "5 ", "5\n", "", "0x10", "1e",
        "--1", "1,5", "٣")
FAR = (str(10**30), str(-10**30))


def refusal(option, text):
    with pytest.raises(ValueError) as error:
        if option.name in EvalConfig.UNSUPPORTED:
            parse(["profile=wifi", f"{option.name}={text}"])
        parse(["profile=wifi", "methods=ar", f"{option.name}={text}"], keys_class=EvalConfig)
    return str(error.value)


def test_every_number_among_the_keys_has_a_range_that_its_default_and_the_presets_are_in():
    assert set(NUMBERS) == set(ALL)
    for name, option in NUMBERS.items():
        assert ALL[name].holds(option.default)
    of_runs = {*ALL} - {"repeats", "concurrency"}
    assert all(ALL[name].holds(getattr(preset, name))
               for preset in PRESETS.values() for name in of_runs)


@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_no_number_in_plain_digits_is_refused(name):
    for text in NONE:
        said = refusal(NUMBERS[name], text)
        assert said.startswith(f"{name}={text} is not a") and f"write for example {name}=" in said


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_outside_its_range_is_refused_with_the_range(name):
    floats = ("1e400", "-1e400", "1e-320", "-1e-320") if NUMBERS[name].type_name == "float" else ()
    for text in (*FAR,
                 *(text for text in floats if not ALL[name].holds(float(text)))):
        assert f"is not possible: give {ALL[name].advice}" in refusal(NUMBERS[name], text)


def test_numbers_that_are_not_finite_are_refused_in_python_too():
    for name, option in NUMBERS.items():
        for value in (float("nan"), float("inf"), -float("inf")):
            if option.type_name == "float":
                with refused(f"{name}=", " is not possible"):
                    EvalConfig.of(profile="wifi", **{name: value})


def test_numbers_are_read_as_people_write_them():
    assert [integer(text) for text in ("0", "-1", "007", "18446744073709551615")] == [0, -1, 7, 2**64 - 1]
    assert [number(text) for text in ("1", ".5", "2.", "1e-3", "1E3", "-0.5")] == [1, 0.5, 2, 0.001, 1000, -0.5]
    assert str(number("-0")) == "0.0" and str(parse(["temperature=-0.0"]).temperature) == "0.0"
    assert Range(0.000001, 2**64 - 1, {-1: "all"}).advice == (
        "-1 for all or a number from 0.000001 to 18446744073709551615")


@pytest.mark.parametrize("words, said", [
    ("prompt_ids=１,2", "give token ids with commas"), ("prompt_ids=1_0", "give token ids with commas"),
    ("prompt_ids=" + "9" * 5000, "give token ids with commas"), ("tp=1,２", "or a speed for each rank"),
    ("tp=1," + "9" * 400, "give a number from 0.001 to 1000 for each rank"),
    ("tp=1,0." + "0" * 310 + "1", "give a number from 0.001 to 1000 for each rank"),
    ("stages=0+２", "give the layers of every rank"),
    ("stages=" + "9" * 5000, "give the layers of every rank"),
    ("device=cuda:１", "give auto, cpu, cuda"),
    ("wires=,-0.5 profile=wifi", "and milliseconds from 0 to 60000"),
])
def test_lists_of_numbers_are_read_by_the_same_rule(words, said):
    with refused(said):
        parse(words.split(" "))


@pytest.mark.parametrize("words, said", [
    ("temperatures=0,nan", "nan is not possible: give 0 for the likeliest token"),
    ("temperatures=1e-320", "1e-320 is not possible"), ("temperatures=0,-0", "names something twice"),
    ("temperatures=1,1.0", "names something twice"),
    ("seed=18446744073709551614 repeats=3", "give seed=18446744073709551613 or less")])
def test_an_evaluation_reads_its_numbers_by_the_same_rule(words, said):
    with refused(said):
        parse(words.split(), keys_class=EvalConfig)


def test_seeds_up_to_the_last_are_taken():
    assert parse(["seed=18446744073709551615"]).seed == RunConfig(seed=2**64 - 1).seed == 2**64 - 1
    assert parse(["seed=18446744073709551613", "repeats=3"], keys_class=EvalConfig).run.seed == 2**64 - 3
