"""A model's checkpoint as the decoder wants it: LLaMA's names, and a tensor for each product, whatever the file has.

Fused products are cut and rows put into another order as they are read, a tensor at a time.
"""
from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import Callable, Iterator, NamedTuple, Sequence, Tuple

from torch import Tensor

from model.llama import LlamaConfig
from model.weights.checkpoint import Checkpoint, Form

BUFFER = re.compile(r"rotary_emb\.inv_freq$|decoder\.version$")  # computed again where needed
WRAPPED = (  # names of the text's part in a model that also sees
    (r"^language_model\.lm_head\.", "lm_head."), (r"^(model\.)?language_model\.(model\.)?", "model."))
SEEING = re.compile(r"^(model\.)?(vision_tower|vision_model|visual|multi_modal_projector)\.")
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
PART = re.compile(r"\.(self_attn|mlp)\.(\w+)\.(weight|bias)$")
Make = Callable[[Sequence[Tensor]], Tensor]
Piece = Tuple[str, "View"]


class View(NamedTuple):
    """A tensor as the decoder wants it: its form, the names of what it is made of in the file, and how."""

    form: Form
    theirs: tuple[str, ...]
    make: Make = lambda read: read[0]


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
        for theirs in self._place:
            if BUFFER.search(theirs) or SEEING.search(theirs):
                continue
            name = theirs
            for pattern, ours in (*WRAPPED, *c.family.names):
                name = re.sub(pattern, ours, name)
            whole = View(self._place[theirs][0], (theirs,))
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
        read = [Checkpoint.read(self, theirs) for theirs in view.theirs]
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
        yield name.replace(part[2], own), View(form, view.theirs, _rows(begin, size))
        begin += size


def _rows(begin: int, size: int) -> Make:
    return lambda read: read[0].narrow(0, begin, size)


def _turned(c: LlamaConfig, pieces: Iterator[Piece]) -> Iterator[Piece]:
    """Queries and keys with the two dimensions that rotate together half a head apart, as the decoder has them."""
    for name, view in pieces:
        part = PART.search(name)
        if c.family.neighbours and part and part[2] in ("q_proj", "k_proj"):
            view = View(view.form, view.theirs, _apart(c, view.make))
        yield name, view


def _apart(c: LlamaConfig, make: Make) -> Make:
    size = int(c.head_dim * c.turned)
    order = [*range(0, size, 2), *range(1, size, 2)]
    order += range(size, c.head_dim)

    def made(read: Sequence[Tensor]) -> Tensor:
        heads = make(read).unflatten(0, (-1, c.head_dim))
        return heads[:, order].flatten(0, 1)

    return made
