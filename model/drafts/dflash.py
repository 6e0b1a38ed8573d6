"""A draft that guesses a block of tokens in one pass, with a DFlash or a JetSpec head.

After DFlash (J. Chen, Y. Liang and Z. Liu, arXiv 2602.06036): the head reads the tip, followed by mask tokens. These
rows see each other and, in every layer, keys and values computed from the target's features of the text before the tip.
The output at a mask is the marginal law of the token there. From these marginals `model/drafts/mixture.py` grows the
tree best first, as DDTree does (L. Ringel and Y. Romano, arXiv 2604.12989). In a JetSpec head (L. Hu et al., arXiv
2606.18394) a row does not see later rows of the block; all else is the same.

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
from model.llama import Layer, LlamaConfig
from model.plain_layers import RMSNorm, linear
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
        is_text_T1 = (token_T == TEXT)[:, None]
        feature_TD = self.hidden_norm(self.fc(feature_TN))

        x_TD = self.embed_tokens(token_T.clamp(min=0))
        rotation = self.rotary.at(pos_T, x_TD)
        for layer_index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer), layer
            normed_TD = layer.input_layernorm(x_TD)
            attended_TD = torch.where(is_text_T1, feature_TD, normed_TD)
            x_TD = x_TD + layer.self_attn(attended_TD, rotation, cache, layer_index)
            x_TD = x_TD + layer.mlp(layer.post_attention_layernorm(x_TD))
        return self.norm(x_TD)  # type: ignore[no-any-return]


class BlockDraft(TreeDraft):
    """A draft that reads only the tip, and thereby predicts the tokens after all guesses within its block.

    A new tip is read again, with the features of the text before it. Until then, guesses after it have the marginals
    of the previous block.
    """

    source = "dflash"
    by_level, guesses_ahead, inner = False, True, True
    marginal = True  # whether the guesses after a row are the same after all guesses of the row
    read_nodes = ()  # it reads tips alone

    def __init__(self, head: DFlashHead, lm_head: LMHead, capacity: int) -> None:
        self.network, self.lm_head = head, head.logits or lm_head
        self.form = head.form
        super().__init__(head.config.cache(head.config.layers, capacity, head.like))

    def blank(self, rows: int) -> Tensor:
        """Return zero features `[rows, N]` for the rows of a block, which have none."""
        return self.cache.like.new_zeros(rows, self.network.fc.in_features)

    def catch_up(self, tree: TokenTree) -> Steps[None]:
        yield from self._read_text(tree, 0)

    def _read_text(self, tree: TokenTree, max_unread: int) -> Steps[list[int]]:
        """Read text with known features in chunks, until at most `max_unread` nodes before the tip are left; return
        these."""
        self.cache.drop()
        unread = self.readable(tree, tree.trunk[self._num_read:-1])
        while len(unread) > max_unread:
            chunk, unread = unread[:CHUNK], unread[CHUNK:]
            yield self.rows(tree, chunk, tree.tip, num_block_rows=0)
            self._num_read += len(chunk)
        return unread

    def restart(self) -> None:
        self._block_begin = -1  # the position of the tip that was read; below 0: none
        self._block_guesses: list[Guesses] = []  # by row of the block, if they are the same after all guesses
        self._logits = torch.empty(0)  # [T, V], of the positions after it
        self._answered_nodes: set[int] = set()  # after which a token was guessed from this block

    def settle(self, tree: TokenTree) -> None:
        """Keep everything, since guesses after the new tip still lie within the block."""

    def wants(self, tree: TokenTree, node: int) -> bool:
        return node == tree.tip and tree.nodes[node].pos != self._block_begin

    def expand(self, tree: TokenTree, nodes: list[int], width: int) -> Expansion:
        unread = tree.trunk[self._num_read:-1]
        if self.readable(tree, unread) != unread:
            return None

        self.cache.drop()
        tip_position = tree.nodes[tree.tip].pos
        num_positions_left = tree.max_tokens - tip_position - 1
        num_block_rows = min(self.form.size, num_positions_left + self.form.first_guess)
        if len(unread) + num_block_rows > self.cache.room:
            return []

        # read
        unread = yield from self._read_text(tree, CHUNK)
        read: Read = yield self.rows(tree, unread, tree.tip, num_block_rows)
        self._check_finite(read.logits_AV)
        self._num_read += len(unread)
        self.cache.drop()

        # guess
        self._block_begin, self._logits = tip_position, read.logits_AV
        self._block_guesses = []
        self._answered_nodes = set()
        if self.marginal and not tree.law:
            positions = [tip_position + 1 + row for row in range(len(self._logits))]
            self._block_guesses = self.predict(self._logits, positions, width)
        return [self.unrequested(tree, node, width) or [] for node in nodes]

    def unrequested(self, tree: TokenTree, node: int, width: int) -> Guesses | None:
        position: int = tree.nodes[node].pos
        row: int = position - self._block_begin
        is_in_block = self._block_begin >= 0 and 0 <= row < len(self._logits)
        if not is_in_block or node in self._answered_nodes:
            return None

        self._answered_nodes.add(node)
        if self._block_guesses:
            return self._block_guesses[row]
        logits_1V = self._shaped(tree, [node], self.logits_after(tree.nodes[node].token, row))
        return self.predict(logits_1V, [position + 1], width)[0]

    def logits_after(self, token: int, row: int) -> Tensor:
        """Return the logits `[1, V]` of a row of guesses in the block, after a guess `token` in the row before."""
        return self._logits[row:row + 1]

    def rows(self, tree: TokenTree, text_nodes: list[int], block_node: int, num_block_rows: int) -> Reading:
        """Return a reading of new text, and of the first rows of a block: `block_node` and the masks after it.

        In the cache, a row of the block has a negative id, and the row before it as its parent.
        """
        first = tree.nodes[block_node]
        block_ids = [-1 - row for row in range(num_block_rows)]
        node_before_block = text_nodes[-1] if text_nodes else first.parent

        # into the cache
        text_parents = [tree.nodes[node].parent for node in text_nodes]
        block_parents = [node_before_block, *block_ids][:num_block_rows]
        self.cache.admit([*text_nodes, *block_ids], [*text_parents, *block_parents], len(text_nodes),
                         mutual=not self.form.is_causal)

        # inputs
        block_tokens = [first.token, *[self.form.mask] * num_block_rows][:num_block_rows]
        tokens = [TEXT] * len(text_nodes) + block_tokens
        text_positions = [tree.nodes[node].pos for node in text_nodes]
        positions = [*text_positions, *range(first.pos, first.pos + num_block_rows)]
        token_T, pos_T = torch.tensor([tokens, positions], device=self.cache.like.device)

        text_features = [self.features(tree, text_nodes)] if text_nodes else []
        feature_TN = torch.cat((*text_features, self.blank(num_block_rows)))
        return Reading(self, token_T, feature_TN, pos_T, max(0, num_block_rows - self.form.first_guess))
