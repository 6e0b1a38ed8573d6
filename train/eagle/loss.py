"""Losses of a row of text, for heads of EAGLE-1/2 and of EAGLE-3.

A head that is trained only on the base's features reads its own outputs when it drafts, and so gets worse with every
guess. So a first part trains it on the base's features, and a second one on its own outputs. This module knows nothing
about optimizers or files. The loss counts words of answers only: pair p of pass s predicts the feature of token
p + s + 1, and with it the next word, which must belong to an answer.

Shapes: N tokens of a row, D model, M words in the loss, V vocabulary of the head.
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

from model.drafts.heads import Eagle3Head, EagleHead
from train.course import WHOLE, BatchShare
from train.data import TokenRow, TokenRows
from train.eagle.heads import known_words
from train.eagle.teacher import Teacher
from train.eagle.unroll import Trainable, unroll

PASSES, STARTS = 8, 10
DEPTHS = (0, 1, 2, 4, 8, 16, 32)
FIRST_WEIGHT = 3.0  # weight of the pass over the target's features relative to each later one
NUM_LIKELIEST = 64  # most likely words of the target that the second part compares with
CROSS_ENTROPY_WEIGHT = 0.5  # in the second part of EAGLE-3, next to the acceptance
MIN_ACCEPTANCE = 1e-4  # smaller ones are moved to this
# One pass over a row: the loss, summed over its words, and whether the head's best word is the base's, `[M]`.
Mark = Tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Objective:
    """One part of a training: its losses, and its number of steps."""

    passes: int  # the first reads the base's features, each other one the head's outputs of the previous pass
    decay: float = 1.0  # weight of a pass relative to the previous one
    first: float = 1.0  # weight of the first pass
    starts: int | None = None  # number of random pairs of answers in a row where later passes start; None: all pairs
    likeliest: int = 0  # most likely words of the base to compare with at each place; 0: all
    noise: float = 0.0  # amplitude of the noise on the features that the head reads
    word_weight: float = 0.1  # weight of the words' loss relative to the features' loss, EAGLE-1/2
    steps: int = 0
    reads_own_outputs: bool = False  # whether this part trains on the head's own outputs, at half the rate


def own_part(steps: int, passes: int = PASSES, starts: int = STARTS) -> Objective:
    """Return the part with passes over the head's own outputs, with gradients through all of them."""
    return Objective(passes, first=FIRST_WEIGHT, starts=starts, likeliest=NUM_LIKELIEST, word_weight=1.0, steps=steps,
                     reads_own_outputs=True)


def teacher_parts(steps: int, noise: float, word_weight: float) -> list[Objective]:
    """Return the parts on the target's features (EAGLE, section 3.2); finally words count as much as features."""
    word_steps = steps // 4
    return [Objective(1, noise=noise, word_weight=word_weight, steps=steps - word_steps),
            Objective(1, word_weight=1.0, steps=word_steps)]


def part_at(step: int, parts: Sequence[Objective]) -> int:
    """Return the number of the part to which a step belongs."""
    return bisect(list(accumulate(part.steps for part in parts)), step)


class Wanted(NamedTuple):
    """The labels of a row: at the tokens `place_M` the base's features, its most likely words, and the probabilities of
    the words that the head knows."""

    place_M: Tensor
    feature_MD: Tensor
    word_M: Tensor
    chance_MV: Tensor

    def labels_at(self, place_T: Tensor) -> tuple[Tensor, Wanted]:
        """Return the indices of those of the tokens `place_T` that have labels, and these labels."""
        at_TM = place_T[:, None] == self.place_M
        token_indices, label_indices = at_TM.nonzero(as_tuple=True)
        return token_indices, Wanted(*(column[label_indices] for column in self))


