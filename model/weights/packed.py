"""Unfold quantized checkpoints, a tensor at a time: GPTQ, AWQ, compressed-tensors, FP8 and GPT-OSS's MXFP4.

Only weights are unfolded. If such a model also quantizes activations, this is omitted, which makes it more exact.
Shapes: O outputs, I inputs, G groups of inputs that share a scale.
"""
from __future__ import annotations

import math
from functools import partial
from typing import Any, Callable, Mapping, Sequence, Tuple

import torch
from torch import Tensor

from config.schema.fields import COUNT, list_of
from config.schema.untrusted import short_repr
from model.weights.checkpoint import CODES_BY_DTYPE, TensorForm

Conversion = Callable[[Sequence[Tensor]], Tensor]
Unfolding = Tuple[TensorForm, Tuple[str, ...], Conversion]  # a weight's form, the tensors to read, their conversion
QUANT_METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "mxfp4")
LAYOUT_KEYS = {  # by method: the key of the layout of its tensors, and the supported layouts
    "gptq": ("checkpoint_format", ("gptq", "gptq_v2")), "awq": ("version", ("gemm",)),
    "compressed-tensors": ("format", ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized",
                                      "mixed-precision", "dense"))}
GPTQ_BITS = (4, 8)
COMPANIONS = (  # tensors that are read together with a weight, or not at all: scales of activations, keys and values
    ".qzeros", ".scales", ".g_idx", ".weight_scale", ".weight_scale_inv", ".weight_shape", ".weight_zero_point",
    ".weight_g_idx", ".input_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale", ".kv_scale")
MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the codes up to 7; from 8 on they are negative
BLOCK_SHAPE = list_of(COUNT, 2)  # rows and columns
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # places of eight adjacent columns in a word of AWQ


# --- which tensors belong to a weight ---------------------------------------------------------------------------------

def check_method(config: Mapping[str, Any]) -> None:
    """Raise ValueError for a checkpoint with an unsupported quantization."""
    quant_config = config.get("quantization_config")
    if not quant_config:
        return

    method, num_bits = quant_config.get("quant_method"), quant_config.get("bits", 4)
    if method not in QUANT_METHODS:
        raise ValueError(f"config.json says quantization_config with quant_method={short_repr(method)}, which is not "
                         f"supported (only {', '.join(QUANT_METHODS)}); take the model unquantized")
    possible_bits = {"gptq": GPTQ_BITS, "awq": (4,)}.get(method, (num_bits,))
    if num_bits not in possible_bits:
        raise ValueError(f"config.json says {method} with bits={short_repr(num_bits)}, which is not supported (only 4, "
                         "and 8 of gptq); take the model unquantized")
    key_name, supported_layouts = LAYOUT_KEYS.get(method, ("", ()))
    layout = quant_config.get(key_name)
    if layout is not None and str(layout).lower() not in supported_layouts:
        raise ValueError(f"config.json says {method} with {key_name}={short_repr(layout)}, which is not supported "
                         f"(only {', '.join(supported_layouts)}); take the model unquantized")


def unfolding_of(name: str, forms: Mapping[str, TensorForm], config: Mapping[str, Any]) -> Unfolding | None:
    """Return how the tensor `name` is unfolded to a weight, or None if it is not quantized. Raises KeyError if a tensor
    that belongs to it is missing."""
    layer_name, _, ending = name.rpartition(".")
    quant_config = config.get("quantization_config") or {}
    if ending == "qweight":
        is_awq = quant_config.get("quant_method") == "awq"
        is_second = quant_config.get("checkpoint_format") == "gptq_v2"
        return _awq(layer_name, forms) if is_awq else _gptq(layer_name, forms, zero_offset=0 if is_second else 1)
    if ending == "weight_packed":
        return _compressed(layer_name, forms)

    for scale_name in (f"{layer_name}.weight_scale_inv", f"{layer_name}.weight_scale"):
        if ending == "weight" and scale_name in forms:
            block_shape = quant_config.get("weight_block_size") if scale_name.endswith("_inv") else None
            convert = partial(scaled, block_shape=_block_shape(forms, name, scale_name, block_shape))
            return TensorForm(forms[scale_name].dtype, forms[name].shape), (name, scale_name), convert
    return None


