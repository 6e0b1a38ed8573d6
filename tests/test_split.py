"""A split holds every tensor of the model bit for bit, can be resumed, and is never accepted half-written."""
from __future__ import annotations

import errno
import inspect
import os
import re
import resource
import shutil
import stat
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Iterator

import pytest
import torch
from safetensors.torch import load_file, save_file

from config.presets import TOY
from launch.split.write import check
from model.llama import LlamaConfig, Slice
from model.weights.checkpoint import Checkpoint, Writer, sample
from model.weights.parts import Part
from split_and_save_models import main, next_command, parse
from tests.checkpoints import (
    edited_tensors,
    refused,
    same,
    save_head,
    save_llama,
    save_tensors,
    split_quietly,
    tensors_of,
)
from tests.forked import CONTEXT
from tests.json_files import save_json
from tests.saved import ranks_of
from tests.test_part import flip_last_bit

LAYOUTS = {"safetensors": {}, "shards": {"max_shard_size": "4KB"}, ".bin": {"bins": True}}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The tiny model and a draft head in folders that no test changes."""
    folder = tmp_path_factory.mktemp("models")
    save_llama(folder / "base")
    (folder / "base" / "tokenizer.model").write_bytes(b"any bytes")
    save_head(folder / "eagle")
    return folder


@pytest.fixture
def out(models, tmp_path) -> Path:
    split_quietly(models / "base", tmp_path / "split", "0+1+2", models / "eagle")
    return tmp_path / "split"


def test_an_example_of_everything_a_rank_finds_in_its_folder(models, out):
    parts = ranks_of(out)
    assert [part.layers for part in parts] == [(0, 0),
                                               (0, 1), (1, 3)]
    assert [part.rank for part in parts] == [0, 1, 2]
    assert {tuple(part.stages) for part in parts} == {(0, 1, 2)}
    assert len({part.split_id for part in parts}) == 1
    assert all(part.config == Checkpoint(models / "base").config for part in parts)
    assert set(tensors_of(parts[0].weights)) == {"lm_head.weight"}
    assert "model.embed_tokens.weight" in tensors_of(parts[1].weights)
    assert "model.norm.weight" in tensors_of(parts[2].weights)
    assert (out / "stage_0" / "tokenizer.model").read_bytes() == b"any bytes"
    assert (out / "stage_0" / "generation_config.json").exists() and not (out / "stage_1" / "tokenizer.model").exists()
    eagle = torch.load(models / "eagle" / "pytorch_model.bin")

    assert parts[0].eagle and same(tensors_of(Checkpoint(parts[0].eagle)), eagle)
    assert same(load_file(parts[0].eagle / "model.safetensors"), eagle)
    assert parts[1].eagle is None
    assert [part.rank for part in check(out)] == [0, 1, 2]
    assert not list(out.glob("**/*.part"))


def test_a_head_beside_a_tied_embedding_has_to_equal_it(tmp_path):
    save_llama(tmp_path / "base", tied=True)
    with edited_tensors(tmp_path / "base") as tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    split_quietly(tmp_path / "base", tmp_path / "equal", "2")
    with edited_tensors(tmp_path / "base") as tensors:
        tensors["lm_head.weight"] *= 2
    with refused("holds lm_head.weight, which differs from model.embed_tokens.weight", "write false there"):
        split_quietly(tmp_path / "base", tmp_path / "other", "2")


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("options", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("stages", ["1", "0+1+1+1"])
def test_the_parts_together_are_the_model_bit_for_bit(tmp_path, stages, options, tied):
    whole = save_llama(tmp_path / "base", tied, **options)
    folders = split_quietly(tmp_path / "base", tmp_path / "split", stages)
    parts = [load_file(folder / "model.safetensors") for folder in folders]
    assert sum(map(len, parts)) == len(whole), "a tensor is held twice"
    assert same({name: tensor for part in parts for name, tensor in part.items()}, whole)


def test_a_finished_folder_is_kept_and_an_unfinished_one_is_written_again(models, out):
    def again(stages: str = "0+1+2", eagle: Path | None = models / "eagle") -> list[bool]:
        for path in out.glob("stage_*/model.safetensors"):
            os.utime(path, (0, 0))
        folders = split_quietly(models / "base", out, stages, eagle)
        check(out)
        return [(folder / "model.safetensors").stat().st_mtime == 0 for folder in folders]

    assert again() == [True, True, True]
    (out / "stage_1" / "manifest.json").unlink()
    assert again() == [True, False, True]
    (out / "stage_2" / "model.safetensors").write_bytes(b"half")
    assert again() == [True, True, False]
    assert again(eagle=None) == [False, False, False]
    assert Part(out / "stage_0").eagle is None
    assert not (out / "stage_0" / "eagle" / "model.safetensors").exists()
    assert again("0+3") == [False, False]
    with refused("has no manifest.json"):
        Part(out / "stage_2")


def test_a_model_that_was_trained_again_is_split_again(models, tmp_path):
    shutil.copytree(models / "base", tmp_path / "base")
    before = Part(split_quietly(tmp_path / "base", tmp_path / "split", "1")[0])
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    tensors["lm_head.weight"] += 1
    save_file(tensors, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    after = Part(split_quietly(tmp_path / "base", tmp_path / "split", "1")[0])
    assert before.split_id != after.split_id
    assert torch.equal(tensors_of(after.weights)["lm_head.weight"], tensors["lm_head.weight"])


def test_the_sample_of_a_large_file_covers_its_beginning_middle_and_end(tmp_path):
    (tmp_path / "file").write_bytes(bytes(1000))
    marks = {sample(tmp_path / "file", block_size=10, num_blocks=4)}
    for place in (0, 335, 999):
        data = bytearray(1000)
        data[place] = 1
        (tmp_path / "file").write_bytes(data)
        marks.add(sample(tmp_path / "file", block_size=10, num_blocks=4))
    assert len(marks) == 4


def test_a_checkpoint_of_thirteen_files_is_split_interrupted_resumed_and_checked(tmp_path, monkeypatch):
    whole = save_llama(tmp_path / "base")
    (tmp_path / "base" / "model.safetensors").unlink()
    shards = {f"model-{i + 1:05}-of-00013.safetensors": list(whole)[i::13] for i in range(13)}
    for shard, names in shards.items():
        save_file({name: whole[name] for name in names}, tmp_path / "base" / shard)
    places = {name: shard for shard, names in shards.items() for name in names}
    save_json(tmp_path / "base" / "model.safetensors.index.json", {"weight_map": places})
    write, written = Writer.write, []

    def until_the_last_rank(self: Writer, name: str, tensor: torch.Tensor) -> None:
        written.append(name)
        if len(written) == len(whole):
            raise KeyboardInterrupt
        write(self, name, tensor)

    monkeypatch.setattr(Writer, "write", until_the_last_rank)
    with pytest.raises(KeyboardInterrupt):
        split_quietly(tmp_path / "base", tmp_path / "split", "auto:3")
    assert [path.parent.name for path in sorted(tmp_path.glob("split/*/manifest.json"))] == [
        "stage_0", "stage_1", "stage_2"]
    folders = split_quietly(tmp_path / "base", tmp_path / "split", "auto:3")
    assert all(re.match(r"model\.(layers\.2|norm)\.", name) for name in written[len(whole):]), "one rank was left"
    checked = [tensors_of(part.weights) for part in check(tmp_path / "split")]
    assert same({name: x for tensors in checked for name, x in tensors.items()}, whole)
    flip_last_bit(folders[1] / "model.safetensors")
    with refused("has changed since it was written"):
        check(tmp_path / "split")


def peak() -> float:
    """Return the peak memory of this process in MB."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


