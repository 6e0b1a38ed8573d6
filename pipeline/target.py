"""The target: where a strategy streams segments, and where the tree learns what follows each node.

It is the ring (`ring.py`) as one request sees it. It knows nothing about strategies, and strategies know nothing else
about the pipeline.
"""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import chain
from typing import Callable, ContextManager, Protocol, Sequence

import torch
from torch import Tensor

from model.cache import upload
from model.logprobs import Telling
from model.rules import rule_of
from model.sample import Sampler
from model.tree import TokenTree
from pipeline.batcher import Outbox
from pipeline.draft_gate import Drafting, Leisure
from pipeline.first_stage import FirstStage
from pipeline.interfaces import Clock, Progress, Target
from pipeline.messages import NOBODY, Prune, Reset, Segment, Start
from pipeline.trace import NoTrace
from pipeline.transport import Link


class Shared(Protocol):
    """What requests share: the ring (`pipeline/ring.py`), as their targets use it."""

    lm_head: Callable[[Tensor], Tensor]
    outbox: Outbox
    first_stage: FirstStage
    leisure: Leisure
    depth: int
    device: torch.device | str
    trace: NoTrace
    clock: Clock
    segments: int  # sent since the start
    shared: int  # how often the rows of the next segment were shared out anew

    @property
    def link(self) -> Link:
        """Where everything that comes back is heard."""

    @property
    def running(self) -> Sequence[RequestTarget]:
        """The requests that have not ended, the oldest first."""

    @property
    def free(self) -> bool:
        """Whether a segment that leaves now would hardly wait for the first stage."""

    def share(self, target: RequestTarget, size: int | None) -> int | None:
        """How many of `size` rows of the next segment are for this request."""

    def put(self, segment: Segment) -> None:
        """Send a segment, alone or with those of others."""

    def poll(self) -> None:
        """Hand out the messages that have come already."""

    def listen(self) -> None:
        """Wait until there is a message, or something else that a request waits for; hand out messages."""

    def forget(self, request: int) -> None:
        """Forget a request that is closed."""


@dataclass
class Returned:
    """A segment that is back, in the message of this number. Its target holds it, and it holds no target."""

    segment: Segment
    x_TD: Tensor
    message: int
    asked: bool = False  # whether the LM head was asked about it
    logits: dict[int, Tensor] = field(default_factory=dict)  # node -> logits [V]


