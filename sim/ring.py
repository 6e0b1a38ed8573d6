"""The ring in virtual time: the model computes only rows that become part of the text.

Stages and wires charge time for every sent row. The target's token after a guess matters only if the text reaches the
guess. That is known when its segment has come back, since parents come back before their children. So the walk along
the text computes row by row, in the same way for all methods.
"""
from __future__ import annotations

from typing import Mapping, Sequence

import torch
from torch import Tensor

from pipeline.requests import NodeRows, RequestTarget, Returned, Ring
from pipeline.trace import OFF, REAL, Clock, NoTrace
from sim.cluster import RingLink
from sim.devices import SlowHead


class WalkingTarget(RequestTarget):
    """The target of a request; a row of a segment is the number of a path `[1]`, which is looked up when needed."""

    ring: VirtualRing

    def _record_features(self, returned: Returned) -> None:
        """Store the features of text in the tree; those of guesses follow when the text reaches them."""
        tree = self.tree
        text_nodes = [node for node in returned.rows.nodes if node in tree.nodes and node not in tree.live]
        if text_nodes:
            self._store_features(text_nodes, returned.rows.of(text_nodes))

    def _decide(self, logits: NodeRows, answers: dict[int, int]) -> None:
        """Walk from the tip along the answers that have come back; `logits` holds the path of each answered node."""
        tree = self.tree
        node: int | None = tree.tip
        while node is not None:
            tree_node = tree.nodes[node]
            if tree_node.target_token is None:
                if node not in logits.nodes:
                    return
                super()._decide(self._logits(logits, [node]), answers)
            assert tree_node.target_token is not None, f"node {node} has no answer"
            node = tree.child(node, tree_node.target_token)

    def _store_logprobs(self, logits: NodeRows, answers: Mapping[int, int]) -> None:
        if self.options.logprobs is not None:
            reported_nodes = [node for node in logits.nodes if node in answers or self.echoes(node)]
            logits = self._logits(logits, reported_nodes)
        super()._store_logprobs(logits, answers)

    def _logits(self, paths: NodeRows, nodes: list[int]) -> NodeRows:
        """Return the logits of some of these nodes, given their path numbers; also store their features."""
        path_T1 = paths.of(nodes)
        if not nodes:
            return NodeRows(nodes, path_T1)
        x_TD = self._store_features(nodes, path_T1)
        return NodeRows(nodes, self.ring.model_head(x_TD))

    def _store_features(self, nodes: Sequence[int], path_T1: Tensor) -> Tensor:
        """Store the features of nodes, given their path numbers; return the LM head's inputs `[T, D]`."""
        x_TD, inner_TD = self.ring.look_up(list(map(int, path_T1)))
        feature_TD = inner_TD if self.options.inner else x_TD
        for node, feature_D in zip(nodes, feature_TD):
            self.tree.nodes[node].hidden = feature_D
        return x_TD


class VirtualRing(Ring):
    """The ring of a virtual cluster; verification takes the time of `head`, once per message."""

    target_of = WalkingTarget

    def __init__(self, link: RingLink, head: SlowHead, depth: int, device: torch.device | str = "cpu",
                 trace: NoTrace = OFF, clock: Clock = REAL) -> None:
        super().__init__(link, SlowHead(lambda path_T1: path_T1, head.pace), depth, device, trace, clock)
        self.model_head, self.look_up = head.lm_head, link.defer()
