"""Requests on rank 0: the ring of stages, which all requests share, and the target of each request.

A strategy sends segments through its target, which records in the tree the token that follows each node. Strategies
know nothing else of the pipeline. The ring sends, receives and distributes messages.
"""
from __future__ import annotations

import math
from collections import deque
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain, count
from typing import Any, Callable, ContextManager, Iterable, Iterator, Mapping, NamedTuple, Sequence

import torch
from torch import Tensor

from config.failure import PeerLost
from model.devices import upload
from model.rules import judged
from model.sample import Sampler, logprobs
from model.tree import TokenTree
from pipeline.link import Link, send_round
from pipeline.messages import NOBODY, Message, Prune, Reset, Segment, Start, Stop, joined, segments_of
from pipeline.pacing import Pacing
from pipeline.stage_times import StageTimes
from pipeline.strategies import WAIT, Progress, Target
from pipeline.target_options import DEFAULT_OPTIONS, TargetOptions
from pipeline.trace import OFF, REAL, Clock, Meter, NoTrace

TRIES = 5  # most losses without a settled token between them, and most starts after a loss; then PeerLost is raised


def no_recovery(loss: PeerLost) -> None:
    """Raise the loss: there is no recovery."""
    raise loss


class NodeRows(NamedTuple):
    """What is known of some nodes, a row each: hidden states, or logits."""

    nodes: list[int]
    x_TN: Tensor

    def of(self, nodes: list[int]) -> Tensor:
        """Return the rows of some of the nodes; the tensor itself if they are all."""
        if nodes == self.nodes:
            return self.x_TN
        row_of_node = {node: row for row, node in enumerate(self.nodes)}
        row_T = torch.tensor([row_of_node[node] for node in nodes], dtype=torch.int64)
        return self.x_TN.index_select(0, upload(row_T, self.x_TN.device))


@dataclass
class Returned:
    """A segment that came back and is not judged yet. It holds no reference to its target, which would be a cycle."""

    segment: Segment
    rows: NodeRows
    message: int  # number of the message that held it
    logits: NodeRows | None = None  # of the nodes whose logits are needed, once they went through the LM head


