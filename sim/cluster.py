"""The virtual cluster: rank 0's links to stages and wires that take the time of a profile on a virtual clock.

There is one thread, which never sleeps. Rank 0 spends its own time on the clock. Whenever it reads a link, all events
up to that time happen in order. The tokens are real: the target's output for a row is looked up when the row returns.
"""
from __future__ import annotations

import heapq
from collections import deque
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Callable, Protocol, Sequence, Tuple

import torch
from torch import Tensor

from config.profiles import Profile
from pipeline.messages import NOBODY, Message, Prune, Reset, Segment, Start, facts_of, joined, segments_of
from pipeline.trace import NoTrace
from sim.clock import VirtualClock
from sim.stages import SendAt, VirtualStage, Work
from sim.wires import ModelledWire, note

TargetOutputs = Tuple[Tensor, Tensor]  # last hidden states [T, D] at the ends of paths, inner features [T, D * inner]


class AnswerSource(Protocol):
    """The target's outputs after each path of tokens. A path has a number; `root` is the path without tokens."""

    root: int
    repeats_bits: bool  # whether outputs have the same bits, whatever rows are computed together

    @property
    def full(self) -> bool:
        """Whether `clear` is due."""

    def clear(self) -> None:
        """Forget all paths."""

    def after(self, path: int, token: int) -> int:
        """Return the number of the path with one more token."""

    def outputs(self, paths: Sequence[int]) -> TargetOutputs:
        """Return the target's outputs at the end of each path."""


