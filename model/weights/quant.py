"""Quantized weights: linear layers in 8 or 4 bits, quantized when a model is split or loaded.

It knows nothing about ranks or strategies. `int4` is computed by torch itself, the other kinds by bitsandbytes, which
is not imported before something is quantized.

Each weight is quantized separately, from the checkpoint's type, on the CPU. So a split with quantized weights and a
split that is quantized while loading give the same numbers. Rows of activations are also quantized separately: a row's
result does not depend on the other rows. LLM.int8()'s columns of outliers would break this, and are omitted.
"""
from __future__ import annotations

import ctypes
import logging
import math
import re
from contextlib import suppress
from functools import partial
from typing import Any, Callable, Iterator, Mapping, Optional, Sequence, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config.schema.untrusted import reason
from model.llama import fill
from model.weights import int4
from model.weights.blocks import block_type, unfold
from model.weights.checkpoint import Checkpoint, TensorForm
from model.weights.onednn import packed

T = TypeVar("T")
Packer = Callable[..., Optional[nn.Module]]  # from a weight and a bias; None if it cannot compute them
KINDS = ("int8", "int4", "nf4", "fp4")
STORED = "stored"  # the kind of weights that are kept as files have them, which may be in blocks
BLOCK = 64  # weights that share a scale in nf4 and fp4
PIECE = 1 << 22  # weights that are quantized at once, to bound memory; whole blocks
LINEAR = re.compile(r"layers\.\d+\.(self_attn|mlp)\.(experts\.\d+\.)?\w+_proj\.weight$")  # the weights to quantize
ERROR = 0.2  # largest relative error of the trial layer's outputs; 4 bits have about 0.1


def running_kind(asked: str, held: str, folder: Any) -> str:
    """Return the kind of weights that a rank runs; `auto` is that of the split. Raises ValueError if they conflict."""
    if asked == "auto":
        return held
    if held in (asked, "none"):
        return asked
    again = "without --quant" if asked == "none" else f"with --quant {asked}"
    raise ValueError(f"{folder} holds {held} weights, which cannot be run with quant={asked}: leave quant out, or "
                     f"split the model again {again}")


