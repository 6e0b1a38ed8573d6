"""Sharded layers compute what whole ones do, for every family, number of members and rows; and how they are shared."""
from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable

import pytest
import torch
from torch import Tensor

from config.schema.families import FAMILIES
from model.llama import LlamaConfig, Scales, Slice, fill
from tests.tiny import CONFIG, in_threads, weights
from tp.comm import Comm, Galaxy
from tp.group import Table, ThreadGroup
from tp.layers import ShardedSlice, empty_slice
from tp.shares import ranges, shares

SHARDED = [name for name, family in FAMILIES.items() if not (family.wide_norms or family.output_gate)]
COMMS: dict[str, Callable[[Any], Any]] = {
    "tp": lambda group: Comm(group, CONFIG.hidden),
    "galaxy": lambda group: Galaxy(group, CONFIG.hidden, tile=0)}


def config(family: str, **sizes: int) -> LlamaConfig:
    kind = FAMILIES[family]
    sparse = {"experts": 5, "chosen": 2} if kind.experts else {}
    scales = Scales(clamp=7.0) if kind.clamped else Scales()
    return replace(CONFIG, family=kind, layers=2, scales=scales, **sparse, **sizes)


class Twins:
    """A slice whole and the same slice sharded over threads; each call is one segment."""

    def __init__(self, c: LlamaConfig, comm: str, speeds: list[float]) -> None:
        self.c, self.table = c, Table(len(speeds))
        self.tensors = weights(Slice(c, 0, c.layers), seed=1)
        for name, x in self.tensors.items():
            if name.endswith("bias") or "norm" in name:
                x += torch.randn(x.shape,
                                 generator=torch.Generator().manual_seed(len(name)), dtype=x.dtype) / 4
        self.whole, self.cache = Slice(c, 0, c.layers), c.cache(c.layers, 64, torch.empty(0, dtype=torch.float64))
        fill(self.whole, self.tensors, torch.float64, "cpu")
        self.members, self.caches = [], []
        for member, share in enumerate(shares(c, speeds)):
            part = empty_slice(c, share, 0, c.layers)
            cuts = {name: share.cut(name, c.head_dim) for name in self.tensors}
            fill(part, {name: cut(self.tensors[name])
                        for name, cut in cuts.items() if cut},
                 torch.float64, "cpu")
            self.members.append(ShardedSlice(part, COMMS[comm](ThreadGroup(self.table, member))))
            self.caches.append(share.sizes(c).cache(c.layers,
                                                    64, torch.empty(0, dtype=torch.float64)))

    def feed(self, nodes: list[int]) -> None:
        """The next rows of a chain through both; all members must answer what the whole slice does."""
        tokens = torch.tensor([node % self.c.vocab for node in nodes])
        pos = torch.tensor(nodes)
        for cache in (self.cache, *self.caches):
            cache.admit(nodes, [node - 1 for node in nodes], text=len(nodes))
        kept: dict[int, Tensor] = {0: tokens, 1: tokens}
        wanted = self.whole(tokens, pos, self.cache, kept)
        answers: dict[int, tuple[Tensor, dict[int, Tensor]]] = {}

        def compute(member: int) -> None:
            inner: dict[int, Tensor] = {0: tokens, 1: tokens}
            answers[member] = self.members[member](tokens, pos, self.caches[member], inner), inner

        with in_threads(compute, zip(range(len(self.members)))):
            pass
        for out, inner in answers.values():
            assert torch.equal(out, answers[0][0]), "all members hold the same bits"
            torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)
            for number in (0, 1):
                torch.testing.assert_close(inner[number], kept[number], rtol=0, atol=1e-12)
        assert len(answers) == len(self.members)


@pytest.mark.parametrize("family, comm, members", [("llama", "tp", 1), ("opt", "galaxy", 1), *(
    (family, comm, members) for number, family in enumerate(SHARDED)
    for comm, members in (("tp", 2 + number % 3), ("galaxy", 4 - number % 3)))])
def test_a_sharded_slice_is_the_whole_one_for_any_number_of_rows(family, comm, members):
    twins = Twins(config(family), comm, [1.0] * members)
    start = 0
    for rows in (8, 7, 1, 2, 6):  # multiples of the number of members and not, and fewer than members
        twins.feed(list(range(start, start + rows)))
        start += rows


