"""Linear layers in C, such as an LM head's: a row has the same bits in every batch and on every processor.

Shapes: T rows, N outputs, I inputs.
"""
from __future__ import annotations

from ctypes import byref, c_int64, c_void_p
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from model.native.compiler import Level, library
from model.native.structures import CModel, Weights, check_result, packing_of, start
from model.weights.blocks import plain_shape, quantize
from model.weights.quant import can_be_quantized

NO_LAYERS = CModel(num_heads=1, num_kv_heads=1)


class NativeProducts:
    """The threads that compute linear layers in C, and the layers that they can compute: in float32 on a CPU."""

    def __init__(self, num_threads: int, level: Level | None = None) -> None:
        self.library = library(level)
        self.handle = start(self, self.library, NO_LAYERS, num_threads)

    def plain(self, weight: Tensor, bias: Tensor | None = None) -> NativeLinear:
        """Return a linear layer with this weight."""
        num_outputs, num_inputs = weight.shape
        layer = SimpleNamespace(weight=weight, bias=bias, in_features=num_inputs, out_features=num_outputs)
        return NativeLinear(self, layer)

    def stored(self, blocks: Tensor, bias: Tensor | None = None) -> NativeLinear:
        """Return a linear layer with its weight in blocks `[N, B, bytes]`."""
        num_outputs, num_inputs = plain_shape(blocks.shape)
        layer = SimpleNamespace(weight=blocks, bias=bias, in_features=num_inputs, out_features=num_outputs)
        return NativeLinear(self, layer)

    def quantized(self, kind: str, weight: Tensor, bias: Tensor | None = None) -> NativeLinear:
        """Return a linear layer with this weight, quantized to a type of blocks if it fills some; or "none"."""
        if kind == "none" or not can_be_quantized(kind, tuple(weight.shape)):
            return self.plain(weight, bias)
        return self.stored(quantize(kind, weight), bias)


class NativeLinear(nn.Module):
    """A linear layer in C; `layer` has its sizes, its weight, perhaps in blocks, and its bias."""

    def __init__(self, products: NativeProducts, layer: Any) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self._products = products
        self._weights = Weights(packing_of(products.library))
        self._weight = self._weights.linear_weight(layer)

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
