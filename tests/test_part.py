"""A rank's folder is looked over before it is used: what does not belong together is refused."""
from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from launch.split.write import check, split
from model.weights import Part
from split_and_save_models import main
from tests.checkpoints import refused, save_llama


@pytest.fixture
def out(tmp_path) -> Path:
    save_llama(tmp_path / "base")
    split(tmp_path / "base", tmp_path / "split", "0+1+2", progress=False)
    return tmp_path / "split"


def test_a_folder_that_was_never_split_says_which_command_to_type(tmp_path):
    with refused(f"split the model first: python split_and_save_models.py MODEL_DIR {tmp_path} --stages 0+2+2+2+2"):
        Part(tmp_path / "stage_1")


@pytest.mark.parametrize(("change", "sentence"), [
    ({"version": 99}, "not of this version of FlowSpec; split again"),
    ({"format": "x"}, "split again"), ({"layers": [0, 3]}, "is damaged"), ({"files": 3}, "is damaged"),
])
def test_a_manifest_that_does_not_match_is_refused(out, change, sentence):
    path = out / "stage_1" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with refused(sentence):
        Part(out / "stage_1")


def test_a_file_of_the_wrong_size_and_a_file_that_is_gone_are_refused(out):
    path = out / "stage_1" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with refused(f"{path} has"):
        Part(out / "stage_1")
    path.unlink()
    with refused(f"{path} has 0 bytes, but its manifest says"):
        Part(out / "stage_1")


def test_a_changed_byte_is_found_by_the_hashes(out, capsys):
    path = out / "stage_2" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    Part(out / "stage_2")
    assert main(["--check", str(out)]) == 2
    assert "has changed since it was written" in capsys.readouterr().err


def test_ranks_of_different_splits_are_refused_by_the_check(out, tmp_path):
    split(tmp_path / "base", tmp_path / "other", "0+2+1", progress=False)
    shutil.rmtree(out / "stage_1")
    (tmp_path / "other" / "stage_1").rename(out / "stage_1")
    with refused("belongs to another split"):
        check(out)
    with refused("holds no split"):
        check(tmp_path / "nowhere")
