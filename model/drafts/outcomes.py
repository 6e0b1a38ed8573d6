"""How much is prepared for each answer that a segment under way may bring (SSD, arXiv 2603.03251, section 4.1).

An outcome is a place at which the target leaves what was sent, and the token with which it does: a guess that was not
sent, below the tip or a guess that was. It needs no torch.
"""
from __future__ import annotations

from model.tree import TokenTree

BY_DEPTH, BY_RANK = 0.95, 0.8  # of the levels that the outcome one place before may have: of one less deep, or likelier


def levels_left(tree: TokenTree, levels: int) -> dict[int, int]:
    """How many levels of guesses may still be drafted below each guess that was not sent.

    Below the likeliest outcome at the tip these are `levels`. They fall geometrically by the depth of the place, as the
    number of outcomes does in the paper (theorem 12), and by the rank of the token among those not sent there.
    """
    left: dict[int, int] = {}
    tip = tree.nodes[tree.tip].pos
    for parent in sorted(tree.live.union([tree.tip])):  # parents are older
        above = tree.nodes[parent]
        unsent = [node for node in above.children.values() if node in tree.waiting]
        if parent in left:
            left.update((node, left[parent] - 1) for node in unsent)
            continue
        unsent.sort(key=lambda node: (-tree.nodes[node].score, node))
        most = levels * BY_DEPTH ** (above.pos - tip)
        for node in unsent:
            left[node] = round(most)
            most *= BY_RANK
    return left
