"""Shares: the heads and columns of every layer that a member of a group holds, and the cuts of tensors to them.

They know nothing about communication. Heads and columns need not divide evenly: a member may hold one head more than
another, or none. A range [a, b) of heads, columns or elements is a `Span`.
"""
from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Mapping, Sequence, Tuple

import torch
from torch import Tensor

from model.llama import LlamaConfig
from model.weights.checkpoint import Checkpoint, TensorForm
from model.weights.parts import HEAD

PRODUCT = re.compile(r"\.(self_attn|mlp)\.(?:experts\.\d+\.)?(\w+)\.(weight|bias)$")  # or a norm per head
ALIGNED = 64  # columns per block of a cut, if there are many, for kernels and quantized weights
Span = Tuple[int, int]
Heads = Tuple[Span, Tuple[int, ...]]  # query heads of one member, and their key/value heads


@dataclass(frozen=True)
class Share:
    """A member's part of every layer: some query heads, their key/value heads, and MLP columns.

    Grouped-query attention divides the query heads into runs of equal length: run i uses the key/value head `kv[i]`. So
    several members may hold the same key/value head. It is more than once in `kv` if the runs would otherwise differ in
    length.
    """

    heads: Span  # query heads
    kv: tuple[int, ...]
    columns: Span  # of the MLP
    biased: tuple[bool, bool]  # whether it adds the output bias of attention, and of the MLP: one member adds each

    def sizes(self, c: LlamaConfig) -> LlamaConfig:
        """Return the configuration of a model with only these heads and columns."""
        heads, columns = _length(self.heads), _length(self.columns)
        return replace(c, heads=heads, kv_heads=len(self.kv), intermediate=columns)

    def cut(self, name: str, head_dim: int) -> Cut | None:
        """Return the cut of the model's tensor `name` for this member; None if the member holds nothing of it."""
        if name.endswith(".self_attn.sinks"):
            return Cut(0, (self.heads,)) if _length(self.heads) else None
        product = PRODUCT.search(name)
        if not product:
            return Cut(0)
        block, kind, parameter = product.groups()
        attention = block == "self_attn"
        own = _scaled(self.heads, head_dim) if attention else self.columns
        if not _length(own):
            return None
        if kind in ("q_norm", "k_norm", "router"):
            return Cut(0)
        if kind in ("k_proj", "v_proj"):
            heads = ((head, head + 1) for head in self.kv)
            return Cut(0, tuple(_scaled(head, head_dim) for head in heads))
        if kind not in ("o_proj", "down_proj"):
            return Cut(0, (own,))
        if parameter == "weight":
            return Cut(1, (own,))
        return Cut(0) if self.biased[0 if attention else 1] else None


@dataclass(frozen=True)
class Cut:
    """A cut through one dimension of a tensor: the concatenated `spans`; None means the whole tensor."""

    dim: int
    spans: tuple[Span, ...] | None = None

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a tensor of shape `whole` after the cut."""
        if self.spans is None:
            return tuple(whole)
        left = list(whole)
        left[self.dim] = sum(map(_length, self.spans))
        return tuple(left)

    def __call__(self, x: Tensor) -> Tensor:
        """Cut a tensor; without spans return it unchanged."""
        if self.spans is None:
            return x
        pieces = [x.narrow(self.dim, start, end - start) for start, end in self.spans]
        return torch.cat(pieces, self.dim)

    def put(self, piece: Tensor, whole: Tensor) -> None:
        """Copy a cut piece to its place in the whole tensor."""
        place = 0
        for start, end in self.spans or ():
            span = piece.narrow(self.dim, place, end - start)
            whole.narrow(self.dim, start, end - start).copy_(span)
            place += end - start


def _length(span: Span) -> int:
    start, end = span
    return end - start


def _scaled(span: Span, unit: int) -> Span:
    start, end = span
    return start * unit, end * unit


def ranges(count: int, speeds: Sequence[float]) -> list[Span]:
    """Divide [0, `count`) into consecutive spans, whose lengths are proportional to `speeds` to within one."""
    total, above, ends = sum(speeds), 0.0, [0]
    for speed in speeds:
        above += speed
        ends.append(min(count, math.floor(count * above / total + 0.5)))
    return list(zip(ends, ends[1:]))


def shares(c: LlamaConfig, speeds: Sequence[float]) -> list[Share]:
    """Return the share of every member of a group, in proportion to the members' `speeds`."""
    heads, columns = _split_heads(c, speeds), _split_columns(c.intermediate, speeds)
    attends = _first([own for own, _ in heads])
    computes = _first(columns)
    return [Share(own, kv, span, (member == attends, member == computes))
            for member, ((own, kv), span) in enumerate(zip(heads, columns))]


