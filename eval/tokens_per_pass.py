"""Tokens that a pass of the target verifies with trees of small models, counted along texts that the target wrote.

The nodes below a node of such a tree depend only on the text up to the node, and only nodes on the text count. So one
pass of each model over a text shows the gain of trees at all of its places, and no tree is needed.

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

NumberArray = np.ndarray


def ranks(logits_NV: Tensor, text: Sequence[int]) -> NumberArray:
    """Return, for each token `[N]` of the text, how many tokens are likelier by the drafter's logits there."""
    token_N1 = logits_NV.new_tensor(text).long()[:, None]
    likelier_NV = logits_NV > logits_NV.gather(1, token_N1)
    return likelier_NV.sum(1).cpu().numpy()


def among_best(rank_N: NumberArray, max_guesses: int) -> NumberArray:
    """Return whether each token is among a drafter's best 1 to `max_guesses` tokens, `[K, N]`, and so is accepted.

    At temperature 0 this holds for every rule, above it for the naive one.
    """
    return (rank_N < np.arange(1, max_guesses + 1)[:, None]).astype(float)


def among_drawn(draft_NV: Law, text: Sequence[int], max_guesses: int) -> NumberArray:
    """Return the probability `[K, N]` that the token is among 1 to `max_guesses` draws from a drafter's laws.

    The draws are independent.
    """
    probability_N = draft_NV[range(len(text)), text]
    return 1 - (1 - probability_N) ** np.arange(1, max_guesses + 1)[:, None]


def by_mss(target_NV: Law, draft_NV: Law, text: Sequence[int], max_guesses: int) -> NumberArray:
    """Return the probability `[K, N]` that the token was accepted, given that multi-step speculative sampling wrote it.

    The drafter draws 1 to `max_guesses` tokens independently from its law q. Draw i adds to the probability of a token
    min(p_i, q) times the probability that all earlier draws were rejected, where p_i is the target's law p after these
    rejections (SpecInfer, algorithm 2). The total probability of the token is p.
    """
    probabilities = [_by_mss(*inputs, max_guesses) for inputs in zip(target_NV, draft_NV, text)]
    return np.array(probabilities).reshape(len(text), max_guesses).T


def _by_mss(target_V: Law, draft_V: Law, token: int, max_guesses: int) -> list[float]:
    left_V, reach_probability, accept_probability = target_V, 1.0, 0.0
    probabilities = []
    for _ in range(max_guesses):
        accept_probability += reach_probability * min(left_V[token], draft_V[token])
        probabilities.append(accept_probability / target_V[token])
        reach_probability *= np.maximum(left_V - draft_V, 0).sum()
        left_V = residual(left_V, draft_V)
    return probabilities


def passes(accepted_KN: NumberArray, widths: Sequence[int]) -> float:
    """Return the expected passes over a text if its tokens are accepted independently with these probabilities."""
    level_probabilities = np.zeros(len(widths) + 1)  # of being at each level of a tree; the last one is a leaf
    level_probabilities[0] = 1.0
    width_rows = [width - 1 for width in widths]
    num_passes = 0.0
    for accepted_K in accepted_KN.T[1:]:
        num_passes += level_probabilities[0]
        deeper_probabilities = level_probabilities[:-1] * accepted_K[width_rows]
        level_probabilities = np.concatenate([[1.0 - deeper_probabilities.sum()], deeper_probabilities])
    return num_passes


def merged_passes(rank_DN: Sequence[NumberArray], widths: Sequence[int]) -> int:
    """Return the number of passes with merged trees of the best guesses of several drafters, the D rows of `ranks`.

    A path is in the merged tree if it is in the tree of any drafter (section 3 on merge-based trees).
    """
    position, num_passes = 1, 0
    while position < len(rank_DN[0]):
        position += 1 + max(_reach(rank_N[position:], widths) for rank_N in rank_DN)
        num_passes += 1
    return num_passes


def _reach(rank_N: NumberArray, widths: Sequence[int]) -> int:
    """Return how many of the next tokens are on one path of one drafter's tree."""
    path_pairs = takewhile(lambda pair: pair[0] < pair[1], zip(rank_N, widths))
    return len(list(path_pairs))
