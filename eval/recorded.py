"""A recorded text in the place of a target, and recorded matches in the place of a drafter: no model is computed.

The target says the next token of the text for a row on the text. What it says of other rows is never read, since a row
below a wrong guess is dead when its answer is judged. The drafter guesses the next token where it did so in the record,
and another one elsewhere. A chain of guesses is right as long as it equals the text, so for a chain the record is all
that there is to know.

Shapes: T rows, V vocabulary.
"""
from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Mapping, NamedTuple, Sequence

import torch
from torch import Tensor

from config.command import CommandKeys, flat
from model.cache import Admitted, TreeCache
from model.drafts.network import ModelDraft
from model.text import chosen

ASIDE = -2  # every path that has left the text
FOLDERS = {"base_dir", "model_dir", "eagle_dir", "draft_dir", "ssm", "data"}  # of such keys, those that name folders
BEGINNING = 1 << 20  # bytes of a file that are compared: of weights their shapes, and the first of them


class Record(NamedTuple):
    """A prompt, the text that the target writes behind it, and for each token of it whether a drafter foresees it."""

    prompt: Sequence[int]
    text: Sequence[int]
    matches: Sequence[int]


class Recorded:
    """The target as `sim/cluster.py` asks for it, over the record of one request; `vocab` is how many tokens there are.

    A path along the text is known by the position of its last token.
    """

    root = -1
    full = False

    def __init__(self, record: Record, vocab: int) -> None:
        self.record, self.vocab = record, vocab

    def clear(self) -> None:
        """There is nothing to forget."""

    def after(self, path: int, token: int) -> int:
        """The number of a path with one more token."""
        position = path + 1
        return position if path != ASIDE and self._stands(position, token) else ASIDE

    def said(self, paths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The token that follows each path, as a column `[T, 1]` for `lm_head`; there are no inner features."""
        said_T1 = torch.tensor([self._next(path) for path in paths],
                               dtype=torch.float64)[:, None]
        return said_T1, said_T1.new_empty(len(said_T1), 0)

    def lm_head(self, said_T1: Tensor) -> Tensor:
        """Logits `[T, V]` that leave no choice, out of the tokens of `said`."""
        logits_TV = said_T1.new_full((len(said_T1), self.vocab), float("-inf"))
        return logits_TV.scatter(1, said_T1.long(), 0.0)

    def draft(self, slots: int) -> ModelDraft:
        """The drafter of the record, with an empty cache of so many slots."""
        return ModelDraft(self._read, self.lm_head,
                          TreeCache((0, 1, slots, 1), torch.float64, "cpu"))

    def _read(self, token_T: Tensor, pos_T: Tensor, cache: Admitted) -> Tensor:
        """The guess after each row `[T, 1]`.

        Below a wrong guess all are wrong. So a token that equals the text at its position has only text before it.
        """
        guesses = list(map(self._guess, pos_T.tolist(), token_T.tolist()))
        return torch.tensor(guesses, dtype=torch.float64)[:, None]

    def _guess(self, position: int, token: int) -> int:
        place = position + 1 - len(self.record.prompt)
        is_text = 0 <= place < len(self.record.text)
        is_right = is_text and self.record.matches[place] and self._stands(position, token)
        return (self._next(position) + (not is_right)) % self.vocab

    def _stands(self, position: int, token: int) -> bool:
        """Whether a token is that of the prompt or text at a position, where those before it are."""
        text, place = self.record.text, position - len(self.record.prompt)
        return place < 0 or place < len(text) and text[place] == token

    def _next(self, position: int) -> int:
        """The token of the text behind a position; any, where there is none."""
        place = position + 1 - len(self.record.prompt)
        return self.record.text[place] if 0 <= place < len(self.record.text) else 0


# --- which keys made a record -----------------------------------------------------------------------------------------

def settings_of(config: CommandKeys, keys: Sequence[str]) -> dict[str, Any]:
    """The values of these keys, of folders what is in them, so that a record is good wherever they lie."""
    values = {key: value for key, value in flat(config).items() if key in keys}
    if "template" in keys:
        values["template"] = chosen(config.run.template, config.run.first_folder)
    for key in FOLDERS & values.keys():
        values[key] = ",".join(map(_content, values[key].split(",")))
    return values


def _content(folder: str) -> str:
    """A folder by its name, and by names, sizes and beginnings of its files; as it is, if there is none."""
    if not folder or not Path(folder).is_dir():
        return folder
    digest = hashlib.sha256()
    for path in sorted(path for path in Path(folder).rglob("*")
                       if path.is_file()):
        name = path.relative_to(folder)
        if not any(part.startswith(".") for part in name.parts):
            with path.open("rb") as file:
                begins = hashlib.sha256(file.read(BEGINNING)).hexdigest()
            digest.update(f"{name.as_posix()} {path.stat().st_size} {begins}\n".encode())
    return f"{Path(folder).name} ({digest.hexdigest()[:12]})"


def check_settings(path: Path, recorded: Mapping[str, Any],
                   asked: Mapping[str, Any], other: str) -> None:
    """Refuse a record that was made with other keys than are asked for; `other` is what to do then."""
    for key, value in asked.items():
        if recorded.get(key) != value:
            raise ValueError(f"{path} was recorded with {key}={recorded.get(key)}, and {key}={value} is asked for: "
                             f"{other}")
