"""Quantized weights: which tensors they have, and a rank's tensors read from a checkpoint, quantized to a kind.

A kind is a type of blocks (Q4_1, Q8_0), or one of bitsandbytes: nf4, fp4, and int8 on CUDA. Each weight is quantized
separately, from the checkpoint's type, on the CPU. So a split with quantized weights and a split that is quantized
while loading give the same numbers. bitsandbytes is not imported before something is quantized by it.
"""
from __future__ import annotations

import logging
import math
import re
from typing import Any, Iterator, Mapping, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor

from config.lean_torch import import_left_out
from model.weights import blocks
from model.weights.checkpoint import Checkpoint, TensorForm

T = TypeVar("T")
IN_BLOCKS = {"int8": "Q8_0", "int4": "Q4_1"}  # types of blocks, by what users call them
LIBRARY_KINDS = ("int8", "nf4", "fp4")  # of bitsandbytes
BLOCKS = "blocks"  # the kind of weights that are computed from their blocks, of any types
BLOCK_SIZE = 64  # weights that share a scale in nf4 and fp4
WEIGHTS_AT_ONCE = 1 << 22  # that are quantized, to bound memory; whole blocks
LINEAR_WEIGHT = re.compile(  # to quantize
    r"layers\.\d+\.(self_attn|conv|linear_attn|mlp)\.(experts\.\d+\.|shared_expert\.)?\w+_proj(_qkv|_z)?\.weight$")


def running_quantization(wanted: str, stored: str, folder: Any) -> str:
    """Return what a rank runs, as users call it; `auto` is what the split holds. Raises ValueError if they conflict."""
    if wanted == "auto":
        return stored
    if stored in (wanted, "none"):
        return wanted
    split_option = "without --quant" if wanted == "none" else f"with --quant {wanted}"
    raise ValueError(f"{folder} holds {stored} weights, which cannot be run with quant={wanted}: leave quant out, or "
                     f"split the model again {split_option}")


def kind_on(device: torch.device, quantization: str) -> str:
    """Return the kind of weights on a device for what users call them: on CUDA, int8 is bitsandbytes'."""
    is_library_kind = quantization == "int8" and device.type == "cuda"
    return quantization if is_library_kind else IN_BLOCKS.get(quantization, quantization)


def _as_it_is(function: T, **options: Any) -> T:
    return function


