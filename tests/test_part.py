"""A rank's folder is checked before it is used: inconsistent content is refused."""
import shutil

import pytest

from launch.split.write import check
from model.weights.parts import Part
from split_and_save_models import main
from tests.checkpoints import refused, save_head, save_llama, split_quietly, tensors_of
from tests.json_files import change_json, edited_json


@pytest.fixture
def out(tmp_path):
    save_llama(tmp_path / "base")
    split_quietly(tmp_path / "base", tmp_path / "split", "0+1+2")
    return tmp_path / "split"


def test_a_folder_that_was_never_split_says_which_command_to_type(tmp_path):
    with refused(f"split the model first: python split_and_save_models.py MODEL_DIR {tmp_path} --stages 4"):
        Part(tmp_path / "stage_1")


def test_what_is_no_split_is_named_as_what_it_is(out, tmp_path):
    with refused(f"{tmp_path / 'base'} is a whole model; name it with base_dir=, or split it first"):
        Part(tmp_path / "base" / "stage_0")
    with refused(f"{out / 'stage_1'} is the part of one rank; name {out}"):
        Part(out / "stage_1" / "stage_0")
    (tmp_path / "m.gguf").write_bytes(b"")
    with refused("m.gguf is a whole model; name it with base_dir="):
        Part(tmp_path / "m.gguf" / "stage_0")


@pytest.mark.parametrize("change, sentence", [
    ({"version": 99}, "not of this version of FlowSpec; split again"),
    ({"layers": [0, 3]}, "is damaged"), ({"rank": 2}, "is damaged"),
    ({"stages": [1, 2]}, "is damaged"),
    ({"stages": [0, 1, 3]}, "says 4 layers, config.json 3"),
    ({"rank": None}, "does not give rank"), ({"rank": True}, "rank=True"),
    ({"stages": "0+1+2"}, "stages='0+1+2', which should be a list"), ({"stages": [0, 1, 2.0]}, "stages=[0, 1, 2.0]"),
    ({"stages": [0] * 5000}, "a list of at most 1024"),
    ({"layers": [[0], 1]}, "layers=[[0], 1]"), ({"split_id": 7}, "split_id=7"),
    ({"split_id": "\x1b[2J"}, "split_id='\\x1b[2J'"),
    ({"quant": "zz"}, "quant='zz', which should be one of none, int8"),
    ({"quant": "auto"}, "quant='auto'"), ({"shares": 2}, "shares=2"),
    ({"shares": [float("nan")]}, "shares=[nan]"),
    ({"files": 3}, "files=3, which should be names of files in its folder"),
    *(({"files": {name: {"bytes": 1, "sha256": "0"}}}, "should be names of files in its folder") for name in (
        "../stage_2/model.safetensors", "/etc/passwd", "eagle/../../x", "", ".", "\0", "x" * 300, "a\nb")),
    *(({"files": {"config.json": entry}}, "should be names of files in its folder") for entry in (
        3, {}, {"bytes": "1", "sha256": "0"},
        {"bytes": -1, "sha256": "0"}, {"bytes": 1, "sha256": 0})),
])
def test_a_manifest_that_does_not_match_is_refused(out, change, sentence):
    change_json(out / "stage_1" / "manifest.json", **change)
    with refused(sentence) as found:
        Part(out / "stage_1")
    assert str(found.value).endswith("--stages 4")


def test_weights_that_the_manifest_does_not_speak_of_are_refused(out):
    """Each file has the size in its manifest, but other layers or types."""
    shutil.copytree(out / "stage_1", out / "stage_9")
    path = out / "stage_9" / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"model.layers.0.', b'"model.layers.2.'))
    with refused("stage_9 holds other layers than its manifest.json says; split again"):
        Part(out / "stage_9")
    path.write_bytes(data.replace(b'"BF16"', b'"I16" ', 1))
    with refused("has type I16 instead of BF16 or F16 or F32 or F64"):
        Part(out / "stage_9")


@pytest.mark.parametrize("change, sentence", [
    ({"num_hidden_layers": 10 ** 12}, "num_hidden_layers=1000000000000, which should be"),
    ({"num_hidden_layers": 60000}, "says 3 layers, config.json 60000"),
    ({"vocab_size": None}, "does not give vocab_size"),
])
def test_a_config_that_is_not_that_of_the_split_is_refused(out, change, sentence):
    config, manifest = out / "stage_1" / "config.json", out / "stage_1" / "manifest.json"
    change_json(config, **change)
    with edited_json(manifest) as content:
        content["files"]["config.json"]["bytes"] = config.stat().st_size
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


def flip_last_bit(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_changed_byte_is_found_by_the_hashes(out, error_of):
    path = out / "stage_2" / "model.safetensors"
    flip_last_bit(path)
    Part(out / "stage_2")
    assert "has changed since it was written" in error_of(main, ["--check", str(out)])


@pytest.mark.parametrize("with_head", [False, True], ids=["stage", "head"])
def test_a_damaged_weight_is_named_when_it_is_read_and_a_split_of_older_code_is_still_used(out, tmp_path, with_head):
    save_head(tmp_path / "eagle")
    split_quietly(tmp_path / "base", out, "0+1+2", tmp_path / "eagle")
    folder = out / ("stage_0" if with_head else "stage_2")
    path = folder / ("eagle/model.safetensors" if with_head else "model.safetensors")
    flip_last_bit(path)

    def read():
        part = Part(folder)
        tensors_of(part.open_head() if with_head else part.weights)

    with refused(f"{path} is damaged: ") as error:
        read()
    assert "has changed since it was written; copy this folder again" in str(error.value)
    with edited_json(folder / "manifest.json") as content:
        for entry in content["files"].values():
            entry.pop("checksums", None)
    read()


def test_ranks_of_different_splits_are_refused_by_the_check(out, tmp_path):
    split_quietly(tmp_path / "base", tmp_path / "other", "0+2+1")
    shutil.rmtree(out / "stage_1")
    (tmp_path / "other" / "stage_1").rename(out / "stage_1")
    with refused("belongs to another split"):
        check(out)
    with refused("holds no split"):
        check(tmp_path / "nowhere")


def test_a_folder_without_a_manifest_is_refused_by_the_check_and_one_that_is_elsewhere_is_not(out, capsys):
    (out / "stage_2" / "manifest.json").unlink()
    with refused(f"{out / 'stage_2'} has no manifest.json, so it is incomplete"):
        check(out)
    shutil.rmtree(out / "stage_2")
    assert [part.rank for part in check(out)] == [0, 1]
    assert main(["--check", str(out)]) == 0 and "2 of 3 ranks are here" in capsys.readouterr().out


def test_a_config_that_was_edited_in_one_ranks_folder_is_noticed(saved, tmp_path):
    split_quietly(saved / "base", tmp_path / "parts", "0+2+2")
    path = tmp_path / "parts" / "stage_1" / "config.json"
    text = path.read_text()
    path.write_text(text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-01'))
    assert path.read_text() != text and path.stat().st_size == len(text)
    with refused("config.json has changed since it was written (its hash differs)"):
        Part(tmp_path / "parts" / "stage_1")
