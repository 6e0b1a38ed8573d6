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
from model.weights.quant import Recast
from model.weights.quant_layers import load


class Whole:
    """The layers and LM head of `source`, quantized to `kind`, for `context` positions; ValueError if invalid."""

    def __init__(self, source: Checkpoint, dtype: torch.dtype, device: torch.device | str, kind: str = "none",
                 context: int | None = None) -> None:
        check_model(source)
        self.source, self.dtype, self.device = source, dtype, torch.device(device)
        sizes = read_sizes(source)
        self.config = replace(sizes, context=context or sizes.context)

        # rank 0 would have the LM head, and one stage all layers
        names_of_root, names_of_layers = assign(source.names(), [0, self.config.layers], self.config.tied)
        self.body = Slice(self.config, 0, self.config.layers)
        name_in_file = {name[len("model."):]: file_name for name, file_name in names_of_layers.items()}
        load(self.body, kind, Recast(source, name_in_file, kind, must_be_finite=True), dtype, device)
        self.lm_head = Logits(self.config)
        fill(self.lm_head, {"product.weight": source.read_finite(names_of_root[HEAD])}, dtype, device)

    def cache(self, num_slots: int) -> TreeCache:
        """Return an empty cache for a text of `num_slots` tokens."""
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        return self.config.cache(self.config.layers, num_slots, like)

    @torch.no_grad()
    def logits(self, token_ids: Sequence[int], cache: TreeCache, num_last: int, is_text: bool = True) -> Tensor:
        """Return the logits `[num_last, V]` after the last tokens; `cache.drop()` forgets tokens that are no text."""
        start = cache.capacity - cache.room
        nodes = list(range(start, start + len(token_ids)))
        parents = [node - 1 for node in nodes]
        cache.admit(nodes, parents, len(token_ids) if is_text else 0)

        token_T, pos_T = (torch.tensor(numbers, device=self.device) for numbers in (token_ids, nodes))
        out_TD = self.body(token_T, pos_T, cache)
        logits_TV: Tensor = self.lm_head(out_TD[-num_last:])
        return logits_TV

    def generate(self, prompt: Sequence[int], cache: TreeCache, sampler: Sampler) -> Iterator[int]:
        """Yield the tokens that follow a prompt, one by one; the empty `cache` needs a slot for each token."""
        new_ids, position = list(prompt), len(prompt)
        while True:
            [token] = sampler(self.logits(new_ids, cache, 1), [position])
            yield token
            new_ids, position = [token], position + 1
