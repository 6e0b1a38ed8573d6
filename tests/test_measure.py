"""The measuring commands, and the maker of the bundled models: what cannot be is one sentence before anything long."""
from __future__ import annotations

import pytest
import torch

from model.weights.unfold import Unfolded
from model.whole import Whole
from scripts import bench, make_toy
from toy.recipe.llama import ATTENTION, OptShape, Shape, export, logits_of


@pytest.mark.parametrize("words", [
    ["--repeats", "0"], ["--repeats", "1.5"], ["--threads", "1", "0"], ["--threads", "9" * 5000], ["--threads"]],
    ids=lambda words: " ".join(words)[:20])
def test_a_number_that_makes_no_sense_is_refused(words, error_of):
    assert words[0] in error_of(bench.main, ["peers", "FILE", *words]).splitlines()[-1]


def test_a_measurement_that_is_none_shows_what_there_is(capsys):
    assert [bench.main(words) for words in ([], ["accidnets"], ["--help"])] == [0, 2, 0]
    said = capsys.readouterr()
    assert said.out.count("Usage: python3 -m scripts.bench") == 2
    assert said.err == "flowspec: unknown measurement accidnets: did you mean accidents?\n"


@pytest.mark.parametrize("name", bench.OLD_COMMANDS)
def test_a_measurement_that_is_gone_is_answered_by_what_to_type(name, sentence_of):
    assert name not in bench.COMMANDS
    assert sentence_of(bench.main, [name, "key=value"]) == (
        f"flowspec: there is no measurement {name} any more, and docs/ has its last figures: type "
        f"{bench.OLD_COMMANDS[name]} instead\n")


def test_a_measurement_without_its_folder_names_it(tmp_path, monkeypatch, sentence_of):
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    assert sentence_of(bench.main, ["load"]) == (
        "flowspec: the measurement load needs eval/load/, which is not here: restore that folder\n")


def test_a_step_that_lacks_what_earlier_ones_make_is_refused(tmp_path, sentence_of):
    (tmp_path / "file").write_text("")
    usual_folders = ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]

    for step, lacking in (("tokenizer", "dialogues.jsonl"), ("base", "rows.npy"), ("head", "rows.npy"),
                          ("deep", "dialogues.jsonl"), ("questions", "dialogues.jsonl")):
        sentence = sentence_of(make_toy.main, [step, *usual_folders])
        assert f"the step {step} needs {tmp_path / 'work' / lacking}" in sentence

    for key in ("--work", "--out"):
        sentence = sentence_of(make_toy.main, ["data", *usual_folders, key, str(tmp_path / "file")])
        assert f"cannot be written (File exists): choose another {key}" in sentence


@pytest.mark.parametrize("words, message", [
    (["family=opt"], "the models of --family opt do not belong in"),
    (["family=opt", "deep", "out=OUT"], "heads are made for llama only: leave out head and deep"),
    (["family=opt", "base", "out=OUT", "work=OUT"], "the step base needs"), (["nope"], "there is no step 'nope'")])
def test_what_another_family_cannot_have_is_refused(words, message, tmp_path, sentence_of):
    sentence = sentence_of(make_toy.main, [word.replace("OUT", str(tmp_path / "out")) for word in words])
    assert sentence.startswith(f"flowspec: {message}")


@pytest.mark.parametrize("shape",
                         [Shape(2, 32, 2, 48), OptShape(2, 32, 2, 48)],
                         ids=["llama", "opt"])
def test_what_the_recipe_trains_is_what_the_decoder_computes(shape, tmp_path):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(shape.config(), attn_implementation=ATTENTION)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    ids = [5, 9, 77, 4000, 9, 12, 1]
    trained = logits_of(model, torch.tensor([ids]))[0].float()
    export(model, tmp_path)
    whole = Whole(Unfolded(tmp_path), torch.float32, "cpu")
    torch.testing.assert_close(trained,
                               whole.logits(ids, whole.cache(len(ids)), len(ids)),
                               atol=0.1, rtol=0.05)
