"""A draft that guesses a block of tokens in one pass, with a DFlash head.

After DFlash (J. Chen, Y. Liang and Z. Liu, arXiv 2602.06036): the head reads the tip, followed by mask tokens. These
rows see each other and, in every layer, keys and values computed from the target's features of the text before the tip.
The output at a mask is the marginal law of the token there. From these marginals `model/drafts/mixture.py` grows the
tree best first, as DDTree does (L. Ringel and Y. Romano, arXiv 2604.12989).

Shapes: T rows, N concatenated inner features, V vocabulary.
"""
from __future__ import annotations

import torch
from torch import Tensor, nn

from config.schema.block_heads import BlockForm
from model.attention import CachedRows
from model.drafts.draft import Guesses, Read, Reading, Steps
from model.drafts.heads import Head
from model.drafts.network import CHUNK, Expansion, LMHead, TreeDraft
from model.llama import Layer, LlamaConfig, RMSNorm, linear
from model.tree import TokenTree

TEXT = -1  # in place of a token: a row of text, of which only the target's feature is read


class DFlashHead(Head):
    """`fc` over inner features, a norm, and layers in which the rows of a block see these features and each other."""

    def __init__(self, c: LlamaConfig, form: BlockForm) -> None:
        super().__init__(c)
        self.form, self.inner = form, form.inner
        self.fc = linear(len(form.inner) * c.hidden, c.hidden)
        self.hidden_norm = RMSNorm(c.hidden, c.eps)
        self.layers = nn.ModuleList([Layer(c) for _ in range(c.layers)])
        self.norm = RMSNorm(c.hidden, c.eps)

    def forward(self, token_T: Tensor, feature_TN: Tensor, pos_T: Tensor, cache: CachedRows) -> Tensor:
        """Return the output for each row of a block, `[T, D]`; for rows of text, only keys and values matter."""
        of_text_T1 = (token_T == TEXT)[:, None]
        feature_TD = self.hidden_norm(self.fc(feature_TN))
        x_TD = self.embed_tokens(token_T.clamp(min=0))
        rotation = self.rotary.at(pos_T, x_TD)
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, Layer), layer
            normed_TD = layer.input_layernorm(x_TD)
            seen_TD = torch.where(of_text_T1, feature_TD, normed_TD)
            x_TD = x_TD + layer.self_attn(seen_TD, rotation, cache, number)
            x_TD = x_TD + layer.mlp(layer.post_attention_layernorm(x_TD))
        return self.norm(x_TD)  # type: ignore[no-any-return]


class BlockDraft(TreeDraft):
    """A draft that reads only the tip, and thereby predicts the tokens after all guesses within its block.

    A new tip is read again, with the features of the text before it. Until then, guesses after it have the marginals
    of the previous block.
    """

    source = "dflash"
    by_level, far, inner = False, True, True
    marginal = True  # whether the guesses after a row are the same after all guesses of the row

    def __init__(self, head: DFlashHead, lm_head: LMHead, capacity: int) -> None:
        self.network, self.lm_head = head, head.logits or lm_head
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
        rows = min(self.form.size, tree.max_tokens - tip.pos - 1 + self.form.first_guess)
        if len(fresh) + rows > self.cache.room:
            return []
        fresh = yield from self._read_text(tree, CHUNK)
        read: Read = yield self.rows(tree, fresh, tree.tip, rows)
        self._fed += len(fresh)
        self.cache.drop()
        self._begun, self._logits = tip.pos, read.logits_AV
        self._given = set()
        positions = [tip.pos + 1 + row for row in range(len(self._logits))]
        self._said = self.predict(self._logits, positions, width) if self.marginal and not tree.law else []
        return [self.unrequested(tree, node, width) or [] for node in nodes]

    def unrequested(self, tree: TokenTree, node: int, width: int) -> Guesses | None:
        position: int = tree.nodes[node].pos
        row: int = position - self._begun
        if self._begun < 0 or row not in range(len(self._logits)) or node in self._given:
            return None
        self._given.add(node)
        if self._said:
            return self._said[row]
        logits_1V = self._shaped(tree, [node], self.logits_after(tree.nodes[node].token, row))
        return self.predict(logits_1V, [position + 1], width)[0]

    def logits_after(self, token: int, row: int) -> Tensor:
        """Return the logits `[1, V]` of a row of guesses in the block, after a guess `token` in the row before."""
        return self._logits[row:row + 1]

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
        return Reading(self, token_T, feature_TN, pos_T, max(0, rows - self.form.first_guess))
