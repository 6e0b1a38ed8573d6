"""Weights in 4 bits by groups of 32, with a scale and an offset per group, and torch's own kernels for them.

It knows nothing about layers, and needs no other library. A weight is (code - 8) * scale + offset. Kernels differ by
device; each is tried once, with a single row and in batches, and is not used if its result is incorrect.

Shapes: T rows, N outputs, K inputs, padded to whole groups, G groups of them.
"""
from __future__ import annotations

import platform
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from config.schema.untrusted import reason

GROUP = 32
LEVELS = 15  # steps from the least to the largest weight of a group
SMALLEST = 1e-20  # scale of a group of equal weights
STEP_COUNTS = (3, 2, 1)  # to try for the smallest nonzero weight; the last one that fits is used
MULTIPLE_TOLERANCE = 0.1  # in steps, for rounded weights
CHECKED_FIRST = 8  # weights of a group
UNITS = (1, 2, 4, 8, 16, 32)  # multiples of rows that kernels may need
TRIAL_SHAPE = (256, 1024)  # outputs and inputs of the trial: multiples that suit every kernel
TRIAL_ROWS = (*range(1, 18), 31, 33, 64, 65)  # of the trial's batches
CLOSE = 0.03  # of the trial's result, relative: ARM's kernel rounds a row to 8 bits
ops = torch.ops.aten


