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
        self._answered_nodes: set[int] = set()  # after which it has guessed

    def settle(self, tree: TokenTree) -> None:
        self._answered_nodes &= tree.live.union([tree.tip])

    def wants(self, tree: TokenTree, node: int) -> bool:
        follows_answered_node = node == tree.tip or tree.nodes[node].parent in self._answered_nodes
        return follows_answered_node and node not in self._answered_nodes

    def expand(self, tree: TokenTree, nodes: list[int], width: int) -> Expansion:
        num_unread = len(tree.trunk) - self._num_read
        self.cache.drop()
        path_nodes = way_to(tree, nodes, self.cache.room - num_unread)

        # read
        if num_unread or tree.tip in nodes:
            read_of_tip = yield from self._follow(tree, path_nodes)
            if read_of_tip is None:
                return None
            read, logit_nodes = read_of_tip, [tree.tip, *path_nodes]
        else:
            parents = [tree.nodes[node].parent for node in path_nodes]
            self.cache.admit(path_nodes, parents, text=0)
            logit_nodes = [node for node in path_nodes if node >= min(nodes)]  # the logits of earlier nodes are known
            features = self.features(tree, path_nodes)
            read = yield self._reading(tree, path_nodes, features, len(logit_nodes))

        # guess
        row_of_node = {node: row for row, node in enumerate(logit_nodes)}
        nodes = list(takewhile(row_of_node.__contains__, nodes))
        logits_AV = read.logits_AV[[row_of_node[node] for node in nodes]]
        self._answered_nodes.update(nodes)
        positions = [tree.nodes[node].pos + 1 for node in nodes]
        return self.predict(self._shaped(tree, nodes, logits_AV), positions, width)

    def features(self, tree: TokenTree, fresh: Sequence[int]) -> Tensor:
        """Return the features `[T, D]` of the tokens before these nodes, as far as they are known."""
        feature_TN = self.cache.like.new_zeros(len(fresh), self.network.fc.in_features)
        for row_N, node in zip(feature_TN, fresh):
            parent = tree.nodes[tree.nodes[node].parent]
            feature = parent.partial if parent.hidden is None else parent.hidden
            if feature is not None:
                row_N[:len(feature)] = feature
        return self.network.join(feature_TN)  # type: ignore[no-any-return]


def way_to(tree: TokenTree, nodes: Sequence[int], room: int) -> list[int]:
    """Return the guesses on the paths from the tip to these nodes, as far as there is room, in the order of ids."""
    path_nodes: set[int] = set()
    for node in nodes:
        new_nodes = set()
        while node in tree.live and node not in path_nodes:
            new_nodes.add(node)
            node = tree.nodes[node].parent

        if len(path_nodes) + len(new_nodes) > room:
            break
        path_nodes |= new_nodes
    return sorted(path_nodes)
