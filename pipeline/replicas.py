"""Replicas: several copies of the target, each a ring of its own, among which the segments of a request are dealt out.

It knows nothing about strategies. A node is sent with those of its ancestors that the replica lacks (catch-up: what is
there is the longest common prefix), each under an id that is new, so that whatever a replica has given up can be sent
to it again. What a replica hears is what the stages of any ring hear.
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
from pipeline.pacing import USUAL, Terms
from pipeline.requests import RequestTarget, Ring, facts_of
from pipeline.strategies import WAIT, Progress
from pipeline.trace import OFF, REAL, Clock, NoTrace
from pipeline.transport import Link

MOST = 64  # rows of a segment, at most


class Replicas(Ring):
    """Rank 0's end of all replicas, whose `links` have one inbox.

    Each replica has `stages` stages, and so can compute as many segments at once.
    """

    def __init__(self, links: Sequence[Link], lm_head: Callable[[Tensor], Tensor], stages: int,
                 device: torch.device | str = "cpu", trace: NoTrace = OFF, clock: Clock = REAL) -> None:
        super().__init__(links[0], lm_head, stages * len(links), device, trace, clock)
        self.links, self.stages = list(links), stages

    def open(self, tree: TokenTree, sampler: Sampler, terms: Terms = USUAL) -> RequestTarget:
        copies = [Copy(link, next(self._numbers), tree, self.ids) for link in self.links]
        target = ReplicaTarget(self, copies, tree, sampler, terms)
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

    def _is_back(self, segments: Sequence[Segment]) -> None:
        """The flights of each replica show who is free."""


@dataclass
class Flight:
    """A segment that is on its way through a replica: nodes, and the ids that they have there."""

    nodes: list[int]
    ids: list[int]
    wanted: frozenset[int]  # the nodes that it was sent for; the others catch up
    stale: bool = False  # whether it was declared dead, those that catch up included


class Copy:
    """What one replica holds of one request, as rank 0 knows it. `request` is the number of its messages."""

    def __init__(self, link: Link, request: int, tree: TokenTree, ids: Iterator[int]) -> None:
        self.link, self.request = link, request
        self.flights: deque[Flight] = deque()
        self.closed = False
        self._tree, self._ids = tree, ids
        self._id: dict[int, int] = {}  # node -> its id there, of what was sent and not given up
        self._young: set[int] = set()  # those of these nodes that are not settled there
        self._back: set[int] = set()  # and those whose rows have come back
        self._settled = 0  # how many nodes at the head of the trunk are settled there
        self._horizon = 0  # above every id that was handed out for this replica

    @property
    def busy(self) -> int:
        """How many segments it has that are not given up."""
        return sum(not flight.stale for flight in self.flights)

    def effort(self, nodes: Sequence[int]) -> tuple[int, int, int]:
        """What it has to do before these nodes come: segments, those that are given up, rows that it lacks."""
        return self.busy, len(self.flights), len(self.lacks(nodes))

    def lacks(self, nodes: Sequence[int]) -> list[int]:
        """These nodes and those of their ancestors that the replica was not sent, parents first."""
        found: set[int] = set()
        for node in nodes:
            while node not in self._id and node not in found:
                found.add(node)
                node = self._tree.nodes[node].parent
        return sorted(found)

    def name(self, segment: Segment, wanted: frozenset[int]) -> Segment:
        """The segment under new ids, which is under way from now on.

        If it has guesses it may be given up as a whole, so its text counts as guesses, too, until a prune settles it.
        """
        nodes = segment.nodes
        ids = [next(self._ids) for _ in nodes]
        self._horizon = ids[-1] + 1
        self._id.update(zip(nodes, ids))
        self._young.update(nodes)
        self.flights.append(Flight(nodes, ids, wanted))
        parents = [self._id[parent] for parent in segment.parents]
        text = len(nodes) if segment.text == len(nodes) else 0
        return replace(segment, nodes=ids, parents=parents, text=text)

    def take(self, segment: Segment) -> Segment:
        """The oldest segment that is under way has come back: its rows by their nodes, none if it was given up."""
        flight = self.flights.popleft()
        if flight.stale:
            return segment.take([])
        of_id = dict(zip(flight.ids, flight.nodes))
        nodes = [of_id[id_] for id_ in segment.nodes]
        self._back.update(self._young.intersection(nodes))
        return replace(segment, nodes=nodes)

    def prune(self, spare: bool = False) -> Prune | None:
        """What has died, as this replica has to hear it; None before it has answered for the first row of the text.

        The text that it has not answered for yet is kept like a guess that lives. With `spare`, so is what is under
        way.
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
        """Mark the last segments, as far as each was sent for guesses of which some died and none lives."""
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
        """The replica does not hold these nodes any more, or will not."""
        for node in nodes:
            self._id.pop(node, None)
            self._young.discard(node)
            self._back.discard(node)


class ReplicaTarget(RequestTarget):
    """All replicas as one request sees them: all read the prompt, and what follows goes to one that is free.

    If none is free, it goes to the one that has the least to do.
    """

    def __init__(self, replicas: Replicas, copies: Sequence[Copy], tree: TokenTree, sampler: Sampler,
                 terms: Terms) -> None:
        super().__init__(replicas, copies[0].request, tree, sampler, terms)
        self._stages = replicas.stages
        self._copies = {copy.request: copy for copy in copies}
        self._heard: set[int] = set()  # the nodes whose rows have come back from some replica

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
        with self.ring.trace.span("send", **facts_of(self._segment(copies[0].request, nodes)), ids=ids):
            for copy in copies:
                ids += self._send(copy, nodes)

    def _send(self, copy: Copy, nodes: Sequence[int]) -> Iterator[int]:
        """Send these nodes to one replica, behind what it lacks; the ids of what was sent."""
        lacking = copy.lacks(nodes)
        for begin in range(0, len(lacking), MOST):
            piece = lacking[begin:begin + MOST]
            wanted = frozenset(piece).intersection(nodes)
            segment = copy.name(self._segment(copy.request, piece), wanted)
            copy.link.send(segment)
            self.segments += 1
            yield from segment.nodes

    def wait(self) -> Progress:
        if self.in_flight:  # an answer that another replica gave before brings nothing, and may have been the last one
            yield from super().wait()

    def share(self, size: int | None) -> int | None:
        return size

    @property
    def held_prompt(self) -> Sequence[int]:
        return ()

    def rest(self) -> Progress:
        pending = self.tree.pending
        assert self.in_flight or pending, "nothing is in flight or to be sent, so nothing can happen"
        with self.ring.trace.span("wait"):
            while not self.ready() and self.in_flight and not (pending and self.free):
                yield WAIT

    def take(self, segment: Segment, message: int) -> None:
        copy = self._copies[segment.request]
        segment = copy.take(segment)
        news = [i for i, node in enumerate(segment.nodes) if node not in self._heard]
        self._heard.update(segment.nodes)
        self._hear(segment.take(news), message)

    def prune(self) -> None:
        with self._span("prune"):
            for copy in self._copies.values():
                prune = copy.prune(spare=not self.terms.prunes)
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
        self._copies[request].closed = True
        self.closed = all(copy.closed for copy in self._copies.values())
        if self.closed:
            self.ring.forget(request)
