"""How many tokens a pass of the target verifies with trees of small models, counted along texts that the target wrote.

What is below a node of such a tree depends on the text up to the node alone, and of all nodes only those on the text
count. So one pass of each model over a text shows what trees at all of its places would bring, and no tree is needed.

A tree has widths, as `expansion` gives them: in step i every node of the last level gets `widths[i]` children. The
first token of a text is that of the prefill, and counts neither as a token nor as a pass.

Shapes: N places of a text, K numbers of children from 1 on, V vocabulary.
"""
from __future__ import annotations

from itertools import takewhile
from typing import Sequence

import numpy as np
from torch import Tensor

from model.rules import Law, residual

Array = np.ndarray


def ranks(logits_NV: Tensor, text: Sequence[int]) -> Array:
    """How many tokens a drafter finds likelier than each token `[N]` of the text, by its logits there."""
    own_N1 = logits_NV.new_tensor(text).long()[:, None]
    likelier_NV = logits_NV > logits_NV.gather(1, own_N1)
    return likelier_NV.sum(1).cpu().numpy()


def among_best(rank_N: Array, most: int) -> Array:
    """Whether each token is among a drafter's best 1 to `most` tokens, `[K, N]`: what is accepted of these.

    At temperature 0 this is so by every rule, above it by the naive one.
    """
    return (rank_N < np.arange(1, most + 1)[:, None]).astype(float)


def among_drawn(theirs_NV: Law, text: Sequence[int], most: int) -> Array:
    """The probability `[K, N]` that the token is among 1 to `most` tokens drawn independently from a drafter's laws."""
    chance_N = theirs_NV[range(len(text)), text]
    return 1 - (1 - chance_N) ** np.arange(1, most + 1)[:, None]


def by_mss(law_NV: Law, theirs_NV: Law, text: Sequence[int], most: int) -> Array:
    """The probability `[K, N]` that the token was accepted, given that multi-step speculative sampling wrote it.

    The drafter draws 1 to `most` tokens independently from its law q. What draw i adds to the probability of a token is
    min(p_i, q) times the probability that all draws before were rejected, where p_i is what these have left of the
    target's law p (SpecInfer, algorithm 2); the whole probability of the token is p.
    """
    found = [_by_mss(*place, most) for place in zip(law_NV, theirs_NV, text)]
    return np.array(found).reshape(len(text), most).T


def _by_mss(law_V: Law, theirs_V: Law, token: int, most: int) -> list[float]:
    left_V, reached, accepted = law_V, 1.0, 0.0
    found = []
    for _ in range(most):
        accepted += reached * min(left_V[token], theirs_V[token])
        found.append(accepted / law_V[token])
        reached *= np.maximum(left_V - theirs_V, 0).sum()
        left_V = residual(left_V, theirs_V)
    return found


def passes(accepted_KN: Array, widths: Sequence[int]) -> float:
    """The expected number of passes over a text whose tokens are accepted independently with these probabilities."""
    at_level = np.zeros(len(widths) + 1)  # the probability of standing at each level of a tree; the last one is a leaf
    at_level[0] = 1.0
    rows = [width - 1 for width in widths]
    total = 0.0
    for accepted_K in accepted_KN.T[1:]:
        total += at_level[0]
        deeper = at_level[:-1] * accepted_K[rows]
        at_level = np.concatenate([[1.0 - deeper.sum()], deeper])
    return total


def merged_passes(rank_DN: Sequence[Array], widths: Sequence[int]) -> int:
    """The number of passes with merged trees of the best guesses of several drafters, which are D rows of `ranks`.

    A path is in the merged tree if it is in the tree of one of them (section 3 on merge-based trees).
    """
    place, total = 1, 0
    while place < len(rank_DN[0]):
        place += 1 + max(_reach(rank_N[place:], widths) for rank_N in rank_DN)
        total += 1
    return total


def _reach(rank_N: Array, widths: Sequence[int]) -> int:
    """How many of the next tokens the tree of one drafter has on one path."""
    found = takewhile(lambda pair: pair[0] < pair[1], zip(rank_N, widths))
    return len(list(found))
