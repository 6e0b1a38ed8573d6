"""Weights on a processor in the order in which oneDNN reads them.

torch's own product would bring a plain weight in bfloat16 into that order each time, which takes longer than the
product of a row. In float32 it would use another library, which takes several times as long for the rows of a tree, and
whose bits for a row depend on the rows beside it. It knows nothing about layers.

Shapes: T rows, N outputs, K inputs.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLOSE = 0.01  # of the plain product's result, relative: bfloat16 has eight bits
ORDERED_FOR = {torch.bfloat16: 1, torch.float32: 16}  # rows of a product, for which its weight is put in order
UNITS = (1, 2, 4)  # rows to whose multiples batches may be padded
TRIED = (1, 2, 3, 4, 8, 16, 17, 33)  # rows of the batches in which a row shall have the same bits ...
ROWS = 65  # ... as in one of so many

_units: dict[tuple[object, ...], int] = {}  # by type, shape and threads; 0: the products are wrong, or there are none


class Packed(nn.Module):
    """A linear layer in place of a plain one, with its weight `[N, K]` and its bias `[N]`.

    Rows are padded to multiples of `unit`: oneDNN computes a lone row of some shapes by another kernel.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.unit = 1
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, ORDERED_FOR[weight.dtype])
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x_TK: Tensor) -> Tensor:
        missing = -len(x_TK) % self.unit
        rows = F.pad(x_TK, (0, 0, 0, missing)) if missing else x_TK
        multiply = torch.ops.mkldnn._linear_pointwise
        out_TN: Tensor = multiply(rows, self.weight, self.bias, "none", [], "")
        return out_TN[:len(x_TK)]


def packed(weight: Tensor, bias: Tensor | None = None) -> Packed | None:
    """A plain weight packed, so that a row has the same bits in every batch.

    None if torch lacks the operators (it has them from 2.0 on), this device does not run them, or the result is wrong.
    """
    key = (weight.dtype, *weight.shape, torch.get_num_threads())
    if weight.dtype not in ORDERED_FOR or weight.device.type != "cpu" or _units.get(key) == 0:
        return None
    try:
        product = Packed(weight, bias)
        if key not in _units:
            _units[key] = _unit(product, weight)
    except (AttributeError, NotImplementedError, RuntimeError):
        _units[key] = 0
    if not _units[key]:
        return None
    product.unit = _units[key]
    return product


def _unit(product: Packed, weight: Tensor) -> int:
    """The least unit with which a row's bits do not depend on its batch, 1 if there is none; 0: the result is wrong."""
    generator = torch.Generator().manual_seed(1)
    x_TK = torch.randn(ROWS, weight.shape[1], generator=generator).to(weight.dtype)
    plain = F.linear(x_TK[:1], weight, product.bias).float()
    found = product(x_TK)
    if not (found[:1].float() - plain).norm() < CLOSE * plain.norm():
        return 0
    # Rounding to bfloat16 hides the last bits of a sum. A bias that takes the rounded sum away leaves them to be seen.
    bias = product.bias
    rest = found[0] if bias is None else found[0] - bias
    product.bias = nn.Parameter(-rest, requires_grad=False)
    unit = _least_unit(product, x_TK)
    product.bias = bias
    return unit


def _least_unit(product: Packed, x_TK: Tensor) -> int:
    whole = product(x_TK)
    for unit in UNITS:
        product.unit = unit
        if all(torch.equal(product(x_TK[:rows]), whole[:rows]) for rows in TRIED):
            return unit
    return 1
