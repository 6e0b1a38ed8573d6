"""A model's checkpoint as the decoder wants it: LLaMA's names, and a tensor for each product, whatever the file has.

Fused products are cut and rows put into another order as they are read, a tensor at a time.
"""
from __future__ import annotations

import math
import re
from functools import cached_property
from pathlib import Path
from typing import Callable, Iterator, Mapping, NamedTuple, Sequence, Tuple

import torch
from torch import Tensor

from model.llama import LlamaConfig
from model.weights.checkpoint import Checkpoint, Form

BUFFER = re.compile(r"rotary_emb\.inv_freq$|decoder\.version$")  # computed again where needed
WRAPPED = (  # names of the text's part in a model that also sees
    (r"^language_model\.lm_head\.", "lm_head."), (r"^(model\.)?language_model\.(model\.)?", "model."))
SEEING = re.compile(r"^(model\.)?(vision_tower|vision_model|visual|multi_modal_projector)\.")
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
PART = re.compile(r"\.(self_attn|mlp)\.(\w+)\.(weight|bias)$")
TOGETHER = re.compile(r"\.mlp\.experts\.(gate_up_proj|down_proj)(_bias|_blocks|_scales)?$")  # of all experts
FOUR_BITS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # what MXFP4's codes mean; those from 8 on are negative
Make = Callable[[Sequence[Tensor]], Tensor]
Piece = Tuple[str, "View"]


class View(NamedTuple):
    """A tensor as the decoder wants it: its form, the names of what it is made of in the file, and how."""

    form: Form
    theirs: tuple[str, ...]
    make: Make = lambda read: read[0]
    span: tuple[int, int] | None = None  # rows of theirs, in place of all


class Unfolded(Checkpoint):
    """The checkpoint of a model of any family; names, forms and data are the decoder's."""

    @cached_property
    def _views(self) -> dict[str, View]:
        """By the decoder's names, in the order of the files; ValueError for a config that is not supported."""
        try:
            c = LlamaConfig.read(self.config)
        except ValueError as error:
            raise ValueError(f"{self.folder}: {error}") from None
        found: dict[str, View] = {}
        forms = {name: place[0] for name, place in self._place.items()}
        for theirs in self._place:
            if BUFFER.search(theirs) or SEEING.search(theirs):
                continue
            name = theirs
            for pattern, ours in (*WRAPPED, *c.family.names):
                name = re.sub(pattern, ours, name)
            together = TOGETHER.search(name)
            if together:
                found.update(_experts(name, together[1], forms))
            else:
                whole = View(forms[theirs], (theirs,))
                found.update(_turned(c, _cut(c, name, whole)))
        return found

    def names(self) -> list[str]:
        return list(self._views)

    def form(self, name: str) -> Form:
        return self._views[name].form

    def place(self, name: str) -> Path:
        return super().place(self._views[name].theirs[0])

    def read(self, name: str) -> Tensor:
        view = self._views[name]
        read = [self.rows(theirs, view.span) for theirs in view.theirs]
        return view.make(read).contiguous()


def _cut(c: LlamaConfig, name: str, view: View) -> Iterator[Piece]:
    """A fused product as its parts; another tensor as it is."""
    part = PART.search(name)
    if not part or part[2] not in FUSED:
        yield name, view
        return
    sizes = [c.intermediate, c.intermediate]
    if part[2] == "qkv_proj":
        sizes = [heads * c.head_dim for heads in (c.heads, c.kv_heads, c.kv_heads)]
    dtype, shape = view.form.dtype, view.form.shape
    if sum(sizes) != shape[0]:  # which is reported where shapes are compared
        yield name, view
        return
    begin = 0
    for own, size in zip(FUSED[part[2]], sizes):
        form = Form(dtype, (size, *shape[1:]))
        yield name.replace(part[2], own), View(form, view.theirs, span=(begin, begin + size))
        begin += size


def _turned(c: LlamaConfig, pieces: Iterator[Piece]) -> Iterator[Piece]:
    """Queries and keys with the two dimensions that rotate together half a head apart, as the decoder has them."""
    for name, view in pieces:
        part = PART.search(name)
        if c.family.neighbours and part and part[2] in ("q_proj", "k_proj"):
            view = view._replace(make=_apart(c, view.make))
        yield name, view


def _apart(c: LlamaConfig, make: Make) -> Make:
    size = int(c.head_dim * c.turned)
    order = [*range(0, size, 2), *range(1, size, 2)]
    order += range(size, c.head_dim)

    def made(read: Sequence[Tensor]) -> Tensor:
        heads = make(read).unflatten(0, (-1, c.head_dim))
        return heads[:, order].flatten(0, 1)

    return made


# --- experts in one tensor, as GPT-OSS has them -----------------------------------------------------------------------

def _experts(name: str, product: str, forms: Mapping[str, Form]) -> Iterator[Piece]:
    """The weights, or the biases, of each expert by itself; gate and up take turns in what is fused."""
    if name.endswith("_scales"):  # which are read beside their blocks
        return
    kind = "bias" if name.endswith("_bias") else "weight"
    theirs: tuple[str, ...] = (name,)
    dtype, (experts, *shape) = forms[name].dtype, forms[name].shape
    if name.endswith("_blocks"):
        dtype, theirs = torch.bfloat16, (name, name[:-len("blocks")] + "scales")
        shape = [shape[0], math.prod(shape[1:]) * 2]
    elif kind == "weight":
        shape = shape[::-1]
    own = [(product, 0, 1)] if product == "down_proj" else [("gate_proj", 0, 2), ("up_proj", 1, 2)]
    before = name[:name.index(product)]
    for number in range(experts):
        for which, first, step in own:
            make = _one(first, step, kind == "weight")
            form = Form(dtype, (shape[0] // step, *shape[1:]))
            view = View(form, theirs, make, (number, number + 1))
            yield f"{before}{number}.{which}.{kind}", view


def _one(first: int, step: int, is_weight: bool) -> Make:
    def made(read: Sequence[Tensor]) -> Tensor:
        if len(read) == 2:
            return mxfp4(read[0][0], read[1][0])[first::step]
        whole = read[0][0].t() if is_weight else read[0][0]
        return whole[first::step]

    return made


def mxfp4(blocks_OBH: Tensor, scales_OB: Tensor) -> Tensor:
    """Weights `[out, in]` in bfloat16 out of blocks of 32 codes of 4 bits, two in a byte, and a power of 2 for each."""
    values = torch.tensor([*FOUR_BITS, *(-value for value in FOUR_BITS)])
    codes_OBHP = torch.stack((blocks_OBH & 15, blocks_OBH >> 4), -1).long()
    weights = values[codes_OBHP].flatten(2)
    power = scales_OB.int() - 127
    return torch.ldexp(weights, power[..., None]).flatten(1).bfloat16()
