"""The splits of a model over boards that may be the fastest.

A method sees two times of a split: that of a round through all stages, which each guess waits for, and that of the
slowest board or wire, which limits how many segments pass. A split is worth a trial if no other one is better in both.

Times are whole nanoseconds, so that equal ones are equal.
"""
from __future__ import annotations

from typing import NamedTuple, Sequence

from config.profiles import Profile

NANOSECONDS = 1e9  # of a second
NO_LIMIT = 1 << 62


class Split(NamedTuple):
    """A pipeline over some of the boards."""

    round_time: int  # of a segment through all stages
    slowest_time: int  # of a segment in its slowest stage or wire
    boards: tuple[int, ...]  # their ranks in the profile, in ascending order
    layers: tuple[int, ...]  # the number of layers of each

    @property
    def guessing_time(self) -> int:
        """The time of two tokens if every second guess is right."""
        return self.round_time + self.slowest_time


def best_splits(site: Profile, max_layers: Sequence[int], num_layers: int, num_rows: int) -> list[Split]:
    """Return the splits that no other one beats in both times, the one with the shortest round first.

    `max_layers` are the layers of the model, of `num_layers`, that fit each board. Times are those of segments of
    `num_rows` rows. The list is empty if the model does not fit.
    """
    splits: list[Split] = []
    limit = NO_LIMIT
    while split := _shortest_round(site, max_layers, num_layers, num_rows, limit):
        splits.append(split)
        limit = split.slowest_time

    return splits


def timed(site: Profile, layer_counts: Sequence[int], num_rows: int) -> Split:
    """Return the split that gives each board this number of layers, in the order of the profile; some have none."""
    split = Split(0, 0, (), ())
    for board, num_layers in enumerate(layer_counts, 1):
        if num_layers:
            stage_time = num_layers * _layer_time(site, board, sum(layer_counts), num_rows)
            split = _computed(_carried(site, split, board, num_rows), board, num_layers, stage_time)
    return _carried(site, split, 0, num_rows)


def _layer_time(site: Profile, board: int, num_layers: int, num_rows: int) -> int:
    return round(NANOSECONDS * site.board(board).stage(1 / num_layers, num_rows, 0))


def _shortest_round(site: Profile, max_layers: Sequence[int], num_layers: int, num_rows: int, limit: int
                    ) -> Split | None:
    """Return the split with the shortest round among those whose slowest stage and wire take less than `limit`.

    The shortest way to each state, a last board and a number of layers so far, extends that to an earlier state.
    """
    shortest = {(0, 0): Split(0, 0, (), ())}

    for board, max_added in enumerate(max_layers, 1):
        layer_time = _layer_time(site, board, num_layers, num_rows)
        for (_, num_before), split in list(shortest.items()):
            carried = _carried(site, split, board, num_rows)
            for num_added in range(1, 1 + min(max_added, num_layers - num_before)):
                computed = _computed(carried, board, num_added, num_added * layer_time)
                if computed.slowest_time >= limit:
                    break

                state = board, num_before + num_added
                shortest[state] = min(computed, shortest.get(state, computed))

    rounds = [_carried(site, split, 0, num_rows) for (_, num_held), split in shortest.items() if num_held == num_layers]
    return min((split for split in rounds if split.slowest_time < limit), default=None)


def _carried(site: Profile, split: Split, board: int, num_rows: int) -> Split:
    """Return the split with the times of the wire from its last board to another one; rank 0 sends only tokens."""
    sender = split.boards[-1] if split.boards else 0
    wire = site.link(sender, board)
    transfer_time = round(NANOSECONDS * wire.transfer(num_rows * wire.row_bytes)) if sender else 0
    latency_time = round(NANOSECONDS * wire.latency / 1e3)
    return split._replace(round_time=split.round_time + latency_time + transfer_time,
                          slowest_time=max(split.slowest_time, transfer_time))


def _computed(split: Split, board: int, num_layers: int, stage_time: int) -> Split:
    """Return the split with one more stage."""
    return Split(split.round_time + stage_time, max(split.slowest_time, stage_time),
                 (*split.boards, board), (*split.layers, num_layers))
