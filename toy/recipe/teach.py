"""Training of the heads with train/eagle/: one head that drifts, on the packed rows of the corpus, and one that does
not, on its dialogues.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from model.text import Text
from model.weights.checkpoint import Checkpoint
from toy.corpus import dialogues as corpus
from toy.recipe.pack import NUM_HELD_OUT, ROW_LENGTH, PackedRows
from toy.recipe.train import ToyHyperparameters, begin, join, launch
from train.course import Course
from train.data import TokenRow, batch_at, make_row
from train.eagle import heads
from train.eagle.loss import DEPTHS, Objective, Task, own_part, part_at, teacher_parts
from train.eagle.teacher import Teacher


class HeadLessons(NamedTuple):
    """What a head learns: the parts of its training, and its rows."""

    parts: list[Objective]
    batch_of: Callable[[int], list[TokenRow]]  # the rows of the batch with this number
    held_out_rows: list[TokenRow]


def answer_rows(token_ids: Tensor, weights: Tensor) -> list[TokenRow]:
    """Return packed rows for the training of heads, where only answers and source code count."""
    return [TokenRow(*row) for row in zip(token_ids, weights == 1)]


def packed_lessons(plan: ToyHyperparameters, work_dir: Path) -> HeadLessons:
    """Return the lessons of the head that drifts.

    EAGLE gives words a weight of 0.1 relative to features, adds noise, and never reads its own guesses. Here the steps
    are few and words count more; the second pass keeps deep guesses good.
    """
    packed_rows = PackedRows(work_dir, plan.seed)
    held_out_rows = [row for batch in packed_rows.held_out() for row in answer_rows(*batch)]

    def batch_of(batch_number: int) -> list[TokenRow]:
        return answer_rows(*packed_rows.batch(batch_number, plan.batch))

    return HeadLessons([Objective(passes=2, word_weight=1.0, steps=plan.steps)], batch_of, held_out_rows)


def dialogue_lessons(plan: ToyHyperparameters, work_dir: Path, base_dir: Path) -> HeadLessons:
    """Return the lessons of the head that does not drift: its last `own_steps` read its own outputs."""
    parts = [*teacher_parts(plan.steps - plan.own_steps, noise=0.1, word_weight=0.1), own_part(plan.own_steps)]
    num_trained = plan.steps * plan.batch * plan.processes
    rows = dialogue_rows(work_dir, base_dir, num_trained + NUM_HELD_OUT)
    trained_rows, held_out_rows = rows[:-NUM_HELD_OUT], rows[-NUM_HELD_OUT:]

    def batch_of(batch_number: int) -> list[TokenRow]:
        return batch_at(batch_number, trained_rows, plan.batch, plan.seed)

    return HeadLessons(parts, batch_of, held_out_rows)


def dialogue_rows(work_dir: Path, base_dir: Path, num_dialogues: int) -> list[TokenRow]:
    """Return the first dialogues of the corpus as rows, where answers count, without those with a bundled question in
    their first question."""
    text, rows = Text(base_dir), []
    bundled_questions = corpus.bundled_questions(work_dir)

    for questions, answers in islice(corpus.read(work_dir, "dialogues"), num_dialogues):
        if not any(question in questions[0] for question in bundled_questions):
            talk = list(chain.from_iterable(zip(questions, answers)))
            rows.append(make_row(text, talk, "vicuna", ROW_LENGTH))
    return [row for row in rows if row is not None]


def _train(rank: int, plan: ToyHyperparameters, port: int, work_dir: Path, base_dir: Path, target_dir: Path) -> None:
    join(rank, plan, port)
    dtype = torch.float32 if plan.own_steps else torch.bfloat16
    teacher = Teacher(Checkpoint(base_dir), dtype, torch.device("cpu"))
    head = heads.new_head(teacher, heads.describe(teacher), None, plan.seed)
    lessons = dialogue_lessons(plan, work_dir, base_dir) if plan.own_steps else packed_lessons(plan, work_dir)
    tasks = [Task(teacher, head, part) for part in lessons.parts]
    course = begin(plan, head, work_dir)

    def lesson(step: int) -> dict[str, float]:
        task = tasks[part_at(step, lessons.parts)]
        return task.learn(lessons.batch_of(plan.batch_number(step, rank)), (plan.seed, step, rank))

    course.run(lesson)
    if rank == 0:
        _finish(course, tasks[-1], lessons.held_out_rows, target_dir)


def _finish(course: Course, task: Task, held_out_rows: list[TokenRow], target_dir: Path) -> None:
    """Print the agreement of the head on the held-out rows, and write the head."""
    agreements = zip(DEPTHS, task.agreement(held_out_rows, DEPTHS))
    shown_agreements = ", ".join(f"{depth}: {agreement:.3f}" for depth, agreement in agreements)
    print(f"{course.plan.name}: {course.seconds:.0f} s, agreement by own guesses below {shown_agreements}", flush=True)

    target_dir.mkdir(parents=True, exist_ok=True)
    config = {**heads.describe(task.teacher), "unrolled_passes": task.method.passes}
    heads.write(task.head, config, target_dir, task.teacher.stored)


def fit(plan: ToyHyperparameters, work_dir: Path, base_dir: Path, target_dir: Path) -> None:
    """Train a head to the end, from the last checkpoint if one exists, and write it to `target_dir`.

    With `own_steps` it is the head that does not drift.
    """
    launch(_train, plan, work_dir, base_dir, target_dir)
