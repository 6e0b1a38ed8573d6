"""More ranks than a model can have are refused before anything is split, with what is possible for it."""

import pytest

import split_and_save_models
from config.presets import ROOT
from tests.saved import here, run_program, save_model

ASK = ("prompt_ids=5,17,40", "ignore_eos=true", "threads_per_rank=1")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    save_model(tmp_path_factory.getbasetemp() / "four-layers")
    return tmp_path_factory.getbasetemp() / "four-layers"


@pytest.mark.parametrize("words, said", [
    ("tp=99", "99 ranks are too many to share a layer of this model, which has 4 heads: choose at most 4, as tp=4"),
    ("pipeline_type=tp tp=5", "5 ranks are too many"), ("tp=1,1,1,1,1", "5 ranks are too many"),
    ("tp=1000000000000", "is not possible: give 0 for the number of the split, a number of ranks from 1 to 1024"),
    ("stages=99999999999999999", "the model has 4 layers, so choose 1 to 4"),
    ("stages=auto:99999999999999999", "choose at most auto:4"),
    ("stages=0+99999999999999999", "adds up to 99999999999999999 layers, but the model has 4"),
    ("stages=0" + 5000 * "+1", "adds up to 5000 layers, but the model has 4")])
def test_a_split_that_cannot_be_is_refused_before_it_is_written(base, tmp_path, monkeypatch, error_of, words, said):
    monkeypatch.setattr("launch.prepare.HOME", tmp_path)
    assert said in error_of(here, f"base_dir={base}", *ASK, *words.split()) and list(tmp_path.iterdir()) == []


def test_the_command_that_splits_refuses_it_too(base, tmp_path, error_of):
    for words, said in (("--tp 99", "99 ranks are too many"), (f"--tp {10**30}", "is not possible"),
                        ("--stages 0+2+2 --tp 5", "5 ranks are too many"),
                        (f"--stages {10**30}", "or the number of stages")):
        printed = error_of(split_and_save_models.main, [str(base), str(tmp_path / "out"), *words.split()])
        assert said in printed and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words, code, said", [
    ("", 0, "pipeline_type=tp"), ("tp_type=galaxy", 0, "pipeline_type=galaxy"),
    ("pipeline_type=galaxy tp=2", 0, "tp=2 pipeline_type=galaxy"),
    ("tp_type=mega", 2, "tp_type=mega is unknown: choose tp_type=tp or tp_type=galaxy"),
    ("tp_type=tp pipeline_type=galaxy", 2, "given twice: leave one of them out"),
    ("pipeline_type=continuous", 2, "pipeline_type=continuous has a pipeline: type bash run_pipe.sh")])
def test_the_command_of_tensor_parallelism_hands_on_what_it_does_not_know(tmp_path, words, code, said):
    """With an environment that prints the words instead of running them."""
    (tmp_path / "tp").mkdir()
    (tmp_path / "scripts").mkdir()
    (tmp_path / "tp" / "run_tp.sh").write_bytes((ROOT / "tp" / "run_tp.sh").read_bytes())
    (tmp_path / "scripts" / "env.sh").write_text("make_env() { :; }\nPY=echo\n")
    done = run_program("bash", tmp_path / "tp" / "run_tp.sh", *words.split())
    assert done.returncode == code and said in done.stdout + done.stderr
