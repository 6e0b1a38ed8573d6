"""Why a row has the same bits in every batch on a processor.

The order in which a kernel adds up a row's numbers depends on the rows and slots beside it. In float64 two orders
differ by some 1e-16, which is gone once the sum is rounded to the type of the rows, unless it stands within that of the
border between two of their numbers: in float32 one sum of some hundred million. So norms and attention add in float64.
GPUs, most of which hardly have it, keep the type of the rows: there a near tie may fall differently.
"""
from __future__ import annotations

from torch import Tensor


def for_sums(x: Tensor) -> Tensor:
    """`x` in the type in which its numbers are added up."""
    return x.double() if x.device.type == "cpu" else x
