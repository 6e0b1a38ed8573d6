"""Bit-identical rows in every batch on a CPU.

The order in which a kernel sums a row's numbers depends on the other rows and slots of the batch. In float64, two
orders differ by some 1e-16. Rounding to the type of the rows removes this, unless the sum is that close to the border
between two numbers of this type: in float32, one sum in some hundred million. So norms and attention sum in float64.
GPUs, most of which are slow in float64, keep the type of the rows: there a near tie may be decided differently.
"""
from __future__ import annotations

import torch
from torch import Tensor


def for_sums(x: Tensor) -> Tensor:
    """Return `x` in the type in which its numbers are summed."""
    return x.double() if x.device.type == "cpu" else x


# torch computes its own sigmoid, silu and softplus of the last numbers of a tensor by other code than those before, so
# that the bits of a row would depend on the rows beside it, unless rows are as long as some vectors of the processor.
# Its exp and log1p do not.

def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x))."""
    return 1 / (1 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    """Return x * sigmoid(x)."""
    return x * sigmoid(x)


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x))."""
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))
