"""A model's checkpoint in the decoder's form: LLaMA's names, and a tensor for each linear layer.

Fused layers are split, rows reordered and quantized weights unfolded while they are read, a tensor at a time.
"""
from __future__ import annotations

import math
import re
from functools import cached_property
from pathlib import Path
from typing import Iterator, Mapping, NamedTuple, Sequence, Tuple

import torch
from torch import Tensor

from model.llama import LlamaConfig
from model.weights.checkpoint import Checkpoint, TensorForm
from model.weights.packed import COMPANIONS, Make, check_method, mxfp4, packed

BUFFER = re.compile(r"rotary_emb\.inv_freq$|decoder\.version$")  # not weights: recomputed where needed
WRAPPED = (  # names of the text's part of a multimodal model
    (r"^language_model\.lm_head\.", "lm_head."), (r"^(model\.)?language_model\.(model\.)?", "model."))
SEEING = re.compile(r"^(model\.)?(vision_tower|vision_model|visual|multi_modal_projector)\.")
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
AHEAD = re.compile(r"^model\.mtp_layers\.(\d+)\.")  # layers for multi-token prediction, which are a draft head
PART = re.compile(r"\.(self_attn|mlp)\.(\w+)\.(weight|bias)$")
TURNED = re.compile(r"\.[qk]_proj\.(weight|bias)$")
PACKED = re.compile(r"\.(qweight|weight_packed)$")
TOGETHER = re.compile(r"\.mlp\.experts\.(gate_up_proj|down_proj)(_bias|_blocks|_scales)?$")  # of all experts in one
Piece = Tuple[str, "View"]


def as_read(read: Sequence[Tensor]) -> Tensor:
    """Return the file's tensor unchanged."""
    return read[0]


class View(NamedTuple):
    """A tensor of the decoder: its form, the file's tensors from which it is made, and the conversion."""

    form: TensorForm
    theirs: tuple[str, ...]
    make: Make = as_read
    span: tuple[int, int] | None = None  # the rows of the file's tensors to read; None: all


class Unfolded(Checkpoint):
    """The checkpoint of a model of any family, with the decoder's names, forms and data."""

    @cached_property
    def _views(self) -> dict[str, View]:
        """The views by the decoder's names, in the files' order. Raises ValueError for an unsupported config."""
        try:
            c = LlamaConfig.read(self.config)
            check_method(self.config)
        except ValueError as error:
            raise ValueError(f"{self.folder}: {error}") from None
        found: dict[str, View] = {}
        forms = {name: location.form for name, location in self._locations.items()}
        quantized = bool(self.config.get("quantization_config"))
        for theirs in self._locations:
            beside = BUFFER.search(theirs) or SEEING.search(theirs) or AHEAD.search(theirs)
            if beside or quantized and theirs.endswith(COMPANIONS):
                continue
            name = theirs
            for pattern, ours in (*WRAPPED, *c.family.names):
                name = re.sub(pattern, ours, name)
            together = TOGETHER.search(name)
            if together:
                found.update(_experts(name, together[1], forms))
            else:
                whole = self._whole(theirs, forms) if quantized else View(forms[theirs], (theirs,))
                name = PACKED.sub(".weight", name)
                found.update(_cut(c, name, whole))
        for name, view in found.items() if c.family.neighbours else ():
            if TURNED.search(name):
                found[name] = view._replace(make=_apart(c, view.make))
        return found

    def _whole(self, theirs: str, forms: Mapping[str, TensorForm]) -> View:
        """Return the view of a tensor that may be quantized."""
        try:
            made = packed(theirs, forms, self.config)
            lacking = [name for name in made[1] if name not in forms] if made else []
        except KeyError as error:
            lacking = [error.args[0]]
        if lacking:
            raise ValueError(f"{self.folder} lacks {lacking[0]}, which {theirs} needs; download the model again")
        return View(*made) if made else View(forms[theirs], (theirs,))

    def names(self) -> list[str]:
        return list(self._views)

    def form(self, name: str) -> TensorForm:
        return self._views[name].form

    def stored_form(self, name: str) -> TensorForm:
        view = self._views[name]
        if view.make is not as_read:
            return view.form
        stored = super().stored_form(view.theirs[0])
        return TensorForm(stored.dtype, (view.form.shape[0], *stored.shape[1:]))

    def tensor_path(self, name: str) -> Path:
        return super().tensor_path(self._views[name].theirs[0])

    def read(self, name: str) -> Tensor:
        view = self._views[name]
        read = [self.rows(theirs, view.span) for theirs in view.theirs]
        return view.make(read).contiguous()

    def read_stored(self, name: str) -> Tensor:
        view = self._views[name]
        return self.stored_rows(view.theirs[0], view.span) if view.make is as_read else self.read(name)


