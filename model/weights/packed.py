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

Make = Callable[[Sequence[Tensor]], Tensor]
Unfolding = Tuple[TensorForm, Tuple[str, ...], Make]  # the form of a weight, the tensors to read, and their conversion
METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "mxfp4")
COMPANIONS = (".qzeros", ".scales", ".g_idx", ".weight_scale", ".weight_scale_inv", ".weight_shape", ".input_scale",
              ".weight_zero_point")  # tensors that are read together with a weight, or not at all
FOUR_BITS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # values of MXFP4's codes; from 8 on they are negative
BLOCK = list_of(COUNT, 2)  # rows and columns of a block
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # places of eight adjacent columns in a word of AWQ


def check_method(config: Mapping[str, Any]) -> None:
    """Raise ValueError for a checkpoint with an unsupported quantization."""
    said = config.get("quantization_config")
    if not said:
        return
    method, bits = said.get("quant_method"), said.get("bits", 4)
    if method not in METHODS:
        raise ValueError(f"config.json says quantization_config with quant_method={short_repr(method)}, which is not "
                         f"supported (only {', '.join(METHODS)}); take the model unquantized")
    possible = {"gptq": (4, 8), "awq": (4,)}.get(method, (bits,))
    if bits not in possible:
        raise ValueError(f"config.json says {method} with bits={short_repr(bits)}, which is not supported (only 4, and "
                         "8 of gptq); take the model unquantized")
    if method == "awq" and said.get("version", "gemm") != "gemm":
        raise ValueError(f"config.json says awq with version={short_repr(said['version'])}, which is not supported "
                         "(only 'gemm'); take the model unquantized")


def packed(name: str, forms: Mapping[str, TensorForm], config: Mapping[str, Any]) -> Unfolding | None:
    """Return how the tensor `name` is unfolded to a weight, or None if it is not quantized. Raises KeyError if a tensor
    that belongs to it is missing."""
    base, _, own = name.rpartition(".")
    said = config.get("quantization_config") or {}
    if own == "qweight":
        return _awq(base, forms) if said.get("quant_method") == "awq" else _gptq(base, forms, said)
    if own == "weight_packed":
        return _compressed(base, forms)
    for scale in (f"{base}.weight_scale_inv", f"{base}.weight_scale"):
        if own == "weight" and scale in forms:
            blocks = said.get("weight_block_size") if scale.endswith("_inv") else None
            make = partial(scaled, sizes=_sizes(forms, name, scale, blocks))
            return TensorForm(forms[scale].dtype, forms[name].shape), (name, scale), make
    return None


