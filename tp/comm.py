"""Who adds up what the members of a group have computed: Megatron's way, rows whole, and Galaxy's, rows shared.

They know nothing about layers: `enter` stands before products whose outputs are sharded, `leave` is a product whose
inputs are, `scatter` and `gather` are the way in and out of the slice.
"""
from __future__ import annotations

from typing import Any, Callable, Protocol, Sequence

from torch import Tensor

from tp.group import Group
from tp.overlap import Product, gather, reduce
from tp.shares import ranges

TILE = 8  # rows of a member below which tiles do not pay: every tile reads all weights


class Products:
    """All rows, of which only their products were kept, made while they came in."""

    def __init__(self, rows: int, products: Sequence[Product], made: Sequence[Tensor]) -> None:
        self._rows, self._made = rows, dict(zip(products, made))

    def __len__(self) -> int:
        return self._rows

    def of(self, product: Product) -> Tensor:
        return self._made[product]


class Comm(Protocol):
    """What a layer asks of its group."""

    gathers: bool  # whether `enter` ever makes `Products`

    @property
    def tiled(self) -> bool:
        """Whether the rows of the present segment are shared and travel in tiles."""

    def open(self, rows: int, text: int) -> None:
        """A segment of so many rows begins, behind so many tokens of text."""

    def scatter(self, x_TD: Tensor) -> Tensor:
        """Of all rows those that this member keeps between blocks."""

    def enter(self, x_tD: Tensor, products: Sequence[Product]) -> Any:
        """All rows for these products: a tensor, or `Products`."""

    def leave(self, x_TN: Tensor, product: Product) -> Tensor:
        """Of the sum over members of their products, the rows that this member keeps."""

    def gather(self, x_tD: Tensor) -> Tensor:
        """All rows again."""


class Megatron:
    """Every member keeps all rows, and each block ends with one all-reduce."""

    gathers = tiled = False

    def __init__(self, group: Group, hidden: int) -> None:
        self._group = group

    def open(self, rows: int, text: int) -> None:
        pass

    def scatter(self, x_TD: Tensor) -> Tensor:
        return x_TD

    def enter(self, x_tD: Tensor, products: Sequence[Product]) -> Any:
        return x_tD

    def leave(self, x_TN: Tensor, product: Product) -> Tensor:
        sums = product(x_TN)
        if self._group.size > 1:
            self._group.all_reduce(sums)
        return sums

    def gather(self, x_tD: Tensor) -> Tensor:
        return x_tD


class Galaxy:
    """Between blocks a member keeps its own rows, which cost it norms and sums for those only.

    Each block begins with an all-gather and ends with a reduce-scatter, both in tiles under the products beside them.
    A segment with fewer than `tile` rows for a member is computed as Megatron does. `hidden` is the width of a row.
    """

    gathers = True

    def __init__(self, group: Group, hidden: int, tile: int = TILE) -> None:
        self._group, self._hidden, self._tile = group, hidden, tile
        self._megatron = Megatron(group, hidden)
        self.tiled = False

    def open(self, rows: int, text: int) -> None:
        self._rows, size = rows, self._group.size
        self.tiled = size > 1 and rows >= self._tile * size
        self._bounds = ranges(rows, [1] * size)

    def scatter(self, x_TD: Tensor) -> Tensor:
        a, b = self._bounds[self._group.member] if self.tiled else (0, self._rows)
        return x_TD[a:b]

    def enter(self, x_tD: Tensor, products: Sequence[Product]) -> Any:
        if not self.tiled:
            return x_tD
        return Products(self._rows, products, gather(self._group, x_tD, self._bounds, products))

    def leave(self, x_TN: Tensor, product: Product) -> Tensor:
        if not self.tiled:
            return self._megatron.leave(x_TN, product)
        return reduce(self._group, x_TN, self._bounds, product, self._hidden)

    def gather(self, x_tD: Tensor) -> Tensor:
        if not self.tiled:
            return x_tD
        return gather(self._group, x_tD, self._bounds, [lambda tile: tile])[0]


# By the name of a target (config/methods.py): made of a group, and of the width of a row.
COMMS: dict[str, Callable[[Group, int], Comm]] = {"tp": Megatron, "galaxy": Galaxy}
