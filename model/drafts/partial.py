"""A draft that guesses from partial features: those of rows that are under way and have passed some stages.

After Speculative Pipeline Decoding (Y. Yu and others, arXiv 2605.30852): the hidden states of a token in the stages
that it has passed predict more than a head's own guess of them, and more with every stage. So no output for a guess is
kept. Each time, the path from the tip to the requested nodes is read again, in one pass, with all features that stages
have reported of it by then.

Shapes: T rows, N concatenated inner features, D model.
"""
from __future__ import annotations

from itertools import takewhile
from typing import Sequence

from torch import Tensor

from model.drafts.eagle import Eagle
from model.drafts.network import Expansion
from model.tree import TokenTree


class PartialDraft(Eagle):
    """A draft that reads a guess as a pair with the reported features of the token before it.

    Its head is an EAGLE-3 head with a norm for each inner feature, so a feature that was not reported adds nothing.
    """

    source, by_level = "spd", False

    def restart(self) -> None:
        super().restart()
        self._answered: set[int] = set()  # nodes after which it has guessed

    def settle(self, tree: TokenTree) -> None:
        self._answered &= tree.live.union([tree.tip])

    def wants(self, tree: TokenTree, node: int) -> bool:
        return node not in self._answered and (node == tree.tip or tree.nodes[node].parent in self._answered)

    def expand(self, tree: TokenTree, nodes: list[int], width: int) -> Expansion:
        unread = len(tree.trunk) - self._fed
        self.cache.drop()
        way = way_to(tree, nodes, self.cache.room - unread)
        if unread or tree.tip in nodes:
            followed = yield from self._follow(tree, way)
            if followed is None:
                return None
            read, rows = followed, [tree.tip, *way]
        else:
            self.cache.admit(way, [tree.nodes[node].parent for node in way], text=0)
            rows = [node for node in way if node >= min(nodes)]  # the logits of earlier nodes are known
            read = yield self._reading(tree, way, self.features(tree, way), len(rows))
        place = {node: row for row, node in enumerate(rows)}
        nodes = list(takewhile(place.__contains__, nodes))
        logits_AV = read.logits_AV[[place[node] for node in nodes]]
        self._answered.update(nodes)
        positions = [tree.nodes[node].pos + 1 for node in nodes]
        return self.predict(self._shaped(tree, nodes, logits_AV), positions, width)

    def features(self, tree: TokenTree, fresh: Sequence[int]) -> Tensor:
        """Return the features `[T, D]` of the tokens before these nodes, as far as they are known."""
        feature_TN = self.cache.like.new_zeros(len(fresh), self.network.fc.in_features)
        for row_N, node in zip(feature_TN, fresh):
            before = tree.nodes[tree.nodes[node].parent]
            known = before.partial if before.hidden is None else before.hidden
            if known is not None:
                row_N[:len(known)] = known
        return self.network.join(feature_TN)  # type: ignore[no-any-return]


def way_to(tree: TokenTree, nodes: Sequence[int], room: int) -> list[int]:
    """Return the guesses on the paths from the tip to these nodes, as far as there is room, in the order of ids."""
    way: set[int] = set()
    for node in nodes:
        more = set()
        while node in tree.live and node not in way:
            more.add(node)
            node = tree.nodes[node].parent
        if len(way) + len(more) > room:
            break
        way |= more
    return sorted(way)