class Task:
    """A head, its teacher, and the loss of EAGLE-1/2 (section 3.2): SmoothL1 of features, cross-entropy of words."""

    counted_by = "by the head's own guesses before the place"  # the quantity by which its agreement is listed
    by_pass = False  # whether agreement is counted for each pass of the objective, or for DEPTHS

    def __init__(self, teacher: Teacher, head: Trainable, method: Objective) -> None:
        self.teacher, self.head = teacher, head
        self.method = method
        self.known_V = torch.arange(teacher.config.vocab, device=teacher.device)  # the base's words that the head knows

    @property
    def depths(self) -> Sequence[int]:
        """The values of that quantity for which agreement is counted."""
        return range(self.method.passes) if self.by_pass else DEPTHS

    def size(self, row: TokenRow) -> int:
        """Return the share of a row in the divisor of a batch's loss."""
        return int(row.answers[2:].sum())

    def head_features(self, last_ND: Tensor, inner_ND: Tensor | None) -> Tensor:
        """Return the features of the base that the head reads."""
        if isinstance(self.head, EagleHead):
            return last_ND
        assert inner_ND is not None, f"a base of {self.teacher.config.layers} layers has no inner features"
        return inner_ND

    def known_logits(self, feature_MD: Tensor) -> Tensor:
        """Return the base's logits of the words that the head knows."""
        return self.teacher.lm_head(feature_MD)  # type: ignore[no-any-return]

    def judge(self, out_MD: Tensor, wanted: Wanted) -> Mark:
        """Return the loss of the head's outputs, and the agreement of their best words."""
        off_MD = F.smooth_l1_loss(out_MD.float(), wanted.feature_MD, reduction="none")
        logits_MV = self.known_logits(out_MD.to(self.teacher.dtype))
        word_loss, right_M = self.words(logits_MV, wanted)
        return off_MD.mean(-1).sum() + self.method.word_weight * word_loss, right_M

    def words(self, logits_MV: Tensor, wanted: Wanted) -> Mark:
        """Return the loss of logits of the words that the head knows, and the agreement of the best words.

        A place has no loss if the head does not know the base's most likely word there.
        """
        counts_M = torch.isin(wanted.word_M, self.known_V)
        logprob_MV = logits_MV.float().log_softmax(-1)
        word_loss = self.word_loss(logprob_MV[counts_M], wanted.chance_MV[counts_M])
        best_M = self.known_V[logits_MV.argmax(-1)]
        return word_loss, best_M == wanted.word_M

    def word_loss(self, logprob_MV: Tensor, chance_MV: Tensor) -> Tensor:
        """Return the cross-entropy, summed over all places, of the head's log-probabilities and the base's
        probabilities."""
        return -(chance_MV * logprob_MV).sum()

    def marks(self, row: TokenRow, seed: Sequence[int]) -> list[Mark]:
        """Return the mark of each pass, in the teacher's number type; `seed` determines the noise and the starts."""
        teacher = self.teacher
        is_half = teacher.dtype in (torch.float16, torch.bfloat16)

        with torch.autocast(teacher.device.type, teacher.dtype if is_half else None, enabled=is_half):
            ids_N = row.ids.to(teacher.device, torch.long)
            last_ND, inner_ND, word_N = teacher.read(ids_N)
            wanted = self._wanted(row, last_ND, word_N)
            feature_ND = self.head_features(last_ND, inner_ND).to(self.head.fc.weight.dtype)
            if self.method.noise:
                feature_ND = feature_ND + self._noise(feature_ND, seed)

            starts_A = self.starts(row, seed).to(ids_N.device)
            marks = []
            for pass_number, (pairs_T, out_TD) in enumerate(self.passes(ids_N, feature_ND, starts_A)):
                chosen_M, labels = wanted.labels_at(pairs_T[:len(out_TD)] + pass_number + 1)
                marks.append(self.judge(out_TD[chosen_M], labels))
            return marks

    def passes(self, ids_N: Tensor, feature_ND: Tensor,
               starts_A: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, for each pass, the pairs where its rows start, and the head's outputs for these rows."""
        first_T = torch.arange(len(ids_N) - 1, device=ids_N.device)
        num_passes = self.method.passes
        outputs = unroll(self.head, ids_N[1:], feature_ND[:-1], num_passes, starts_A)
        for pass_number, out_TD in enumerate(outputs):
            yield starts_A if pass_number else first_T, out_TD

    def starts(self, row: TokenRow, seed: Sequence[int]) -> Tensor:
        """Return the pairs `[A]` where later passes start: all, or a random choice of those that predict a word of an
        answer that is followed by another."""
        if self.method.starts is None:
            return torch.arange(len(row.ids) - 1)
        pairs = _guessing(row)
        order = np.random.default_rng(seed).permutation(len(pairs))
        chosen_indices = torch.from_numpy(order[:self.method.starts])
        return pairs[chosen_indices.sort().values]

    def weights(self, row: TokenRow, num_passes: int) -> list[float]:
        """Return the weight of each pass over a row in the loss; a start also represents the places not chosen."""
        method = self.method
        later_weight = 1.0
        if method.starts is not None:
            num_places = len(_guessing(row))
            later_weight = num_places / max(1, min(num_places, method.starts))
        return [method.first, *(later_weight * method.decay ** pass_number for pass_number in range(1, num_passes))]

    @torch.no_grad()
    def _wanted(self, row: TokenRow, last_ND: Tensor, word_N: Tensor) -> Wanted:
        pair_M = row.answers[2:].nonzero()[:, 0]
        place_M = pair_M.to(last_ND.device) + 1
        feature_MD = last_ND[place_M]
        logits_MV = self.known_logits(feature_MD).float()
        if 0 < self.method.likeliest < logits_MV.shape[-1]:
            least_M = logits_MV.topk(self.method.likeliest).values[:, -1]
            logits_MV = logits_MV.masked_fill(logits_MV < least_M[:, None], -math.inf)
        return Wanted(place_M, feature_MD.float(), word_N[place_M], logits_MV.softmax(-1))

    @torch.enable_grad()
    def learn(self, rows: TokenRows, seed: Sequence[int], share: BatchShare = WHOLE) -> dict[str, float]:
        """Add the gradients of this process's share of a batch, row by row to save memory; return their figures.

        `seed` sets noise and starts. The mean over all processes is the batch's.
        """
        batch_size = sum(self.size(row) for row in rows) / share.num_processes
        batch_loss = 0.0
        num_agreeing = num_words = 0

        for row_number, row in share.of(rows):
            marks = self.marks(row, (*seed, row_number))
            weights = self.weights(row, len(marks))
            losses = [loss * weight for (loss, _), weight in zip(marks, weights)]
            row_loss = torch.stack(losses).sum() / batch_size
            share.backward(row_loss)
            batch_loss += float(row_loss.detach())

            _, right_M = marks[0]
            num_agreeing += int(right_M.sum())
            num_words += len(right_M)

        return {"loss": batch_loss, "agreement": num_agreeing / max(num_words, 1)}

    def _noise(self, feature_ND: Tensor, seed: Sequence[int]) -> Tensor:
        """Return noise for these features, which depends on the seed only."""
        seed_state = np.random.SeedSequence(seed).generate_state(1, np.uint64)
        int_seed = int(seed_state[0] >> np.uint64(1))  # torch takes 63 bits
        generator = torch.Generator(feature_ND.device).manual_seed(int_seed)
        off_ND = torch.empty_like(feature_ND).uniform_(generator=generator)
        return (2 * off_ND - 1) * self.method.noise

    @torch.no_grad()
    def agreement(self, rows: TokenRows, depths: Sequence[int]) -> list[float]:
        """Return the share of words where the head agrees with the base, by the number of own guesses before them."""
        num_passes = max(depths) + 1
        num_agreeing, num_words = [0] * num_passes, [0] * num_passes
        objective = Objective(num_passes, starts=sys.maxsize)
        test_task = type(self)(self.teacher, self.head, objective)
        for row in rows:
            for pass_number, (_, right_M) in enumerate(test_task.marks(row, (0,))):
                num_agreeing[pass_number] += int(right_M.sum())
                num_words[pass_number] += len(right_M)
        return [num_agreeing[depth] / max(num_words[depth], 1) for depth in depths]


def _guessing(row: TokenRow) -> Tensor:
    """Return the pairs of a row that predict a word of an answer and are followed by another word of it."""
    return (row.answers[2:-1] & row.answers[3:]).nonzero()[:, 0]


class WordTask(Task):
    """EAGLE-3 (section 3): soft cross-entropy over the head's own vocabulary only; the mean is over all pairs."""

    head: Eagle3Head

    def __init__(self, teacher: Teacher, head: Eagle3Head, method: Objective) -> None:
        super().__init__(teacher, head, method)
        self.known_V = known_words(head).to(teacher.device)
        self._known_VD = teacher.lm_head.product.weight[self.known_V].detach()

    def size(self, row: TokenRow) -> int:
        return len(row.ids) - 1

    def known_logits(self, feature_MD: Tensor) -> Tensor:
        return F.linear(feature_MD, self._known_VD)

    def judge(self, out_MD: Tensor, wanted: Wanted) -> Mark:
        return self.words(self.head.logits(out_MD), wanted)

    def word_loss(self, logprob_MV: Tensor, chance_MV: Tensor) -> Tensor:
        """Return the cross-entropy; in the second part half of it, less the logarithm of the acceptance at each place.

        A sampled guess is accepted with the probability that base and head share (LK, arXiv 2602.23881).
        """
        cross_entropy = super().word_loss(logprob_MV, chance_MV)
        if not self.method.reads_own_outputs:
            return cross_entropy
        acceptance_M = torch.minimum(chance_MV, logprob_MV.exp()).sum(-1)
        return CROSS_ENTROPY_WEIGHT * cross_entropy - acceptance_M.clamp_min(MIN_ACCEPTANCE).log().sum()
