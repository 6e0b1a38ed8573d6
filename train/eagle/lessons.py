"""The lessons of a training: a file of conversations as rows to learn from, and questions that are held out.

Tokenizing takes minutes, so a safetensors file keeps them for when the training goes on. Only its user may read it,
since it holds conversations. One that is broken, or was made of anything else, is not read.
"""
from __future__ import annotations

import hashlib
import json
import random
from argparse import Namespace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from config.files import ANOTHER, ROOM, make_private, replace
from config.schema.untrusted import read_bytes
from model.text import SETTINGS, TOKENIZER_FILES, Text
from train.data import Row, make_rows, read_conversations

FILE = "lessons.safetensors"
NEW_TOKENS = 128  # of an answer to a question that is held out
WORDS = ("template", "limit", "held_out", "judged", "seed")  # of the command, which decide what the lessons are


class Lessons(NamedTuple):
    """The conversations as rows to learn from, and the questions of those that are held out."""

    rows: list[Row]
    prompts: list[list[int]]
    ends: frozenset[int]


def fingerprint(args: Namespace, length: int) -> Tensor:
    """What differs for other data, another tokenizer or other words, `[32]` in uint8."""
    files = {name: args.model_dir / name for name in (*TOKENIZER_FILES, *SETTINGS)}
    hashes = {name: _hash(path) for name, path in files.items() if path.is_file()}
    words = [getattr(args, name) for name in WORDS]
    content = json.dumps([_hash(args.data), hashes, words, length])
    digest = hashlib.sha256(content.encode()).digest()
    return torch.tensor(list(digest), dtype=torch.uint8)


def _hash(path: Path) -> str:
    return hashlib.sha256(read_bytes(path, ANOTHER)).hexdigest()


def _load(path: Path, mark: Tensor) -> Lessons | None:
    """The lessons of this fingerprint in a file; None if it has none."""
    try:
        found = load_file(path)
        if not torch.equal(found["mark"], mark):
            return None
        sizes = found["sizes"].tolist()
        rows = map(Row, found["ids"].split(sizes), found["answers"].split(sizes))
        prompts = found["prompts"].split(found["prompt_sizes"].tolist())
        ends = frozenset(found["ends"].tolist())
        return Lessons(list(rows), [prompt.tolist() for prompt in prompts], ends)
    except Exception:  # what safetensors raises on a broken file is written nowhere
        return None


def _store(path: Path, mark: Tensor, lessons: Lessons) -> None:
    """Write the file, whole or not at all. Raises ValueError if that cannot be."""
    rows, prompts = lessons.rows, lessons.prompts
    numbers = {
        "sizes": [len(row.ids) for row in rows],
        "prompt_sizes": [len(prompt) for prompt in prompts],
        "prompts": [token for prompt in prompts for token in prompt],
        "ends": sorted(lessons.ends)}
    tensors = {name: torch.tensor(some, dtype=torch.long)
               for name, some in numbers.items()}
    tensors["ids"] = torch.cat([row.ids for row in rows])
    tensors["answers"] = torch.cat([row.answers for row in rows])
    tensors["mark"] = mark
    try:
        make_private(path)
        replace(path, save(tensors))
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
