"""A draft that guesses a block of tokens in one pass, with a head of DFlash.

After DFlash (J. Chen, Y. Liang and Z. Liu, arXiv 2602.06036): the head reads the tip and a row of mask tokens behind,
which see each other and, in every layer, keys and values made of the target's features of the text before the tip. What
it says at a mask is the marginal law of the token there. Out of these marginals the tree is grown best first, as DDTree
does (L. Ringel and Y. Romano, arXiv 2604.12989); `model/drafts/mixture.py` does that.

Shapes: T rows, N inner features side by side, V vocabulary.
"""
from __future__ import annotations

import torch
from torch import Tensor

from model.drafts.draft import Guesses, Read, Reading, Steps
from model.drafts.heads import TEXT, DFlashHead
from model.drafts.network import CHUNK, Expansion, LMHead, TreeDraft
from model.tree import TokenTree


class Block(TreeDraft):
    """A draft that reads the tip alone, and then has said what follows every guess as deep as its block.

    A new tip is read again, with the features of the text before it. Until then guesses behind it have the marginals
    of the block before.
    """

    source = "dflash"
    by_level, far, inner = False, True, True

    def __init__(self, head: DFlashHead, lm_head: LMHead, capacity: int) -> None:
        self.network, self.lm_head = head, lm_head
        self.form, sizes = head.form, head.config
        super().__init__(sizes.cache(sizes.layers, capacity, head.embed_tokens.weight))

    def blank(self, rows: int) -> Tensor:
        """Features `[rows, N]` of a block, which has none."""
        return self.cache.like.new_zeros(rows, self.network.fc.in_features)

    def catch_up(self, tree: TokenTree) -> Steps[None]:
        yield from self._read_text(tree, 0)

    def _read_text(self, tree: TokenTree, most: int) -> Steps[list[int]]:
        """Read the text that is known, in chunks, until at most so many nodes before the tip are left: these."""
        self.cache.drop()
        fresh = self.known(tree, tree.trunk[self._fed:-1])
        while len(fresh) > most:
            chunk, fresh = fresh[:CHUNK], fresh[CHUNK:]
            yield self.rows(tree, chunk, tree.tip, 0)
            self._fed += len(chunk)
        return fresh

    def restart(self) -> None:
        self._begun = -1  # the position of the tip that was read; below 0: none
        self._said: list[Guesses] = []
        self._logits = torch.empty(0)  # [T, V], of the positions behind it
        self._given: set[int] = set()  # nodes whose next token was guessed out of this block

    def settle(self, tree: TokenTree) -> None:
        """Guesses behind the new tip still stand where the block says what follows."""

    def wants(self, tree: TokenTree, node: int) -> bool:
        return node == tree.tip and tree.nodes[node].pos != self._begun

    def expand(self, tree: TokenTree, nodes: list[int], width: int) -> Expansion:
        fresh = tree.trunk[self._fed:-1]
        if self.known(tree, fresh) != fresh:
            return None
        self.cache.drop()
        tip = tree.nodes[tree.tip]
        rows = min(self.form.size, tree.limit - tip.pos)
        if len(fresh) + rows > self.cache.room:
            return []
        fresh = yield from self._read_text(tree, CHUNK)
        read: Read = yield self.rows(tree, fresh, tree.tip, rows)
        self._fed += len(fresh)
        self.cache.drop()
        self._begun, self._logits = tip.pos, read.logits_AV
        self._given = set()
        positions = [tip.pos + 1 + place for place in range(rows - 1)]
        self._said = [] if tree.law else self.predict(self._logits, positions, width)
        return [self.heard(tree, node, width) or [] for node in nodes]

    def heard(self, tree: TokenTree, node: int, width: int) -> Guesses | None:
        position: int = tree.nodes[node].pos
        row: int = position - self._begun
        if self._begun < 0 or row not in range(len(self._logits)) or node in self._given:
            return None
        self._given.add(node)
        if tree.law is None:
            return self._said[row]
        logits = self._shaped(tree, [node], self._logits[row:row + 1])
        return self.predict(logits, [position + 1], width)[0]

    def rows(self, tree: TokenTree, fresh: list[int], begin: int, rows: int) -> Reading:
        """New rows of text, then so many rows of the block behind the node `begin`, its own first; their cache ids are
        below 0."""
        block, first, text = [-1 - place for place in range(rows)], tree.nodes[begin], len(fresh)
        above = [fresh[-1] if fresh else first.parent, *block[:-1]]
        parents = [tree.nodes[node].parent for node in fresh] + above[:rows]
        self.cache.admit([*fresh, *block], parents, text, mutual=True)
        tokens = [TEXT] * text + [first.token, *[self.form.mask] * rows][:rows]
        places = [tree.nodes[node].pos for node in fresh] + list(range(first.pos, first.pos + rows))
        token_T, pos_T = torch.tensor([tokens, places], device=self.cache.like.device)
        features = [self.features(tree, fresh)] if fresh else []
        feature_TN = torch.cat((*features, self.blank(rows)))
        return Reading(self, token_T, feature_TN, pos_T, max(0, rows - 1))
