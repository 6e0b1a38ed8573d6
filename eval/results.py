"""The results folder: a line for each answer, written once and for good, and env.json, which says how they were made.

It knows nothing about how an answer comes about. An interrupted evaluation loses no line and repeats none.
"""
from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import subprocess
import sys
from dataclasses import asdict, fields
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Iterator, NamedTuple

import torch

from config.eval_config import EvalConfig
from config.files import ROOM, fits, lines, whole, write
from eval.metrics import ANSWER

# What may differ between two starts that write into one folder: what is asked for, and what no figure depends on.
FREE = frozenset(("methods", "sets", "temperatures", "repeats", "question_begin", "question_end", "results", "launch",
                  "pipeline_type", "prompt", "slowdown", "timeout", "master_addr", "master_port", "hosts", "wait",
                  "trace", "output", "debug"))
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "fschat")
OTHER = "choose another results=, or delete the folder"
DELETE = "delete this line, then start again"


class Key(NamedTuple):
    """What an answer answers."""

    method: str
    set: str
    temperature: float
    repeat: int
    question: int | str


class Results:
    """A folder of answers. It may be opened by one evaluation at a time; `texts` are the token ids of every answer."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.texts: dict[Key, list[list[int]]] = {}
        self._lock: Any = None

    @property
    def _env(self) -> Path:
        return self.folder / "env.json"

    @property
    def has_answers(self) -> bool:
        return bool(self._files())

    def path(self, method: str, name: str, temperature: float) -> Path:
        return self.folder / "answers" / method / f"{name}-t{temperature:g}.jsonl"

    @property
    def starts(self) -> int:
        """How often the pipeline was started for it: each start leaves a folder tally/NUMBER-METHOD."""
        names = [re.match(r"\d+(?=-)", path.name, re.ASCII) for path in self.folder.glob("tally/*")]
        return 1 + max((int(name[0]) for name in names if name), default=-1)

    def check(self, config: EvalConfig) -> None:
        """Read what is there. Raises ValueError if it is of another configuration."""
        if not self._env.is_file():
            if self.has_answers:
                raise ValueError(f"{self.folder} has answers, but its env.json is gone: choose another results=")
            return
        saved = self._saved()["config"]
        for option in fields(config):
            there, here = saved.get(option.name, option.default), getattr(config, option.name)
            if option.name not in FREE and there != here:
                raise ValueError(f"{self.folder} holds answers with {option.name}={there}, not {here}: choose another "
                                 f"results=, or ask for {option.name}={there}")
        self.texts = {key(line): line["token_ids"] for path in self._files() for line in _lines(path)}

    def _saved(self) -> dict[str, Any]:
        """What env.json says."""
        saved = whole(self._env, OTHER)
        if not fits(saved, {"config": dict, "starts": [dict]}):
            raise ValueError(f"{self._env} is none that an evaluation wrote: {OTHER}")
        return saved  # type: ignore[no-any-return]

    def open(self, config: EvalConfig, scale: float) -> Results:
        """Make it ready for writing: cut off half lines, note this start. Raises ValueError if it cannot be used."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.folder / ".lock", "w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another evaluation writes to {self.folder}: wait for it, or choose another "
                             "results=") from None
        except OSError as error:
            raise ValueError(f"{self.folder} cannot be written ({error.strerror}): choose another results=") from error
        for path in self._files():
            _repair(path)
        self.check(config)
        start = {"time": _now(), "launch": config.launch, "command": sys.argv, "scale": scale,
                 "methods": config.methods, "sets": config.sets, "temperatures": config.temperatures,
                 "question_begin": config.question_begin, "question_end": config.question_end,
                 "repeats": config.repeats}
        before = self._saved()["starts"] if self._env.is_file() else []
        write(self._env, json.dumps({**_environment(config), "starts": [*before, start]}, indent=1), ROOM)
        return self

    def add(self, line: dict[str, Any]) -> None:
        """Write one answer; it is on the disk when this returns."""
        path = self.path(line["method"], line["set"], line["temperature"])
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ValueError(f"{path} cannot be written ({error.strerror}): {ROOM}") from error
        self.texts[key(line)] = line["token_ids"]

    def close(self) -> None:
        if self._lock:
            self._lock.close()

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("answers/*/*.jsonl"))


def key(line: dict[str, Any]) -> Key:
    return Key(line["method"], line["set"], line["temperature"], line["repeat"], line["question_id"])


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The answers in a file; the last line may be half written, and then does not count."""
    for number, entry in lines(path, DELETE, growing=True):
        if not fits(entry, ANSWER):
            raise ValueError(f"line {number} of {path} is no answer: {DELETE}")
        yield entry


def _repair(path: Path) -> None:
    """Cut off what stands behind the last end of a line."""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _environment(config: EvalConfig) -> dict[str, Any]:
    """What figures may depend on beside the configuration, and that."""
    cluster = config.cluster
    return {
        "emulated": bool(cluster), "profile": config.profile, "cluster": asdict(cluster) if cluster else None,
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "machine": {"platform": platform.platform(), "cpu": _processor(), "cores": os.cpu_count(),
                    "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]},
        "commit": _commit(), "config": asdict(config)}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines()
             if line.startswith("model name")] if info.is_file() else []
    return names[0] if names else platform.processor()


def _commit() -> str | None:
    """The commit of this repository, with a + if files were changed since; None outside of git."""
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True,
                              check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
