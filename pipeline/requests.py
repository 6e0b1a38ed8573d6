"""Rank 0's requests: the ring of stages, which all requests share, and the target of each one.

A strategy streams segments through its target, and there the tree learns what follows each node. The ring knows nothing
about trees or what is said of their nodes; neither knows strategies, and strategies know nothing else of the pipeline.
"""
from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any, Callable, ContextManager, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from model.cache import upload
from model.rules import judged
from model.sample import Sampler, logprobs
from model.tree import TokenTree
from pipeline.failure import PeerLost
from pipeline.messages import NOBODY, Message, Prune, Reset, Segment, Start, Stop, joined, segments_of
from pipeline.pacing import USUAL, Pacing, Terms, worths
from pipeline.strategies import WAIT, Progress, Target
from pipeline.trace import OFF, REAL, Clock, Meter, NoTrace
from pipeline.transport import Link


def final(loss: PeerLost) -> None:
    """A loss that nobody mends."""
    raise loss


@dataclass
class Returned:
    """A segment that is back, in the message of this number. Its target holds it, and it holds no target."""

    segment: Segment
    x_TD: Tensor
    message: int
    asked: bool = False  # whether the LM head was asked about it
    logits: dict[int, Tensor] = field(default_factory=dict)  # node -> logits [V]


