"""Quantized weights: linears in 8 or 4 bits by bitsandbytes, made when a model is split or when it is loaded.

It knows nothing about ranks or strategies. bitsandbytes is imported when something is quantized, and not before.

Each weight is quantized by itself, from the type that the checkpoint has, on the CPU: so a split that holds quantized
weights and one that is quantized as it is loaded give the same numbers. Rows of activations stay apart, too: a row's
result does not depend on the rows beside it. LLM.int8()'s columns of outliers would break that, and are left out.
"""
from __future__ import annotations

import logging
import math
import re
from typing import Any, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.checkpoint import Checkpoint, Form
from model.llama import fill

KINDS = ("int8", "nf4", "fp4")
BLOCK = 64  # weights that share a scale, of those in 4 bits
PIECE = 1 << 22  # weights that are quantized in one go, which bounds the memory for it; whole blocks
LINEAR = re.compile(r"layers\.\d+\.(self_attn|mlp)\.\w+_proj\.weight$")  # what is quantized of a model
ERROR = 0.2  # of the outputs of the trial layer, relative; 4 bits have about 0.1


def agreed(asked: str, held: str, folder: Any) -> str:
    """The kind of weights to run, of the key `quant` and of what a split holds; `auto` is what it holds."""
    if asked in ("auto", held) or held == "none":
        return held if asked == "auto" else asked
    again = "without --quant" if asked == "none" else f"with --quant {asked}"
    raise ValueError(f"{folder} holds {held} weights, which cannot be run with quant={asked}: leave quant out, or "
                     f"split the model again {again}")


