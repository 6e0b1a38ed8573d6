"""Shares: the heads and columns of every layer that a member of a group holds, and the cuts of tensors to them.

They know nothing about communication. Heads and columns need not divide evenly: a member may hold one head more than
another, or none. A range [a, b) of heads, columns or elements is a `ElementRange`.
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

PRODUCT_NAME = re.compile(r"\.(self_attn|mlp)\.(?:experts\.\d+\.)?(\w+)\.(weight|bias)$")  # or a norm per head
BLOCK_COLUMNS = 64  # columns per block of a cut, if there are many, for kernels and quantized weights
ElementRange = Tuple[int, int]
Heads = Tuple[ElementRange, Tuple[int, ...]]  # query heads of one member, and their key/value heads


@dataclass(frozen=True)
class Share:
    """A member's part of every layer: some query heads, their key/value heads, and MLP columns.

    Grouped-query attention divides the query heads into runs of equal length: run i uses the key/value head `kv[i]`. So
    several members may hold the same key/value head. It is more than once in `kv` if the runs would otherwise differ in
    length.
    """

    heads: ElementRange  # query heads
    kv: tuple[int, ...]
    columns: ElementRange  # of the MLP
    biased: tuple[bool, bool]  # whether it adds the output bias of attention, and of the MLP: one member adds each

    def sizes(self, c: LlamaConfig) -> LlamaConfig:
        """Return the configuration of a model with only these heads and columns."""
        num_heads, num_columns = _span_length(self.heads), _span_length(self.columns)
        return replace(c, heads=num_heads, kv_heads=len(self.kv), intermediate=num_columns)

    def cut(self, name: str, head_dim: int) -> Cut | None:
        """Return the cut of the model's tensor `name` for this member; None if the member holds nothing of it."""
        if name.endswith(".self_attn.sinks"):
            return Cut(0, (self.heads,)) if _span_length(self.heads) else None
        name_match = PRODUCT_NAME.search(name)
        if not name_match:
            return Cut(0)

        block, module, parameter = name_match.groups()
        in_attention = block == "self_attn"
        member_span = _scaled(self.heads, head_dim) if in_attention else self.columns
        if not _span_length(member_span):
            return None

        if module in ("q_norm", "k_norm", "router"):
            return Cut(0)
        if module in ("k_proj", "v_proj"):
            head_spans = ((head, head + 1) for head in self.kv)
            return Cut(0, tuple(_scaled(head_span, head_dim) for head_span in head_spans))
        if module not in ("o_proj", "down_proj"):
            return Cut(0, (member_span,))

        if parameter == "weight":
            return Cut(1, (member_span,))
        attention_bias, mlp_bias = self.biased
        adds_bias = attention_bias if in_attention else mlp_bias
        return Cut(0) if adds_bias else None


