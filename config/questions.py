"""The data sets: questions in the format of MT-bench, or SpecInfer's lists of prompts, from a folder or a file.

It knows nothing about templates, and about a model only which of the bundled questions suit it.
"""
from __future__ import annotations

from dataclasses import dataclass
from filecmp import cmp
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Iterator, Sequence

from config.files import fits, lines, read_json_file
from config.presets import ROOT, TOY

TOY_QUESTIONS = ROOT / "eval" / "data"  # in the vocabulary of the toy model's grammar
BUNDLED_FOLDER = TOY_QUESTIONS / "real"  # for every other model
SET_FILES = ("{}/question.jsonl", "{}.jsonl", "{}.json")  # files of a set, by its name; the last one is SpecInfer's

LINE_REMEDY = ('write one JSON object per line, with a "question_id" and with "turns", a list of texts that are not '
               "empty")
UNFETCHED_TEXT = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # begins SPEED-Bench's placeholder for a text of somebody else
LIST_REMEDY = 'write a list of texts, as ["a text", "another"]'


@dataclass(frozen=True)
class Question:
    """The user's turns of one conversation. In a data set, each question has an `id` of its own."""

    id: int | str | None
    category: str
    turns: tuple[str, ...]


def bundled(model: str | Path) -> Path:
    """Return the folder of the bundled questions for the model, or for rank 0's part of it, in the folder `model`."""
    model_file, toy_file = (Path(folder) / "tokenizer.json" for folder in (model, TOY / "llama"))
    is_toy = model_file.is_file() and toy_file.is_file() and cmp(model_file, toy_file, shallow=False)
    return TOY_QUESTIONS if is_toy else BUNDLED_FOLDER


def load(data: str | Path, name: str, begin: int = 0, end: int = -1) -> list[Question]:
    """Return the questions `begin` to `end` - 1 (-1: to the last one) of a set in the folder `data`.

    If `data` is a file, such as Spec-Bench's or SPEED-Bench's, its categories are the sets. Raises ValueError, with the
    line and the fix, if the file is missing, invalid or too short.
    """
    folder = Path(data)
    if folder.is_file():
        all_questions = list(_distinct(folder, ""))
        questions = [question for question in all_questions if question.category == name]
        if all_questions and not questions:
            category_names = ", ".join(sorted({question.category for question in all_questions}))
            raise ValueError(f"{folder} has no question of the category {name} (known: {category_names}): choose "
                             "others with sets=")
        return _chosen(questions, folder, begin, end)

    possible_paths = (folder / set_file.format(name) for set_file in SET_FILES)
    path = next(filter(Path.is_file, possible_paths), None)
    if path is None:
        set_names = ", ".join(sorted(_set_names(folder))) or "none"
        file_names = " or ".join(set_file.format(name) for set_file in SET_FILES)
        raise ValueError(f"there is no data set {name} in {folder} (known: {set_names}): choose others with sets=, or "
                         f"another folder with data=; a set is a file {file_names}")

    return _chosen(list(_distinct(path, name)), path, begin, end)


def categories(path: str | Path) -> list[str]:
    """Return the categories of the questions in a file, in the file's order. Raises ValueError as `load` does."""
    return list(dict.fromkeys(question.category for question in _distinct(Path(path), "")))


def by_turns(data: str | Path, names: Sequence[str],
             begin: int = 0, end: int = -1) -> list[str]:
    """Return the first turns of these questions of several sets, alternating between the sets."""
    sets = [load(data, name, begin, end) for name in names]
    questions = chain.from_iterable(zip_longest(*sets))
    return [question.turns[0] for question in questions if question]


def read(path: str | Path, begin: int = 0, end: int = -1) -> list[Question]:
    """Return questions `begin` to `end` - 1 of a single file; ids are optional. Raises ValueError as `load` does."""
    path = Path(path)
    questions = [question for _, question in _questions(path, "")]
    return _chosen(questions, path, begin, end)


def _chosen(questions: Sequence[Question], path: Path, begin: int, end: int) -> list[Question]:
    chosen = questions[begin:None if end < 0 else end]
    if not chosen and not questions:
        raise ValueError(f"{path} has no questions: {LINE_REMEDY}")
    if not chosen:
        raise ValueError(f"questions={begin}: leaves no question of {path}, which has {len(questions)}: "
                         "begin with a smaller number")
    return list(chosen)


def _set_names(folder: Path) -> Iterator[str]:
    """Yield the names of the sets in a folder."""
    for path in folder.glob("*") if folder.is_dir() else ():
        if path.suffix in (".json", ".jsonl") or (path / "question.jsonl").is_file():
            yield path.stem


def _distinct(path: Path, name: str) -> Iterator[Question]:
    """Yield the questions of a set. Raises ValueError for a missing or repeated id."""
    line_of_id: dict[Any, str] = {}
    for line_name, question in _questions(path, name):
        if question.id is None:
            raise ValueError(f"{line_name} of {path} has no \"question_id\": give each question its own")
        first_line = line_of_id.setdefault(question.id, line_name)
        if first_line != line_name:
            raise ValueError(f"{line_name} of {path} has the question_id {question.id!r} of {first_line}: give each "
                             "question its own")
        yield question


def _questions(path: Path, name: str) -> Iterator[tuple[str, Question]]:
    """Yield the questions of a file in either format, with their lines or entries; `name` is the default category."""
    yield from _prompts(path, name) if path.suffix == ".json" else _dialogues(path, name)


def _dialogues(path: Path, name: str) -> Iterator[tuple[str, Question]]:
    """Yield the questions of a file in MT-bench's format: one JSON object per line."""
    for line_number, entry in lines(path, LINE_REMEDY):
        if not fits(entry, {"turns": [is_text]}) or not entry["turns"]:
            raise ValueError(f"line {line_number} of {path} is not a question: {LINE_REMEDY}")

        question_id, category = entry.get("question_id"), entry.get("category", name)
        has_valid_id = question_id is None or isinstance(question_id, (int, str))
        if not has_valid_id or not isinstance(category, str):
            raise ValueError(f"line {line_number} of {path} has a \"question_id\" that is not a number or text, or a "
                             "\"category\" that is not a text: write one, or leave it out")
        if any(turn.startswith(UNFETCHED_TEXT) for turn in entry["turns"]):
            raise ValueError(f"line {line_number} of {path} has SPEED-Bench's placeholder instead of a text: fetch the "
                             "texts with its own script, and give that file")

        yield f"line {line_number}", Question(question_id, category, tuple(entry["turns"]))


def _prompts(path: Path, name: str) -> Iterator[tuple[str, Question]]:
    """Yield the prompts of a file in SpecInfer's format, a JSON list of texts; an id is an index, from 0."""
    entries = read_json_file(path, LIST_REMEDY)
    if not isinstance(entries, list):
        raise ValueError(f"{path} is not a list: {LIST_REMEDY}, or one JSON object per line into a file .jsonl")
    for index, entry in enumerate(entries):
        if not is_text(entry):
            raise ValueError(f"entry {index + 1} of the list in {path} is not a text: write one, or leave it out")
        yield f"entry {index + 1}", Question(index, name, (entry,))


def is_text(turn: Any) -> bool:
    """Whether a value is a text that is not empty."""
    return isinstance(turn, str) and bool(turn.strip())