class RequestTarget(Target):
    """The ring as one request sees it: what is sent for it, what came back, and what the target says of its rows."""

    def __init__(self, ring: Ring, request: int, tree: TokenTree, sampler: Sampler, terms: Terms) -> None:
        self.ring, self.tree, self.sampler = ring, tree, sampler
        self.request = request  # the number of its messages
        self.terms = terms
        self._flying: deque[Sequence[int]] = deque()  # the nodes of segments that are under way
        self._returned: deque[Returned] = deque()
        self._prompt = self._settled = len(tree.trunk)  # tokens; and when stages heard last where the text ends
        self._gone = 0  # guesses that were sent, and of which no stage holds any
        self.wakes: float | None = None  # when the strategy goes on without a message; None: never
        self.ended = False  # whether nothing is sent any more
        self.closed = False  # whether every stage has forgotten the request, which has ended
        self.segments = 0  # sent so far
        self.reused = 0  # tokens of the prompt that the stages held already
        self.passed_over = 0  # segments that left without any of its guesses, since one left with some
        self._drafting = 0.0  # seconds that networks have computed for the newest level

    @property
    def depth(self) -> int:
        return self.ring.depth

    @property
    def in_flight(self) -> int:
        return len(self._flying) + len(self._returned)

    @property
    def has_room(self) -> bool:
        return self.in_flight < self.depth

    def ready(self) -> bool:
        if not self._returned:
            self.ring.poll()
        return bool(self._returned)

    def wait(self) -> Progress:
        assert self.in_flight, "nothing is in flight, so nothing can come back"
        with self.ring.trace.span("wait"):
            under_way = self.in_flight
            while not self.ready() and self.in_flight == under_way:
                yield WAIT
        if self._returned:
            self._judge()

    @property
    def free(self) -> bool:
        return self.ring.free and self._may_send

    @property
    def _may_send(self) -> bool:
        """Whether it may add to the segments that leave next: once, and its prompt behind those of older requests."""
        pacing = self.ring.pacing
        if self.request in pacing.rows.left_out or pacing.batcher.holds(self.request):
            return False
        reads = len(self.tree.unsent) > 1
        readers = (other for other in self.ring.running if len(other.tree.unsent) > 1)
        return not reads or self is next(readers)

    def share(self, size: int | None) -> int | None:
        running = self.ring.running
        if size is None or (len(running) < 2 and not self.terms.thrifty):
            return size
        return self.ring.pacing.rows.share(self, running, size)

    def holds(self, promise: float) -> bool:
        self._level_is_done()
        if not self.terms.thrifty or len(self.tree.trunk) <= self._prompt + 1:  # a network still reads the prompt
            return False
        guesses = map(math.exp, worths(self, weighed=False))
        likely = len(self.tree.unsent) + sum(guesses)
        behind = self.ring.pacing.times.slowest(len(self.tree.waiting) + 1)
        return self.ring.pacing.gate.holds(promise, likely, behind)

    def spares(self, promise: float) -> bool:
        self._level_is_done()
        pacing = self.ring.pacing
        pays = pacing.gate.pays(promise, pacing.first_stage.due, self.ring.clock.now())
        return pays or not self.terms.thrifty

    @property
    def guesses(self) -> bool:
        """Whether to guess at all: several requests do, and one that is alone while that is quicker than not to."""
        alone = self.terms.plain and len(self.ring.running) == 1
        return not alone or self.ring.pacing.fallback.guesses

    def drafted(self, seconds: float) -> None:
        """Networks have computed so long for the newest level."""
        self._drafting += seconds

    def _level_is_done(self) -> None:
        if self._drafting:
            self.ring.pacing.gate.drafted(self._drafting)
        self._drafting = 0.0

    def send(self, nodes: Sequence[int]) -> None:
        assert nodes and not self.ended, f"{len(nodes)} nodes are sent for request {self.request}"
        self._flying.append(nodes)
        self.segments += 1
        self.ring.put(self._segment(self.request, nodes))

    def rest(self) -> Progress:
        pending = self.tree.pending
        assert self.in_flight or pending, "nothing is in flight or to be sent, so nothing can happen"
        with self.ring.trace.span("wait"):
            while not self.ready() and (self.in_flight or pending) and not (pending and self.free):
                self.wakes = self.ring.pacing.first_stage.ready_at if pending and self._may_send else None
                yield WAIT
        self.wakes = None

    def prune(self) -> None:
        pacing, now = self.ring.pacing, self.ring.clock.now()
        text = len(self.tree.trunk)
        pacing.gate.settled(text - self._settled, now)
        if len(self.ring.running) == 1:
            pacing.fallback.settled(text - self._settled, now)
        else:
            pacing.fallback.begin(self.terms.plain)
        self._settled = text
        if self.tree.guessed == self._gone:
            return
        with self._span("prune"):
            spared = () if self.terms.prunes else chain.from_iterable(self._flying)
            keep = self.tree.live.union(spared)
            self._broadcast(list(keep))
            if not keep:
                self._gone = self.tree.guessed
            flying = set(chain.from_iterable(self._flying))
            dead = flying.difference(keep, [self.tree.tip])
            pacing.first_stage.prune(dead, now)

    def end(self, keep: bool = False) -> Sequence[int]:
        """Declare dead what is in flight, and let every stage forget the request; does not wait for that.

        With `keep` the stages may hold on to the text; returned are the nodes of which they do.
        """
        self.ended = True
        self.wakes = None
        # the answer for the last of them has made the tip
        nodes = self.tree.trunk[:-1] if keep and self.held_prompt else []
        with self._span("reset"):
            self._broadcast([])
            for _ in range(self.ring.pacing.batcher.drop(self.request)):
                self._flying.pop()
            self.ring.link.send(Reset(self.request, nodes[-1] if nodes else NOBODY))
        return nodes

    @property
    def held_prompt(self) -> Sequence[int]:
        """The nodes of the prompt, if every stage holds them as text; else none."""
        answered = len(self.tree.trunk) > self._prompt
        return self.tree.trunk[:self._prompt] if answered else ()

    def begin_behind(self, request: int, nodes: Sequence[int], length: int) -> None:
        """Begin behind the first `length` nodes of another request, whose tokens are those of this one."""
        tip = self.tree.trunk[length - 1]
        self.tree.skip(length)
        self.reused = length
        last = nodes[length - 1]
        self.ring.link.send(Start(self.request, tip, request, last, length))

    def close(self) -> None:
        if not self.ended:
            self.end()
        while not self.closed:
            self.ring.listen()

    def take(self, segment: Segment, message: int) -> None:
        """Keep a segment that came back for this request, in the message of this number."""
        assert self._flying, f"a segment is back for request {self.request}, which has sent none"
        self._flying.popleft()
        self._hear(segment, message)

    def reset(self, request: int) -> None:
        """A Reset of this request, under one of its numbers, has come round."""
        self.closed = True
        self._flying.clear()
        self.ring.forget(self.request)

    def _broadcast(self, keep: list[int]) -> None:
        """Tell every stage where the text ends, and which guesses live beside it."""
        tree, tip = self.tree, self.tree.tip
        prune = Prune(self.request, tip, tree.nodes[tip].parent, tree.horizon, keep)
        self.ring.link.broadcast(prune)

    def alive(self, segment: Segment) -> Segment:
        """The rows that are worth sending, of a segment that has waited to leave."""
        if not self.terms.prunes:
            return segment
        known = [i for i, node in enumerate(segment.nodes) if node in self.tree.nodes]
        return segment.take(known)

    def to_judge(self, nodes: Iterable[int]) -> list[int]:
        """Those of the nodes about which LM head and rule are to be asked: live guesses and the tip.

        Below other nodes nothing can be settled any more.
        """
        tree = self.tree
        return [node for node in nodes if node in tree.live or node == tree.tip]

    def to_ask(self, nodes: Sequence[int]) -> list[int]:
        """The nodes about which the LM head is asked: those, and nodes of a prompt whose logprobs are wanted."""
        return self.to_judge(nodes) + [node for node in nodes if self._echoes(node)]

    def _echoes(self, node: int) -> bool:
        """Whether the log-probability of the token of the prompt behind a node is wanted."""
        wanted = self.terms.logprobs
        return wanted is not None and node in self.tree.nodes and self.tree.nodes[node].pos < wanted.echoed

    def _hear(self, segment: Segment, message: int) -> None:
        """Keep a segment to be judged; one without rows says nothing."""
        if segment.nodes:
            x_TD = upload(segment.x, self.ring.device)
            self._returned.append(Returned(segment, x_TD, message))
        else:
            self.ring.trace.note("judge", self.ring.clock.now(), nodes=[], said={})

    def _judge(self) -> None:
        """Ask LM head and rule what follows the rows of the oldest segment that is back."""
        returned = self._returned[0]
        said: dict[int, int] = {}
        with self.ring.trace.span("judge", nodes=returned.segment.nodes, said=said):
            self._note(returned)
            self._ask(returned.message)
            self._returned.popleft()
            self._decide(returned.logits, said)
            self._note_logprobs(returned.logits, said)

    def _decide(self, logits: Mapping[int, Tensor], said: dict[int, int]) -> None:
        """Note in the tree, and in `said`, what the target says follows these nodes."""
        if nodes := self.to_judge(logits):
            logits_TV = torch.stack([logits[node] for node in nodes])
            said.update(zip(nodes, self._tokens(nodes, logits_TV)))
            for node, token in said.items():
                self.tree.nodes[node].target_token = token

    def _tokens(self, nodes: Sequence[int], logits_TV: Tensor) -> list[int]:
        """The tokens that the target says follow these nodes."""
        if self.tree.law is not None:
            logits_TV = self.tree.law.shaped(self.tree, nodes, logits_TV)
        if self.sampler.matches:
            return self.sampler(logits_TV, [self.tree.nodes[node].pos + 1 for node in nodes])
        return judged(self.sampler, self.tree, nodes, logits_TV)

    def _note_logprobs(self, logits: Mapping[int, Tensor], said: Mapping[int, int]) -> None:
        """Note in the tree the log-probabilities, where they are wanted, of what follows nodes and of the prompt."""
        wanted, tree = self.terms.logprobs, self.tree
        if wanted is None:
            return
        after = dict(said)
        for node in logits:
            if self._echoes(node):
                following = tree.trunk[tree.nodes[node].pos + 1]
                after[node] = tree.nodes[following].token
        if after:
            logits_TV = torch.stack([logits[node] for node in after])
            for node, logprob in zip(after, logprobs(logits_TV, list(after.values()), wanted.likeliest)):
                tree.nodes[node].logprob = logprob

    def _ask(self, message: int) -> None:
        """Ask the LM head, in one pass, about all segments of a message whose requests have not ended, once."""
        ring = self.ring
        group = [(each, target.to_ask(each.segment.nodes)) for target in ring.running for each in target._returned
                 if each.message == message and not each.asked]
        chosen = []
        for each, nodes in group:
            place = {node: row for row, node in enumerate(each.segment.nodes)}
            rows = torch.tensor([place[node] for node in nodes], dtype=torch.int64)
            chosen.append(each.x_TD.index_select(0, upload(rows, ring.device)))
        asked = any(nodes for _, nodes in group)
        said = iter(ring.lm_head(torch.cat(chosen)) if asked else ())
        for each, nodes in group:
            each.asked = True
            each.logits = {node: next(said) for node in nodes}

    def _note(self, returned: Returned) -> None:
        """Give each node of a segment that the tree still knows its features, for the draft."""
        inner = returned.segment.inner
        feature_TD = returned.x_TD if inner is None else upload(inner, self.ring.device)
        for node, feature_D in zip(returned.segment.nodes, feature_TD):
            known = self.tree.nodes.get(node)
            if known:
                known.hidden = feature_D

    def _span(self, name: str) -> ContextManager[object]:
        tip = self.tree.nodes[self.tree.tip]
        return self.ring.trace.span(name, tip=self.tree.tip, token=tip.token, parent=tip.parent)

    def _segment(self, request: int, nodes: Sequence[int]) -> Segment:
        """These nodes as a message."""
        known = [self.tree.nodes[node] for node in nodes]
        parents = [node.parent for node in known]
        pos = [node.pos for node in known]
        text = len(nodes) - len(self.tree.live.intersection(nodes))
        token_T = torch.tensor([node.token for node in known])
        inner_T0 = token_T.new_empty(len(nodes), 0) if self.terms.inner else None
        return Segment(request, list(nodes), parents, pos, text, token_T, inner_T0)