def split_alone(folder: Path, kind: str) -> None:
    """Split the model in a folder, and write there by how much this raised the peak memory."""
    save_llama(folder / "small", **LAYOUTS[kind])
    split_quietly(folder / "small", folder / "small_split", "3")  # which loads the libraries
    before = peak()
    split_quietly(folder, folder / "split", "2")
    (folder / "peak").write_text(str(peak() - before))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory from Linux's /proc")
@pytest.mark.parametrize("kind", ["safetensors", ".bin"])
def test_the_peak_of_memory_is_about_the_largest_tensor(tmp_path, kind):
    if kind == ".bin" and "mmap" not in inspect.signature(torch.load).parameters:
        pytest.skip("this torch cannot map a .bin file, so it is read whole")
    sizes = {"hidden_size": 1024, "intermediate_size": 1024, "vocab_size": 1024, "num_hidden_layers": 3,
             "num_attention_heads": 8, "rms_norm_eps": 1e-6}
    save_json(tmp_path / "config.json", {"architectures": ["LlamaForCausalLM"], **sizes})
    whole = Slice(LlamaConfig.read(sizes), 0, 3).state_dict()
    model = {f"model.{name}": torch.full(x.shape, 1.0) for name, x in whole.items()}
    model["lm_head.weight"] = torch.full((1024, 1024), 1.0)
    save_tensors(model, tmp_path / ("pytorch_model.bin" if kind == ".bin" else "model.safetensors"))
    process = CONTEXT.Process(target=split_alone, args=[tmp_path, kind])
    process.start()
    process.join()
    raised = float((tmp_path / "peak").read_text())

    # pages of the mapped file count too, as many as the kernel happens to map at once
    assert raised < 48, f"{raised} MB for 96 MB in tensors of 4 MB"


