"""What a head is taught in a row of text, for the heads of EAGLE-1/2 and for those of EAGLE-3.

It knows nothing about optimizers or files. Only words of answers are asked for: the pair p of pass s foretells the
feature of token p + s + 1, and with it the word behind that, which has to be an answer's.

Shapes: N tokens of a row, D model, M words that are asked for, V vocabulary of the head.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from model.eagle import Eagle3Head, EagleHead, Head
from scripts.train_eagle.data import Row
from scripts.train_eagle.teacher import Teacher
from scripts.train_eagle.unroll import unroll


@dataclass(frozen=True)
class Objective:
    """How a head is taught."""

    passes: int  # the first with the base's features, the others with what the head itself made before
    decay: float = 1.0  # what a pass counts beside the one before
    noise: float = 0.0  # features that the head reads are off by up to so much
    word_weight: float = 0.1  # of the words beside the features, EAGLE-1/2


@dataclass(frozen=True)
class Mark:
    """One pass over one row, summed over the words that were asked for: the loss, and how many were the base's."""

    loss: Tensor
    right: Tensor


@dataclass(frozen=True)
class Wanted:
    """What a head shall foretell in a row: at the tokens `place_M` the base's features, likeliest words, and the
    probabilities of the words that the head knows."""

    place_M: Tensor
    feature_MD: Tensor
    word_M: Tensor
    chance_MV: Tensor

    def behind(self, number: int) -> Wanted:
        """What is wanted of the tokens behind this one: the first ones have too few pairs before them."""
        reached_M = self.place_M > number
        columns = (self.place_M, self.feature_MD, self.word_M, self.chance_MV)
        return Wanted(*(column[reached_M] for column in columns))


class Task:
    """One head, its teacher, and the loss of its kind."""

    def __init__(self, teacher: Teacher, head: Head, method: Objective) -> None:
        self.teacher, self.head = teacher, head
        self.method = method

    def size(self, row: Row) -> int:
        """What the sum of a row's losses is divided by, together with the other rows of a batch."""
        raise NotImplementedError

    def given(self, last_ND: Tensor, inner_ND: Tensor | None) -> Tensor:
        """Those features of the base that the head reads."""
        raise NotImplementedError

    def known(self, logits_MV: Tensor) -> Tensor:
        """The base's logits of the words that the head knows."""
        raise NotImplementedError

    def judge(self, out_MD: Tensor, wanted: Wanted) -> Mark:
        """Compare what the head made with what was wanted."""
        raise NotImplementedError

    def marks(self, row: Row, noise: torch.Generator | None = None) -> list[Mark]:
        """The mark of each pass, in the arithmetic of the teacher."""
        device, dtype = self.teacher.device, self.teacher.dtype
        half = dtype in (torch.float16, torch.bfloat16)
        with torch.autocast(device.type, dtype if half else None, enabled=half):
            return self._marks(row, noise)

    def _marks(self, row: Row, noise: torch.Generator | None) -> list[Mark]:
        ids_N = row.ids.to(self.teacher.device, torch.long)
        last_ND, inner_ND = self.teacher.read(ids_N)
        wanted = self._wanted(row, last_ND)
        feature_ND = self.given(last_ND, inner_ND).to(self.head.fc.weight.dtype)
        if noise is not None:
            dtype, device = feature_ND.dtype, feature_ND.device
            off_ND = torch.rand(feature_ND.shape, generator=noise, dtype=dtype, device=device)
            feature_ND = feature_ND + (2 * off_ND - 1) * self.method.noise
        marks = []
        token_T, feature_TD = ids_N[1:], feature_ND[:-1]
        passes = unroll(self.head, token_T, feature_TD, self.method.passes)
        for number, out_TD in enumerate(passes):
            asked = wanted.behind(number)
            marks.append(self.judge(out_TD[asked.place_M - 1 - number], asked))
        return marks

    @torch.no_grad()
    def _wanted(self, row: Row, last_ND: Tensor) -> Wanted:
        asked_M = row.answers[2:].nonzero()[:, 0]
        place_M = asked_M.to(last_ND.device) + 1
        feature_MD = last_ND[place_M]
        logits_MV = self.teacher.lm_head(feature_MD).float()
        chance_MV = self.known(logits_MV).softmax(-1)
        return Wanted(place_M, feature_MD.float(), logits_MV.argmax(-1), chance_MV)

    @torch.enable_grad()
    def learn(self, rows: Sequence[Row], seed: Sequence[int]) -> dict[str, float]:
        """Gradients of a batch, row by row, so that memory is needed for one; `seed` is that of the noise."""
        size = sum(self.size(row) for row in rows)
        loss = right = 0.0
        asked = 0
        for number, row in enumerate(rows):
            noise = self._noise(*seed, number) if self.method.noise else None
            marks = self.marks(row, noise)
            losses = [mark.loss * self.method.decay ** i for i, mark in enumerate(marks)]
            total = torch.stack(losses).sum() / size
            total.backward()  # type: ignore[no-untyped-call]
            loss += float(total.detach())
            right += float(marks[0].right)
            asked += int(row.answers[2:].sum())
        return {"loss": loss, "agreement": right / asked}

    def _noise(self, *seed: int) -> torch.Generator:
        """A generator whose numbers depend on nothing but this seed."""
        state = np.random.SeedSequence(seed).generate_state(1, np.uint64)
        whole = int(state[0] >> np.uint64(1))  # torch takes 63 bits
        return torch.Generator(self.teacher.device).manual_seed(whole)

    @torch.no_grad()
    def agreement(self, rows: Sequence[Row], passes: int) -> list[float]:
        """The fraction of words where the head's likeliest is the base's, for 0 to `passes` - 1 guesses between."""
        right, asked = [0.0] * passes, [0] * passes
        test = type(self)(self.teacher, self.head, Objective(passes))
        for row in rows:
            for number, mark in enumerate(test.marks(row)):
                right[number] += float(mark.right)
                asked[number] += int(row.answers[2 + number:].sum())
        return [a / max(b, 1) for a, b in zip(right, asked)]


