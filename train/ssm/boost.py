"""Boost-tuning (SpecInfer, section 3): what a drafter learns, and what it leaves to the next one.

A text is cut into stretches. Each is a prompt of its own, which is all that stands before it, with the continuation
that the target wrote. It knows nothing about files.

Shapes: B texts, N tokens of each, T tokens that are to be learnt, V vocabulary.
"""
from __future__ import annotations

from typing import Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from train.data import draw
from train.ssm.texts import Batch, Chosen, batch_of, whole_of
from train.writer import Text

AT_ONCE = 64  # texts that are read beside each other where nothing is learnt


def logits_of(model: PreTrainedModel, batch: Batch) -> Tensor:
    """The logits `[T, V]` at the tokens that are to be learnt, which stand behind at least one other token each."""
    hidden_BND = model.base_model(input_ids=batch.ids, attention_mask=batch.there, use_cache=False).last_hidden_state
    head = model.get_output_embeddings()
    hidden_TD = hidden_BND[:, :-1][batch.learnt[:, 1:]]
    logits_TV: Tensor = head(hidden_TD)
    return logits_TV


def loss_of(model: PreTrainedModel, batch: Batch, teacher: PreTrainedModel | None) -> Tensor:
    """Mean cross-entropy, in nats, with the target's tokens, or with the whole distributions of a `teacher`."""
    logits_TV = logits_of(model, batch)
    wanted = batch.ids[batch.learnt]
    if teacher is not None:
        with torch.no_grad():
            wanted = torch.softmax(logits_of(teacher, batch), -1)
    return F.cross_entropy(logits_TV, wanted)


class Lesson:
    """The steps of one drafter's training: texts with a stretch that is left, in an order that the seed gives."""

    def __init__(self, model: PreTrainedModel, texts: Sequence[Text], left: Chosen,
                 batch: int, seed: int) -> None:
        self.model, self.batch, self.seed = model, batch, seed
        self.teacher: PreTrainedModel | None = None  # whose distributions are learnt in place of tokens
        some = [place for place, left_N in enumerate(left) if left_N.any()]
        self.texts = [texts[place] for place in some]
        self.left = [left[place] for place in some]

    @torch.enable_grad()
    def __call__(self, step: int) -> dict[str, float]:
        """The gradients of a step, and its loss."""
        chosen = draw(len(self.texts), self.seed, step * self.batch, self.batch)
        texts = [self.texts[i] for i in chosen]
        left = [self.left[i] for i in chosen]
        batch = batch_of(texts, left, self.model.device)  # type: ignore[arg-type]
        loss = loss_of(self.model, batch, self.teacher)
        loss.backward()  # type: ignore[no-untyped-call]
        return {"loss": float(loss.detach())}


@torch.no_grad()
def right(model: PreTrainedModel, texts: Sequence[Text]) -> Iterator[Tensor]:
    """For each text which of its tokens are those that the drafter finds likeliest there, `[N]`."""
    begins = range(0, len(texts), AT_ONCE)
    for begin in tqdm(begins, desc="which are foreseen", unit="batch", leave=False):
        some = texts[begin:begin + AT_ONCE]
        batch = batch_of(some, whole_of(some), model.device)
        same_T = logits_of(model, batch).argmax(-1) == batch.ids[batch.learnt]
        yield from same_T.cpu().split([len(text.ids) for text in some])


def still_left(left: Chosen, right: Iterable[Tensor], stretch: int) -> list[Tensor]:
    """What is left of the tokens when the stretches are taken out that the drafter has right to their end."""
    found = []
    for left_N, right_N in zip(left, right):
        parts = right_N.split(stretch)
        foreseen = [part.all().expand(len(part)) for part in parts]
        found.append(left_N & ~torch.cat(foreseen))
    return found
