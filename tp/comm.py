"""The collective operations of a group: sums over its members as in Megatron-LM, or as in Galaxy.

They know nothing about layers. A block begins with `enter_block`, then column-parallel products; it ends with a
row-parallel product, which `leave_block` computes and sums over members. `scatter` begins a slice, `gather` ends it.

Shapes: T rows of a segment, t rows that a member keeps between blocks, D model, N a member's share of another width.
"""
from __future__ import annotations

from typing import Any, Callable, Mapping, Sequence

from torch import Tensor

from model.plain_layers import Product
from tp.group import Group
from tp.overlap import gather, reduce
from tp.shares import ranges

TILE = 8  # minimum rows per member for which tiles pay, since each tile reads all weights


class Products:
    """The products of all rows of a segment, computed tile by tile while the rows arrived; they replace the rows.

    `len` returns the number T of rows, `of` the outputs `[T, N]` of a product.
    """

    def __init__(self, num_rows: int, outputs: Mapping[Product, Tensor]) -> None:
        self._num_rows, self._outputs = num_rows, outputs

    def __len__(self) -> int:
        return self._num_rows

    def of(self, product: Product) -> Tensor:
        return self._outputs[product]


class Comm:
    """The collective operations as in Megatron-LM: members keep all rows, and each block ends with an all-reduce."""

    gathers = False  # whether `enter_block` may return `Products`
    tiled = False  # whether members keep only their own rows of the present segment, and exchange rows in tiles

    def __init__(self, group: Group, row_width: int) -> None:
        self._group = group

    def open(self, num_rows: int, num_settled: int) -> None:
        """Begin a segment of `num_rows` rows after `num_settled` tokens in the KV cache."""

    def scatter(self, x_TD: Tensor) -> Tensor:
        """Return the rows `[t, D]` that this member keeps between blocks, given all rows."""
        return x_TD

    def enter_block(self, x_tD: Tensor, products: Sequence[Product]) -> Any:
        """Return all rows `[T, D]`, given this member's own ones; or the `Products` of all rows with these products."""
        return x_tD

    def leave_block(self, x_TN: Tensor, product: Product) -> Tensor:
        """Return the rows `[t, D]` that this member keeps of the product, summed over all members."""
        sums_tD = product(x_TN)
        if self._group.size > 1:
            self._group.all_reduce(sums_tD)
        return sums_tD

    def gather(self, x_tD: Tensor) -> Tensor:
        """Return all rows `[T, D]`, given this member's own ones."""
        return x_tD


class Galaxy(Comm):
    """The collective operations as in Galaxy: between blocks a member keeps, normalizes and adds only its own rows.

    Each block begins with an all-gather and ends with a reduce-scatter, both in tiles during the products. A segment
    with fewer than `tile` rows per member is computed as in Megatron-LM.
    """

    gathers = True

    def __init__(self, group: Group, row_width: int, tile: int = TILE) -> None:
        super().__init__(group, row_width)
        self._row_width, self._tile = row_width, tile

    def open(self, num_rows: int, num_settled: int) -> None:
        num_members = self._group.size
        self._num_rows = num_rows
        self.tiled = num_members > 1 and num_rows >= self._tile * num_members
        self._row_ranges = ranges(num_rows, [1] * num_members)

    def scatter(self, x_TD: Tensor) -> Tensor:
        if not self.tiled:
            return x_TD
        start, end = self._row_ranges[self._group.member]
        return x_TD[start:end]

    def enter_block(self, x_tD: Tensor, products: Sequence[Product]) -> Any:
        if not self.tiled:
            return x_tD
        outputs = gather(self._group, x_tD, self._row_ranges, products)
        return Products(self._num_rows, dict(zip(products, outputs)))

    def leave_block(self, x_TN: Tensor, product: Product) -> Tensor:
        if not self.tiled:
            return super().leave_block(x_TN, product)
        return reduce(self._group, x_TN, self._row_ranges, product, self._row_width)

    def gather(self, x_tD: Tensor) -> Tensor:
        if not self.tiled:
            return x_tD
        [x_TD] = gather(self._group, x_tD, self._row_ranges, [lambda tile: tile])
        return x_TD


MakeComm = Callable[[Group, int], Comm]  # from a group and the width of a row
COMMS: dict[str, MakeComm] = {"tp": Comm, "galaxy": Galaxy}  # by the name of a target in config/methods.py
