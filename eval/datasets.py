"""The data sets: questions in the format of MT-bench, or SpecInfer's lists of prompts, from a folder.

It knows nothing about models or templates.
"""
from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator

BUNDLED = Path(__file__).resolve().parent / "data"
FORMS = ("{}/question.jsonl", "{}.jsonl", "{}.json")  # of the set's name; the last one is SpecInfer's


@dataclass(frozen=True)
class Question:
    """What a user says, turn by turn; `id` is unique in its set."""

    id: int | str
    category: str
    turns: tuple[str, ...]


def load(data: str | Path, name: str, begin: int = 0, end: int = -1) -> list[Question]:
    """The questions `begin` to `end` - 1 (-1: to the last one) of a set in the folder `data` (empty: the bundled ones).

    Raises ValueError, with the line and the fix, if the file is not there, not sound or too short.
    """
    folder = Path(data) if data else BUNDLED
    path = next((folder / form.format(name) for form in FORMS if (folder / form.format(name)).is_file()), None)
    if path is None:
        there = ", ".join(sorted(_there(folder))) or "none"
        raise ValueError(f"there is no data set {name} in {folder} (there: {there}): choose others with sets=, or "
                         f"another folder with data=; a set is a file {' or '.join(FORMS).format(*[name] * 3)}")
    found = list(_prompts(path, name) if path.suffix == ".json" else _questions(path, name))
    chosen = found[begin:None if end < 0 else end]
    if not chosen:
        raise ValueError(f"question_begin={begin} leaves no question of {path}, which has {len(found)}: give less")
    return chosen


def _there(folder: Path) -> Iterator[str]:
    """The names of the sets in a folder."""
    for path in folder.glob("*") if folder.is_dir() else ():
        if path.suffix in (".json", ".jsonl") or (path / "question.jsonl").is_file():
            yield path.stem


def _questions(path: Path, name: str) -> Iterator[Question]:
    """MT-bench's format: one JSON object a line."""
    lines: dict[Any, int] = {}
    for number, line in enumerate(_read(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            question = Question(entry["question_id"], entry.get("category", name), tuple(entry["turns"]))
            if not isinstance(question.id, (int, str)) or isinstance(entry["turns"], str) or not _spoken(question):
                raise TypeError
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"line {number} of {path} is no question: write a JSON object with a \"question_id\" and "
                             "with \"turns\", a list of texts") from None
        if lines.setdefault(question.id, number) != number:
            raise ValueError(f"line {number} of {path} has the question_id {question.id} of line {lines[question.id]}: "
                             "give each question its own")
        yield question


def _prompts(path: Path, name: str) -> Iterator[Question]:
    """SpecInfer's format: one JSON list of texts, which may repeat; a question's id is its place, from 0."""
    try:
        entries = json.loads(_read(path))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}): write a list of texts") from None
    if not isinstance(entries, list):
        raise ValueError(f"{path} is no list: write [\"a text\", \"another\"], or name a file of lines {name}.jsonl")
    for number, entry in enumerate(entries):
        if not isinstance(entry, str) or not entry.strip():
            raise ValueError(f"entry {number + 1} of the list in {path} is no text: write one, or leave it out")
        yield Question(number, name, (entry,))


def _spoken(question: Question) -> bool:
    return bool(question.turns) and all(isinstance(turn, str) and turn.strip() for turn in question.turns)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}): save it as UTF-8") from None