def _first(spans: Sequence[Span]) -> int:
    """Return the first member with a non-empty span; it adds the bias."""
    return next(member for member, span in enumerate(spans) if _length(span))


def _split_heads(c: LlamaConfig, speeds: Sequence[float]) -> list[Heads]:
    """Return the query and key/value heads of every member.

    Query heads that share a key/value head stay together if that minimizes the time of the slowest member.
    """
    group = c.heads // c.kv_heads

    def split(unit: int) -> list[Heads]:
        spans = [_scaled(span, unit) for span in ranges(c.heads // unit, speeds)]
        return [(span, _kv_heads(span, group)) for span in spans]

    def slowest(plan: list[Heads]) -> float:
        loads = [_length(span) + len(kv) for span, kv in plan]
        return max(load / speed for load, speed in zip(loads, speeds))

    units = [unit for unit in range(group, 0, -1) if group % unit == 0]
    return min(map(split, units), key=slowest)


def _kv_heads(span: Span, group: int) -> tuple[int, ...]:
    """Return the key/value heads of a span of query heads, one per run of equal length; `group` heads share one."""
    needed = [head // group for head in range(*span)]
    runs = Counter(needed).values()
    length = reduce(math.gcd, runs, 0)
    return tuple(needed[::length]) if length else ()


def _split_columns(count: int, speeds: Sequence[float]) -> list[Span]:
    """Return the MLP columns of every member, in blocks of `ALIGNED` if each member gets several blocks."""
    unit = ALIGNED if count >= 8 * ALIGNED * len(speeds) else 1
    blocks = ranges(math.ceil(count / unit), speeds)
    spans = [_scaled(block, unit) for block in blocks]
    return [(min(start, count), min(end, count)) for start, end in spans]  # the last block may be cut short


def held(names: Mapping[str, str], c: LlamaConfig,
         speeds: Sequence[float], member: int) -> dict[str, str]:
    """Return the tensors of a stage of which a member holds a part: name in the stage -> name in the checkpoint.

    Only the first member has the LM head, which is not sharded.
    """
    share = shares(c, speeds)[member]
    own = [name for name in names if share.cut(name, c.head_dim)]
    return {name: names[name] for name in own if name != HEAD or member == 0}


class ShardedSource(Checkpoint):
    """A checkpoint with every tensor cut to the share of one member."""

    def __init__(self, whole: Checkpoint, speeds: Sequence[float], member: int) -> None:
        self._whole, self.config = whole, whole.config
        self._sizes = LlamaConfig.read(whole.config)
        self._share = shares(self._sizes, speeds)[member]

    def _cut(self, name: str) -> Cut:
        cut = self._share.cut(name, self._sizes.head_dim)
        assert cut, f"this member holds no part of {name}"
        return cut

    def form(self, name: str) -> TensorForm:
        whole = self._whole.form(name)
        return TensorForm(whole.dtype, self._cut(name).shape(whole.shape))

    def stored_form(self, name: str) -> TensorForm:
        return self.form(name)

    def names(self) -> list[str]:
        return self._whole.names()

    def place(self, name: str) -> Path:
        return self._whole.place(name)

    def read(self, name: str) -> Tensor:
        return self._cut(name)(self._whole.read(name)).contiguous()

    def read_stored(self, name: str) -> Tensor:
        return self.read(name)


class Joined(Checkpoint):
    """The tensors of a stage, joined from the checkpoints of the members of its group."""

    def __init__(self, members: Sequence[Checkpoint], c: LlamaConfig, speeds: Sequence[float]) -> None:
        vars(self).update(vars(members[0]))  # takes over the tables of the first member
        self._members = members
        self._head_dim = c.head_dim
        self._shares = shares(c, speeds)

    def names(self) -> list[str]:
        return list(dict.fromkeys(name for member in self._members for name in member.names()))

    def form(self, name: str) -> TensorForm:
        whole = self.read(name)
        return TensorForm(whole.dtype, tuple(whole.shape))

    def read(self, name: str) -> Tensor:
        pieces: list[tuple[Cut, Tensor]] = []
        for source, share in zip(self._members, self._shares):
            cut = share.cut(name, self._head_dim)
            if cut and name in source.names():
                pieces.append((cut, source.read(name)))
        first, piece = pieces[0]
        if first.spans is None:
            return piece
        shape = list(piece.shape)
        shape[first.dim] = max(end for cut, _ in pieces for _, end in cut.spans or ())
        whole = piece.new_empty(shape)
        for cut, piece in pieces:
            cut.put(piece, whole)
        return whole
