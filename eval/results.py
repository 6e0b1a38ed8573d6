"""The results folder: a line for each answer, written once, and env.json, which records how they were generated.

An interrupted evaluation loses no line and repeats none.
"""
from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Iterator, Mapping, NamedTuple

import torch

from config.cli import all_options, flat
from config.files import SPACE_REMEDY, append, as_value_error, fits, lines, open_lock, read_json_file, write_json
from config.methods import METHODS
from config.presets import ROOT
from config.values import listed
from eval.keys import Contender, EvalConfig
from eval.metrics import ANSWER_FIELDS

# Keys that may differ between starts that write into one folder: those of the request, and those without influence.
REQUEST_KEYS = ("methods", "draft", "drafts", "sets", "temperatures", "questions", "repeats")
VARIABLE_KEYS = frozenset((
    *REQUEST_KEYS, "baseline_draft", "max_requests", "results", "launch", "pipeline_type", "prompt", "slowdown",
    "timeout", "master", "hosts", "codes", "wait", "trace", "output", "debug"))
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "fschat")
OTHER_RESULTS = "choose another results=, or delete the folder"
DELETE = "delete this line"


class Key(NamedTuple):
    """The method, draft and trial of an answer; a folder has one answer for each key."""

    method: str
    draft: str
    set: str
    temperature: float
    repeat: int
    question: int | str  # its id

    @property
    def contender(self) -> Contender:
        return Contender(self.method, self.draft)


def is_same_value(value: Any, file_value: Any) -> bool:
    """Return whether a key has the value of an earlier start, whose paths may be those of another clone of the project.
    """
    if value == file_value or not isinstance(value, str) or str(ROOT) not in value:
        return bool(value == file_value)

    before_root, after_root, *parts_after = map(re.escape, value.split(str(ROOT)))
    pattern = before_root + "(.+)" + "\\1".join([after_root, *parts_after])
    return re.fullmatch(pattern, str(file_value)) is not None


class Results:
    """A folder of answers, open in one evaluation at a time; `texts` are the token ids of each answer, turn by turn."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.texts: dict[Key, list[list[int]]] = {}

    @property
    def has_answers(self) -> bool:
        """Whether any answer was written, even an incomplete one."""
        return bool(answer_files(self.folder))

    def path(self, method: str, set_name: str, temperature: float) -> Path:
        """Return the file of a method's answers to the data set `set_name` at a temperature."""
        return self.folder / "answers" / method / f"{set_name}-t{temperature:g}.jsonl"

    @property
    def starts(self) -> int:
        """The number of starts of the pipeline for these answers: each start leaves a folder tally/NUMBER-METHOD."""
        matches = (re.match(r"[0-9]+(?=-)", path.name) for path in self.folder.glob("tally/*"))
        return max((int(match[0]) + 1 for match in matches if match), default=0)

    def check(self, config: EvalConfig) -> None:
        """Read the existing answers. Raise ValueError if they were generated with another configuration."""
        env = read_environment(self.folder, OTHER_RESULTS)
        if not self.has_answers:
            return

        if not env:
            raise ValueError(f"{self.folder} has answers, but no env.json with their configuration: "
                             "choose another results=")

        defaults = {option.name: option.default for option in all_options(EvalConfig)}
        former_keys = sorted(env["config"].keys() - defaults.keys())
        if former_keys:
            raise ValueError(f"{self.folder} holds answers of an earlier version, with the key {former_keys[0]}: "
                             "choose another results=")

        for key_name, value in flat(config).items():
            file_value = env["config"].get(key_name, defaults[key_name])
            if key_name not in VARIABLE_KEYS and not is_same_value(value, file_value):
                raise ValueError(f"{self.folder} holds answers with {key_name}={file_value}, not {value}: choose "
                                 f"another results=, or give {key_name}={file_value}")

        answers = (line for path in answer_files(self.folder) for line in read_answers(path))
        self.texts = {key(line): line["token_ids"] for line in answers}

    def open(self, config: EvalConfig, scale: float, split_id: str = "") -> Results:
        """Prepare the folder for writing: cut off incomplete lines, note this start. Raise ValueError if that fails.

        `split_id` identifies the split model of this start: all methods of one target must use one model.
        """
        self._take_lock()
        for path in answer_files(self.folder):
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        self.check(config)

        request = {name: flat(config)[name] for name in REQUEST_KEYS}
        target = METHODS[config.run.pipeline_type].target
        started_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
        this_start = {"time": started_at, "launch": config.launch, "command": sys.argv, "scale": scale,
                      "target": target, "split": split_id, **request}

        former_starts = read_environment(self.folder, OTHER_RESULTS).get("starts", []) if self.has_answers else []
        former_splits = {earlier.get("split") for earlier in former_starts if earlier.get("target") == target}
        if split_id and former_splits - {"", None, split_id}:
            raise ValueError(f"{self.folder} holds answers of another model, or of another split of it, than the one "
                             "in use: choose another results=")

        write_json(self.folder / "env.json", {**_environment(config), "starts": [*former_starts, this_start]})
        return self

    def _take_lock(self) -> None:
        """Lock the folder. Raise ValueError if another evaluation has locked it, or if it cannot be written."""
        with as_value_error(self.folder, "choose another results="):
            self._lock = open_lock(self.folder / ".lock")
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"another evaluation writes to {self.folder}: wait for it, or choose another "
                                 "results=") from None

    def add(self, line: dict[str, Any]) -> None:
        """Write one answer; it is on disk when this returns."""
        path = self.path(line["method"], line["set"], line["temperature"])
        append(path, json.dumps(line, ensure_ascii=False) + "\n", SPACE_REMEDY)
        self.texts[key(line)] = line["token_ids"]

    def close(self) -> None:
        """Unlock the folder."""
        self._lock.close()


