"""Replicas: several copies of the target, each with its own ring, which share the segments of a request.

They know nothing about strategies. A node is sent with those of its ancestors that the replica lacks (catch-up). Each
gets a new id, so that a node that a replica has given up can be sent to it again. The stages of a replica receive the
same kinds of messages as those of any ring.
"""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from itertools import chain
from typing import Callable, Iterator, Sequence

import torch
from torch import Tensor

from model.sample import Sampler
from model.tree import TokenTree
from pipeline.messages import Prune, Reset, Segment
from pipeline.pacing import DEFAULT_OPTIONS, TargetOptions
from pipeline.requests import RequestTarget, Ring, sent
from pipeline.strategies import Progress
from pipeline.trace import OFF, REAL, Clock, NoTrace
from pipeline.transport import Link

MOST = 64  # maximum rows of a segment


class Replicas(Ring):
    """Rank 0's view of all replicas. Their `links` share an inbox; each replica computes `stages` segments at once."""

    def __init__(self, links: Sequence[Link], lm_head: Callable[[Tensor], Tensor], stages: int,
                 device: torch.device | str = "cpu", trace: NoTrace = OFF, clock: Clock = REAL) -> None:
        super().__init__(links[0], lm_head, stages * len(links), device, trace, clock)
        self.links, self.stages = list(links), stages

    def open(self, tree: TokenTree, sampler: Sampler, options: TargetOptions = DEFAULT_OPTIONS) -> RequestTarget:
        copies = [Copy(link, next(self._numbers), tree, self.ids) for link in self.links]
        target = ReplicaTarget(self, copies, tree, sampler, options)
        self._open.update((copy.request, target) for copy in copies)
        return target

    def forget(self, request: int) -> None:
        closed = self._open[request]
        others = self._open.items()
        self._open = {number: target for number, target in others if target is not closed}
        self.requests += 1

    @property
    def running(self) -> list[RequestTarget]:
        return list(dict.fromkeys(super().running))

    def _measure(self, segments: Sequence[Segment]) -> None:
        """Measure nothing: the flights of the replicas show which one is free."""


@dataclass
class SegmentInFlight:
    """A segment in flight through a replica."""

    nodes: list[int]
    ids: list[int]  # ids of the nodes in this replica
    wanted: frozenset[int]  # the nodes to verify; the others are catch-up
    stale: bool = False  # whether all its nodes were declared dead


class Copy:
    """Rank 0's record of one request in one replica. `request` is the request number in its messages."""

    def __init__(self, link: Link, request: int, tree: TokenTree, ids: Iterator[int]) -> None:
        self.link, self.request = link, request
        self.flights: deque[SegmentInFlight] = deque()
        self._tree, self._ids = tree, ids
        self._id: dict[int, int] = {}  # node -> its id in the replica, for nodes sent and not given up
        self._young: set[int] = set()  # the nodes among these that are not settled in the replica
        self._back: set[int] = set()  # the young nodes whose rows have come back
        self._settled = 0  # number of leading trunk nodes that are settled in the replica
        self._horizon = 0  # above all ids of this replica

    @property
    def busy(self) -> int:
        """Number of segments in flight that are not given up."""
        return sum(not flight.stale for flight in self.flights)

    def effort(self, nodes: Sequence[int]) -> tuple[int, int, int]:
        """Return its work before these nodes: live segments, all segments, missing rows."""
        return self.busy, len(self.flights), len(self.missing(nodes))

    def missing(self, nodes: Sequence[int]) -> list[int]:
        """Return those of these nodes and their ancestors that the replica lacks, parents first."""
        found: set[int] = set()
        for node in nodes:
            while node not in self._id and node not in found:
                found.add(node)
                node = self._tree.nodes[node].parent
        return sorted(found)

    def name(self, segment: Segment, wanted: frozenset[int]) -> Segment:
        """Return the segment with new ids, and add it to the flights.

        A segment with guesses may be given up as a whole, so its text rows count as guesses until a prune settles them.
        """
        nodes = segment.nodes
        ids = [next(self._ids) for _ in nodes]
        self._horizon = ids[-1] + 1
        self._id.update(zip(nodes, ids))
        self._young.update(nodes)
        self.flights.append(SegmentInFlight(nodes, ids, wanted))
        parents = [self._id[parent] for parent in segment.parents]
        text = len(nodes) if segment.text == len(nodes) else 0
        return replace(segment, nodes=ids, parents=parents, text=text)

    def take(self, segment: Segment) -> Segment:
        """Accept the oldest segment, which came back; return it with rank 0's ids, without rows if it was given up."""
        flight = self.flights.popleft()
        if flight.stale:
            return segment.take([])
        of_id = dict(zip(flight.ids, flight.nodes))
        nodes = [of_id[id_] for id_ in segment.nodes]
        self._back.update(self._young.intersection(nodes))
        return replace(segment, nodes=nodes)

    def prune(self, spare: bool = False) -> Prune | None:
        """Return the prune for this replica; None before the replica has answered for the first row of the text.

        Later text without an answer is kept like a live guess; with `spare`, so are all segments in flight.
        """
        tree = self._tree
        if not spare:
            self._give_up()
        while self._settled < len(tree.trunk) and tree.trunk[self._settled] in self._back:
            node = tree.trunk[self._settled]
            self._back.remove(node)
            self._young.remove(node)
            self._settled += 1
        self._forget([node for node in self._young if node not in tree.nodes])
        if not self._settled:
            return None
        tip = tree.trunk[self._settled - 1]
        parent = tree.nodes[tip].parent
        keep = [self._id[node] for node in self._young]
        if spare:
            keep += chain.from_iterable(flight.ids for flight in self.flights)
        return Prune(self.request, self._id[tip], self._id[parent], self._horizon, keep)

    def _give_up(self) -> None:
        """Mark segments as stale, the newest first, up to one with a live wanted guess or without dead ones."""
        tree = self._tree
        for flight in reversed(self.flights):
            useful = any(node in tree.live or node == tree.tip for node in flight.wanted)
            died = any(node not in tree.nodes for node in flight.wanted)
            if useful or not died:
                return
            if not flight.stale:
                flight.stale = True
                self._forget(flight.nodes)

    def _forget(self, nodes: Sequence[int]) -> None:
        """Record that the replica gives these nodes up."""
        for node in nodes:
            self._id.pop(node, None)
            self._young.discard(node)
            self._back.discard(node)


