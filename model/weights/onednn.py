"""Weights in bfloat16 on a processor, in the order in which oneDNN reads them.

torch's own product would bring a plain weight into that order each time, which takes longer than the product of a row.
It knows nothing about layers.
"""
from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TRIAL = (5, 96, 160)  # rows, inputs and outputs
CLOSE = 0.01  # of the trial's result, relative: bfloat16 has eight bits


class Packed(nn.Module):
    """A linear layer in place of a plain one, with its weight `[N, K]` and its bias `[N]`."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x_TK: Tensor) -> Tensor:
        multiply = torch.ops.mkldnn._linear_pointwise
        return multiply(x_TK, self.weight, self.bias, "none", [], "")  # type: ignore[no-any-return]


def packable(weight: Tensor) -> bool:
    """Whether this machine multiplies with such a weight packed."""
    return weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and _works()


@lru_cache(maxsize=None)
def _works() -> bool:
    """Whether torch has the operators (from 2.0 on), the processor runs them, and their result is right."""
    rows, inputs, outputs = TRIAL
    generator = torch.Generator().manual_seed(1)
    drawn = (torch.randn(size, inputs, generator=generator) for size in (rows, outputs))
    x_TK, weight = (numbers.bfloat16() for numbers in drawn)
    bias = torch.randn(outputs, generator=generator).bfloat16()
    exact = F.linear(x_TK.float(), weight.float(), bias.float())
    try:
        found = Packed(weight, bias)(x_TK).float()
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return bool((found - exact).norm() < CLOSE * exact.norm())
