"""Linear layers in C, such as an LM head's: a row has the same bits in every batch and on every processor.

Shapes: T rows, N outputs, I inputs.
"""
from __future__ import annotations

from ctypes import byref, c_int64, c_void_p
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from model.native.compiler import Level, library
from model.native.structures import CModel, Weights, check_result, start
from model.weights.blocks import plain_shape, quantize
from model.weights.quant import can_be_quantized

NO_LAYERS = CModel(num_heads=1, num_kv_heads=1)


class NativeProducts:
    """The threads that compute linear layers in C, and the layers that they can compute: in float32 on a CPU."""

    def __init__(self, num_threads: int, level: Level | None = None) -> None:
        self.library = library(level)
        self.handle = start(self, self.library, NO_LAYERS, num_threads)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> NativeLinear:
        """Return a linear layer with this weight, which may be in blocks `[N, B, bytes]`."""
        return NativeLinear(self, weight, bias)

    def quantized(self, kind: str, weight: Tensor, bias: Tensor | None = None) -> NativeLinear:
        """Return a linear layer with this weight, quantized to a type of blocks if it fills some; or "none"."""
        is_quantized = kind != "none" and can_be_quantized(kind, tuple(weight.shape))
        return self.linear(quantize(kind, weight) if is_quantized else weight, bias)


class NativeLinear(nn.Module):
    """A linear layer in C."""

    def __init__(self, products: NativeProducts, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = plain_shape(weight.shape)
        self._products = products
        self._weights = Weights()
        self._weight = self._weights.linear_weight(SimpleNamespace(weight=weight, bias=bias))

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
