"""How a head learns to draft out of partial features (SPD): with those that some of the stages would have reported.

After Speculative Pipeline Decoding (arXiv 2605.30852): a guess is read with what the token before it has become in the
stages that it had passed by then. A head reads one inner feature of each stage, which is known behind it.

Shapes: N tokens of a row, D inner features side by side, A pairs that chains of guesses start at.
"""
from __future__ import annotations

from itertools import accumulate
from typing import Iterator, Sequence

import torch
from torch import Tensor

from model.weights.split import parse_stages
from train.data import Rows
from train.eagle.loss import LIKELIEST, Objective, WordTask
from train.eagle.unroll import Unrolled


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
    under_way: int | None = None

    @property
    def depths(self) -> Sequence[int]:
        return range(self.method.passes)

    def passes(self, ids_N: Tensor, feature_ND: Tensor, starts_A: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        stages, token_T = len(self.head.inner), ids_N[1:]
        pos_T = torch.arange(len(token_T), device=ids_N.device)
        cache = Unrolled(starts_A)
        yield pos_T, self.head(token_T, feature_ND[:-1], pos_T, cache)
        turns_A = torch.arange(len(starts_A), device=ids_N.device) % (stages + 1) + 1
        sent_A = turns_A if self.under_way is None else torch.full_like(turns_A, self.under_way)
        for guesses in range(1, self.method.passes):
            pos_A = starts_A[starts_A < len(token_T) - guesses] + guesses
            if not len(pos_A):
                return
            passed_A = (sent_A[:len(pos_A)] - guesses).clamp(0, stages)
            yield starts_A, self.head(token_T[pos_A], known(feature_ND[pos_A], passed_A, stages), pos_A, cache)

    @torch.no_grad()
    def agreement(self, rows: Rows, depths: Sequence[int]) -> list[float]:
        found = []
        for depth in depths:
            test = type(self)(self.teacher, self.head, Objective(depth + 1, starts=1 << 30))
            test.under_way = depth
            right = [marks[depth][1] for row in rows if len(marks := test.marks(row, (0,))) > depth]
            right_M = torch.cat(right).float()
            found.append(float(right_M.mean()) if len(right_M) else 0.0)
        return found


def known(feature_AD: Tensor, passed_A: Tensor, stages: int) -> Tensor:
    """The inner features of rows that have passed so many stages; those of the others are 0."""
    width = feature_AD.shape[-1] // stages
    stage_D = torch.arange(stages, device=feature_AD.device).repeat_interleave(width)
    return feature_AD * (stage_D < passed_A[:, None])
