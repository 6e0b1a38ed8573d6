"""Guesses that are certain: the tokens that a grammar forces, for every strategy and in addition to every draft.

They need no network, so a request with `draft=none` has them, too. torch is not imported.
"""
from __future__ import annotations

from heapq import nlargest
from itertools import islice

from config.trees import Growth
from model.drafts.draft import Draft, Steps, WorthDrafting, always
from model.tree import TokenTree

FORCED = "grammar"  # the source's name
LEAVES = 8  # the likeliest guesses without children, after which each level adds forced tokens


class ForcedDraft(Draft):
    """A request's draft, with the tokens that the request's grammar forces after the likeliest guesses."""

    def __init__(self, draft: Draft) -> None:
        self._draft, self.parts = draft, (draft,)

    def grow(self, tree: TokenTree, growth: Growth, worth_drafting: WorthDrafting = always) -> Steps[bool]:
        grown = self._force(tree, growth)
        grown |= yield from self._draft.grow(tree, growth, worth_drafting)
        return grown

    def offer_sure(self, tree: TokenTree, growth: Growth) -> bool:
        copied = self._draft.offer_sure(tree, growth)
        return self._force(tree, growth) or copied

    def _force(self, tree: TokenTree, growth: Growth) -> bool:
        """Add the forced tokens after the tip and the likeliest leaves; return whether there are new ones."""
        leaves = (node for node in (tree.tip, *tree.live) if not tree.nodes[node].children)
        best = nlargest(LEAVES, leaves, key=lambda node: (tree.nodes[node].score, -node))
        before = len(tree.live)
        for node in best:
            left = tree.max_tokens - 1 - tree.nodes[node].pos
            room = max(0, min(left, growth.nodes - len(tree.live)))
            for token in islice(tree.law.follower.forced(tree, node), room):
                node = tree.add(node, token, tree.nodes[node].score, FORCED)
        return len(tree.live) > before
