"""Shares: which heads and columns of every layer each member of a group holds, and how a tensor is cut to them.

It knows nothing about how members talk to each other. Nothing has to divide evenly: a member may hold one head more
than another, or none.
"""
from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import reduce
from itertools import groupby
from typing import Mapping, Sequence

import torch
from torch import Tensor

from model.checkpoint import Checkpoint, Form
from model.llama import LlamaConfig
from model.weights import HEAD, translate

PRODUCT = re.compile(r"\.(self_attn|mlp)\.(\w+)\.(weight|bias)$")  # or a norm of each head
ALIGNED = 64  # columns that stay together, if there are many: then kernels, and blocks of quantized weights, stay whole


@dataclass(frozen=True)
class Share:
    """One member's part of every layer; `kv` names a key/value head for each equal run of its query heads.

    A key/value head is held by all members that need it, and twice by one whose query heads cannot be folded evenly.
    """

    heads: tuple[int, int]  # query heads [a, b)
    kv: tuple[int, ...]
    columns: tuple[int, int]  # of the MLP, [a, b)
    biased: tuple[bool, bool]  # whether it adds the bias behind attention, and MLP: one member does

    def sizes(self, c: LlamaConfig) -> LlamaConfig:
        """Those of a model that has this share only."""
        return replace(c, heads=self.heads[1] - self.heads[0], kv_heads=len(self.kv),
                       intermediate=self.columns[1] - self.columns[0])

    def cut(self, name: str, head_dim: int) -> Cut | None:
        """What the member holds of a tensor of the model; None: nothing."""
        product = PRODUCT.search(name)
        if not product:
            return Cut(0)
        block, kind, parameter = product.groups()
        attention, (a, b) = block == "self_attn", self.columns
        if attention:
            a, b = (end * head_dim for end in self.heads)
        if a == b:
            return None
        if kind in ("q_norm", "k_norm"):
            return Cut(0)
        if kind in ("k_proj", "v_proj"):
            return Cut(0, tuple((head * head_dim, (head + 1) * head_dim) for head in self.kv))
        if kind not in ("o_proj", "down_proj"):
            return Cut(0, ((a, b),))
        if parameter == "weight":
            return Cut(1, ((a, b),))
        return Cut(0) if self.biased[0 if attention else 1] else None


@dataclass(frozen=True)
class Cut:
    """These spans of a dimension, one after another; all of it if there are none given."""

    dim: int
    spans: tuple[tuple[int, int], ...] | None = None

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """What is left of a shape."""
        if self.spans is None:
            return tuple(whole)
        return (*whole[:self.dim], sum(b - a for a, b in self.spans), *whole[self.dim + 1:])

    def __call__(self, x: Tensor) -> Tensor:
        if self.spans is None:
            return x
        return torch.cat([x.narrow(self.dim, a, b - a) for a, b in self.spans] or [x.narrow(self.dim, 0, 0)], self.dim)


def ranges(count: int, weights: Sequence[float]) -> list[tuple[int, int]]:
    """[0, `count`) in ranges that follow one another, as long as the weights say to within one."""
    total, above, ends = sum(weights), 0.0, [0]
    for weight in weights:
        above += weight
        ends.append(min(count, math.floor(count * above / total + 0.5)))
    return list(zip(ends, ends[1:]))


def shares(c: LlamaConfig, weights: Sequence[float]) -> list[Share]:
    """The share of every member of a group, whose speeds are as `weights`.

    The query heads that share a key/value head stay together as far as that keeps the slowest member's work smallest.
    """
    group = c.heads // c.kv_heads
    plans = [[_heads(a * unit, b * unit, group) for a, b in ranges(c.heads // unit, weights)]
             for unit in range(group, 0, -1) if group % unit == 0]
    best = min(plans, key=lambda plan: max((b - a + len(kv)) / weight for ((a, b), kv), weight in zip(plan, weights)))
    unit = ALIGNED if c.intermediate >= 8 * ALIGNED * len(weights) else 1
    columns = [(a * unit, min(b * unit, c.intermediate)) for a, b in ranges(-(-c.intermediate // unit), weights)]
    first = [next(member for member, (a, b) in enumerate(spans) if a < b)
             for spans in ([heads for heads, _ in best], columns)]
    return [Share(*held, span, (member == first[0], member == first[1]))
            for member, (held, span) in enumerate(zip(best, columns))]


def _heads(a: int, b: int, group: int) -> tuple[tuple[int, int], tuple[int, ...]]:
    """Query heads [a, b), and their key/value heads: one for each run of equal length."""
    runs = [len(list(run)) for _, run in groupby(range(a, b), lambda head: head // group)]
    run = reduce(math.gcd, runs, 0)
    return (a, b), tuple(head // group for head in range(a, b, run)) if run else ()


def held(names: Mapping[str, str], c: LlamaConfig, weights: Sequence[float], member: int) -> dict[str, str]:
    """Of a stage's tensors, name there -> name in the checkpoint, those of which a member holds something."""
    share = shares(c, weights)[member]
    return {name: theirs for name, theirs in names.items()
            if share.cut(name, c.head_dim) and (name != HEAD or not member)}


class ShardedSource(Checkpoint):
    """A checkpoint as one member of a group sees it: every tensor cut to its share, in the order of the whole."""

    def __init__(self, whole: Checkpoint, weights: Sequence[float], member: int) -> None:
        vars(self).update(vars(whole))  # its tables; nothing is read again
        self._sizes = LlamaConfig.read(whole.config)
        self._share = shares(self._sizes, weights)[member]

    def _cut(self, name: str) -> Cut:
        cut = self._share.cut(translate(name), self._sizes.head_dim)
        assert cut, f"{name} is another member's"
        return cut

    def form(self, name: str) -> Form:
        whole = super().form(name)
        return Form(whole.dtype, self._cut(name).shape(whole.shape))

    def read(self, name: str) -> Tensor:
        return self._cut(name)(super().read(name)).contiguous()