def answer_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("answers/*/*.jsonl"))


def _temperatures(value: Any) -> bool:
    """Whether a value is a string of numbers, separated by commas."""
    try:
        return fits([float(word) for word in listed(value)], [float])
    except (ValueError, AttributeError):
        return False


ENVIRONMENT = {  # the fields that are read from env.json; see `fits` in config/files.py
    "machine": dict, "config": {"data": str, "draft": str, "drafts": str, "baseline_draft": str},
    "starts": [{"methods": str, "draft": str, "drafts": str, "sets": str, "temperatures": _temperatures,
                "questions": str, "repeats": int}]}


def read_environment(folder: Path, remedy: str) -> Mapping[str, Any]:
    """Return the content of env.json, empty if it does not exist. Raise ValueError if no evaluation wrote it."""
    env_path = folder / "env.json"
    if not env_path.is_file():
        return {}
    env: Mapping[str, Any] = read_json_file(env_path, remedy)
    if not fits(env, ENVIRONMENT):
        raise ValueError(f"{env_path} is not in the form that an evaluation writes: {remedy}")
    return env


def key(line: Mapping[str, Any]) -> Key:
    """Return the key of an answer's line."""
    fields = [line[name] for name in Key._fields[:-1]]
    return Key._make([*fields, line["question_id"]])


def read_answers(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the answers in a file, without an incomplete last line. Raise ValueError for an invalid line."""
    first_lines: dict[Key, int] = {}
    for line_number, entry in lines(path, DELETE, growing=True):
        if not fits(entry, ANSWER_FIELDS):
            raise ValueError(f"line {line_number} of {path} is no answer: {DELETE}")
        first_line = first_lines.setdefault(key(entry), line_number)
        if first_line != line_number:
            raise ValueError(f"line {line_number} of {path} repeats the answer of line {first_line}: {DELETE}")
        yield entry


def _environment(config: EvalConfig) -> dict[str, Any]:
    """Return the configuration, and all else that figures may depend on."""
    cluster = asdict(config.run.cluster) if config.run.cluster else None
    package_versions = {"python": platform.python_version(), **dict.fromkeys(PACKAGES)}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            package_versions[name] = version(name)

    gpu_names = [torch.cuda.get_device_name(device_index) for device_index in range(torch.cuda.device_count())]

    machine = {"platform": platform.platform(), "cpu": processor_name(),
               "cores": os.cpu_count(), "gpus": gpu_names}
    return {"emulated": cluster is not None, "profile": config.run.profile, "cluster": cluster,
            "versions": package_versions, "machine": machine, "commit": current_commit(), "config": flat(config)}


def processor_name() -> str:
    """Return the name of the processor, on Linux from /proc/cpuinfo."""
    info_file = Path("/proc/cpuinfo")
    text = info_file.read_text() if info_file.is_file() else ""
    match = re.search(r"^model name\s*:\s*(.*)", text, re.M)
    return match[1].strip() if match else platform.processor()


def current_commit() -> str | None:
    """Return the commit of this repository, with a + if files were changed since; None outside of git."""
    try:
        argv = ["git", "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+"]
        return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True).stdout.strip() or None
    except OSError:
        return None
