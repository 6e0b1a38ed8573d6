"""The corpus: dialogues of six kinds in the Vicuna template, and the standard library's source. It knows no tokens."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

from fastchat.conversation import get_conv_template

from launch.progress import ProgressBar
from toy.corpus.tasks.code import code
from toy.corpus.tasks.conversation import conversation
from toy.corpus.tasks.grammar import Writer
from toy.corpus.tasks.instructions import instructions
from toy.corpus.tasks.maths import maths
from toy.corpus.tasks.news import news
from toy.corpus.tasks.questions import questions

Turns = tuple[list[str], list[str]]
TASKS: dict[str, Callable[[Writer], Turns]] = {
    "mt_bench": conversation, "humaneval": code, "gsm8k": maths, "alpaca": instructions, "sum": news, "qa": questions,
}
TRAIN, HELD_OUT = "flowspec train", "flowspec held out"  # seeds
QUESTIONS = 20  # bundled questions of each task, which are not in the corpus
FOLDED = ("test", "idlelib", "site-packages", "__pycache__", "lib2to3", "encodings", "turtledemo", "ensurepip",
          "pydoc_data")


def dialogue(asked: list[str], answers: list[str]) -> str:
    """Return the text of a dialogue for the model; a last question without an answer ends after `ASSISTANT:`."""
    talk = get_conv_template("vicuna_v1.1")
    for i, question in enumerate(asked):
        talk.append_message(talk.roles[0], question)
        talk.append_message(talk.roles[1], answers[i] if i < len(answers) else None)
    return talk.get_prompt()


def dialogues(count: int, seed: str = TRAIN) -> Iterator[tuple[list[str], list[str]]]:
    """Yield `count` dialogues, the six kinds in turn, so that any part of the stream is a fair mixture."""
    writers = [(task, Writer(f"{seed} {name}")) for name, task in TASKS.items()]
    for i in range(count):
        task, writer = writers[i % len(writers)]
        yield task(writer)


def library(limit: int) -> Iterator[str]:
    """Yield sources of the running interpreter's standard library, in the order of their names, up to `limit` bytes."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if not any(part in FOLDED for part in path.relative_to(root).parts):
            text = path.read_text(encoding="utf-8", errors="ignore")
            limit -= len(text)
            if limit < 0:
                return
            yield text


def write(folder: Path, count: int, source_bytes: int) -> None:
    """Write `dialogues.jsonl`, one dialogue (questions, answers) per line, and `library.jsonl`, one source per line."""
    folder.mkdir(parents=True, exist_ok=True)
    talks = ProgressBar(dialogues(count), total=count, desc="dialogues")
    for name, entries in (("dialogues", talks), ("library", library(source_bytes))):
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(entry) + "\n" for entry in entries)


def read(folder: Path, name: str) -> Iterator:
    """Yield the entries of a file of `write`: `dialogues`, or the `library`."""
    with (folder / f"{name}.jsonl").open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def seen(folder: Path) -> set[str]:
    """Return the first question of every dialogue of the training corpus."""
    return {asked[0] for asked, _ in read(folder, "dialogues")}


def held_out(task: str, count: int, known: set[str]) -> list[Turns]:
    """Return `count` dialogues by another seed, with first questions that are not in `known`."""
    writer, found = Writer(f"{HELD_OUT} {task}"), dict[str, Turns]()
    while len(found) < count:
        talk = conversation(writer, turns=2) if task == "mt_bench" else TASKS[task](writer)
        if talk[0][0] not in known:
            found.setdefault(talk[0][0], talk)
    return list(found.values())


def bundled(work: Path) -> list[str]:
    """Return the first question of every dialogue that `write_questions` writes."""
    known = seen(work)
    return [asked[0] for task in TASKS for asked, _ in held_out(task, QUESTIONS, known)]


def write_questions(folder: Path, work: Path) -> None:
    """Write a file for each task in MT-bench's question format; ids continue from file to file."""
    folder.mkdir(parents=True, exist_ok=True)
    known = seen(work)
    for place, task in enumerate(TASKS):
        with (folder / f"{task}.jsonl").open("w", encoding="utf-8") as file:
            for number, (asked, answers) in enumerate(held_out(task, QUESTIONS, known), 1 + place * QUESTIONS):
                row = {"question_id": number, "category": task, "turns": asked, "reference": answers}
                file.write(json.dumps(row) + "\n")
