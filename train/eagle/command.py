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
from model.drafts.dflash import DFlashHead
from model.drafts.head_files import borrows_embedding, fit_head
from model.drafts.heads import Eagle3Head, EagleHead, MtpHead
from model.llama import LlamaConfig
from model.text import chosen
from model.weights.checkpoint import Checkpoint
from model.weights.unfold import Unfolded
from train.command import open_accelerator, prepare, run
from train.course import Course, Hyperparameters, share_of
from train.data import TokenRows, batch_at
from train.eagle import heads
from train.eagle.block import BlockTask, block_part
from train.eagle.judge import evaluate, open_decoder
from train.eagle.lessons import LESSON_FILES, NEW_TOKENS, Lessons, read_lessons
from train.eagle.loss import PASSES, Objective, Task, WordTask, own_part, part_at, teacher_parts
from train.eagle.options import CHECKPOINT, check, parser
from train.eagle.teacher import Teacher
from train.eagle.unroll import Trainable
from train.own import make_own
from train.terms import digest, mark, settings

RECORD = "training.json"
CPU_INFO = Path("/proc/cpuinfo")
# A processor is faster in bfloat16 than in float32 if the file above has all words of one of these sets.
FAST_BFLOAT16 = ({"amx_bf16"}, {"avx512_bf16", "AuthenticAMD"})
# The rates of EAGLE's authors for a head of size 4096. Adam's step does not depend on the width, so a narrower layer
# takes a larger rate.
RATE, RATE_EAGLE3 = 3e-5 * 4096, 5e-5 * 4096
NOT_TERMS = ("model_dir", "out_dir", "data", "given", "judged", "keep_features", "own", "save_every", "device",
             "threads", "accumulate")
TASK_KINDS: dict[type, type[Task]] = {EagleHead: Task, Eagle3Head: WordTask, DFlashHead: BlockTask}
FEATURES = "features"  # folder with the base's features of each conversation


def arithmetic(args: Namespace) -> tuple[torch.dtype, torch.device]:
    """Return the number type and the device of the command; auto is bfloat16 wherever that is faster."""
    device = torch.device(args.device)
    dtype_name = args.dtype
    if dtype_name == "auto":
        cpu_words = set(CPU_INFO.read_text().split()) if CPU_INFO.is_file() else set()
        is_fast = device.type == "cuda" or any(words <= cpu_words for words in FAST_BFLOAT16)
        dtype_name = "bfloat16" if is_fast else "float32"

    return getattr(torch, dtype_name), device


def open_teacher(args: Namespace) -> Teacher:
    """Open the base, in the number type and on the device of the command."""
    dtype, device = arithmetic(args)
    features_dir = args.out_dir / FEATURES if args.keep_features else None
    dtype_name = str(dtype).partition(".")[2]
    print(f"{args.model_dir}: template {args.template}, {dtype_name} on {device}", flush=True)
    return Teacher(Unfolded(args.model_dir), dtype, device, features_dir)


def open_head(args: Namespace, teacher: Teacher, rows: TokenRows) -> tuple[heads.HeadConfig, Trainable]:
    """Return the `config.json` of the head to train, and the head: the given one, or a new one.

    The mask of a block is the least used token of the answers.
    """
    if args.block:
        mask_id = int(heads.counts(rows, teacher.config.vocab).argmin())
        form = BlockForm(teacher.inner, args.block, mask_id)
        config = heads.describe_block(teacher, form, args.layers)
        return config, heads.new_head(teacher, config, None, args.seed)

    if args.given:
        source = Checkpoint(args.given)
        return dict(source.config), heads.load_trained(teacher, source)

    word_ids = heads.vocabulary(rows, args.draft_vocab, teacher.config.vocab) if args.eagle3 else None
    vocab_size = None if word_ids is None else len(word_ids)
    config = heads.describe(teacher, vocab_size, args.dialect or "eagle3")
    return config, heads.new_head(teacher, config, word_ids, args.seed)


def open_parts(args: Namespace, num_rows: int, is_eagle3: bool) -> list[Objective]:
    """Return the parts of a training on `num_rows` conversations."""
    first_steps = math.ceil(args.epochs * num_rows / args.batch) or 1
    own_steps = math.ceil(args.own_epochs * num_rows / args.batch) or 1
    if args.block:
        return [block_part(args.block, args.starts, first_steps)]

    noise = 0.0 if is_eagle3 else args.noise
    if args.authors and is_eagle3:
        return [Objective(args.passes or 7, decay=0.8, steps=first_steps)]
    if args.authors:
        return [Objective(args.passes or 1, noise=noise, word_weight=args.word_weight, steps=first_steps)]

    last_part = own_part(own_steps, args.passes or PASSES, args.starts)
    return [last_part] if args.given else [*teacher_parts(first_steps, noise, args.word_weight), last_part]


