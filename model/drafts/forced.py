"""Guesses that are certain: the tokens that a grammar forces, for every strategy and in addition to every draft.

They need no network, so a request with `draft=none` has them, too. torch is not imported.
"""
from __future__ import annotations

from heapq import nlargest
from itertools import islice

from config.trees import Growth
from model.drafts.draft import Draft, Steps, WorthDrafting, all_of
from model.tree import TokenTree

FORCED_SOURCE = "grammar"
MAX_LEAVES = 8  # the likeliest guesses without children, after which each level adds forced tokens


class ForcedDraft(Draft):
    """A request's draft, with the tokens that the request's grammar forces after the likeliest guesses."""

    def __init__(self, draft: Draft) -> None:
        self._draft, self.parts = draft, (draft,)

    def grow(self, tree: TokenTree, growth: Growth, worth_drafting: WorthDrafting = all_of) -> Steps[bool]:
        has_grown = self._force(tree, growth)
        has_grown |= yield from self._draft.grow(tree, growth, worth_drafting)
        return has_grown

    def offer_sure(self, tree: TokenTree, growth: Growth) -> bool:
        has_copied = self._draft.offer_sure(tree, growth)
        return self._force(tree, growth) or has_copied

    def _force(self, tree: TokenTree, growth: Growth) -> bool:
        """Add the forced tokens after the tip and the likeliest leaves; return whether there are new ones."""
        leaves = (node for node in (tree.tip, *tree.live) if not tree.nodes[node].children)
        best_leaves = nlargest(MAX_LEAVES, leaves, key=lambda node: (tree.nodes[node].score, -node))
        num_before = len(tree.live)
        for leaf in best_leaves:
            num_tokens_left = tree.max_tokens - 1 - tree.nodes[leaf].pos
            num_guesses = max(0, min(num_tokens_left, growth.nodes - len(tree.live)))

            node = leaf
            for token in islice(tree.law.follower.forced(tree, leaf), num_guesses):
                node = tree.add(node, token, tree.nodes[node].score, FORCED_SOURCE)
        return len(tree.live) > num_before