def library() -> Any:
    """Import bitsandbytes' functions, without its warnings about missing kernels."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import bitsandbytes.functional

    return bitsandbytes.functional


def forms(kind: str, shape: tuple[int, ...]) -> dict[str, TensorForm]:
    """Return the forms of the tensors of a quantized weight `[out, in]`.

    For int8: numbers of 8 bits, and a scale per row. For int4: see `int4.quantize`. Otherwise: pairs of 4 bits in a
    byte, flat, and a scale per block. Except for int4, a scale is the largest magnitude.
    """
    if kind == "int8":
        scale, weight = TensorForm(torch.float32, shape[:1]), TensorForm(torch.int8, shape)
    elif kind == "int4":
        groups = int4.groups(shape[1])
        scale = TensorForm(torch.bfloat16, (groups, shape[0], 2))
        weight = TensorForm(torch.uint8, (shape[0], groups * int4.GROUP // 2))
    else:
        size = math.prod(shape)
        scale = TensorForm(torch.float32, (math.ceil(size / BLOCK),))
        weight = TensorForm(torch.uint8, (math.ceil(size / 2),))
    return {"scale": scale, "weight": weight}


def quantize(kind: str, weight: Tensor) -> dict[str, Tensor]:
    """Quantize a weight to the tensors that `forms` describes, piece by piece, which does not change the result."""
    rows = max(1, PIECE // weight.shape[1])
    if kind == "int8":
        pairs = [library().int8_vectorwise_quant(piece)[:2] for piece in weight.split(rows)]
    elif kind == "int4":
        pairs = [int4.quantize(piece) for piece in weight.split(rows)]
    else:
        made = (library().quantize_4bit(piece.float(), blocksize=BLOCK, quant_type=kind)
                for piece in weight.reshape(-1).split(PIECE))
        pairs = [(packed.reshape(-1), state.absmax) for packed, state in made]
    weights, scales = zip(*pairs)
    return {"scale": torch.cat(scales, 1 if kind == "int4" else 0), "weight": torch.cat(weights)}


class Recast(Mapping[str, Tensor]):
    """A mapping of a rank's tensors, read from a checkpoint, renamed, and quantized to `kind`.

    `names` maps the rank's names to the checkpoint's. `forms` are known at once; a tensor is read when it is requested,
    and only the last one is kept, so use `order`, in which a weight and its scale are adjacent. With `sound`, tensors
    with NaN or infinity raise ValueError.
    """

    def __init__(self, source: Checkpoint, names: Mapping[str, str],
                 kind: str = "none", sound: bool = False) -> None:
        self.source, self.names = source, names
        self.kind, self.sound = kind, sound
        self.forms: dict[str, TensorForm] = {}
        self._origin: dict[str, str] = {}
        self._last: tuple[str, dict[str, Tensor]] = "", {}
        for name in names:
            made = self._forms(name)
            self.forms.update(made)
            self._origin.update(dict.fromkeys(made, name))

    def _forms(self, name: str) -> dict[str, TensorForm]:
        if self.kind == STORED:
            return {name: self.source.stored_form(self.names[name])}
        form = self.source.form(self.names[name])
        if self._quantizes(name):
            return _with_names(name, forms(self.kind, form.shape))
        return {name: form}

    def _quantizes(self, name: str) -> bool:
        return self.kind in KINDS and LINEAR.search(name) is not None

    @property
    def order(self) -> list[str]:
        """All names in the order of writing: wide types first, so that tensors are aligned, then as the checkpoint."""
        place = {name: i for i, name in enumerate(self.source.names())}

        def rank(name: str) -> tuple[int, int]:
            width = max(form.width for form in self._forms(name).values())
            return -width, place[self.names[name]]

        ordered = sorted(self.names, key=rank)
        return [made for name in ordered for made in self._forms(name)]

    def __getitem__(self, name: str) -> Tensor:
        origin = self._origin[name]
        if self._last[0] != origin:
            self._last = "", {}
            self._last = origin, self._made(origin)
        return self._last[1][name]

    def _made(self, name: str) -> dict[str, Tensor]:
        if self.kind == STORED:
            if self.sound:
                self.source.read_finite(self.names[name])  # the numbers in blocks show only when they are unfolded
            return {name: self.source.read_stored(self.names[name])}

        read = self.source.read_finite if self.sound else self.source.read
        tensor = read(self.names[name])
        if self._quantizes(name):
            return _with_names(name, quantize(self.kind, tensor))
        return {name: tensor}

    def __iter__(self) -> Iterator[str]:
        return iter(self._origin)

    def __len__(self) -> int:
        return len(self._origin)


def _with_names(name: str, made: Mapping[str, T]) -> dict[str, T]:
    """Return the tensors of a quantized weight under full names, such as `a.scale` and `a.weight`."""
    owner = name.rpartition(".")[0]
    return {f"{owner}.{end}": one for end, one in made.items()}


def quantized_tensors(name: str, kind: str, weight: Tensor) -> dict[str, Tensor]:
    """Quantize a weight, and return its tensors under full names."""
    return _with_names(name, quantize(kind, weight.cpu()))


class Quantized(nn.Module):
    """A linear layer with quantized weights; its parameters have the forms of `forms`, on the meta device at first."""

    exact = ("scale", "weight")  # parameters that keep their type when the module is filled
    scale: Tensor
    weight: Tensor

    def __init__(self, like: nn.Linear, kind: str,
                 own_forms: Mapping[str, TensorForm] | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = like.in_features, like.out_features
        self.kind = kind
        for name, form in (own_forms or forms(kind, (like.out_features, like.in_features))).items():
            hollow = torch.empty(form.shape, dtype=form.dtype, device="meta")
            setattr(self, name, nn.Parameter(hollow, requires_grad=False))
        self.bias = like.bias

    def settle(self, dtype: torch.dtype) -> None:
        """Convert the newly filled weights to the form that their device's kernels need."""


class Int8(Quantized):
    """Weights with a scale per output, activations with a scale per row; sums are whole numbers and exact."""

    def forward(self, x_TD: Tensor) -> Tensor:
        wanted = x_TD.dtype
        if x_TD.is_cuda:
            x_TD = x_TD.half()  # the only type that CUDA's kernel supports
        small_TD, row_T, _ = library().int8_vectorwise_quant(x_TD)
        multiply = torch.ops.bitsandbytes.int8_scaled_mm.default
        out: Tensor = multiply(small_TD, self.weight, row_T, self.scale, dtype=wanted)
        return out if self.bias is None else out + self.bias


