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
        self._num_counted = 0  # tokens of the text
        self._text_counts: Counter[int] = Counter()  # in prompt and answer
        self._answer_counts: Counter[int] = Counter()

    def shaped(self, tree: TokenTree, nodes: Sequence[int], logits_TV: Tensor,
               column_token_V: Tensor | None = None) -> Tensor:
        """Return the changed logits of these nodes, tip or guesses; not all tokens have a column in some drafts."""
        exact_dtype = torch.promote_types(logits_TV.dtype, torch.float32)
        logits_TV = logits_TV.to(exact_dtype, copy=True)

        # biases and penalties
        if self._penalties.bias:
            tokens, biases = zip(*self._penalties.bias)
            present, columns = _columns(tokens, column_token_V, logits_TV)
            logits_TV[:, columns] += logits_TV.new_tensor(biases)[present]
        if self._penalties.counts:
            self._penalize(logits_TV, [path_below(tree, node) for node in nodes], tree, column_token_V)

        # the grammar
        if self.follower is None:
            return logits_TV
        size = logits_TV.shape[-1] if column_token_V is None else int(column_token_V.max()) + 1
        allowed_TV = torch.from_numpy(self.follower.mask(tree, nodes, size)).to(logits_TV.device)
        if column_token_V is not None:
            allowed_TV = allowed_TV[:, column_token_V]
            allowed_TV[~allowed_TV.any(-1)] = True  # a draft without any allowed token makes useless guesses
        return logits_TV.masked_fill(~allowed_TV, float("-inf"))

    def allows(self, tree: TokenTree, node: int, token: int) -> bool:
        """Return whether a token may follow a node, the tip or a guess."""
        return self.follower is None or self.follower.allows(tree, node, token)

    def _penalize(self, logits_TV: Tensor, paths: Sequence[Sequence[int]], tree: TokenTree,
                  column_token_V: Tensor | None) -> None:
        """Apply the penalties to tokens that occur in the text or on the paths, in place."""
        # the text so far
        for node in tree.trunk[self._num_counted:]:
            token = tree.nodes[node].token
            self._text_counts[token] += 1
            self._answer_counts[token] += tree.nodes[node].pos >= self._begin
        self._num_counted = len(tree.trunk)

        # counts in the text and on each path
        _, repetition, frequency, presence = self._penalties
        tokens = list(dict.fromkeys(chain(self._text_counts, *paths)))
        if not tokens:
            return
        column_of_token = {token: column for column, token in enumerate(tokens)}
        path_count_TN = np.zeros((len(paths), len(tokens)))
        for row, path in enumerate(paths):
            for token in path:
                path_count_TN[row, column_of_token[token]] += 1
        answer_count_N = np.array([self._answer_counts[token] for token in tokens])
        text_count_N = np.array([self._text_counts[token] for token in tokens])

        # penalties
        present, columns = _columns(tokens, column_token_V, logits_TV)
        answer_count_TN = logits_TV.new_tensor(path_count_TN + answer_count_N)[:, present]
        is_repeated_TN = logits_TV.new_tensor(path_count_TN + text_count_N)[:, present] > 0
        logit_TN = logits_TV[:, columns]
        reduced_TN = torch.where(logit_TN > 0, logit_TN / repetition, logit_TN * repetition)
        logit_TN = torch.where(is_repeated_TN, reduced_TN, logit_TN)
        logits_TV[:, columns] = logit_TN - frequency * answer_count_TN - presence * answer_count_TN.clamp(max=1)


def path_below(tree: TokenTree, node: int) -> list[int]:
    """Return the tokens of the guesses from the tip to a node, which is the tip or below it."""
    tokens = []
    while node != tree.tip:
        tokens.append(tree.nodes[node].token)
        node = tree.nodes[node].parent
    return tokens[::-1]


def _columns(tokens: Sequence[int], column_token_V: Tensor | None, logits_TV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of the tokens that have a column, and these columns."""
    token_N = torch.tensor(tokens, device=logits_TV.device)
    if column_token_V is None:
        return torch.arange(len(tokens), device=logits_TV.device), token_N

    last_token = max(int(column_token_V.max()), max(tokens))
    column_of_token = torch.full((last_token + 1,), -1, device=logits_TV.device)
    column_of_token[column_token_V] = torch.arange(len(column_token_V), device=logits_TV.device)
    present = (column_of_token[token_N] >= 0).nonzero()[:, 0]
    return present, column_of_token[token_N[present]]
