"""Requests on rank 0: the ring of stages, which all requests share, and the target of each request.

A strategy sends segments through its target, which records in the tree the token that follows each node. Strategies
know nothing else of the pipeline. The ring sends, receives and distributes messages.
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
from pipeline.messages import NOBODY, Features, Message, Prune, Reset, Segment, Start, Stop, joined, segments_of
from pipeline.pacing import DEFAULT_OPTIONS, Pacing, TargetOptions, worths
from pipeline.strategies import WAIT, Progress, Target
from pipeline.trace import OFF, REAL, Clock, Meter, NoTrace
from pipeline.transport import Link, send_round


def no_recovery(loss: PeerLost) -> None:
    """Raise the loss: there is no recovery."""
    raise loss


@dataclass
class Returned:
    """A segment that came back and is not judged yet. It holds no reference to its target, which would be a cycle."""

    segment: Segment
    x_TD: Tensor
    message: int  # number of the message that held it
    has_logits: bool = False  # whether its rows went through the LM head
    logits: dict[int, Tensor] = field(default_factory=dict)  # node -> logits [V]


class RequestTarget(Target):
    """The ring as seen by one request: its segments in flight and returned, and the target's answers for them."""

    def __init__(self, ring: Ring, request: int, tree: TokenTree, sampler: Sampler, options: TargetOptions) -> None:
        self.ring, self.tree, self.sampler = ring, tree, sampler
        self.request = request  # the number of its messages
        self.options = options
        self._flying: deque[Sequence[int]] = deque()  # the nodes of segments in flight
        self._returned: deque[Returned] = deque()
        self._prompt = self._settled = len(tree.trunk)  # lengths of the prompt, and of the text at the last prune
        self._gone = 0  # value of `tree.guessed` at the last prune that left no guess alive
        self.wakes: float | None = None  # time at which the strategy advances without a message
        self.ended = False  # whether the request sends nothing any more
        self.closed = False  # whether every stage has forgotten the request
        self.segments = 0  # number of segments sent so far
        self.reused = 0  # number of prompt tokens that the stages held already
        self.passed_over = 0  # number of segments since the last one with guesses of this request
        self._drafting = 0.0  # seconds that networks took for the newest level

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
        """Whether it may add rows to the next segments: once, and prompt rows only after those of older requests."""
        pacing = self.ring.pacing
        if self.request in pacing.rows.left_out or pacing.batcher.holds(self.request):
            return False
        reads = len(self.tree.unsent) > 1
        readers = (other for other in self.ring.running if len(other.tree.unsent) > 1)
        return not reads or self is next(readers)

    def share(self, size: int | None) -> int | None:
        running = self.ring.running
        if size is None or (len(running) < 2 and not self.options.thrifty):
            return size
        return self.ring.pacing.rows.share(self, running, size)

    def worth_waiting(self, expected_tokens: float) -> bool:
        self._finish_level()
        if not self.options.thrifty or len(self.tree.trunk) <= self._prompt + 1:  # a network still reads the prompt
            return False
        expected_guesses = sum(map(math.exp, worths(self, weighed=False)))
        segment_tokens = len(self.tree.unsent) + expected_guesses
        stage_seconds = self.ring.pacing.times.slowest(len(self.tree.waiting) + 1)
        return self.ring.pacing.gate.is_worth_waiting(expected_tokens, segment_tokens, stage_seconds)

    def worth_drafting(self, expected_tokens: float) -> bool:
        self._finish_level()
        pacing = self.ring.pacing
        is_worth = pacing.gate.is_worth_drafting(expected_tokens, pacing.first_stage.due_at, self.ring.clock.now())
        return is_worth or not self.options.thrifty

    @property
    def guesses(self) -> bool:
        """Whether to guess at all; False for a single request for which plain decoding is faster."""
        alone = self.options.plain_seconds and len(self.ring.running) == 1
        return not alone or self.ring.pacing.fallback.guesses

    def drafted(self, seconds: float) -> None:
        """Add the seconds of a network's pass to the newest level."""
        self._drafting += seconds

    def _finish_level(self) -> None:
        if self._drafting:
            self.ring.pacing.gate.drafted(self._drafting)
        self._drafting = 0.0

    def send(self, nodes: Sequence[int]) -> None:
        assert nodes and not self.ended, f"{len(nodes)} nodes to send for request {self.request}, ended: {self.ended}"
        self._flying.append(nodes)
        self.segments += 1
        self.ring.put(self._segment(self.request, nodes))

    def wait_until_free(self) -> Progress:
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
            pacing.fallback.begin(self.options.plain_seconds)
        self._settled = text
        if self.tree.guessed == self._gone:
            return
        with self._span("prune"):
            spared = () if self.options.prunes else chain.from_iterable(self._flying)
            keep = self.tree.live.union(spared)
            self._broadcast(list(keep))
            if not keep:
                self._gone = self.tree.guessed
            flying = set(chain.from_iterable(self._flying))
            dead = flying.difference(keep, [self.tree.tip])
            pacing.first_stage.prune(dead, now)

    def end(self, keep: bool = False) -> Sequence[int]:
        """End the request: prune what is in flight, and send the Reset, without waiting.

        With `keep` the stages may keep the text. Returns the nodes that they keep.
        """
        self.ended = True
        self.wakes = None
        # the tip was not sent yet
        nodes = self.tree.trunk[:-1] if keep and self.held_prompt else []
        with self._span("reset"):
            self._broadcast([])
            for _ in range(self.ring.pacing.batcher.drop(self.request)):
                self._flying.pop()
            self.ring.link.send(Reset(self.request, nodes[-1] if nodes else NOBODY))
        return nodes

    @property
    def held_prompt(self) -> Sequence[int]:
        """The nodes of the prompt once every stage holds them as text; empty before."""
        answered = len(self.tree.trunk) > self._prompt
        return self.tree.trunk[:self._prompt] if answered else ()

    def begin_behind(self, request: int, nodes: Sequence[int], length: int) -> None:
        """Begin after the first `length` nodes of another request, which have the same tokens."""
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
        """Accept a segment that came back in the message of this number."""
        assert self._flying, f"a segment came back for request {self.request}, which has none in flight"
        self._flying.popleft()
        self._queue(segment, message)

    def learn(self, features: Features) -> None:
        """Record a stage's features of rows in flight, unless a later stage has reported more."""
        feature_TN = upload(features.x, self.ring.device)
        for node, feature_N in zip(features.nodes, feature_TN):
            known = self.tree.nodes.get(node)
            if known is None or known.hidden is not None:
                continue
            if known.partial is None or len(known.partial) < len(feature_N):
                known.partial = feature_N

    def reset(self, request: int) -> None:
        """Close the request: the Reset of `request` came back, of which a target with replicas has several."""
        self.closed = True
        self._flying.clear()
        self.ring.forget(self.request)

    def _broadcast(self, keep: list[int]) -> None:
        """Send the end of the text and the live guesses to every stage."""
        tree, tip = self.tree, self.tree.tip
        prune = Prune(self.request, tip, tree.nodes[tip].parent, tree.horizon, keep)
        self.ring.link.broadcast(prune)

    def alive(self, segment: Segment) -> Segment:
        """Return the rows of a waiting segment that are still worth sending."""
        if not self.options.prunes:
            return segment
        known = [i for i, node in enumerate(segment.nodes) if node in self.tree.nodes]
        return segment.take(known)

    def to_judge(self, nodes: Iterable[int]) -> list[int]:
        """Return the live guesses and the tip among these nodes; below other nodes nothing can settle."""
        tree = self.tree
        return [node for node in nodes if node in tree.live or node == tree.tip]

    def echoes(self, node: int) -> bool:
        """Return whether the log-probability of the prompt token after this node is requested."""
        wanted = self.options.logprobs
        return wanted is not None and node in self.tree.nodes and self.tree.nodes[node].pos < wanted.echoed

    def _queue(self, segment: Segment, message: int) -> None:
        """Queue a segment to be judged, unless it has no rows."""
        if segment.nodes:
            x_TD = upload(segment.x, self.ring.device)
            self._returned.append(Returned(segment, x_TD, message))
        else:
            self.ring.trace.note("judge", self.ring.clock.now(), nodes=[], said={})

    def _judge(self) -> None:
        """Record the target's answers for the rows of the oldest returned segment."""
        returned = self._returned[0]
        said: dict[int, int] = {}
        with self.ring.trace.span("judge", nodes=returned.segment.nodes, said=said):
            self._note(returned)
            self._compute_logits(returned.message)
            self._returned.popleft()
            self._decide(returned.logits, said)
            self._note_logprobs(returned.logits, said)

    def _decide(self, logits: Mapping[int, Tensor], said: dict[int, int]) -> None:
        """Record in the tree and in `said` the tokens that follow these nodes."""
        if nodes := self.to_judge(logits):
            logits_TV = torch.stack([logits[node] for node in nodes])
            said.update(zip(nodes, self._tokens(nodes, logits_TV)))
            for node, token in said.items():
                self.tree.nodes[node].target_token = token

    def _tokens(self, nodes: Sequence[int], logits_TV: Tensor) -> list[int]:
        """Return the target's token after each of these nodes."""
        if self.tree.law is not None:
            logits_TV = self.tree.law.shaped(self.tree, nodes, logits_TV)
        if self.sampler.matches:
            return self.sampler(logits_TV, [self.tree.nodes[node].pos + 1 for node in nodes])
        return judged(self.sampler, self.tree, nodes, logits_TV)

    def _note_logprobs(self, logits: Mapping[int, Tensor], said: Mapping[int, int]) -> None:
        """Store the requested log-probabilities in the tree: of the tokens in `said`, and of the prompt."""
        wanted, tree = self.options.logprobs, self.tree
        if wanted is None:
            return
        after = dict(said)
        for node in logits:
            if self.echoes(node):
                following = tree.trunk[tree.nodes[node].pos + 1]
                after[node] = tree.nodes[following].token
        if after:
            logits_TV = torch.stack([logits[node] for node in after])
            for node, logprob in zip(after, logprobs(logits_TV, list(after.values()), wanted.likeliest)):
                tree.nodes[node].logprob = logprob

    def _compute_logits(self, message: int) -> None:
        """Run the LM head once for all segments of a message, without those of ended requests."""
        ring = self.ring
        asked: list[tuple[Returned, int]] = []
        chosen = []
        for target in ring.running:
            for each in target._returned:
                if each.message == message and not each.has_logits:
                    each.has_logits = True
                    nodes = each.segment.nodes
                    wanted = target.to_judge(nodes) + [node for node in nodes if target.echoes(node)]
                    asked += [(each, node) for node in wanted]
                    place = {node: row for row, node in enumerate(nodes)}
                    rows = torch.tensor([place[node] for node in wanted], dtype=torch.int64)
                    chosen.append(each.x_TD.index_select(0, upload(rows, ring.device)))
        if asked:
            logits_TV = ring.lm_head(torch.cat(chosen))
            for (each, node), logits_V in zip(asked, logits_TV):
                each.logits[node] = logits_V

    def _note(self, returned: Returned) -> None:
        """Store the features of a segment's rows in the tree, for the draft."""
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
        """Return a segment of these nodes."""
        known = [self.tree.nodes[node] for node in nodes]
        parents = [node.parent for node in known]
        pos = [node.pos for node in known]
        text = len(nodes) - len(self.tree.live.intersection(nodes))
        token_T = torch.tensor([node.token for node in known])
        inner_T0 = token_T.new_empty(len(nodes), 0) if self.options.inner else None
        return Segment(request, list(nodes), parents, pos, text, token_T, inner_T0)


