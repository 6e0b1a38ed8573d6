"""How long the ranks of a stage compute: alone, or as a group that shares its layers, on the boards of a profile."""
from __future__ import annotations

from typing import NamedTuple, Sequence

from config.profiles import Profile
from sim.groups import Times, slowest
from sim.heat import Heat
from sim.stages import Work
from tp.comm import TILE


class Held(NamedTuple):
    """What a stage holds: its ranks, the leader first, and from 0 to 1 the share of the model's layers.

    `largest` is the largest part of each layer that one of the ranks computes; with `tiles` they overlap products and
    transfers as Galaxy does.
    """

    ranks: Sequence[int]
    share: float
    kept: int = 0  # layers that keep their inputs for a draft that wants inner features
    largest: float = 1.0
    tiles: bool = False


def work_of(profile: Profile, held: Held, extra: float = 0.0) -> Work:
    """What a stage does with a segment; `extra` are the seconds that it takes beside what the profile charges."""
    board = slowest(profile, held.ranks)
    layers = held.share * profile.layers
    members, leader = len(held.ranks), held.ranks[0]
    if members == 1:
        heat = Heat(board.heat)

        def alone(rows: int, text: int) -> float:
            return heat.takes(extra + board.stage(held.share, rows, text))

        return Work(alone, max(1, round(layers)), held.kept, leader, heat.cool)
    times = Times(board, held.largest, members)

    def together(rows: int, text: int) -> float:
        tiled = held.tiles and rows >= TILE * members
        heard = board.latency / 1e3 + board.transfer(rows * board.row_bytes)
        return extra + heard + layers * times.layer(tiled, rows, text)

    return Work(together, 1, held.kept, leader)
