"""The collective operations of a group: sums over its members as in Megatron-LM, or as in Galaxy.

They know nothing about layers. A block begins with `enter_block`, then column-parallel products; it ends with a
row-parallel product, which `leave_block` computes and sums over members. `scatter` begins a slice, `gather` ends it.

Shapes: T rows of a segment, t rows that a member keeps between blocks, D model, N a member's share of another width.
"""
from __future__ import annotations

from typing import Any, Callable, Mapping, Sequence

from torch import Tensor

from tp.group import Group
from tp.overlap import Product, gather, reduce
from tp.shares import ranges

TILE = 8  # minimum rows per member for which tiles pay, since each tile reads all weights


class Products:
    """The products of all rows of a segment, computed tile by tile while the rows arrived; they replace the rows.

    `len` returns the number T of rows, `of` the outputs `[T, N]` of a product.
    """

    def __init__(self, rows: int, made: Mapping[Product, Tensor]) -> None:
        self._rows, self._made = rows, made

    def __len__(self) -> int:
        return self._rows

    def of(self, product: Product) -> Tensor:
        return self._made[product]


class Comm:
    """The collective operations as in Megatron-LM: members keep all rows, and each block ends with an all-reduce."""

    gathers = False  # whether `enter_block` may return `Products`
    tiled = False  # whether members keep only their own rows of the present segment, and exchange rows in tiles

    def __init__(self, group: Group, hidden: int) -> None:
        self._group = group

    def open(self, rows: int, text: int) -> None:
        """Begin a segment of `rows` rows after `text` settled tokens in the KV cache."""

    def scatter(self, x_TD: Tensor) -> Tensor:
        """Return the rows `[t, D]` that this member keeps between blocks, given all rows."""
        return x_TD

    def enter_block(self, x_tD: Tensor, products: Sequence[Product]) -> Any:
        """Return all rows `[T, D]`, given this member's own ones; or the `Products` of all rows with these products."""
        return x_tD

    def leave_block(self, x_TN: Tensor, product: Product) -> Tensor:
        """Return the rows `[t, D]` that this member keeps of the product, summed over all members."""
        sums = product(x_TN)
        if self._group.size > 1:
            self._group.all_reduce(sums)
        return sums

    def gather(self, x_tD: Tensor) -> Tensor:
        """Return all rows `[T, D]`, given this member's own ones."""
        return x_tD


class Galaxy(Comm):
    """The collective operations as in Galaxy: between blocks a member keeps, normalizes and adds only its own rows.

    Each block begins with an all-gather and ends with a reduce-scatter, both in tiles during the products. A segment
    with fewer than `tile` rows per member is computed as in Megatron-LM. `hidden` is the width of a row.
    """

    gathers = True

    def __init__(self, group: Group, hidden: int, tile: int = TILE) -> None:
        super().__init__(group, hidden)
        self._hidden, self._tile = hidden, tile

    def open(self, rows: int, text: int) -> None:
        size = self._group.size
        self._rows = rows
        self.tiled = size > 1 and rows >= self._tile * size
        self._bounds = ranges(rows, [1] * size)

    def scatter(self, x_TD: Tensor) -> Tensor:
        if not self.tiled:
            return x_TD
        start, end = self._bounds[self._group.member]
        return x_TD[start:end]

    def enter_block(self, x_tD: Tensor, products: Sequence[Product]) -> Any:
        if not self.tiled:
            return x_tD
        made = gather(self._group, x_tD, self._bounds, products)
        return Products(self._rows, dict(zip(products, made)))

    def leave_block(self, x_TN: Tensor, product: Product) -> Tensor:
        if not self.tiled:
            return super().leave_block(x_TN, product)
        return reduce(self._group, x_TN, self._bounds, product, self._hidden)

    def gather(self, x_tD: Tensor) -> Tensor:
        if not self.tiled:
            return x_tD
        return gather(self._group, x_tD, self._bounds, [lambda tile: tile])[0]


MakeComm = Callable[[Group, int], Comm]  # from a group and the width of a row
COMMS: dict[str, MakeComm] = {"tp": Comm, "galaxy": Galaxy}  # by the name of a target in config/methods.py
