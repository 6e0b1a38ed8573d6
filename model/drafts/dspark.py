"""A draft that guesses a block in one pass, and each of its tokens after the guess before it, with a DSpark head.

After DSpark (arXiv 2607.05147): the block is read as with a DFlash head, but the output at the known token already
predicts the token after it. A Markov head of low rank adds to each position's logits a bias that depends on the token
before, so the guesses after different nodes of one level differ. Its confidence head is not used: a tree is cut by the
probabilities of its paths.

Shapes: T rows, V vocabulary, R rank of the bias.
"""
from __future__ import annotations

import torch
from torch import Tensor, nn

from config.schema.block_heads import BlockForm
from model.drafts.dflash import BlockDraft, DFlashHead
from model.llama import LlamaConfig
from model.plain_layers import embedding, linear


class MarkovHead(nn.Module):
    """A bias `[T, V]` for the logits after each token: the product of an embedding `[V, R]` and a matrix `[R, V]`."""

    def __init__(self, vocab: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = embedding(vocab, rank)
        self.markov_w2 = linear(rank, vocab)

    def forward(self, token_T: Tensor) -> Tensor:
        return self.markov_w2(self.markov_w1(token_T))  # type: ignore[no-any-return]


class DSparkHead(DFlashHead):
    """The layers of a DFlash head with a Markov head, and an LM head of its own if the file has one."""

    def __init__(self, sizes: LlamaConfig, form: BlockForm, has_lm_head: bool) -> None:
        super().__init__(sizes, form)
        self.markov_head = MarkovHead(sizes.vocab, form.markov_rank)
        self.lm_head = linear(sizes.hidden, sizes.vocab) if has_lm_head else None

    @property
    def logits(self) -> nn.Module | None:
        """The head's own LM head, or None for the target's."""
        return self.lm_head


class MarkovDraft(BlockDraft):
    """A block draft whose guesses after a node also depend on the node's token."""

    source, marginal = "dspark", False
    network: DSparkHead

    def logits_after(self, token: int, row: int) -> Tensor:
        token_1 = torch.tensor([token], device=self.cache.like.device)
        logits_1V = super().logits_after(token, row)
        return logits_1V + self.network.markov_head(token_1).to(logits_1V.dtype)
