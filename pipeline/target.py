"""The target: where a strategy streams segments, and where the tree learns what follows each node.

It knows nothing about strategies, and strategies know nothing else about the pipeline.
"""
from __future__ import annotations

from collections import deque
from itertools import chain, count
from typing import Any, Callable, ContextManager, Iterator, Sequence

import torch
from torch import Tensor

from model.cache import upload
from model.rules import rule_of
from model.sample import Sampler
from model.tree import TokenTree
from pipeline.clock import REAL
from pipeline.first_stage import FirstStage
from pipeline.interfaces import Clock, Progress, Target
from pipeline.messages import Message, Prune, Reset, Segment, Stop
from pipeline.trace import OFF, NoTrace
from pipeline.transport import Link


class Ring:
    """The stages in a ring: rank 0 sends to the first and hears from the last; it alone holds the LM head.

    Requests share it, each through a target of its own. `depth` is how many segments fill it.
    """

    def __init__(self, link: Link, lm_head: Callable[[Tensor], Tensor], depth: int, device: torch.device | str = "cpu",
                 trace: NoTrace = OFF, clock: Clock = REAL) -> None:
        self.links = [link]  # to each ring; what comes back is heard at the first
        self.lm_head = lm_head
        self.depth, self.device = depth, device
        self.trace, self.clock = trace, clock
        self.first_stage = FirstStage(1 / max(1, depth - 1))
        self.segments = 0  # sent since the start
        self.requests = 0  # closed since the start
        self.ids: Iterator[int] = count()  # of the nodes of all requests, so that no id ever means two nodes
        self._numbers: Iterator[int] = count()  # of the requests
        self._open: dict[int, RequestTarget] = {}  # by the numbers that their messages have

    @property
    def link(self) -> Link:
        """Where everything that comes back is heard."""
        return self.links[0]

    def open(self, tree: TokenTree, sampler: Sampler, inner: bool = False, prunes: bool = True) -> RequestTarget:
        """The target of a new request.

        `inner`: the draft's features are the inputs of inner layers, which segments must ask the stages for. Without
        `prunes`, stages compute guesses to the end that died on their way, and forget them when they have come back.
        """
        request = next(self._numbers)
        target = RingTarget(self, request, tree, sampler, inner, prunes)
        self._open[request] = target
        return target

    def forget(self, request: int) -> None:
        """Forget a request that is closed."""
        del self._open[request]
        self.requests += 1

    def listen(self) -> None:
        """Wait until there is a message, or something else that an open request waits for; hand out messages."""
        moments = [target.wakes for target in self._open.values()]
        if None in moments:
            self._hand_out(self.link.recv())
        else:
            self.link.rest(min(moment for moment in moments if moment is not None))
            self.poll()

    def _hand_out(self, message: Message) -> None:
        """Hand a message to the request that it is of."""
        assert isinstance(message, (Segment, Reset)), f"a {type(message).__name__} came back instead of a segment"
        assert message.request in self._open, f"a message for request {message.request}, which is not open"
        self._open[message.request].take(message)

    def poll(self) -> None:
        """Hand out the messages that have come already, without waiting for others."""
        while self.link.ready:
            self._hand_out(self.link.recv())

    def start(self) -> None:
        """Wait until every stage has passed a first message on, which shows that it is there."""
        self._round(Reset(next(self._numbers)))

    def stop(self) -> None:
        """End the pipeline: every stage has passed the message on when this returns."""
        self._round(Stop())

    def _round(self, msg: Message) -> None:
        """Send a message round every ring, and drop what comes back before it."""
        for link in self.links:
            link.send(msg)
        under_way = len(self.links)
        while under_way:
            under_way -= isinstance(self.link.recv(), type(msg))


