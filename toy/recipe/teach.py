"""Training of the heads with train/eagle/: one head that drifts, on the packed rows of the corpus, and one that does
not, on its dialogues.
"""

from __future__ import annotations

from itertools import chain, islice
from pathlib import Path

import torch

from model.text import Text
from model.weights.checkpoint import Checkpoint
from toy.corpus import dialogues as corpus
from toy.recipe.pack import HELD_ROWS, LENGTH, Rows
from toy.recipe.train import Hyperparameters, begin, join, launch
from train.course import Course
from train.data import TokenRow, draw, make_row
from train.eagle import heads
from train.eagle.loss import DEPTHS, Objective, Task, own_part, part_at, teacher_parts
from train.eagle.teacher import Teacher

# EAGLE gives words a weight of 0.1 relative to features, adds noise, and never reads its own guesses. Here the steps
# are few and words count more; the second pass keeps deep guesses good.
METHOD = Objective(passes=2, word_weight=1.0)


def rows_of(ids: torch.Tensor, weights: torch.Tensor) -> list[TokenRow]:
    """Return packed rows for the training of heads, where only answers and source code count."""
    return [TokenRow(*row) for row in zip(ids, weights == 1)]


def _train(rank: int, plan: Hyperparameters, port: int, work: Path, base_dir: Path, target: Path) -> None:
    join(rank, plan, port)
    teacher = Teacher(Checkpoint(base_dir), torch.bfloat16, torch.device("cpu"))
    task = Task(teacher, heads.new_head(teacher, heads.describe(teacher), None, plan.seed), METHOD)
    rows, course = Rows(work, plan.seed), begin(plan, task.head, work)

    def lesson(step: int) -> dict[str, float]:
        return task.learn(rows_of(*rows.batch(step, plan.batch, rank, plan.processes)), (plan.seed, step))

    course.run(lesson)
    if rank == 0:
        held = [row for batch in rows.held() for row in rows_of(*batch)]
        _finish(plan, task, course, held, target)


def _finish(plan: Hyperparameters, task: Task, course: Course, held: list[TokenRow], target: Path) -> None:
    """Print the agreement of the head on the held-out rows, and write the head."""
    agreement = task.agreement(held, DEPTHS)
    shown = ", ".join(f"{depth}: {found:.3f}" for depth, found in zip(DEPTHS, agreement))
    print(f"{plan.name}: {course.seconds:.0f} s, agreement by own guesses below {shown}", flush=True)
    target.mkdir(parents=True, exist_ok=True)
    config = {**heads.describe(task.teacher), "unrolled_passes": task.method.passes}
    heads.write(task.head, config, target, task.teacher.stored)


def dialogues(work: Path, base_dir: Path, count: int) -> list[TokenRow]:
    """Return the first `count` dialogues of the corpus as rows, where answers count, without those with a bundled
    question in their first question."""
    text, rows = Text(base_dir), []
    bundled = corpus.bundled_questions(work)
    for questions, answers in islice(corpus.read(work, "dialogues"), count):
        if not any(question in questions[0] for question in bundled):
            talk = list(chain.from_iterable(zip(questions, answers)))
            rows.append(make_row(text, talk, "vicuna", LENGTH))
    return [row for row in rows if row is not None]


def _train_deep(rank: int, plan: Hyperparameters, port: int, work: Path, base_dir: Path, target: Path) -> None:
    join(rank, plan, port)
    teacher = Teacher(Checkpoint(base_dir), torch.float32, torch.device("cpu"))
    head = heads.new_head(teacher, heads.describe(teacher), None, plan.seed)
    parts = [*teacher_parts(plan.steps - plan.own_steps, noise=0.1, word_weight=0.1), own_part(plan.own_steps)]
    tasks = [Task(teacher, head, part) for part in parts]
    needed = plan.steps * plan.batch * plan.processes + HELD_ROWS
    rows, course = dialogues(work, base_dir, needed), begin(plan, head, work)
    held, trained = rows[-HELD_ROWS:], rows[:-HELD_ROWS]

    def lesson(step: int) -> dict[str, float]:
        first = (step * plan.processes + rank) * plan.batch
        chosen = draw(len(trained), plan.seed, first, plan.batch)
        return tasks[part_at(step, parts)].learn([trained[i] for i in chosen], (plan.seed, step, rank))

    course.run(lesson)
    if rank == 0:
        _finish(plan, tasks[-1], course, held, target)


def fit(plan: Hyperparameters, work: Path, base_dir: Path, target: Path) -> None:
    """Train the head to the end, from the last checkpoint if one exists, and write it to `target`."""
    launch(_train, plan, work, base_dir, target)


def fit_deep(plan: Hyperparameters, work: Path, base_dir: Path, target: Path) -> None:
    """Train the head that does not drift, and write it to `target`; the last `own_steps` read its own outputs."""
    launch(_train_deep, plan, work, base_dir, target)