class FourBit(Quantized):
    """Weights in nf4 or fp4, with a kernel that reads them directly, if there is one; else they are dequantized."""

    def settle(self, dtype: torch.dtype) -> None:
        lib, whole = library(), self.in_features % BLOCK == 0
        shape = torch.Size((self.out_features, self.in_features))
        code = lib.get_4bit_type(self.kind, device=self.weight.device)
        self.state = lib.QuantState(self.scale, shape, code, BLOCK, self.kind, dtype)
        on_cuda = self.weight.is_cuda
        self.fused = whole and on_cuda and dtype != torch.float64
        # on a CPU, there is a kernel only for bfloat16, which needs the weights in an order of its own
        packable = whole and self.out_features % 32 == 0 and dtype == torch.bfloat16
        if packable and not on_cuda and lib.has_avx512bf16():
            packed, self.state = lib._convert_weight_packed_for_cpu(self.weight, self.state)
            self.weight = nn.Parameter(packed, requires_grad=False)
            self.scale = nn.Parameter(self.state.absmax, requires_grad=False)
            self.fused = True

    def forward(self, x_TD: Tensor) -> Tensor:
        if not self.fused:
            return F.linear(x_TD, self.unfolded(x_TD.dtype), self.bias)
        import bitsandbytes

        weight = self.weight if self.weight.dim() == 2 else self.weight[None]  # packed for a CPU, else as one row
        return bitsandbytes.matmul_4bit(x_TD, weight, self.state, bias=self.bias)  # type: ignore[no-any-return]

    def unfolded(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantized weights `[out, in]`."""
        shape: tuple[int, ...] = self.state.shape
        if self.in_features % BLOCK:
            shape = (1, self.state.shape.numel())  # bitsandbytes' CPU kernel needs every row to begin with a block
        narrow = dtype if dtype != torch.float64 else torch.float32  # it would leave float64 unwritten
        dequantize = torch.ops.bitsandbytes.dequantize_4bit.default
        out: Tensor = dequantize(self.weight, self.scale, BLOCK, self.kind, shape, narrow)
        return out.view(self.state.shape).to(dtype)


class Int4(Quantized):
    """Weights in int4, with the kernel of their device, if there is one; else they are unfolded."""

    def settle(self, dtype: torch.dtype) -> None:
        device = self.weight.device.type
        self.kernel = int4.fitting(device, dtype, self.out_features, self.in_features)
        packed, scale = self.kernel.pack(self.weight, self.scale)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.kernel(x_TD, self.weight, self.scale, self.bias)


CLASSES: dict[str, type[Quantized]] = {"int8": Int8, "int4": Int4}  # for other kinds: FourBit


def _linears(module: nn.Module, kind: str) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Yield the linear layers of a module that are quantized, all but an LM head and a router, with the owner and the
    name of each."""
    owners = list(module.modules()) if kind != "none" else []
    for owner in owners:
        for name, child in list(owner.named_children()):
            if isinstance(child, nn.Linear) and name not in ("lm_head", "router"):
                yield owner, name, child


def hollow(module: nn.Module, kind: str) -> None:
    """Replace the linear layers of a module by quantized ones without weights."""
    quantized = CLASSES.get(kind, FourBit)
    for owner, name, child in _linears(module, kind):
        setattr(owner, name, quantized(child, kind))


def hollow_blocks(module: nn.Module, tensors: Recast) -> None:
    """Replace the linear layers and the embedding whose weights are blocks in a file by modules without weights."""
    for path, child in list(module.named_modules()):
        form = tensors.forms.get(f"{path}.weight")
        if not form or not block_type(form.shape):
            continue
        owner_path, _, name = path.rpartition(".")
        owner = module.get_submodule(owner_path)
        if isinstance(child, nn.Linear):
            setattr(owner, name, Quantized(child, STORED, {"weight": form}))
        else:
            setattr(owner, name, BlockEmbedding(form))


class BlockEmbedding(nn.Module):
    """An embedding of which the rows of tokens are unfolded when they are read."""

    exact = ("weight",)

    def __init__(self, form: TensorForm) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(form.shape, dtype=form.dtype, device="meta"), requires_grad=False)

    def forward(self, tokens_T: Tensor) -> Tensor:
        return unfold(self.weight[tokens_T])


def load(module: nn.Module, kind: str, tensors: Mapping[str, Tensor],
         dtype: torch.dtype, device: torch.device | str) -> None:
    """Fill a module on the meta device, with its linear layers quantized to `kind`."""
    hollow(module, kind)
    fill(module, tensors, dtype, device)
    for part in module.modules():
        if isinstance(part, Quantized):
            part.settle(dtype)
    fuse(module)


