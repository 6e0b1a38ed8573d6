"""The EAGLE draft head (EAGLE-1/2 weights) and EAGLE-2's dynamic tree, grown level by level.

It knows nothing about pipelines. A draft pair is a token and the feature of the token before it; the pair of node n
is tagged n in the head's own cache and has the position of n's parent (EAGLE, section 4.1). Pairs of settled nodes
hold the target's features, pairs of guesses the head's own.

Shapes: T rows, D model, V vocabulary.
"""
from __future__ import annotations

from itertools import takewhile
from typing import Callable

import torch
from torch import Tensor, nn

from config.run_config import Growth
from model.cache import TreeCache
from model.llama import Layer, LlamaConfig, Rotary, embedding, linear
from model.tree import TokenTree

CHUNK = 256  # pairs of a prompt that are fed to the head at once


class EagleHead(nn.Module):
    """`fc` over [embedding, feature], then one decoder layer without input norm; no norm at the end."""

    def __init__(self, c: LlamaConfig, bias: bool) -> None:
        super().__init__()
        self.config = c
        self.embed_tokens = embedding(c.vocab, c.hidden)
        self.fc = linear(2 * c.hidden, c.hidden, bias)
        self.layers = nn.ModuleList([Layer(c, input_norm=False)])
        self.rotary = Rotary(c.theta, c.head_dim, c.context)

    def forward(self, token_T: Tensor, feature_TD: Tensor, pos_T: Tensor, cache: TreeCache) -> Tensor:
        """The head's guess of the feature of each token, `[T, D]`."""
        x_TD = self.fc(torch.cat((self.embed_tokens(token_T), feature_TD), -1))
        return self.layers[0](x_TD, self.rotary.at(pos_T, x_TD), cache, 0)


class Eagle:
    """A draft that guesses with an EAGLE head; `lm_head` maps features to the target's logits."""

    def __init__(self, head: EagleHead, lm_head: Callable[[Tensor], Tensor], capacity: int) -> None:
        self.head, self.lm_head = head, lm_head
        self.cache = head.config.cache(1, capacity, head.fc.weight)
        self._score = self._feature = head.fc.weight[:0]  # … their scores [T] and features [T, D]
        self.reset()

    def reset(self) -> None:
        """Forget the request."""
        self.cache.clear()
        self._fed = 1  # trunk nodes whose pair is in the cache; the first token of a text has none
        self.refresh()

    def refresh(self) -> None:
        """Begin again at the tip at the next growth, with the target's features instead of the head's own."""
        self._origin: int | None = None  # the tip that the tree was begun at
        self._frontier: list[int] = []  # the guesses of the last level that are to be expanded …

    def grow(self, tree: TokenTree, growth: Growth) -> bool:
        """Draft one level more (EAGLE-2, section 4.1); False when there is none worth drafting.

        The best `width` guesses of a level are expanded, each into its `width` likeliest children; of all guesses
        the best `nodes` stay (section 4.2). A tree is `depth` + 1 levels deep. It deepens for as long as a guess of
        its last level lives, and begins anew at the tip otherwise.
        """
        alive = [i for i, node in enumerate(self._frontier) if node in tree.live]
        if alive:
            if self._level > growth.depth or tree.pos[self._frontier[alive[0]]] + 1 >= tree.limit:
                return False
            out_TD = self._deepen(tree, alive)
        else:
            if self._origin == tree.tip or tree.room < 1:
                return False
            followed = self._follow(tree)
            if followed is None:
                return False
            out_TD = followed
        self._offer(tree, out_TD, growth.nodes, growth.width)
        return True

    def _follow(self, tree: TokenTree) -> Tensor | None:
        """Feed the pairs of newly settled text; the feature behind the tip, once its pair is known."""
        self.cache.drop()
        out_TD: Tensor | None = None
        while self._fed < len(tree.trunk) and (fresh := self._known(tree)):
            parents = [tree.parent[node] for node in fresh]
            self.cache.admit(fresh, parents, text=len(fresh))
            feature_TD = torch.stack([tree.hidden.pop(parent) for parent in parents])
            out_TD = self._forward(tree, fresh, feature_TD)
            self._fed += len(fresh)
        if out_TD is None or self._fed < len(tree.trunk):
            return None
        self._origin = self._tip = tree.tip
        self._level, self._base = 0, tree.score[tree.tip]
        self._frontier, self._score = [tree.tip], torch.zeros(1, dtype=out_TD.dtype, device=out_TD.device)
        return out_TD[-1:]

    def _known(self, tree: TokenTree) -> list[int]:
        """The next nodes of the text whose pair can be formed: the target's feature of the token before has come."""
        fresh = tree.trunk[self._fed:self._fed + CHUNK]
        return list(takewhile(lambda node: tree.parent[node] in tree.hidden, fresh))

    def _deepen(self, tree: TokenTree, alive: list[int]) -> Tensor:
        """Expand what lives of the frontier with the head's own features."""
        if self._tip != tree.tip:  # text that settled since is seen with the head's features until the next refresh
            self._tip = tree.tip
            self.cache.retain(tree.live.union(tree.trunk[self._fed:]))
        if len(alive) < len(self._frontier):
            self._frontier = [self._frontier[i] for i in alive]
            self._score, self._feature = self._score[alive], self._feature[alive]
        self.cache.admit(self._frontier, [tree.parent[node] for node in self._frontier], text=0)
        return self._forward(tree, self._frontier, self._feature)

    def _forward(self, tree: TokenTree, nodes: list[int], feature_TD: Tensor) -> Tensor:
        device = feature_TD.device
        token_T = torch.tensor([tree.token[node] for node in nodes], device=device)
        pos_T = torch.tensor([tree.pos[node] - 1 for node in nodes], device=device)
        return self.head(token_T, feature_TD, pos_T, self.cache)

    def _offer(self, tree: TokenTree, out_TD: Tensor, nodes: int, width: int) -> None:
        """Add the children that are among the best `nodes`; the best `width` of all make the next frontier."""
        gain = torch.log_softmax(self.lm_head(out_TD), -1).topk(min(width, self.head.config.vocab), -1)
        score, order = (self._score[:, None] + gain.values).flatten().sort(descending=True, stable=True)
        token, place = gain.indices.flatten()[order].tolist(), (order // gain.values.shape[1]).tolist()
        floor = tree.floor(nodes)
        added: list[int] = []
        for value, tok, above in zip(score[:nodes].tolist(), token, place):
            if self._base + value <= floor:
                break
            added.append(tree.add(self._frontier[above], tok, self._base + value))
        tree.trim(nodes)
        chosen = [i for i, node in enumerate(added[:width]) if node in tree.live]
        self._frontier = [added[i] for i in chosen]
        self._score, self._feature = score[chosen], out_TD[[place[i] for i in chosen]]
        self._level += 1