def _gptq(base: str, forms: Mapping[str, TensorForm], said: Mapping[str, Any]) -> Unfolding:
    words, zeros, scale, order = (f"{base}.{end}" for end in ("qweight", "qzeros", "scales", "g_idx"))
    bits = said.get("bits", 4)
    in_word = 32 // bits
    tall, outputs = _shape(forms, words, None, None)
    groups, _ = _shape(forms, scale, None, outputs, dtype=None)
    _shape(forms, zeros, groups, outputs // in_word)
    theirs: tuple[str, ...] = (words, zeros, scale)
    if order in forms:
        _shape(forms, order, tall * in_word)
        theirs = (*theirs, order)
    else:
        _check_groups(scale, groups, tall * in_word)
    offset = 0 if said.get("checkpoint_format") == "gptq_v2" else 1
    form = TensorForm(forms[scale].dtype, (outputs, tall * in_word))
    return form, theirs, lambda read: gptq(read, bits, offset)


def _awq(base: str, forms: Mapping[str, TensorForm]) -> Unfolding:
    words, zeros, scale = theirs = (f"{base}.qweight", f"{base}.qzeros", f"{base}.scales")
    inputs, wide = _shape(forms, words, None, None)
    groups, outputs = _shape(forms, scale, None, wide * 8, dtype=None)
    _shape(forms, zeros, groups, wide)
    _check_groups(scale, groups, inputs)
    return TensorForm(forms[scale].dtype, (outputs, inputs)), theirs, awq


def _compressed(base: str, forms: Mapping[str, TensorForm]) -> Unfolding:
    words, scale = theirs = (f"{base}.weight_packed", f"{base}.weight_scale")
    if f"{base}.weight_zero_point" in forms:
        raise ValueError(f"{words} has zero points in addition to scales, which is not supported; take the model "
                         "unquantized, or one that is quantized symmetrically")
    outputs, wide = _shape(forms, words, None, None)
    _, groups = _shape(forms, scale, outputs, None, dtype=None)
    _check_groups(scale, groups, wide * 8)
    return TensorForm(forms[scale].dtype, (outputs, wide * 8)), theirs, words_of_four


def _shape(forms: Mapping[str, TensorForm], name: str, *wanted: int | None,
           dtype: torch.dtype | None = torch.int32) -> tuple[int, ...]:
    """Return the shape of a tensor. Raises ValueError if it is not `wanted` (None: any size), or of another `dtype`."""
    found = forms[name]
    fits = len(found.shape) == len(wanted) and all(found.shape)
    differs = (size not in (None, own) for size, own in zip(wanted, found.shape))
    if not fits or any(differs) or dtype not in (None, found.dtype):
        raise ValueError(f"{name} has type {CODES_BY_DTYPE[found.dtype]} and shape {found.shape}, which does not fit "
                         "the tensors that belong to it; download the model again")
    return found.shape


def _check_groups(scale: str, groups: int, inputs: int) -> None:
    if inputs % groups:
        raise ValueError(f"{scale} has {groups} groups, which do not share {inputs} inputs evenly; download the model "
                         "again")


def _sizes(forms: Mapping[str, TensorForm], name: str, scale: str, given: Any) -> Sequence[int]:
    """Return the numbers of rows and columns that share a scale: all, a row, or a block, which may be `given`."""
    whole, shape = forms[name].shape, forms[scale].shape
    if math.prod(shape) == 1:
        return whole
    if len(shape) == 1:
        _shape(forms, scale, whole[0], dtype=None)
        return 1, whole[1]
    _shape(forms, scale, None, None, dtype=None)
    sizes = given or [-(-size // blocks) for size, blocks in zip(whole, shape)]
    if not BLOCK.fits(sizes) or len(sizes) != 2:
        raise ValueError(f"config.json says weight_block_size={short_repr(sizes)}, which should be {BLOCK.words}; copy "
                         "it again from the model")
    fitting = (-(-size // block) for size, block in zip(whole, sizes))
    _shape(forms, scale, *fitting, dtype=None)
    return sizes


def _codes(words: Tensor, bits: int) -> Tensor:
    """Return the numbers in each word of 32 bits, the lowest bits first, in a new last dimension."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (words[..., None] >> shifts) & (2 ** bits - 1)


def gptq(read: Sequence[Tensor], bits: int, offset: int) -> Tensor:
    """Unfold weights `[O, I]`: words pack inputs, zero points pack outputs and are stored less `offset`."""
    words, zeros, scales_GO = read[:3]
    codes_IO = _codes(words, bits).transpose(1, 2).flatten(0, 1)
    zeros_GO = _codes(zeros, bits).flatten(1) + offset
    inputs, groups = len(codes_IO), len(scales_GO)
    usual = torch.arange(inputs) // (inputs // groups)
    group_I = read[3].long() if len(read) > 3 else usual
    if group_I.min() < 0 or group_I.max() >= groups:
        raise ValueError(f"a g_idx names groups {int(group_I.min())} to {int(group_I.max())}, but there are {groups}, "
                         "numbered from 0; download the model again")
    weights_IO = (codes_IO - zeros_GO[group_I]) * scales_GO.float()[group_I]
    return weights_IO.t().to(scales_GO.dtype)


def awq(read: Sequence[Tensor]) -> Tensor:
    """Unfold weights `[O, I]`: words pack outputs, in AWQ's order."""
    words, zeros, scales_GO = read
    order = list(AWQ_ORDER)
    codes_IO = _codes(words, 4)[..., order].flatten(1)
    zeros_GO = _codes(zeros, 4)[..., order].flatten(1)
    repeats = len(codes_IO) // len(scales_GO)
    off_IO = codes_IO - zeros_GO.repeat_interleave(repeats, 0)
    weights_IO = off_IO * scales_GO.float().repeat_interleave(repeats, 0)
    return weights_IO.t().to(scales_GO.dtype)


def words_of_four(read: Sequence[Tensor]) -> Tensor:
    """Unfold weights `[O, I]` of compressed-tensors' 4 bits, in which code 8 means 0."""
    words, scales_OG = read
    codes_OI = _codes(words, 4).flatten(1) - 8
    return _by_groups(codes_OI, scales_OG, codes_OI.shape[1] // scales_OG.shape[1])


def scaled(read: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Unfold weights `[O, I]` of 8 bits with a scale for each block; `sizes` are its rows and columns."""
    weights_OI, scale = read[0].float(), read[1]
    rows = scale.view(-1, -(-weights_OI.shape[1] // sizes[1]))
    tall = rows.repeat_interleave(sizes[0], 0)[:len(weights_OI)]
    return _by_groups(weights_OI, tall, sizes[1])


def _by_groups(weights_OI: Tensor, scales_OG: Tensor, width: int) -> Tensor:
    wide = scales_OG.float().repeat_interleave(width, 1)[:, :weights_OI.shape[1]]
    return (weights_OI * wide).to(scales_OG.dtype)


def mxfp4(blocks_OBH: Tensor, scales_OB: Tensor) -> Tensor:
    """Unfold weights `[O, I]` in bfloat16 from blocks of 32 codes of 4 bits, two per byte, with a power of 2 each."""
    values = torch.tensor([*FOUR_BITS, *(-value for value in FOUR_BITS)])
    codes_OBHP = torch.stack((blocks_OBH & 15, blocks_OBH >> 4), -1).long()
    weights = values[codes_OBHP].flatten(2)
    power = scales_OB.int() - 127
    return torch.ldexp(weights, power[..., None]).flatten(1).bfloat16()
