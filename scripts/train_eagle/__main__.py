"""Trains an EAGLE draft head for a model, on conversations that are like those it shall answer.

This is the command; what it does is in scripts/train_eagle/.
"""
from __future__ import annotations

import hashlib
import json
import math
import sys
from argparse import Namespace
from typing import Any, Sequence

import torch

from launch.devices import usable
from launch.split.write import store
from model.checkpoint import Checkpoint
from model.llama import LlamaConfig
from scripts.train_eagle import heads
from scripts.train_eagle.course import Course, Hyperparameters
from scripts.train_eagle.data import Row, draw
from scripts.train_eagle.judge import accepted_length, open_decoder
from scripts.train_eagle.lessons import NEW_TOKENS, Lessons, read_lessons
from scripts.train_eagle.loss import FeatureTask, Objective, Task, WordTask
from scripts.train_eagle.options import CHECKPOINT, check, parser
from scripts.train_eagle.teacher import Teacher

RECORD = "training.json"
# The rates that EAGLE's authors give a head of size 4096; Adam's step has one size whatever the width, and so a layer
# that is narrower takes a larger one.
RATE, RATE_EAGLE3 = 3e-5 * 4096, 5e-5 * 4096
NOT_TERMS = ("model_dir", "out_dir", "data", "judged", "save_every", "device", "threads")


def open_teacher(args: Namespace) -> Teacher:
    """The base, on the device and in the type that were asked for."""
    if args.threads:
        torch.set_num_threads(args.threads)
    device = usable(args.device, "--device ")
    name = args.dtype
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    return Teacher(Checkpoint(args.model_dir), getattr(torch, name), device)


def open_task(args: Namespace, teacher: Teacher, rows: list[Row]) -> tuple[dict[str, Any], Task]:
    """The `config.json` of the head that learns, and the head in its task."""
    if args.eagle3:
        own = heads.vocabulary(rows, args.draft_vocab, teacher.config.vocab)
        config = heads.describe(teacher, len(own))
        head = heads.begin(teacher, config, own, args.seed)
        objective = Objective(args.passes or 7, decay=0.8)
        return config, WordTask(teacher, head, objective)  # type: ignore[arg-type]
    config = heads.describe(teacher)
    head = heads.begin(teacher, config, None, args.seed)
    objective = Objective(args.passes or 1, noise=args.noise, word_weight=args.word_weight)
    return config, FeatureTask(teacher, head, objective)


def terms(args: Namespace, teacher: Teacher) -> dict[str, Any]:
    """What decides the result: the settings, the base and the data."""
    settings = {name: value for name, value in vars(args).items() if name not in NOT_TERMS}
    data = hashlib.sha256(args.data.read_bytes()).hexdigest()[:16]
    return {**settings, "model": teacher.mark, "data": data}


def hyperparameters(args: Namespace, rows: int, hidden: int) -> Hyperparameters:
    """Those of a training on so many rows, for a head of this size."""
    steps = max(1, math.ceil(args.epochs * rows / args.batch))
    rate = args.rate or (RATE_EAGLE3 if args.eagle3 else RATE) / hidden
    warm_up = max(1, steps // 20)
    return Hyperparameters("head", steps, rate, warm_up=warm_up, seed=args.seed, saved_every=args.save_every)


def train(args: Namespace) -> None:
    """The whole training: the head and the record of its worth are in OUT_DIR at the end."""
    check(args)
    sizes = LlamaConfig.read(Checkpoint(args.model_dir).config)
    if args.eagle3:
        heads.check_layers(sizes, args.model_dir)
    lessons = read_lessons(args, sizes.context)
    rows = lessons.rows
    teacher = open_teacher(args)
    config, task = open_task(args, teacher, rows)
    plan = hyperparameters(args, len(rows), sizes.hidden)
    course = Course(plan, task.head, args.out_dir / CHECKPOINT, terms(args, teacher))

    def lesson(step: int) -> dict[str, float]:
        chosen = draw(len(rows), args.seed, step * args.batch, args.batch)
        return task.learn([rows[i] for i in chosen], (args.seed, step))

    course.run(lesson)
    heads.write(task.head, config, args.out_dir, teacher.stored)
    report(args, lessons, task, course)


def report(args: Namespace, lessons: Lessons, task: Task, course: Course) -> None:
    """Print the held-out figures of the head as it was written, and keep them beside it."""
    agreement = task.agreement(lessons.held, 4)
    record: dict[str, Any] = {
        "steps": course.step,
        "seconds": round(course.seconds, 1),
        "conversations": len(lessons.rows),
        "held_out_agreement": [round(found, 4) for found in agreement],
        **course.terms}
    shown = " ".join(f"{found:.3f}" for found in agreement)
    print(f"{args.out_dir}: {course.step} steps of {args.batch} conversations, {course.seconds:.0f} s")
    print(f"  held out, the best guess is the model's  {shown}  (with 0, 1, 2, 3 guesses between)")
    if lessons.prompts:
        teacher, answers = task.teacher, len(lessons.prompts)
        decoder = open_decoder(teacher, args.out_dir, min(teacher.config.context, args.length))
        length = accepted_length(decoder, lessons.prompts, lessons.ends, NEW_TOKENS)
        record.update(held_out_accepted_length=round(length, 3), held_out_answers=answers)
        print(f"  held out, mean accepted length           {length:.2f}  (with the model's own token; "
              f"{answers} answers, trees of 60 nodes)")
    content = json.dumps(record, indent=1) + "\n"
    store(args.out_dir / RECORD, content.encode())


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        train(args)
    except (ValueError, OSError) as error:
        print(f"train_eagle: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ntrain_eagle: stopped; type the same command again to go on from the last checkpoint", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
