"""Weights on a processor in the order in which oneDNN reads them.

torch's own product would bring a plain weight in bfloat16 into that order each time, which takes longer than the
product of a row. In float32 it would use another library, which takes several times as long for the rows of a tree, and
whose bits for a row depend on the rows beside it. It knows nothing about layers.
"""
from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TRIAL = (20, 96, 160)  # rows, inputs and outputs
CLOSE = 0.01  # of the trial's result, relative: bfloat16 has eight bits
ROWS = {torch.bfloat16: 1, torch.float32: 16}  # of a product, for which its weights are put in order


class Packed(nn.Module):
    """A linear layer in place of a plain one, with its weight `[N, K]` and its bias `[N]`."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS[weight.dtype])
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x_TK: Tensor) -> Tensor:
        multiply = torch.ops.mkldnn._linear_pointwise
        return multiply(x_TK, self.weight, self.bias, "none", [], "")  # type: ignore[no-any-return]


def packable(weight: Tensor) -> bool:
    """Whether this machine multiplies with such a weight packed.

    In float32 a lone thread does not: for one row it reads a plain weight in nine tenths of the time.
    """
    alone = weight.dtype == torch.float32 and torch.get_num_threads() == 1
    return weight.dtype in ROWS and weight.device.type == "cpu" and not alone and _works(weight.dtype)


@lru_cache(maxsize=None)
def _works(dtype: torch.dtype) -> bool:
    """Whether torch has the operators (from 2.0 on), the processor runs them, and their result is right.

    In float32 a row's bits must be the same alone and beside others.
    """
    rows, inputs, outputs = TRIAL
    generator = torch.Generator().manual_seed(1)
    drawn = (torch.randn(size, inputs, generator=generator) for size in (rows, outputs))
    x_TK, weight = (numbers.to(dtype) for numbers in drawn)
    bias = torch.randn(outputs, generator=generator).to(dtype)
    exact = F.linear(x_TK.float(), weight.float(), bias.float())
    try:
        product = Packed(weight, bias)
        found = product(x_TK)
        alone = torch.cat([product(x_K) for x_K in x_TK.split(1)])
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    close = (found.float() - exact).norm() < CLOSE * exact.norm()
    return bool(close) and (dtype != torch.float32 or torch.equal(found, alone))
