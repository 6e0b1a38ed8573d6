"""Find a model by its name, folder or GGUF file, and fetch it if it is missing (`model=`, and presets).

A model in the cache of the hub's own programs is used there. Else the library `huggingface_hub` fetches it: it shows
progress, continues after an interruption, compares hashes and stores the revision with the files. Only JSON, tokenizers
and one form of the weights are fetched.
"""
from __future__ import annotations

import fnmatch
import re
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Iterable, Mapping

from config.console import say
from config.files import NoSpace, check_space, one_at_a_time
from config.presets import MODELS_FOLDER, PRESETS, under
from config.run_config import RunConfig
from config.schema.untrusted import reason, short_repr
from launch.split.gguf import is_gguf
from model.drafts.head_files import fit_head
from model.text import VOCABULARIES
from model.weights.checkpoint import Checkpoint

NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(\S+))?")  # optional: a branch, tag or commit
WANTED = ["*.json", "*.model", "*.txt", "*.jinja"]
WEIGHTS = "*.safetensors", "pytorch_model*.bin"  # the first kind that exists is fetched
CONFIG = "config.json"
HALF = ".incomplete"  # in a folder while it is being filled
NETWORK_ERRORS = {"ConnectionError", "ConnectError", "Timeout", "TimeoutException"}  # of the libraries below the hub's
THEIR_HALVES = ".cache/huggingface/download/**/*.incomplete"  # what the hub's own programs leave when they break off


def words_of(raw: Mapping[str, str]) -> list[str]:
    """Return the words that replace `model=`: the model's folder, and its draft head if one is known.

    Raises ValueError, with the fix, for a model that is missing and cannot be fetched.
    """
    typed_model = raw["model"]
    root = models_folder(raw)
    local_path = Path(typed_model).expanduser()
    if local_path.exists():
        return [f"base_dir={local_path}"]

    hub_name = NAME.fullmatch(typed_model)
    if is_gguf(typed_model) or not hub_name:
        raise ValueError(f"model={typed_model} is no file or folder here: give the path of a folder or of a GGUF file, "
                         "or a name at the hub, as Qwen/Qwen3-4B or NAME@REVISION")

    name, revision = hub_name.groups()
    words = [f"base_dir={fetch(name, root, revision)}"]
    head = known_head(name)
    if head and not raw.keys() & {"eagle_dir", "draft", "drafts"}:
        words += _head_words(head, root)
    return words


def models_folder(raw: Mapping[str, str]) -> Path:
    """Return the root of the presets' models, and of those that are fetched by name."""
    return Path(raw.get("models") or MODELS_FOLDER).expanduser()


def words_of_preset(preset: RunConfig, raw: Mapping[str, str]) -> list[str]:
    """Return words with the folders of a preset's model and draft head, which are fetched if they are missing.

    A head is left out if the words `raw` name another one, or guesses without one.
    """
    root = models_folder(raw)
    preset = under(preset, str(root))
    base_name, head_name = (_name_of(folder, root) for folder in (preset.base_dir, preset.eagle_dir))
    words = [f"base_dir={fetch(base_name, root)}"] if base_name else []

    if not head_name or "eagle_dir" in raw:
        return words
    if "eagle" not in raw.get("draft", preset.draft):
        return [*words, "eagle_dir="]
    return words + (_head_words(head_name, root) or ["eagle_dir=", "draft=suffix"])


def _name_of(folder: str, root: Path) -> str:
    """Return the name at the hub of a folder below `root`; empty for another folder."""
    return Path(folder).relative_to(root).as_posix() if folder and root in Path(folder).parents else ""


def _head_words(name: str, root: Path) -> list[str]:
    """Return the words for a draft head of the hub; none if it cannot be fetched, which is reported."""
    try:
        return [f"eagle_dir={fetch(name, root, is_head=True)}"]
    except ValueError as error:
        say(f"{error}; without it, draft=suffix")
        return []


def known_head(name: str) -> str:
    """Return the name of a model's draft head if a preset has one, else an empty string."""
    for preset in PRESETS.values():
        if preset.eagle_dir and preset.base_dir == str(MODELS_FOLDER / name):
            return Path(preset.eagle_dir).relative_to(MODELS_FOLDER).as_posix()
    return ""