# Failure


def spoil_limit(monkeypatch) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def spoil_kill(monkeypatch) -> None:
    def write(self: Writer, name: str, tensor: torch.Tensor) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Writer, "write", write)


@pytest.mark.parametrize("spoil, error, sentence", [
    (spoil_limit, ValueError, "is full; free some space"), (spoil_kill, KeyboardInterrupt, None)])
def test_what_was_half_written_is_not_taken_for_good(models, out, monkeypatch, spoil, error, sentence):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        spoil(monkeypatch)
        with pytest.raises(error, match=sentence):
            split_quietly(models / "base", out, "0+2+1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    whole = [rank for rank in range(3) if (out / f"stage_{rank}" / "manifest.json").exists()]
    assert len(whole) < 3
    assert not list(out.glob("**/*.safetensors.part"))
    monkeypatch.undo()
    split_quietly(models / "base", out, "0+2+1")

    assert len(check(out)) == 3


@contextmanager
def as_another_user() -> Iterator[None]:
    """Turn root into a user bound by permissions; other users already are."""
    me = os.geteuid()
    os.seteuid(me or 65534)
    try:
        yield
    finally:
        os.seteuid(me)


def test_a_whole_split_that_may_only_be_read_is_used_and_an_unfinished_one_is_refused():
    """Run as the second user of a shared clone."""
    with TemporaryDirectory() as name:
        top = Path(name)
        save_llama(top / "base")
        folders = split_quietly(top / "base", top / "split", "0+1+2")
        paths = [top, *top.rglob("*")]
        for path in paths:
            path.chmod(0o555 if path.is_dir() else 0o444)
        with as_another_user():
            assert split_quietly(top / "base", top / "split", "0+1+2") == folders
            assert len(check(top / "split")) == 3
            with refused("Permission denied; choose a model folder that you may read and an output folder that you may "
                         "write, which a run takes as model_dir="):
                split_quietly(top / "base", top / "split", "0+2+1")
        for path in paths:
            path.chmod(0o755)
        assert len(check(top / "split")) == 3


def test_what_a_killed_split_left_behind_is_forgotten(models, out):
    for name in ("stage_1/model.safetensors.part", "stage_2/manifest.json.77.part", "stage_0/eagle/config.json.part"):
        (out / name).write_bytes(b"half")
    for rank in range(3):
        (out / f"stage_{rank}" / "manifest.json").unlink()
    split_quietly(models / "base", out, "0+3")
    assert not list(out.glob("**/*.part")) and len(check(out)) == 2


def test_weights_that_are_not_numbers_end_the_split(models, tmp_path):
    shutil.copytree(models / "base", tmp_path / "base")
    with edited_tensors(tmp_path / "base") as tensors:
        tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    with refused("model.layers.1.mlp.up_proj.weight in"):
        split_quietly(tmp_path / "base", tmp_path / "split", "0+1+2")
    with refused("stage_2 has no manifest.json, so it is incomplete"):
        Part(tmp_path / "split" / "stage_2")


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(models, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 100, 0))
    with refused("choose another output folder or free some space"):
        split_quietly(models / "base", tmp_path / "split", "3")
    assert not list((tmp_path / "split").glob("stage_*"))