def library() -> Any:
    """Import bitsandbytes' functions, without its warnings about missing kernels, and without torch's compiler.

    Nothing is compiled for the devices that are used here, and each rank would take seconds to import that compiler:
    for functions that ask for it, and for kernels that it must not see.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import_left_out()
    with patch.multiple(torch, create=True, compile=_as_it_is, _disable_dynamo=_as_it_is):
        import bitsandbytes.functional

    return bitsandbytes.functional


def quantized_forms(kind: str, shape: tuple[int, ...]) -> dict[str, TensorForm]:
    """Return the forms of the tensors of a quantized weight `[out, in]`.

    For int8: numbers of 8 bits, and a scale per row. For nf4 and fp4: pairs of 4 bits in a byte, flat, and a scale for
    every `BLOCK_SIZE` weights. A scale is the largest magnitude. Otherwise: blocks.
    """
    if kind in blocks.QUANTIZERS:
        return {"weight": TensorForm(torch.uint8, blocks.blocks_shape(kind, shape))}

    if kind == "int8":
        scale, weight = TensorForm(torch.float32, shape[:1]), TensorForm(torch.int8, shape)
    else:
        num_weights = math.prod(shape)
        scale = TensorForm(torch.float32, (math.ceil(num_weights / BLOCK_SIZE),))
        weight = TensorForm(torch.uint8, (math.ceil(num_weights / 2),))

    return {"scale": scale, "weight": weight}


def quantize(kind: str, weight: Tensor) -> dict[str, Tensor]:
    """Quantize a weight to the tensors of `quantized_forms`, piece by piece, which does not change the result."""
    if kind in blocks.QUANTIZERS:
        return {"weight": blocks.quantize(kind, weight)}

    if kind == "int8":
        rows_at_once = max(1, WEIGHTS_AT_ONCE // weight.shape[1])
        pairs = [library().int8_vectorwise_quant(rows)[:2] for rows in weight.split(rows_at_once)]
    else:
        four_bit_pieces = (library().quantize_4bit(piece.float(), blocksize=BLOCK_SIZE, quant_type=kind)
                           for piece in weight.reshape(-1).split(WEIGHTS_AT_ONCE))
        pairs = [(codes.reshape(-1), state.absmax) for codes, state in four_bit_pieces]

    weights, scales = zip(*pairs)
    return {"scale": torch.cat(scales), "weight": torch.cat(weights)}


def can_be_quantized(kind: str, shape: tuple[int, ...]) -> bool:
    """Return whether a weight `[out, in]` can be quantized to a kind: blocks consist of whole groups of inputs."""
    return kind not in blocks.QUANTIZERS or shape[1] % blocks.GROUP == 0


def rounded(kind: str, weight: Tensor) -> Tensor:
    """Return the weights that the blocks of this kind stand for, in float32; unchanged if they fill no blocks."""
    if not can_be_quantized(kind, tuple(weight.shape)):
        return weight
    return blocks.unfold(blocks.quantize(kind, weight))


class Recast(Mapping[str, Tensor]):
    """A mapping of a rank's tensors, read from a checkpoint, renamed, and quantized to `kind`.

    `names` maps the rank's names to the checkpoint's. `forms` are known at once; a tensor is read when it is requested,
    and only the last one is kept, so use `order`, in which a weight and its scale are adjacent. Blocks are unfolded,
    unless `keeps_blocks`. With `must_be_finite`, tensors with NaN or infinity raise ValueError.
    """

    def __init__(self, source: Checkpoint, names: Mapping[str, str], kind: str = "none",
                 keeps_blocks: bool = False, must_be_finite: bool = False) -> None:
        self.source, self.names, self.kind = source, names, kind
        self.keeps_blocks, self.must_be_finite = keeps_blocks, must_be_finite
        self.forms: dict[str, TensorForm] = {}
        self._old_names: dict[str, str] = {}  # by the name of each tensor that is made
        self._last_read: tuple[str, dict[str, Tensor]] = "", {}
        for name in names:
            new_forms = self._new_forms(name)
            self.forms.update(new_forms)
            self._old_names.update(dict.fromkeys(new_forms, name))

    def _new_forms(self, name: str) -> dict[str, TensorForm]:
        name_in_file = self.names[name]
        form = self.source.form(name_in_file)
        if not self._is_quantized(name):
            return {name: self.source.stored_form(name_in_file) if self.keeps_blocks else form}
        if self._is_rounded:
            return {name: form}
        return _with_full_names(name, quantized_forms(self.kind, form.shape))

    def _is_quantized(self, name: str) -> bool:
        is_linear_weight = self.kind != "none" and LINEAR_WEIGHT.search(name) is not None
        return is_linear_weight and can_be_quantized(self.kind, self.source.form(self.names[name]).shape)

    @property
    def _is_rounded(self) -> bool:
        """Whether weights are quantized to blocks, and unfolded at once."""
        return self.kind in blocks.QUANTIZERS and not self.keeps_blocks

    @property
    def order(self) -> list[str]:
        """All names in the order of writing: wide types first, so that tensors are aligned, then as the checkpoint."""
        source_index = {name: index for index, name in enumerate(self.source.names())}

        def sort_key(name: str) -> tuple[int, int]:
            max_width = max(form.width for form in self._new_forms(name).values())
            return -max_width, source_index[self.names[name]]

        return [new_name for name in sorted(self.names, key=sort_key) for new_name in self._new_forms(name)]

    def __getitem__(self, new_name: str) -> Tensor:
        name = self._old_names[new_name]
        if self._last_read[0] != name:
            self._last_read = "", {}  # frees the last tensors first
            self._last_read = name, self._new_tensors(name)
        return self._last_read[1][new_name]

    def _new_tensors(self, name: str) -> dict[str, Tensor]:
        name_in_file, is_quantized = self.names[name], self._is_quantized(name)
        if self.keeps_blocks and not is_quantized:
            if self.must_be_finite:
                self.source.read_finite(name_in_file)  # the numbers in blocks show only when they are unfolded
            return {name: self.source.read_stored(name_in_file)}

        read = self.source.read_finite if self.must_be_finite else self.source.read
        tensor = read(name_in_file)
        if not is_quantized:
            return {name: tensor}
        if self._is_rounded:
            return {name: rounded(self.kind, tensor)}
        return _with_full_names(name, quantize(self.kind, tensor))

    def map_stored(self, name: str) -> Tensor:
        """Return a tensor in its stored form, mapped from its file if possible."""
        return self.source.map_stored(self.names[name])

    def __contains__(self, name: object) -> bool:
        return name in self._old_names  # a mapping's own rule reads the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._old_names)

    def __len__(self) -> int:
        return len(self._old_names)


def _with_full_names(weight_name: str, values: Mapping[str, T]) -> dict[str, T]:
    """Return the values of a quantized weight's tensors under full names, such as `a.scale` and `a.weight`."""
    owner_path = weight_name.rpartition(".")[0]
    return {f"{owner_path}.{name}": value for name, value in values.items()}


def quantized_tensors(weight_name: str, kind: str, weight: Tensor) -> dict[str, Tensor]:
    """Quantize a weight, and return its tensors under full names."""
    return _with_full_names(weight_name, quantize(kind, weight.cpu()))