def _gptq(layer_name: str, forms: Mapping[str, TensorForm], zero_offset: int) -> Unfolding:
    endings = ("qweight", "qzeros", "scales", "g_idx")
    words_name, zeros_name, scale_name, order_name = (f"{layer_name}.{ending}" for ending in endings)
    num_word_rows, num_outputs = _checked_shape(forms, words_name, None, None)
    _, num_zero_words = _checked_shape(forms, zeros_name, None, None)
    num_bits = num_zero_words * 32 // num_outputs  # the config's number may be that of other layers
    if num_bits not in GPTQ_BITS:
        raise ValueError(f"{words_name} has {num_bits} bits a weight, which is not supported (only 4 and 8 of gptq); "
                         "take the model unquantized")

    codes_per_word = 32 // num_bits
    num_inputs = num_word_rows * codes_per_word
    num_groups, _ = _checked_shape(forms, scale_name, None, num_outputs, dtype=None)
    _checked_shape(forms, zeros_name, num_groups, num_outputs // codes_per_word)
    source_names: tuple[str, ...] = (words_name, zeros_name, scale_name)
    if order_name in forms:
        _checked_shape(forms, order_name, num_inputs)
        source_names = (*source_names, order_name)
    else:
        _check_groups(scale_name, num_groups, num_inputs)

    form = TensorForm(forms[scale_name].dtype, (num_outputs, num_inputs))
    return form, source_names, lambda source_tensors: gptq(source_tensors, num_bits, zero_offset)


def _awq(layer_name: str, forms: Mapping[str, TensorForm]) -> Unfolding:
    source_names = (f"{layer_name}.qweight", f"{layer_name}.qzeros", f"{layer_name}.scales")
    words_name, zeros_name, scale_name = source_names
    num_inputs, num_word_columns = _checked_shape(forms, words_name, None, None)
    num_groups, num_outputs = _checked_shape(forms, scale_name, None, num_word_columns * 8, dtype=None)
    _checked_shape(forms, zeros_name, num_groups, num_word_columns)
    _check_groups(scale_name, num_groups, num_inputs)
    return TensorForm(forms[scale_name].dtype, (num_outputs, num_inputs)), source_names, awq


def _compressed(layer_name: str, forms: Mapping[str, TensorForm]) -> Unfolding:
    endings = ("weight_packed", "weight_scale", "weight_g_idx")
    words_name, scale_name, order_name = (f"{layer_name}.{ending}" for ending in endings)
    if f"{layer_name}.weight_zero_point" in forms:
        raise ValueError(f"{words_name} has zero points in addition to scales, which is not supported; take the model "
                         "unquantized, or one that is quantized symmetrically")

    num_outputs, num_word_columns = _checked_shape(forms, words_name, None, None)
    num_inputs = num_word_columns * 8
    _, num_groups = _checked_shape(forms, scale_name, num_outputs, None, dtype=None)
    _check_groups(scale_name, num_groups, num_inputs)

    source_names: tuple[str, ...] = (words_name, scale_name)
    if order_name in forms:
        _checked_shape(forms, order_name, num_inputs)
        source_names = (*source_names, order_name)
    return TensorForm(forms[scale_name].dtype, (num_outputs, num_inputs)), source_names, words_of_four


def _checked_shape(forms: Mapping[str, TensorForm], name: str, *expected_sizes: int | None,
                   dtype: torch.dtype | None = torch.int32) -> tuple[int, ...]:
    """Return the shape of a tensor. Raises ValueError if it is not the expected one (None: any size), or of another
    `dtype`."""
    form = forms[name]
    has_sizes = len(form.shape) == len(expected_sizes) and all(form.shape)
    differences = (expected not in (None, size) for expected, size in zip(expected_sizes, form.shape))
    if not has_sizes or any(differences) or dtype not in (None, form.dtype):
        raise ValueError(f"{name} has type {CODES_BY_DTYPE[form.dtype]} and shape {form.shape}, which does not fit the "
                         "tensors that belong to it; download the model again")
    return form.shape


def _check_groups(scale_name: str, num_groups: int, num_inputs: int) -> None:
    if num_inputs % num_groups:
        raise ValueError(f"{scale_name} has {num_groups} groups, which do not share {num_inputs} inputs evenly; "
                         "download the model again")


def _block_shape(forms: Mapping[str, TensorForm], name: str, scale_name: str, config_shape: Any) -> Sequence[int]:
    """Return the numbers of rows and columns that share a scale: all, a row, or a block, which the config may give."""
    shape, scale_shape = forms[name].shape, forms[scale_name].shape
    if math.prod(scale_shape) == 1:
        return shape
    if len(scale_shape) == 1:
        _checked_shape(forms, scale_name, shape[0], dtype=None)
        return 1, shape[1]

    _checked_shape(forms, scale_name, None, None, dtype=None)
    usual_shape = [-(-size // num_blocks) for size, num_blocks in zip(shape, scale_shape)]
    block_shape = config_shape or usual_shape
    if not BLOCK_SHAPE.fits(block_shape) or len(block_shape) != 2:
        raise ValueError(f"config.json says weight_block_size={short_repr(block_shape)}, which should be "
                         f"{BLOCK_SHAPE.words}; copy it again from the model")
    block_counts = (-(-size // block_size) for size, block_size in zip(shape, block_shape))
    _checked_shape(forms, scale_name, *block_counts, dtype=None)
    return block_shape


# --- the weights ------------------------------------------------------------------------------------------------------

def _codes(words: Tensor, num_bits: int) -> Tensor:
    """Return the numbers in each word of 32 bits, the lowest bits first, in a new last dimension."""
    shifts = torch.arange(0, 32, num_bits, dtype=torch.int32)
    return (words[..., None] >> shifts) & (2 ** num_bits - 1)


def gptq(source_tensors: Sequence[Tensor], num_bits: int, zero_offset: int) -> Tensor:
    """Unfold weights `[O, I]`: words pack inputs, zero points pack outputs and are stored less `zero_offset`."""
    words, zeros, scales_GO = source_tensors[:3]
    codes_IO = _codes(words, num_bits).transpose(1, 2).flatten(0, 1)
    zeros_GO = _codes(zeros, num_bits).flatten(1) + zero_offset

    group_I = _groups_of_inputs(len(codes_IO), len(scales_GO), source_tensors[3:])
    weights_IO = (codes_IO - zeros_GO[group_I]) * scales_GO.float()[group_I]
    return weights_IO.t().to(scales_GO.dtype)


def _groups_of_inputs(num_inputs: int, num_groups: int, orders: Sequence[Tensor]) -> Tensor:
    """Return the group `[I]` of each input: adjacent ones share it, unless there is an order that is not all -1."""
    if not orders or bool((orders[0] == -1).all()):
        return torch.arange(num_inputs) // (num_inputs // num_groups)

    group_I = orders[0].long()
    if group_I.min() < 0 or group_I.max() >= num_groups:
        raise ValueError(f"a g_idx names groups {int(group_I.min())} to {int(group_I.max())}, but there are "
                         f"{num_groups}, numbered from 0; download the model again")
    return group_I


def awq(source_tensors: Sequence[Tensor]) -> Tensor:
    """Unfold weights `[O, I]`: words pack outputs, in AWQ's order."""
    words, zeros, scales_GO = source_tensors
    word_order = list(AWQ_ORDER)
    codes_IO = _codes(words, 4)[..., word_order].flatten(1)
    zeros_GO = _codes(zeros, 4)[..., word_order].flatten(1)
    group_size = len(codes_IO) // len(scales_GO)
    numbers_IO = codes_IO - zeros_GO.repeat_interleave(group_size, 0)
    weights_IO = numbers_IO * scales_GO.float().repeat_interleave(group_size, 0)
    return weights_IO.t().to(scales_GO.dtype)


def words_of_four(source_tensors: Sequence[Tensor]) -> Tensor:
    """Unfold weights `[O, I]` of compressed-tensors' 4 bits, in which code 8 means 0."""
    words, scales_OG = source_tensors[:2]
    codes_OI = _codes(words, 4).flatten(1) - 8
    group_I = _groups_of_inputs(codes_OI.shape[1], scales_OG.shape[1], source_tensors[2:])
    return (codes_OI * scales_OG.float()[:, group_I]).to(scales_OG.dtype)


def scaled(source_tensors: Sequence[Tensor], block_shape: Sequence[int]) -> Tensor:
    """Unfold weights `[O, I]` of 8 bits with a scale for each block; `block_shape` are its rows and columns."""
    block_rows, block_columns = block_shape
    weights_OI, scales = source_tensors[0].float(), source_tensors[1]
    scales_of_blocks = scales.view(-1, -(-weights_OI.shape[1] // block_columns))
    scales_OG = scales_of_blocks.repeat_interleave(block_rows, 0)[:len(weights_OI)]
    return _by_groups(weights_OI, scales_OG, block_columns)


def _by_groups(weights_OI: Tensor, scales_OG: Tensor, group_size: int) -> Tensor:
    scales_OI = scales_OG.float().repeat_interleave(group_size, 1)[:, :weights_OI.shape[1]]
    return (weights_OI * scales_OI).to(scales_OG.dtype)


def mxfp4(blocks_OBH: Tensor, scales_OB: Tensor) -> Tensor:
    """Unfold weights `[O, I]` in bfloat16 from blocks of 32 codes of 4 bits, two per byte, with a power of 2 each."""
    code_values = torch.tensor([*MXFP4_VALUES, *(-value for value in MXFP4_VALUES)])
    codes_OBHP = torch.stack((blocks_OBH & 15, blocks_OBH >> 4), -1).long()
    weights = code_values[codes_OBHP].flatten(2)
    exponent_OB = scales_OB.int() - 127
    return torch.ldexp(weights, exponent_OB[..., None]).flatten(1).bfloat16()
