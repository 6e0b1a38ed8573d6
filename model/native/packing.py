"""Weights in the order in which the native kernels read them; `Weight` of `slice.c` describes each form.

It knows nothing about layers or the library. Sixteen outputs, a panel, lie together. A weight in float32 is kept in
bfloat16 if that holds the same numbers, which halves the memory to read, and changes no bit of a result.

Shapes: N outputs and I inputs of a weight, G groups of 32 inputs.
"""
from __future__ import annotations

from typing import NamedTuple, Sequence

import torch
from torch import Tensor

from model.weights import blocks

PANEL = 16  # outputs that lie together
FLOAT32, BFLOAT16, INT8, SUBGROUP_INT8, INT4 = range(5)
SIGN_BIT = 128  # of a byte
UNIT_TYPES = {2: torch.int16, 4: torch.int32}  # by the bytes of a unit


class Packing(NamedTuple):
    """The order of codes that a library needs; see `lanes.h`."""

    unit_int8: int  # inputs of an output that lie together
    offset_int8: int  # added to a code
    unit_int4: int  # bytes of an output that lie together


class PackedWeight(NamedTuple):
    """The tensors of a weight; `scales` is None for floating point."""

    form: int
    elements: Tensor
    scales: Tensor | None = None


def padded(rows: Tensor) -> Tensor:
    """Pad the first dimension with zeros to whole panels."""
    num_missing = -len(rows) % PANEL
    if not num_missing:
        return rows
    return torch.cat((rows, rows.new_zeros(num_missing, *rows.shape[1:])))


def pack_float(weight_NI: Tensor) -> PackedWeight:
    """Pack a weight of any floating type, rounded to float32, to `[N / 16, I, 16]`."""
    wide_weight = weight_NI.float()
    bf16_weight = wide_weight.bfloat16()
    fits_bf16 = torch.equal(bf16_weight.float(), wide_weight)
    padded_weight = padded(bf16_weight if fits_bf16 else wide_weight)

    panels = padded_weight.view(-1, PANEL, padded_weight.shape[1])
    elements = panels.transpose(1, 2).contiguous()
    return PackedWeight(BFLOAT16 if fits_bf16 else FLOAT32, elements)


def pack_blocks(weights: Sequence[Tensor], packing: Packing) -> PackedWeight:
    """Pack the outputs of several weights in blocks as one weight."""
    coded_weights = [blocks.coded_weight(weight) for weight in weights]
    if all(weight.has_nibbles for weight in coded_weights):
        nibbles = torch.cat([weight.codes for weight in coded_weights])
        scales = torch.cat([weight.scales for weight in coded_weights])
        minimums = torch.cat([weight.minimums_or_zeros() for weight in coded_weights])
        group_scales = torch.stack((scales, minimums), -1)
        return PackedWeight(INT4, pack_pairs(nibbles, packing), interleave_scales(group_scales))

    int8_codes = pack_bytes(torch.cat([weight.int8_codes() for weight in coded_weights]), packing)
    if all(weight.has_scale_only for weight in coded_weights):
        scales = torch.cat([weight.scales for weight in coded_weights])
        return PackedWeight(INT8, int8_codes, interleave_scales(scales[..., None]))

    subgroup_scales = torch.cat([weight.subgroup_scales() for weight in coded_weights])
    minimums = torch.cat([weight.minimums_or_zeros() for weight in coded_weights])
    group_scales = torch.cat((subgroup_scales, minimums[..., None]), -1)
    return PackedWeight(SUBGROUP_INT8, int8_codes, interleave_scales(group_scales))


def pack_bytes(codes_NI: Tensor, packing: Packing) -> Tensor:
    """Pack codes of 8 bits to `[N / 16, I / unit, 16, unit]`."""
    padded_codes = padded(codes_NI).view(torch.uint8)
    if packing.offset_int8:
        assert packing.offset_int8 == SIGN_BIT, packing
        padded_codes = padded_codes ^ SIGN_BIT  # which adds the offset
    return _interleave(padded_codes, packing.unit_int8)


def pack_pairs(pairs_NGp: Tensor, packing: Packing) -> Tensor:
    """Pack bytes of two nibbles, of a group's first and second subgroup, to `[N / 16, G * 16 / unit, 16, unit]`."""
    return _interleave(padded(pairs_NGp).flatten(1), packing.unit_int4)


def _interleave(bytes_NB: Tensor, unit: int) -> Tensor:
    """Return units of bytes of the sixteen outputs of a panel next to one another."""
    units = bytes_NB.contiguous().view(UNIT_TYPES[unit])  # moved as one number, which is faster
    panels = units.view(-1, PANEL, units.shape[1])
    return panels.transpose(1, 2).contiguous()


def interleave_scales(scales_NGS: Tensor) -> Tensor:
    """Return S numbers of each group as `[N / 16, G, S, 16]`."""
    num_groups, num_scales = scales_NGS.shape[1:]
    panels = padded(scales_NGS).view(-1, PANEL, num_groups, num_scales)
    return panels.permute(0, 2, 3, 1).contiguous()
