"""The base of a head in training: a whole model of any family, with fixed weights, which reads row by row.

It knows nothing about heads. It is the decoder of model/llama.py, so training and drafting see the same features.

Shapes: N tokens of a row, D model, V vocabulary.
"""
from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from config.schema.heads import usual_layers
from model.weights.checkpoint import Checkpoint
from model.weights.parts import EMBED
from model.whole import Whole
from train.eagle.unroll import Causal
from train.terms import digest, kept, mark


class Teacher(Whole):
    """The base of a head, in `dtype` on `device`; `folder`, if given, keeps its outputs for each row."""

    def __init__(self, source: Checkpoint, dtype: torch.dtype, device: torch.device,
                 folder: Path | None = None) -> None:
        super().__init__(source, dtype, device)
        self.folder, self.mark = folder, mark(source)
        self.inner = usual_layers(self.config.layers)  # an EAGLE-3 head reads the inputs of these layers
        self.stored = source.form(EMBED).dtype  # number type of the weights in its file

    @property
    def embedding(self) -> Tensor:
        return self.body.embed_tokens.weight  # type: ignore[return-value]

    @property
    def written(self) -> torch.dtype:
        """The number type of a written head: that of the base's file, or bfloat16 if the base computes in it."""
        return self.dtype if self.dtype == torch.bfloat16 else self.stored

    def read(self, ids_N: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the base's outputs for each token: the last hidden state after the norm, `[N, D]`; the inner features
        for EAGLE-3, `[N, inner * D]`, or None if the model has too few layers; and the most likely next word, `[N]`."""
        if self.folder is None:
            outputs = self._read(ids_N)
        else:
            content = f"{self.mark} {self.dtype} {self.inner} {ids_N.tolist()}"
            outputs_path = self.folder / f"{digest(content.encode())}.pt"
            outputs = kept(outputs_path, partial(self._read, ids_N))
        return outputs["last"], outputs.get("inner"), outputs["word"]

    @torch.no_grad()
    def _read(self, ids_N: Tensor) -> dict[str, Tensor]:
        cache: Any = Causal(len(ids_N), self.device)
        inner_by_layer: dict[int, Tensor] = dict.fromkeys(self.inner, ids_N)
        pos_N = torch.arange(len(ids_N), device=self.device)
        last_ND = self.body(ids_N.to(self.device, torch.long), pos_N, cache, inner_by_layer)

        outputs = {"last": last_ND, "word": self.lm_head(last_ND).argmax(-1)}
        if inner_by_layer:
            outputs["inner"] = torch.cat(list(inner_by_layer.values()), -1)
        return outputs