def fuse(module: nn.Module) -> None:
    """Concatenate plain or int4 layers that blocks list as `fusible`, for fewer calls; parts become views."""
    for block in module.modules():
        parts = [getattr(block, name) for name in getattr(block, "fusible", ())]
        if len({getattr(part, "bias", None) is None for part in parts}) != 1:
            continue
        if all(type(part) is nn.Linear for part in parts):
            whole: dict[str, Any] = {name: _concatenate(parts, name) for name in ("weight", "bias")}
            block.fused_product = partial(F.linear, **whole)  # type: ignore[assignment]
        elif all(isinstance(part, Int4) for part in parts) and _can_concatenate(parts):
            rows = {"weight": 0, "scale": 1, "bias": 0}  # the dimension of a layer's outputs in each tensor
            whole = {name: _concatenate(parts, name, dim) for name, dim in rows.items()}
            block.fused_product = partial(parts[0].kernel, **whole)  # type: ignore[assignment]


def pack(module: nn.Module, product: Packer = packed) -> None:
    """Pack plain linear layers for their device's kernels, if there are any; the plain weights are freed."""
    for block in list(module.modules()):
        fused = vars(block).get("fused_product")
        is_plain = isinstance(fused, partial) and fused.func is F.linear
        if is_plain and (made := product(**fused.keywords)):  # type: ignore[union-attr]
            block.fused_product = made
            for name in block.fusible:  # type: ignore[union-attr]
                setattr(block, name, None)
        for name, child in list(block.named_children()):
            if type(child) is nn.Linear and (made := product(child.weight, child.bias)):
                setattr(block, name, made)
    return_freed_memory()


def return_freed_memory() -> None:
    """Give the memory that packing has freed back to the system, which glibc would keep."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _can_concatenate(parts: Sequence[Int4]) -> bool:
    """Return whether all parts have the same kernel, and it gives the same result when they are concatenated."""
    kernels = {part.kernel for part in parts}
    block = parts[0].kernel.block
    return len(kernels) == 1 and block > 0 and not any(part.out_features % block for part in parts)


def _concatenate(parts: Sequence[Any], name: str, dim: int = 0) -> Tensor | None:
    """Concatenate a tensor of all parts, and replace it there by views; return None if the parts do not have it."""
    pieces = [getattr(part, name) for part in parts]
    if pieces[0] is None:
        return None
    whole = torch.cat(pieces, dim)
    views = whole.split([piece.shape[dim] for piece in pieces], dim)
    for part, view in zip(parts, views):
        setattr(part, name, nn.Parameter(view, requires_grad=False))
    return whole


def unfolded(module: nn.Module) -> str:
    """Return the reason why int4 weights of a module are unfolded for every product, which is slow; empty if not."""
    reasons = (child.kernel.why for child in module.modules() if isinstance(child, Int4))
    return next(filter(None, reasons), "")


def compress(module: nn.Module, kind: str, dtype: torch.dtype) -> None:
    """Quantize the linear layers of a loaded module in place, but not an LM head in it."""
    for owner, name, child in _linears(module, kind):
        small, device = nn.ModuleDict({name: child}), child.weight.device
        tensors = quantized_tensors(f"{name}.weight", kind, child.weight)
        if child.bias is not None:
            tensors[f"{name}.bias"] = child.bias
        load(small, kind, tensors, dtype, device)
        setattr(owner, name, small[name])


def probe(kind: str, dtype: torch.dtype, device: torch.device | str) -> None:
    """Run one small layer of this kind. Raises ValueError, with the fix, if that does not work."""
    if kind in ("none", STORED):
        return
    waves = torch.linspace(-1, 1, BLOCK * BLOCK).sin()
    weight = waves.view(BLOCK, BLOCK)
    layer = nn.Sequential(nn.Linear(BLOCK, BLOCK, bias=False))
    x_TD = torch.linspace(1, 2, 3 * BLOCK).view(3, BLOCK)
    exact = x_TD @ weight.t()
    try:
        fill(layer, {"0.weight": weight}, torch.float32, device)
        compress(layer, kind, dtype)
        found = layer(x_TD.to(device=device, dtype=dtype)).float().cpu()
        close = bool((found - exact).norm() < ERROR * exact.norm())
        wrong = "" if close else "the result is incorrect"
    except (ImportError, OSError, RuntimeError, NotImplementedError, AttributeError) as error:
        wrong = reason(error)
    if wrong:
        other = "" if kind == "int4" else "install the bitsandbytes of requirements.txt (boards: docs/jetson.md), or "
        raise ValueError(f"{kind} weights cannot be computed on {device} ({wrong}): {other}run unquantized weights: "
                         "quant=none, and a split without --quant")
