"""The corpus: dialogues of six kinds in the Vicuna template, and the standard library's source. It knows no tokens."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from itertools import cycle, islice, zip_longest
from pathlib import Path

from fastchat.conversation import get_conv_template

from launch.progress import ProgressBar
from toy.corpus.tasks.code import code
from toy.corpus.tasks.conversation import conversation
from toy.corpus.tasks.grammar import DialogueTurns, PhraseWriter
from toy.corpus.tasks.instructions import instructions
from toy.corpus.tasks.maths import maths
from toy.corpus.tasks.news import news
from toy.corpus.tasks.questions import questions

TASKS: dict[str, Callable[[PhraseWriter], DialogueTurns]] = {
    "mt_bench": conversation, "humaneval": code, "gsm8k": maths, "alpaca": instructions, "sum": news, "qa": questions,
}
TRAIN, HELD_OUT = "flowspec train", "flowspec held out"  # seeds
QUESTIONS_PER_TASK = 20  # bundled questions, which are not in the corpus
SKIPPED_FOLDERS = {"test", "idlelib", "site-packages", "__pycache__", "lib2to3", "encodings", "turtledemo", "ensurepip",
                   "pydoc_data"}


def dialogue(question_texts: list[str], answers: list[str]) -> str:
    """Return the text of a dialogue for the model; a last question without an answer ends after `ASSISTANT:`."""
    template = get_conv_template("vicuna_v1.1")
    for question, answer in zip_longest(question_texts, answers):
        template.append_message(template.roles[0], question)
        template.append_message(template.roles[1], answer)
    return template.get_prompt()


def dialogues(num_dialogues: int, seed: str = TRAIN) -> Iterator[DialogueTurns]:
    """Yield dialogues, the six kinds in turn, so that any part of the stream is a fair mixture."""
    task_writers = [(task, PhraseWriter(f"{seed} {name}")) for name, task in TASKS.items()]
    for task, writer in islice(cycle(task_writers), num_dialogues):
        yield task(writer)


def library_sources(max_characters: int) -> Iterator[str]:
    """Yield sources of the running interpreter's standard library in the order of their names, up to a total length."""
    library_folder = Path(sysconfig.get_path("stdlib"))
    total_characters = 0
    for path in sorted(library_folder.rglob("*.py")):
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(library_folder).parts):
            source_text = path.read_text(encoding="utf-8", errors="ignore")
            total_characters += len(source_text)
            if total_characters > max_characters:
                return
            yield source_text


def _write_lines(path: Path, entries: Iterable[object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in entries)


def write(folder: Path, num_dialogues: int, max_source_characters: int) -> None:
    """Write `dialogues.jsonl`, one dialogue (questions, answers) per line, and `library.jsonl`, one source per line."""
    progress_bar = ProgressBar(dialogues(num_dialogues), total=num_dialogues, desc="dialogues")
    _write_lines(folder / "dialogues.jsonl", progress_bar)
    _write_lines(folder / "library.jsonl", library_sources(max_source_characters))


def read(folder: Path, name: str) -> Iterator:
    """Yield the entries of a file of `write`: `dialogues`, or the `library`."""
    with (folder / f"{name}.jsonl").open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def held_out(task_name: str, num_dialogues: int, corpus_questions: set[str]) -> list[DialogueTurns]:
    """Return dialogues by another seed, with different first questions that are not in the corpus."""
    writer = PhraseWriter(f"{HELD_OUT} {task_name}")
    turns_of: dict[str, DialogueTurns] = {}  # by the first question

    while len(turns_of) < num_dialogues:
        turns = conversation(writer, has_two_turns=True) if task_name == "mt_bench" else TASKS[task_name](writer)
        first_question = turns[0][0]
        if first_question not in corpus_questions:
            turns_of.setdefault(first_question, turns)

    return list(turns_of.values())


def bundled_dialogues(work_dir: Path) -> Iterator[tuple[str, DialogueTurns]]:
    """Yield each dialogue that `write_questions` writes, with the name of its task."""
    corpus_questions = {question_texts[0] for question_texts, _ in read(work_dir, "dialogues")}
    for task_name in TASKS:
        for turns in held_out(task_name, QUESTIONS_PER_TASK, corpus_questions):
            yield task_name, turns


def bundled_questions(work_dir: Path) -> list[str]:
    """Return the first question of every dialogue that `write_questions` writes."""
    return [question_texts[0] for _, (question_texts, _) in bundled_dialogues(work_dir)]


def write_questions(folder: Path, work_dir: Path) -> None:
    """Write a file for each task in MT-bench's question format; ids continue from file to file."""
    rows_of: dict[str, list[dict[str, object]]] = {task_name: [] for task_name in TASKS}
    for question_id, (task_name, (question_texts, answers)) in enumerate(bundled_dialogues(work_dir), 1):
        row = {"question_id": question_id, "category": task_name, "turns": question_texts, "reference": answers}
        rows_of[task_name].append(row)

    for task_name, rows in rows_of.items():
        _write_lines(folder / f"{task_name}.jsonl", rows)
