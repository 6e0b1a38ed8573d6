"""Modules that compute with quantized weights, and the layers of a module replaced, filled, fused and packed.

It knows nothing about ranks or strategies. Weights in blocks are unfolded here, and computed in C by `model/native/`;
the other kinds are bitsandbytes'. Rows of activations are quantized separately: a row's result does not depend on the
other rows. LLM.int8()'s columns of outliers would break this, and are omitted.
"""
from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import partial
from typing import Any, Callable, Iterator, Mapping, Optional, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config.schema.untrusted import reason
from model.llama import fill
from model.weights import quant
from model.weights.blocks import QUANTIZERS, block_type, unfold
from model.weights.checkpoint import TensorForm, form_of
from model.weights.onednn import packed
from model.weights.quant import BLOCK_SIZE, LIBRARY_KINDS, Recast, quantized_forms, quantized_tensors, rounded

Packer = Callable[..., Optional[nn.Module]]  # from a weight and a bias; None if it cannot compute them
PLAIN_LAYERS = (  # names of linear layers that are never quantized
    "lm_head", "router", "shared_expert_gate", "in_proj_a", "in_proj_b")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # options in glibc's malloc.h
LARGE_BYTES = 4 << 20  # more than the logits of a usual step, whose pages would have to be cleared in each one
MAX_ERROR = 0.2  # relative error of the trial layer's outputs; 4 bits have about 0.1


def _unfilled(form: TensorForm) -> nn.Parameter:
    """Return a parameter of this form on the meta device."""
    return nn.Parameter(torch.empty(form.shape, dtype=form.dtype, device="meta"), requires_grad=False)


class InBlocks(nn.Module):
    """A linear layer's weight in blocks, and its bias, which are not computed here."""

    exact = ("weight",)  # parameters that keep their type when the module is filled

    def __init__(self, like: nn.Linear, form: TensorForm) -> None:
        super().__init__()
        self.weight, self.bias = _unfilled(form), like.bias


class Quantized(nn.Module):
    """A linear layer with quantized weights; its parameters have the forms of `quantized_forms`, on the meta device at
    first."""

    exact = ("scale", "weight")
    scale: Tensor
    weight: Tensor

    def __init__(self, like: nn.Linear, kind: str) -> None:
        super().__init__()
        self.in_features, self.out_features = like.in_features, like.out_features
        self.kind = kind
        for name, form in quantized_forms(kind, (like.out_features, like.in_features)).items():
            setattr(self, name, _unfilled(form))
        self.bias = like.bias

    def settle(self, dtype: torch.dtype) -> None:
        """Convert the newly filled weights to the form that their device's kernels need."""


class Int8(Quantized):
    """Weights with a scale per output, activations with a scale per row; sums are whole numbers and exact."""

    def forward(self, x_TD: Tensor) -> Tensor:
        out_dtype = x_TD.dtype
        if x_TD.is_cuda:
            x_TD = x_TD.half()  # the only type that CUDA's kernel supports
        codes_TD, scale_T, _ = quant.library().int8_vectorwise_quant(x_TD)
        multiply = torch.ops.bitsandbytes.int8_scaled_mm.default
        out: Tensor = multiply(codes_TD, self.weight, scale_T, self.scale, dtype=out_dtype)
        return out if self.bias is None else out + self.bias


