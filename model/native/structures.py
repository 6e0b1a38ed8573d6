"""The structures of `slice.c` as Python passes them, packed weights, and the life of a slice in C.

It knows nothing about what a slice computes. Structures have the addresses of tensors, which must live as long.
`tests/test_native.py` compares the offsets of all fields with the C compiler's.
"""
from __future__ import annotations

import ctypes
import weakref
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p
from typing import Any, Sequence

import torch
from torch import Tensor, nn

from model.cache import AdmittedRows
from model.native.packing import PackedWeight, pack_blocks, pack_float
from model.plain_layers import RMSNorm
from model.weights.blocks import QUANTIZERS, block_type, plain_shape, unfold
from model.weights.quant import BLOCKS

KINDS = ("none", BLOCKS, *QUANTIZERS)  # of weights
WIDEST_FLOAT32 = 2048  # numbers of a row; beyond, torch is up to 11 % faster for 16 rows and more, as measured
DONE, GIVEN_UP, NO_MEMORY = range(3)  # results of a call
StillNeeded = ctypes.CFUNCTYPE(c_int32)


def reason_against_numbers(dtype: torch.dtype, device: torch.device, kind: str, width: int) -> str:
    """Return why torch must compute products of rows of this width in these numbers; empty if native kernels can."""
    if device.type != "cpu" or dtype != torch.float32:
        return "the native kernels compute in float32 on a CPU"
    if kind == "none" and width > WIDEST_FLOAT32:
        return f"torch is faster in float32 for rows of more than {WIDEST_FLOAT32} numbers"
    return "" if kind in KINDS else f"the native kernels have no {kind}"


def _fields(names: str, kind: Any = c_int64) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class CWeight(Structure):
    _fields_ = (
        _fields("form num_outputs num_inputs") +
        _fields("elements scales bias", c_void_p))


class CSlots(Structure):
    _fields_ = (
        _fields("keys values key_scales value_scales", c_void_p) +
        _fields("num_layers first_slot num_slots element_bytes"))


class CLayer(Structure):
    _fields_ = (
        _fields("attention_norm mlp_norm q_norm k_norm", c_void_p) +
        _fields("qkv o gate_up down", CWeight) +
        _fields("window rotates slots_index layer_in_slots") +
        _fields("after_attention_norm after_mlp_norm", c_void_p) +
        _fields("is_local"))


class CModel(Structure):
    _fields_ = (
        _fields("hidden_size num_heads num_kv_heads head_dim rotated_dim intermediate_size num_layers") +
        _fields("norm_eps score_scale", c_float) +
        _fields("layers", POINTER(CLayer)) +
        _fields("final_norm pool", c_void_p) +
        _fields("uses_gelu") +
        _fields("residual_scale score_cap", c_float))


class CRequest(Structure):
    _fields_ = (
        _fields("num_rows num_settled num_tail mask_stride") +
        _fields("tail_mask", c_void_p) +
        _fields("slots", POINTER(CSlots)) +
        _fields("num_windows"))


class CSegment(Structure):
    _fields_ = (
        _fields("num_rows num_requests") +
        _fields("x cos sin", c_void_p) +
        _fields("requests", POINTER(CRequest)) +
        _fields("layer_inputs", POINTER(c_void_p)) +
        _fields("still_needed", StillNeeded) +
        _fields("local_cos local_sin", c_void_p))


class CDeltaRows(Structure):
    _fields_ = (
        _fields("num_rows num_heads key_dim value_dim") +
        _fields("queries keys values decays rates state out", c_void_p))


def request_of(admitted: AdmittedRows) -> CRequest:
    """Return the structure of a request's rows; the memory behind `admitted` must live as long."""
    slots = (CSlots * len(admitted.slots))()
    for structure, window_slots in zip(slots, admitted.slots):
        keys_LKSE = window_slots.tensors[0]
        structure.keys, structure.values, *scales = (x.data_ptr() for x in window_slots.tensors)
        structure.key_scales, structure.value_scales = scales or (None, None)
        structure.num_layers, _, structure.num_slots, _ = keys_LKSE.shape
        structure.first_slot, structure.element_bytes = window_slots.first, keys_LKSE.element_size()

    num_rows, num_tail = admitted.sees.shape
    mask_stride = admitted.sees.strides[0]
    return CRequest(
        num_rows, admitted.settled, num_tail, mask_stride,
        tail_mask=admitted.sees.ctypes.data, slots=slots, num_windows=len(slots))


# --- weights ----------------------------------------------------------------------------------------------------------

class Weights:
    """The structures of packed weights, and the tensors behind them, which must live as long."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def address(self, tensor: Tensor | None) -> int | None:
        """Return the address of a tensor, which is kept; None for none."""
        if tensor is None:
            return None
        self.tensors.append(tensor.detach().contiguous())
        return self.tensors[-1].data_ptr()

    def norm_address(self, norm: nn.Module) -> int | None:
        """Return the address of a norm's weight; None if there is no norm."""
        if not isinstance(norm, RMSNorm):
            return None
        return self.address(1 + norm.weight if norm.norm_weight_plus_one else norm.weight)

    def linear_weight(self, *linears: Any) -> CWeight:
        """Pack linear layers that read the same inputs, and whose weights may be in blocks, as one weight."""
        weights: list[Tensor] = [linear.weight for linear in linears]
        packed_weight = self._pack(weights)
        bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears]).float()

        _, num_inputs = plain_shape(weights[0].shape)
        addresses = map(self.address, (packed_weight.elements, packed_weight.scales, bias))
        return CWeight(packed_weight.form, sum(map(len, weights)), num_inputs, *addresses)

    def _pack(self, weights: Sequence[Tensor]) -> PackedWeight:
        if all(block_type(weight.shape) for weight in weights):
            return pack_blocks(weights)
        plain_weights = [unfold(weight) if block_type(weight.shape) else weight for weight in weights]
        return pack_float(torch.cat(plain_weights))


# --- a slice in C -----------------------------------------------------------------------------------------------------

def start(owner: object, library: ctypes.CDLL, model: CModel, num_threads: int) -> c_void_p:
    """Return a slice with its threads, which end with `owner`."""
    library.slice_new.restype = c_void_p
    handle = library.slice_new(byref(model), c_int64(num_threads))
    if not handle:
        raise MemoryError(f"{num_threads} threads cannot be started: give threads_per_rank a smaller value")
    weakref.finalize(owner, library.slice_free, c_void_p(handle))
    return c_void_p(handle)


def check_result(result: int) -> None:
    """Raise the error of a call, if there is one."""
    if result == NO_MEMORY:
        raise MemoryError("the native kernels got no memory: give max_length or prefill_chunk a smaller value")
    if result not in (DONE, GIVEN_UP):
        raise IndexError("the rows do not fit their caches")
