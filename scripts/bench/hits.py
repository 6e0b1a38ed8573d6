"""How often a draft is right along a given text, by how many guesses of its own it has read since the true features.

It knows nothing about pipelines: a text is a token tree whose nodes have the target's features.
"""
from __future__ import annotations

from itertools import count
from typing import NamedTuple, Sequence

import torch
from torch import Tensor

from model.drafts import TreeDraft
from model.tree import TokenTree

DEPTHS = (0, 1, 2, 4, 8, 16, 32)  # own guesses behind which the next token is guessed
BEST = (1, 3, 10)  # so many of the likeliest guesses count as one try


class Hits(NamedTuple):
    """Tries at each depth, `[depths]`, and how many of them hit with the best 1, 3 and 10 guesses, `[depths, best]`."""

    tries: Tensor
    hits: Tensor

    @staticmethod
    def none() -> Hits:
        """Nothing was tried yet."""
        return Hits(torch.zeros(len(DEPTHS), dtype=torch.long), torch.zeros(len(DEPTHS), len(BEST), dtype=torch.long))

    def plus(self, other: Hits) -> Hits:
        """Both together."""
        return Hits(self.tries + other.tries, self.hits + other.hits)


def hits(draft: TreeDraft, tree: TokenTree, prompt: int) -> Hits:
    """The hits of a draft on the text of a tree, behind its first `prompt` tokens.

    From each token of the text on the draft reads the tokens that follow, as if it had guessed them: with the features
    that it made itself. Its likeliest guesses at each of DEPTHS are compared with the token that comes then.
    """
    draft.reset()
    text = tree.trunk
    first = max(prompt - 1, draft.lag)
    _read_text(draft, tree, text[draft.lag:first], settled=True)
    out_TD = _read_text(draft, tree, text[first:-1], settled=False)
    starts = list(range(first, len(text) - 1))
    room = draft.cache.capacity - len(text)
    at_once = max(1, room // max(DEPTHS))
    found = Hits.none()
    for i in range(0, len(starts), at_once):
        found = found.plus(_unroll(draft, tree, starts[i:i + at_once], out_TD[i:i + at_once]))
        draft.cache.retain(set(text))
    draft.reset()
    return found


def _read_text(draft: TreeDraft, tree: TokenTree, nodes: Sequence[int], settled: bool) -> Tensor:
    """What a draft makes `[T, D]` of these nodes of the text, with the target's features."""
    if not nodes:
        return torch.empty(0)
    parents = [tree.parent[node] for node in nodes]
    draft.cache.admit(nodes, parents, text=len(nodes) if settled else 0)
    places = [tree.pos[node] for node in nodes]
    return _read(draft, [tree.token[node] for node in nodes], places, draft.features(tree, list(nodes)))


def _read(draft: TreeDraft, tokens: Sequence[int], places: Sequence[int], feature_TD: Tensor) -> Tensor:
    device = draft.cache.keys.device
    token_T = torch.tensor(tokens, device=device)
    pos_T = torch.tensor(places, device=device) - draft.lag
    return draft.read(token_T, feature_TD, pos_T, draft.cache)


def _unroll(draft: TreeDraft, tree: TokenTree, starts: Sequence[int], out_TD: Tensor) -> Hits:
    """The hits behind each of these places of the text; `out_TD` is what the draft made of their tokens."""
    tokens, ids = tree.tokens, count(tree.horizon)
    found = Hits.none()
    ends = [tree.trunk[start] for start in starts]  # the node that each of the unrolled texts ends in
    for depth in range(max(DEPTHS) + 1):
        left = sum(start + depth + 1 < len(tokens) for start in starts)  # those with a token to be guessed
        starts, ends, out_TD = starts[:left], ends[:left], out_TD[:left]
        if not left:
            break
        if depth:
            nodes = [next(ids) for _ in starts]
            draft.cache.admit(nodes, ends, text=0)
            places = [start + depth for start in starts]
            out_TD = _read(draft, [tokens[place] for place in places], places, out_TD)
            ends = nodes
        if depth in DEPTHS:
            true_T = torch.tensor([tokens[start + depth + 1] for start in starts], device=out_TD.device)
            _, guess_TW = draft.guess(draft.logits(out_TD), max(BEST))
            _count(found, DEPTHS.index(depth), guess_TW, true_T)
    return found


def _count(found: Hits, row: int, token_TW: Tensor, true_T: Tensor) -> None:
    """Add the tries of one depth."""
    right_TW = token_TW == true_T[:, None]
    found.tries[row] += len(true_T)
    for column, best in enumerate(BEST):
        found.hits[row, column] += int(right_TW[:, :best].sum())