def test_an_output_folder_that_cannot_be_written_is_refused(models, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with refused("choose a model folder that you may read and an output folder that you may write"):
        split_quietly(models / "base", tmp_path / "file" / "split", "3")

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/there")

    monkeypatch.setattr(Path, "mkdir", denied)
    with refused("/there: Permission denied; choose"):
        split_quietly(models / "base", tmp_path / "split", "3")


def test_the_command_splits_and_says_what_is_where(models, tmp_path, capsys):
    words = [models / "base", tmp_path, "--stages", "2", "--eagle", models / "eagle"]
    assert main(list(map(str, words))) == 0
    shown = capsys.readouterr()
    assert "stage_0: drafts" in shown.out and "stage_2: layers 1 to 2" in shown.out and "splitting" in shown.err
    assert "\r" not in shown.err
    next_line = f'next: bash run_pipe.sh model_dir={tmp_path} prompt="What does a baker do?"'
    assert shown.out.splitlines()[-1] == next_line


@pytest.mark.parametrize("name, words, has_head", [
    ("Llama-mine", [], True), ("Llama-mine", ["--eagle", "none"], False), ("mine", [], False)])
def test_a_head_of_the_repository_that_fits_goes_into_the_split(tmp_path, capsys, name, words, has_head):
    shutil.copytree(TOY / "llama", tmp_path / name)
    assert main([str(tmp_path / name), str(tmp_path / "split"), "--stages", "2", *words]) == 0
    assert bool(Part(tmp_path / "split" / "stage_0").eagle) == has_head
    sentence = f"the split gets the draft head in {TOY / 'eagle_deep'}, which fits the model"
    assert (sentence in capsys.readouterr().err) == has_head


def test_a_head_for_a_model_of_other_sizes_is_left_out(models, tmp_path):
    shutil.copytree(models / "base", tmp_path / "llama")
    assert main([str(tmp_path / "llama"), str(tmp_path / "split"), "--stages", "2"]) == 0
    assert not Part(tmp_path / "split" / "stage_0").eagle


def test_the_command_after_a_split_without_stages_names_a_method_that_has_none(tmp_path):
    args = parse(["models/a", str(tmp_path / "my split"), "--tp", "4"])
    model_key = f"model_dir='{tmp_path}/my split'"
    assert next_command(args) == f'bash run_pipe.sh {model_key} pipeline_type=tp prompt="What does a baker do?"'


@pytest.mark.parametrize("stages, sentence", [("0+2+2", "adds up to 4 layers, but the model has 3"),
                                                  ("3+0", "where rank 0 has none")])
def test_an_error_is_one_sentence_and_exit_code_two(models, tmp_path, capsys, error_of, stages, sentence):
    error = error_of(main, [str(models / "base"), str(tmp_path), "--stages", stages])
    assert sentence in error and error.count("\n") == 1
    with pytest.raises(SystemExit, match="2"):
        main([str(models / "base")])
    assert "MODEL_DIR, OUT_DIR and --stages or --tp are needed" in capsys.readouterr().err


def test_the_lock_of_a_split_follows_no_link_and_waits_for_no_pipe(saved, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("kept")
    for name in ("linked", "piped"):
        (tmp_path / name).mkdir()
    (tmp_path / "linked" / ".lock").symlink_to(precious)
    os.mkfifo(tmp_path / "piped" / ".lock")
    for name in ("linked", "piped"):
        with refused(str(tmp_path / name)):
            split_quietly(saved / "base", tmp_path / name, "0+2+2")
    assert precious.read_text() == "kept"
    assert stat.S_ISFIFO((tmp_path / "piped" / ".lock").stat().st_mode)
