"""Weights in the blocks of GGUF files: codes of few bits, with a scale and perhaps a minimum per group.

A block's type follows from its size. Blocks are kept as a file has them; what is read out of them equals llama.cpp's
numbers bit for bit, and so do the blocks to which a weight is quantized. It knows nothing about files or layers.

Shapes: N outputs, I inputs, B blocks of a row, G groups of 32 inputs.
"""
from __future__ import annotations

from typing import Callable, NamedTuple, Sequence

import torch
from torch import Tensor

GROUP = 32  # inputs that share a minimum, and a scale unless each subgroup, a half of them, has one
WEIGHTS_AT_ONCE = 1 << 20  # that are quantized or unfolded, to bound memory


class CodedWeight(NamedTuple):
    """A weight in codes, which are whole numbers: it is code * scale, plus the minimum if there is one.

    Nibbles are bytes `[N, G, 16]`: the code of an input in the low bits, of the input 16 behind it in the high bits.
    """

    codes: Tensor  # int8 `[N, I]`, or nibbles
    scales: Tensor  # float32 `[N, G]`, or `[N, 2 G]` with a scale for each subgroup
    minimums: Tensor | None = None  # float32 `[N, G]`

    @property
    def has_nibbles(self) -> bool:
        """Whether two codes of 4 bits share a byte."""
        return self.codes.dim() == 3

    @property
    def has_subgroups(self) -> bool:
        """Whether each half of a group has a scale of its own."""
        return not self.has_nibbles and self.scales.shape[1] * GROUP > self.codes.shape[1]

    @property
    def has_scale_only(self) -> bool:
        """Whether all that a group has is one scale."""
        return self.minimums is None and not self.has_subgroups

    def subgroup_scales(self) -> Tensor:
        """Return the scales of both subgroups of each group, `[N, G, 2]`."""
        scales = self.scales if self.has_subgroups else self.scales.repeat_interleave(2, 1)
        return scales.unflatten(1, (-1, 2))

    def minimums_or_zeros(self) -> Tensor:
        """Return the minimum of each group, or zeros: `[N, G]`."""
        if self.minimums is not None:
            return self.minimums
        num_outputs, num_inputs = self.codes.shape
        return torch.zeros(num_outputs, num_inputs // GROUP)

    def int8_codes(self) -> Tensor:
        """Return the codes in int8 `[N, I]`."""
        return _signed(_nibbles(self.codes)) if self.has_nibbles else self.codes

    def unfold(self) -> Tensor:
        """Return the weight in float32 `[N, I]`."""
        codes = self.int8_codes()
        num_outputs, num_inputs = codes.shape
        grouped_codes = codes.view(num_outputs, self.scales.shape[1], -1).float()
        scaled_codes = grouped_codes * self.scales[..., None]

        weight = scaled_codes.view(num_outputs, -1, GROUP)
        if self.minimums is not None:
            weight += self.minimums[..., None]
        return weight.view(num_outputs, num_inputs)


class BlockType(NamedTuple):
    """A type of blocks: its name in llama.cpp, its sizes, and how codes are read from bytes `[N, B, num_bytes]`."""

    name: str
    num_bytes: int
    num_weights: int
    read: Callable[[Tensor], CodedWeight]


def block_type(shape: Sequence[int]) -> BlockType | None:
    """Return the type of a stored tensor of bytes with this shape, or None if it does not consist of blocks."""
    return TYPES_BY_BYTES.get(shape[2]) if len(shape) == 3 else None


def plain_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return the shape `[N, I]` of a weight, which may be in blocks."""
    block = block_type(shape)
    return shape[0], shape[1] * (block.num_weights if block else 1)


def coded_weight(blocks: Tensor) -> CodedWeight:
    """Return the weight in blocks `[N, B, bytes]`, in codes."""
    return TYPES_BY_BYTES[blocks.shape[2]].read(blocks)


def unfold(blocks: Tensor) -> Tensor:
    """Return the weight in float32 `[N, I]`, some rows at a time, which bounds the memory."""
    rows_at_once = max(1, WEIGHTS_AT_ONCE // plain_shape(blocks.shape)[1])
    return torch.cat([coded_weight(rows).unfold() for rows in blocks.split(rows_at_once)])


# --- quantizing -------------------------------------------------------------------------------------------------------

def blocks_shape(type_name: str, shape: Sequence[int]) -> tuple[int, int, int]:
    """Return the shape `[N, B, bytes]` of the blocks of a weight `[N, I]`."""
    num_outputs, num_inputs = shape
    return num_outputs, num_inputs // GROUP, TYPES_BY_NAME[type_name].num_bytes


def quantize(type_name: str, weight: Tensor) -> Tensor:
    """Quantize a weight `[N, I]`, of whole groups, to blocks of Q4_1 or Q8_0, bit for bit as llama.cpp does."""
    rows_at_once = max(1, WEIGHTS_AT_ONCE // weight.shape[1])
    quantize_groups = QUANTIZERS[type_name]
    return torch.cat([quantize_groups(rows.float().unflatten(1, (-1, GROUP))) for rows in weight.split(rows_at_once)])


def _to_q4_1(groups: Tensor) -> Tensor:
    minimums, maximums = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scales = (maximums - minimums) / 15
    steps = (groups - minimums) * _inverse(scales)
    codes = (steps + 0.5).to(torch.uint8).clamp(max=15)
    nibbles = codes[..., :GROUP // 2] | codes[..., GROUP // 2:] << 4
    return torch.cat((_float16_bytes(scales), _float16_bytes(minimums), nibbles), -1)


def _to_q8_0(groups: Tensor) -> Tensor:
    scales = groups.abs().amax(-1, keepdim=True) / 127
    steps = groups * _inverse(scales)
    sizes = steps.abs()
    whole_sizes = sizes.floor() + (2 * (sizes - sizes.floor())).floor()  # halves are rounded away from zero
    codes = whole_sizes * steps.sign()
    return torch.cat((_float16_bytes(scales), codes.to(torch.int8).view(torch.uint8)), -1)


def _inverse(scales: Tensor) -> Tensor:
    """Return 1 / scale, and 0 for groups of equal weights, which have the scale 0."""
    return torch.where(scales == 0, scales, 1 / scales)


def _float16_bytes(numbers: Tensor) -> Tensor:
    return numbers.half().view(torch.uint8)


QUANTIZERS: dict[str, Callable[[Tensor], Tensor]] = {"Q4_1": _to_q4_1, "Q8_0": _to_q8_0}  # of groups `[N, G, 32]`


# --- the fields of a block --------------------------------------------------------------------------------------------

def _float16_at(blocks: Tensor, begin: int) -> Tensor:
    """Return the number in float16 that begins at a byte, in float32 `[N, B]`."""
    field = blocks[..., begin:begin + 2].contiguous()
    return field.view(torch.float16).float()[..., 0]


def _nibbles(fields: Tensor) -> Tensor:
    """Return the low four bits of all bytes of each field, then the high ones: `[..., 2 * bytes]`."""
    return torch.cat((fields & 15, fields >> 4), -1)


def _bits(fields: Tensor, shifts: Sequence[int], mask: int) -> Tensor:
    """Return what bytes hold from each of these bits on: `[..., shifts, bytes]`."""
    shifted = [fields >> shift & mask for shift in shifts]
    return torch.stack(shifted, -2)


def _signed(codes: Tensor, offset: int = 0) -> Tensor:
    """Return codes of any shape `[N, ...]` in int8 `[N, I]`, after an offset is subtracted."""
    return (codes.to(torch.int8) - offset).flatten(1)


def _high_bits(blocks: Tensor, begin: int) -> Tensor:
    """Return the fifth bits `[N, B, 32]` of 32 codes, which four bytes hold."""
    field = blocks[..., begin:begin + 4]
    spread_bits = field[..., None] >> torch.arange(8, dtype=torch.uint8) & 1
    return spread_bits.flatten(-2) << 4


# --- blocks of 32 weights ---------------------------------------------------------------------------------------------

def _q4_0(blocks: Tensor) -> CodedWeight:
    scales = _float16_at(blocks, 0)
    return CodedWeight(blocks[..., 2:], scales, -8 * scales)


def _q4_1(blocks: Tensor) -> CodedWeight:
    return CodedWeight(blocks[..., 4:], _float16_at(blocks, 0), _float16_at(blocks, 2))


def _q5_0(blocks: Tensor) -> CodedWeight:
    high_bits = _high_bits(blocks, 2)
    codes = _nibbles(blocks[..., 6:]) | high_bits
    return CodedWeight(_signed(codes, 16), _float16_at(blocks, 0))


def _q5_1(blocks: Tensor) -> CodedWeight:
    codes = _nibbles(blocks[..., 8:]) | _high_bits(blocks, 4)
    return CodedWeight(_signed(codes), _float16_at(blocks, 0), _float16_at(blocks, 2))


def _q8_0(blocks: Tensor) -> CodedWeight:
    signed_bytes = blocks[..., 2:].contiguous().view(torch.int8)
    return CodedWeight(signed_bytes.flatten(1), _float16_at(blocks, 0))


# --- blocks of 256 weights: scales are whole numbers, too -------------------------------------------------------------

def _scales_of_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and minimums `[N, 8 B]` of Q4_K and Q5_K: eight of 6 bits each are packed in 12 bytes."""
    low, middle, high = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat((low & 63, high & 15 | low >> 6 << 4), -1)
    minimums = torch.cat((middle & 63, high >> 4 | middle >> 6 << 4), -1)
    block_scale, block_minimum = (_float16_at(blocks, begin)[..., None] for begin in (0, 2))
    return (block_scale * scales).flatten(1), (-block_minimum * minimums).flatten(1)


def _q4_k(blocks: Tensor) -> CodedWeight:
    first, second = blocks[..., 16:].unflatten(-1, (4, 2, 16)).unbind(-2)  # halves of two groups, in low and high bits
    low_nibbles = first & 15 | second << 4
    high_nibbles = first >> 4 | second & 240
    nibbles = torch.stack((low_nibbles, high_nibbles), -2)
    return CodedWeight(nibbles.view(len(blocks), -1, 16), *_scales_of_k(blocks))


def _q5_k(blocks: Tensor) -> CodedWeight:
    quarters = blocks[..., 48:].unflatten(-1, (4, 32))
    high_bits = _bits(blocks[..., 16:48], range(8), 1) << 4
    codes = _nibbles(quarters).view(high_bits.shape) | high_bits
    return CodedWeight(_signed(codes), *_scales_of_k(blocks))


def _q6_k(blocks: Tensor) -> CodedWeight:
    low_bits = blocks[..., :128].unflatten(-1, (2, 64))  # of each half of the block
    high_bits = blocks[..., 128:192].unflatten(-1, (2, 32))
    high_codes = _bits(high_bits, (0, 2, 4, 6), 3).flatten(-2)
    codes = _nibbles(low_bits) | high_codes << 4

    whole_scales = blocks[..., 192:208].contiguous().view(torch.int8)
    scales = _float16_at(blocks, 208)[..., None] * whole_scales
    return CodedWeight(_signed(codes, 32), scales.flatten(1))


BLOCK_TYPES = (
    BlockType("Q4_0", 18, 32, _q4_0),
    BlockType("Q4_1", 20, 32, _q4_1),
    BlockType("Q5_0", 22, 32, _q5_0),
    BlockType("Q5_1", 24, 32, _q5_1),
    BlockType("Q8_0", 34, 32, _q8_0),
    BlockType("Q4_K", 144, 256, _q4_k),
    BlockType("Q5_K", 176, 256, _q5_k),
    BlockType("Q6_K", 210, 256, _q6_k),
)
TYPES_BY_BYTES = {each.num_bytes: each for each in BLOCK_TYPES}
TYPES_BY_NAME = {each.name: each for each in BLOCK_TYPES}
