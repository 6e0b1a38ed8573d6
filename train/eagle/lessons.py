"""The lessons of a training: a file of conversations as rows to learn from, and questions that are held out.

It knows nothing about heads.
"""
from __future__ import annotations

import argparse
import random

from model.text import Text
from train.data import make_rows, read_conversations
from train.eagle.kept import FILE, Lessons, fingerprint, load, store

NEW_TOKENS = 128  # of an answer to a question that is held out


def read_lessons(args: argparse.Namespace, context: int) -> Lessons:
    """The lessons in `--data` for a model of so many positions, which OUT_DIR keeps until the training has ended.

    Raises ValueError if nothing could be learnt from them.
    """
    length, path = min(args.length, context), args.out_dir / FILE
    mark = fingerprint(args, length)
    lessons = load(path, mark)
    if lessons:
        print(f"train_eagle: takes the tokens of {len(lessons.rows)} conversations from {path}")
        return lessons
    lessons = _made(args, length)
    store(path, mark, lessons)
    print(f"train_eagle: {len(lessons.rows)} conversations became tokens, which {path} keeps until the training ends")
    return lessons


def _made(args: argparse.Namespace, length: int) -> Lessons:
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
