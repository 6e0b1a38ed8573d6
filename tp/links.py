"""Links of a pipeline whose stages are groups: the leader of a group forwards messages, in order, to the members.

They know nothing about the computation. The leader is in the ring, or is rank 0 itself. Members receive only from
the leader, and send nothing.
"""
from __future__ import annotations

from bisect import bisect
from collections import deque
from dataclasses import dataclass
from itertools import chain
from typing import Sequence

from model.weights.split import placements
from pipeline.messages import Message, Prune
from pipeline.stage import Stage
from pipeline.transport import Link, Peers, StageLink


@dataclass(frozen=True)
class Placement:
    """The ranks of a pipeline: each leader, followed by its members; the ranks of small models, one each, come last."""

    rings: Sequence[Sequence[int]]  # for each copy of the model its leaders in order, rank 0 first
    holding: int  # number of ranks that hold a part of the target
    drafting: int = 0  # number of ranks that hold a small model; they are linked only to rank 0
    reports: bool = False  # whether stages report inner features to rank 0

    @staticmethod
    def of(stages: Sequence[int], tp: int, copies: int = 1, drafting: int = 0, reports: bool = False) -> Placement:
        """Return the placement of `copies` of a model; stage i has `stages[i]` layers, which `tp` ranks share.

        If there is only one stage, rank 0 is one of its ranks. Otherwise rank 0 is a stage of its own, which all copies
        of the others share.
        """
        found = placements(stages, tp)
        leaders = [rank for rank, (_, member) in enumerate(found) if member == 0]
        root, *others = leaders
        copied = len(found) - 1
        assert copies == 1 or others, "rank 0 holds the model, so there is nothing to copy"
        rings = [[root, *(rank + copied * copy for rank in others)] for copy in range(copies)]
        return Placement(rings, len(found) + (copies - 1) * copied, drafting, reports)

    @property
    def world(self) -> int:
        return self.holding + self.drafting

    @property
    def root(self) -> int:
        """Rank 0."""
        return self.rings[0][0]

    @property
    def small_model_ranks(self) -> range:
        """The ranks that hold a small model, in the order of the models."""
        return range(self.holding, self.world)

    def drafter(self, rank: int) -> int | None:
        """Return the number, from 0, of a rank's small model; None if the rank holds a part of the target."""
        holders = self.small_model_ranks
        return holders.index(rank) if rank in holders else None

    @property
    def leaders(self) -> list[int]:
        return [self.root, *chain.from_iterable(ring[1:] for ring in self.rings)]

    def group(self, rank: int) -> range:
        """Return the ranks of a rank's group, the leader first; a rank with a small model has a group of its own."""
        ranks = range(self.world)
        assert rank in ranks, f"there is no rank {rank} among {self.world}"
        leaders = [*self.leaders, *self.small_model_ranks]
        after = bisect(leaders, rank)
        ends = [*leaders, self.world]
        return range(leaders[after - 1], ends[after])

    @property
    def groups(self) -> list[range]:
        """The groups of the target's ranks."""
        return [self.group(leader) for leader in self.leaders]

    def peers(self, rank: int) -> list[Peers]:
        """Return the peers of each link of a rank, without those of `fan` and `small_model_peers`."""
        if self.drafter(rank) is not None:
            return [_pair(self.root)]
        leader = self.group(rank)[0]
        if rank != leader:
            return [Peers(leader, (), ordered=True)]
        return [_neighbours(ring, rank)._replace(reports=self.reports) for ring in self.rings if rank in ring]

    @property
    def shares(self) -> bool:
        """Whether several ranks share a stage."""
        return len(self.leaders) < self.holding

    def reached(self, rank: int) -> list[Peers]:
        """Return the peers of all links of a rank."""
        fan = self.fan(rank)
        found = [*self.peers(rank), *self.small_model_peers(rank)]
        return [*found, fan] if fan else found

    def fan(self, rank: int) -> Peers | None:
        """Return the members to which a leader forwards messages; None for other ranks."""
        leader, *members = self.group(rank)
        return Peers(None, members) if members and rank == leader else None

    def small_model_peers(self, rank: int) -> list[Peers]:
        """Return the peers of rank 0's link to each small model; none for other ranks."""
        asks = {self.root: self.small_model_ranks}
        return [_pair(holder) for holder in asks.get(rank, ())]


def _pair(other: int) -> Peers:
    """Return the peers of a link between two ranks."""
    return Peers(other, [other])


def _neighbours(ring: Sequence[int], rank: int) -> Peers:
    if len(ring) == 1:
        return Peers(None, ())
    root, *others = ring
    place = ring.index(rank)
    before, after = ring[place - 1], ring[(place + 1) % len(ring)]
    if rank == root:
        return Peers(before, [after], others)
    return Peers(before, [after], root=root)


class Loop:
    """The link of rank 0 in a pipeline that is one group: messages go to the members and to rank 0's own stage.

    The stage computes during `send`, so the answer is available at once.
    """

    def __init__(self, stage: Stage, fan: Link | None) -> None:
        self._stage, self._fan = stage, fan
        self._answers: deque[Message] = deque()

    @property
    def ready(self) -> bool:
        return bool(self._answers)

    def send(self, msg: Message) -> None:
        if self._fan is not None:
            self._fan.send(msg)
        answer = self._stage.apply(msg)
        if answer is not None:
            self._answers.append(answer)

    broadcast = send

    def recv(self) -> Message:
        return self._answers.popleft()

    def rest(self, until: float) -> None:
        """Do nothing: every answer is available when `send` returns."""

    def urgent(self) -> Prune | None:
        return None


class ForwardingLink:
    """A leader's link in the ring; it forwards messages to the members in the order in which it hands them out."""

    def __init__(self, link: StageLink, fan: Link) -> None:
        self._link, self._fan = link, fan
        self.send, self.broadcast, self.report = link.send, link.broadcast, link.report

    @property
    def ready(self) -> bool:
        return self._link.ready

    def recv(self) -> Message:
        msg = self._link.recv()
        self._fan.send(msg)
        return msg

    def urgent(self) -> Prune | None:
        prune = self._link.urgent()
        if prune is not None:
            self._fan.send(prune)
        return prune