class ReplicaTarget(RequestTarget):
    """All replicas as seen by one request: all read the prompt, and each later segment goes to the least busy one."""

    def __init__(self, replicas: Replicas, copies: Sequence[Copy], tree: TokenTree, sampler: Sampler,
                 options: TargetOptions) -> None:
        super().__init__(replicas, copies[0].request, tree, sampler, options)
        self._stages = replicas.stages
        self._copies = {copy.request: copy for copy in copies}
        self._returned_nodes: set[int] = set()  # nodes that have come back from any replica

    @property
    def in_flight(self) -> int:
        under_way = (len(copy.flights) for copy in self._copies.values())
        return len(self._returned) + sum(under_way)

    @property
    def free(self) -> bool:
        return any(copy.busy < self._stages for copy in self._copies.values())

    def send(self, nodes: Sequence[int]) -> None:
        copies = list(self._copies.values())
        if any(self.tree.nodes[node].pos >= self._prompt for node in nodes):
            copies = [min(copies, key=lambda copy: copy.effort(nodes))]
        ids: list[int] = []
        with self.ring.trace.span("send", **sent(self._segment(copies[0].request, nodes)), ids=ids):
            for copy in copies:
                ids += self._send(copy, nodes)

    def _send(self, copy: Copy, nodes: Sequence[int]) -> Iterator[int]:
        """Send these nodes and the ancestors that the replica lacks; yield the ids of all."""
        lacking = copy.missing(nodes)
        for begin in range(0, len(lacking), MOST):
            piece = lacking[begin:begin + MOST]
            wanted = frozenset(piece).intersection(nodes)
            segment = copy.name(self._segment(copy.request, piece), wanted)
            copy.link.send(segment)
            self.segments += 1
            yield from segment.nodes

    def wait(self) -> Progress:
        if self.in_flight:  # the last returned segment may have held only second answers, which are dropped
            yield from super().wait()

    def share(self, size: int | None) -> int | None:
        return size

    @property
    def held_prompt(self) -> Sequence[int]:
        return ()

    @property
    def _may_send(self) -> bool:
        return False  # so that `wait_until_free` waits for messages only

    def take(self, segment: Segment, message: int) -> None:
        copy = self._copies[segment.request]
        segment = copy.take(segment)
        news = [i for i, node in enumerate(segment.nodes) if node not in self._returned_nodes]
        self._returned_nodes.update(segment.nodes)
        self._queue(segment.take(news), message)

    def prune(self) -> None:
        with self._span("prune"):
            for copy in self._copies.values():
                prune = copy.prune(spare=not self.options.prunes)
                if prune is not None:
                    copy.link.broadcast(prune)

    def end(self, keep: bool = False) -> Sequence[int]:
        self.ended = True
        with self._span("reset"):
            for copy in self._copies.values():
                prune = copy.prune()
                if prune is not None:
                    copy.link.broadcast(replace(prune, keep=[]))
                copy.link.send(Reset(copy.request))
        return ()

    def reset(self, request: int) -> None:
        del self._copies[request]
        self.closed = not self._copies
        if self.closed:
            self.ring.forget(request)
