"""The memory of a cache: keys and values of layers with the same window, slot by slot."""
from __future__ import annotations

from typing import NamedTuple, Sequence, Tuple

import torch
from torch import Tensor

from model.attention import to_int8

BLOCK_SLOTS = 256  # that a cache has at first

SlotShape = Tuple[int, int, int, int]  # layers, K, slots, E


class Slots:
    """Keys and values `[layers, K, slots, E]` of the layers that have the same window, from the slot `first` on.

    If `in_8_bits`, they have 8 bits, and scales `[layers, K, slots, 1]`. Recurrent layers have inputs instead, in a
    single tensor: `num_tensors` is 1.
    Memory is allocated for a block of slots, then for half more than needed, up to the capacity.
    """

    def __init__(self, shape: SlotShape, window: int, like: Tensor, in_8_bits: bool = False,
                 num_tensors: int = 2) -> None:
        self.shape, self.window = shape, window
        self.like, self.in_8_bits, self.num_tensors = like, in_8_bits, num_tensors
        self.tensors: list[Tensor] = []  # until the first `clear`
        self.first = 0

    def clear(self) -> None:
        """Free all memory but the first block."""
        num_layers, num_kv_heads, capacity, head_dim = self.shape
        num_slots = min(BLOCK_SLOTS, capacity)
        columns = [(head_dim, torch.int8 if self.in_8_bits else self.like.dtype)] * self.num_tensors
        if self.in_8_bits:
            columns += [(1, torch.float32)] * 2  # scales

        self.tensors = [self.like.new_empty(num_layers, num_kv_heads, num_slots, num_columns, dtype=dtype)
                     for num_columns, dtype in columns]
        self.first = 0

    def write(self, layer_index: int, start: int, *rows_KTE: Tensor) -> None:
        """Store rows of a layer, one for each tensor, from the slot `start` on."""
        new_rows = list(rows_KTE)
        if self.in_8_bits:
            codes, scales = zip(*map(to_int8, new_rows))
            new_rows = [*codes, *scales]

        begin = start - self.first
        for tensor, new in zip(self.tensors, new_rows):
            tensor[layer_index, :, begin:begin + new.shape[1]] = new

    def read(self, layer_index: int, end: int) -> list[Tensor]:
        """Return the tensors `[K, S, *]` of a layer up to the slot `end`."""
        return [x[layer_index, :, :end - self.first] for x in self.tensors]

    def copy(self, source: Slots, length: int) -> None:
        """Copy the first `length` slots of `source`."""
        self.first = 0
        self.reserve(0, length)
        for mine, theirs in zip(self.tensors, source.tensors):
            mine[:, :, :length] = theirs[:, :, :length]

    def move(self, source_S: Tensor, start: int) -> None:
        """Copy these slots to the slots from `start` on."""
        source_S, start = source_S - self.first, start - self.first
        for tensor in self.tensors:
            tensor[:, :, start:start + len(source_S)] = tensor.index_select(2, source_S)

    def reserve(self, settled: int, end: int) -> None:
        """Allocate memory for the slots up to `end`; first drop a block of settled slots that no later row sees.

        The tensors grow one after the other, so that little memory is held twice.
        """
        num_slots = self.tensors[0].shape[2]
        num_passed = settled + 1 - self.window - self.first
        if self.window and num_passed >= BLOCK_SLOTS and end - self.first > num_slots:
            for old_KSE in (layer for tensor in self.tensors for layer in tensor):
                old_KSE[:, :num_slots - num_passed] = old_KSE[:, num_passed:].clone()
            self.first += num_passed

        num_needed = end - self.first
        if num_needed > num_slots:
            new_size = min(self.shape[2], num_needed + num_needed // 2)
            for index, tensor in enumerate(self.tensors):
                self.tensors[index] = _longer(tensor, new_size)


class HeldSlots(NamedTuple):
    """Keys and values `[layers, K, S, E]`, then their scales if they have 8 bits; from the slot `first` on."""

    tensors: Sequence[Tensor]
    first: int = 0


def _longer(old_LKSE: Tensor, num_slots: int) -> Tensor:
    """Return a copy with `num_slots` slots, of which the additional ones are uninitialized."""
    num_layers, num_kv_heads, num_old_slots, num_columns = old_LKSE.shape
    new_LKSE = old_LKSE.new_empty(num_layers, num_kv_heads, num_slots, num_columns)
    new_LKSE[:, :, :num_old_slots] = old_LKSE
    return new_LKSE
