"""Bit-identical rows in every batch on a CPU.

The order in which a kernel sums a row's numbers depends on the other rows and slots of the batch. In float64, two
orders differ by some 1e-16. Rounding to the type of the rows removes this, unless the sum is that close to the border
between two numbers of this type: in float32, one sum in some hundred million. So norms and attention sum in float64.
GPUs, most of which are slow in float64, keep the type of the rows: there a near tie may be decided differently.
"""
from __future__ import annotations

from torch import Tensor


def for_sums(x: Tensor) -> Tensor:
    """Return `x` in the type in which its numbers are summed."""
    return x.double() if x.device.type == "cpu" else x
