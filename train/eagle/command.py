"""Train an EAGLE draft head for a model, on conversations similar to those it will answer.

This is the command; its parts are in train/eagle/.
"""
from __future__ import annotations

import math
from argparse import Namespace
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from shutil import rmtree
from typing import Any, Sequence

import torch
from accelerate import Accelerator

from config.files import write_json
from config.schema.block_heads import BlockForm
from config.schema.heads import usual_layers
from launch.spec import device_named
from model.drafts.dflash import DFlashHead
from model.drafts.head_files import borrows_embedding, fit_head
from model.drafts.heads import Eagle3Head, EagleHead, MtpHead
from model.llama import LlamaConfig
from model.text import chosen
from model.weights.checkpoint import Checkpoint
from model.weights.unfold import Unfolded
from train.command import open_accelerator, prepare, run
from train.course import Course, Hyperparameters, share_of
from train.data import Rows, batch_at
from train.eagle import heads
from train.eagle.block import BlockTask, block_part
from train.eagle.judge import evaluate, open_decoder
from train.eagle.lessons import LESSON_FILES, NEW_TOKENS, Lessons, read_lessons
from train.eagle.loss import PASSES, Objective, Task, WordTask, own_part, part_at, teacher_parts
from train.eagle.options import CHECKPOINT, check, parser
from train.eagle.partial import PartialTask, partial_part, stage_ends
from train.eagle.teacher import Teacher
from train.eagle.unroll import Trainable
from train.own import make_own
from train.terms import digest, mark, settings

RECORD = "training.json"
CPU = Path("/proc/cpuinfo")
FAST = {"avx512_bf16", "amx_bf16"}  # flags of processors that multiply in bfloat16, in about half the time
# The rates of EAGLE's authors for a head of size 4096. Adam's step does not depend on the width, so a narrower layer
# takes a larger rate.
RATE, RATE_EAGLE3 = 3e-5 * 4096, 5e-5 * 4096
NOT_TERMS = ("model_dir", "out_dir", "data", "given", "judged", "keep_features", "own", "save_every", "device",
             "threads", "accumulate")
KINDS: dict[type, type[Task]] = {EagleHead: Task, Eagle3Head: WordTask, DFlashHead: BlockTask}
BEST = "its best guess is the model's"
FEATURES = "features"  # folder with the base's features of each conversation


def arithmetic(args: Namespace) -> tuple[torch.dtype, torch.device]:
    """Return the number type and the device of the command; auto is bfloat16 wherever that is faster."""
    device = device_named(args.device, "--device ")
    name = args.dtype
    if name == "auto":
        flags = CPU.read_text().split() if CPU.is_file() else ()
        name = "bfloat16" if device.type == "cuda" or FAST.intersection(flags) else "float32"
    return getattr(torch, name), device


def open_teacher(args: Namespace) -> Teacher:
    """Open the base, in the number type and on the device of the command."""
    dtype, device = arithmetic(args)
    folder = args.out_dir / FEATURES if args.keep_features else None
    name = str(dtype).partition(".")[2]
    print(f"{args.model_dir}: template {args.template}, {name} on {device}", flush=True)
    return Teacher(Unfolded(args.model_dir), dtype, device, folder)


def open_head(args: Namespace, teacher: Teacher, rows: Rows) -> tuple[heads.Config, Trainable]:
    """Return the `config.json` of the head to train, and the head: the given one, or a new one.

    The mask of a block is the least used token of the answers.
    """
    if args.block:
        mask = int(heads.counts(rows, teacher.config.vocab).argmin())
        form = BlockForm(teacher.inner, args.block, mask)
        config = heads.describe_block(teacher, form, args.layers)
        return config, heads.new_head(teacher, config, None, args.seed)
    if args.partial:
        return open_partial(args, teacher, rows)
    if args.given:
        source = Checkpoint(args.given)
        return dict(source.config), heads.load_given(teacher, source)
    own = heads.vocabulary(rows, args.draft_vocab, teacher.config.vocab) if args.eagle3 else None
    config = heads.describe(teacher, None if own is None else len(own), args.dialect or "eagle3")
    return config, heads.new_head(teacher, config, own, args.seed)


