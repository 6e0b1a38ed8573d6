"""The lessons of a training: a file of conversations as rows to learn from, and questions that are held out.

Tokenizing takes minutes, so a file keeps them for when the training goes on. Only its user may read it,
since it holds conversations. One that is broken, or was made of anything else, is not read.
"""
from __future__ import annotations

import io
import json
import random
from argparse import Namespace
from pathlib import Path
from typing import NamedTuple

import torch

from config.files import ANOTHER, ROOM, make_private, replace
from config.schema.untrusted import read_bytes
from model.text import SETTINGS, TOKENIZER_FILES, Text
from train.data import Row, make_rows, read_conversations
from train.terms import digest

FILE = "lessons.pt"
NEW_TOKENS = 128  # of an answer to a question that is held out
WORDS = ("template", "limit", "held_out", "judged", "seed")  # of the command, which decide what the lessons are


class Lessons(NamedTuple):
    """The conversations as rows to learn from, and the questions of those that are held out."""

    rows: list[Row]
    prompts: list[list[int]]
    ends: frozenset[int]


def fingerprint(args: Namespace, length: int) -> str:
    """What differs for other data, another tokenizer or other words."""
    files = [args.model_dir / name for name in (*TOKENIZER_FILES, *SETTINGS)]
    there = [path for path in files if path.is_file()]
    hashes = {path.name: digest(read_bytes(path, ANOTHER)) for path in there}
    words = [getattr(args, name) for name in WORDS]
    content = [digest(read_bytes(args.data, ANOTHER)), hashes, words, length]
    return digest(json.dumps(content).encode())


def _load(path: Path, mark: str) -> Lessons | None:
    """The lessons of this fingerprint in a file; None if it has none."""
    try:
        found = torch.load(path, weights_only=True)
        sizes = found["sizes"]
        rows = map(Row, found["ids"].split(sizes), found["answers"].split(sizes))
        lessons = Lessons(list(rows), found["prompts"], frozenset(found["ends"]))
        return lessons if found["mark"] == mark else None
    except Exception:  # what torch raises on a broken file is not written anywhere
        return None


def _store(path: Path, mark: str, lessons: Lessons) -> None:
    """Write the file, whole or not at all. Raises ValueError if that cannot be."""
    rows, content = lessons.rows, io.BytesIO()
    torch.save({
        "mark": mark,
        "sizes": [len(row.ids) for row in rows],
        "ids": torch.cat([row.ids for row in rows]),
        "answers": torch.cat([row.answers for row in rows]),
        "prompts": lessons.prompts,
        "ends": sorted(lessons.ends)}, content)
    try:
        make_private(path)
        replace(path, content.getvalue())
    except OSError as error:
        raise ValueError(f"{path} cannot be written ({error.strerror}): {ROOM}") from error


def read_lessons(args: Namespace, context: int) -> Lessons:
    """The lessons in `--data` for a model of so many positions, which OUT_DIR keeps until the training has ended.

    Raises ValueError if nothing could be learnt from them.
    """
    length, path = min(args.length, context), args.out_dir / FILE
    mark = fingerprint(args, length)
    lessons = _load(path, mark)
    if lessons:
        print(f"train_eagle: takes the tokens of {len(lessons.rows)} conversations from {path}")
        return lessons
    lessons = _made(args, length)
    _store(path, mark, lessons)
    print(f"train_eagle: {len(lessons.rows)} conversations became tokens, which {path} keeps until the training ends")
    return lessons


def _made(args: Namespace, length: int) -> Lessons:
    text, talks = Text(args.model_dir), read_conversations(args.data)
    random.Random(args.seed).shuffle(talks)
    talks = talks[:args.limit]
    wanted = max(1, round(len(talks) * args.held_out))
    kept = min(wanted, len(talks) - 1)
    held, learnt = talks[:kept], talks[kept:]
    questions = [talk[:1] for talk in held[:args.judged]]
    prompts = [text.prompt_ids(question, args.template) for question in questions]
    short = [prompt for prompt in prompts if len(prompt) <= length - NEW_TOKENS]
    rows = make_rows(text, learnt, args.template, length)
    return Lessons(rows, short, text.end_ids)
