"""What boards compare before they start: every key of the configuration, but those that are said to be local."""
from __future__ import annotations

import json
from dataclasses import replace

import pytest

from cluster.agreement import clean, code_version, judge_facts, settings
from cluster.board import Board
from config.cli import all_options, flat
from config.keys import LOCAL, allowed_values
from config.run_config import RunConfig
from config.values import Choices
from eval.keys import EvalConfig

BOARD_VARIABLE = Board(0, "10.0.0.1", 1, "", 1, ())
TYPED = {"stages": "0+2+2", "methods": "ar", "sets": "qa", "temperatures": "0",
         "device": "cpu", "prompt_ids": "1,2", "tp": "2,1", "questions": "9", "pipeline_type": "tp"}


FACTS = {"host": "b", "address": "10.0.0.1", "code": code_version(), "worker": False,
         "world": 2, "split": "s"}  # of a board


def judged(own, other):
    """What rank 0 says of a board with another configuration, once that went over the wire."""
    facts = {**FACTS, "interface": "e", "port": 1}
    found = {rank: json.loads(clean(f"facts/{rank}",
                                    json.dumps({**facts, "settings": settings(of)}).encode()))
            for rank, of in enumerate((own, other))}
    return judge_facts(found, BOARD_VARIABLE)


def another(config, option):
    """A value that a key may have beside this one; of the keys that must fit it, one that fits is given too."""
    value = getattr(config, option.name)
    if option.name in TYPED:
        return TYPED[option.name]
    allowed = allowed_values(RunConfig).get(option.name)
    if isinstance(allowed, Choices):
        return next(name for name in allowed.names if name != value)
    return not value if isinstance(value, bool) else f"{value}x" if isinstance(value, str) else type(value)(value + 1)


def changed(config, option):
    """The configuration with another value of one key, past the checks that one key must fit another."""
    found = replace(config, run=replace(config.run)) if config is not config.run else replace(config)
    keys = found if hasattr(found, option.name) else found.run
    object.__setattr__(keys, option.name, another(keys, option))
    return found


@pytest.mark.parametrize("config", [RunConfig(), EvalConfig.of()], ids=["run", "evaluation"])
def test_every_key_must_agree_unless_it_is_said_to_be_local(config):
    assert judged(config, replace(config)) == ""
    for option in all_options(None if config is config.run else type(config)):
        other = changed(config, option)
        assert flat(other)[option.name] != flat(config)[option.name], option.name
        sentence = judged(config, other)
        assert bool(sentence) == (option.facts.scope != LOCAL), option.name
        if sentence:
            assert f"rank 1 (b, 10.0.0.1) was started with {option.name}=" in sentence
            assert "type the same keys on all boards" in sentence and sentence.isprintable()


def test_suffix_that_stands_in_on_rank_0_for_a_head_that_is_not_there_agrees():
    assert judged(RunConfig(draft="suffix", template="own"), RunConfig()) == ""


@pytest.mark.parametrize("own, other, message", [
    ({}, {"trace": "mine"}, "trace=FOLDER, but rank 0 with none"), ({"trace": "a"}, {"trace": "b"}, ""),
    ({"pipeline_type": "tp"}, {"pipeline_type": "galaxy"}, "pipeline_type=galaxy, but rank 0 with tp"),
    ({"ablate": "prune"}, {"ablate": "thrift"}, "ablate=thrift, but rank 0 with prune"),
    ({}, {"ignore_eos": True}, "ignore_eos=true, but rank 0 with false"),
])
def test_what_hung_or_ended_in_a_traceback_is_reported_before_the_start(own, other, message):
    sentence = judged(RunConfig(**own), RunConfig(**other))
    assert message in sentence and bool(message) == bool(sentence)


def test_another_command_is_reported():
    assert "was started with concurrency=" in judged(RunConfig(), EvalConfig.of())
    assert "concurrency=none, but rank 0 with 1" in judged(EvalConfig.of(), RunConfig())


def test_boards_that_took_another_type_of_numbers_are_reported_though_they_typed_the_same():
    found = {rank: {**FACTS, "settings": settings(RunConfig(), dtype=dtype)}
            for rank, dtype in enumerate(("float16", "float32"))}
    assert "dtype=float32, but rank 0 with float16: type the same keys on all boards, and dtype= too" in judge_facts(
        found, BOARD_VARIABLE)
