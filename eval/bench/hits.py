"""How often a draft is right along a given text, by how many guesses of its own it has read since the true features.

It knows nothing about pipelines: a text is a token tree whose nodes have the target's features.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eval.self_feeding import unrolled
from model.drafts.network import TreeDraft
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
    found, tokens = Hits.none(), tree.tokens
    for depth, places, out_TD in unrolled(draft, tree, prompt, max(DEPTHS)):
        if depth in DEPTHS:
            following = [tokens[place + 1] for place in places]
            true_T = torch.tensor(following, device=out_TD.device)
            _, guess_TW = draft.guess(draft.logits(out_TD), max(BEST))
            _count(found, DEPTHS.index(depth), guess_TW, true_T)
    return found


def _count(found: Hits, row: int, token_TW: Tensor, true_T: Tensor) -> None:
    """Add the tries of one depth."""
    right_TW = token_TW == true_T[:, None]
    found.tries[row] += len(true_T)
    for column, best in enumerate(BEST):
        found.hits[row, column] += int(right_TW[:, :best].sum())
