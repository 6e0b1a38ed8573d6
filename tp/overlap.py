"""Galaxy's tiles: rows that go round a ring of members while other rows are multiplied (arXiv 2405.17245).

It knows nothing about layers. A tile is the rows of one member. `bounds` are the ranges of rows of all members; they
may differ in length or be empty.
"""
from __future__ import annotations

from typing import Callable, Sequence

import torch
from torch import Tensor

from tp.group import Group, Wait

Bounds = Sequence["tuple[int, int]"]
Product = Callable[[Tensor], Tensor]


def gather(group: Group, own_tD: Tensor, bounds: Bounds, products: Sequence[Product]) -> list[Tensor]:
    """Return each product of all rows `[T, D]`, given this member's own rows `[t, D]` (all-gather).

    A tile is multiplied while it is sent on and the next one arrives.
    """
    found: list[list[Tensor]] = [[own_tD] * group.size for _ in products]
    in_hand, last = own_tD, group.size - 1
    for step in range(group.size):
        tile, waits = (group.member - step) % group.size, []
        if step < last:
            a, b = bounds[tile - 1]
            coming = own_tD.new_empty(b - a, own_tD.shape[1])
            waits = [group.send(in_hand), group.recv(coming)]
        for product, tiles in zip(products, found):
            tiles[tile] = product(in_hand)
        for wait in waits:
            wait()
        if step < last:
            in_hand = coming
    return [torch.cat(tiles) for tiles in found]


def reduce(group: Group, x_TN: Tensor, bounds: Bounds, product: Product, width: int) -> Tensor:
    """Return this member's rows `[t, width]` of the products of all rows, summed over members (reduce-scatter).

    The sum of a tile goes once round the ring and ends at its owner; while it arrives, the next summand is computed.
    """
    waits: list[Wait] = []
    for step in range(group.size):
        a, b = bounds[(group.member - 1 - step) % group.size]
        if step:
            coming = x_TN.new_empty(b - a, width)
            waits.append(group.recv(coming))
        sums = product(x_TN[a:b])
        for wait in waits:
            wait()
        if step:
            sums += coming
        waits = [group.send(sums)] if step < group.size - 1 else []
    return sums
