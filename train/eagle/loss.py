"""What a head is taught in a row of text, for the heads of EAGLE-1/2 and for those of EAGLE-3.

A head that is taught on the base's features alone meets something else when it drafts, its own outputs, and gets worse
with every guess that it stands on. So a first part makes it good, and a second one feeds it its own outputs. Nothing
here knows about optimizers or files. Only words of answers are asked for: the pair p of pass s predicts the
feature of token p + s + 1, and with it the word behind that, which has to be an answer's.

Shapes: N tokens of a row, D model, M words that are asked for, V vocabulary of the head.
"""
from __future__ import annotations

import math
import sys
from bisect import bisect
from dataclasses import dataclass
from itertools import accumulate
from typing import Iterator, NamedTuple, Sequence, Tuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from model.drafts.heads import Eagle3Head, EagleHead, Trainable
from train.data import Row, Rows
from train.eagle.heads import known_words
from train.eagle.teacher import Teacher
from train.eagle.unroll import Known, unroll

PASSES, STARTS = 8, 10
DEPTHS = (0, 1, 2, 4, 8, 16, 32)
FIRST = 3.0  # what the pass over the target's features counts beside each later one
LIKELIEST = 64  # words of the target that the second part asks for
# One pass over a row: the loss, summed over the words that were asked for, and which of them `[M]` are the base's.
Mark = Tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Objective:
    """How a head is taught, and for how many steps in a course of several parts."""

    passes: int  # the first with the base's features, the others with what the head itself made before
    decay: float = 1.0  # what a pass counts beside the one before
    first: float = 1.0  # what the first pass counts beside that
    starts: int | None = None  # answers' pairs in a row, drawn by chance, where later passes start; None: all pairs
    likeliest: int = 0  # words of the base that are asked for at each place; 0: all of them
    noise: float = 0.0  # features that the head reads are off by up to so much
    word_weight: float = 0.1  # of the words beside the features, EAGLE-1/2
    steps: int = 0
    own: bool = False  # whether later passes read what the head made, which is learned at half the rate


def own_part(steps: int, passes: int = PASSES, starts: int = STARTS) -> Objective:
    """Passes over the head's own outputs, with gradients through all of them."""
    return Objective(passes, first=FIRST, starts=starts, likeliest=LIKELIEST, word_weight=1.0, steps=steps,
                     own=True)


def teacher_parts(steps: int, noise: float, word_weight: float) -> list[Objective]:
    """The target's features, in EAGLE's way (section 3.2); in the last quarter words count as much as features."""
    short = steps // 4
    return [Objective(1, noise=noise, word_weight=word_weight, steps=steps - short),
            Objective(1, word_weight=1.0, steps=short)]


def part_at(step: int, parts: Sequence[Objective]) -> int:
    """The number of the part that a step belongs to."""
    return bisect(list(accumulate(part.steps for part in parts)), step)


class Wanted(NamedTuple):
    """What a head shall predict in a row: at the tokens `place_M` the base's features, likeliest words, and the
    probabilities of the words that the head knows."""

    place_M: Tensor
    feature_MD: Tensor
    word_M: Tensor
    chance_MV: Tensor

    def among(self, place_T: Tensor) -> tuple[Tensor, Wanted]:
        """Which of these tokens are asked for, as numbers of them, and what is wanted of those."""
        at_TM = place_T[:, None] == self.place_M
        asked, chosen = at_TM.nonzero(as_tuple=True)
        return asked, Wanted(*(column[chosen] for column in self))


