"""A recorded text in place of a target, so that no model is computed; and files of records that fit a command.

For a row on the text, the target returns the next token of the text. Its result for other rows is never read, since a
row below a wrong guess is dead by the time its answer is verified.

Shapes: T rows, V vocabulary.
"""
from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Mapping, Sequence

import torch
from torch import Tensor

from config.cli import CommandKeys, flat
from config.files import read_json_file, write_json
from config.run_config import RunConfig
from launch import build
from model.sample import Sampler
from model.text import chosen

OFF_TEXT = -2  # every path that has left the text
FOLDER_KEYS = {"base_dir", "model_dir", "eagle_dir", "draft_dir", "ssm", "data"}  # keys that name folders
HASHED_BYTES = 1 << 20  # bytes of a file that are compared: the shapes of weights, and the first weights


class Recorded:
    """A target for `sim/cluster.py` that writes a recorded text; `vocab` is the number of tokens.

    A path along the text is identified by the position of its last token.
    """

    root = -1
    full = False

    def __init__(self, vocab: int, prompt: Sequence[int] = (), text: Sequence[int] = ()) -> None:
        self.vocab = vocab
        self.prompt, self.text = prompt, text  # of the next request

    def clear(self) -> None:
        """Do nothing, since there is no state."""

    def after(self, path: int, token: int) -> int:
        """Return the number of a path with one more token."""
        position = path + 1
        text_index = position - len(self.prompt)
        is_in_prompt = text_index < 0
        is_on_text = is_in_prompt or (text_index < len(self.text) and self.text[text_index] == token)
        return position if path != OFF_TEXT and is_on_text else OFF_TEXT

    def outputs(self, paths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the token that follows each path, as a column `[T, 1]` for `lm_head`, and no inner features."""
        tokens_T = torch.tensor([self.next(path) for path in paths], dtype=torch.float64)
        tokens_T1 = tokens_T[:, None]
        return tokens_T1, tokens_T1.new_empty(len(tokens_T1), 0)

    def lm_head(self, tokens_T1: Tensor) -> Tensor:
        """Return logits `[T, V]` that allow only these tokens."""
        logits_TV = tokens_T1.new_full((len(tokens_T1), self.vocab), float("-inf"))
        return logits_TV.scatter(1, tokens_T1.long(), 0.0)

    def next(self, position: int) -> int:
        """Return the token of the text after a position, or any token outside the text."""
        text_index = position + 1 - len(self.prompt)
        return self.text[text_index] if 0 <= text_index < len(self.text) else 0


def sampler_of(run: RunConfig) -> Sampler:
    """Return the sampler of the target's tokens."""
    return replace(build.sampler_of(run), rule="match")


# --- the settings of a record -----------------------------------------------------------------------------------------

def settings_of(config: CommandKeys, keys: Sequence[str]) -> dict[str, Any]:
    """Return the values of these keys, with folders by their content, so that a record is valid if they are moved."""
    values = {key: value for key, value in flat(config).items() if key in keys}
    if "template" in keys:
        values["template"] = config.run.chat_template or chosen(config.run.template, config.run.first_folder)
    for key in FOLDER_KEYS & values.keys():
        values[key] = ",".join(map(_content, values[key].split(",")))
    return values


def _content(folder: str) -> str:
    """Return a folder's name with a hash of its files' names, sizes and beginnings; a missing folder as it is."""
    if not folder or not Path(folder).is_dir():
        return folder

    digest = hashlib.sha256()
    for file_path in sorted(filter(Path.is_file, Path(folder).rglob("*"))):
        relative_path = file_path.relative_to(folder)
        if not any(part.startswith(".") for part in relative_path.parts):
            with file_path.open("rb") as open_file:
                beginning_hash = hashlib.sha256(open_file.read(HASHED_BYTES)).hexdigest()
            digest.update(f"{relative_path.as_posix()} {file_path.stat().st_size} {beginning_hash}\n".encode())

    return f"{Path(folder).name} ({digest.hexdigest()[:12]})"


def save(path: str, settings: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    """Write content that was recorded with these settings into a file that `load` reads."""
    record = {"keys": settings, **content}
    write_json(path, {**record, "sha256": _digest(record)}, indent=None)


def load(path: str, settings: Mapping[str, Any], predicate: str, remedy: str) -> Any:
    """Return the content of a file that was recorded with these settings; None if it does not exist.

    Raise ValueError, with the `remedy`, for a file with other settings, or one that `save` did not write; `predicate`
    is the predicate of the latter's message.
    """
    if not path or not Path(path).is_file():
        return None

    record = read_json_file(path, remedy)
    written_digest = record.pop("sha256", "") if isinstance(record, dict) else ""
    if written_digest != _digest(record):
        raise ValueError(f"{path} {predicate}: {remedy}")

    for key_name, value in settings.items():
        recorded_value = record["keys"].get(key_name)
        if recorded_value != value:
            raise ValueError(f"{path} was recorded with {key_name}={recorded_value}, and {key_name}={value} is "
                             f"requested: {remedy}")
    return record


def _digest(record: Any) -> str:
    """Return a checksum, which shows that a file is read as it was written."""
    return hashlib.sha256(json.dumps(record).encode()).hexdigest()


def check_room(prompts: Sequence[Sequence[int]], max_new_tokens: int, context: int) -> None:
    """Raise ValueError if a prompt and an answer of `max_new_tokens` tokens may not fit into a context."""
    max_length = max(map(len, prompts))
    if max_length + max_new_tokens > context:
        raise ValueError(f"a prompt of {max_length} tokens leaves no room for max_new_tokens={max_new_tokens} in a "
                         f"context of {context}: give less, or other sets= or questions")