class RequestTarget(Target):
    """What one request hears: the segments that came back for it, and what the target says of their rows."""

    def __init__(self, ring: Ring, tree: TokenTree, sampler: Sampler, inner: bool, prunes: bool) -> None:
        self.ring, self.tree, self.rule = ring, tree, rule_of(sampler)
        self.inner, self.prunes = inner, prunes
        self._returned: deque[Segment] = deque()
        self.wakes: float | None = None  # when the strategy goes on without a message; None: never

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

    def take(self, message: Segment | Reset) -> None:
        """Keep a message that came back for this request."""
        raise NotImplementedError

    def _hear(self, segment: Segment) -> None:
        """Keep a segment to be judged; one without rows says nothing."""
        if segment.nodes:
            self._returned.append(segment)
        else:
            self.ring.trace.note("verify", self.ring.clock.now(), nodes=[], said={})

    def _judge(self) -> None:
        """Ask LM head and rule what follows the rows of the oldest segment that is back."""
        segment = self._returned.popleft()
        said: dict[int, int] = {}
        with self.ring.trace.span("verify", nodes=segment.nodes, said=said):
            self._note(segment, said)

    def _note(self, segment: Segment, said: dict[int, int]) -> None:
        """Write into the tree what a segment that came back tells of its nodes, and the target's tokens into `said`.

        Each node that the tree still knows gets its features, for the draft. LM head and rule then say which token
        follows a live guess or the tip; below other nodes nothing can be settled any more, so they are not asked.
        """
        tree, device = self.tree, self.ring.device
        nodes = segment.nodes
        known = [i for i, node in enumerate(nodes) if node in tree.token]
        x_TD = upload(segment.x, device)
        feature_TD = x_TD if segment.inner is None else upload(segment.inner, device)
        for i in known:
            tree.hidden[nodes[i]] = feature_TD[i]
        asked = [i for i in known if nodes[i] in tree.live or nodes[i] == tree.tip]
        if asked:
            rows = upload(torch.tensor(asked), device)
            logits_TV = self.ring.lm_head(x_TD.index_select(0, rows))
            judged = [nodes[i] for i in asked]
            said.update(zip(judged, self.rule(tree, judged, logits_TV)))
            tree.target_token.update(said)

    def _span(self, name: str) -> ContextManager[object]:
        tree, tip = self.tree, self.tree.tip
        token, parent = tree.token[tip], tree.parent[tip]
        return self.ring.trace.span(name, tip=tip, token=token, parent=parent)

    def _sending(self, segment: Segment, **facts: Any) -> ContextManager[object]:
        """The span in which a segment leaves."""
        facts.update(nodes=segment.nodes, tokens=segment.x.tolist(), parents=segment.parents, text=segment.text)
        return self.ring.trace.span("send", **facts)

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

    def __init__(self, ring: Ring, request: int, tree: TokenTree, sampler: Sampler, inner: bool, prunes: bool) -> None:
        super().__init__(ring, tree, sampler, inner, prunes)
        self.request = request
        self._flying: deque[Sequence[int]] = deque()  # the nodes of segments that are under way
        self._closed = False

    @property
    def in_flight(self) -> int:
        return len(self._flying) + len(self._returned)

    @property
    def free(self) -> bool:
        return self.ring.clock.now() >= self.ring.first_stage.ready_at

    def send(self, nodes: Sequence[int]) -> None:
        segment = self._segment(self.request, nodes)
        with self._sending(segment):
            self.ring.first_stage.send(segment.nodes, self.ring.clock.now())
            self.ring.link.send(segment)
        self._flying.append(nodes)
        self.ring.segments += 1

    def rest(self) -> Progress:
        pending = self.tree.pending
        assert self.in_flight or pending, "nothing is in flight or to be sent, so nothing can happen"
        with self.ring.trace.span("wait"):
            while not self.ready and (self.in_flight or pending) and not (pending and self.free):
                self.wakes = self.ring.first_stage.ready_at if pending else None
                yield []
        self.wakes = None

    def take(self, message: Segment | Reset) -> None:
        if isinstance(message, Reset):
            self._closed = True
            return
        self._flying.popleft()
        self.ring.first_stage.back(len(message.nodes), self.ring.clock.now())
        self._hear(message)

    def prune(self) -> None:
        with self._span("prune"):
            spared = () if self.prunes else chain.from_iterable(self._flying)
            keep = self.tree.live.union(spared)
            self._broadcast(list(keep))
            dead = set(chain.from_iterable(self._flying)).difference(keep, [self.tree.tip])
            self.ring.first_stage.prune(dead, self.ring.clock.now())

    def close(self) -> None:
        """Declare dead what is in flight, send a Reset after it, and wait until that has come round the ring."""
        self.wakes = None
        with self._span("reset"):
            self._broadcast([])
            self.ring.link.send(Reset(self.request))
            while not self._closed:
                self.ring.listen()
        self._flying.clear()
        self.ring.forget(self.request)

    def _broadcast(self, keep: list[int]) -> None:
        """Tell every stage where the text ends, and which guesses live beside it."""
        tree, tip = self.tree, self.tree.tip
        prune = Prune(self.request, tip, tree.parent[tip], tree.horizon, keep)
        self.ring.link.broadcast(prune)
