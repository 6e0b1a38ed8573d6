"""A whole model on one device: all layers of any family and the LM head.

It knows nothing about stages or drafts.

Shapes: T rows, D model, V vocabulary.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Iterator, Sequence

import torch
from torch import Tensor

from model.cache import TreeCache
from model.llama import Logits, Slice, fill
from model.sample import Sampler
from model.weights.checkpoint import Checkpoint
from model.weights.parts import HEAD, assign, check_model, read_sizes
from model.weights.quant import Recast, load


class Whole:
    """The layers and LM head of `source`, quantized to `kind`, for `context` positions; ValueError if invalid."""

    def __init__(self, source: Checkpoint, dtype: torch.dtype, device: torch.device | str, kind: str = "none",
                 context: int | None = None) -> None:
        check_model(source)
        self.source, self.dtype, self.device = source, dtype, torch.device(device)
        sizes = read_sizes(source)
        self.config = replace(sizes, context=context or sizes.context)
        stages = [0, self.config.layers]  # rank 0 has the LM head, one stage all layers
        top, layers = assign(source.names(), stages, self.config.tied)
        self.body = Slice(self.config, 0, self.config.layers)
        names = {name[len("model."):]: held for name, held in layers.items()}
        load(self.body, kind, Recast(source, names, kind, sound=True), dtype, device)
        self.lm_head = Logits(self.config)
        fill(self.lm_head, {"product.weight": source.sound(top[HEAD])}, dtype, device)

    def cache(self, slots: int) -> TreeCache:
        """Return an empty cache for a text of `slots` tokens."""
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        return self.config.cache(self.config.layers, slots, like)

    @torch.no_grad()
    def logits(self, ids: Sequence[int], cache: TreeCache, last: int,
               text: bool = True) -> Tensor:
        """Return the logits `[last, V]` after the last tokens; `cache.drop()` forgets the tokens if not `text`."""
        start = cache.capacity - cache.room
        nodes = list(range(start, start + len(ids)))
        parents = [node - 1 for node in nodes]
        cache.admit(nodes, parents, len(ids) if text else 0)
        ids_T = torch.tensor(ids, device=self.device)
        out_TD = self.body(ids_T, torch.tensor(nodes, device=self.device), cache)
        logits_TV: Tensor = self.lm_head(out_TD[-last:])
        return logits_TV

    def generate(self, prompt: Sequence[int], cache: TreeCache, sampler: Sampler) -> Iterator[int]:
        """Yield the tokens that follow a prompt, one by one; the empty `cache` needs a slot for each token."""
        ids, position = list(prompt), len(prompt)
        while True:
            [token] = sampler(self.logits(ids, cache, 1), [position])
            yield token
            ids, position = [token], position + 1
