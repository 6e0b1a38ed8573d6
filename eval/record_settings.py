"""With which keys a record was made: folders by what is in them, so that a record is good wherever they lie."""
from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, Sequence

from config.run_config import RunConfig
from config.templates import chosen, tokenizer_folder

FOLDERS = ("base_dir", "model_dir", "eagle_dir", "draft_dir", "ssm", "data")  # of such keys, those that name folders
BEGINNING = 1 << 20  # bytes of a file that are compared: of weights their shapes, and the first of them


def settings_of(config: RunConfig, keys: Sequence[str]) -> dict[str, Any]:
    """The values of these keys, of folders what is in them, so that a record is good wherever they lie."""
    values = {key: getattr(config, key) for key in keys}
    if "template" in keys:
        values["template"] = chosen(config.template, tokenizer_folder(config))
    return {key: ",".join(map(_content, value.split(","))) if key in FOLDERS else value
            for key, value in values.items()}


def _content(folder: str) -> str:
    """A folder by its name, and by names, sizes and beginnings of its files; as it is, if there is none."""
    if not folder or not Path(folder).is_dir():
        return folder
    digest = hashlib.sha256()
    names = (path.relative_to(folder) for path in Path(folder).rglob("*") if path.is_file())
    for name in sorted(name for name in names if not any(part.startswith(".") for part in name.parts)):
        with open(Path(folder, name), "rb") as file:
            begins = hashlib.sha256(file.read(BEGINNING)).hexdigest()
            digest.update(f"{name.as_posix()} {os.fstat(file.fileno()).st_size} {begins}\n".encode())
    return f"{Path(folder).name} ({digest.hexdigest()[:12]})"


def check_settings(path: Path, recorded: dict[str, Any], asked: dict[str, Any], other: str) -> None:
    """Refuse a record that was made with other keys than are asked for; `other` is what to do then."""
    for key, value in asked.items():
        if recorded.get(key) != value:
            raise ValueError(f"{path} was recorded with {key}={recorded.get(key)}, and {key}={value} is asked for: "
                             f"{other}")