class Cluster:
    """The rings of stages, and rank 0's `links` to them; `rings[i][j]` is the work of stage j in ring i.

    `traces` are the traces of rank 0 and of each stage, ring by ring. A wire leads to each stage and back to rank 0. If
    there is only one trace, rank 0 itself is the only stage, and computes while it sends.
    """

    def __init__(self, profile: Profile, clock: VirtualClock, rings: Sequence[Sequence[Work]], paths: AnswerSource,
                 traces: Sequence[NoTrace]) -> None:
        self.profile, self._clock = profile, clock
        self._is_one_rank = len(traces) == 1

        # events and messages
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._event_numbers = count()
        self._inbox: deque[Message] = deque()
        self.paths, self._node_paths = paths, NodePaths(paths)

        # rings
        self._wires: list[ModelledWire] = []
        self._root_trace = traces[0]
        stage_traces = iter(traces[1:] or traces)
        self.links: list[RingLink] = []
        for works in rings:
            ring_traces = [next(stage_traces) for _ in works]
            self.links.append(self._make_ring(works, ring_traces))

    def _make_ring(self, works: Sequence[Work], traces: Sequence[NoTrace]) -> RingLink:
        """Create the stages of one ring, the last one first; return rank 0's link to them."""
        sender_ranks = [0, *(work.rank for work in works)]
        sender_traces = [self._root_trace, *traces]
        last_wire = self._make_wire(sender_ranks[-1], 0)
        send = self._sender(self._receive, sender_traces[-1], last_wire)

        stages: list[VirtualStage] = []
        for work, trace, sender_trace, sender_rank in reversed(list(zip(works, traces, sender_traces, sender_ranks))):
            stage = VirtualStage(self.at, work, send, trace)
            stages.append(stage)
            send = self._sender(stage.hear, sender_trace, self._make_wire(sender_rank, work.rank))

        control_wires = [self._make_wire(0, work.rank) for work in reversed(works)]
        return RingLink(self, send, list(zip(stages, control_wires)))

    def _make_wire(self, sender: int, receiver: int) -> ModelledWire:
        wire = ModelledWire(self.profile.link(sender, receiver), seed=len(self._wires))
        self._wires.append(wire)
        return wire

    def restart(self, same_prompt: bool) -> None:
        """Reset to the state at the start, at a whole second, so that times repeat bit for bit; no request may be open.

        The target's outputs are kept if they repeat bit for bit. Their last bits may depend on the rows computed
        together; then they are kept only for the `same_prompt` with a deferred look-up, since its rows are equal.
        """
        self._clock.even()
        has_same_rows = same_prompt and self._node_paths.is_deferred
        if not has_same_rows and not self.paths.repeats_bits:
            self.paths.clear()
        for wire in self._wires:
            wire.restart()

    def defer(self) -> Callable[[Sequence[int]], TargetOutputs]:
        """Let segments return with path numbers `[T, 1]`; return the function that looks up the outputs of paths."""
        self._node_paths.is_deferred = True
        return self.paths.outputs

    # --- rank 0 -------------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        self._run_events(self._clock.now())
        return bool(self._inbox)

    def send(self, msg: Message, send_at: SendAt) -> None:
        """Send a message by `send_at`, once rank 0 has written its rows."""
        segments = segments_of(msg)
        for segment in segments:
            self._node_paths.learn(segment)
        if isinstance(msg, Start):
            self._node_paths.start(msg)

        num_rows = sum(len(segment.nodes) for segment in segments)
        self._clock.sleep_until(self._clock.now() + self.profile.own_seconds(num_rows=num_rows))
        send_at(msg, self._clock.now())
        while self._is_one_rank and not self._inbox:
            self._advance_to_next_event()

    def recv(self) -> Message:
        self.wait_until(float("inf"))
        msg = self._inbox.popleft()
        segments = segments_of(msg)
        if segments:
            return joined([self._node_paths.with_outputs(segment) for segment in segments])
        if isinstance(msg, Reset) and msg.last == NOBODY:
            self._node_paths.forget(msg.request)
        return msg

    def wait_until(self, until: float) -> None:
        """Advance the clock until a message has arrived, or until this time."""
        self._run_events(self._clock.now())
        while not self._inbox and self._events and self._events[0][0] <= until:
            self._advance_to_next_event()
        if not self._inbox:
            assert until < float("inf"), "rank 0 waits for a message that no stage will send"
            self._clock.sleep_until(until)

    def broadcast(self, msg: Message, stages: Sequence[tuple[VirtualStage, ModelledWire]]) -> None:
        """Send a message over the control wire of each stage."""
        now = last_arrival = self._clock.now()
        for stage, control_wire in reversed(stages):
            arrival = now if self._is_one_rank else control_wire.arrival(msg, now)
            last_arrival = max(last_arrival, arrival)
            self.at(arrival, partial(stage.hear, msg))
        self._note(self._root_trace, msg, now, last_arrival)

    # --- events -------------------------------------------------------------------------------------------------------

    def at(self, moment: float, event: Callable[[float], None]) -> None:
        """Schedule `event`, which is called with this time when the clock reaches it."""
        heapq.heappush(self._events, (moment, next(self._event_numbers), event))

    def _run_events(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            moment, _, event = heapq.heappop(self._events)
            event(moment)

    def _advance_to_next_event(self) -> None:
        self._clock.sleep_until(self._events[0][0])
        self._run_events(self._clock.now())

    def _sender(self, receive: SendAt, trace: NoTrace, wire: ModelledWire) -> SendAt:
        """Return a function that sends messages over a wire to `receive`; `trace` is the sender's."""
        def send_at(msg: Message, now: float) -> None:
            arrival = now if self._is_one_rank else wire.arrival(msg, now)
            self._note(trace, msg, now, arrival)
            self.at(arrival, partial(receive, msg))

        return send_at

    def _receive(self, msg: Message, now: float) -> None:
        """Put a message that came back to rank 0 into its inbox."""
        self._root_trace.note("recv", now, now, **facts_of(msg))
        self._inbox.append(msg)

    def _note(self, trace: NoTrace, msg: Message, since: float, until: float) -> None:
        note(trace, msg, None if self._is_one_rank else self.profile, since, until)


class RingLink:
    """Rank 0's link to one ring of a cluster; it receives messages from all rings."""

    def __init__(self, cluster: Cluster, send_at: SendAt,
                 stages: Sequence[tuple[VirtualStage, ModelledWire]]) -> None:
        self.cluster, self._send_at, self._stages = cluster, send_at, stages
        self.recv, self.wait_until, self.defer = cluster.recv, cluster.wait_until, cluster.defer

    @property
    def ready(self) -> bool:
        return self.cluster.ready

    def send(self, msg: Message) -> None:
        self.cluster.send(msg, self._send_at)

    def broadcast(self, msg: Message) -> None:
        self.cluster.broadcast(msg, self._stages)

    def urgent(self) -> Prune | None:
        return None


class NodePaths:
    """The number of the path of each sent node."""

    def __init__(self, paths: AnswerSource) -> None:
        self._paths = paths
        self.is_deferred = False  # whether rank 0 looks up the target's outputs itself
        self._path_of: dict[int, dict[int, int]] = {}  # request -> node -> path

    def learn(self, segment: Segment) -> None:
        """Store the paths of a segment's nodes; its `x` are tokens."""
        if not self._path_of and self._paths.full:
            self._paths.clear()

        node_paths = self._path_of.setdefault(segment.request, {})
        tokens = segment.x.tolist()
        for node, parent, token in zip(segment.nodes, segment.parents, tokens):
            parent_path = node_paths[parent] if parent != node else self._paths.root
            node_paths[node] = self._paths.after(parent_path, token)

    def start(self, start: Start) -> None:
        """Store the path with which a request begins in the text of another one."""
        shared_path = self._path_of[start.source][start.last]
        self._path_of[start.request] = {start.tip: shared_path}

    def with_outputs(self, segment: Segment) -> Segment:
        """Return a segment with the hidden states of its rows, or with their path numbers if `is_deferred`."""
        if not segment.nodes:
            return segment

        node_paths = self._path_of[segment.request]
        path_T = [node_paths[node] for node in segment.nodes]
        if self.is_deferred:
            return replace(segment, x=torch.tensor(path_T)[:, None])
        x_TD, inner_TN = self._paths.outputs(path_T)
        return replace(segment, x=x_TD, inner=None if segment.inner is None else inner_TN)

    def forget(self, request: int) -> None:
        """Forget an ended request."""
        self._path_of.pop(request, None)
