"""Linear layers in C, such as an LM head's, and the states of delta nets: a row has the same bits in every batch and on
every processor.

Shapes: T rows, N outputs, I inputs; H heads, K dimensions of a key, V of a value.
"""
from __future__ import annotations

from ctypes import byref, c_int64, c_void_p
from types import SimpleNamespace
from typing import Any, Sequence

import torch
from torch import Tensor, nn

from model.llama import Slice, fill
from model.native.compiler import Level, library
from model.native.structures import CDeltaRows, CModel, Weights, check_result, start
from model.recurrent import DeltaNet, DeltaRows, continue_state
from model.weights.blocks import plain_shape, quantize
from model.weights.quant import Recast, can_be_quantized
from model.weights.quant_layers import InBlocks, StoredEmbedding, hollow_blocks

EMBEDDING = "embed_tokens.weight"
LANES = 8  # a head has a multiple of this many dimensions
NO_LAYERS = CModel(num_heads=1, num_kv_heads=1)


class NativeProducts:
    """The threads that compute linear layers in C, and the layers that they can compute: in float32 on a CPU."""

    def __init__(self, num_threads: int, level: Level | None = None) -> None:
        self.library = library(level)
        self.handle = start(self, self.library, NO_LAYERS, num_threads)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> NativeLinear:
        """Return a linear layer with this weight, which may be in blocks `[N, B, bytes]`."""
        return NativeLinear(self, SimpleNamespace(weight=weight, bias=bias))

    def continue_state(self, rows: DeltaRows, state_HKV: Tensor) -> Tensor:
        """Compute in C what `model.recurrent.continue_state` computes."""
        tensors = [x.contiguous() for x in rows]
        is_fit = state_HKV.dtype == torch.float32 and state_HKV.is_contiguous()
        if not is_fit or state_HKV.shape[2] % LANES:
            return continue_state(rows, state_HKV)

        out_THV = torch.empty_like(tensors[2])
        addresses = [x.data_ptr() for x in (*tensors, state_HKV, out_THV)]
        sizes = len(out_THV), *state_HKV.shape
        self.library.slice_continue_state(self.handle, byref(CDeltaRows(*sizes, *addresses)))
        return out_THV

    def quantized(self, kind: str, weight: Tensor, bias: Tensor | None = None) -> NativeLinear:
        """Return a linear layer with this weight, quantized to a type of blocks if it fills some; or "none"."""
        is_quantized = kind != "none" and can_be_quantized(kind, tuple(weight.shape))
        return self.linear(quantize(kind, weight) if is_quantized else weight, bias)


class NativeLinear(nn.Module):
    """A linear layer in C, or several that read the same rows."""

    def __init__(self, products: NativeProducts, *linears: Any) -> None:
        super().__init__()
        shapes = [plain_shape(linear.weight.shape) for linear in linears]
        self.out_features, self.in_features = sum(outputs for outputs, _ in shapes), shapes[0][1]
        self._products = products
        self._weights = Weights()
        self._weight = self._weights.linear_weight(*linears)

    def forward(self, x_TI: Tensor) -> Tensor:
        rows = x_TI.contiguous()
        if rows.shape[1:] != (self.in_features,) or rows.dtype != torch.float32:
            raise IndexError(f"rows of shape {tuple(rows.shape)} in {rows.dtype} instead of {self.in_features} numbers")

        out_TN = torch.empty(len(rows), self.out_features)
        if len(rows):
            addresses = c_void_p(rows.data_ptr()), c_int64(len(rows)), c_void_p(out_TN.data_ptr())
            multiply = self._products.library.slice_multiply
            check_result(multiply(self._products.handle, byref(self._weight), *addresses))

        return out_TN


def load_with_products(layers: Slice, tensors: Recast, products: NativeProducts) -> None:
    """Fill layers on the meta device that torch computes, but for their linear layers, whose weights may be in blocks,
    and the states of delta nets."""
    if EMBEDDING in tensors:
        embedding_form = tensors.forms[EMBEDDING]
        layers.embed_tokens = StoredEmbedding(embedding_form, torch.float32)  # type: ignore[assignment]
    hollow_blocks(layers, tensors)
    fill(layers, tensors, torch.float32, "cpu")

    for block in list(layers.modules()):
        if isinstance(block, DeltaNet):
            block.continue_state = products.continue_state

        fusible: Sequence[str] = getattr(block, "fusible", ())
        linears = [getattr(block, name) for name in fusible]
        if linears and len(set(map(type, linears))) == 1:
            block.fused_product = NativeLinear(products, *linears)
            for name in fusible:
                setattr(block, name, None)

        for name, child in list(block.named_children()):
            if isinstance(child, (nn.Linear, InBlocks)):
                setattr(block, name, NativeLinear(products, child))
