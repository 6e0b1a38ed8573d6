"""Boost-tuning (SpecInfer, section 3): what a drafter learns, and what it leaves to the next one.

A text is cut into stretches. Each is a prompt of its own, which is all that stands before it, with the continuation
that the target wrote. It knows nothing about files.

Shapes: B texts, N tokens of each, T tokens that are to be learnt, V vocabulary.
"""
from __future__ import annotations

from typing import Iterable, Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import PreTrainedModel

from eval.tokens_per_pass import Array, ranks
from train.data import Row

AT_ONCE = 64  # texts that are read beside each other where nothing is learnt


def logits_of(model: PreTrainedModel, rows: Sequence[Row]) -> Tensor:
    """The logits `[T, V]` at the answers of rows side by side, each of which stands behind another token."""
    ids_BN = pad_sequence([row.ids.long() for row in rows], batch_first=True)
    there_BN = pad_sequence([torch.ones(len(row.ids)) for row in rows], batch_first=True)
    learnt_BN = pad_sequence([row.answers for row in rows], batch_first=True)
    device = model.device
    read = model.base_model(input_ids=ids_BN.to(device), attention_mask=there_BN.long().to(device), use_cache=False)
    hidden_TD = read.last_hidden_state[:, :-1][learnt_BN[:, 1:].to(device)]
    logits_TV: Tensor = model.get_output_embeddings()(hidden_TD)
    return logits_TV


def words_of(rows: Sequence[Row]) -> Tensor:
    """The tokens `[T]` of the answers."""
    return torch.cat([row.ids[row.answers] for row in rows]).long()


def loss_of(model: PreTrainedModel, rows: Sequence[Row], teacher: PreTrainedModel | None) -> Tensor:
    """Mean cross-entropy, in nats, with the target's tokens, or with the whole distributions of a `teacher`."""
    logits_TV = logits_of(model, rows)
    if teacher is None:
        return F.cross_entropy(logits_TV, words_of(rows).to(logits_TV.device))
    with torch.no_grad():
        wanted_TV = torch.softmax(logits_of(teacher, rows), -1)
    return F.cross_entropy(logits_TV, wanted_TV)


@torch.enable_grad()
def learn(model: PreTrainedModel, rows: Sequence[Row], teacher: PreTrainedModel | None) -> dict[str, float]:
    """The gradients of a step, and its loss."""
    loss = loss_of(model, rows, teacher)
    loss.backward()  # type: ignore[no-untyped-call]
    return {"loss": float(loss.detach())}


@torch.no_grad()
def ranks_of(model: PreTrainedModel, rows: Sequence[Row]) -> Iterator[Array]:
    """For each row how many tokens the drafter finds likelier than each of its answer."""
    begins = range(0, len(rows), AT_ONCE)
    for begin in tqdm(begins, desc="which are foreseen", unit="batch", leave=False):
        some = rows[begin:begin + AT_ONCE]
        rank_T = ranks(logits_of(model, some), words_of(some).tolist())
        ends = np.cumsum([int(row.answers.sum()) for row in some])
        yield from np.split(rank_T, ends[:-1])


def still_left(rows: Sequence[Row], ranked: Iterable[Array], stretch: int) -> list[Row]:
    """What is left of rows when the stretches are taken out that the drafter has right to their end.

    `ranked` is about the whole text at the end of each row, of which some may have been taken out before.
    """
    found = []
    for row, rank_T in zip(rows, ranked):
        parts = torch.from_numpy(rank_T == 0).split(stretch)
        foreseen = [part.all().expand(len(part)) for part in parts]
        answers = row.answers.clone()
        answers[-len(rank_T):] &= ~torch.cat(foreseen)
        found.append(Row(row.ids, answers))
    return found
