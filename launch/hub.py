"""Find a model by its name, folder or GGUF file, and fetch it if it is missing (`model=`).

The library `huggingface_hub` fetches it from the hub: it shows progress, continues after an interruption, compares
hashes and stores the revision with the files. Only JSON, tokenizers and one form of the weights are fetched.
"""
from __future__ import annotations

import fnmatch
import re
from pathlib import Path
from typing import Iterable, Mapping

from config.files import one_at_a_time
from config.presets import MODELS, PRESETS
from config.schema.untrusted import reason, short_repr
from launch.console import say
from launch.split.gguf import is_gguf

NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(\S+))?")  # optional: a branch, tag or commit
WANTED = ["*.json", "*.model", "*.txt", "*.jinja"]
WEIGHTS = "*.safetensors", "pytorch_model*.bin"  # the first kind that exists is fetched
HALF = ".incomplete"  # in a folder while it is being filled


def words_of(raw: Mapping[str, str]) -> list[str]:
    """Return the words that replace `model=`: the model's folder, and its draft head if one is known.

    Raises ValueError, with the fix, for a model that is missing and cannot be fetched.
    """
    asked = raw["model"]
    root = Path(raw.get("models") or MODELS).expanduser()
    path = Path(asked).expanduser()
    if path.exists():
        return [f"base_dir={path}"]
    named = NAME.fullmatch(asked)
    if is_gguf(asked) or not named:
        raise ValueError(f"model={asked} is no file or folder here: give the path of a folder or of a GGUF file, or a "
                         "name at the hub, as Qwen/Qwen3-4B or NAME@REVISION")
    name, revision = named.groups()
    words = [f"base_dir={fetch(name, root, revision)}"]
    head = known_head(name)
    if head and not raw.keys() & {"eagle_dir", "draft", "drafts"}:
        try:
            words.append(f"eagle_dir={fetch(head, root)}")
        except ValueError as error:
            say(f"{error}; without it, draft=suffix")
    return words


def known_head(name: str) -> str:
    """Return the name of a model's draft head if a preset has one, else an empty string."""
    for preset in PRESETS.values():
        if preset.eagle_dir and preset.base_dir == str(MODELS / name):
            return Path(preset.eagle_dir).relative_to(MODELS).as_posix()
    return ""


def fetch(name: str, root: Path, revision: str | None = None) -> Path:
    """Return the folder below `root` of a model of the hub; fetch the model if it is missing or incomplete."""
    folder = root / name
    mark = folder / HALF
    if (folder / "config.json").is_file() and not mark.is_file() and revision is None:
        return folder
    bring = (f"bring its config.json, tokenizer files and weights into {folder}, as hf download {name} "
             f"--local-dir {folder} does where the network allows it")
    try:
        from huggingface_hub import model_info, snapshot_download
    except ImportError:
        raise ValueError(f"{name} cannot be fetched without the package huggingface_hub: install it, or "
                         f"{bring}") from None
    with one_at_a_time(folder.with_name(f".{folder.name}")):
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
        say(f"fetching {name} into {folder}, once")
        try:
            found = model_info(name, revision=revision)  # fails without a hub, which the download would ignore
            wanted = [*WANTED, _weights(each.rfilename for each in found.siblings or ())]
            snapshot_download(name, revision=found.sha, local_dir=str(folder), allow_patterns=wanted)
        except Exception as error:  # the network, the hub and the library may raise anything
            raise ValueError(f"{name} cannot be fetched ({short_repr(reason(error))[1:-1]}): {bring}") from None
        mark.unlink()
    return folder


def _weights(files: Iterable[str]) -> str:
    """Return the pattern of the files that hold the weights; raises ValueError if there are none."""
    held = list(files)
    for pattern in WEIGHTS:
        if fnmatch.filter(held, pattern):
            return pattern
    raise ValueError(f"it has no {' or '.join(WEIGHTS)}")