def _cut(c: LlamaConfig, name: str, view: View) -> Iterator[Piece]:
    """Yield the parts of a fused linear layer, or any other tensor unchanged."""
    part = PART.search(name)
    fused = part[2] if part else ""
    sizes = [c.intermediate, c.intermediate]
    if fused == "qkv_proj":
        sizes = [heads * c.head_dim for heads in (c.heads, c.kv_heads, c.kv_heads)]
    dtype, shape = view.form.dtype, view.form.shape
    if fused not in FUSED or sum(sizes) != shape[0]:  # a wrong size is reported when shapes are compared
        yield name, view
        return
    begin, whole = 0, view
    for own, size in zip(FUSED[fused], sizes):
        form = TensorForm(dtype, (size, *shape[1:]))
        if len(view.theirs) == 1:
            view = View(form, view.theirs, span=(begin, begin + size))
        else:
            view = View(form, view.theirs, _rows(whole.make, begin, size))
        yield name.replace(fused, own), view
        begin += size


def _rows(make: Make, begin: int, size: int) -> Make:
    return lambda read: make(read).narrow(0, begin, size)


def _apart(c: LlamaConfig, make: Make) -> Make:
    """Reorder queries or keys so that two dimensions that rotate together are half a head apart, as in the decoder."""
    size = int(c.head_dim * c.rotated_share)
    order = [*range(0, size, 2), *range(1, size, 2)]
    order += range(size, c.head_dim)

    def made(read: Sequence[Tensor]) -> Tensor:
        heads = make(read).unflatten(0, (-1, c.head_dim))
        return heads[:, order].flatten(0, 1)

    return made


# --- experts in one tensor, as GPT-OSS has them -----------------------------------------------------------------------

def _experts(name: str, product: str, forms: Mapping[str, TensorForm]) -> Iterator[Piece]:
    """Yield the weights or biases of each expert separately; gate and up alternate in the fused rows."""
    if name.endswith("_scales"):  # which are read together with their blocks
        return
    kind = "bias" if name.endswith("_bias") else "weight"
    theirs: tuple[str, ...] = (name,)
    dtype, (experts, *shape) = forms[name].dtype, forms[name].shape
    if name.endswith("_blocks"):
        dtype, theirs = torch.bfloat16, (name, name[:-len("blocks")] + "scales")
        shape = [shape[0], math.prod(shape[1:]) * 2]
    elif kind == "weight":
        shape = shape[::-1]
    own = [("gate_proj", 0, 2), ("up_proj", 1, 2)]  # name, first row, step from row to row
    if product == "down_proj":
        own = [(product, 0, 1)]
    before = name[:name.index(product)]
    for number in range(experts):
        for which, first, step in own:
            make = _one(first, step, kind == "weight")
            form = TensorForm(dtype, (shape[0] // step, *shape[1:]))
            view = View(form, theirs, make, (number, number + 1))
            yield f"{before}{number}.{which}.{kind}", view


def _one(first: int, step: int, is_weight: bool) -> Make:
    def made(read: Sequence[Tensor]) -> Tensor:
        if len(read) == 2:
            return mxfp4(read[0][0], read[1][0])[first::step]
        whole = read[0][0].t() if is_weight else read[0][0]
        return whole[first::step]

    return made
