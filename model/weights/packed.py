"""Quantized checkpoints of others, unfolded a tensor at a time: GPTQ, AWQ, compressed-tensors, FP8 and GPT-OSS's MXFP4.

Only weights are unfolded: what such a model does to activations, if anything, is left out, which makes it more exact.
Shapes: O outputs, I inputs, G groups of inputs that share a scale.
"""
from __future__ import annotations

from typing import Any, Callable, Mapping, Sequence, Tuple

import torch
from torch import Tensor

from config.schema.untrusted import shown
from model.weights.checkpoint import Form

Make = Callable[[Sequence[Tensor]], Tensor]
Unfolding = Tuple[Form, Tuple[str, ...], Make]  # the form of a weight, what is read for it, and how it is made
METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "mxfp4")
BESIDE = (".qzeros", ".scales", ".g_idx", ".weight_scale", ".weight_scale_inv", ".weight_shape", ".input_scale",
          ".weight_zero_point")  # what is read beside a weight, or not at all
FOUR_BITS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # what MXFP4's codes mean; those from 8 on are negative
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where AWQ puts eight neighbouring columns in a word


def check_method(config: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that is quantized in a way that is not known here."""
    said = config.get("quantization_config")
    if not said:
        return
    method, bits = said.get("quant_method"), said.get("bits", 4)
    if method not in METHODS:
        raise ValueError(f"config.json says quantization_config with quant_method={shown(method)}, which is not "
                         f"supported (only {', '.join(METHODS)}); take the model unquantized")
    possible = {"gptq": (4, 8), "awq": (4,)}.get(method, (bits,))
    if bits not in possible:
        raise ValueError(f"config.json says {method} with bits={shown(bits)}, which is not supported (only 4, and 8 of "
                         "gptq); take the model unquantized")
    if method == "awq" and said.get("version", "gemm") != "gemm":
        raise ValueError(f"config.json says awq with version={shown(said['version'])}, which is not supported (only "
                         "'gemm'); take the model unquantized")


def packed(name: str, forms: Mapping[str, Form], config: Mapping[str, Any]) -> Unfolding | None:
    """The form of the weight that the tensor `name` is unfolded to, what is read for it, and how; None for a tensor
    that is as it should be. KeyError if what has to stand beside it is missing."""
    base, _, own = name.rpartition(".")
    said = config.get("quantization_config") or {}
    if own == "qweight":
        theirs: tuple[str, ...] = (name, f"{base}.qzeros", f"{base}.scales")
        scales = forms[theirs[2]]
        shape = forms[name].shape
        if said.get("quant_method") == "awq":
            return Form(scales.dtype, (scales.shape[1], shape[0])), theirs, awq
        bits = said.get("bits", 4)
        if f"{base}.g_idx" in forms:
            theirs = (*theirs, f"{base}.g_idx")
        offset = 0 if said.get("checkpoint_format") == "gptq_v2" else 1
        form = Form(scales.dtype, (shape[1], shape[0] * 32 // bits))
        return form, theirs, lambda read: gptq(read, bits, offset)
    if own == "weight_packed":
        scale = forms[f"{base}.weight_scale"]
        if f"{base}.weight_zero_point" in forms:
            raise ValueError(f"{name} has zero points beside its scales, which is not supported; take the model "
                             "unquantized, or one that is quantized symmetrically")
        outputs, words = forms[name].shape
        return Form(scale.dtype, (outputs, words * 8)), (name, f"{base}.weight_scale"), words_of_four
    for beside in (f"{base}.weight_scale_inv", f"{base}.weight_scale"):
        if own == "weight" and beside in forms:
            dtype = forms[beside].dtype
            return Form(dtype, forms[name].shape), (name, beside), scaled
    return None


def _codes(words: Tensor, bits: int) -> Tensor:
    """The whole numbers that each word of 32 bits holds, the lowest bits first, in a new last dimension."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (words[..., None] >> shifts) & (2 ** bits - 1)


def gptq(read: Sequence[Tensor], bits: int, offset: int) -> Tensor:
    """Weights `[O, I]`: words go down the inputs, zeros along the outputs; older files hold zeros less one."""
    words, zeros, scales_GO = read[:3]
    codes_IO = _codes(words, bits).transpose(1, 2).flatten(0, 1)
    zeros_GO = _codes(zeros, bits).flatten(1) + offset
    inputs, groups = len(codes_IO), len(scales_GO)
    usual = torch.arange(inputs) // (inputs // groups)
    group_I = read[3].long() if len(read) > 3 else usual
    weights_IO = (codes_IO - zeros_GO[group_I]) * scales_GO.float()[group_I]
    return weights_IO.t().to(scales_GO.dtype)


def awq(read: Sequence[Tensor]) -> Tensor:
    """Weights `[O, I]`: words go along the outputs, in an order of their own."""
    words, zeros, scales_GO = read
    order = list(AWQ_ORDER)
    codes_IO = _codes(words, 4)[..., order].flatten(1)
    zeros_GO = _codes(zeros, 4)[..., order].flatten(1)
    repeats = len(codes_IO) // len(scales_GO)
    off_IO = codes_IO - zeros_GO.repeat_interleave(repeats, 0)
    weights_IO = off_IO * scales_GO.float().repeat_interleave(repeats, 0)
    return weights_IO.t().to(scales_GO.dtype)


def words_of_four(read: Sequence[Tensor]) -> Tensor:
    """Weights `[O, I]` of compressed-tensors' 4 bits, of which 8 means 0."""
    words, scales_OG = read
    codes_OI = _codes(words, 4).flatten(1) - 8
    return _by_groups(codes_OI, scales_OG)


def scaled(read: Sequence[Tensor]) -> Tensor:
    """Weights `[O, I]` of 8 bits with a scale for all of them, each row, each group of a row or each square block."""
    weights_OI, scale = read[0].float(), read[1]
    if scale.numel() == 1:
        return (weights_OI * scale.float()).to(scale.dtype)
    rows = scale.view(len(scale), -1)
    height = -(-len(weights_OI) // len(rows))
    tall = rows.repeat_interleave(height, 0)[:len(weights_OI)]
    return _by_groups(weights_OI, tall)


def _by_groups(weights_OI: Tensor, scales_OG: Tensor) -> Tensor:
    width = -(-weights_OI.shape[1] // scales_OG.shape[1])
    wide = scales_OG.float().repeat_interleave(width, 1)[:, :weights_OI.shape[1]]
    return (weights_OI * wide).to(scales_OG.dtype)


def mxfp4(blocks_OBH: Tensor, scales_OB: Tensor) -> Tensor:
    """Weights `[O, I]` in bfloat16 out of blocks of 32 codes of 4 bits, two in a byte, and a power of 2 for each."""
    values = torch.tensor([*FOUR_BITS, *(-value for value in FOUR_BITS)])
    codes_OBHP = torch.stack((blocks_OBH & 15, blocks_OBH >> 4), -1).long()
    weights = values[codes_OBHP].flatten(2)
    power = scales_OB.int() - 127
    return torch.ldexp(weights, power[..., None]).flatten(1).bfloat16()
