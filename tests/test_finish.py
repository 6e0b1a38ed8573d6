"""An answer says why it ended; a run whose numbers are not finite ends with a sentence, on all ranks."""
import shutil

import pytest
import torch

from launch.run import run
from model.sample import Sampler
from pipeline.answers import Request
from pipeline.strategies import STRATEGIES
from scripts import generate
from tests.checkpoints import edited_tensors, split_quietly
from tests.forked import command
from tests.json_files import change_json
from tests.saved import answer_of, here
from tests.tiny import TINY, pipeline, tokens_of

PROMPT = [6, 21, 44, 3]
ASK = ("prompt_ids=5,17,40", "ignore_eos=true", "threads_per_rank=1")


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory, saved):
    """The tiny model with a final norm that float16 has no numbers for, and float32 hardly."""
    folder = tmp_path_factory.mktemp("overflowing")
    for name, factor in (("halves", 1e6), ("singles", 1e39)):
        shutil.copytree(saved / "base", folder / name)
        with edited_tensors(folder / name) as tensors:
            tensors["model.norm.weight"] *= factor
        split_quietly(folder / name, folder / f"{name}-split", "0+2+2", saved / "head")
    return folder


# --- an answer says why it ended --------------------------------------------------------------------------------------

ENDS = [
    (4, {"max_new_tokens": 9}, "length"), (195, {"max_new_tokens": 5}, "length"),
    (195, {"max_new_tokens": 6}, "context"),
    (195, {"max_new_tokens": 6, "end": frozenset(range(53))}, "stop"),
    (4, {"max_new_tokens": 9, "stop": lambda token: True}, "stop"),
    (4, {"max_new_tokens": 1}, "length")]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_answer_says_why_it_ended(strategy):
    with pipeline(TINY, 2, strategy, TINY.eagle()) as decoder:
        assert decoder.max_length == 200
        for prompt, wishes, reason in ENDS:
            answer, stream = decoder.stream(Request((PROMPT * 49)[:prompt], **wishes))
            assert answer.finish_reason == ""
            tokens_of(stream)
            assert answer.finish_reason == reason, (prompt, wishes)


@pytest.mark.parametrize("words, reason, message", [
    ("max_length=20 max_new_tokens=17", "length", ""),
    ("max_length=20 max_new_tokens=500", "context",
     "\nflowspec: the answer ends after 17 of max_new_tokens=500, since the context of 20 tokens is full: raise "
     "max_length or shorten the prompt\n")])
def test_a_full_context_is_reported_on_stderr_and_in_the_output(saved, tmp_path, capsys, words, reason, message):
    answer = answer_of(tmp_path, f"model_dir={saved / '0+2+2'}", "dtype=float64", *ASK, *words.split())
    assert answer["finish_reason"] == reason
    assert capsys.readouterr().err == message


def test_more_tokens_than_the_model_has_positions_are_reported(tmp_path, capsys, saved):
    short = shutil.copytree(saved / "base", tmp_path / "base")
    change_json(short / "config.json", max_position_embeddings=32)
    split_quietly(short, tmp_path / "split", "0+4", saved / "head")
    assert here(f"model_dir={tmp_path / 'split'}", *ASK, "max_length=33") == 0
    first, _, second = capsys.readouterr().err.partition("\n")
    assert first == "flowspec: max_length=33 is more than the 32 positions of the model, which prompt and answer share"
    assert "since the context of 32 tokens is full: the model has no more positions, so shorten the prompt" in second
    assert here(f"model_dir={tmp_path / 'split'}", *ASK, "max_new_tokens=3") == 0
    assert capsys.readouterr().err == "", "nobody asked for more"


# --- numbers that are not finite --------------------------------------------------------------------------------------

@pytest.mark.parametrize("words", ["temperature=0", "temperature=1 pipeline_type=pruned", "pipeline_type=ar"])
@pytest.mark.parametrize("model, dtype, cause", [
    ("halves", "float16", "float16 ends at 65504, which some models exceed: add dtype=bfloat16"),
    ("singles", "float32", "its weights or its config.json are damaged: compare the split with its hashes")])
def test_logits_that_are_not_finite_end_the_run_with_a_sentence(overflowing, error_of, model, dtype, cause, words):
    if dtype == "float16" and not hasattr(torch.nn.functional, "scaled_dot_product_attention"):
        pytest.skip("this torch has no half precision on the CPU")
    asked = ["link=threads", f"dtype={dtype}", f"model_dir={overflowing / f'{model}-split'}", *ASK, *words.split()]
    printed = error_of(run, generate.GENERATE, asked)
    assert f"flowspec: the model's logits are not finite (NaN or infinity); {cause}" in printed


def test_all_ranks_end_when_logits_are_not_finite(overflowing, tmp_path):
    model = f"model_dir={overflowing / 'singles-split'}"
    with command(tmp_path, "scripts.generate", model, "dtype=float32", *ASK) as ran:
        assert ran.end(120) == 2
        assert ran.stderr.count("not finite") == 1 and "Traceback" not in ran.stderr


def test_a_type_that_has_the_numbers_gives_the_answer(overflowing, tmp_path):
    for model in ("halves", "singles"):
        answer = answer_of(tmp_path, f"model_dir={overflowing / f'{model}-split'}", *ASK, "max_new_tokens=8",
                           "dtype=float64")
        assert answer["token_ids"] == TINY.text([5, 17, 40], 8, Sampler())
