"""The lessons of a training: a file of conversations as rows to learn from, and questions that are held out.

It knows nothing about heads.
"""
from __future__ import annotations

import argparse
import random
from dataclasses import dataclass

from model.text import Text
from train.data import Row, make_rows, read_conversations

NEW_TOKENS = 128  # of an answer to a question that is held out


@dataclass(frozen=True)
class Lessons:
    """The conversations as rows to learn from, and the questions of those that are held out."""

    rows: list[Row]
    prompts: list[list[int]]
    ends: frozenset[int]


def read_lessons(args: argparse.Namespace, context: int) -> Lessons:
    """Read `--data` for a model of so many positions. Raises ValueError if nothing could be learnt from it."""
    text, talks = Text(args.model_dir), read_conversations(args.data)
    random.Random(args.seed).shuffle(talks)
    talks = talks[:args.limit]
    wanted = max(1, round(len(talks) * args.held_out))
    kept = min(wanted, len(talks) - 1)
    held, learnt = talks[:kept], talks[kept:]
    length = min(args.length, context)
    questions = [talk[:1] for talk in held[:args.judged]]
    prompts = [text.prompt_ids(question, args.template) for question in questions]
    short = [prompt for prompt in prompts if len(prompt) <= length - NEW_TOKENS]
    rows = make_rows(text, learnt, args.template, length)
    return Lessons(rows, short, frozenset(text.end_ids))
