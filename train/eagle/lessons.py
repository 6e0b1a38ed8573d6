"""The lessons of a training: rows to learn from, out of a file of conversations, and held-out questions.

Tokenizing takes minutes, so a file keeps the lessons for a resumed training. Its name depends on all inputs, so lessons
from other inputs are never read.
"""
from __future__ import annotations

import json
import random
from argparse import Namespace
from functools import partial
from typing import Any, NamedTuple

import torch

from config.files import READABLE_REMEDY
from config.schema.untrusted import read_bytes
from model.drafts.suffix import KEPT_ANSWERS, KEPT_TOKENS, load_texts
from model.text import SETTINGS, TOKENIZER_FILES, Text
from model.weights.checkpoint import Checkpoint
from model.weights.parts import read_sizes
from train.data import TokenRow, answer_row, make_rows, read_conversations
from train.terms import digest, kept

LESSON_FILES = "lessons-*.pt"  # the star stands for the fingerprint
LEAST_LENGTH = 3  # tokens of a text from which something is learned
NEW_TOKENS = 128  # most tokens of an answer to a held-out question
HELD_OUT_SHARE = 0.05  # of the conversations, of which some questions are answered for the figures at the end
LESSON_OPTIONS = ("template", "judged", "seed")  # those that determine the lessons


class Lessons(NamedTuple):
    """Conversations as rows to learn from, and prompts of the questions that are held out."""

    rows: list[TokenRow]
    prompts: list[list[int]]
    end_ids: frozenset[int]


def fingerprint(args: Namespace, max_length: int) -> str:
    """Return a hash of the data, the tokenizer and the options that determine the lessons."""
    files = [args.model_dir / name for name in (*TOKENIZER_FILES, *SETTINGS)]
    existing_files = [path for path in files if path.is_file()]
    hash_by_name = {path.name: digest(read_bytes(path, READABLE_REMEDY)) for path in existing_files}
    option_values = [getattr(args, name) for name in LESSON_OPTIONS]
    content = [digest(read_bytes(args.data, READABLE_REMEDY)), hash_by_name, option_values, max_length]
    return digest(json.dumps(content).encode())


def read_lessons(args: Namespace, context: int) -> Lessons:
    """Return the lessons from `--data` for a model of `context` positions; OUT_DIR keeps them until the training ends.

    Raises ValueError if they contain nothing to learn.
    """
    max_length = min(args.length, context)
    lessons_path = args.out_dir / LESSON_FILES.replace("*", fingerprint(args, max_length))
    saved = kept(lessons_path, partial(_tokenized, args, max_length))
    row_sizes = saved["sizes"]
    rows = map(TokenRow, saved["ids"].split(row_sizes), saved["answers"].split(row_sizes))
    print(f"train_eagle: {len(row_sizes)} conversations, whose tokens {lessons_path} keeps until the training ends")
    return Lessons(list(rows), saved["prompts"], frozenset(saved["ends"]))


def _tokenized(args: Namespace, max_length: int) -> dict[str, Any]:
    """Return the lessons in as few tensors as possible."""
    text = Text(args.model_dir)
    if not read_bytes(args.data, READABLE_REMEDY).startswith(KEPT_ANSWERS):
        rows, prompts = _talk_rows(args, text, max_length)
    else:
        rows, prompts = _kept_rows(args, max_length), []

    return {
        "sizes": [len(row.ids) for row in rows],
        "ids": torch.cat([row.ids for row in rows]),
        "answers": torch.cat([row.answers for row in rows]),
        "prompts": prompts,
        "ends": sorted(text.end_ids)}


def _kept_rows(args: Namespace, max_length: int) -> list[TokenRow]:
    """Return the texts of a file of the key `answers`, which are tokens already, and learned whole; none is held out.

    Raises ValueError for the file of another vocabulary, or without answers.
    """
    texts = load_texts(args.data, read_sizes(Checkpoint(args.model_dir)).vocab, KEPT_TOKENS)
    rows = [answer_row((), token_ids[:max_length]) for token_ids in texts if len(token_ids) >= LEAST_LENGTH]
    if not rows:
        raise ValueError(f"{args.data} holds no answers yet: ask run_pipe.sh something with answers={args.data}")
    return rows


def _talk_rows(args: Namespace, text: Text, max_length: int) -> tuple[list[TokenRow], list[list[int]]]:
    """Return the rows of conversations, and the prompts of those that are held out."""
    talks = read_conversations(args.data)
    random.Random(args.seed).shuffle(talks)
    num_wanted = max(1, round(len(talks) * HELD_OUT_SHARE))
    num_held_out = min(num_wanted, len(talks) - 1)

    questions = [talk[:1] for talk in talks[:num_held_out][:args.judged]]
    prompts = [text.prompt_ids(question, args.template) for question in questions]
    fitting_prompts = [prompt for prompt in prompts if len(prompt) <= max_length - NEW_TOKENS]
    return make_rows(text, talks[num_held_out:], args.template, max_length), fitting_prompts
