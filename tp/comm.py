"""How a group adds up what its members computed: Megatron's way and Galaxy's.

They know nothing about layers. A block of a layer begins with column-parallel products, behind `enter`, and ends with a
row-parallel product, whose parts `leave` adds up. `scatter` and `gather` are at both ends of a slice.

Shapes: T rows of a segment, t rows that a member keeps between blocks, D model, N what it holds of a wider dimension.
"""
from __future__ import annotations

from typing import Any, Callable, Mapping, Sequence

from torch import Tensor

from tp.group import Group
from tp.overlap import Product, gather, reduce
from tp.shares import ranges

TILE = 8  # rows of a member below which tiles do not pay: every tile reads all weights


class Products:
    """The products of all rows of a segment, computed tile by tile while the rows arrived, in place of the rows.

    `len` is the number T of rows, `of` a product's outputs `[T, N]`.
    """

    def __init__(self, rows: int, made: Mapping[Product, Tensor]) -> None:
        self._rows, self._made = rows, made

    def __len__(self) -> int:
        return self._rows

    def of(self, product: Product) -> Tensor:
        return self._made[product]


class Comm:
    """The collective operations of a layer, Megatron's way: members keep all rows, a block ends with an all-reduce."""

    gathers = False  # whether `enter` ever returns `Products`
    tiled = False  # whether each member keeps only its own rows of the present segment, so that rows travel in tiles

    def __init__(self, group: Group, hidden: int) -> None:
        self._group = group

    def open(self, rows: int, text: int) -> None:
        """Begin a segment of `rows` rows; `text` settled tokens are in the KV cache before it."""

    def scatter(self, x_TD: Tensor) -> Tensor:
        """The rows `[t, D]` that this member keeps between blocks, out of all rows."""
        return x_TD

    def enter(self, x_tD: Tensor, products: Sequence[Product]) -> Any:
        """All rows, out of every member's own: the tensor `[T, D]`, or their `Products` with these products."""
        return x_tD

    def leave(self, x_TN: Tensor, product: Product) -> Tensor:
        """The rows `[t, D]` that this member keeps of the product, summed over all members."""
        sums = product(x_TN)
        if self._group.size > 1:
            self._group.all_reduce(sums)
        return sums

    def gather(self, x_tD: Tensor) -> Tensor:
        """All rows `[T, D]`, out of every member's own."""
        return x_tD


class Galaxy(Comm):
    """Between blocks each member keeps its own rows, and computes norms and residual sums for those only.

    Each block begins with an all-gather and ends with a reduce-scatter, both in tiles beside the products. A segment
    with fewer than `tile` rows for a member is computed Megatron's way. `hidden` is the width of a row.
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

    def enter(self, x_tD: Tensor, products: Sequence[Product]) -> Any:
        if not self.tiled:
            return x_tD
        made = gather(self._group, x_tD, self._bounds, products)
        return Products(self._rows, dict(zip(products, made)))

    def leave(self, x_TN: Tensor, product: Product) -> Tensor:
        if not self.tiled:
            return super().leave(x_TN, product)
        return reduce(self._group, x_TN, self._bounds, product, self._hidden)

    def gather(self, x_tD: Tensor) -> Tensor:
        if not self.tiled:
            return x_tD
        return gather(self._group, x_tD, self._bounds, [lambda tile: tile])[0]


MakeComm = Callable[[Group, int], Comm]  # of a group and the width of a row
COMMS: dict[str, MakeComm] = {"tp": Comm, "galaxy": Galaxy}  # by the name of a target in config/methods.py
