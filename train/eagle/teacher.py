"""The base whose words a head learns to predict: a whole model of any family, read row by row, never changed.

It knows nothing about heads. It is the decoder of model/llama.py, so what a head is taught is what it will meet.

Shapes: N tokens of a row, D model, V vocabulary.
"""
from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from model.drafts.eagle import inner_layers
from model.weights.checkpoint import Checkpoint
from model.weights.parts import EMBED, translate
from model.whole import Whole
from train.eagle.unroll import Causal


def mark(source: Checkpoint, name: str) -> str:
    """A hash of some weights of that tensor, which tells one file from another of the same sizes."""
    weights = source.read(name).reshape(-1)[:4096]
    content = weights.double().numpy().tobytes()
    return hashlib.sha256(content).hexdigest()[:16]


class Teacher(Whole):
    """The base of a head, in `dtype` on `device`."""

    def __init__(self, source: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(source, dtype, device)
        names = {translate(name): name for name in source.names()}
        self.stored = source.form(names[EMBED]).dtype  # how its file holds its weights

    @property
    def embedding(self) -> Tensor:
        return self.body.embed_tokens.weight  # type: ignore[return-value]

    @property
    def mark(self) -> str:
        """What tells this base from another one of the same sizes."""
        return mark(self.source, self.source.names()[-1])

    @torch.no_grad()
    def read(self, ids_N: Tensor) -> tuple[Tensor, Tensor | None]:
        """The last hidden state of each token, after the norm, `[N, D]`, and the inner features that EAGLE-3 wants,
        `[N, 3D]`, or None if the model is too small for them."""
        cache: Any = Causal(len(ids_N), self.device)
        kept: dict[int, Tensor] = dict.fromkeys(inner_layers(self.config.layers), ids_N)
        pos_N = torch.arange(len(ids_N), device=self.device)
        last_ND = self.body(ids_N.to(self.device, torch.long), pos_N, cache, kept)
        return last_ND, torch.cat([kept[layer] for layer in kept], -1) if kept else None
