"""The emulated group: members whose products and sums take at least the time that those of an emulated cluster would.

Numbers are computed and exchanged for real; the time is that of the profile's model, of which each layer here stands
for several. It knows nothing about ranks. All boards of a profile are alike, so the largest share sets the pace.
"""
from __future__ import annotations

from typing import Any, Sequence

from torch import Tensor

from config.profiles import Profile
from sim.pace import Pace
from tp.comm import Comm
from tp.overlap import Product


def hop(profile: Profile, size: float) -> float:
    """Seconds for `size` bytes from one member to the next, one step of a collective."""
    return profile.step / 1e3 + profile.transfer(round(size))


def all_reduce(profile: Profile, size: float, members: int) -> float:
    """Seconds of a ring all-reduce of `size` bytes; an all-gather and a reduce-scatter take half of it each."""
    hops = 2 * (members - 1)
    return hops * hop(profile, size / members)


class Paced:
    """`comm` with modelled time: each layer stands for `layers` of the profile's, which `members` ranks share.

    `share` is the largest part of a layer that one of them computes, from 0 to 1.
    """

    def __init__(self, comm: Comm, pace: Pace, layers: float, share: float, members: int) -> None:
        assert 0 < share <= 1 <= members, f"a share of {share} among {members} members"
        self._comm, self._pace = comm, pace
        self._layers, self._share, self._members = layers, share, members
        self.gathers = comm.gathers

    @property
    def tiled(self) -> bool:
        return self._comm.tiled

    def open(self, rows: int, text: int) -> None:
        self._comm.open(rows, text)
        self._rows, self._text = rows, text
        self._due, self._begins = self._pace.now(), True

    def scatter(self, x_TD: Tensor) -> Tensor:
        # The first block finds all rows there, and the last one leaves an all-gather behind it: one is as long as the
        # other, and is counted here.
        if self.tiled:
            self._spend(self._tiles())
        return self._comm.scatter(x_TD)

    def enter(self, x_tD: Tensor, products: Sequence[Product]) -> Any:
        rows = self._comm.enter(x_tD, products)
        if self.tiled:
            self._spend(self._tiles())
        return rows

    def leave(self, x_TN: Tensor, product: Product) -> Tensor:
        sums = self._comm.leave(x_TN, product)
        self._spend(self._tiles() if self.tiled else self._block())
        return sums

    def gather(self, x_tD: Tensor) -> Tensor:
        return self._comm.gather(x_tD)

    def _block(self) -> float:
        """Seconds of attention or MLP, and of the all-reduce behind it."""
        profile = self._pace.profile
        compute = self._compute(self._rows) / 2
        return compute + all_reduce(profile, self._rows * profile.row_bytes, self._members)

    def _tiles(self) -> float:
        """Seconds of half a block, tile by tile, while the next tile travels."""
        profile = self._pace.profile
        rows = -(-self._rows // self._members)
        product = self._compute(rows) / 4
        travel = hop(profile, rows * profile.row_bytes)
        return product + (self._members - 1) * max(product, travel)

    def _compute(self, rows: int) -> float:
        """Seconds of the largest share of one of the profile's layers."""
        profile = self._pace.profile
        return self._share * profile.stage(1 / profile.layers, rows, self._text)

    def _spend(self, seconds: float) -> None:
        """Sleep until this is over, too. Members hear of a segment later than their leader, who waits for them once."""
        if self._begins:
            self._due, self._begins = max(self._due, self._pace.now()), False
        self._due += self._layers * seconds
        self._pace.spend_until(self._due)