class Ring:
    """The stages in a ring: rank 0 sends to the first and hears from the last; it alone holds the LM head.

    Requests share it, each through a target of its own. `depth` is how many segments fill it.
    """

    target_of: Callable[..., RequestTarget] = RequestTarget

    def __init__(self, link: Link, lm_head: Callable[[Tensor], Tensor], depth: int, device: torch.device | str = "cpu",
                 trace: NoTrace = OFF, clock: Clock = REAL) -> None:
        self.links = [link]  # to each ring; what comes back is heard at the first
        self.lm_head = lm_head
        self.depth, self.device = depth, device
        self.trace, self.clock = trace, clock
        self.meter = Meter()  # of rank 0's work
        self.unlearn()
        self.requests = 0  # closed since the start
        self.heard = 0  # messages that have come back since the start
        self.unanswered = 0  # of those that `ping` has sent
        self.stopped = False  # whether it was ended
        self.epoch = 0  # how often all ranks were connected again, and the stages then held nothing
        self.reconnect: Callable[[PeerLost], None] = final  # returns once all are, or raises PeerLost
        self.ids: Iterator[int] = count()  # of the nodes of all requests, so that no id ever means two nodes
        self._numbers: Iterator[int] = count()  # of the requests
        self._question = -1  # the number of what `ping` has sent last
        self._open: dict[int, RequestTarget] = {}  # by the numbers that their messages have

    @property
    def link(self) -> Link:
        """Where everything that comes back is heard."""
        return self.links[0]

    @property
    def running(self) -> list[RequestTarget]:
        """The requests that have not ended, the oldest first."""
        return [target for target in self._open.values() if not target.ended]

    @property
    def closing(self) -> bool:
        """Whether a request has ended that some stage has not forgotten yet."""
        return any(target.ended for target in self._open.values())

    def unlearn(self) -> None:
        """Forget what earlier requests have taught of stages and drafts; none is open."""
        self.pacing = Pacing(self.depth)

    def open(self, tree: TokenTree, sampler: Sampler, terms: Terms = USUAL) -> RequestTarget:
        """The target of a new request."""
        request = next(self._numbers)
        target = self.target_of(self, request, tree, sampler, terms)
        self._open[request] = target
        self.pacing.fallback.begin(terms.plain)
        return target

    def evict(self, request: int) -> None:
        """Let every stage forget the text that it holds of a request that is over."""
        self.link.send(Reset(request))

    def forget(self, request: int) -> None:
        """Forget a request that is closed."""
        del self._open[request]
        self.requests += 1

    # --- out ----------------------------------------------------------------------------------------------------------

    def put(self, segment: Segment) -> None:
        """Send a segment at once, if its request is alone; else together with those of others, at the next departure.
        """
        self.pacing.batcher.put(segment)
        if len(self.running) == 1:
            self.depart()

    @property
    def free(self) -> bool:
        """Whether a segment that leaves now would hardly wait for the first stage."""
        return self.clock.now() >= self.pacing.first_stage.ready_at

    def depart(self) -> None:
        """Let leave what was put together, one message after the other, each as the first stage gets free for it."""
        batcher = self.pacing.batcher
        while batcher and (self.free or len(self.running) < 2):
            segments = [self._open[segment.request].alive(segment) for segment in batcher.take()]
            message = joined(segments)
            self.pacing.first_stage.send(message.nodes, self.clock.now())
            *others, last = segments
            for segment in others:  # they leave with the last one, whose span has the time of all
                self.trace.note("send", self.clock.now(), **facts_of(segment))
            with self.trace.span("send", **facts_of(last)):
                self.link.send(message)
            self.pacing.rows.close()

    # --- back ---------------------------------------------------------------------------------------------------------

    def listen(self, until: float | None = None) -> None:
        """Wait for a message, for something else that an open request waits for, or a moment; hand out messages."""
        self.depart()
        moments = [target.wakes for target in self.running if target.wakes is not None]
        if until is not None:
            moments.append(until)
        if self.pacing.batcher:
            moments.append(self.pacing.first_stage.ready_at)
        if moments:
            self.link.rest(min(moments))
            self.poll()
        elif self.closing or any(target.in_flight for target in self.running):
            self._hand_out(self.link.recv())
        else:
            self.pacing.rows.close()  # everybody was left out for somebody who has nothing to send any more

    def poll(self) -> None:
        """Hand out the messages that have come already, without waiting for others."""
        while self.link.ready:
            self._hand_out(self.link.recv())

    def _hand_out(self, message: Message) -> None:
        """Hand a message to the requests that it is of."""
        assert not isinstance(message, (Prune, Stop)), f"a {type(message).__name__} came back instead of a segment"
        self.heard += 1
        if isinstance(message, Reset) and message.request in self._open:  # else a text was evicted, or nothing
            self._open[message.request].reset(message.request)
        elif isinstance(message, Reset) and message.request == self._question:
            self.unanswered -= 1
        segments = segments_of(message)
        if segments:
            self._is_back(segments)
        for segment in segments:
            self._target(segment.request).take(segment, self.heard)

    def _target(self, request: int) -> RequestTarget:
        assert request in self._open, f"a message for request {request}, which is not open"
        return self._open[request]

    def _is_back(self, segments: Sequence[Segment]) -> None:
        """Note that the oldest message has come round."""
        rows = sum(len(segment.nodes) for segment in segments)
        way = self.pacing.first_stage.back(rows, self.clock.now())
        self.pacing.times.learn(max((segment.visits for segment in segments), key=len), way)

    # --- all of it ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Wait until every stage has passed a first message on, which shows that it is there."""
        self._round(Reset(next(self._numbers)))

    def ping(self) -> None:
        """Send round what changes nothing, to hear whether all stages pass on what comes; for when nothing else does.
        """
        self._question = next(self._numbers)
        self.unanswered = len(self.links)
        for link in self.links:
            link.send(Reset(self._question))

    def stop(self) -> None:
        """End the pipeline: every stage has passed the message on when this returns."""
        self.stopped = True
        self._round(Stop())

    def recover(self, loss: PeerLost) -> None:
        """After a loss let all ranks connect again, and the stages begin with nothing; raises PeerLost if they cannot.
        """
        ready = False
        while not ready:
            self.reconnect(loss)
            self._open, self.unanswered = {}, 0
            self.unlearn()
            self.epoch += 1
            try:
                self.start()
                ready = True
            except PeerLost as another:
                loss = another

    def _round(self, msg: Message) -> None:
        """Send a message round every ring, and drop what comes back before it."""
        for link in self.links:
            link.send(msg)
        under_way = len(self.links)
        while under_way:
            under_way -= isinstance(self.link.recv(), type(msg))


def facts_of(segment: Segment) -> dict[str, Any]:
    """What the span says in which a segment leaves."""
    return {"nodes": segment.nodes, "tokens": segment.x.tolist(), "parents": segment.parents, "text": segment.text}
