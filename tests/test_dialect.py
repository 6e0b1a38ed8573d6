"""Every command understands `key=value` and `--key value`."""
import pytest

import split_and_save_models
from config.cli import help_text, parse
from config.dialect import OptionParser, as_keys
from tests.checkpoints import refused


@pytest.mark.parametrize("words, expected", [
    (["--stages", "4"], ["stages=4"]),
    (["toy", "--max-new-tokens=8", "--live"], ["toy", "max_new_tokens=8", "live=true"]),
    (["--live", "--seed", "3"], ["live=true", "seed=3"]),
    (["--prompt", "What does a baker do?"], ["prompt=What does a baker do?"]),
    (["--live", "What does a baker do?"], ["live=true", "What does a baker do?"]),
    (["--live", "seed=3"], ["live=true", "seed=3"]),
    (["--temperature", "-1"], ["temperature=-1"]),
    (["prompt=--seed 3", "--help"], ["prompt=--seed 3", "--help"]),
    (["--eagle_dir", "a=b/c"], ["eagle_dir=true", "a=b/c"]),
    (["--", "---x"], ["--", "---x"]),
], ids=str)
def test_options_are_keys(words, expected):
    assert as_keys(words) == expected
    assert as_keys(expected) == expected


def test_a_run_understands_both_forms_and_refuses_a_wrong_value_in_its_own():
    assert parse(["toy", "--stages", "4", "--temperature=0.5"]) == parse(["toy", "stages=4", "temperature=0.5"])
    with pytest.raises(ValueError, match="^seed=x is not a whole number"):
        parse(["toy", "--seed", "x"])
    with refused("unknown key colour"):
        parse(["toy", "--colour", "red"])


def parser():
    made = OptionParser()
    made.add_argument("folder")
    made.add_argument("-o", dest="out")
    made.add_argument("--save-every", type=int)
    made.add_argument("--fast", action="store_true")
    return made


@pytest.mark.parametrize("words", [
    "DIR -o x --save-every 3 --fast",
    "DIR o=x save_every=3 fast=true",
    "folder=DIR output=x save-every=3 fast=true",
], ids=str)
def test_keys_are_options(words):
    assert vars(parser().parse_args(words.split())) == {"folder": "DIR", "out": "x", "save_every": 3, "fast": True}


def test_what_is_no_option_stays_a_word():
    parsed = parser().parse_args(["a=b", "fast=false"])
    assert (parsed.folder, parsed.fast) == ("a=b", False)


@pytest.mark.parametrize("words", [
    "DIR OUT --stages 4 --eagle HEAD",
    "base_dir=DIR out_dir=OUT stages=4 eagle_dir=HEAD",
], ids=str)
def test_a_split_understands_the_keys_of_a_run(words):
    args = split_and_save_models.parse(words.split())
    assert (args.model_dir, args.out_dir, args.stages, args.eagle) == ("DIR", "OUT", "4", "HEAD")


def test_the_help_lists_what_many_need_and_the_rest_when_asked(capsys):
    short, whole = help_text(shows_all=False), help_text()
    assert "stages=" in short and "temperature=" in short
    assert "prefill_chunk=" not in short and "prefill_chunk=" in whole
    assert short.splitlines()[-1].endswith(" more keys, of trees and segments: bash run_pipe.sh --help all")
    for words, text in ((["--help"], short), (["--help", "all"], whole)):
        with pytest.raises(SystemExit):
            parse(words)
        assert capsys.readouterr().out.strip() == text.strip()
