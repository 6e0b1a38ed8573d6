"""A whole model on one device: all layers of any family and the LM head.

It knows nothing about stages or drafts.

Shapes: T rows, D model, V vocabulary.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Iterator, Sequence, Union

import torch
from torch import Tensor

from model.cache import TreeCache
from model.llama import LlamaConfig, Logits, Slice, fill
from model.native.compiler import has_library
from model.native.layers import CACHED_CODES, NativeSlice, reason_against
from model.native.linear import NativeProducts
from model.sample import Sampler
from model.weights.checkpoint import Checkpoint
from model.weights.parts import HEAD, assign, check_model, read_sizes
from model.weights.quant import BLOCKS, Recast
from model.weights.quant_layers import load


class Whole:
    """The layers and LM head of `source`, quantized to `kind`, for `context` positions; ValueError if invalid."""

    def __init__(self, source: Checkpoint, dtype: torch.dtype, device: torch.device | str, kind: str = "none",
                 context: int | None = None) -> None:
        self.source, self.dtype, self.device = source, dtype, torch.device(device)
        sizes, layer_weights, head_name = _parts(source, kind)
        self.config = replace(sizes, context=context or sizes.context)
        self.body = Slice(self.config, 0, self.config.layers)
        load(self.body, kind, layer_weights, dtype, device)
        self.lm_head = Logits(self.config)
        fill(self.lm_head, {"product.weight": source.read_finite(head_name)}, dtype, device)

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


class NativeWhole:
    """The layers and LM head of `source` in C: with the weights of a GGUF file as they are, others in float32.

    Raises ValueError if the source is invalid, or there is no library; see also `native.layers.reason_against`.
    """

    def __init__(self, source: Checkpoint) -> None:
        self.device = torch.device("cpu")
        self.config, layer_weights, head_name = _parts(source, keeps_blocks=True)
        num_threads = torch.get_num_threads()
        self.body = NativeSlice(Slice(self.config, 0, self.config.layers), layer_weights, num_threads)

        self.lm_head = Logits(self.config)
        head_weight = source.read_finite(head_name)  # the numbers in blocks show only when they are unfolded
        if source.is_in_blocks(head_name):
            head_weight = source.read_stored(head_name)
        product = NativeProducts(num_threads).linear(head_weight)
        self.lm_head.product = product  # type: ignore[assignment]

    def cache(self, num_slots: int) -> TreeCache:
        """Return an empty cache for a text of `num_slots` tokens."""
        return self.config.cache(self.config.layers, num_slots, torch.empty(0), code_type=CACHED_CODES)


WholeModel = Union[Whole, NativeWhole]


def open_whole(source: Checkpoint, dtype: torch.dtype, device: torch.device) -> WholeModel:
    """Open a model to generate texts, on a CPU in C if that is possible, and otherwise in `dtype` by torch."""
    has_blocks = any(map(source.is_in_blocks, source.names()))
    kind = BLOCKS if has_blocks else "none"
    reason = reason_against(read_sizes(source), torch.float32, device, kind)
    return Whole(source, dtype, device) if reason or not has_library() else NativeWhole(source)


def _parts(source: Checkpoint, kind: str = "none", keeps_blocks: bool = False) -> tuple[LlamaConfig, Recast, str]:
    """Return the sizes of a model, the weights of its layers quantized to `kind`, and the name of its LM head."""
    check_model(source)
    sizes = read_sizes(source)

    # rank 0 would have the LM head, and one stage all layers
    names_of_root, names_of_layers = assign(source.names(), [0, sizes.layers], sizes.tied)
    name_in_file = {name[len("model."):]: file_name for name, file_name in names_of_layers.items()}
    layer_weights = Recast(source, name_in_file, kind, keeps_blocks, must_be_finite=True)
    return sizes, layer_weights, names_of_root[HEAD]
