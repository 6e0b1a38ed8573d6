"""Links of a pipeline whose stages are groups: the leader of a group forwards messages, in order, to the members.

They know nothing about the computation. The leader is in the ring, or is rank 0 itself. Members receive only from
the leader, and send nothing.
"""
from __future__ import annotations

from bisect import bisect
from collections import deque
from dataclasses import dataclass
from itertools import chain
from typing import Any, Sequence

from config.failure import PeerLost, explain
from model.weights.split import placements
from pipeline.link import Link, Peers
from pipeline.messages import Message, Prune
from pipeline.stage import Stage


@dataclass(frozen=True)
class Placement:
    """The ranks of a pipeline: each leader, followed by its members."""

    rings: Sequence[Sequence[int]]  # for each copy of the model its leaders in order, rank 0 first
    world: int  # number of ranks

    @staticmethod
    def of(layer_counts: Sequence[int], group_size: int, copies: int = 1) -> Placement:
        """Return the placement of `copies` of a model; stage i has `layer_counts[i]` layers and `group_size` ranks.

        If there is only one stage, rank 0 is one of its ranks. Otherwise rank 0 is a stage of its own, which all copies
        of the others share.
        """
        one_copy = placements(layer_counts, group_size)
        leaders = [rank for rank, (_, member) in enumerate(one_copy) if member == 0]
        root, *other_leaders = leaders
        assert copies == 1 or other_leaders, "rank 0 holds the model, so there is nothing to copy"

        num_copied = len(one_copy) - 1  # all ranks of a copy but rank 0
        rings = []
        for copy in range(copies):
            rank_offset = num_copied * copy
            rings.append([root, *(rank_offset + leader for leader in other_leaders)])
        return Placement(rings, 1 + copies * num_copied)

    @property
    def root(self) -> int:
        """Rank 0."""
        return self.rings[0][0]

    @property
    def leaders(self) -> list[int]:
        return [self.root, *chain.from_iterable(ring[1:] for ring in self.rings)]

    def group(self, rank: int) -> range:
        """Return the ranks of a rank's group, the leader first."""
        all_ranks = range(self.world)
        assert rank in all_ranks, f"there is no rank {rank} among {self.world}"
        group_starts = self.leaders
        next_group = bisect(group_starts, rank)
        group_ends = [*group_starts, self.world]
        return range(group_starts[next_group - 1], group_ends[next_group])

    @property
    def groups(self) -> list[range]:
        """The groups of all ranks."""
        return [self.group(leader) for leader in self.leaders]

    def peers(self, rank: int) -> list[Peers]:
        """Return the peers of each link of a rank, without those of `fan`."""
        leader = self.group(rank)[0]
        if rank != leader:
            return [Peers(leader, (), in_order=True)]
        return [_neighbours(ring, rank) for ring in self.rings if rank in ring]

    @property
    def shares(self) -> bool:
        """Whether several ranks share a stage."""
        return len(self.leaders) < self.world

    def reached(self, rank: int) -> list[Peers]:
        """Return the peers of all links of a rank."""
        ring_peers, member_peers = self.peers(rank), self.fan(rank)
        return [*ring_peers, member_peers] if member_peers else ring_peers

    def fan(self, rank: int) -> Peers | None:
        """Return the members to which a leader forwards messages; None for other ranks."""
        leader, *members = self.group(rank)
        return Peers(None, members) if members and rank == leader else None


def _neighbours(ring: Sequence[int], rank: int) -> Peers:
    if len(ring) == 1:
        return Peers(None, ())
    root, *other_leaders = ring
    position = ring.index(rank)
    previous_rank, next_rank = ring[position - 1], ring[(position + 1) % len(ring)]
    if rank == root:
        return Peers(previous_rank, [next_rank], other_leaders)
    return Peers(previous_rank, [next_rank], root_rank=root)


class Loop:
    """The link of rank 0 in a pipeline that is one group: messages go to the members and to rank 0's own stage.

    The stage computes during `send`, so the answer is available at once.
    """

    def __init__(self, stage: Stage, member_link: Any) -> None:
        self._stage, self._member_link = stage, member_link
        self._unread_answers: deque[Message] = deque()

    @property
    def ready(self) -> bool:
        return bool(self._unread_answers)

    def send(self, msg: Message) -> None:
        if self._member_link is not None:
            self._member_link.send(msg)

        try:
            answer = self._stage.apply(msg)
        except BaseException as error:
            if self._member_link is not None:  # members wait in the middle of the stage, where no message reaches them
                self._member_link.fail(PeerLost(f"rank 0 failed: {explain(error)}"))
            raise

        if answer is not None:
            self._unread_answers.append(answer)

    broadcast = send

    def recv(self) -> Message:
        return self._unread_answers.popleft()

    def wait_until(self, until: float) -> None:
        """Do nothing: every answer is available when `send` returns."""

    def urgent(self) -> Prune | None:
        return None


class ForwardingLink:
    """A leader's link in the ring; it forwards messages to the members in the order in which it hands them out."""

    def __init__(self, link: Link, member_link: Link) -> None:
        self._link, self._member_link = link, member_link
        self.send, self.broadcast = link.send, link.broadcast

    @property
    def ready(self) -> bool:
        return self._link.ready

    def recv(self) -> Message:
        msg = self._link.recv()
        self._member_link.send(msg)
        return msg

    def urgent(self) -> Prune | None:
        prune = self._link.urgent()
        if prune is not None:
            self._member_link.send(prune)
        return prune