def library() -> Any:
    """bitsandbytes' functions; it is kept from telling of kernels that it did not find on the network."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import bitsandbytes.functional

    return bitsandbytes.functional


def forms(kind: str, shape: tuple[int, ...]) -> dict[str, Form]:
    """What a weight `[out, in]` becomes: numbers of 8 bits with a scale per row, or pairs of 4 bits in a byte, flat,
    with a scale per block. A scale is the largest magnitude."""
    if kind == "int8":
        return {"scale": Form(torch.float32, shape[:1]), "weight": Form(torch.int8, shape)}
    size = math.prod(shape)
    return {"scale": Form(torch.float32, (-(-size // BLOCK),)), "weight": Form(torch.uint8, (-(-size // 2),))}


def quantize(kind: str, weight: Tensor) -> dict[str, Tensor]:
    """The tensors of `forms`; piece by piece, which changes no number."""
    if kind == "int8":
        rows = max(1, PIECE // weight.shape[1])
        pairs = [library().int8_vectorwise_quant(piece)[:2] for piece in weight.split(rows)]
    else:
        made = (library().quantize_4bit(piece.float(), blocksize=BLOCK, quant_type=kind)
                for piece in weight.reshape(-1).split(PIECE))
        pairs = [(packed.reshape(-1), state.absmax) for packed, state in made]
    return {"scale": torch.cat([scale for _, scale in pairs]), "weight": torch.cat([packed for packed, _ in pairs])}


class Recast(Mapping[str, Tensor]):
    """The tensors of a checkpoint in the form that a rank wants: under its own names, quantized if `kind` says so.

    `names` leads from the rank's names to the checkpoint's. `forms` are known at once; a tensor is read when it is
    asked for, and only the last one is kept. `order` asks for neighbours together. With `sound`, tensors that hold NaN
    or infinity are refused.
    """

    def __init__(self, source: Checkpoint, names: Mapping[str, str], kind: str = "none", sound: bool = False) -> None:
        self.source, self.names, self.kind, self.sound = source, names, kind, sound
        self.forms: dict[str, Form] = {}
        self._origin: dict[str, str] = {}
        self._last: tuple[str, dict[str, Tensor]] = "", {}
        for name in names:
            made = self._forms(name)
            self.forms.update(made)
            self._origin.update(dict.fromkeys(made, name))

    def _forms(self, name: str) -> dict[str, Form]:
        form = self.source.form(self.names[name])
        if self.kind == "none" or not LINEAR.search(name):
            return {name: form}
        return {_beside(name, end): made for end, made in forms(self.kind, form.shape).items()}

    @property
    def order(self) -> list[str]:
        """All names: wide types first, so that tensors are aligned in a file; then as in the checkpoint, so that each
        of its files is opened once."""
        place = {name: i for i, name in enumerate(self.source.names())}
        width = {name: max(form.width for form in self._forms(name).values()) for name in self.names}
        return [made for name in sorted(self.names, key=lambda name: (-width[name], place[self.names[name]]))
                for made in self._forms(name)]

    def __getitem__(self, name: str) -> Tensor:
        origin = self._origin[name]
        if self._last[0] != origin:
            self._last = "", {}
            self._last = origin, self._made(origin)
        return self._last[1][name]

    def _made(self, name: str) -> dict[str, Tensor]:
        tensor = (self.source.sound if self.sound else self.source.read)(self.names[name])
        if self.kind == "none" or not LINEAR.search(name):
            return {name: tensor}
        return {_beside(name, end): made for end, made in quantize(self.kind, tensor).items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self._origin)

    def __len__(self) -> int:
        return len(self._origin)


def _beside(name: str, end: str) -> str:
    return f"{name.rpartition('.')[0]}.{end}"


class Quantized(nn.Module):
    """A linear with quantized weights; its parameters have the forms of `forms`, and no memory at first."""

    exact = ("scale", "weight")  # what keeps its type when the module is filled
    scale: Tensor
    weight: Tensor

    def __init__(self, like: nn.Linear, kind: str) -> None:
        super().__init__()
        self.in_features, self.out_features, self.kind = like.in_features, like.out_features, kind
        for name, form in forms(kind, (like.out_features, like.in_features)).items():
            setattr(self, name, nn.Parameter(torch.empty(form.shape, dtype=form.dtype, device="meta"), False))
        self.bias = like.bias

    def settle(self, dtype: torch.dtype) -> None:
        """Once the weights are there: what this device wants to be done with them first."""


class Int8(Quantized):
    """Weights with a scale per output, activations with a scale per row; sums are whole numbers and exact."""

    def forward(self, x_TD: Tensor) -> Tensor:
        lib, wanted = library(), x_TD.dtype
        x_TD, row_T, _ = lib.int8_vectorwise_quant(x_TD.half() if x_TD.is_cuda else x_TD)  # CUDA's takes halves only
        out: Tensor = torch.ops.bitsandbytes.int8_scaled_mm.default(x_TD, self.weight, row_T, self.scale, dtype=wanted)
        return out if self.bias is None else out + self.bias


class FourBit(Quantized):
    """Weights in nf4 or fp4, by a kernel that reads them as they are where there is one; else they are unfolded."""

    def settle(self, dtype: torch.dtype) -> None:
        lib, whole = library(), self.in_features % BLOCK == 0
        shape = torch.Size((self.out_features, self.in_features))
        code = lib.get_4bit_type(self.kind, device=self.weight.device)
        self.state = lib.QuantState(self.scale, shape, code, BLOCK, self.kind, dtype)
        self.fused = whole and self.weight.is_cuda and dtype != torch.float64
        # on a CPU: one kernel, for bfloat16, which wants the weights in an order of its own
        if whole and self.out_features % 32 == 0 and dtype == torch.bfloat16 and not self.weight.is_cuda \
                and lib.has_avx512bf16():
            packed, self.state = lib._convert_weight_packed_for_cpu(self.weight, self.state)
            self.weight, self.scale = nn.Parameter(packed, False), nn.Parameter(self.state.absmax, False)
            self.fused = True

    def forward(self, x_TD: Tensor) -> Tensor:
        if not self.fused:
            return F.linear(x_TD, self.unfolded(x_TD.dtype), self.bias)
        import bitsandbytes

        weight = self.weight if self.weight.dim() == 2 else self.weight[None]  # packed for a CPU, or a row, as it wants
        return bitsandbytes.matmul_4bit(x_TD, weight, self.state, bias=self.bias)  # type: ignore[no-any-return]

    def unfolded(self, dtype: torch.dtype) -> Tensor:
        """The weights `[out, in]`."""
        # bitsandbytes' CPU kernel takes rows to begin with a block: where they do not, all is one row
        shape = self.state.shape if self.in_features % BLOCK == 0 else (1, self.state.shape.numel())
        narrow = dtype if dtype != torch.float64 else torch.float32  # it would leave float64 unwritten
        out: Tensor = torch.ops.bitsandbytes.dequantize_4bit.default(self.weight, self.scale, BLOCK, self.kind, shape,
                                                                     narrow)
        return out.view(self.state.shape).to(dtype)


def replace_linears(module: nn.Module, kind: str) -> None:
    """Let all linears below a module that was built without memory hold quantized weights; an LM head stays."""
    if kind == "none":
        return
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear) and name != "lm_head":
            setattr(module, name, (Int8 if kind == "int8" else FourBit)(child, kind))
        else:
            replace_linears(child, kind)


def load(module: nn.Module, kind: str, tensors: Mapping[str, Tensor], dtype: torch.dtype,
         device: torch.device | str) -> None:
    """`fill` a module that was built without memory, its linears with weights that are quantized so."""
    replace_linears(module, kind)
    fill(module, tensors, dtype, device)
    settle(module, dtype)


def settle(module: nn.Module, dtype: torch.dtype) -> None:
    for child in module.modules():
        if isinstance(child, Quantized):
            child.settle(dtype)


def compress(module: nn.Module, kind: str, dtype: torch.dtype) -> None:
    """Quantize a module that is in memory already, and small: a draft."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear) and name != "lm_head" and kind != "none":
            small, device = nn.ModuleDict({name: child}), child.weight.device
            tensors = {f"{name}.{end}": x for end, x in quantize(kind, child.weight.cpu()).items()}
            if child.bias is not None:
                tensors[f"{name}.bias"] = child.bias
            load(small, kind, tensors, dtype, device)
            setattr(module, name, small[name])
        else:
            compress(child, kind, dtype)


def probe(kind: str, dtype: torch.dtype, device: torch.device | str) -> None:
    """Run one small layer of this kind; where that does not work, a ValueError names the fix."""
    if kind == "none":
        return
    weight = torch.linspace(-1, 1, BLOCK * BLOCK).sin().view(BLOCK, BLOCK)
    layer = nn.Sequential(nn.Linear(BLOCK, BLOCK, bias=False))
    x_TD = torch.linspace(1, 2, 3 * BLOCK).view(3, BLOCK)
    try:
        fill(layer, {"0.weight": weight}, torch.float32, device)
        compress(layer, kind, dtype)
        off = layer(x_TD.to(device=device, dtype=dtype)).float().cpu() - x_TD @ weight.t()
        reason = "" if bool(off.norm() < ERROR * (x_TD @ weight.t()).norm()) else "the result is wrong"
    except (ImportError, OSError, RuntimeError, NotImplementedError, AttributeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    if reason:
        raise ValueError(f"{kind} weights cannot be computed on {device} ({reason}): install the bitsandbytes of "
                         "requirements.txt (boards: docs/jetson.md), or run unquantized weights: quant=none, and a "
                         "split without --quant")
