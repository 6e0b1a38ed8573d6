"""How a head learns to draft out of partial features (SPD): with those that some of the stages would have reported.

After Speculative Pipeline Decoding (arXiv 2605.30852): a guess is read with what the token before it has become in the
stages that it had passed by then. A head reads one inner feature of each stage, which is known behind it.

Shapes: N tokens of a row, D inner features side by side, A pairs that chains of guesses start at.
"""
from __future__ import annotations

import sys
from itertools import accumulate
from typing import Sequence

import torch
from torch import Tensor

from model.weights.split import parse_stages
from train.data import Rows
from train.eagle.loss import LIKELIEST, Objective, WordTask
from train.eagle.unroll import Known


def stage_ends(stages: str, layers: int) -> list[int]:
    """The last layer of each stage, of which a head reads the input; `stages` as in the key of that name. Raises
    ValueError for stages that are not possible, or a single one."""
    try:
        counts = parse_stages(stages, layers)
    except ValueError as error:
        raise ValueError(f"--partial {stages} is read as stages: {error}") from error
    ends = [end - 1 for count, end in zip(counts, accumulate(counts)) if count]
    if len(ends) < 2:
        raise ValueError(f"--partial {stages} leaves nothing to report; give two stages or more")
    return ends


def partial_part(stages: int, starts: int, steps: int) -> Objective:
    """Chains of guesses, one longer than a pipeline of so many stages holds."""
    return Objective(stages + 2, starts=starts, likeliest=LIKELIEST, steps=steps)


class PartialTask(WordTask):
    """EAGLE-3's loss, along chains of guesses that follow each other through the stages.

    `under_way` is how many guesses of a chain were sent; None: from one start to the next, each number by turns.
    """

    behind = "guesses of a chain that were sent"
    by_pass = True
    under_way: int | None = None

    def known_later(self, feature_ND: Tensor, starts_A: Tensor) -> Known:
        stages = len(self.head.inner)
        turns_A = torch.arange(len(starts_A), device=starts_A.device) % (stages + 1) + 1
        sent_A = turns_A if self.under_way is None else torch.full_like(turns_A, self.under_way)

        def reported(guesses: int, pos_A: Tensor) -> Tensor:
            passed_A = (sent_A[:len(pos_A)] - guesses).clamp(0, stages)
            return known(feature_ND[pos_A], passed_A, stages)

        return reported

    @torch.no_grad()
    def agreement(self, rows: Rows, depths: Sequence[int]) -> list[float]:
        found = []
        for depth in depths:
            test = type(self)(self.teacher, self.head, Objective(depth + 1, starts=sys.maxsize))
            test.under_way = depth
            marked = [test.marks(row, (0,))[depth:] for row in rows]  # of the last pass, if the row is so long
            right = [right_M for marks in marked for _, right_M in marks]
            asked = sum(map(len, right))
            found.append(sum(int(right_M.sum()) for right_M in right) / max(asked, 1))
        return found


def known(feature_AD: Tensor, passed_A: Tensor, stages: int) -> Tensor:
    """The inner features of rows that have passed so many stages; those of the others are 0."""
    width = feature_AD.shape[-1] // stages
    stage_D = torch.arange(stages, device=feature_AD.device).repeat_interleave(width)
    return feature_AD * (stage_D < passed_A[:, None])
