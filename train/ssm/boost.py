"""Boost-tuning (SpecInfer, section 3): the loss of a drafter, and the stretches that are left for the next one.

A text is cut into stretches. A stretch is the target's continuation of a prompt, which is the whole text before it.
This module knows nothing about files.

Shapes: B texts, N tokens of each, T tokens to learn, V vocabulary.
"""
from __future__ import annotations

from typing import Iterable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from eval.tokens_per_pass import NumberArray, ranks
from launch.progress import ProgressBar
from train.data import TokenRow, TokenRows

NUM_TOGETHER = 64  # texts per batch without gradients


def logits_of(model: PreTrainedModel, rows: TokenRows) -> Tensor:
    """Return the logits `[T, V]` for the answers' tokens of rows, read as one batch; a row never begins with one."""
    token_ids = [row.ids.long() for row in rows]
    all_present = [torch.ones_like(ids_N) for ids_N in token_ids]
    answers = [row.answers for row in rows]
    ids_BN, mask_BN, answer_BN = (pad_sequence(sequences, batch_first=True).to(model.device)
                                  for sequences in (token_ids, all_present, answers))
    outputs = model.base_model(input_ids=ids_BN, attention_mask=mask_BN, use_cache=False)
    hidden_TD = outputs.last_hidden_state[:, :-1][answer_BN[:, 1:]]
    logits_TV: Tensor = model.get_output_embeddings()(hidden_TD)
    return logits_TV


def words_of(rows: TokenRows) -> Tensor:
    """Return the tokens `[T]` of the answers."""
    return torch.cat([row.ids[row.answers] for row in rows]).long()


def loss_of(model: PreTrainedModel, rows: TokenRows) -> Tensor:
    """Return the mean cross-entropy, in nats, with the target's tokens."""
    logits_TV = logits_of(model, rows)
    return F.cross_entropy(logits_TV, words_of(rows).to(logits_TV.device))


@torch.enable_grad()
def learn(model: PreTrainedModel, rows: TokenRows) -> dict[str, float]:
    """Add the gradients of a step to the model, and return its loss."""
    loss = loss_of(model, rows)
    loss.backward()  # type: ignore[no-untyped-call]
    return {"loss": float(loss.detach())}


@torch.no_grad()
def ranks_of(model: PreTrainedModel, rows: TokenRows) -> Iterator[NumberArray]:
    """Yield, for each row, the rank of each token of its answer by the drafter's logits, from 0."""
    begins = range(0, len(rows), NUM_TOGETHER)
    for begin in ProgressBar(begins, desc="ranks", unit="batch", leave=False):
        some_rows = rows[begin:begin + NUM_TOGETHER]
        rank_T = ranks(logits_of(model, some_rows), words_of(some_rows).tolist())
        row_ends = np.cumsum([int(row.answers.sum()) for row in some_rows])
        yield from np.split(rank_T, row_ends[:-1])


def without_predicted(rows: TokenRows, ranks_by_row: Iterable[NumberArray], stretch: int) -> list[TokenRow]:
    """Return the rows without the stretches of which the drafter predicts every token.

    `ranks_by_row` has the ranks of the whole text at the end of each row, including stretches that were removed before.
    """
    remaining_rows = []
    for row, rank_T in zip(rows, ranks_by_row):
        stretch_parts = torch.from_numpy(rank_T == 0).split(stretch)
        predicted = [first_ranked.all().expand(len(first_ranked)) for first_ranked in stretch_parts]
        answers = row.answers.clone()
        answers[-len(rank_T):] &= ~torch.cat(predicted)
        remaining_rows.append(TokenRow(row.ids, answers))
    return remaining_rows
