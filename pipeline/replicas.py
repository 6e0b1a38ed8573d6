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
from pipeline.link import Link
from pipeline.messages import Prune, Reset, Segment
from pipeline.requests import RequestTarget, Ring, facts_of_sending
from pipeline.strategies import Progress
from pipeline.target_options import DEFAULT_OPTIONS, TargetOptions
from pipeline.trace import OFF, REAL, Clock, NoTrace

MAX_SEGMENT_ROWS = 64  # maximum rows of a segment


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
        closed_target = self._open[request]
        self._open = {number: target for number, target in self._open.items() if target is not closed_target}
        self.num_closed_requests += 1

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
    to_verify: frozenset[int]  # the nodes to verify; the others are catch-up
    is_stale: bool = False  # whether all its nodes were declared dead


class Copy:
    """Rank 0's record of one request in one replica. `request` is the request number in its messages."""

    def __init__(self, link: Link, request: int, tree: TokenTree, ids: Iterator[int]) -> None:
        self.link, self.request = link, request
        self.segments_in_flight: deque[SegmentInFlight] = deque()
        self._tree, self._ids = tree, ids
        self._id_of_node: dict[int, int] = {}  # node -> its id in the replica, for nodes sent and not given up
        self._unsettled_nodes: set[int] = set()  # the nodes among these that are not settled in the replica
        self._answered_nodes: set[int] = set()  # the unsettled nodes whose rows have come back
        self._num_settled = 0  # number of leading trunk nodes that are settled in the replica
        self._horizon = 0  # above all ids of this replica

    @property
    def num_live_segments(self) -> int:
        """Number of segments in flight that are not given up."""
        return sum(not sent_segment.is_stale for sent_segment in self.segments_in_flight)

    def load_before(self, nodes: Sequence[int]) -> tuple[int, int, int]:
        """Return its work before these nodes: live segments, all segments, missing rows."""
        return self.num_live_segments, len(self.segments_in_flight), len(self.missing(nodes))

    def missing(self, nodes: Sequence[int]) -> list[int]:
        """Return those of these nodes and their ancestors that the replica lacks, parents first."""
        missing_nodes: set[int] = set()
        for node in nodes:
            while node not in self._id_of_node and node not in missing_nodes:
                missing_nodes.add(node)
                node = self._tree.nodes[node].parent
        return sorted(missing_nodes)

    def with_new_ids(self, segment: Segment, to_verify: frozenset[int]) -> Segment:
        """Return the segment with new ids, and add it to the flights.

        A segment with guesses may be given up as a whole, so its text rows count as guesses until a prune settles them.
        """
        nodes = segment.nodes
        ids = [next(self._ids) for _ in nodes]
        self._horizon = ids[-1] + 1
        self._id_of_node.update(zip(nodes, ids))
        self._unsettled_nodes.update(nodes)
        self.segments_in_flight.append(SegmentInFlight(nodes, ids, to_verify))

        parents = [self._id_of_node[parent] for parent in segment.parents]
        num_text_rows = len(nodes) if segment.text == len(nodes) else 0
        return replace(segment, nodes=ids, parents=parents, text=num_text_rows)

    def take(self, segment: Segment) -> Segment:
        """Accept the oldest segment, which came back; return it with rank 0's ids, without rows if it was given up."""
        sent_segment = self.segments_in_flight.popleft()
        if sent_segment.is_stale:
            return segment.take([])

        node_of_id = dict(zip(sent_segment.ids, sent_segment.nodes))
        nodes = [node_of_id[replica_id] for replica_id in segment.nodes]
        self._answered_nodes.update(self._unsettled_nodes.intersection(nodes))
        return replace(segment, nodes=nodes)

    def prune(self, keeps_in_flight: bool = False) -> Prune | None:
        """Return the prune for this replica; None before the replica has answered for the first row of the text.

        Later text without an answer is kept like a live guess; with `keeps_in_flight`, so are all segments in flight.
        """
        tree = self._tree
        if not keeps_in_flight:
            self._give_up()

        # the settled text
        while self._num_settled < len(tree.trunk) and tree.trunk[self._num_settled] in self._answered_nodes:
            node = tree.trunk[self._num_settled]
            self._answered_nodes.remove(node)
            self._unsettled_nodes.remove(node)
            self._num_settled += 1

        # the other nodes
        self._forget([node for node in self._unsettled_nodes if node not in tree.nodes])
        if not self._num_settled:
            return None

        tip = tree.trunk[self._num_settled - 1]
        parent = tree.nodes[tip].parent
        kept_ids = [self._id_of_node[node] for node in self._unsettled_nodes]
        if keeps_in_flight:
            kept_ids += chain.from_iterable(sent_segment.ids for sent_segment in self.segments_in_flight)
        return Prune(self.request, self._id_of_node[tip], self._id_of_node[parent], self._horizon, kept_ids)

    def _give_up(self) -> None:
        """Mark segments as stale, the newest first, up to one with a live node to verify, or without dead ones."""
        tree = self._tree
        for sent_segment in reversed(self.segments_in_flight):
            is_useful = any(node in tree.live or node == tree.tip for node in sent_segment.to_verify)
            has_dead_nodes = any(node not in tree.nodes for node in sent_segment.to_verify)
            if is_useful or not has_dead_nodes:
                return
            if not sent_segment.is_stale:
                sent_segment.is_stale = True
                self._forget(sent_segment.nodes)

    def _forget(self, nodes: Sequence[int]) -> None:
        """Record that the replica gives these nodes up."""
        for node in nodes:
            self._id_of_node.pop(node, None)
            self._unsettled_nodes.discard(node)
            self._answered_nodes.discard(node)


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
        num_sent = sum(len(copy.segments_in_flight) for copy in self._copies.values())
        return len(self._returned_segments) + num_sent

    @property
    def free(self) -> bool:
        return any(copy.num_live_segments < self._stages for copy in self._copies.values())

    def send(self, nodes: Sequence[int]) -> None:
        copies = list(self._copies.values())
        if any(self.tree.nodes[node].pos >= self._prompt_length for node in nodes):
            copies = [min(copies, key=lambda copy: copy.load_before(nodes))]
        ids: list[int] = []
        with self.ring.trace.span("send", **facts_of_sending(self._segment(copies[0].request, nodes)), ids=ids):
            for copy in copies:
                ids += self._send(copy, nodes)

    def _send(self, copy: Copy, nodes: Sequence[int]) -> Iterator[int]:
        """Send these nodes and the ancestors that the replica lacks; yield the ids of all."""
        missing_nodes = copy.missing(nodes)
        for begin in range(0, len(missing_nodes), MAX_SEGMENT_ROWS):
            segment_nodes = missing_nodes[begin:begin + MAX_SEGMENT_ROWS]
            to_verify = frozenset(segment_nodes).intersection(nodes)
            segment = copy.with_new_ids(self._segment(copy.request, segment_nodes), to_verify)
            copy.link.send(segment)
            self.segments += 1
            yield from segment.nodes

    def wait(self) -> Progress:
        if self.in_flight:  # the last returned segment may have held only second answers, which are dropped
            yield from super().wait()

    def share(self) -> int | None:
        return self.options.segment_rows

    @property
    def held_prompt(self) -> Sequence[int]:
        return ()

    @property
    def _may_send(self) -> bool:
        return False  # so that `wait_until_free` waits for messages only

    def take(self, segment: Segment, message: int) -> None:
        copy = self._copies[segment.request]
        segment = copy.take(segment)
        new_rows = [i for i, node in enumerate(segment.nodes) if node not in self._returned_nodes]
        self._returned_nodes.update(segment.nodes)
        self._queue(segment.take(new_rows), message)

    def prune(self) -> None:
        with self._span("prune"):
            for copy in self._copies.values():
                prune = copy.prune(keeps_in_flight=not self.options.prunes)
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
