"""The lessons of a training: a file of conversations as rows to learn from, and questions that are held out.

Tokenizing takes minutes, so a file keeps them for when the training goes on. One that was made of anything else is not
read.
"""
from __future__ import annotations

import json
import random
from argparse import Namespace
from typing import Any, NamedTuple

import torch

from config.files import ANOTHER
from config.schema.untrusted import read_bytes
from model.text import SETTINGS, TOKENIZER_FILES, Text
from train.data import Row, make_rows, read_conversations
from train.terms import digest, kept

LESSON_FILES = "lessons-*.pt"  # the star stands for the fingerprint
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


def read_lessons(args: Namespace, context: int) -> Lessons:
    """The lessons in `--data` for a model of so many positions, which OUT_DIR keeps until the training has ended.

    Raises ValueError if nothing could be learnt from them.
    """
    length = min(args.length, context)
    path = args.out_dir / LESSON_FILES.replace("*", fingerprint(args, length))
    says = f"train_eagle: takes the tokens of {{}} conversations from {path}"

    def made() -> dict[str, Any]:
        nonlocal says
        says = f"train_eagle: {{}} conversations became tokens, which {path} keeps until the training ends"
        return _made(args, length)

    found = kept(path, made)
    sizes = found["sizes"]
    rows = map(Row, found["ids"].split(sizes), found["answers"].split(sizes))
    print(says.format(len(sizes)))
    return Lessons(list(rows), found["prompts"], frozenset(found["ends"]))


def _made(args: Namespace, length: int) -> dict[str, Any]:
    """The lessons in as few tensors as possible."""
    text, talks = Text(args.model_dir), read_conversations(args.data)
    random.Random(args.seed).shuffle(talks)
    talks = talks[:args.limit]
    wanted = max(1, round(len(talks) * args.held_out))
    held = min(wanted, len(talks) - 1)
    questions = [talk[:1] for talk in talks[:held][:args.judged]]
    prompts = [text.prompt_ids(question, args.template) for question in questions]
    rows = make_rows(text, talks[held:], args.template, length)
    return {
        "sizes": [len(row.ids) for row in rows],
        "ids": torch.cat([row.ids for row in rows]),
        "answers": torch.cat([row.answers for row in rows]),
        "prompts": [prompt for prompt in prompts if len(prompt) <= length - NEW_TOKENS],
        "ends": sorted(text.end_ids)}