@pytest.mark.parametrize("heads, kv_heads, columns, speeds", [
    (4, 1, 48, [1, 1, 1]),  # fewer key/value heads than members
    (6, 2, 7, [1, 1, 1, 1]),  # query heads of one member that belong to two
    (2, 2, 3, [1, 1, 1, 1]),  # members without heads, and one without columns
    (8, 4, 50, [2, 1, 1]),  # a device that is twice as fast
    (8, 8, 50, [5, 1, 1, 1]),
    (1, 1, 1, [1, 1, 1]),  # one member has all there is of a block
])
@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("family", ["qwen3", "opt"])
def test_whatever_does_not_divide_evenly_is_shared_unevenly(family, comm, heads, kv_heads, columns, speeds):
    twins = Twins(config(family, heads=heads, kv_heads=kv_heads, intermediate=columns), comm, speeds)
    twins.feed([0, 1, 2, 3, 4])
    twins.feed([5])


@pytest.mark.parametrize("heads", range(1, 17))
def test_every_head_and_column_has_one_owner_and_its_own_key_value_head(heads):
    for kv_heads in (n for n in range(1, heads + 1) if heads % n == 0):
        for speeds in ([1], [1, 1],
                       [1, 1, 1], [3, 1, 1, 2.5]):
            held = shares(config("llama", heads=heads, kv_heads=kv_heads, intermediate=11), speeds)
            assert [h for s in held for h in range(*s.heads)] == list(range(heads))
            assert [i for s in held for i in range(*s.columns)] == list(range(11))
            assert [sum(share.biased[block] for share in held) for block in (0, 1)] == [1, 1]
            for share in held:
                mine = list(range(*share.heads))
                run = len(mine) // max(1, len(share.kv))
                assert [share.kv[i // run] for i in range(len(mine))] == [h * kv_heads // heads for h in mine]


@pytest.mark.parametrize("heads, kv_heads, speeds, expected", [
    (32, 8, [1] * 4, [(8, 2)] * 4),  # whole groups
    (32, 8, [1] * 3,
     [(12, 3), (8, 2), (12, 3)]),  # whole groups too: cutting them would repeat key/value heads
    (8, 1, [1] * 4, [(2, 1)] * 4),
    (8, 2, [1] * 4, [(2, 1)] * 4),
    (4, 4, [2, 1, 1],
     [(2, 2), (1, 1), (1, 1)]),
])
def test_heads_that_share_keys_stay_together_where_that_is_the_least_work(heads, kv_heads, speeds, expected):
    held = shares(config("llama", heads=heads, kv_heads=kv_heads), speeds)
    assert [(share.heads[1] - share.heads[0], len(share.kv))
            for share in held] == expected


def test_ranges_are_as_long_as_the_weights_say_to_within_one():
    assert ranges(10, [1, 1, 1, 1]) == [(0, 3),
                                        (3, 5), (5, 8), (8, 10)]
    assert ranges(2, [1, 1, 1, 1]) == [(0, 1),
                                       (1, 1), (1, 2), (2, 2)]
    assert ranges(100, [2, 1, 1]) == [(0, 50),
                                      (50, 75), (75, 100)]
    assert ranges(0, [1, 2]) == [(0, 0), (0, 0)]


def test_a_segment_with_few_rows_for_a_member_is_summed_whole():
    class Silent(ThreadGroup):
        calls: list[str] = []

        def all_reduce(self, x: Tensor) -> None:
            self.calls.append("sum")

        def send(self, x: Tensor) -> Any:
            self.calls.append("tile")
            return lambda: None

        recv = send

    comm = Galaxy(Silent(Table(2), 0), 3, tile=4)
    for rows, expected in ((7, ["sum"]), (8, ["tile", "tile"])):
        Silent.calls.clear()
        comm.open(rows, 0)
        assert len(comm.leave_block(torch.ones(rows, 2), torch.nn.Linear(2, 3))) == (7 if rows < 8 else 4)
        assert Silent.calls == expected
