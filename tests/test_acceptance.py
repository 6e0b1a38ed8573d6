"""Acceptance rates: four definitions by hand, matches of whole models, and the command."""
from __future__ import annotations

import importlib
import math
from dataclasses import replace

import pytest

from config.presets import TOY
from eval.dsi.acceptance import DEFINITIONS, AcceptanceConfig, rate
from eval.dsi.command import main
from eval.pairs import answer, check_pair, open_model, record, sampler_of
from model.sample import Sampler
from tests.checkpoints import refused
from tests.json_files import load_json
from tests.saved import save_drafter, save_model
from tests.tiny import TINY

NAN = math.nan
CONFIG = AcceptanceConfig(dtype="float64", max_new_tokens=24)
DRAWN = replace(CONFIG, do_sample=True, temperature=0.7, seed=3)
PROMPT = [1, 5, 9, 12, 7]


def matches(text):
    return [int(sign == "M") for sign in text]


@pytest.fixture(scope="module")
def target(saved):
    return open_model(str(saved / "base"), CONFIG)


@pytest.fixture(scope="module")
def drafter(saved, tmp_path_factory):
    """The target with weights that are a little off."""
    folder = tmp_path_factory.mktemp("pair") / "drafter"
    save_drafter(saved / "base", folder, 0.05)
    return open_model(str(folder), CONFIG)


@pytest.mark.parametrize("texts, likeliest, prefix, of_runs, original", [
    ([], NAN, NAN, NAN, NAN),
    ([""], NAN, NAN, NAN, NAN),
    (["MMMM"], 1, 4 / 5, NAN, 4 / 5),
    (["XXX"], 0, 0, 0, 0),
    (["X"], 0, 0, 0, NAN),
    (["MMMX"], 3 / 4, 3 / 4, 3 / 4, NAN),
    (["MXMMXM"], 4 / 6, 1 / 2, 3 / 5, 4 / 7),
    (["MMMX", "MX"], 4 / 6, 2 / 3, 2 / 3, NAN),
    (["MM", "", "XM"], 3 / 4, 1 / 2, 0, 1 / 2)])
def test_each_definition_is_what_a_person_computes(texts, likeliest, prefix, of_runs, original):
    records = [matches(text) for text in texts]
    found = [rate(records, definition).value for definition in DEFINITIONS]
    assert found == pytest.approx([likeliest, prefix, of_runs, original], nan_ok=True)


def test_the_bounds_are_those_of_a_bootstrap_over_texts_and_one_text_has_none():
    records = [matches("M" * right + "X" * (10 - right))
               for right in (9, 8, 3, 7, 9, 6)]
    first, second = rate(records), rate(records)
    assert first == second and first.low < first.value == 42 / 60 < first.high
    assert all(map(math.isnan, rate(records[:1])[1:]))


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(0.7, seed=3)])
def test_a_whole_model_writes_the_reference_text(target, sampler):
    assert answer(target, PROMPT, 24, sampler) == _until_end(TINY.text(PROMPT, 24, sampler))


def _until_end(text, end=2):
    return text[:text.index(end) + 1] if end in text else text


@pytest.mark.parametrize("config", [CONFIG, DRAWN])
def test_a_drafter_that_is_the_target_has_rate_1(target, config):
    text = answer(target, PROMPT, 24, sampler_of(config))
    assert record(target, PROMPT, text, sampler_of(config)) == [1] * len(text)


@pytest.mark.parametrize("config", [CONFIG, DRAWN])
def test_one_pass_over_a_text_finds_what_a_drafter_says_token_by_token(target, drafter, config):
    sampler = sampler_of(config)
    text = answer(target, PROMPT, 24, sampler)
    said = []
    for place in range(len(text)):
        read = [*PROMPT, *text[:place]]
        said += sampler(drafter.whole.logits(read, drafter.whole.cache(len(read)), 1),
                        [len(read)])
    found = record(drafter, PROMPT, text, sampler)
    assert found == [int(mine == theirs) for mine, theirs in zip(said, text)]
    assert 0 < sum(found) < len(found)


def test_a_drafter_with_other_tokens_is_refused_by_name(target, tmp_path):
    def other(name, file, old, new):
        folder = tmp_path / name
        save_model(folder)
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new))
        return open_model(str(folder), CONFIG)

    check_pair(target, target)
    with refused("has other tokens than the target in"):
        check_pair(target, other("swapped", "tokenizer.json", '"a": 3', '"a": 4'))
    with refused("has other special tokens than the target in"):
        check_pair(target, other("special", "tokenizer_config.json", '"eos_token": "</s>"', '"eos_token": "<unk>"'))
    with refused("has other numbers of tokens than the target in"):
        check_pair(target, open_model(str(TOY / "draft_b"), CONFIG))


def test_the_command_writes_matches_that_simulations_read(target, drafter, tmp_path, capsys):
    folders = [f"target={target.name}", f"draft={drafter.name}", "dtype=float64", "template=none", "max_new_tokens=8"]
    code = main(["acceptance", *folders, "sets=qa,sum", "num_examples=2", f"traces={tmp_path / 'traces.json'}"])
    printed = capsys.readouterr().out
    records = load_json(tmp_path / "traces.json")
    assert code == 0 and len(records) == 4
    assert {match for one in records for match in one} <= {0, 1}
    assert f"{rate(records).value:.3f}" in printed and "all" in printed


@pytest.mark.parametrize("command", ["acceptance", "latency", "table"])
def test_a_set_that_will_not_do_is_refused_before_a_model_is_loaded(command, tmp_path, monkeypatch, sentence_of):
    spoiled = tmp_path / "tasks.jsonl"
    spoiled.write_text('{"instruction": "Name a bird."}')
    monkeypatch.setattr(importlib.import_module(f"eval.dsi.{command}"), "open_model", None)
    sentence = sentence_of(main, [command, f"sets=qa,mbpp:{spoiled}", "num_examples=1"])
    assert f"line 1 of {spoiled} is none of mbpp" in sentence
