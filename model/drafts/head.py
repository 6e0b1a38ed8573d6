"""What the draft heads of a model have in common."""
from __future__ import annotations

from torch import Tensor, nn

from model.llama import LlamaConfig, embedding
from model.rotary import Rotary


class Head(nn.Module):
    """A head reads pairs of a token and a feature; its embedding is that of its target, unless it has its own.

    Its token i is the target's token i + `shift[i]`, if it does not know all of them.
    """

    drifts = False  # whether its guesses get worse where they stand on many of its own
    inner: tuple[int, ...] = ()  # the target's layers whose inputs it reads, in place of the last hidden state

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.config = c
        self.shift: Tensor | None = None
        self.embed_tokens = embedding(c.vocab, c.hidden)
        self.rotary = Rotary(c.turns)