def open_course(args: Namespace, task: Task, parts: list[Objective], accelerator: Accelerator) -> Course:
    """Return the training of the task's head in these parts, resumed from its checkpoint if one exists."""
    teacher, num_steps = task.teacher, sum(part.steps for part in parts)
    own_steps = sum(part.steps for part in parts if part.reads_own_outputs)
    usual_rate = RATE if type(task) is Task else RATE_EAGLE3
    rate = usual_rate / teacher.config.hidden if args.rate is None else args.rate
    warm_up = max(1, num_steps // 20)
    hyperparameters = Hyperparameters("head", num_steps, rate, warm_up=warm_up, own_steps=own_steps,
                                      saved_every=args.save_every)

    given_mark = mark(Checkpoint(args.given), "fc.weight") if args.given else None
    data_digest = digest(args.data.read_bytes())
    terms = {**settings(args, NOT_TERMS), "model": teacher.mark, "from": given_mark, "data": data_digest}
    if accelerator.gradient_accumulation_steps > 1:
        terms["accumulated"] = accelerator.gradient_accumulation_steps
    return Course(hyperparameters, task.head, args.out_dir / CHECKPOINT, terms, accelerator)


def check_base(args: Namespace) -> int:
    """Return the base's positions. Raise ValueError if it does not fit this kind of head, or the head of --from."""
    base = Checkpoint(args.model_dir)
    base_sizes = LlamaConfig.read(base.config)
    if args.given:
        given_head = fit_head(Checkpoint(args.given), base.config)
        if isinstance(given_head, (MtpHead, DFlashHead)):
            raise ValueError(f"the head in {args.given} is not an EAGLE head, and --from supports no others; omit "
                             "--from")

        if args.eagle3 and not isinstance(given_head, Eagle3Head):
            raise ValueError(f"the head in {args.given} is an EAGLE-1/2 head; omit --eagle3")
    elif (args.eagle3 or args.block) and not usual_layers(base_sizes.layers):
        option = "--block" if args.block else "--eagle3"
        raise ValueError(f"a head of {option} needs a model of at least 7 layers, and the one in {args.model_dir} has "
                         f"{base_sizes.layers}; omit {option}")

    return base_sizes.context


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
    prepare(args, args.out_dir, "choose another folder")
    context_length = check_base(args)
    with accelerator.main_process_first():  # the others read what it has written
        if args.own:
            args.data = make_own(args, *arithmetic(args))
        args.template = chosen(args.template, args.model_dir)
        lessons = read_lessons(args, context_length)

    rows, num_batches = lessons.rows, accelerator.gradient_accumulation_steps
    teacher = open_teacher(args)
    config, head = open_head(args, teacher, rows)

    task_kind = TASK_KINDS[type(head)]
    parts = open_parts(args, math.ceil(len(rows) / num_batches), task_kind is not Task)
    tasks = [task_kind(teacher, head, part) for part in parts]
    course = open_course(args, tasks[-1], parts, accelerator)

    def lesson(batch_index: int) -> dict[str, float]:
        batch_rows = batch_at(batch_index, rows, args.batch, args.seed)
        task = tasks[part_at(batch_index // num_batches, parts)]
        return task.learn(batch_rows, (args.seed, batch_index), course.share)

    course.run(lesson)

    if not course.share.writes:
        return
    if not args.block:
        config["unrolled_passes"] = parts[-1].passes

    write(args, tasks[-1], config)
    report(args, lessons, tasks[-1], course)
    for lessons_path in args.out_dir.glob(LESSON_FILES):
        lessons_path.unlink()
    rmtree(args.out_dir / FEATURES, ignore_errors=True)


def write(args: Namespace, task: Task, config: dict[str, Any]) -> None:
    """Write the head into OUT_DIR, in the base's number type, or bfloat16 if it was trained in that. The head of --from
    keeps its number type, and its embedding if it has one."""
    teacher, borrows_base = task.teacher, True
    dtype = teacher.written
    if args.given:
        given_checkpoint = Checkpoint(args.given)
        dtype = given_checkpoint.form("fc.weight").dtype
        borrows_base = borrows_embedding(given_checkpoint, teacher.source.config)
    written_config = heads.nested(config, teacher.source.config)
    heads.write(task.head, written_config, args.out_dir, dtype, borrows_base)


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
        max_length = min(task.teacher.config.context, args.length)
        decoder = open_decoder(task.teacher, args.out_dir, max_length)
        rows, accepted_length = evaluate(decoder, lessons.prompts, lessons.end_ids, NEW_TOKENS)
        agreement = dict(zip(task.depths, task.agreement(rows, task.depths)))

        shares = ", ".join(f"{depth}: {share:.3f}" for depth, share in agreement.items())
        print(f"  held out, its best guess is the model's, {task.counted_by}: {shares}")
        print(f"  mean accepted length: {accepted_length:.2f} (with the model's own token; {len(rows)} answers, trees "
              "of 60 nodes)")

        record.update(held_out_agreement={str(depth): round(share, 4) for depth, share in agreement.items()},
                      held_out_accepted_length=round(accepted_length, 3), held_out_answers=len(rows))

    write_json(args.out_dir / RECORD, record)


def main(argv: Sequence[str] | None = None) -> int:
    return run(train, "train_eagle", parser().parse_args(argv))