@dataclass(frozen=True)
class Cut:
    """A cut through one dimension of a tensor: the concatenated `spans`; None means the whole tensor."""

    dim: int
    spans: tuple[ElementRange, ...] | None = None

    def shape(self, whole_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a tensor of shape `whole_shape` after the cut."""
        if self.spans is None:
            return tuple(whole_shape)
        cut_shape = list(whole_shape)
        cut_shape[self.dim] = sum(map(_span_length, self.spans))
        return tuple(cut_shape)

    def __call__(self, x: Tensor) -> Tensor:
        """Cut a tensor; without spans return it unchanged."""
        if self.spans is None:
            return x
        pieces = [x.narrow(self.dim, start, end - start) for start, end in self.spans]
        return torch.cat(pieces, self.dim)

    def put(self, piece: Tensor, whole: Tensor) -> None:
        """Copy a cut piece into the whole tensor."""
        piece_start = 0
        for start, end in self.spans or ():
            length = end - start
            whole.narrow(self.dim, start, length).copy_(piece.narrow(self.dim, piece_start, length))
            piece_start += length


def _span_length(span: ElementRange) -> int:
    start, end = span
    return end - start


def _scaled(span: ElementRange, unit: int) -> ElementRange:
    start, end = span
    return start * unit, end * unit


def ranges(count: int, speeds: Sequence[float]) -> list[ElementRange]:
    """Divide [0, `count`) into consecutive spans, whose lengths are proportional to `speeds` to within one."""
    total_speed, speed_so_far = sum(speeds), 0.0
    bounds = [0]
    for speed in speeds:
        speed_so_far += speed
        rounded_bound = math.floor(count * speed_so_far / total_speed + 0.5)
        bounds.append(min(count, rounded_bound))
    return list(zip(bounds, bounds[1:]))


def shares(c: LlamaConfig, speeds: Sequence[float]) -> list[Share]:
    """Return the share of every member of a group, in proportion to the members' `speeds`."""
    member_heads = _split_heads(c, speeds)
    member_columns = _split_columns(c.intermediate, speeds)
    attention_bias_member = _bias_member([query_heads for query_heads, _ in member_heads])
    mlp_bias_member = _bias_member(member_columns)

    member_shares = []
    for member, ((query_heads, kv_heads), columns) in enumerate(zip(member_heads, member_columns)):
        adds_bias = member == attention_bias_member, member == mlp_bias_member
        member_shares.append(Share(query_heads, kv_heads, columns, adds_bias))
    return member_shares


def _bias_member(spans: Sequence[ElementRange]) -> int:
    """Return the member that adds the bias: the first one with a non-empty span."""
    return next(member for member, span in enumerate(spans) if _span_length(span))


def _split_heads(c: LlamaConfig, speeds: Sequence[float]) -> list[Heads]:
    """Return the query and key/value heads of every member.

    Query heads that share a key/value head stay together if that minimizes the time of the slowest member.
    """
    heads_per_kv = c.heads // c.kv_heads

    def split(unit: int) -> list[Heads]:
        """Divide the query heads, in units of `unit` heads."""
        spans = [_scaled(span, unit) for span in ranges(c.heads // unit, speeds)]
        return [(span, _kv_heads(span, heads_per_kv)) for span in spans]

    def slowest_time(member_heads: list[Heads]) -> float:
        head_counts = [_span_length(span) + len(kv_heads) for span, kv_heads in member_heads]
        return max(head_count / speed for head_count, speed in zip(head_counts, speeds))

    units = [unit for unit in range(heads_per_kv, 0, -1) if heads_per_kv % unit == 0]
    return min(map(split, units), key=slowest_time)


def _kv_heads(span: ElementRange, heads_per_kv: int) -> tuple[int, ...]:
    """Return the key/value heads of a span of query heads, one per run of equal length; `heads_per_kv` share one."""
    kv_of_heads = [head // heads_per_kv for head in range(*span)]
    run_lengths = Counter(kv_of_heads).values()
    common_length = reduce(math.gcd, run_lengths, 0)
    return tuple(kv_of_heads[::common_length]) if common_length else ()


def _split_columns(count: int, speeds: Sequence[float]) -> list[ElementRange]:
    """Return the MLP columns of every member, in blocks of `BLOCK_COLUMNS` if each member gets several blocks."""
    has_many = count >= 8 * BLOCK_COLUMNS * len(speeds)
    unit = BLOCK_COLUMNS if has_many else 1
    block_ranges = ranges(math.ceil(count / unit), speeds)
    spans = [_scaled(block_range, unit) for block_range in block_ranges]
    return [(min(start, count), min(end, count)) for start, end in spans]  # the last block may be cut short


def member_tensors(names: Mapping[str, str], c: LlamaConfig,
         speeds: Sequence[float], member: int) -> dict[str, str]:
    """Return the tensors of a stage of which a member holds a part: name in the stage -> name in the checkpoint.

    Only the first member has the LM head, which is not sharded.
    """
    share = shares(c, speeds)[member]
    has_head = member == 0
    shared_names = [name for name in names if share.cut(name, c.head_dim)]
    return {name: names[name] for name in shared_names if name != HEAD or has_head}


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
        whole_form = self._whole.form(name)
        return TensorForm(whole_form.dtype, self._cut(name).shape(whole_form.shape))

    def stored_form(self, name: str) -> TensorForm:
        return self.form(name)

    def names(self) -> list[str]:
        return self._whole.names()

    def tensor_path(self, name: str) -> Path:
        return self._whole.tensor_path(name)

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
        tensor = self.read(name)
        return TensorForm(tensor.dtype, tuple(tensor.shape))

    def read(self, name: str) -> Tensor:
        pieces: list[tuple[Cut, Tensor]] = []
        for source, share in zip(self._members, self._shares):
            cut = share.cut(name, self._head_dim)
            if cut and name in source.names():
                pieces.append((cut, source.read(name)))

        first_cut, first_piece = pieces[0]
        if first_cut.spans is None:
            return first_piece
        whole_shape = list(first_piece.shape)
        whole_shape[first_cut.dim] = max(end for cut, _ in pieces for _, end in cut.spans or ())

        whole = first_piece.new_empty(whole_shape)
        for cut, piece in pieces:
            cut.put(piece, whole)
        return whole