def open_partial(args: Namespace, teacher: Teacher, rows: Rows) -> tuple[heads.Config, Trainable]:
    """Return a head for partial features, initialized with the layer and the words of the head of --from, if given."""
    given = heads.load_given(teacher, Checkpoint(args.given)) if args.given else None
    if isinstance(given, Eagle3Head):
        own = heads.known_words(given)
    else:
        own = heads.vocabulary(rows, args.draft_vocab, teacher.config.vocab)
    layers = stage_ends(args.partial, teacher.config.layers)
    config = heads.describe_partial(teacher, len(own), layers)
    head = heads.new_head(teacher, config, own, args.seed)
    if given is not None:
        heads.inherit(head, given)
    return config, head


def open_parts(args: Namespace, rows: int, third: bool, stages: int = 0) -> list[Objective]:
    """Return the parts of a training on `rows` conversations. `third`: an EAGLE-3 head; `stages`: of SPD, or 0."""
    first, own = (math.ceil(epochs * rows / args.batch) or 1
                  for epochs in (args.epochs, args.own_epochs))
    if args.block:
        return [block_part(args.block, args.starts, first)]
    if stages:
        return [partial_part(stages, args.starts, first)]
    noise = 0.0 if third else args.noise
    if args.authors and third:
        return [Objective(args.passes or 7, decay=0.8, steps=first)]
    if args.authors:
        return [Objective(args.passes or 1, noise=noise, word_weight=args.word_weight, steps=first)]
    last = own_part(own, args.passes or PASSES, args.starts)
    return [last] if args.given else [*teacher_parts(first, noise, args.word_weight), last]


