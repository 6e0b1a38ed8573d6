"""Boost-tuning: what is learnt, what is left for the next drafter, and that an interruption changes nothing."""
from __future__ import annotations

import shutil
from contextlib import redirect_stdout

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from config.presets import TOY
from eval.pair_keys import MeasureKeys
from eval.pairs import answer
from eval.pairs import open_model as open_pair
from eval.tokens_per_pass import merged_passes, ranks
from launch.split.write import split
from model.sample import Sampler
from model.weights.unfold import Unfolded
from model.whole import Whole
from tests.checkpoints import edited_tensors, same
from tests.json_files import change_json, load_json, load_json_lines, save_json
from tests.saved import here, save_tokenizer, token_ids
from train.course import Course
from train.data import TokenRow, answer_row
from train.ssm.boost import loss_of, ranks_of, without_predicted
from train.ssm.command import main
from train.ssm.texts import prompts_of, texts_of
from train.writer import TextWriter, open_model

CPU = torch.device("cpu")
VOCAB, NEW = 53, 12
SIZES = {"vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
         "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
PROMPTS = [f"{a} and {b}?" for a in "abcdefg" for b in "xyz"]
of_one_family = pytest.mark.parametrize("pair", ["opt"], indirect=True)  # what is common to all


def save_random(folder, family, seed, noise=0.0):
    """A random model as `transformers` writes it, with the tokenizer of single characters; `noise` is added to it."""
    import transformers

    torch.manual_seed(1)
    if family == "opt":
        config = transformers.OPTConfig(ffn_dim=40, word_embed_proj_dim=24, init_std=0.4, **SIZES)
        model = transformers.OPTForCausalLM(config)
    else:
        config = transformers.LlamaConfig(intermediate_size=40, initializer_range=0.4, **SIZES)
        model = transformers.LlamaForCausalLM(config)
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.data += noise * torch.randn_like(parameter)
    model.to(torch.bfloat16).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module", params=["llama", "opt"])
def pair(request, tmp_path_factory):
    """The folders of a target and of two drafters that are a little off."""
    folder = tmp_path_factory.mktemp(request.param)
    names = {"target": (0, 0.0), "a": (2, 0.05), "b": (3, 0.05)}
    return [save_random(folder / name, request.param, *off) for name, off in names.items()]


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "prompts.json"
    save_json(path, PROMPTS)
    return path


@pytest.fixture(scope="module")
def trained(pair, questions, tmp_path_factory):
    """The results of a whole training, and what it printed."""
    out = tmp_path_factory.mktemp("trained")
    with open(out / "printed", "w") as printed, redirect_stdout(printed):
        assert main(words(pair, questions, out)) == 0
    return out


def record_of(out):
    return load_json(out / "training.json")


def words(pair, questions, out, *more):
    target, *drafters = map(str, pair)
    return [target, *drafters, "--out", str(out), "--data", str(questions), "--template", "none", "--new-tokens",
            str(NEW), "--stretch", "2", "--steps", "4", "--batch", "3", "--judged", "3", "--threads", "1",
            "--save-every", "1", "--rate", "0.01", *more]


def whole(folder):
    return Whole(Unfolded(folder), torch.float32, CPU)


def texts_to(folder, count=5):
    """Texts of that model to some prompts, of different lengths."""
    writer = TextWriter(whole(folder), [2], NEW, 0.0, 0)
    return list(writer.write([[1, *range(5, 9 + i)]
                              for i in range(count)], 0))


def open_float32(folder):
    """A model as measurements open it."""
    return open_pair(str(folder), MeasureKeys(dtype="float32", threads=1))


def row_of(text, left_N):
    """The row of a text of which only that is left to learn."""
    whole = answer_row(text.prompt, text.ids)
    return TokenRow(whole.ids,
                    torch.cat([torch.zeros(len(text.prompt), dtype=torch.bool), left_N]))


def test_texts_beside_each_other_are_those_that_the_target_writes_alone(pair):
    target, texts = open_float32(pair[0]), texts_to(pair[0])
    assert [text.ids for text in texts] == [answer(target, text.prompt, NEW, Sampler()) for text in texts]


@of_one_family
def test_drawn_texts_depend_on_their_place_and_not_on_where_an_interruption_was(pair, tmp_path):
    prompts = [[1, *range(5, 9 + i)] for i in range(5)]

    def written(path):
        return texts_of(TextWriter(whole(pair[0]), [2], NEW, 1.0, 7),
                        prompts, path, {"seed": 7})

    first = written(tmp_path / "texts.json")
    assert written(tmp_path / "texts.json") == first == written(tmp_path / "other.json")
    assert first != list(TextWriter(whole(pair[0]), [2], NEW, 0.0, 7).write(prompts, 0))
    of_seeds = [TextWriter(whole(pair[0]), [2], NEW, 1.0, seed).write([[1, 5, 6]] * 4, 0)
                for seed in (7, 8)]
    assert len({tuple(text.ids) for texts in of_seeds for text in texts}) == 8, "another seed, other texts"


def test_the_loss_is_the_mean_over_the_tokens_that_are_left(pair):
    texts, model = texts_to(pair[0]), open_model(pair[1], CPU)
    left = [torch.arange(len(text.ids)) % 3 > 0 for text in texts]
    rows = [row_of(text, left_N) for text, left_N in zip(texts, left)]
    each = []
    for text, left_N in zip(texts, left):
        ids = torch.tensor([[*text.prompt, *text.ids]])
        begin = len(text.prompt) - 1
        mine = model(input_ids=ids).logits[0, begin:-1][left_N]
        each.append(F.cross_entropy(mine, ids[0, begin + 1:][left_N], reduction="none"))
    torch.testing.assert_close(loss_of(model, rows), torch.cat(each).mean())


def test_a_stretch_is_taken_out_when_every_token_of_it_is_right():
    left = [torch.tensor([False] + [True] * 5),
            torch.tensor([False, False, True, True, False, False])]
    ranked = [np.array([0, 0, 0, 1, 0]),
              np.array([2, 0, 1, 0])]
    rows = [TokenRow(torch.arange(6), left_N) for left_N in left]
    assert [found.answers.int().tolist() for found in without_predicted(rows, ranked, 2)] == [
        [0, 0, 0, 1, 1, 0], [0, 0, 1, 1, 0, 0]]


def test_what_is_right_is_what_a_drafter_would_write_there(pair):
    texts = texts_to(pair[0])
    rows = [answer_row(text.prompt, text.ids) for text in texts]
    drafter = open_float32(pair[1])
    for text, rank_N in zip(texts, ranks_of(open_model(pair[1], CPU), rows), strict=True):
        read = [*text.prompt, *text.ids[:-1]]
        logits = drafter.whole.logits(read, drafter.whole.cache(len(read)), len(text.ids))
        assert rank_N.tolist() == ranks(logits, text.ids).tolist()
    for rank_N in ranks_of(open_model(pair[0], CPU), rows):
        assert not rank_N.any(), "the target foresees itself"


def test_the_drafters_are_models_that_draft_and_the_text_is_that_of_ar(pair, trained, tmp_path):
    record = record_of(trained)
    figures = record["tokens_per_pass"]
    assert list(figures) == [f"{pair[1]} as it was", "ssm1", "ssm2", "ssm1 and ssm2, merged"]
    for shape in ("1,1,1,1,1,1,1,1", "1,1,3,1,1,1,1,1"):
        assert figures["ssm1 and ssm2, merged"][shape] >= max(figures["ssm1"][shape], figures["ssm2"][shape])
    assert "ssm1: " in (trained / "printed").read_text()
    assert record["tokens_left"]["ssm2"] < record["tokens_left"]["ssm1"]
    for name, source in (("ssm1", pair[1]), ("ssm2", pair[2])):
        new, old = (load_file(made / "model.safetensors") for made in (trained / name, source))
        assert new.keys() == old.keys() and not same(new, old)
        assert {x.dtype for x in new.values()} == {torch.bfloat16}
        assert (trained / name / "config.json").read_text() == (source / "config.json").read_text()
    split(pair[0], tmp_path / "split", "0+1+1", progress=False)

    def written(*more):
        assert here(f"model_dir={tmp_path / 'split'}", "prompt=a and x?", "max_new_tokens=20", "template=none",
                    "ignore_eos=true", f"output={tmp_path / 'out.json'}", *more) == 0
        return token_ids(tmp_path / "out.json")

    ar = written("pipeline_type=ar")
    both = f"ssm={trained / 'ssm1'},{trained / 'ssm2'}"
    assert len(ar) == 20
    for more in (["draft=model", f"draft_dir={trained / 'ssm1'}"], ["pipeline_type=specinfer", both],
                 ["pipeline_type=specinfer", both, "expansion=2,1,2"]):
        assert written(*more) == ar


@of_one_family
def test_the_figures_are_those_of_the_target_s_texts_to_prompts_that_were_held_out(pair, questions, trained):
    target, *drafters = map(open_float32, (pair[0], trained / "ssm1", trained / "ssm2"))
    tokens = passes = 0
    for prompt in prompts_of(questions, 2000, 0)[:3]:
        read = target.text.prompt_ids([prompt], "none")
        ids = answer(target, read, NEW, Sampler())
        before = [*read, *ids[:-1]]
        rank_DN = [ranks(one.whole.logits(before,
                                          one.whole.cache(len(before)), len(ids)),
                         ids) for one in drafters]
        tokens += len(ids) - 1
        passes += merged_passes(rank_DN, [1, 1, 3, 1, 1, 1, 1, 1])
    figures = record_of(trained)["tokens_per_pass"]["ssm1 and ssm2, merged"]
    assert figures["1,1,3,1,1,1,1,1"] == round(tokens / passes, 3)


@of_one_family
def test_an_interruption_changes_nothing(pair, questions, trained, tmp_path, monkeypatch, capsys):
    broken = tmp_path / "broken"
    advance, steps = Course.advance, []

    def stop(course):
        steps.append(course.plan.name)
        if len(steps) == 6:  # in the second drafter's training
            raise KeyboardInterrupt
        advance(course)

    monkeypatch.setattr(Course, "advance", stop)
    assert main(words(pair, questions, broken)) == 130 and steps[-1] == "ssm2"
    assert "run the same command again" in capsys.readouterr().err
    monkeypatch.setattr(Course, "advance", advance)
    assert main(words(pair, questions, broken)) == 0
    for name in ("ssm1", "ssm2"):
        assert same(*(load_file(out / name / "model.safetensors") for out in (trained, broken)))
    assert record_of(trained) == record_of(broken)
    for option, value, message in (("--stretch", "3", "belongs to a training with stretch=2 instead of 3"),
                                   ("--seed", "1", "repeat the same command as then, or give another --out")):
        assert main(words(pair, questions, broken, option, value)) == 2
        assert message in capsys.readouterr().err


def test_the_bundled_prompts_are_none_of_the_bundled_questions():
    found = prompts_of(None, 60, 0)
    bundled = {entry["turns"][0] for path in (TOY.parent / "eval" / "data").glob("*.jsonl")
               for entry in load_json_lines(path)}
    assert 40 < len(found) == len(set(found)) <= 60 and not bundled & set(found)
    assert prompts_of(None, 60, 1) != found


@of_one_family
def test_a_drafter_that_has_nothing_to_learn_ends_the_row(pair, questions, tmp_path, output_of):
    target = str(pair[0])
    asked = [target, target, target, *words(pair, questions, tmp_path / "out", "--rate", "0")[3:]]
    assert "nothing is left for drafter 2" in output_of(main, asked)
    assert not (tmp_path / "out" / "ssm2").exists()


def test_a_drafter_may_begin_as_the_target_with_some_of_its_layers(pair, questions, tmp_path):
    target = str(pair[0])
    asked = [target, *words(pair, questions, tmp_path / "out", "--layers", "1", "--rate", "1e-12")[3:]]
    assert main(asked) == 0
    made, given = whole(tmp_path / "out" / "ssm1"), whole(target)
    assert (made.config.layers, given.config.layers) == (1, 2)
    kept = zip(made.body.layers["0"].parameters(), given.body.layers["1"].parameters())
    for parameter, before in kept:
        torch.testing.assert_close(parameter, before, atol=1e-6, rtol=1e-6)


@of_one_family
def test_what_cannot_be_trained_is_one_sentence(pair, questions, tmp_path, error_of):
    target, drafter, _ = map(str, pair)
    other = tmp_path / "other"
    shutil.copytree(drafter, other)
    with edited_tensors(other) as tensors:
        tensors.update({name: torch.cat([x, x[:3]]) for name, x in tensors.items() if len(x) == VOCAB})
    change_json(other / "config.json", vocab_size=VOCAB + 3)

    out = ["--out", str(tmp_path / "out")]
    for wrong, message in (
            ([target, str(other), *out], "other has other numbers of tokens than the target in"),
            ([target, str(tmp_path / "nowhere"), *out], "there is no folder"),
            ([target, drafter, "--out", drafter], "is the folder of an input model; choose another folder"),
            ([target, *out], "there is no initial drafter: name a folder, or add --layers"),
            ([target, *out, "--layers", "1,0"], "--layers 1,0 is invalid: give layers from 0 to"),
            ([target, *out, "--layers", "0,99"], "--layers 0,99 is invalid: give layers from 0 to"),
            ([target, drafter, *out, "--steps", "0"], "--steps 0 is out of range; give 1 to"),
            ([target, drafter, *out, "--prompts", "9", "--judged", "9"], "leaves nothing to learn"),
            (words(pair, questions, tmp_path / "out", "--judged", "21"), "and --judged 21"),
            ([target, drafter, *out, "--data", str(tmp_path / "none.json")], "none.json"),
            ([target, drafter, *out, "--device", "cuda:77"], "--device cuda:77")):
        last_line = error_of(main, wrong).strip().splitlines()[-1]
        assert last_line.startswith("train_ssm: ") and message in last_line
