"""A preset downloads its model and head by itself, from a hub on loopback, and not onto a full disk."""
from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlparse

import pytest

from config.presets import PRESETS, TOY
from launch import hub
from launch.hub import HALF, fetch, words_of_preset
from tests.checkpoints import refused
from tests.saved import run_program

pytest.importorskip("huggingface_hub")

MODEL, HEAD = "Qwen/Qwen3-4B", "AngelSlim/Qwen3-4B_eagle3"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FOLDERS = {MODEL: TOY / "llama", HEAD: TOY / "eagle_deep"}
WEIGHTS_FILE = "model.safetensors"


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as a download needs; at first it fails to send the weights."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urlparse(self.path).path.strip("/")
        if path.startswith("api/models/"):
            name = "/".join(path.split("/")[2:4])
            self._answer_json(self._description(name))
            return
        name, _, file = path.partition(f"/resolve/{COMMIT}/")
        self._answer_file(FOLDERS[name] / file)

    def _description(self, name: str) -> dict[str, object]:
        files = [{"rfilename": file.name, "size": file.stat().st_size} for file in FOLDERS[name].iterdir()]
        return {"id": name, "sha": COMMIT, "siblings": files}

    def _answer_json(self, content: object) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _answer_file(self, file: Path) -> None:
        if file.name == WEIGHTS_FILE and self.command == "GET" and self.server.state.fails:
            self.send_response(403)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return

        data = file.read_bytes()
        etag = hashlib.sha1(data).hexdigest()
        self.send_response(200)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.server.state.downloads.append(file.name)
            self.wfile.write(data)


@pytest.fixture
def endpoint():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.state = SimpleNamespace(fails=True, downloads=[])
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def typed(endpoint, models: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{endpoint.server_port}",
                   "HF_HUB_CACHE": os.devnull, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DOWNLOAD_TIMEOUT": "5"}
    command = [sys.executable, "-m", "scripts.generate", "qwen3-4b", f"models={models}", *words]
    return run_program(*command, env=environment, timeout=300)


def test_a_preset_downloads_model_and_head_and_goes_on_after_an_interruption(endpoint, tmp_path):
    words, models = ("link=threads", "template=vicuna", "max_new_tokens=4"), tmp_path / "models"
    first = typed(endpoint, models, *words)
    assert first.returncode == 2, first.stderr
    assert f"fetching {MODEL}, 0.0" in first.stderr and "give the same command again" in first.stderr
    assert (models / MODEL / HALF).is_file()

    endpoint.state.fails = False
    second = typed(endpoint, models, *words)
    assert second.returncode == 0, second.stderr
    assert endpoint.state.downloads.count("tokenizer.model") == 1, "what had come is not downloaded again"
    for name, folder in FOLDERS.items():
        assert (models / name / WEIGHTS_FILE).read_bytes() == (folder / WEIGHTS_FILE).read_bytes()
        assert not (models / name / HALF).exists()


# --- without a hub ----------------------------------------------------------------------------------------------------

@pytest.fixture
def described(monkeypatch):
    """A hub that only says that a model has a petabyte."""
    import huggingface_hub

    monkeypatch.setenv("HF_HUB_CACHE", os.devnull)
    files = [SimpleNamespace(rfilename="model.safetensors", size=10**15)]
    model = SimpleNamespace(sha=COMMIT, siblings=files)
    monkeypatch.setattr(huggingface_hub, "model_info", lambda *args, **others: model)


def test_a_model_that_is_larger_than_the_disk_is_refused_before_its_download(described, tmp_path):
    with refused("a/huge has 1000000.00 GB, but the disk of ", " has ", " GB: free some space, or"):
        fetch("a/huge", tmp_path)
    assert not (tmp_path / "a/huge").exists()


@pytest.mark.parametrize("half", [HALF, ".cache/huggingface/download/x.incomplete"])
def test_a_folder_with_half_a_download_is_not_whole(half, described, tmp_path):
    folder = Path(shutil.copytree(TOY / "llama", tmp_path / "a" / "huge"))
    assert fetch("a/huge", tmp_path) == folder
    (folder / half).parent.mkdir(parents=True, exist_ok=True)
    (folder / half).touch()
    with refused("but the disk of"):
        fetch("a/huge", tmp_path)


@pytest.mark.parametrize("raw, names, others", [
    ({}, [MODEL, HEAD], []),
    ({"draft": "eagle+suffix"}, [MODEL, HEAD], []),
    ({"draft": "suffix"}, [MODEL], ["eagle_dir="]),
    ({"eagle_dir": "mine"}, [MODEL], []),
], ids=str)
def test_a_preset_downloads_the_head_that_it_needs(raw, names, others, monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "fetch", lambda name, root, is_head=False: root / name)
    words = words_of_preset(PRESETS["qwen3-4b"], {"models": str(tmp_path), **raw})
    keys = ("base_dir", "eagle_dir")
    assert words == [*(f"{key}={tmp_path / name}" for key, name in zip(keys, names)), *others]
    assert words_of_preset(PRESETS["toy"], {"models": str(tmp_path), **raw}) == []


def test_without_its_head_a_preset_guesses_by_the_suffix(monkeypatch, tmp_path, capsys):
    def fetched(name, root, is_head=False):
        if is_head:
            raise ValueError("no network")
        return root / name

    monkeypatch.setattr(hub, "fetch", fetched)
    words = words_of_preset(PRESETS["qwen3-4b"], {"models": str(tmp_path)})
    assert words == [f"base_dir={tmp_path / MODEL}", "eagle_dir=", "draft=suffix"]
    assert "no network; without it, draft=suffix" in capsys.readouterr().err