class FourBit(Quantized):
    """Weights in nf4 or fp4, with a kernel that reads them directly, if there is one; else they are dequantized."""

    def settle(self, dtype: torch.dtype) -> None:
        functional = quant.library()
        shape = torch.Size((self.out_features, self.in_features))
        code_values = functional.get_4bit_type(self.kind, device=self.weight.device)
        self.state = functional.QuantState(self.scale, shape, code_values, BLOCK_SIZE, self.kind, dtype)

        is_on_cuda = self.weight.is_cuda
        has_whole_blocks = self.in_features % BLOCK_SIZE == 0
        self.has_kernel = has_whole_blocks and is_on_cuda and dtype != torch.float64

        # on a CPU, there is a kernel only for bfloat16, which needs the weights in an order of its own
        is_packable = has_whole_blocks and self.out_features % 32 == 0 and dtype == torch.bfloat16
        if is_packable and not is_on_cuda and functional.has_avx512bf16():
            packed_weight, self.state = functional._convert_weight_packed_for_cpu(self.weight, self.state)
            self.weight = nn.Parameter(packed_weight, requires_grad=False)
            self.scale = nn.Parameter(self.state.absmax, requires_grad=False)
            self.has_kernel = True

    def forward(self, x_TD: Tensor) -> Tensor:
        if not self.has_kernel:
            return F.linear(x_TD, self.unfolded(x_TD.dtype), self.bias)
        import bitsandbytes

        weight = self.weight if self.weight.dim() == 2 else self.weight[None]  # packed for a CPU, else as one row
        return bitsandbytes.matmul_4bit(x_TD, weight, self.state, bias=self.bias)  # type: ignore[no-any-return]

    def unfolded(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantized weights `[out, in]`."""
        shape: tuple[int, ...] = self.state.shape
        if self.in_features % BLOCK_SIZE:
            shape = (1, self.state.shape.numel())  # bitsandbytes' CPU kernel needs every row to begin with a block
        kernel_dtype = dtype if dtype != torch.float64 else torch.float32  # it would leave float64 unwritten
        dequantize = torch.ops.bitsandbytes.dequantize_4bit.default
        weight: Tensor = dequantize(self.weight, self.scale, BLOCK_SIZE, self.kind, shape, kernel_dtype)
        return weight.view(self.state.shape).to(dtype)


class StoredEmbedding(nn.Module):
    """An embedding as its file has it; only the rows of tokens are converted to `dtype`, when they are read."""

    exact = ("weight",)

    def __init__(self, form: TensorForm, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = _unfilled(form)
        self.dtype = dtype

    def forward(self, tokens_T: Tensor) -> Tensor:
        rows = self.weight[tokens_T]
        return (unfold(rows) if block_type(self.weight.shape) else rows).to(self.dtype)


# --- the layers of a module -------------------------------------------------------------------------------------------

def _layers_to_quantize(module: nn.Module, kind: str) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Yield the linear layers of a module that are quantized, all but an LM head and a router, with the owner and the
    name of each."""
    owners = list(module.modules()) if kind in (*LIBRARY_KINDS, *QUANTIZERS) else []
    for owner in owners:
        for name, child in list(owner.named_children()):
            if isinstance(child, nn.Linear) and name not in PLAIN_LAYERS:
                yield owner, name, child


def hollow(module: nn.Module, kind: str) -> None:
    """Replace the linear layers of a module by quantized ones of bitsandbytes without weights, if it has this kind."""
    if kind not in LIBRARY_KINDS:
        return
    layer_class = Int8 if kind == "int8" else FourBit
    for owner, name, layer in _layers_to_quantize(module, kind):
        setattr(owner, name, layer_class(layer, kind))


def hollow_blocks(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Replace the linear layers whose weights are blocks by modules without weights."""
    for path, child in list(module.named_modules()):
        weight_name = f"{path}.weight"
        if not isinstance(child, nn.Linear) or weight_name not in tensors:
            continue

        form = tensors.forms[weight_name] if isinstance(tensors, Recast) else form_of(tensors[weight_name])
        if block_type(form.shape):
            owner_path, _, name = path.rpartition(".")
            setattr(module.get_submodule(owner_path), name, InBlocks(child, form))


def load(module: nn.Module, kind: str, tensors: Mapping[str, Tensor],
         dtype: torch.dtype, device: torch.device | str) -> None:
    """Fill a module on the meta device, with its linear layers quantized to `kind`; blocks have been unfolded."""
    hollow(module, kind)
    fill(module, tensors, dtype, device)
    for layer in module.modules():
        if isinstance(layer, Quantized):
            layer.settle(dtype)
    fuse(module)


def fuse(module: nn.Module) -> None:
    """Concatenate plain layers that blocks list as `fusible`, for fewer calls; their tensors become views."""
    for block in module.modules():
        layers = [getattr(block, name) for name in getattr(block, "fusible", ())]
        have_bias = {getattr(layer, "bias", None) is not None for layer in layers}
        if len(have_bias) == 1 and all(type(layer) is nn.Linear for layer in layers):
            fused_tensors: dict[str, Any] = {name: _concatenate(layers, name) for name in ("weight", "bias")}
            block.fused_product = partial(F.linear, **fused_tensors)  # type: ignore[assignment]


def _concatenate(layers: Sequence[Any], name: str) -> Tensor | None:
    """Concatenate a tensor of all layers, and replace it there by views; return None if the layers do not have it."""
    tensors = [getattr(layer, name) for layer in layers]
    if tensors[0] is None:
        return None

    whole = torch.cat(tensors)
    views = whole.split([len(tensor) for tensor in tensors])
    for layer, view in zip(layers, views):
        setattr(layer, name, nn.Parameter(view, requires_grad=False))
    return whole


def pack(module: nn.Module, pack_layer: Packer = packed, pack_plain_layer: Packer = packed) -> None:
    """Pack plain linear layers for their device's kernels, if there are any; the plain weights are freed.

    `pack_plain_layer` packs those that are never quantized.
    """
    for block in list(module.modules()):
        fused_product = vars(block).get("fused_product")
        is_plain = isinstance(fused_product, partial) and fused_product.func is F.linear
        if is_plain and (packed_layer := pack_layer(**fused_product.keywords)):  # type: ignore[union-attr]
            block.fused_product = packed_layer
            for name in block.fusible:  # type: ignore[union-attr]
                setattr(block, name, None)

        for name, child in list(block.named_children()):
            pack_child = pack_plain_layer if name in PLAIN_LAYERS else pack_layer
            if type(child) is nn.Linear and (packed_layer := pack_child(child.weight, child.bias)):
                setattr(block, name, packed_layer)
    return_freed_memory()


def return_freed_memory() -> None:
    """Give the memory that loading has freed back to the system, and from now on that of large blocks at once.

    Otherwise glibc would keep both. Such blocks are those of a cache that grows.
    """
    with suppress(OSError, AttributeError):  # another C library
        glibc = ctypes.CDLL(None)
        glibc.malloc_trim(0)
        glibc.mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
        glibc.mallopt(M_TRIM_THRESHOLD, 2 * LARGE_BYTES)


def compress(module: nn.Module, kind: str, dtype: torch.dtype) -> None:
    """Quantize the linear layers of a loaded module in place, but not an LM head in it; blocks are unfolded at once."""
    for owner, name, layer in _layers_to_quantize(module, kind):
        if kind in QUANTIZERS:
            layer.weight.data = rounded(kind, layer.weight.detach().cpu()).to(layer.weight)
            continue

        layer_alone, device = nn.ModuleDict({name: layer}), layer.weight.device
        tensors = quantized_tensors(f"{name}.weight", kind, layer.weight)
        if layer.bias is not None:
            tensors[f"{name}.bias"] = layer.bias
        load(layer_alone, kind, tensors, dtype, device)
        setattr(owner, name, layer_alone[name])


def probe(kind: str, dtype: torch.dtype, device: torch.device | str) -> None:
    """Run one small layer, if bitsandbytes computes this kind. Raises ValueError, with the fix, if that does not work.
    """
    if kind not in LIBRARY_KINDS:
        return

    # a layer, and its exact result
    sine_waves = torch.linspace(-1, 1, BLOCK_SIZE * BLOCK_SIZE).sin()
    weight = sine_waves.view(BLOCK_SIZE, BLOCK_SIZE)
    trial_layer = nn.Sequential(nn.Linear(BLOCK_SIZE, BLOCK_SIZE, bias=False))
    x_TD = torch.linspace(1, 2, 3 * BLOCK_SIZE).view(3, BLOCK_SIZE)
    exact_out = x_TD @ weight.t()

    # the quantized result
    try:
        fill(trial_layer, {"0.weight": weight}, torch.float32, device)
        compress(trial_layer, kind, dtype)
        quantized_out = trial_layer(x_TD.to(device=device, dtype=dtype)).float().cpu()
        is_close = bool((quantized_out - exact_out).norm() < MAX_ERROR * exact_out.norm())
        problem = "" if is_close else "the result is incorrect"
    except (ImportError, OSError, RuntimeError, NotImplementedError, AttributeError) as error:
        problem = reason(error)

    if problem:
        raise ValueError(f"{kind} weights cannot be computed on {device} ({problem}): install the bitsandbytes of "
                         "requirements.txt (boards: docs/jetson.md), or run unquantized weights: quant=none, and a "
                         "split without --quant")
