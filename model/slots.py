"""The memory of a cache: keys and values of layers with the same window, slot by slot."""
from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from typing import NamedTuple, Sequence, Tuple

import torch
from torch import Tensor

from model.attention import to_codes

BLOCK_SLOTS = 256  # that a cache has at first
LONG_BYTES = 4 << 20  # of a tensor from which on large pages pay

SlotShape = Tuple[int, int, int, int]  # layers, K, slots, E


class Slots:
    """Keys and values `[layers, K, slots, E]` of the layers that have the same window, from the slot `first` on.

    With a `code_type`, they are codes of this type, with scales `[layers, K, slots, 1]`. Recurrent layers have inputs
    instead, in a single tensor: `num_tensors` is 1.
    Memory is allocated for a block of slots, then for half more than needed, up to the capacity.
    """

    def __init__(self, shape: SlotShape, window: int, like: Tensor, code_type: torch.dtype | None = None,
                 num_tensors: int = 2) -> None:
        self.shape, self.window = shape, window
        self.like, self.code_type, self.num_tensors = like, code_type, num_tensors
        self.tensors: list[Tensor] = []  # until the first `clear`
        self.first = 0

    def clear(self) -> None:
        """Free all memory but the first block."""
        num_layers, num_kv_heads, capacity, head_dim = self.shape
        num_slots = min(BLOCK_SLOTS, capacity)
        shape = num_layers, num_kv_heads, num_slots, head_dim
        self.tensors = new_slots(shape, self.like, self.code_type, self.num_tensors)
        self.first = 0

    def write(self, layer_index: int, start: int, *rows_KTE: Tensor) -> None:
        """Store rows of a layer, one for each tensor, from the slot `start` on."""
        begin = start - self.first
        for tensor, new in zip(self.tensors, as_stored(rows_KTE, self.code_type)):
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
    """Keys and values `[layers, K, S, E]`, then their scales if they are codes; from the slot `first` on."""

    tensors: Sequence[Tensor]
    first: int = 0


def new_slots(shape: SlotShape, like: Tensor, code_type: torch.dtype | None, num_tensors: int = 2) -> list[Tensor]:
    """Return memory for keys and values, and for their scales if they are codes."""
    rows = [like.new_empty(shape, dtype=code_type or like.dtype) for _ in range(num_tensors)]
    if code_type is None:
        return rows
    return [*rows, *(like.new_empty(*shape[:3], 1, dtype=torch.float32) for _ in rows)]


def as_stored(rows_KTE: Sequence[Tensor], code_type: torch.dtype | None) -> Sequence[Tensor]:
    """Return keys and values, or their codes and the scales of these."""
    if code_type is None:
        return rows_KTE
    codes, scales = zip(*(to_codes(x_KTE, code_type) for x_KTE in rows_KTE))
    return [*codes, *scales]


def _longer(old_LKSE: Tensor, num_slots: int) -> Tensor:
    """Return a copy with `num_slots` slots, of which the additional ones are uninitialized."""
    num_layers, num_kv_heads, num_old_slots, num_columns = old_LKSE.shape
    new_LKSE = old_LKSE.new_empty(num_layers, num_kv_heads, num_slots, num_columns)
    _ask_for_large_pages(new_LKSE)
    new_LKSE[:, :, :num_old_slots] = old_LKSE
    return new_LKSE


def _ask_for_large_pages(x: Tensor) -> None:
    """Ask the system to hold a long tensor of host memory in large pages, whose addresses are looked up less often."""
    begin, num_bytes = x.data_ptr(), x.numel() * x.element_size()
    if x.device.type == "cpu" and num_bytes >= LONG_BYTES:
        first_page = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        with suppress(OSError, AttributeError):  # another system
            size = ctypes.c_size_t(begin + num_bytes - first_page)
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first_page), size, mmap.MADV_HUGEPAGE)
