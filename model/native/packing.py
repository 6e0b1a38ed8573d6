"""Weights in the order in which the native kernels read them; `Weight` of `slice.c` describes each form.

It knows nothing about layers or the library. Sixteen outputs lie together. A weight in float32 is kept in bfloat16 if
that holds the same numbers, which halves the memory to read, and changes no bit of a result.

Shapes: N outputs and I inputs of a weight, G groups of 32 inputs.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from model.weights import int4

BLOCK = 16  # outputs that lie together
FLOAT32, BFLOAT16, INT8, INT4 = range(4)
BYTE = 255


class Packing(NamedTuple):
    """The order of whole numbers that a library needs; see `lanes.h`."""

    unit_int8: int  # inputs of an output that lie together
    offset_int8: int  # added to a number
    unit_int4: int


class PackedWeight(NamedTuple):
    """The tensors of a weight; `scales` is None for floating point."""

    form: int
    numbers: Tensor
    scales: Tensor | None = None


def padded(rows: Tensor) -> Tensor:
    """Pad the first dimension with zeros to whole blocks."""
    num_missing = -len(rows) % BLOCK
    if not num_missing:
        return rows
    return torch.cat((rows, rows.new_zeros(num_missing, *rows.shape[1:])))


def pack_float(weight_NI: Tensor) -> PackedWeight:
    """Pack a weight in float32 to numbers `[N / 16, I, 16]`."""
    half_weight = weight_NI.bfloat16()
    fits_half = torch.equal(half_weight.float(), weight_NI)
    kept_weight = padded(half_weight if fits_half else weight_NI)

    blocks = kept_weight.view(-1, BLOCK, kept_weight.shape[1])
    numbers = blocks.transpose(1, 2).contiguous()
    return PackedWeight(BFLOAT16 if fits_half else FLOAT32, numbers)


def pack_int8(weight_NI: Tensor, scale_N: Tensor, packing: Packing) -> PackedWeight:
    """Pack an 8-bit weight to numbers `[N / 16, I / unit, 16, unit]` and scales `[N]`."""
    num_missing = -weight_NI.shape[1] % int4.GROUP
    wide_weight = F.pad(padded(weight_NI), (0, num_missing))
    shifted = (wide_weight.short() + packing.offset_int8) & BYTE

    num_blocks = len(wide_weight) // BLOCK
    units = shifted.to(torch.uint8).view(num_blocks, BLOCK, -1, packing.unit_int8)
    return PackedWeight(INT8, units.transpose(1, 2).contiguous(), padded(scale_N))


def pack_int4(pairs: Tensor, scale_GN2: Tensor, packing: Packing) -> PackedWeight:
    """Pack a 4-bit weight to pairs of codes `[N / 16, G, 16 / unit, 16, unit]` and scales `[N / 16, G, 2, 16]`."""
    num_groups, num_units = len(scale_GN2), int4.GROUP // packing.unit_int4
    codes = int4.codes(padded(pairs))
    units = codes.view(-1, BLOCK, num_groups, 2, num_units // 2, packing.unit_int4)
    low_codes, high_codes = units.permute(3, 0, 2, 4, 1, 5)

    scale_NG2 = padded(scale_GN2.transpose(0, 1))
    scales = scale_NG2.view(-1, BLOCK, num_groups, 2).permute(0, 2, 3, 1)
    both_codes = low_codes | high_codes << 4
    return PackedWeight(INT4, both_codes.contiguous(), scales.contiguous())
