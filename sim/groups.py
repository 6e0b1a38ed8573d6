"""The emulated group: its products and sums take at least the time that they take in the emulated cluster.

Numbers are computed and exchanged for real. The time is that of the profile's model; each real layer stands for
several of its layers. The largest share, the slowest board and the slowest wire decide. It knows nothing about ranks.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Sequence

from torch import Tensor

from config.profiles import Profile
from sim.clock import Pace
from tp.comm import Comm
from tp.overlap import Product


def slowest(profile: Profile, ranks: Sequence[int]) -> Profile:
    """Return the profile of a group's slowest board, with the slowest wire between neighbours."""
    board = max((profile.board(rank) for rank in ranks), key=lambda one: one.model)
    neighbours = zip(ranks, [*ranks[1:], ranks[0]])
    wires = [profile.link(rank, other) for rank, other in neighbours]
    wire = max(wires, key=lambda one: (one.step, -one.mbps))
    return replace(board, latency=wire.latency, mbps=wire.mbps, step=wire.step)


def hop(profile: Profile, size: float) -> float:
    """Return the seconds for `size` bytes from one member to the next, one step of a collective operation."""
    return profile.step / 1e3 + profile.transfer(round(size))


def all_reduce(profile: Profile, size: float, members: int) -> float:
    """Return the seconds of a ring all-reduce of `size` bytes; all-gather and reduce-scatter take half of them each."""
    hops = 2 * (members - 1)
    return hops * hop(profile, size / members)


@dataclass(frozen=True)
class Times:
    """The seconds of a group for one layer of the profile's model.

    `members` ranks share the layer; `share`, from 0 to 1, is the largest part that one of them computes.
    """

    profile: Profile
    share: float
    members: int

    def __post_init__(self) -> None:
        assert 0 < self.share <= 1 <= self.members, f"a share of {self.share} among {self.members} members"

    def block(self, rows: int, text: int) -> float:
        """Return the seconds of attention or MLP for all rows, and of the all-reduce after it."""
        compute = self._compute(rows, text) / 2
        return compute + all_reduce(self.profile, rows * self.profile.row_bytes, self.members)

    def tiles(self, rows: int, text: int) -> float:
        """Return the seconds of half a block, which is computed tile by tile while the next tile travels."""
        own = -(-rows // self.members)
        product = self._compute(own, text) / 4
        travel = hop(self.profile, own * self.profile.row_bytes)
        return product + (self.members - 1) * max(product, travel)

    def layer(self, tiled: bool, rows: int, text: int) -> float:
        """Return the seconds of a whole layer: two blocks, or four halves of a block in tiles."""
        return 4 * self.tiles(rows, text) if tiled else 2 * self.block(rows, text)

    def _compute(self, rows: int, text: int) -> float:
        return self.share * self.profile.stage(1 / self.profile.layers, rows, text)


class Paced(Comm):
    """`comm` in modelled time: each real layer stands for `layers` of the profile's model, which take `times` each."""

    def __init__(self, comm: Comm, pace: Pace, layers: float, times: Times) -> None:
        self._comm, self._pace = comm, pace
        self._layers, self._times = layers, times
        self.gathers = comm.gathers

    def open(self, rows: int, text: int) -> None:
        self._comm.open(rows, text)
        self.tiled = self._comm.tiled
        seconds = self._times.tiles if self.tiled else self._times.block
        self._seconds = seconds(rows, text)
        self._due, self._begins = self._pace.now(), True

    def scatter(self, x_TD: Tensor) -> Tensor:
        # The first block needs no all-gather, but one of the same time follows the last block; it is counted here.
        if self.tiled:
            self._spend()
        return self._comm.scatter(x_TD)

    def enter_block(self, x_tD: Tensor, products: Sequence[Product]) -> Any:
        rows = self._comm.enter_block(x_tD, products)
        if self.tiled:
            self._spend()
        return rows

    def leave_block(self, x_TN: Tensor, product: Product) -> Tensor:
        sums = self._comm.leave_block(x_TN, product)
        self._spend()
        return sums

    def gather(self, x_tD: Tensor) -> Tensor:
        return self._comm.gather(x_tD)

    def _spend(self) -> None:
        """Sleep until the modelled end of a block, or of half a block in tiles.

        The first block of a segment begins now at the earliest: members receive the segment after their leader does.
        """
        if self._begins:
            self._due, self._begins = max(self._due, self._pace.now()), False
        self._due += self._layers * self._seconds
        self._pace.spend_until(self._due)
