"""A draft that guesses a block of tokens in one pass, with a DFlash head.

After DFlash (J. Chen, Y. Liang and Z. Liu, arXiv 2602.06036): the head reads the tip, followed by mask tokens. These
rows see each other and, in every layer, keys and values computed from the target's features of the text before the tip.
The output at a mask is the marginal law of the token there. From these marginals `model/drafts/mixture.py` grows the
tree best first, as DDTree does (L. Ringel and Y. Romano, arXiv 2604.12989).

Shapes: T rows, N concatenated inner features, V vocabulary.
"""
from __future__ import annotations

import torch
from torch import Tensor

from model.drafts.draft import Guesses, Read, Reading, Steps
from model.drafts.heads import TEXT, DFlashHead
from model.drafts.network import CHUNK, Expansion, LMHead, TreeDraft
from model.tree import TokenTree


class BlockDraft(TreeDraft):
    """A draft that reads only the tip, and thereby predicts the tokens after all guesses within its block.

    A new tip is read again, with the features of the text before it. Until then, guesses after it have the marginals
    of the previous block.
    """

    source = "dflash"
    by_level, far, inner = False, True, True

    def __init__(self, head: DFlashHead, lm_head: LMHead, capacity: int) -> None:
        self.network, self.lm_head = head, lm_head
        self.form, sizes = head.form, head.config
        super().__init__(sizes.cache(sizes.layers, capacity, head.like))

    def blank(self, rows: int) -> Tensor:
        """Return zero features `[rows, N]` for the rows of a block, which have none."""
        return self.cache.like.new_zeros(rows, self.network.fc.in_features)

    def catch_up(self, tree: TokenTree) -> Steps[None]:
        yield from self._read_text(tree, 0)

    def _read_text(self, tree: TokenTree, most: int) -> Steps[list[int]]:
        """Read text with known features in chunks, until at most `most` nodes before the tip are left; return these."""
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
        self._logits = torch.empty(0)  # [T, V], of the positions after it
        self._given: set[int] = set()  # nodes after which a token was guessed from this block

    def settle(self, tree: TokenTree) -> None:
        """Keep everything, since guesses after the new tip still lie within the block."""

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
        return [self.unrequested(tree, node, width) or [] for node in nodes]

    def unrequested(self, tree: TokenTree, node: int, width: int) -> Guesses | None:
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
        """Return a reading of new rows of text and of `rows` rows of the block from the node `begin` on; rows of the
        block have negative ids in the cache."""
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