class Task:
    """One head, its teacher, and its loss, which is that of EAGLE-1/2 (section 3.2 of EAGLE): SmoothL1 between
    features, soft cross-entropy between the words for them."""

    behind = "own guesses that the head stands on"  # what its agreement is counted by
    by_pass = False  # whether it is counted for each pass that is taught, or for DEPTHS

    def __init__(self, teacher: Teacher, head: Trainable, method: Objective) -> None:
        self.teacher, self.head = teacher, head
        self.method = method
        self.own_V = torch.arange(teacher.config.vocab, device=teacher.device)  # the base's words that the head knows

    @property
    def depths(self) -> Sequence[int]:
        """Behind how many of these its agreement is counted."""
        return range(self.method.passes) if self.by_pass else DEPTHS

    def size(self, row: Row) -> int:
        """What the sum of a row's losses is divided by, together with the other rows of a batch."""
        return int(row.answers[2:].sum())

    def given(self, last_ND: Tensor, inner_ND: Tensor | None) -> Tensor:
        """Those features of the base that the head reads."""
        if isinstance(self.head, EagleHead):
            return last_ND
        assert inner_ND is not None, f"a base of {self.teacher.config.layers} layers has no inner features"
        return inner_ND

    def known(self, feature_MD: Tensor) -> Tensor:
        """The base's logits of the words that the head knows."""
        return self.teacher.lm_head(feature_MD)  # type: ignore[no-any-return]

    def judge(self, out_MD: Tensor, wanted: Wanted) -> Mark:
        """Compare what the head made with what was wanted."""
        off_MD = F.smooth_l1_loss(out_MD.float(), wanted.feature_MD, reduction="none")
        logits_MV = self.known(out_MD.to(self.teacher.dtype))
        words, right_M = self.words(logits_MV, wanted)
        return off_MD.mean(-1).sum() + self.method.word_weight * words, right_M

    def words(self, logits_MV: Tensor, wanted: Wanted) -> Mark:
        """Compare logits of the words that the head knows with what was wanted.

        Where the base's likeliest word is none that the head knows, nothing is asked.
        """
        counts_M = torch.isin(wanted.word_M, self.own_V)
        gain_MV = wanted.chance_MV * logits_MV.float().log_softmax(-1)
        best_M = self.own_V[logits_MV.argmax(-1)]
        return -(gain_MV * counts_M[:, None]).sum(), best_M == wanted.word_M

    def marks(self, row: Row, seed: Sequence[int]) -> list[Mark]:
        """The mark of each pass, in the arithmetic of the teacher; `seed` is that of the noise and the starts."""
        teacher = self.teacher
        half = teacher.dtype in (torch.float16, torch.bfloat16)
        with torch.autocast(teacher.device.type, teacher.dtype if half else None, enabled=half):
            ids_N = row.ids.to(teacher.device, torch.long)
            last_ND, inner_ND, word_N = teacher.read(ids_N)
            wanted = self._wanted(row, last_ND, word_N)
            feature_ND = self.given(last_ND, inner_ND).to(self.head.fc.weight.dtype)
            if self.method.noise:
                feature_ND = feature_ND + self._noise(feature_ND, seed)
            starts_A = self.starts(row, seed).to(ids_N.device)
            marks = []
            for number, (pairs_T, out_TD) in enumerate(self.passes(ids_N, feature_ND, starts_A)):
                asked_M, asked = wanted.among(pairs_T[:len(out_TD)] + number + 1)
                marks.append(self.judge(out_TD[asked_M], asked))
            return marks

    def passes(self, ids_N: Tensor, feature_ND: Tensor,
               starts_A: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The pairs that each pass starts at, and what the head makes behind them."""
        first_T = torch.arange(len(ids_N) - 1, device=ids_N.device)
        passes = self.method.passes
        made = unroll(self.head, ids_N[1:], feature_ND[:-1], passes, starts_A, self.known_later(feature_ND, starts_A))
        for number, out_TD in enumerate(made):
            yield starts_A if number else first_T, out_TD

    def known_later(self, feature_ND: Tensor, starts_A: Tensor) -> Known | None:
        """The features that later passes read; None: what the head made before."""
        return None

    def starts(self, row: Row, seed: Sequence[int]) -> Tensor:
        """The pairs `[A]` at which later passes start; those of an answer that guess two words of it at least, if not
        all of them are wanted."""
        if self.method.starts is None:
            return torch.arange(len(row.ids) - 1)
        places = _guessing(row)
        order = np.random.default_rng(seed).permutation(len(places))
        chosen = torch.from_numpy(order[:self.method.starts])
        return places[chosen.sort().values]

    def weights(self, row: Row, passes: int) -> list[float]:
        """What each pass over a row counts in the loss; a start stands for the places that were not drawn, too."""
        method = self.method
        later = 1.0
        if method.starts is not None:
            places = len(_guessing(row))
            later = places / max(1, min(places, method.starts))
        return [method.first, *(later * method.decay ** number for number in range(1, passes))]

    @torch.no_grad()
    def _wanted(self, row: Row, last_ND: Tensor, word_N: Tensor) -> Wanted:
        asked_M = row.answers[2:].nonzero()[:, 0]
        place_M = asked_M.to(last_ND.device) + 1
        feature_MD = last_ND[place_M]
        known_MV = self.known(feature_MD).float()
        if 0 < self.method.likeliest < known_MV.shape[-1]:
            least_M = known_MV.topk(self.method.likeliest).values[:, -1]
            known_MV = known_MV.masked_fill(known_MV < least_M[:, None], -math.inf)
        return Wanted(place_M, feature_MD.float(), word_N[place_M], known_MV.softmax(-1))

    @torch.enable_grad()
    def learn(self, rows: Rows, seed: Sequence[int]) -> dict[str, float]:
        """Gradients of a batch, row by row, so that memory is needed for one; `seed` is that of noise and starts."""
        size = sum(self.size(row) for row in rows)
        whole = 0.0
        right = asked = 0
        for number, row in enumerate(rows):
            marks = self.marks(row, (*seed, number))
            weights = self.weights(row, len(marks))
            losses = [loss * weight for (loss, _), weight in zip(marks, weights)]
            total = torch.stack(losses).sum() / size
            total.backward()  # type: ignore[no-untyped-call]
            whole += float(total.detach())
            _, right_M = marks[0]
            right += int(right_M.sum())
            asked += len(right_M)
        return {"loss": whole, "agreement": right / asked}

    def _noise(self, feature_ND: Tensor, seed: Sequence[int]) -> Tensor:
        """What these features are off by; it depends on nothing but the seed."""
        state = np.random.SeedSequence(seed).generate_state(1, np.uint64)
        whole = int(state[0] >> np.uint64(1))  # torch takes 63 bits
        generator = torch.Generator(feature_ND.device).manual_seed(whole)
        off_ND = torch.empty_like(feature_ND).uniform_(generator=generator)
        return (2 * off_ND - 1) * self.method.noise

    @torch.no_grad()
    def agreement(self, rows: Rows, depths: Sequence[int]) -> list[float]:
        """The fraction of words where the head's likeliest is the base's, by the number of its own guesses that the
        head stands on."""
        passes = max(depths) + 1
        right, asked = [0] * passes, [0] * passes
        every = Objective(passes, starts=sys.maxsize)
        test = type(self)(self.teacher, self.head, every)
        for row in rows:
            for number, (_, right_M) in enumerate(test.marks(row, (0,))):
                right[number] += int(right_M.sum())
                asked[number] += len(right_M)
        return [right[depth] / max(asked[depth], 1) for depth in depths]


def _guessing(row: Row) -> Tensor:
    """The pairs of a row that predict a word of an answer and are followed by another word of it."""
    return (row.answers[2:-1] & row.answers[3:]).nonzero()[:, 0]


class WordTask(Task):
    """EAGLE-3 (section 3): soft cross-entropy over the head's own vocabulary alone; the mean is over all pairs."""

    head: Eagle3Head

    def __init__(self, teacher: Teacher, head: Eagle3Head, method: Objective) -> None:
        super().__init__(teacher, head, method)
        self.own_V = known_words(head).to(teacher.device)
        self._known_VD = teacher.lm_head.product.weight[self.own_V].detach()

    def size(self, row: Row) -> int:
        return len(row.ids) - 1

    def known(self, feature_MD: Tensor) -> Tensor:
        return F.linear(feature_MD, self._known_VD)

    def judge(self, out_MD: Tensor, wanted: Wanted) -> Mark:
        return self.words(self.head.logits(out_MD), wanted)