class FeatureTask(Task):
    """EAGLE-1/2 (section 3.2 of EAGLE): SmoothL1 between features, soft cross-entropy between the words for them."""

    head: EagleHead

    def size(self, row: Row) -> int:
        return int(row.answers[2:].sum())

    def given(self, last_ND: Tensor, inner_ND: Tensor | None) -> Tensor:
        return last_ND

    def known(self, logits_MV: Tensor) -> Tensor:
        return logits_MV

    def judge(self, out_MD: Tensor, wanted: Wanted) -> Mark:
        logits_MV = self.teacher.lm_head(out_MD.to(self.teacher.dtype)).float()
        off_MD = F.smooth_l1_loss(out_MD.float(), wanted.feature_MD, reduction="none")
        features = off_MD.mean(-1).sum()
        words = -(wanted.chance_MV * logits_MV.log_softmax(-1)).sum()
        right_M = logits_MV.argmax(-1) == wanted.word_M
        return Mark(features + self.method.word_weight * words, right_M.sum())


class WordTask(Task):
    """EAGLE-3 (section 3): soft cross-entropy over the head's own vocabulary alone; the mean is over all pairs.

    Where the base's likeliest word is none that the head knows, nothing is asked.
    """

    head: Eagle3Head

    def __init__(self, teacher: Teacher, head: Eagle3Head, method: Objective) -> None:
        super().__init__(teacher, head, method)
        own = torch.arange(head.lm_head.out_features, device=teacher.device)
        self._target_V = own if head.shift is None else own + head.shift

    def size(self, row: Row) -> int:
        return len(row.ids) - 1

    def given(self, last_ND: Tensor, inner_ND: Tensor | None) -> Tensor:
        assert inner_ND is not None, f"a base of {self.teacher.config.layers} layers has no features for EAGLE-3"
        return inner_ND

    def known(self, logits_MV: Tensor) -> Tensor:
        return logits_MV[:, self._target_V]

    def judge(self, out_MD: Tensor, wanted: Wanted) -> Mark:
        logits_MV = self.head.logits(out_MD).float()
        counts_M = torch.isin(wanted.word_M, self._target_V)
        words_M = -(wanted.chance_MV * logits_MV.log_softmax(-1)).sum(-1)
        right_M = self._target_V[logits_MV.argmax(-1)] == wanted.word_M
        return Mark((words_M * counts_M).sum(), right_M.sum())
