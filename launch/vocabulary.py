"""Whether a small model knows the tokens of the model that it drafts for: what it guesses are numbers of tokens.

It reads the files of tokenizers, and compares what both models have; one that has no tokenizer beside it is believed.
"""
from __future__ import annotations

from pathlib import Path
from typing import Any

from config.files import fits
from config.schema.untrusted import read_json, shown
from model.text import VOCABULARIES, Text
from model.weights.checkpoint import Checkpoint
from model.weights.parts import Part

SPECIAL = ("bos_token_id", "eos_token_id")
ADDED = [{"id": int, "content": str}]  # tokens behind those of a vocabulary
OTHER = "take a small model that was made for the same tokenizer"


def check_tokens(small: Checkpoint, target: Part) -> None:
    """Refuse a small model whose tokens have other numbers than those of the model that rank 0 holds a part of.

    The ValueError names the file and the token.
    """
    for name in SPECIAL:
        theirs, ours = small.config.get(name), target.config.get(name)
        if _numbers(theirs) and _numbers(ours) and not _numbers(theirs) & _numbers(ours):
            raise ValueError(f"{small.folder / 'config.json'} has {name}={shown(theirs)}, but the model has "
                             f"{shown(ours)}: {OTHER}")
    path, known = vocabulary(small.folder), vocabulary(target.folder)
    if path is None or known is None or _same(path, known):
        return
    theirs_by_number, ours_by_number = tokens(path), tokens(known)
    for number in sorted(theirs_by_number.keys() & ours_by_number.keys()):
        found, wanted = theirs_by_number[number], ours_by_number[number]
        if found != wanted:
            raise ValueError(f"{path} calls token {number} {shown(found)}, but the model's {known.name} calls it "
                             f"{shown(wanted)}: {OTHER}")


def vocabulary(folder: Path) -> Path | None:
    """The file of a folder that makes its tokenizer, if there is one."""
    return next((folder / name for name in VOCABULARIES if (folder / name).is_file()), None)


def tokens(path: Path) -> dict[int, str]:
    """The tokens of a vocabulary by their numbers. ValueError for a file that holds none."""
    if path.suffix != ".json":
        known = Text(path.parent).tokenizer.get_vocab()
        return {number: token for token, number in known.items()}
    held = read_json(path)
    if path.name != "tokenizer.json":
        held = {"model": {"vocab": held}}
    added = held.get("added_tokens", [])
    if not fits(held, FORM) or not fits(added, ADDED):
        raise ValueError(f"{path} holds no vocabulary: copy it again from its model")
    words = held["model"]["vocab"]
    if isinstance(words, list):
        found = {number: word for number, (word, _) in enumerate(words)}
    else:
        found = {number: word for word, number in words.items()}
    found.update((entry["id"], entry["content"]) for entry in added)
    return found


def _is_vocabulary(value: Any) -> bool:
    """Whether it is a table of tokens with their numbers or, of a unigram model, a list of them with their scores."""
    if isinstance(value, list):
        return fits(value, [(str, float)])
    return isinstance(value, dict) and all(fits(number, int) for number in value.values())


def _same(path: Path, other: Path) -> bool:
    return path.name == other.name and path.read_bytes() == other.read_bytes()


def _numbers(value: Any) -> set[int]:
    """The numbers of tokens that a field names: none, one or several."""
    named = value if isinstance(value, list) else [value]
    return {number for number in named if isinstance(number, int)}


FORM = {"model": {"vocab": _is_vocabulary}}  # of a tokenizer.json
