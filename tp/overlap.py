"""Galaxy's tiles: rows that go round a ring of members while other rows are multiplied (arXiv 2405.17245).

It knows nothing about layers. A tile is the rows of one member. `row_ranges` are those of all members; they may differ
in length or be empty.
"""
from __future__ import annotations

from typing import Sequence

import torch
from torch import Tensor

from model.plain_layers import Product
from tp.group import Group, Wait

RowRanges = Sequence["tuple[int, int]"]


def gather(group: Group, x_tD: Tensor, row_ranges: RowRanges, products: Sequence[Product]) -> list[Tensor]:
    """Return each product of all rows `[T, D]`, given this member's own rows `[t, D]` (all-gather).

    A tile is multiplied while it is sent on and the next one arrives.
    """
    tiles_by_product: list[list[Tensor]] = [[x_tD] * group.size for _ in products]
    tile = x_tD
    for step in range(group.size):
        owner, waits = (group.member - step) % group.size, []
        is_passed_on = step < group.size - 1
        if is_passed_on:
            start, end = row_ranges[owner - 1]
            next_tile = x_tD.new_empty(end - start, x_tD.shape[1])
            waits = [group.send(tile), group.recv(next_tile)]

        for product, output_tiles in zip(products, tiles_by_product):
            output_tiles[owner] = product(tile)

        for wait in waits:
            wait()
        if is_passed_on:
            tile = next_tile
    return [torch.cat(output_tiles) for output_tiles in tiles_by_product]


def reduce(group: Group, x_TN: Tensor, row_ranges: RowRanges, product: Product, row_width: int) -> Tensor:
    """Return this member's rows `[t, row_width]` of the products of all rows, summed over members (reduce-scatter).

    The sum of a tile goes once round the ring and ends at its owner; while it arrives, the next summand is computed.
    """
    waits: list[Wait] = []
    for step in range(group.size):
        start, end = row_ranges[(group.member - 1 - step) % group.size]
        if step:
            partial_sums = x_TN.new_empty(end - start, row_width)
            waits.append(group.recv(partial_sums))

        sums = product(x_TN[start:end])

        for wait in waits:
            wait()
        if step:
            sums += partial_sums
        is_passed_on = step < group.size - 1
        waits = [group.send(sums)] if is_passed_on else []
    return sums
