"""Trains an EAGLE draft head for a model, on conversations that are like those it shall answer.

This is the command; what it does is in scripts/train_eagle/.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Sequence

import torch

from config.files import check_folder
from launch.devices import usable
from launch.split.write import store
from model.checkpoint import SOURCES, Checkpoint
from model.llama import LlamaConfig
from model.text import CONVERSATIONS, Text
from scripts.train_eagle import heads
from scripts.train_eagle.course import Course, Hyperparameters
from scripts.train_eagle.data import Row, draw, make_rows, read_conversations
from scripts.train_eagle.judge import accepted_length, open_decoder
from scripts.train_eagle.loss import FeatureTask, Objective, Task, WordTask
from scripts.train_eagle.teacher import Teacher

EXAMPLE = """\
examples:
  python -m scripts.train_eagle toy/llama my_head --data talks.jsonl
  python -m scripts.train_eagle models/vicuna-7b my_head3 --data talks.jsonl --eagle3 --device cuda

  then: bash run_pipe.sh base_dir=toy/llama eagle_dir=my_head stages=0+2+2+2+2

  A line of FILE is {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}, ...]} as in
  ShareGPT, or {"messages": [{"role": "user", "content": "..."}, ...]}, or {"turns": [...], "reference": [...]}. The
  best answers are those that the model itself gives. If it is interrupted, type the same command again: it goes on from
  OUT_DIR/training.pt. At the end OUT_DIR/training.json holds how often the head's best guess was the model's, and the
  mean accepted length, on conversations that were held out.
