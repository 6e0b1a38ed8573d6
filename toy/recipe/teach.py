"""The head's training: that of scripts/train_eagle/, on the packed rows of the corpus."""

from __future__ import annotations

from pathlib import Path

import torch

from model.checkpoint import Checkpoint
from scripts.train_eagle import heads
from scripts.train_eagle.data import Row
from scripts.train_eagle.loss import FeatureTask, Objective
from scripts.train_eagle.teacher import Teacher
from toy.recipe.pack import Rows
from toy.recipe.train import Hyperparameters, begin, join, launch

# EAGLE weighs the words 0.1 beside the features, adds noise and never reads its own guesses. Here the steps are few and
# the words count for more; the second pass keeps guesses good in depth.
METHOD = Objective(passes=2, word_weight=1.0)


def rows_of(ids: torch.Tensor, weights: torch.Tensor) -> list[Row]:
    """Packed rows as the training of heads reads them, where answers and source code alone count."""
    return [Row(*row) for row in zip(ids, weights == 1)]


def _train(rank: int, plan: Hyperparameters, port: int, work: Path, base_dir: Path, target: Path) -> None:
    join(rank, plan, port)
    teacher = Teacher(Checkpoint(base_dir), torch.bfloat16, torch.device("cpu"))
    config = heads.describe(teacher)
    task = FeatureTask(teacher, heads.begin(teacher, config, None, plan.seed), METHOD)
    rows, course = Rows(work, plan.seed), begin(plan, task.head, work, rank)

    def lesson(step: int) -> dict[str, float]:
        return task.learn(rows_of(*rows.batch(step, plan.batch, rank, plan.processes)), (plan.seed, step))

    course.run(lesson)
    if rank == 0:
        one, two = task.agreement([row for batch in rows.held() for row in rows_of(*batch)], 2)
        print(f"{plan.name}: {course.seconds:.0f} s, agreement {one:.3f}, one step further {two:.3f}", flush=True)
        target.mkdir(parents=True, exist_ok=True)
        heads.write(task.head, config, target, teacher.stored)


def fit(plan: Hyperparameters, work: Path, base_dir: Path, target: Path) -> None:
    """Train the head to the end, from the last checkpoint if there is one, and write it to `target`."""
    launch(_train, plan, work, base_dir, target)