def head_here(model_name: str, model_dir: Path) -> str:
    """Return the folder of a preset's draft head that is on this disk and fits the model, else an empty string.

    `model_name`, of a folder or a GGUF file, begins with the name of the preset's model.
    """
    for preset in PRESETS.values():
        base_name = Path(preset.base_dir).name.lower()
        if preset.eagle_dir and model_name.lower().startswith(base_name):
            with suppress(ValueError):  # it is not here, or was made for another model
                fit_head(Checkpoint(preset.eagle_dir), Checkpoint(model_dir).config)
                return preset.eagle_dir
    return ""


def fetch(name: str, root: Path, revision: str | None = None, is_head: bool = False) -> Path:
    """Return the folder of a model or a head of the hub: below `root`, or in the hub's own cache if it is whole there.

    It is fetched if it is missing or incomplete. Raises ValueError, with the fix, if that fails.
    """
    folder = root / name
    if revision is None and _is_whole(folder):
        return folder

    cached = cached_snapshot(name, revision, is_head)
    if cached:
        say(f"{name} is taken from the hub's cache: {cached}")
        return cached

    try:
        _download(name, folder, revision)
    except ImportError:
        raise ValueError(f"{name} cannot be fetched without the package huggingface_hub: install it, or "
                         f"{_advice(name, folder, revision)}") from None
    except NoSpace:
        raise
    except Exception as error:  # the network, the hub and the library may raise anything
        is_of_network = not NETWORK_ERRORS.isdisjoint(kind.__name__ for kind in type(error).__mro__)
        cause = "the network or the hub does not answer" if is_of_network else short_repr(reason(error))[1:-1]
        raise ValueError(f"{name} cannot be fetched ({cause}): {_advice(name, folder, revision)}") from None
    return folder


def _is_whole(folder: Path) -> bool:
    """Whether a folder holds a model or a head, and no download into it has broken off."""
    has_half = (folder / HALF).is_file() or any(folder.glob(THEIR_HALVES))
    return (folder / CONFIG).is_file() and not has_half


def _download(name: str, folder: Path, revision: str | None) -> None:
    """Fetch a model into a folder, which is marked as incomplete meanwhile. Raises what the library raises, and NoSpace
    if the disk is too small."""
    from huggingface_hub import model_info, snapshot_download

    with one_at_a_time(folder.with_name(f".{folder.name}")):
        # fails without a hub, which the download would ignore
        available = model_info(name, revision=revision, files_metadata=True)
        files = available.siblings or []
        patterns = [*WANTED, _weights(each.rfilename for each in files)]

        matches = [partial(fnmatch.fnmatch, pat=pattern) for pattern in patterns]
        num_bytes = sum(each.size or 0 for each in files if any(match(each.rfilename) for match in matches))
        check_space(folder.parent, num_bytes, f"{name} has",
                    "free some space, or name a folder of another disk, models=DIR", folder.glob("**/*"))
        say(f"fetching {name}, {num_bytes / 1e9:.2f} GB, into {folder}, once")

        folder.mkdir(parents=True, exist_ok=True)
        (folder / HALF).touch()
        snapshot_download(name, revision=available.sha, local_dir=str(folder), allow_patterns=patterns)
        (folder / HALF).unlink()


def _advice(name: str, folder: Path, revision: str | None) -> str:
    """Return what a user can do where the hub cannot be reached."""
    options = f" --revision {revision}" if revision else ""
    again = "give the same command again, which goes on where it ended, or " if (folder / HALF).is_file() else ""
    steps = [f"{again}bring its config.json, tokenizer files and weights into {folder}, as hf download {name}{options} "
             f"--local-dir {folder} does where the network allows it"]
    if (folder / HALF).is_file():
        steps.append(f"delete {folder / HALF}")
    if revision:
        steps.append(f"give model={folder}")
    return ", and ".join(steps)


def cached_snapshot(name: str, revision: str | None, is_head: bool = False) -> Path | None:
    """Return the folder of a revision ("main" by default) in the cache of the hub's own programs, if it is whole there.

    A model is whole with its config, all weights that an index names, and a tokenizer, which a head does not need.
    """
    try:
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
        Checkpoint(folder)  # raises ValueError for a missing or incomplete file
    except (ImportError, OSError, ValueError):
        return None

    has_tokenizer = any((folder / file).is_file() for file in VOCABULARIES)
    return folder if has_tokenizer or is_head else None


def _weights(files: Iterable[str]) -> str:
    """Return the pattern of the files that hold the weights; raises ValueError if there are none."""
    file_names = list(files)
    for pattern in WEIGHTS:
        if fnmatch.filter(file_names, pattern):
            return pattern
    raise ValueError(f"it has no {' or '.join(WEIGHTS)}")
