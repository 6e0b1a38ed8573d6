"""Weights on a CPU, packed in the order in which oneDNN reads them.

torch's own product would reorder a plain weight in bfloat16 each time, which takes longer than the product of a row. In
float32 it would use another library, which takes several times as long for the rows of a tree, and in which a row's
bits depend on the other rows. It knows nothing about layers.

Shapes: T rows, N outputs, K inputs.
"""
from __future__ import annotations

import os

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLOSE = 0.01  # of the plain product's result, relative: bfloat16 has eight bits
ORDERED_FOR = {torch.bfloat16: 1, torch.float32: 16}  # rows of a product for which its weight is packed
UNITS = (1, 2, 4)  # multiples to which the rows of a batch may be padded
TRIED_ROWS = (1, 2, 3, 4, 8, 16, 17, 33)  # of batches in which a row must have the same bits ...
MAX_TRIED_ROWS = 65  # ... as in a batch of this size

# Of 1,024 kernels, one for each shape and number of rows, oneDNN would fill half a gigabyte within a day of requests.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
_known_units: dict[tuple[object, ...], int] = {}  # by type, shape and threads; 0: incorrect products, or none


class Packed(nn.Module):
    """A replacement for a plain linear layer, with its weight `[N, K]` and its bias `[N]`.

    Rows are padded to multiples of `unit`, since oneDNN uses another kernel for a single row of some shapes.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.unit = 1
        packed_weight = torch.ops.mkldnn._reorder_linear_weight(weight, ORDERED_FOR[weight.dtype])
        self.weight = nn.Parameter(packed_weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x_TK: Tensor) -> Tensor:
        num_missing_rows = -len(x_TK) % self.unit
        padded_rows = F.pad(x_TK, (0, 0, 0, num_missing_rows)) if num_missing_rows else x_TK
        multiply = torch.ops.mkldnn._linear_pointwise
        out_TN: Tensor = multiply(padded_rows, self.weight, self.bias, "none", [], "")
        return out_TN[:len(x_TK)]


def packed(weight: Tensor, bias: Tensor | None = None) -> Packed | None:
    """Pack a plain weight, so that a row has the same bits in every batch.

    Return None if torch lacks the operators (before 2.0), the device does not support them, or the result is incorrect.
    """
    product_kind = (weight.dtype, *weight.shape, torch.get_num_threads())
    if weight.dtype not in ORDERED_FOR or weight.device.type != "cpu" or _known_units.get(product_kind) == 0:
        return None

    try:
        product = Packed(weight, bias)
        if product_kind not in _known_units:
            _known_units[product_kind] = _tested_unit(product, weight)
    except (AttributeError, NotImplementedError, RuntimeError):
        _known_units[product_kind] = 0

    if not _known_units[product_kind]:
        return None
    product.unit = _known_units[product_kind]
    return product


def _tested_unit(product: Packed, weight: Tensor) -> int:
    """Return the least unit with which a row's bits do not depend on its batch, else 1; 0: the result is incorrect."""
    numbers = np.random.default_rng(1)  # torch's own generators need what config/lean_torch.py leaves out
    rows = numbers.standard_normal((MAX_TRIED_ROWS, weight.shape[1]), np.float32)
    x_TK = torch.from_numpy(rows).to(weight.dtype)
    plain_out = F.linear(x_TK[:1], weight, product.bias).float()
    packed_out = product(x_TK)
    if not (packed_out[:1].float() - plain_out).norm() < CLOSE * plain_out.norm():
        return 0

    # Rounding to bfloat16 hides the last bits of a sum. A bias that subtracts the rounded sum reveals them.
    usual_bias = product.bias
    rounded_sum = packed_out[0] if usual_bias is None else packed_out[0] - usual_bias
    product.bias = nn.Parameter(-rounded_sum, requires_grad=False)
    unit = _least_unit(product, x_TK)
    product.bias = usual_bias
    return unit


def _least_unit(product: Packed, x_TK: Tensor) -> int:
    whole_batch = product(x_TK)
    for unit in UNITS:
        product.unit = unit
        if all(torch.equal(product(x_TK[:num_rows]), whole_batch[:num_rows]) for num_rows in TRIED_ROWS):
            return unit
    return 1
