"""Quantized weights: which tensors they have, and a rank's tensors read from a checkpoint, quantized to a kind.

Each weight is quantized separately, from the checkpoint's type, on the CPU. So a split with quantized weights and a
split that is quantized while loading give the same numbers. bitsandbytes is not imported before something is quantized.
"""
from __future__ import annotations

import logging
import math
import re
from typing import Any, Iterator, Mapping, TypeVar

import torch
from torch import Tensor

from model.weights import int4
from model.weights.checkpoint import Checkpoint, TensorForm

T = TypeVar("T")
KINDS = ("int8", "int4", "nf4", "fp4")
STORED = "stored"  # the kind of weights that are kept as files have them, which may be in blocks
BLOCK_SIZE = 64  # weights that share a scale in nf4 and fp4
WEIGHTS_AT_ONCE = 1 << 22  # that are quantized, to bound memory; whole blocks
LINEAR_WEIGHT = re.compile(r"layers\.\d+\.(self_attn|mlp)\.(experts\.\d+\.)?\w+_proj\.weight$")  # to quantize


def running_kind(wanted_kind: str, stored_kind: str, folder: Any) -> str:
    """Return the kind of weights that a rank runs; `auto` is that of the split. Raises ValueError if they conflict."""
    if wanted_kind == "auto":
        return stored_kind
    if stored_kind in (wanted_kind, "none"):
        return wanted_kind
    split_option = "without --quant" if wanted_kind == "none" else f"with --quant {wanted_kind}"
    raise ValueError(f"{folder} holds {stored_kind} weights, which cannot be run with quant={wanted_kind}: leave quant "
                     f"out, or split the model again {split_option}")


def library() -> Any:
    """Import bitsandbytes' functions, without its warnings about missing kernels."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import bitsandbytes.functional

    return bitsandbytes.functional


def quantized_forms(kind: str, shape: tuple[int, ...]) -> dict[str, TensorForm]:
    """Return the forms of the tensors of a quantized weight `[out, in]`.

    For int8: numbers of 8 bits, and a scale per row. For int4: see `int4.quantize`. Otherwise: pairs of 4 bits in a
    byte, flat, and a scale per block. Except for int4, a scale is the largest magnitude.
    """
    if kind == "int8":
        scale, weight = TensorForm(torch.float32, shape[:1]), TensorForm(torch.int8, shape)
    elif kind == "int4":
        num_outputs, num_groups = shape[0], int4.groups(shape[1])
        scale = TensorForm(torch.bfloat16, (num_groups, num_outputs, 2))
        weight = TensorForm(torch.uint8, (num_outputs, num_groups * int4.GROUP // 2))
    else:
        num_weights = math.prod(shape)
        scale = TensorForm(torch.float32, (math.ceil(num_weights / BLOCK_SIZE),))
        weight = TensorForm(torch.uint8, (math.ceil(num_weights / 2),))
    return {"scale": scale, "weight": weight}


def quantize(kind: str, weight: Tensor) -> dict[str, Tensor]:
    """Quantize a weight to the tensors of `quantized_forms`, piece by piece, which does not change the result."""
    rows_at_once = max(1, WEIGHTS_AT_ONCE // weight.shape[1])
    if kind == "int8":
        pairs = [library().int8_vectorwise_quant(rows)[:2] for rows in weight.split(rows_at_once)]
    elif kind == "int4":
        pairs = [int4.quantize(rows) for rows in weight.split(rows_at_once)]
    else:
        four_bit_pieces = (library().quantize_4bit(piece.float(), blocksize=BLOCK_SIZE, quant_type=kind)
                           for piece in weight.reshape(-1).split(WEIGHTS_AT_ONCE))
        pairs = [(codes.reshape(-1), state.absmax) for codes, state in four_bit_pieces]

    weights, scales = zip(*pairs)
    return {"scale": torch.cat(scales, 1 if kind == "int4" else 0), "weight": torch.cat(weights)}


class Recast(Mapping[str, Tensor]):
    """A mapping of a rank's tensors, read from a checkpoint, renamed, and quantized to `kind`.

    `names` maps the rank's names to the checkpoint's. `forms` are known at once; a tensor is read when it is requested,
    and only the last one is kept, so use `order`, in which a weight and its scale are adjacent. With
    `must_be_finite`, tensors with NaN or infinity raise ValueError.
    """

    def __init__(self, source: Checkpoint, names: Mapping[str, str],
                 kind: str = "none", must_be_finite: bool = False) -> None:
        self.source, self.names = source, names
        self.kind, self.must_be_finite = kind, must_be_finite
        self.forms: dict[str, TensorForm] = {}
        self._old_names: dict[str, str] = {}  # by the name of each tensor that is made
        self._last_read: tuple[str, dict[str, Tensor]] = "", {}
        for name in names:
            new_forms = self._new_forms(name)
            self.forms.update(new_forms)
            self._old_names.update(dict.fromkeys(new_forms, name))

    def _new_forms(self, name: str) -> dict[str, TensorForm]:
        name_in_file = self.names[name]
        if self.kind == STORED:
            return {name: self.source.stored_form(name_in_file)}
        form = self.source.form(name_in_file)
        if self._is_quantized(name):
            return _with_full_names(name, quantized_forms(self.kind, form.shape))
        return {name: form}

    def _is_quantized(self, name: str) -> bool:
        return self.kind in KINDS and LINEAR_WEIGHT.search(name) is not None

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
        name_in_file = self.names[name]
        if self.kind == STORED:
            if self.must_be_finite:
                self.source.read_finite(name_in_file)  # the numbers in blocks show only when they are unfolded
            return {name: self.source.read_stored(name_in_file)}

        read = self.source.read_finite if self.must_be_finite else self.source.read
        tensor = read(name_in_file)
        if self._is_quantized(name):
            return _with_full_names(name, quantize(self.kind, tensor))
        return {name: tensor}

    def map_stored(self, name: str) -> Tensor:
        """Return a tensor in its stored form, mapped from its file if possible."""
        return self.source.map_stored(self.names[name])

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
