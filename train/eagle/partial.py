"""Training of heads that draft from partial features (SPD): those that some of the stages would have reported.

After Speculative Pipeline Decoding (arXiv 2605.30852): the head reads a guess with the features of the previous token,
from the stages that this token has passed by then. Each stage reports one inner feature.

Shapes: N tokens of a row, D inner features side by side, A pairs where chains of guesses start.
"""
from __future__ import annotations

import sys
from itertools import accumulate
from typing import Sequence

import torch
from torch import Tensor

from model.weights.split import parse_stages
from train.data import Rows
from train.eagle.loss import NUM_LIKELIEST, Objective, WordTask
from train.eagle.unroll import KnownFeatures


def stage_ends(stages: str, layers: int) -> list[int]:
    """Return the last layer of each stage, as a head reads its input; `stages` is as in the key of that name. Raise
    ValueError for impossible stages, or a single one."""
    try:
        layer_counts = parse_stages(stages, layers)
    except ValueError as error:
        raise ValueError(f"--partial {stages} is read as stages: {error}") from error

    ends = accumulate(layer_counts)
    last_layers = [end - 1 for num_layers, end in zip(layer_counts, ends) if num_layers]
    if len(last_layers) < 2:
        raise ValueError(f"--partial {stages} leaves nothing to report; give at least two stages")
    return last_layers


def partial_part(stages: int, starts: int, steps: int) -> Objective:
    """Return the objective for chains of guesses, one longer than a pipeline of this many stages holds."""
    return Objective(stages + 2, starts=starts, likeliest=NUM_LIKELIEST, steps=steps)


class PartialTask(WordTask):
    """EAGLE-3's loss, along chains of guesses that follow each other through the stages.

    `under_way` is the number of guesses of a chain that were sent; None: each number in turn, from start to start.
    """

    counted_by = "by the number of sent guesses of a chain"
    by_pass = True
    under_way: int | None = None

    def later_features(self, feature_ND: Tensor, starts_A: Tensor) -> KnownFeatures:
        stages = len(self.head.inner)
        turns_A = torch.arange(len(starts_A), device=starts_A.device) % (stages + 1) + 1
        sent_A = turns_A if self.under_way is None else torch.full_like(turns_A, self.under_way)

        def reported(num_guesses: int, pos_A: Tensor) -> Tensor:
            passed_A = (sent_A[:len(pos_A)] - num_guesses).clamp(0, stages)
            return partial_features(feature_ND[pos_A], passed_A, stages)

        return reported

    @torch.no_grad()
    def agreement(self, rows: Rows, depths: Sequence[int]) -> list[float]:
        shares = []
        for depth in depths:
            test_task = type(self)(self.teacher, self.head, Objective(depth + 1, starts=sys.maxsize))
            test_task.under_way = depth

            # only the last pass; there is none for a shorter row
            last_marks = [mark for row in rows for mark in test_task.marks(row, (0,))[depth:]]
            num_agreeing = sum(int(right_M.sum()) for _, right_M in last_marks)
            num_words = sum(len(right_M) for _, right_M in last_marks)
            shares.append(num_agreeing / max(num_words, 1))
        return shares


def partial_features(feature_AD: Tensor, passed_A: Tensor, stages: int) -> Tensor:
    """Return the inner features of rows after `passed_A` stages; features of later stages are 0."""
    width = feature_AD.shape[-1] // stages
    stage_D = torch.arange(stages, device=feature_AD.device).repeat_interleave(width)
    return feature_AD * (stage_D < passed_A[:, None])