class Ring:
    """The ring of stages, shared by all requests: rank 0 sends to the first stage and receives from the last.

    It is filled by `depth` segments.
    """

    target_of: Callable[..., RequestTarget] = RequestTarget

    def __init__(self, link: Link, lm_head: Callable[[Tensor], Tensor], depth: int, device: torch.device | str = "cpu",
                 trace: NoTrace = OFF, clock: Clock = REAL) -> None:
        self.links = [link]  # one to each copy of the stages; all messages come back at the first link
        self.lm_head = lm_head
        self.depth, self.device = depth, device
        self.trace, self.clock = trace, clock
        self.meter = Meter()  # measures the work of rank 0
        self.reset_measurements()
        self.requests = 0  # number of requests closed since the start
        self.returned_messages = 0  # number of messages that came back since the start
        self.unanswered = 0  # messages of the last `ping` that have not come back
        self.stopped = False
        self.epoch = 0  # number of times that all ranks have reconnected
        self.reconnect: Callable[[PeerLost], None] = no_recovery  # reconnects all ranks, or raises PeerLost
        self.ids: Iterator[int] = count()  # for the nodes of all requests: no id is ever used twice
        self._numbers: Iterator[int] = count()  # for the requests
        self._ping = -1  # the request number of the last `ping`
        self._open: dict[int, RequestTarget] = {}  # by the request number of their messages

    @property
    def link(self) -> Link:
        """The link at which all messages come back."""
        return self.links[0]

    @property
    def running(self) -> list[RequestTarget]:
        """The requests that have not ended, the oldest first."""
        return [target for target in self._open.values() if not target.ended]

    @property
    def closing(self) -> bool:
        """Whether a stage may still hold a request that has ended."""
        return any(target.ended for target in self._open.values())

    def reset_measurements(self) -> None:
        """Reset the measurements of earlier requests; no request may be open."""
        self.pacing = Pacing(self.depth)

    def open(self, tree: TokenTree, sampler: Sampler, options: TargetOptions = DEFAULT_OPTIONS) -> RequestTarget:
        """Return the target of a new request."""
        request = next(self._numbers)
        target = self.target_of(self, request, tree, sampler, options)
        self._open[request] = target
        self.pacing.fallback.begin(options.plain_seconds)
        return target

    def forget(self, request: int) -> None:
        """Forget a closed request."""
        del self._open[request]
        self.requests += 1

    # --- out ----------------------------------------------------------------------------------------------------------

    def put(self, segment: Segment) -> None:
        """Send a segment: at once if its request is the only one, else together with others' at the next `depart`."""
        self.pacing.batcher.put(segment)
        if len(self.running) == 1:
            self.depart()

    @property
    def free(self) -> bool:
        """Whether the first stage is free, or nearly so."""
        return self.clock.now() >= self.pacing.first_stage.ready_at

    def depart(self) -> None:
        """Send the waiting messages, each as soon as the first stage is free for it."""
        batcher = self.pacing.batcher
        while batcher and (self.free or len(self.running) < 2):
            segments = [self._open[segment.request].alive(segment) for segment in batcher.take()]
            message = joined(segments)
            self.pacing.first_stage.send(message.nodes, self.clock.now())
            *others, last = segments
            for segment in others:  # the span of the last one has the time of all
                self.trace.note("send", self.clock.now(), **sent(segment))
            with self.trace.span("send", **sent(last)):
                self.link.send(message)
            self.pacing.rows.close()

    # --- in -----------------------------------------------------------------------------------------------------------

    def listen(self, until: float | None = None) -> None:
        """Wait for a message, at most until `until` or a time that a request waits for; distribute messages."""
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
            self.pacing.rows.close()  # all were left out because of a request that has nothing to send any more

    def poll(self) -> None:
        """Distribute the messages that have arrived, without waiting."""
        while self.link.ready:
            self._hand_out(self.link.recv())

    def _hand_out(self, message: Message) -> None:
        """Pass a message to its requests."""
        if isinstance(message, Features):
            if message.request in self._open:
                self._open[message.request].learn(message)
            return
        assert not isinstance(message, (Prune, Stop)), f"a {type(message).__name__} came back instead of a segment"
        self.returned_messages += 1
        if isinstance(message, Reset) and message.request in self._open:  # else the text of an ended request, or a ping
            self._open[message.request].reset(message.request)
        elif isinstance(message, Reset):
            self.unanswered -= message.request == self._ping
        segments = segments_of(message)
        if segments:
            self._measure(segments)
        for segment in segments:
            self._open[segment.request].take(segment, self.returned_messages)

    def _measure(self, segments: Sequence[Segment]) -> None:
        """Measure the round trip of the oldest message, which came back."""
        rows = sum(len(segment.nodes) for segment in segments)
        way = self.pacing.first_stage.back(rows, self.clock.now())
        self.pacing.times.learn(max((segment.visits for segment in segments), key=len), way)

    # --- the whole ring -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Wait until a first message has passed every stage."""
        send_round(self.links, Reset(next(self._numbers)))

    def ping(self) -> None:
        """Send a message round that changes nothing; if it comes back, all stages work."""
        self._ping = next(self._numbers)
        self.unanswered = len(self.links)
        for link in self.links:
            link.send(Reset(self._ping))

    def stop(self) -> None:
        """End the pipeline, and wait until every stage has passed the message on."""
        self.stopped = True
        send_round(self.links, Stop())

    def recover(self, loss: PeerLost) -> None:
        """Reconnect all ranks after a loss, and start with empty stages; raises PeerLost if that fails."""
        while True:
            self.reconnect(loss)
            self._open, self.unanswered = {}, 0
            self.reset_measurements()
            self.epoch += 1
            try:
                return self.start()
            except PeerLost as another:
                loss = another


def sent(segment: Segment) -> dict[str, Any]:
    """Return the facts for the trace span in which rank 0 sends a segment."""
    return {"nodes": segment.nodes, "tokens": segment.x.tolist(), "parents": segment.parents, "text": segment.text}