"""
BOUNDS = {"epochs": (0, 1e6), "batch": (1, 1 << 20), "length": (3, 1 << 30), "limit": (2, 1 << 40), "rate": (0, 1e3),
          "passes": (1, 64), "noise": (0, 1e3), "word_weight": (0, 1e6), "draft_vocab": (1, 1 << 30),
          "seed": (0, (1 << 63) - 1), "judged": (0, 1 << 20), "save_every": (1, 1 << 40), "threads": (1, 1 << 10)}
CHECKPOINT, RECORD = "training.pt", "training.json"
HELD_ROWS = 64  # held-out conversations that agreement is counted on, at most
NEW_TOKENS = 128  # of an answer that is drafted for the accepted length
# The rates that EAGLE's authors give a head of size 4096; Adam's step has one size whatever the width, and so a layer
# that is narrower takes a larger one.
RATE = {False: 3e-5 * 4096, True: 5e-5 * 4096}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m scripts.train_eagle", description=__doc__.splitlines()[0],
                                   epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    add("model_dir", metavar="MODEL_DIR", type=Path, help="the model in Hugging Face form, with its tokenizer")
    add("out_dir", metavar="OUT_DIR", type=Path, help="where the head goes, and the checkpoint of its training")
    add("--data", metavar="FILE", type=Path, required=True, help="conversations, one JSON object a line")
    add("--eagle3", action="store_true", help="a head of EAGLE-3 (the model needs 7 layers); else of EAGLE-1/2")
    add("--template", choices=[*CONVERSATIONS, "own"], default="vicuna", help="how the model wants its questions")
    add("--epochs", type=float, default=4.0, metavar="N", help="how often each conversation is read (4)")
    add("--batch", type=int, default=4, metavar="N", help="conversations in a step (4)")
    add("--length", type=int, default=2048, metavar="N", help="longer ones are cut after so many tokens (2048)")
    add("--limit", type=int, default=68000, metavar="N", help="conversations that are taken, by chance (68000)")
    add("--held-out", type=float, default=0.05, metavar="SHARE", help="kept back for the figures at the end (0.05)")
    add("--rate", type=float, metavar="R", help="of learning; default: EAGLE's, which is 3e-5 for a model of size "
        "4096 (EAGLE-3: 5e-5), and in inverse proportion to the size for others")
    add("--passes", type=int, metavar="N", help="the first reads the model's features, each other one what the head "
        "made in the one before (1; EAGLE-3: 7)")
    add("--noise", type=float, default=0.1, metavar="X", help="on the features, EAGLE-1/2: at most so much (0.1)")
    add("--word-weight", type=float, default=0.1, metavar="X", help="of words beside features, EAGLE-1/2 (0.1)")
    add("--draft-vocab", type=int, default=32000, metavar="N", help="tokens that a head of EAGLE-3 knows: those that "
        "answers use most (32000)")
    add("--seed", type=int, default=0, metavar="N", help="of the beginning, the order and the noise (0)")
    add("--judged", type=int, default=24, metavar="N", help="held-out questions that are answered at the end with "
        "trees of 60 nodes, for the mean accepted length (24)")
    add("--save-every", type=int, default=100, metavar="N", help="steps between two checkpoints (100)")
    add("--device", default="auto", help="cpu or cuda; auto: cuda if there is one")
    add("--dtype", choices=["auto", "float64", "float32", "bfloat16"], default="auto",
        help="of the arithmetic; auto: bfloat16 on cuda, else float32. Weights that learn are float32")
    add("--threads", type=int, metavar="N", help="for arithmetic; default: as torch chooses")
    return made


@dataclass(frozen=True)
class Lessons:
    """The conversations as rows: to learn from, and held out, with the questions of the latter."""

    rows: list[Row]
    held: list[Row]
    prompts: list[list[int]]
    ends: frozenset[int]


def read_lessons(args: argparse.Namespace, context: int) -> Lessons:
    text, talks = Text(args.model_dir), read_conversations(args.data)
    random.Random(args.seed).shuffle(talks)
    talks = talks[:args.limit]
    kept = min(max(1, round(len(talks) * args.held_out)), len(talks) - 1)
    length = min(args.length, context)
    prompts = [text.prompt_ids(talk[:1], args.template) for talk in talks[:min(kept, args.judged)]]
    return Lessons(make_rows(text, talks[kept:], args.template, length),
                   make_rows(text, talks[:min(kept, HELD_ROWS)], args.template, length),
                   [prompt for prompt in prompts if len(prompt) <= length - NEW_TOKENS], frozenset(text.end_ids))


def check(args: argparse.Namespace) -> None:
    """Refuse what could not end well, before anything long begins."""
    for name, (least, most) in BOUNDS.items():
        value = getattr(args, name)
        if value is not None and not least <= value <= most:
            raise ValueError(f"--{name.replace('_', '-')} {value} makes no sense; give {least} to {most}")
    if not 0 < args.held_out < 1:
        raise ValueError(f"--held-out {args.held_out} is no share; give a number between 0 and 1")
    heads_there = [name for name in SOURCES if (args.out_dir / name).exists()]
    if heads_there and not (args.out_dir / CHECKPOINT).exists():
        raise ValueError(f"{args.out_dir} holds {heads_there[0]} already, and no training that could go on; choose "
                         "another folder")
    check_folder(args.out_dir, "choose another folder")
    usable(args.device, "--device ")


def open_teacher(args: argparse.Namespace) -> Teacher:
    if args.threads:
        torch.set_num_threads(args.threads)
    device = usable(args.device, "--device ")
    usual = "bfloat16" if device.type == "cuda" else "float32"
    return Teacher(Checkpoint(args.model_dir), getattr(torch, usual if args.dtype == "auto" else args.dtype), device)


def open_task(args: argparse.Namespace, teacher: Teacher, rows: list[Row]) -> tuple[dict[str, Any], Task]:
    """The head that learns, in its task, and its `config.json`."""
    own = heads.vocabulary(rows, args.draft_vocab, teacher.config.vocab) if args.eagle3 else None
    config = heads.describe(teacher, None if own is None else len(own))
    head = heads.begin(teacher, config, own, args.seed)
    if args.eagle3:
        return config, WordTask(teacher, head, Objective(args.passes or 7, decay=0.8))  # type: ignore[arg-type]
    return config, FeatureTask(teacher, head, Objective(args.passes or 1, 1.0, args.noise, args.word_weight))


def terms(args: argparse.Namespace, teacher: Teacher) -> dict[str, Any]:
    """What decides the result: the settings, the base and the data."""
    beside = ("model_dir", "out_dir", "data", "judged", "save_every", "device", "threads")
    return {**{name: value for name, value in vars(args).items() if name not in beside}, "model": teacher.mark,
            "data": hashlib.sha256(args.data.read_bytes()).hexdigest()[:16]}


def train(args: argparse.Namespace) -> None:
    check(args)
    sizes = LlamaConfig.read(Checkpoint(args.model_dir).config)
    if args.eagle3:
        heads.check_layers(sizes, args.model_dir)
    lessons = read_lessons(args, sizes.context)
    teacher = open_teacher(args)
    config, task = open_task(args, teacher, lessons.rows)
    steps = max(1, math.ceil(args.epochs * len(lessons.rows) / args.batch))
    plan = Hyperparameters("head", steps, args.rate or RATE[args.eagle3] / sizes.hidden, warm_up=max(1, steps // 20),
                seed=args.seed, saved_every=args.save_every)
    course = Course(plan, task.head, args.out_dir / CHECKPOINT, terms(args, teacher))

    def lesson(step: int) -> dict[str, float]:
        chosen = draw(len(lessons.rows), args.seed, step * args.batch, args.batch)
        return task.learn([lessons.rows[i] for i in chosen], (args.seed, step))

    course.run(lesson)
    heads.write(task.head, config, args.out_dir, teacher.stored)
    report(args, lessons, task, course)


def report(args: argparse.Namespace, lessons: Lessons, task: Task, course: Course) -> None:
    """The held-out figures, of the head as it was written; printed and kept beside it."""
    shares = task.agreement(lessons.held, 4)
    record = {"steps": course.step, "seconds": round(course.seconds, 1), "conversations": len(lessons.rows),
              "held_out_agreement": [round(found, 4) for found in shares], **course.terms}
    print(f"{args.out_dir}: {course.step} steps of {args.batch} conversations, {course.seconds:.0f} s")
    print(f"  held out, the best guess is the model's  {' '.join(f'{found:.3f}' for found in shares)}  "
          "(with 0, 1, 2, 3 guesses between)")
    if lessons.prompts:
        teacher = task.teacher
        decoder = open_decoder(teacher, args.out_dir, min(teacher.config.context, args.length))
        length = accepted_length(decoder, lessons.prompts, lessons.ends, NEW_TOKENS)
        record["held_out_accepted_length"], record["held_out_answers"] = round(length, 3), len(lessons.prompts)
        print(f"  held out, mean accepted length           {length:.2f}  (with the model's own token; "
              f"{len(lessons.prompts)} answers, trees of 60 nodes)")
    store(args.out_dir / RECORD, (json.dumps(record, indent=1) + "\n").encode())


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