def open_course(args: Namespace, task: Task, parts: list[Objective], accelerator: Accelerator) -> Course:
    """Return the training of the task's head in these parts, resumed from its checkpoint if one exists."""
    teacher, steps = task.teacher, sum(part.steps for part in parts)
    own = sum(part.steps for part in parts if part.own)
    usual = RATE if type(task) is Task else RATE_EAGLE3
    rate = usual / teacher.config.hidden if args.rate is None else args.rate
    warm_up = max(1, steps // 20)
    plan = Hyperparameters("head", steps, rate, warm_up=warm_up, own=own, saved_every=args.save_every)
    given = mark(Checkpoint(args.given), "fc.weight") if args.given else None
    data = digest(args.data.read_bytes())
    terms = {**settings(args, NOT_TERMS), "model": teacher.mark, "from": given, "data": data}
    if accelerator.gradient_accumulation_steps > 1:
        terms["accumulated"] = accelerator.gradient_accumulation_steps
    return Course(plan, task.head, args.out_dir / CHECKPOINT, terms, accelerator)


def check_base(args: Namespace) -> int:
    """Return the base's positions. Raise ValueError if it does not fit this kind of head, or the head of --from."""
    base = Checkpoint(args.model_dir)
    sizes = LlamaConfig.read(base.config)
    if args.partial:
        stage_ends(args.partial, sizes.layers)
    if args.given:
        given = fit_head(Checkpoint(args.given), base.config)
        if isinstance(given, (MtpHead, DFlashHead)):
            raise ValueError(f"the head in {args.given} is not an EAGLE head, and --from supports no others; omit "
                             "--from")
        third = isinstance(given, Eagle3Head)
        if isinstance(given, Eagle3Head) and given.dialect.partial and not args.partial:
            raise ValueError(f"the head in {args.given} is an SPD head; add --partial STAGES")
        if (args.eagle3 or args.partial) and not third:
            asked = "--partial" if args.partial else "--eagle3"
            raise ValueError(f"the head in {args.given} is an EAGLE-1/2 head; omit {asked}")
    elif (args.eagle3 or args.block) and not usual_layers(sizes.layers):
        asked = "--block" if args.block else "--eagle3"
        raise ValueError(f"a head of {asked} needs a model of at least 7 layers, and the one in {args.model_dir} has "
                         f"{sizes.layers}; omit {asked}")
    return sizes.context


def train(args: Namespace) -> None:
    """Run the whole training, which writes the head and the record of its accuracy into OUT_DIR."""
    check(args)
    accelerator = open_accelerator(args, args.accumulate)
    if args.batch < accelerator.num_processes:
        raise ValueError(f"--batch {args.batch} leaves some of {accelerator.num_processes} processes without a "
                         "conversation; give at least as many")
    if accelerator.mixed_precision == "bf16" and args.dtype == "auto":
        args.dtype = "bfloat16"
    with nullcontext() if share_of(accelerator).writes else redirect_stdout(None):
        _train(args, accelerator)
    accelerator.end_training()


def _train(args: Namespace, accelerator: Accelerator) -> None:
    prepare(args, args.out_dir, "choose another folder", "config.json", RECORD)
    context = check_base(args)
    with accelerator.main_process_first():  # the others read what it has written
        if args.own:
            args.data = make_own(args, *arithmetic(args))
        args.template = chosen(args.template, args.model_dir)
        lessons = read_lessons(args, context)

    rows, num_batches = lessons.rows, accelerator.gradient_accumulation_steps
    teacher = open_teacher(args)
    config, head = open_head(args, teacher, rows)
    kind = PartialTask if args.partial else KINDS[type(head)]
    stages = len(head.inner) if args.partial else 0
    parts = open_parts(args, math.ceil(len(rows) / num_batches), kind is not Task, stages)
    tasks = [kind(teacher, head, part) for part in parts]
    course = open_course(args, tasks[-1], parts, accelerator)

    def lesson(batch: int) -> dict[str, float]:
        some = batch_at(batch, rows, args.batch, args.seed)
        task = tasks[part_at(batch // num_batches, parts)]
        return task.learn(some, (args.seed, batch), course.share)

    course.run(lesson)
    if not course.share.writes:
        return
    if not (args.block or args.partial):
        config["unrolled_passes"] = parts[-1].passes
    write(args, tasks[-1], config)
    report(args, lessons, tasks[-1], course)
    for path in args.out_dir.glob(LESSON_FILES):
        path.unlink()
    rmtree(args.out_dir / FEATURES, ignore_errors=True)


def write(args: Namespace, task: Task, config: dict[str, Any]) -> None:
    """Write the head into OUT_DIR, in the base's number type, or bfloat16 if it was trained in that. The head of --from
    keeps its number type, and its embedding if it has one."""
    teacher, borrows = task.teacher, True
    dtype = teacher.written
    if args.given:
        source = Checkpoint(args.given)
        dtype = source.form("fc.weight").dtype
        borrows = borrows_embedding(source, teacher.source.config)
    described = heads.nested(config, teacher.source.config)
    heads.write(task.head, described, args.out_dir, dtype, borrows)


def report(args: Namespace, lessons: Lessons, task: Task, course: Course) -> None:
    """Print the held-out figures of the written head, and write them into its folder.

    They are counted along the base's own answers to the held-out questions.
    """
    record: dict[str, Any] = {
        "steps": course.step,
        "seconds": round(course.seconds, 1),
        "conversations": len(lessons.rows),
        **course.terms}
    print(f"{args.out_dir}: {course.step} steps of {args.batch} conversations, {course.seconds:.0f} s")
    if lessons.prompts:
        longest = min(task.teacher.config.context, args.length)
        decoder = open_decoder(task.teacher, args.out_dir, longest)
        rows, length = evaluate(decoder, lessons.prompts, lessons.ends, NEW_TOKENS)
        depths = task.depths
        agreement = task.agreement(rows, depths)
        print(f"  held out, {task.counted_by:<46}" + " ".join(f"{depth:>5}" for depth in depths))
        print(f"  {BEST:<56}" + " ".join(f"{found:5.3f}" for found in agreement))
        print(f"  {'mean accepted length':<56}{length:5.2f}  (with the model's own token; {len(rows)} answers, "
              "trees of 60 nodes)")
        figures = [round(found, 4) for found in agreement]
        record.update(held_out_agreement=dict(zip(map(str, depths), figures)),
                      held_out_accepted_length=round(length, 3), held_out_answers=len(rows))
    write_json(args.out_dir / RECORD, record)


def main(argv: Sequence[str] | None = None) -> int:
    return run(train, "train_eagle", parser().parse_args(argv))
