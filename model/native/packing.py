"""Weights in the order in which the native kernels read them; `Weight` of `slice.c` describes each form.

It knows nothing about layers or the library. Sixteen outputs lie together. A weight in float32 is kept in bfloat16 if
that holds the same numbers, which halves the memory to read, and changes no bit of a result.

Shapes: N outputs and I inputs of a weight, G groups of 32 inputs.
"""
from __future__ import annotations

from typing import NamedTuple, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from model.weights import blocks, int4

BLOCK = 16  # outputs that lie together
FLOAT32, BFLOAT16, INT8, INT4, GROUPS8, HALVES8, GROUPS4 = range(7)
SIGN_BIT = 128  # of a byte
UNIT_TYPES = {2: torch.int16, 4: torch.int32}  # by the bytes of a unit


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
    """Pack an 8-bit weight with a scale for each output."""
    return PackedWeight(INT8, pack_bytes(weight_NI, packing), padded(scale_N))


def pack_int4(pairs: Tensor, scale_GN2: Tensor, packing: Packing) -> PackedWeight:
    """Pack pairs of codes with their scales and offsets, to `[N / 16, G, 2, 16]`."""
    halves = int4.codes(pairs).view(len(pairs), -1, 2, int4.GROUP // 2)
    low_codes, high_codes = halves.unbind(2)
    codes = pack_pairs(low_codes | high_codes << 4, packing)
    return PackedWeight(INT4, codes, interleave_scales(scale_GN2.transpose(0, 1)))


def pack_blocks(weights: Sequence[Tensor], packing: Packing) -> PackedWeight:
    """Pack the outputs of several weights in blocks of a GGUF file as one weight."""
    all_codes = [blocks.codes_of(weight) for weight in weights]
    if all(codes.are_pairs for codes in all_codes):
        pairs = torch.cat([codes.numbers for codes in all_codes])
        scales = torch.cat([codes.scales for codes in all_codes])
        least = torch.cat([codes.least_values() for codes in all_codes])
        return PackedWeight(GROUPS4, pack_pairs(pairs, packing), interleave_scales(torch.stack((scales, least), -1)))

    numbers = pack_bytes(torch.cat([codes.whole_numbers() for codes in all_codes]), packing)
    if all(codes.has_scale_only for codes in all_codes):
        scales = torch.cat([codes.scales for codes in all_codes])
        return PackedWeight(GROUPS8, numbers, interleave_scales(scales[..., None]))

    half_scales = torch.cat([codes.half_scales() for codes in all_codes])
    least = torch.cat([codes.least_values() for codes in all_codes])
    scales = torch.cat((half_scales, least[..., None]), -1)
    return PackedWeight(HALVES8, numbers, interleave_scales(scales))


def pack_bytes(numbers_NI: Tensor, packing: Packing) -> Tensor:
    """Pack numbers of 8 bits to `[N / 16, I / unit, 16, unit]`."""
    num_missing = -numbers_NI.shape[1] % int4.GROUP
    wide_numbers = F.pad(padded(numbers_NI), (0, num_missing)).view(torch.uint8)
    if packing.offset_int8:
        assert packing.offset_int8 == SIGN_BIT, packing
        wide_numbers = wide_numbers ^ SIGN_BIT  # which adds the offset
    return _interleave(wide_numbers, packing.unit_int8)


def pack_pairs(pairs_NGp: Tensor, packing: Packing) -> Tensor:
    """Pack bytes of two codes, of a group's first and second half, to `[N / 16, G * 16 / unit, 16, unit]`."""
    return _interleave(padded(pairs_NGp).flatten(1), packing.unit_int4)


def _interleave(bytes_NB: Tensor, unit: int) -> Tensor:
    """Return units of bytes of sixteen rows next to one another."""
    units = bytes_NB.contiguous().view(UNIT_TYPES[unit])  # moved as one number, which is faster
    blocks_of_units = units.view(-1, BLOCK, units.shape[1])
    return blocks_of_units.transpose(1, 2).contiguous()


def interleave_scales(scales_NGS: Tensor) -> Tensor:
    """Return S numbers of each group as `[N / 16, G, S, 16]`."""
    num_groups, num_scales = scales_NGS.shape[1:]
    blocks_of_scales = padded(scales_NGS).view(-1, BLOCK, num_groups, num_scales)
    return blocks_of_scales.permute(0, 2, 3, 1).contiguous()
