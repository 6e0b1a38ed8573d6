"""`model=` names a folder, a GGUF file or a model of the hub, which is fetched once; nothing here asks the network."""
import os
import shutil
from types import SimpleNamespace

import pytest

from config.presets import TOY
from launch.hub import HALF, WANTED, _weights, cached_snapshot, fetch, known_head, words_of
from tests.checkpoints import refused
from tests.json_files import load_json
from tests.saved import here

huggingface_hub = pytest.importorskip("huggingface_hub")


@pytest.fixture
def hub(monkeypatch):
    """A hub that has the toy under the name a/toy; what it was asked for."""
    asked = []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", os.devnull)
    snapshot_download = huggingface_hub.snapshot_download

    def info(name, revision, files_metadata):
        asked.append((name, revision))
        if name != "a/toy":
            raise OSError("Cannot reach the hub\nand more")
        paths = (TOY / "llama").iterdir()
        files = [SimpleNamespace(rfilename=path.name, size=path.stat().st_size) for path in paths]
        return SimpleNamespace(sha=f"sha of {revision}", siblings=files)

    def download(name, revision, local_dir="", allow_patterns=(), local_files_only=False):
        if local_files_only:
            return snapshot_download(name, revision=revision, local_files_only=True)
        assert allow_patterns == [*WANTED, "*.safetensors"]
        assert revision == f"sha of {asked[-1][1]}"
        return shutil.copytree(TOY / "llama", local_dir, dirs_exist_ok=True)

    monkeypatch.setattr(huggingface_hub, "model_info", info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return asked


@pytest.fixture
def toy(tmp_path):
    """Keys that name the hub's model."""
    return {"model": "a/toy", "models": str(tmp_path)}


def broken_off(folder):
    """A folder in which a download has ended too early."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / HALF).touch()
    return folder


def test_a_folder_and_a_file_are_taken_as_they_are(tmp_path, hub):
    (tmp_path / "m.gguf").touch()
    assert words_of({"model": str(tmp_path)}) == [f"base_dir={tmp_path}"]
    assert words_of({"model": str(tmp_path / "m.gguf")}) == [f"base_dir={tmp_path / 'm.gguf'}"]
    assert hub == []


def test_a_name_is_fetched_once_and_a_revision_is_asked_for(tmp_path, hub, toy):
    fetched = [f"base_dir={tmp_path / 'a' / 'toy'}"]
    assert words_of(toy) == words_of(toy) == fetched
    assert hub == [("a/toy", None)] and not (tmp_path / "a" / "toy" / HALF).exists()
    assert words_of({**toy, "model": "a/toy@v1"}) == fetched
    assert hub[1:] == [("a/toy", "v1")]


def test_a_download_that_broke_off_goes_on(tmp_path, hub):
    folder = broken_off(tmp_path / "a" / "toy")
    assert fetch("a/toy", tmp_path) == folder and hub == [("a/toy", None)]
    assert load_json(folder / "config.json")["model_type"] == "llama"


def test_where_the_hub_cannot_be_reached_the_files_are_named(tmp_path, hub):
    with refused(f"b/other cannot be fetched (Cannot reach the hub): bring its config.json, tokenizer files and "
                 f"weights into {tmp_path / 'b' / 'other'}, as hf download b/other --local-dir"):
        fetch("b/other", tmp_path)
    folder = shutil.copytree(TOY / "llama", tmp_path / "b" / "other")  # as the sentence says
    assert fetch("b/other", tmp_path) == folder


def test_where_a_download_broke_off_the_mark_is_to_be_deleted_and_with_a_revision_the_folder_named(tmp_path, hub):
    folder = broken_off(tmp_path / "b" / "other")
    with refused(f"does where the network allows it, and delete {folder / HALF}"):
        fetch("b/other", tmp_path)
    (folder / HALF).unlink()
    with refused(f"as hf download b/other --revision v1 --local-dir {folder} does where the network allows it, and "
                 f"give model={folder}"):
        fetch("b/other", tmp_path, "v1")


COMMIT = "0123456789abcdef" + 24 * "0"


@pytest.fixture
def cache(tmp_path, hub, monkeypatch):
    """A cache of the hub that holds the toy under the name b/other, as links to blobs."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    stored = tmp_path / "cache" / "models--b--other"
    snapshot = stored / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    shutil.copytree(TOY / "llama", stored / "blobs")
    for blob in (stored / "blobs").iterdir():
        (snapshot / blob.name).symlink_to(blob)
    for reference in ("main", "v1"):
        (stored / "refs" / reference).parent.mkdir(exist_ok=True)
        (stored / "refs" / reference).write_text(COMMIT)
    return snapshot


@pytest.mark.parametrize("revision", [None, "v1", COMMIT])
def test_a_whole_snapshot_in_the_hubs_cache_is_used_without_the_hub(tmp_path, hub, cache, capsys, revision):
    assert fetch("b/other", tmp_path, revision) == cache and hub == []
    assert f"b/other is taken from the hub's cache: {cache}" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_an_error_of_the_network_is_named_in_words(tmp_path, hub, monkeypatch):
    def fails(name, revision, files_metadata):
        raise ConnectionError("HTTPSConnectionPool(h...")

    monkeypatch.setattr(huggingface_hub, "model_info", fails)
    with refused("b/other cannot be fetched (the network or the hub does not answer): bring its config.json"):
        fetch("b/other", tmp_path)


@pytest.mark.parametrize("lacking", ["model.safetensors", "config.json", "tokenizer.*"])
def test_a_snapshot_without_one_of_its_files_is_not_used(tmp_path, hub, cache, lacking):
    for link in cache.glob(lacking):
        link.resolve().unlink()  # the blob: its download broke off
    with refused("b/other cannot be fetched (Cannot reach the hub)"):
        fetch("b/other", tmp_path)
    assert cached_snapshot("b/other", None, is_head=True) == (cache if lacking == "tokenizer.*" else None)
    with refused("b/other cannot be fetched (Cannot reach the hub)"):
        fetch("b/other", tmp_path, "v2")


def test_weights_are_fetched_in_one_form():
    assert _weights(["a.json", "model-1-of-2.safetensors", "pytorch_model.bin"]) == "*.safetensors"
    assert _weights(["config.json", "pytorch_model-00001-of-00002.bin", "training_args.bin"]) == "pytorch_model*.bin"
    with refused("it has no *.safetensors or pytorch_model*.bin"):
        _weights(["model.onnx", "training_args.bin"])


def test_half_a_download_stays_half_where_the_library_finds_no_hub(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    folder = broken_off(tmp_path / "b" / "half")
    with refused("): give the same command again, which goes on where it ended, or bring its config.json"):
        fetch("b/half", tmp_path)
    assert (folder / HALF).exists()


@pytest.mark.parametrize("name", ["no-such-thing", "a/b/c", "nothing.gguf", "../up/there", "a/b;c", "/no/where"])
def test_what_is_neither_here_nor_a_name_is_refused(name, hub):
    with refused(f"model={name} is no file or folder here: give the path of a folder or of a GGUF file, or a name at"):
        words_of({"model": name})
    assert hub == []


def test_the_head_that_a_preset_has_is_fetched_too_unless_a_draft_is_named(hub, toy, monkeypatch, capsys):
    assert known_head("Qwen/Qwen3-4B") == "AngelSlim/Qwen3-4B_eagle3" and known_head("a/toy") == ""
    monkeypatch.setattr("launch.hub.known_head", lambda name: "b/head")
    assert len(words_of(toy)) == 1
    assert "b/head cannot be fetched (Cannot reach the hub)" in capsys.readouterr().err
    words_of({**toy, "draft": "suffix"})
    assert [name for name, _ in hub] == ["a/toy", "b/head"]


def test_a_run_takes_it(tmp_path, hub, capsys, error_of):
    words = ("prompt=hello", "max_new_tokens=8", "stages=0+4+4", f"models={tmp_path}")
    assert here("model=a/toy", *words) == 0
    assert "tokens                8" in capsys.readouterr().out
    assert "b/none cannot be fetched" in error_of(here, "model=b/none", *words)