class RequestTarget(Target):
    """The ring as seen by one request: its segments in flight and returned, and the target's answers for them."""

    def __init__(self, ring: Ring, request: int, tree: TokenTree, sampler: Sampler, options: TargetOptions) -> None:
        self.ring, self.tree, self.sampler = ring, tree, sampler
        self.request = request  # the number of its messages
        self.options = options

        # segments and text
        self._in_flight_nodes: deque[Sequence[int]] = deque()  # of each segment, the oldest first
        self._returned_segments: deque[Returned] = deque()
        self._prompt_length = len(tree.trunk)
        self._settled_length = len(tree.trunk)  # of the text at the last prune
        self._num_sent_at_empty_prune = 0  # guesses sent before the last prune that left none alive

        # progress
        self._waits_to_send = False  # whether the strategy advances as soon as it may send
        self.ended = False  # whether the request sends nothing any more
        self.closed = False  # whether every stage has forgotten the request

        # measurements
        self.segments = 0  # number of segments so far, sent or waiting to be
        self.reused = 0  # number of prompt tokens that the stages held already
        self.passed_over = 0  # number of messages that left without its guesses, since the last one with some
        self.trial_tokens = 0.0  # that trials of guessing have cost this request
        self._run_length = 0  # guesses that became text since the last token that was not guessed

    @property
    def depth(self) -> int:
        return self.ring.depth

    @property
    def in_flight(self) -> int:
        return len(self._in_flight_nodes) + len(self._returned_segments)

    @property
    def has_room(self) -> bool:
        return self.in_flight < self.depth

    def ready(self) -> bool:
        if not self._returned_segments:
            self.ring.poll()
        return bool(self._returned_segments)

    def wait(self) -> Progress:
        assert self.in_flight, "nothing is in flight, so nothing can come back"
        with self.ring.trace.span("wait"):
            num_in_flight = self.in_flight  # it also falls when a segment returns without rows, which is never ready
            while not self.ready() and self.in_flight == num_in_flight:
                yield WAIT

        if self._returned_segments:
            self._judge()

    @property
    def free(self) -> bool:
        return self.ring.free and self._may_send

    @property
    def wakes_at(self) -> float:
        """Time at which the strategy advances without a message; infinite if only a message can tell."""
        return self.ring.pacing.first_stage.ready_at if self._waits_to_send and self._may_send else math.inf

    @property
    def _may_send(self) -> bool:
        """Whether it may add rows to the next segments: once, and prompt rows only after those of older requests."""
        pacing = self.ring.pacing
        num_text_rows = len(self.tree.unsent_text)
        is_left_out = self.request in pacing.rows.left_out and not num_text_rows
        if is_left_out or pacing.batcher.holds(self.request):
            return False

        has_prompt_rows = num_text_rows > 1
        with_prompt_rows = (target for target in self.ring.running if len(target.tree.unsent_text) > 1)
        return not has_prompt_rows or self is next(with_prompt_rows)

    def share(self) -> int | None:
        running, segment_rows = self.ring.running, self.options.segment_rows
        if segment_rows is None or (len(running) < 2 and not self.options.thrifty):
            return segment_rows
        return self.ring.pacing.rows.share(self, running, segment_rows)

    def worth_waiting(self, expected_tokens: Sequence[float]) -> int:
        # a draft's network reads the prompt in the first level, whose time is thus no level's
        is_reading_prompt = len(self.tree.trunk) <= self._prompt_length + 1
        if not self.options.thrifty or is_reading_prompt:
            return 0

        pacing = self.ring.pacing
        level = pacing.gate.next_level(expected_tokens, len(self.ring.running))
        probabilities = pacing.rows.paying(self, self.options.segment_rows)
        segment_tokens = len(self.tree.unsent_text) + sum(probabilities)
        stage_seconds = pacing.times.slowest(len(probabilities) + 1)
        is_worth = pacing.gate.is_worth_waiting(level, segment_tokens, stage_seconds)
        return level.num_guesses if is_worth else 0

    def worth_drafting(self, expected_tokens: Sequence[float]) -> int:
        if not self.options.thrifty:
            return len(expected_tokens)

        pacing = self.ring.pacing
        level = pacing.gate.next_level(expected_tokens, len(self.ring.running))
        is_worth = pacing.gate.is_worth_drafting(level, pacing.first_stage.due_at, self.ring.clock.now())
        return level.num_guesses if is_worth else 0

    @property
    def guesses(self) -> bool:
        """Whether to guess at all; False while plain decoding is faster for the running requests together."""
        return not self.options.costs.seconds_by_rows or self.ring.pacing.fallback.guesses

    @property
    def is_late(self) -> bool:
        """Whether a level must wait for settled tokens, since it would make a trial too expensive."""
        return self.ring.pacing.fallback.is_late(self.ring.clock.now())

    def send(self, nodes: Sequence[int]) -> None:
        assert nodes and not self.ended, f"{len(nodes)} nodes to send for request {self.request}, ended: {self.ended}"
        self._in_flight_nodes.append(nodes)
        self.segments += 1
        self.ring.put(self._segment(self.request, nodes))

    def wait_until_free(self) -> Progress:
        pending = self.tree.num_unsent
        assert self.in_flight or pending, "nothing is in flight or to be sent, so nothing can happen"
        with self.ring.trace.span("wait"):
            while not self.ready() and (self.in_flight or pending) and not (pending and self.free):
                self._waits_to_send = bool(pending)
                yield WAIT
        self._waits_to_send = False

    def prune(self) -> None:
        pacing, now = self.ring.pacing, self.ring.clock.now()
        num_settled = len(self.tree.trunk) - self._settled_length
        self._settled_length = len(self.tree.trunk)

        # rates
        pacing.gate.add_settled(num_settled, now)
        self._record_runs(num_settled)
        lost_tokens = pacing.fallback.add_settled(num_settled, len(self.ring.running), now)
        for target in self.ring.running:
            target.trial_tokens += lost_tokens
        if any(len(target.tree.trunk) == target._prompt_length for target in self.ring.running):
            pacing.fallback.begin(self.options.costs, len(self.ring.running))  # the time of a prompt is no token's

        # dead guesses, if there can be any
        if self.tree.num_sent_guesses == self._num_sent_at_empty_prune:
            return
        with self._span("prune"):
            in_flight_nodes = set(chain.from_iterable(self._in_flight_nodes))
            kept_nodes = self.tree.live if self.options.prunes else self.tree.live.union(in_flight_nodes)
            self._broadcast(list(kept_nodes))
            if not kept_nodes:
                self._num_sent_at_empty_prune = self.tree.num_sent_guesses

            dead_nodes = in_flight_nodes.difference(kept_nodes, [self.tree.tip])
            pacing.first_stage.prune(dead_nodes, now)

    def _record_runs(self, num_settled: int) -> None:
        """Record the runs of right guesses that end among the newest settled tokens."""
        for node in self.tree.trunk[-num_settled:]:
            if self.tree.nodes[node].proposals:
                self._run_length += 1
            else:
                self.ring.pacing.fallback.add_run(self._run_length)
                self._run_length = 0

    def end(self, keep: bool = False) -> Sequence[int]:
        """End the request: prune what is in flight, and send the Reset, without waiting.

        With `keep` the stages may keep the text. Returns the nodes that they keep.
        """
        self.ended = True
        self._waits_to_send = False
        kept_nodes = self.tree.trunk[:-1] if keep and self.held_prompt else []  # the tip may be unsent, or in flight

        with self._span("reset"):
            self._broadcast([])
            pacing = self.ring.pacing
            pacing.rows.divide_again()
            num_unsent_segments = pacing.batcher.drop(self.request)
            for _ in range(num_unsent_segments):
                self._in_flight_nodes.pop()
            self.ring.link.send(Reset(self.request, kept_nodes[-1] if kept_nodes else NOBODY))
        return kept_nodes

    @property
    def held_prompt(self) -> Sequence[int]:
        """The nodes of the prompt once every stage holds them as text; empty before."""
        is_answered = len(self.tree.trunk) > self._prompt_length
        return self.tree.trunk[:self._prompt_length] if is_answered else ()

    def begin_behind(self, request: int, nodes: Sequence[int], length: int) -> None:
        """Begin after the first `length` nodes of another request, which have the same tokens."""
        own_last, other_last = self.tree.trunk[length - 1], nodes[length - 1]
        self.tree.skip(length)
        self.reused = length
        self.ring.link.send(Start(self.request, own_last, request, other_last, length))

    def close(self) -> None:
        if not self.ended:
            self.end()
        while not self.closed:
            self.ring.listen()

    def take(self, segment: Segment, message: int) -> None:
        """Accept a segment that came back in the message of this number."""
        assert self._in_flight_nodes, f"a segment came back for request {self.request}, which has none in flight"
        self._in_flight_nodes.popleft()
        self._queue(segment, message)

    def reset(self, request: int) -> None:
        """Close the request: the Reset of `request` came back, of which a target with replicas has several."""
        self.closed = True
        self._in_flight_nodes.clear()
        self.ring.forget(self.request)

    def _broadcast(self, kept_nodes: list[int]) -> None:
        """Send the end of the text and the live guesses to every stage."""
        tree, tip = self.tree, self.tree.tip
        prune = Prune(self.request, tip, tree.nodes[tip].parent, tree.horizon, kept_nodes)
        self.ring.link.broadcast(prune)

    def alive(self, segment: Segment) -> Segment:
        """Return the rows of a waiting segment that are still worth sending."""
        if not self.options.prunes:
            return segment
        live_rows = [row for row, node in enumerate(segment.nodes) if node in self.tree.nodes]
        return segment.take(live_rows)

    def to_judge(self, nodes: Iterable[int]) -> list[int]:
        """Return the live guesses and the tip among these nodes; below other nodes nothing can settle."""
        tree = self.tree
        return [node for node in nodes if node in tree.live or node == tree.tip]

    def echoes(self, node: int) -> bool:
        """Return whether the log-probability of the prompt token after this node is requested."""
        logprob_request = self.options.logprobs
        if logprob_request is None or node not in self.tree.nodes:
            return False
        return self.tree.nodes[node].pos < logprob_request.echoed

    def _queue(self, segment: Segment, message: int) -> None:
        """Queue a segment to be judged, unless it has no rows."""
        if segment.nodes:
            rows = NodeRows(segment.nodes, upload(segment.x, self.ring.device))
            self._returned_segments.append(Returned(segment, rows, message))
        else:
            self.ring.trace.note("judge", self.ring.clock.now(), nodes=[], answers={})

    def _judge(self) -> None:
        """Record the target's answers for the rows of the oldest returned segment."""
        returned = self._returned_segments[0]
        answers: dict[int, int] = {}
        with self.ring.trace.span("judge", nodes=returned.segment.nodes, answers=answers):
            self._record_features(returned)
            logits = returned.logits or self._compute_logits(returned)
            self._returned_segments.popleft()
            self.tree.has_unverified |= not self._is_earlier_text(returned.segment)
            self._decide(logits, answers)
            self._store_logprobs(logits, answers)

    def _is_earlier_text(self, segment: Segment) -> bool:
        """Return whether a segment holds no guess, nor the tip: a part of the prompt, with which nothing can settle."""
        tree = self.tree
        return all(node in tree.nodes and node not in tree.live and node != tree.tip for node in segment.nodes)

    def _decide(self, logits: NodeRows, answers: dict[int, int]) -> None:
        """Record in the tree and in `answers` the tokens that follow these nodes."""
        if nodes := self.to_judge(logits.nodes):
            answers.update(zip(nodes, self._tokens(nodes, logits.of(nodes))))
            for node, token in answers.items():
                self.tree.nodes[node].target_token = token

    def _tokens(self, nodes: Sequence[int], logits_TV: Tensor) -> list[int]:
        """Return the target's token after each of these nodes."""
        if self.tree.law is not None:
            logits_TV = self.tree.law.shaped(self.tree, nodes, logits_TV)
        if self.sampler.matches:
            return self.sampler(logits_TV, [self.tree.nodes[node].pos + 1 for node in nodes])
        return judged(self.sampler, self.tree, nodes, logits_TV)

    def _store_logprobs(self, logits: NodeRows, answers: Mapping[int, int]) -> None:
        """Store the requested log-probabilities in the tree: of the tokens in `answers`, and of the prompt."""
        logprob_request, tree = self.options.logprobs, self.tree
        if logprob_request is None:
            return

        next_tokens = dict(answers)
        for node in logits.nodes:
            if self.echoes(node):
                next_node = tree.trunk[tree.nodes[node].pos + 1]
                next_tokens[node] = tree.nodes[next_node].token

        if next_tokens:
            logits_TV = logits.of(list(next_tokens))
            all_logprobs = logprobs(logits_TV, list(next_tokens.values()), logprob_request.likeliest)
            for node, logprob in zip(next_tokens, all_logprobs):
                tree.nodes[node].logprob = logprob

    def _compute_logits(self, first: Returned) -> NodeRows:
        """Return the logits of the `first` judged segment of a message.

        The LM head runs once for all segments of the message, without those of ended requests.
        """
        # the segments, and the nodes of each whose logits are needed
        segments: list[Returned] = []
        nodes_of_segments: list[list[int]] = []
        for target in self.ring.running:
            for returned in target._returned_segments:
                if returned.message == first.message:
                    segments.append(returned)
                    nodes_of_segments.append(target._nodes_with_logits(returned))

        # one pass, and to each segment its part
        chosen_rows = [returned.rows.of(nodes) for returned, nodes in zip(segments, nodes_of_segments)]
        x_TD = torch.cat(chosen_rows)
        logits_TV = self.ring.lm_head(x_TD) if len(x_TD) else x_TD
        row_counts = [len(nodes) for nodes in nodes_of_segments]
        for returned, nodes, logits in zip(segments, nodes_of_segments, logits_TV.split(row_counts)):
            returned.logits = NodeRows(nodes, logits)

        assert first.logits is not None, "the request that asks is running"
        return first.logits

    def _nodes_with_logits(self, returned: Returned) -> list[int]:
        """Return the nodes of a segment whose logits are needed, for answers and then for log-probabilities."""
        nodes = returned.segment.nodes
        return self.to_judge(nodes) + [node for node in nodes if self.echoes(node)]

    def _record_features(self, returned: Returned) -> None:
        """Store the features of a segment's rows in the tree, for the draft."""
        inner = returned.segment.inner
        feature_TD = returned.rows.x_TN if inner is None else upload(inner, self.ring.device)
        for node, feature_D in zip(returned.segment.nodes, feature_TD.unbind()):
            tree_node = self.tree.nodes.get(node)
            if tree_node:
                tree_node.hidden = feature_D

    def _span(self, name: str) -> ContextManager[object]:
        tip = self.tree.nodes[self.tree.tip]
        return self.ring.trace.span(name, tip=self.tree.tip, token=tip.token, parent=tip.parent)

    def _segment(self, request: int, nodes: Sequence[int]) -> Segment:
        """Return a segment of these nodes."""
        tree_nodes = [self.tree.nodes[node] for node in nodes]
        parents = [tree_node.parent for tree_node in tree_nodes]
        positions = [tree_node.pos for tree_node in tree_nodes]
        num_text_rows = len(nodes) - len(self.tree.live.intersection(nodes))

        token_T = torch.tensor([tree_node.token for tree_node in tree_nodes])
        inner_T0 = token_T.new_empty(len(nodes), 0) if self.options.inner else None
        return Segment(request, list(nodes), parents, positions, num_text_rows, token_T, inner_T0)


