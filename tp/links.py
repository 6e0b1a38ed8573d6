"""Links of a pipeline whose stages are groups: who leads a group hands on what it hears, and nothing overtakes there.

They know nothing about what is computed. A group's leader sits in the ring, or is rank 0 itself; its members hear from
it alone, and answer nobody.
"""
from __future__ import annotations

from bisect import bisect
from collections import deque
from dataclasses import dataclass
from typing import Sequence

from model.stages import placements
from pipeline.messages import Message, Prune
from pipeline.stage import Stage
from pipeline.transport import Link, Peers


@dataclass(frozen=True)
class Placement:
    """Who sits where: the leaders, in the order of the ring, each followed by the other members of its group."""

    leaders: Sequence[int]
    world: int

    @staticmethod
    def of(stages: Sequence[int], tp: int) -> Placement:
        """The placement of a pipeline with `stages[i]` layers in stage i, each of which `tp` ranks share.

        In a pipeline of a single stage rank 0 is one of those that share it; otherwise rank 0 is a stage of its own.
        """
        found = placements(stages, tp)
        leaders = [rank for rank, (_, member) in enumerate(found) if member == 0]
        return Placement(leaders, len(found))

    def group(self, rank: int) -> range:
        """The ranks of the group of a rank, its leader first."""
        ranks = range(self.world)
        assert rank in ranks, f"there is no rank {rank} among {self.world}"
        after = bisect(self.leaders, rank)
        ends = [*self.leaders, self.world]
        return range(self.leaders[after - 1], ends[after])

    @property
    def groups(self) -> list[range]:
        return [self.group(leader) for leader in self.leaders]

    def peers(self, rank: int) -> Peers:
        """Whom a rank talks to: a leader its neighbours in the ring, another member its leader."""
        leader, size = self.group(rank)[0], len(self.leaders)
        if rank != leader:
            return Peers(leader, (), ordered=True)
        if size == 1:
            return Peers(None, ())
        place = self.leaders.index(rank)
        before, after = self.leaders[place - 1], self.leaders[(place + 1) % size]
        root, *others = self.leaders
        if rank == root:
            return Peers(before, [after], others=others)
        return Peers(before, [after], root=root)

    def fan(self, rank: int) -> Peers | None:
        """The members to whom a leader hands on what it hears; None for a rank that has none."""
        leader, *members = self.group(rank)
        return Peers(None, members) if members and rank == leader else None


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