def groups(inputs: int) -> int:
    return -(-inputs // GROUP)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a weight `[N, inputs]` to pairs of codes `[N, K / 2]`, the first in the high bits, and `[G, N, 2]`
    scales and offsets in bfloat16. The last group is padded with zeros. Weights that came from 4 bits keep their codes.
    """
    # groups, and those that are multiples of a step
    num_outputs, num_inputs = weight.shape
    padded_weight = F.pad(weight.float(), (0, groups(num_inputs) * GROUP - num_inputs))
    group_NGg = padded_weight.view(num_outputs, -1, GROUP)
    low_NG, high_NG = group_NGg.amin(-1), group_NGg.amax(-1)
    step_NG = _steps(group_NGg, high_NG - low_NG)

    # scales and offsets
    usual_scale = ((high_NG - low_NG) / LEVELS).clamp(min=SMALLEST)
    scale = torch.where(step_NG > 0, step_NG, usual_scale).bfloat16()
    is_around_0 = (low_NG > -8.5 * step_NG) & (high_NG < 7.5 * step_NG)
    low_NG = torch.where(step_NG > 0, (low_NG / step_NG).round() * scale, low_NG)
    offset = torch.where(is_around_0, 0, low_NG + 8 * scale.float()).bfloat16()

    # codes
    steps_NGg = (group_NGg - offset.float()[..., None]) / scale.float()[..., None]
    rounded_codes = (steps_NGg.round() + 8).clamp(0, LEVELS)
    codes_NK = rounded_codes.to(torch.uint8).view(num_outputs, -1)
    pairs = codes_NK[:, ::2] << 4 | codes_NK[:, 1::2]
    scale_and_offset_NG2 = torch.stack((scale, offset), -1)
    return pairs, scale_and_offset_NG2.transpose(0, 1).contiguous()


def _steps(group_NGg: Tensor, range_NG: Tensor) -> Tensor:
    """Return the steps `[N, G]` of groups of small multiples of one step, as from 4 bits; 0 for all other groups."""
    size_NGg = group_NGg.abs()
    smallest_NG = size_NGg.masked_fill_(size_NGg == 0, torch.inf).amin(-1)
    best_step = torch.zeros_like(smallest_NG)

    for num_steps in STEP_COUNTS:
        step = smallest_NG / num_steps
        may_fit = (range_NG < (LEVELS + 0.5) * step) & step.isfinite()
        may_fit &= _are_multiples(group_NGg[..., :CHECKED_FIRST], step)  # excludes most other groups at little cost
        does_fit = may_fit.clone()
        does_fit[may_fit] = _are_multiples(group_NGg[may_fit], step[may_fit])
        best_step = torch.where(does_fit, step, best_step)
    return best_step


def _are_multiples(group_NGg: Tensor, step: Tensor) -> Tensor:
    num_steps = group_NGg / step[..., None]
    return ((num_steps - num_steps.round()).abs() < MULTIPLE_TOLERANCE).all(-1)


def codes(pairs: Tensor) -> Tensor:
    """Return the codes `[N, K]` of pairs."""
    return torch.stack((pairs >> 4, pairs & 15), -1).flatten(1)


def unfold(pairs: Tensor, scale_GN2: Tensor, inputs: int, dtype: torch.dtype) -> Tensor:
    """Return the dequantized weights `[N, inputs]`."""
    scale, offset = scale_GN2.to(dtype).transpose(0, 1).unbind(-1)
    steps = codes(pairs).to(dtype) - 8
    steps_NGg = steps.view(len(pairs), -1, GROUP)
    weight_NGg = torch.addcmul(offset[..., None], steps_NGg, scale[..., None])
    return weight_NGg.flatten(1)[:, :inputs]


@dataclass(frozen=True)
class Kernel:
    """A device's product: `pack` converts pairs and scales to the arguments of `multiply`, with rows in `dtype`.

    A weight's inputs and outputs must be multiples of `inputs` and `outputs`; rows are padded to multiples of `unit`.
    Packed weights with multiples of `block` outputs can be concatenated; with 0, none can. If there is no kernel, `why`
    is the reason, and weights are unfolded for every product.
    """

    dtype: torch.dtype
    inputs: int
    outputs: int
    pack: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    multiply: Callable[..., Tensor]
    unit: int = 1
    block: int = 0
    why: str = ""

    def __call__(self, x_TK: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product `[T, N]` in the type of the rows."""
        if self.why:
            return F.linear(x_TK, unfold(weight, scale, x_TK.shape[1], x_TK.dtype), bias)
        x = x_TK.to(self.dtype).contiguous()
        if len(x) % self.unit:
            x = F.pad(x, (0, 0, 0, -len(x) % self.unit))
        out = self.multiply(x, weight, scale)[:len(x_TK)].to(x_TK.dtype)
        return out if bias is None else out + bias


# --- the kernels ------------------------------------------------------------------------------------------------------

def _x86() -> Kernel:
    """Return torch's kernel for x86, from torch 2.5 on; bfloat16 has one for AVX2 and AVX-512, other types are slow."""
    def pack(pairs: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return ops._convert_weight_to_int4pack_for_cpu(codes(pairs).int(), 1), scale

    def multiply(x_TK: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
        # it assumes contiguous scales, which those of a fused weight's parts are not
        return ops._weight_int4pack_mm_for_cpu(x_TK, packed, GROUP, scale.contiguous())  # type: ignore[no-any-return]

    return Kernel(torch.bfloat16, GROUP, 16, pack, multiply, block=64)  # for AVX-512; AVX2 needs only 32


def _arm() -> Kernel:
    """Return KleidiAI's kernel, from torch 2.7 on. It has no offsets: these are multiplied with the sums of groups."""
    def pack(pairs: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        low_bits_first = pairs << 4 | pairs >> 4
        num_outputs, num_inputs = len(pairs), 2 * pairs.shape[1]
        scale_NG = scale[..., 0].t().contiguous()
        packed = ops._dyn_quant_pack_4bit_weight(low_bits_first, scale_NG, None, GROUP, num_inputs, num_outputs)
        return packed, scale[..., 1].float().contiguous()

    def multiply(x_TK: Tensor, packed: Tensor, offset_GN: Tensor) -> Tensor:
        num_inputs, num_outputs = x_TK.shape[1], offset_GN.shape[1]
        group_sum_TG = x_TK.view(len(x_TK), -1, GROUP).sum(-1)
        without_offsets = ops._dyn_quant_matmul_4bit(x_TK, packed, GROUP, num_inputs, num_outputs)
        return without_offsets + group_sum_TG @ offset_GN  # type: ignore[no-any-return]

    return Kernel(torch.float32, GROUP, 8, pack, multiply)


def _cuda() -> Kernel:
    """Return torch's kernel for Ampere and later; before torch 2.5 it packs codes, later pairs of codes."""
    tiles = 8

    def pack(pairs: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        try:
            return ops._convert_weight_to_int4pack(pairs, tiles), scale
        except RuntimeError:
            return ops._convert_weight_to_int4pack(codes(pairs).int(), tiles), scale

    def multiply(x_TK: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
        return ops._weight_int4pack_mm(x_TK, packed, GROUP, scale)  # type: ignore[no-any-return]

    return Kernel(torch.bfloat16, 16 * tiles, 16, pack, multiply)


def _named(device: str) -> Callable[[], Kernel]:
    if device == "cuda":
        return _cuda
    return _arm if platform.machine() in ("aarch64", "arm64") else _x86


@lru_cache(maxsize=None)
def absent(why: str) -> Kernel:
    """Return the substitute for a missing kernel."""
    def as_it_is(pairs: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return pairs, scale

    return Kernel(torch.float32, 1, 1, as_it_is, torch.mm, block=1, why=why)


@lru_cache(maxsize=None)
def kernel(device: str, dtype: torch.dtype) -> Kernel:
    """Return the kernel for a kind of device and rows of this type, or `absent`."""
    if dtype == torch.float64:
        return absent("there is none for float64")
    try:
        return tried(_named(device)(), device)
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        return absent(reason(error))


def fitting(device: str, dtype: torch.dtype, outputs: int, inputs: int) -> Kernel:
    """Return the kernel for a weight of this shape, or `absent`."""
    kernel_here = kernel(device, dtype)
    if outputs % kernel_here.outputs or inputs % kernel_here.inputs:
        return absent(f"it needs multiples of {kernel_here.outputs} outputs and {kernel_here.inputs} inputs, not "
                      f"{outputs} and {inputs}")
    return kernel_here


def tried(kernel: Kernel, device: str) -> Kernel:
    """Return the kernel with the least `unit` for which no row depends on the others. Raises RuntimeError for none."""
    num_outputs, num_inputs = TRIAL_SHAPE
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(num_outputs, num_inputs, generator=generator).to(device)
    x_TK = torch.randn(2 * max(TRIAL_ROWS), num_inputs, generator=generator).to(device)
    pairs, scale = quantize(weight)
    exact_out = x_TK.float() @ unfold(pairs, scale, num_inputs, torch.float32).t()
    packed = kernel.pack(pairs, scale)

    for unit in UNITS:
        padding_kernel = replace(kernel, unit=unit)
        whole_batch = padding_kernel(x_TK, *packed)
        if (whole_batch - exact_out).norm() > CLOSE * exact_out.norm():
            raise RuntimeError("its result is incorrect")

        batches = {num_rows: padding_kernel(x_TK[:num_rows], *packed) for num_rows in TRIAL_ROWS}
        if all(torch.equal(batch, whole_batch[:num_rows]) for num_rows, batch in batches.items()):
            return padding_kernel
    raise RuntimeError("a row depends on the other rows")
