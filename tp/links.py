"""Links of a pipeline whose stages are groups: who leads a group hands on what it hears, and nothing overtakes there.

They know nothing about what is computed. A group's leader sits in the ring, or is rank 0 itself; its members hear from
it alone, and answer nobody.
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
from pipeline.transport import Link, Peers


@dataclass(frozen=True)
class Placement:
    """Who sits where: the leaders of each ring in their order, rank 0 first, each followed by the rest of its group.

    Behind them come the ranks that hold a small model each, which talk to rank 0 alone.
    """

    rings: Sequence[Sequence[int]]  # one; or one for each copy of the model
    holding: int  # ranks that hold a part of the target
    drafting: int = 0  # ranks that hold a small model

    @staticmethod
    def of(stages: Sequence[int], tp: int, copies: int = 1, drafting: int = 0) -> Placement:
        """The placement of pipelines with `stages[i]` layers in stage i, each of which `tp` ranks share.

        In a pipeline of a single stage rank 0 is one of those that share it; otherwise rank 0 is a stage of its own,
        and the same for all copies of the other stages. `drafting` small models have ranks of their own.
        """
        found = placements(stages, tp)
        leaders = [rank for rank, (_, member) in enumerate(found) if member == 0]
        root, *others = leaders
        copied = len(found) - 1
        assert copies == 1 or others, "rank 0 holds the model, so there is nothing to copy"
        rings = [[root, *(rank + copied * copy for rank in others)] for copy in range(copies)]
        return Placement(rings, len(found) + (copies - 1) * copied, drafting)

    @property
    def world(self) -> int:
        return self.holding + self.drafting

    @property
    def root(self) -> int:
        """Rank 0."""
        return self.rings[0][0]

    @property
    def small_model_ranks(self) -> range:
        """The ranks that hold a small model, in the order of those."""
        return range(self.holding, self.world)

    def drafter(self, rank: int) -> int | None:
        """Which of the small models a rank holds, counted from 0; None if it holds a part of the target."""
        return {holder: number for number, holder in enumerate(self.small_model_ranks)}.get(rank)

    @property
    def leaders(self) -> list[int]:
        return [self.root, *chain.from_iterable(ring[1:] for ring in self.rings)]

    def group(self, rank: int) -> range:
        """The ranks of the group of a rank, its leader first; one with a small model is alone."""
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
        """Whom a rank talks to: a leader its neighbours in each of its rings, another member its leader.

        A rank with a small model talks to rank 0.
        """
        if self.drafter(rank) is not None:
            return [_pair(self.root)]
        leader = self.group(rank)[0]
        if rank != leader:
            return [Peers(leader, (), ordered=True)]
        return [_neighbours(ring, rank) for ring in self.rings if rank in ring]

    @property
    def shares(self) -> bool:
        """Whether several ranks share a stage."""
        return any(len(ranks) > 1 for ranks in self.groups)

    def reached(self, rank: int) -> list[Peers]:
        """All whom a rank talks to, over any of its links."""
        fan = self.fan(rank)
        return [*self.peers(rank), *self.asked(rank), *([fan] if fan else [])]

    def fan(self, rank: int) -> Peers | None:
        """The members to whom a leader hands on what it hears; None for a rank that has none."""
        leader, *members = self.group(rank)
        return Peers(None, members) if members and rank == leader else None

    def asked(self, rank: int) -> list[Peers]:
        """Whom rank 0 asks for trees, one after the other; nobody for other ranks."""
        asks = {self.root: self.small_model_ranks}
        return [_pair(holder) for holder in asks.get(rank, ())]


def _pair(other: int) -> Peers:
    """Whom one of two ranks talks to that only talk to each other."""
    return Peers(other, [other])


def _neighbours(ring: Sequence[int], rank: int) -> Peers:
    if len(ring) == 1:
        return Peers(None, ())
    place = ring.index(rank)
    before, after = ring[place - 1], ring[(place + 1) % len(ring)]
    root, *others = ring
    if rank == root:
        return Peers(before, [after], others=others)
    return Peers(before, [after], root=root)


class Loop:
    """The ring of a pipeline that is one group: what rank 0 sends goes to the members and to its own stage, in order.

    Its stage computes while `send` is called, so that the answer is there at once.
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
        """Every answer is there when `send` returns."""

    def urgent(self) -> Prune | None:
        return None


class Leading:
    """A leader's link in the ring. What it hears goes on to its members in the order in which it obeys."""

    def __init__(self, link: Link, fan: Link) -> None:
        self._link, self._fan = link, fan
        self.send, self.broadcast = link.send, link.broadcast

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
