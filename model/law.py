"""The changes of the target's law (its distribution) at a node before sampling: biases, penalties and a grammar.

They depend only on the tokens on the path from the root to the node. So the law at a node does not depend on the
method or on the source of the guess, and a branch is judged by the counts of its own tokens.

Shapes: T rows, V vocabulary, N tokens that occur on the paths.
"""
from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Sequence

import numpy as np
import torch
from torch import Tensor

from model.grammar import Follower, Grammar
from model.sample import Penalties
from model.tree import TokenTree


class PathLaw:
    """The part of one request's law that depends on the path; `begin` is the number of tokens of its prompt."""

    def __init__(self, penalties: Penalties, begin: int, grammar: Grammar | None = None) -> None:
        self._penalties, self._begin = penalties, begin
        self.follower = Follower(grammar, begin) if grammar else None
        self._read = 0  # counted tokens of the text
        self._text: Counter[int] = Counter()  # counts in prompt and answer
        self._answer: Counter[int] = Counter()  # counts in the answer only

    def shaped(self, tree: TokenTree, nodes: Sequence[int], logits_TV: Tensor,
               known_V: Tensor | None = None) -> Tensor:
        """Return the changed logits of these nodes, tip or guesses; `known_V` are the columns' tokens, if not all."""
        exact = torch.promote_types(logits_TV.dtype, torch.float32)
        logits_TV = logits_TV.to(exact, copy=True)
        if self._penalties.bias:
            tokens, values = zip(*self._penalties.bias)
            place, columns = _columns(tokens, known_V, logits_TV)
            logits_TV[:, columns] += logits_TV.new_tensor(values)[place]
        if self._penalties.counts:
            self._penalize(logits_TV, [path_below(tree, node) for node in nodes], tree, known_V)
        if self.follower is None:
            return logits_TV
        size = logits_TV.shape[-1] if known_V is None else int(known_V.max()) + 1
        allowed_TV = torch.from_numpy(self.follower.mask(tree, nodes, size)).to(logits_TV.device)
        if known_V is not None:
            allowed_TV = allowed_TV[:, known_V]
            allowed_TV[~allowed_TV.any(-1)] = True  # a draft without any allowed token makes useless guesses
        return logits_TV.masked_fill(~allowed_TV, float("-inf"))

    def allows(self, tree: TokenTree, node: int, token: int) -> bool:
        """Return whether a token may follow a node, the tip or a guess."""
        return self.follower is None or self.follower.allows(tree, node, token)

    def _penalize(self, logits_TV: Tensor, paths: Sequence[Sequence[int]], tree: TokenTree,
                  known_V: Tensor | None) -> None:
        """Apply the penalties to tokens that occur in the text or on the paths, in place."""
        for node in tree.trunk[self._read:]:
            token = tree.nodes[node].token
            self._text[token] += 1
            self._answer[token] += tree.nodes[node].pos >= self._begin
        self._read = len(tree.trunk)
        _, repetition, frequency, presence = self._penalties
        counted = self._answer if repetition == 1 else self._text
        tokens = list(dict.fromkeys(chain(counted, *paths)))
        if not tokens:
            return
        number = {token: column for column, token in enumerate(tokens)}
        below_TN = np.zeros((len(paths), len(tokens)))
        for row, path in enumerate(paths):
            for token in path:
                below_TN[row, number[token]] += 1
        answer_N = np.array([self._answer[token] for token in tokens])
        text_N = np.array([self._text[token] for token in tokens])
        place, columns = _columns(tokens, known_V, logits_TV)
        said_TN = logits_TV.new_tensor(below_TN + answer_N)[:, place]
        seen_TN = logits_TV.new_tensor(below_TN + text_N)[:, place] > 0
        worth_TN = logits_TV[:, columns]
        less_TN = torch.where(worth_TN > 0, worth_TN / repetition, worth_TN * repetition)
        worth_TN = torch.where(seen_TN, less_TN, worth_TN)
        logits_TV[:, columns] = worth_TN - frequency * said_TN - presence * (said_TN > 0)


def path_below(tree: TokenTree, node: int) -> list[int]:
    """Return the tokens of the guesses from the tip to a node, which is the tip or below it."""
    tokens = []
    while node != tree.tip:
        tokens.append(tree.nodes[node].token)
        node = tree.nodes[node].parent
    return tokens[::-1]


def _columns(tokens: Sequence[int], known_V: Tensor | None, logits_TV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of the tokens that have a column, and these columns."""
    token_N = torch.tensor(tokens, device=logits_TV.device)
    if known_V is None:
        return torch.arange(len(tokens), device=logits_TV.device), token_N
    last = max(int(known_V.max()), max(tokens))
    column = torch.full((last + 1,), -1, device=logits_TV.device)
    column[known_V] = torch.arange(len(known_V), device=logits_TV.device)
    place = (column[token_N] >= 0).nonzero()[:, 0]
    return place, column[token_N[place]]
