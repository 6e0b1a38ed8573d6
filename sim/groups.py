"""The emulated group: its products and sums take at least the time that they take in the emulated cluster.

Numbers are computed and exchanged for real. The time is that of the profile's model; each real layer stands for
several of its layers. The largest share, the slowest board and the slowest wire decide. It knows nothing about ranks.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Sequence

from torch import Tensor

from config.profiles import Profile
from model.plain_layers import Product
from sim.clock import Pace
from tp.comm import Comm


def slowest(profile: Profile, ranks: Sequence[int]) -> Profile:
    """Return the profile of a group's slowest board, with the slowest wire between neighbours."""
    boards = [profile.board(rank) for rank in ranks]
    slowest_board = max(boards, key=lambda board: board.model)

    next_ranks = [*ranks[1:], ranks[0]]
    wires = [profile.link(rank, next_rank) for rank, next_rank in zip(ranks, next_ranks)]
    slowest_wire = max(wires, key=lambda wire: (wire.step, -wire.mbps))
    return replace(slowest_board, latency=slowest_wire.latency, mbps=slowest_wire.mbps, step=slowest_wire.step)


def hop(profile: Profile, num_bytes: float) -> float:
    """Return the seconds for some bytes from one member to the next, one step of a collective operation."""
    return profile.step / 1e3 + profile.transfer(round(num_bytes))


def all_reduce(profile: Profile, num_bytes: float, num_members: int) -> float:
    """Return the seconds of a ring all-reduce; all-gather and reduce-scatter take half of them each."""
    num_hops = 2 * (num_members - 1)
    return num_hops * hop(profile, num_bytes / num_members)


@dataclass(frozen=True)
class Times:
    """The seconds of a group for one layer of the profile's model.

    `num_members` ranks share the layer; `largest_share`, from 0 to 1, is the largest part that one of them computes.
    """

    profile: Profile
    largest_share: float
    num_members: int

    def __post_init__(self) -> None:
        assert 0 < self.largest_share <= 1 <= self.num_members, \
            f"a share of {self.largest_share} among {self.num_members} members"

    def block(self, num_rows: int, num_text_tokens: int) -> float:
        """Return the seconds of attention or MLP for all rows, and of the all-reduce after it."""
        compute_seconds = self._layer_products(num_rows, num_text_tokens) / 2
        return compute_seconds + all_reduce(self.profile, num_rows * self.profile.row_bytes, self.num_members)

    def tiles(self, num_rows: int, num_text_tokens: int) -> float:
        """Return the seconds of half a block, which is computed tile by tile while the next tile travels."""
        tile_rows = math.ceil(num_rows / self.num_members)
        tile_seconds = self._layer_products(tile_rows, num_text_tokens) / 4
        hop_seconds = hop(self.profile, tile_rows * self.profile.row_bytes)
        return tile_seconds + (self.num_members - 1) * max(tile_seconds, hop_seconds)

    def layer(self, is_tiled: bool, num_rows: int, num_text_tokens: int) -> float:
        """Return the seconds of a whole layer: two blocks, or four halves of a block in tiles."""
        if is_tiled:
            return 4 * self.tiles(num_rows, num_text_tokens)
        return 2 * self.block(num_rows, num_text_tokens)

    def _layer_products(self, num_rows: int, num_text_tokens: int) -> float:
        """Return the seconds of the largest share of all products of a layer."""
        return self.largest_share * self.profile.stage(1 / self.profile.layers, num_rows, num_text_tokens)


class Paced(Comm):
    """`comm` in modelled time: each real layer stands for `layers` of the profile's model, which take `times` each.

    There may be fewer real layers than in the profile's model, so `layers` may be a fraction.
    """

    def __init__(self, comm: Comm, pace: Pace, layers: float, times: Times) -> None:
        self._comm, self._pace = comm, pace
        self._layers, self._times = layers, times
        self.gathers = comm.gathers

    def open(self, num_rows: int, num_settled: int) -> None:
        self._comm.open(num_rows, num_settled)
        self.tiled = self._comm.tiled
        seconds_of = self._times.tiles if self.tiled else self._times.block
        self._step_seconds = seconds_of(num_rows, num_settled)  # of a block, or of half a block in tiles
        self._due_at, self._is_first_step = self._pace.now(), True

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
        if self._is_first_step:
            self._due_at, self._is_first_step = max(self._due_at, self._pace.now()), False
        self._due_at += self._layers * self._step_seconds
        self._pace.spend_until(self._due_at)