class Ring:
    """The ring of stages, shared by all requests: rank 0 sends to the first stage and receives from the last.

    It is filled by `depth` segments.
    """

    target_of: Callable[..., RequestTarget] = RequestTarget

    def __init__(self, link: Link, lm_head: Callable[[Tensor], Tensor],
                 depth: int, device: torch.device | str = "cpu",
                 trace: NoTrace = OFF, clock: Clock = REAL) -> None:
        self.links = [link]  # one to each copy of the stages; all messages come back at the first link
        self.lm_head = lm_head
        self.depth, self.device = depth, device
        self.trace, self.clock = trace, clock

        # measurements
        self.meter = Meter()  # measures the work of rank 0
        self._start_times = StageTimes()  # known before any answer
        self.reset_measurements()
        self.num_closed_requests = 0  # number of requests closed since the start
        self.returned_messages = 0  # number of messages that came back since the start
        self.pings_in_flight = 0  # messages of the last `ping` that have not come back
        self.stopped = False

        # losses
        self.num_reconnections = 0  # number of times that all ranks have reconnected
        self.loss = ""  # while a lost rank is waited for: which one, and why
        self.reconnect: Callable[[PeerLost], None] = no_recovery  # reconnects all ranks, or raises PeerLost

        # ids
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
        self.pacing = Pacing(deepcopy(self._start_times))

    def keep_times(self) -> None:
        """Begin after each reset with the times of stages and wires that are measured so far."""
        self._start_times = deepcopy(self.pacing.times)

    def open(self, tree: TokenTree, sampler: Sampler, options: TargetOptions = DEFAULT_OPTIONS) -> RequestTarget:
        """Return the target of a new request."""
        request = next(self._numbers)
        target = self.target_of(self, request, tree, sampler, options)
        self._open[request] = target
        self.pacing.fallback.begin(options.costs, len(self.running))
        return target

    def forget(self, request: int) -> None:
        """Forget a closed request."""
        del self._open[request]
        self.num_closed_requests += 1

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
            has_text = any(segment.text for segment in segments)
            self.pacing.first_stage.send(message.nodes, self.clock.now(), has_text)

            *others, last = segments
            for segment in others:  # the span of the last one has the time of all
                self.trace.note("send", self.clock.now(), **facts_of_sending(segment))
            with self.trace.span("send", **facts_of_sending(last)):
                self.link.send(message)

            self.pacing.rows.divide_again()

    # --- in -----------------------------------------------------------------------------------------------------------

    def listen(self, until: float | None = None) -> None:
        """Wait for a message, at most until `until` or a time that a request waits for; distribute messages."""
        self.depart()

        wake_times = [target.wakes_at for target in self.running]
        if until is not None:
            wake_times.append(until)
        if self.pacing.batcher:
            wake_times.append(self.pacing.first_stage.ready_at)

        wake_times = [moment for moment in wake_times if moment < math.inf]
        if wake_times:
            self.link.wait_until(min(wake_times))
            self.poll()
        elif self.closing or any(target.in_flight for target in self.running):
            self._distribute(self.link.recv())
        else:
            self.pacing.rows.divide_again()  # all were left out for a request that has nothing to send any more

    def poll(self) -> None:
        """Distribute the messages that have arrived, without waiting."""
        while self.link.ready:
            self._distribute(self.link.recv())

    def _distribute(self, message: Message) -> None:
        """Pass a message to its requests."""
        assert not isinstance(message, (Prune, Stop)), f"a {type(message).__name__} came back instead of a segment"
        self.returned_messages += 1

        if isinstance(message, Reset) and message.request in self._open:  # else the text of an ended request, or a ping
            self._open[message.request].reset(message.request)
        elif isinstance(message, Reset):
            self.pings_in_flight -= message.request == self._ping

        segments = segments_of(message)
        if segments:
            self._measure(segments)
        for segment in segments:
            self._open[segment.request].take(segment, self.returned_messages)

    def _measure(self, segments: Sequence[Segment]) -> None:
        """Measure the round trip of the oldest message, which came back."""
        num_rows = sum(len(segment.nodes) for segment in segments)
        longest_way = max((segment.visits for segment in segments), key=len)
        computed_seconds = sum(visit.seconds for visit in longest_way)
        seconds = self.pacing.first_stage.back(num_rows, self.clock.now(), computed_seconds)
        self.pacing.times.learn(longest_way, seconds)

    # --- the whole ring -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Wait until a first message has passed every stage."""
        send_round(self.links, Reset(next(self._numbers)))

    def ping(self) -> None:
        """Send a message round that changes nothing; if it comes back, all stages work."""
        self._ping = next(self._numbers)
        self.pings_in_flight = len(self.links)
        for link in self.links:
            link.send(Reset(self._ping))

    def stop(self) -> None:
        """End the pipeline, and wait until every stage has passed the message on."""
        self.stopped = True
        send_round(self.links, Stop())

    def recover(self, loss: PeerLost) -> None:
        """Reconnect all ranks after a loss, and start with empty stages.

        Raises PeerLost if that fails, or if every start ends with a loss, as over a dead way between two stages.
        """
        for _ in range(TRIES):
            self.loss = str(loss)
            self.reconnect(loss)

            self._open, self.pings_in_flight = {}, 0
            self.reset_measurements()
            self.num_reconnections += 1

            try:
                self.start()
                self.loss = ""
                return
            except PeerLost as next_loss:
                loss = next_loss

        raise loss


def facts_of_sending(segment: Segment) -> dict[str, Any]:
    """Return the facts for the trace span in which rank 0 sends a segment."""
    return {"nodes": segment.nodes, "tokens": segment.x.tolist(), "parents": segment.parents, "text": segment.text}
