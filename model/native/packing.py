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
UNIT_TYPE = torch.int32  # a unit of four bytes of an output, which are moved as one number


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


def pack_blocks(weights: Sequence[Tensor]) -> PackedWeight:
    """Pack the outputs of several weights in blocks as one weight."""
    coded_weights = [blocks.coded_weight(weight) for weight in weights]
    if all(weight.has_nibbles for weight in coded_weights):
        nibbles = torch.cat([weight.codes for weight in coded_weights])
        scales = torch.cat([weight.scales for weight in coded_weights])
        minimums = torch.cat([weight.minimums_or_zeros() for weight in coded_weights])
        group_scales = torch.stack((scales, minimums), -1)
        return PackedWeight(INT4, interleave_units(nibbles.flatten(1)), interleave_scales(group_scales))

    int8_codes = interleave_units(torch.cat([weight.int8_codes() for weight in coded_weights]))
    if all(weight.has_scale_only for weight in coded_weights):
        scales = torch.cat([weight.scales for weight in coded_weights])
        return PackedWeight(INT8, int8_codes, interleave_scales(scales[..., None]))

    subgroup_scales = torch.cat([weight.subgroup_scales() for weight in coded_weights])
    minimums = torch.cat([weight.minimums_or_zeros() for weight in coded_weights])
    group_scales = torch.cat((subgroup_scales, minimums[..., None]), -1)
    return PackedWeight(SUBGROUP_INT8, int8_codes, interleave_scales(group_scales))


def interleave_units(bytes_NB: Tensor) -> Tensor:
    """Return B bytes of each output, codes or pairs of nibbles, in units as `[N / 16, B / 4, 16]`."""
    units = padded(bytes_NB).contiguous().view(UNIT_TYPE)
    panels = units.view(-1, PANEL, units.shape[1])
    return panels.transpose(1, 2).contiguous()


def interleave_scales(scales_NGS: Tensor) -> Tensor:
    """Return S numbers of each group as `[N / 16, G, S, 16]`."""
    num_groups, num_scales = scales_NGS.shape[1:]
    panels = padded(scales_NGS).view(-1, PANEL, num_groups, num_scales)
    return panels.permute(0, 2, 3, 1).contiguous()