class RequestTarget(Target):
    """What one request hears: the segments that came back for it, and what the target says of their rows."""

    def __init__(self, ring: Shared, request: int, tree: TokenTree, sampler: Sampler, inner: bool,
                 prunes: bool) -> None:
        self.ring, self.tree, self.rule = ring, tree, rule_of(sampler)
        self.request = request  # the number of its messages
        self.inner, self.prunes = inner, prunes
        self._returned: deque[Returned] = deque()
        self.wakes: float | None = None  # when the strategy goes on without a message; None: never
        self.ended = False  # whether nothing is sent any more
        self.segments = 0  # sent so far
        self.reused = 0  # tokens of the prompt that the stages held already
        self.priority = 1.0  # how much its guesses count beside those of others
        self.telling: Telling | None = None  # what it wants told of log-probabilities
        self.passed_over = 0  # segments that left without any of its guesses, since one left with some
        self.thrifty = True  # whether only those guesses are sent, and drafted, that pay
        self.drafting = Drafting(ring.leisure, len(tree.trunk))

    @property
    def depth(self) -> int:
        return self.ring.depth

    @property
    def has_room(self) -> bool:
        return self.in_flight < self.depth

    @property
    def ready(self) -> bool:
        if not self._returned:
            self.ring.poll()
        return bool(self._returned)

    def wait(self) -> Progress:
        assert self.in_flight, "nothing is in flight, so nothing can come back"
        with self.ring.trace.span("wait"):
            under_way = self.in_flight
            while not self.ready and self.in_flight == under_way:
                yield []
        if self._returned:
            self._judge()

    def share(self, size: int | None) -> int | None:
        return size

    def spares(self, promise: float) -> bool:
        return self.drafting.pays(promise, self.ring.first_stage.due, self.ring.clock.now()) or not self.thrifty

    @property
    def closed(self) -> bool:
        """Whether every stage has forgotten the request, which has ended."""
        raise NotImplementedError

    def end(self, keep: bool = False) -> Sequence[int]:
        """Declare dead what is in flight, and let every stage forget the request; does not wait for that.

        With `keep` the stages may hold on to the text; returned are the nodes of which they do.
        """
        raise NotImplementedError

    @property
    def read(self) -> Sequence[int]:
        """The nodes of the prompt, if every stage holds them as text; else none."""
        return ()

    def begin_behind(self, request: int, nodes: Sequence[int], length: int) -> None:
        """Begin behind the first `length` nodes of another request, whose tokens are those of this one."""
        raise NotImplementedError

    def close(self) -> None:
        if not self.ended:
            self.end()
        while not self.closed:
            self.ring.listen()

    def take(self, segment: Segment, message: int) -> None:
        """Keep a segment that came back for this request, in the message of this number."""
        raise NotImplementedError

    def reset(self, request: int) -> None:
        """A Reset of this request, under one of its numbers, has come round."""
        raise NotImplementedError

    def alive(self, segment: Segment) -> Segment:
        """The rows that are worth sending, of a segment that has waited to leave."""
        if not self.prunes:
            return segment
        known = [i for i, node in enumerate(segment.nodes) if node in self.tree.token]
        return segment.take(known)

    def judges(self, segment: Segment) -> list[int]:
        """The nodes about which LM head and rule are to be asked: live guesses and the tip.

        Below other nodes nothing can be settled any more.
        """
        tree = self.tree
        return [node for node in segment.nodes if node in tree.live or node == tree.tip]

    def asks(self, segment: Segment) -> list[int]:
        """The nodes about which the LM head is to be asked: those, and nodes of a prompt of which something is told."""
        judged, telling = self.judges(segment), self.telling
        if telling is None:
            return judged
        return judged + [node for node in segment.nodes if telling.echoes(self.tree, node)]

    def _hear(self, segment: Segment, message: int) -> None:
        """Keep a segment to be judged; one without rows says nothing."""
        if segment.nodes:
            self._returned.append(Returned(segment, upload(segment.x, self.ring.device), message))
        else:
            self.ring.trace.note("verify", self.ring.clock.now(), nodes=[], said={})

    def _judge(self) -> None:
        """Ask LM head and rule what follows the rows of the oldest segment that is back."""
        returned = self._returned[0]
        said: dict[int, int] = {}
        with self.ring.trace.span("verify", nodes=returned.segment.nodes, said=said):
            self._note(returned)
            self._ask(returned.message)
            self._returned.popleft()
            logits = returned.logits
            judged = [node for node in self.judges(returned.segment) if node in logits]
            if judged:
                logits_TV = torch.stack([logits[node] for node in judged])
                said.update(zip(judged, self.rule(self.tree, judged, logits_TV)))
                self.tree.target_token.update(said)
            if self.telling is not None:
                self.telling.keep(self.tree, logits, said)

    def _ask(self, message: int) -> None:
        """Ask the LM head, in one pass, about all segments of a message whose requests have not ended, once."""
        ring = self.ring
        group = [(each, target.asks(each.segment)) for target in ring.running for each in target._returned
                 if each.message == message and not each.asked]
        chosen = []
        for each, nodes in group:
            place = {node: row for row, node in enumerate(each.segment.nodes)}
            rows = upload(torch.tensor([place[node] for node in nodes], dtype=torch.int64), ring.device)
            chosen.append(each.x_TD.index_select(0, rows))
        said = iter(ring.lm_head(torch.cat(chosen)) if any(nodes for _, nodes in group) else ())
        for each, nodes in group:
            each.asked = True
            each.logits = {node: next(said) for node in nodes}

    def _note(self, returned: Returned) -> None:
        """Give each node of a segment that the tree still knows its features, for the draft."""
        inner = returned.segment.inner
        feature_TD = returned.x_TD if inner is None else upload(inner, self.ring.device)
        for node, feature_D in zip(returned.segment.nodes, feature_TD):
            if node in self.tree.token:
                self.tree.hidden[node] = feature_D

    def _span(self, name: str) -> ContextManager[object]:
        tree, tip = self.tree, self.tree.tip
        token, parent = tree.token[tip], tree.parent[tip]
        return self.ring.trace.span(name, tip=tip, token=token, parent=parent)

    def _segment(self, request: int, nodes: Sequence[int]) -> Segment:
        """These nodes as a message."""
        tree = self.tree
        parents = [tree.parent[node] for node in nodes]
        pos = [tree.pos[node] for node in nodes]
        text = sum(node not in tree.live for node in nodes)
        token_T = torch.tensor([tree.token[node] for node in nodes])
        inner_T0 = token_T.new_empty(len(nodes), 0) if self.inner else None
        return Segment(request, list(nodes), parents, pos, text, token_T, inner_T0)


