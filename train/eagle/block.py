"""Training of heads that guess a block at once, along rows of text.

After DFlash (arXiv 2602.06036): blocks begin at random places of answers, each with a token of the text and masks after
it. A block sees the target's features of the text before it, and itself. Words near its beginning have the largest
weight, since an incorrect guess makes all later ones useless.

Shapes: T pairs of a row, A of them at which blocks begin, B tokens of a block, K key/value heads, S keys,
E head dimension.
"""
from __future__ import annotations

import math
from typing import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention import PLAIN, AttentionForm, attention
from model.drafts.dflash import TEXT, DFlashHead
from train.data import TokenRow
from train.eagle.loss import NUM_LIKELIEST, Mark, Objective, Task, Wanted

FADING = 2  # weights fall to 1/e after a block's size divided by this


class Blocks:
    """A cache of rows of text, and of blocks, each of which sees the text up to its `starts_A`, and itself."""

    def __init__(self, num_text: int, starts_A: Tensor, block_size: int) -> None:
        device = starts_A.device
        block_R = torch.arange(len(starts_A), device=device).repeat_interleave(block_size)
        slot_T = torch.arange(num_text, device=device)
        before_RT = slot_T <= starts_A[block_R][:, None]
        within_RR = block_R[:, None] == block_R
        nothing_TS = torch.eye(num_text, num_text + len(block_R), dtype=torch.bool, device=device)
        blocks_RS = torch.cat((before_RT, within_RR), 1)
        self._sees_TS = torch.cat((nothing_TS, blocks_RS))  # rows of text see only themselves: their outputs are unused

    def attend(self, layer: int, q_HTE: Tensor, k_KTE: Tensor, v_KTE: Tensor,
               form: AttentionForm = PLAIN) -> Tensor:
        """Return the attention `[H, T, E]` of these queries."""
        return attention(q_HTE, k_KTE, v_KTE, self._sees_TS, form)


def block_part(block_size: int, starts: int, steps: int) -> Objective:
    """Return the objective for blocks of `block_size` tokens, including the one before the guesses."""
    decay = math.exp(-FADING / block_size)
    return Objective(block_size - 1, decay, starts=starts, likeliest=NUM_LIKELIEST, steps=steps)


class BlockTask(Task):
    """Soft cross-entropy of the words of blocks; a pass is one place in all blocks, from the first guess on."""

    head: DFlashHead
    counted_by = "by place in the block, from the first guess"
    by_pass = True

    def judge(self, out_MD: Tensor, wanted: Wanted) -> Mark:
        return self.words(out_MD, wanted)  # `passes` yields logits already, for all places at once

    def weights(self, row: TokenRow, num_passes: int) -> list[float]:
        return super().weights(row, num_passes + 1)[1:]

    def passes(self, ids_N: Tensor, feature_ND: Tensor,
               starts_A: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        form, last_position = self.head.form, self.head.config.context - 1
        slot_T = torch.arange(len(ids_N) - 1, device=ids_N.device)
        offset_B = torch.arange(form.size, device=ids_N.device)

        pos_AB = (starts_A[:, None] + 1 + offset_B).clamp(max=last_position)
        token_AB = torch.full_like(pos_AB, form.mask)
        token_AB[:, 0] = ids_N[starts_A + 1]

        # rows of text, then of blocks
        token_T = torch.cat((torch.full_like(slot_T, TEXT), token_AB.flatten()))
        pos_T = torch.cat((slot_T, pos_AB.flatten()))
        feature_TN = F.pad(feature_ND[:-1], (0, 0, 0, token_AB.numel()))

        out_TD = self.head(token_T, feature_TN, pos_T, Blocks(len(slot_T), starts_A, form.size))
        out_ABD = out_TD[len(slot_T):].unflatten(0, token_AB.shape)
        out_BAD = out_ABD.transpose(0, 1)[1:]

        logits_RV = self.known_logits(out_BAD.flatten(0, 1).to(self.teacher.dtype))
        for logits_AV in logits_RV.split(len(starts_A)):
            yield starts_A, logits_AV