class RingTarget(RequestTarget):
    """The ring as one request sees it."""

    def __init__(self, ring: Shared, request: int, tree: TokenTree, sampler: Sampler, inner: bool,
                 prunes: bool) -> None:
        super().__init__(ring, request, tree, sampler, inner, prunes)
        self._flying: deque[Sequence[int]] = deque()  # the nodes of segments that are under way
        self._closed = False
        self._prompt = len(tree.trunk)
        self._left_out = -1  # the sharing in which it got no rows

    @property
    def in_flight(self) -> int:
        return len(self._flying) + len(self._returned)

    @property
    def free(self) -> bool:
        return self.ring.free and self._may_send

    @property
    def _may_send(self) -> bool:
        """Whether it may add to the segments that leave next: once, and its prompt behind those of older requests."""
        if self._left_out == self.ring.shared or self.ring.outbox.holds(self.request):
            return False
        reads = len(self.tree.unsent) > 1
        return not reads or self is next(other for other in self.ring.running if len(other.tree.unsent) > 1)

    def share(self, size: int | None) -> int | None:
        rows = self.ring.share(self, size)
        if rows == 0 and len(self.ring.running) > 1:
            self._left_out = self.ring.shared
        return rows

    def send(self, nodes: Sequence[int]) -> None:
        self._flying.append(nodes)
        self.segments += 1
        self.ring.put(self._segment(self.request, nodes))

    def rest(self) -> Progress:
        pending = self.tree.pending
        assert self.in_flight or pending, "nothing is in flight or to be sent, so nothing can happen"
        with self.ring.trace.span("wait"):
            while not self.ready and (self.in_flight or pending) and not (pending and self.free):
                self.wakes = self.ring.first_stage.ready_at if pending and self._may_send else None
                yield []
        self.wakes = None

    def take(self, segment: Segment, message: int) -> None:
        self._flying.popleft()
        self._hear(segment, message)

    def prune(self) -> None:
        self.drafting.settled(len(self.tree.trunk), self.ring.clock.now())
        with self._span("prune"):
            spared = () if self.prunes else chain.from_iterable(self._flying)
            keep = self.tree.live.union(spared)
            self._broadcast(list(keep))
            dead = set(chain.from_iterable(self._flying)).difference(keep, [self.tree.tip])
            self.ring.first_stage.prune(dead, self.ring.clock.now())

    @property
    def closed(self) -> bool:
        return self._closed

    def end(self, keep: bool = False) -> Sequence[int]:
        self.ended = True
        self.wakes = None
        nodes = self.tree.trunk[:-1] if keep and self.read else []  # the answer for the last of them has made the tip
        with self._span("reset"):
            self._broadcast([])
            for _ in range(self.ring.outbox.drop(self.request)):
                self._flying.pop()
            self.ring.link.send(Reset(self.request, nodes[-1] if nodes else NOBODY))
        return nodes

    @property
    def read(self) -> Sequence[int]:
        answered = len(self.tree.trunk) > self._prompt
        return self.tree.trunk[:self._prompt] if answered else ()

    def begin_behind(self, request: int, nodes: Sequence[int], length: int) -> None:
        tip = self.tree.trunk[length - 1]
        self.tree.skip(length)
        self.reused = length
        self.ring.link.send(Start(self.request, tip, request, nodes[length - 1], length))

    def reset(self, request: int) -> None:
        self._closed = True
        self._flying.clear()
        self.ring.forget(self.request)

    def _broadcast(self, keep: list[int]) -> None:
        """Tell every stage where the text ends, and which guesses live beside it."""
        tree, tip = self.tree, self.tree.tip
        prune = Prune(self.request, tip, tree.parent[tip], tree.horizon, keep)
        self.ring.link.broadcast(prune)
