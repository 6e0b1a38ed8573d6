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
from pipeline.messages import NOBODY, Features, Message, Prune, Reset, Segment, Start, facts_of, joined, segments_of
from pipeline.trace import NoTrace
from sim.clock import VirtualClock
from sim.stages import VirtualStage, Work
from sim.wires import ModelledWire, note

Arrive = Callable[[Message, float], None]  # is called with a message and the time
Said = Tuple[Tensor, Tensor]  # last hidden states [T, D] at the ends of paths, and inner features [T, D * inner]


class Answers(Protocol):
    """The target's outputs after each path of tokens. A path has a number; `root` is the path without tokens."""

    root: int

    @property
    def full(self) -> bool:
        """Whether `clear` is due."""

    def clear(self) -> None:
        """Forget all paths."""

    def after(self, path: int, token: int) -> int:
        """Return the number of the path with one more token."""

    def outputs(self, paths: Sequence[int]) -> Said:
        """Return the target's outputs at the end of each path."""


class Cluster:
    """The rings of stages, and rank 0's `links` to them; `rings[i][j]` is the work of stage j in ring i.

    `traces` are the traces of rank 0 and of each stage, ring by ring. A wire leads to each stage and back to rank 0. If
    there is only one trace, rank 0 itself is the only stage, and computes while it sends.
    """

    def __init__(self, profile: Profile, clock: VirtualClock, rings: Sequence[Sequence[Work]], paths: Answers,
                 traces: Sequence[NoTrace]) -> None:
        self.profile, self._clock = profile, clock
        self._alone = len(traces) == 1
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._inbox: deque[Message] = deque()
        self._paths, self._memory = paths, Memory(paths)
        self._wires: list[ModelledWire] = []
        self._trace = traces[0]
        of_stages = iter(traces[1:] or traces)
        self.links: list[RingLink] = []
        for works in rings:
            own_traces = [next(of_stages) for _ in works]
            self.links.append(self._ring(works, own_traces))

    def _ring(self, works: Sequence[Work], traces: Sequence[NoTrace]) -> RingLink:
        """Create the stages of one ring; return rank 0's link to them."""
        ranks = [0, *(work.rank for work in works)]
        back = self._wire(ranks[-1], 0)
        send = self._onward(self._arrive, traces[-1], back)
        stages: list[VirtualStage] = []
        steps = list(zip(works, traces, [self._trace, *traces], ranks))
        for work, trace, before, rank in reversed(steps):
            report = self._onward(self._arrive, trace, self._wire(work.rank, 0))
            stage = VirtualStage(self.at, work, send, report, trace)
            stages.append(stage)
            send = self._onward(stage.hear, before, self._wire(rank, work.rank))
        controls = [self._wire(0, work.rank) for work in reversed(works)]
        return RingLink(self, send, list(zip(stages, controls)))

    def _wire(self, sender: int, receiver: int) -> ModelledWire:
        wire = ModelledWire(self.profile.link(sender, receiver))
        self._wires.append(wire)
        return wire

    def restart(self, same: bool) -> None:
        """Reset to the state at the start, at a whole second, so that times repeat bit for bit; no request may be open.

        The target's outputs are computed again, since their last bits depend on the rows that are computed together.
        They are kept for the `same` question with a deferred look-up, since its rows are equal.
        """
        self._clock.even()
        if not (same and self._memory.deferred):
            self._paths.clear()
        for wire in self._wires:
            wire.restart()

    def defer(self) -> Callable[[Sequence[int]], Said]:
        """Let segments return with path numbers `[T, 1]`; return the function that looks up the outputs of paths."""
        self._memory.deferred = True
        return self._paths.outputs

    # --- rank 0 -------------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        self._happen(self._clock.now())
        return bool(self._inbox)

    def send(self, msg: Message, leave: Arrive) -> None:
        """Send a message over the wire `leave`."""
        for segment in segments_of(msg):
            self._memory.learn(segment)
        if isinstance(msg, Start):
            self._memory.start(msg)
        leave(msg, self._clock.now())
        while self._alone and not self._inbox:
            self._happen_next()

    def recv(self) -> Message:
        self.rest(float("inf"))
        msg = self._inbox.popleft()
        if segments := segments_of(msg):
            return joined([self._memory.answered(segment) for segment in segments])
        if isinstance(msg, Features):
            return self._memory.known(msg)
        if isinstance(msg, Reset) and msg.last == NOBODY:
            self._memory.forget(msg.request)
        return msg

    def rest(self, until: float) -> None:
        """Advance the clock until a message has arrived, or until this time."""
        self._happen(self._clock.now())
        while not self._inbox and self._events and self._events[0][0] <= until:
            self._happen_next()
        if not self._inbox:
            assert until < float("inf"), "rank 0 waits for a message that no stage will send"
            self._clock.sleep_until(until)

    def broadcast(self, msg: Message, stages: Sequence[tuple[VirtualStage, ModelledWire]]) -> None:
        """Send a message over the control wire of each stage."""
        now = latest = self._clock.now()
        for stage, control in reversed(stages):
            arrival = now if self._alone else control.arrival(msg, now)
            latest = max(latest, arrival)
            self.at(arrival, partial(stage.hear, msg))
        self._note(self._trace, msg, now, latest)

    # --- events -------------------------------------------------------------------------------------------------------

    def at(self, moment: float, event: Callable[[float], None]) -> None:
        """Schedule `event`, which is called with this time when the clock reaches it."""
        heapq.heappush(self._events, (moment, next(self._order), event))

    def _happen(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            moment, _, event = heapq.heappop(self._events)
            event(moment)

    def _happen_next(self) -> None:
        self._clock.sleep_until(self._events[0][0])
        self._happen(self._clock.now())

    def _onward(self, arrive: Arrive, trace: NoTrace, wire: ModelledWire) -> Arrive:
        """Return a function that sends messages over a wire to `arrive`; `trace` is the sender's."""
        def send(msg: Message, now: float) -> None:
            arrival = now if self._alone else wire.arrival(msg, now)
            self._note(trace, msg, now, arrival)
            self.at(arrival, partial(arrive, msg))

        return send

    def _arrive(self, msg: Message, now: float) -> None:
        """Put a message that came back to rank 0 into its inbox."""
        self._trace.note("recv", now, now, **facts_of(msg))
        self._inbox.append(msg)

    def _note(self, trace: NoTrace, msg: Message, since: float, until: float) -> None:
        note(trace, msg, None if self._alone else self.profile, since, until)


class RingLink:
    """Rank 0's link to one ring of a cluster; it receives messages from all rings."""

    def __init__(self, cluster: Cluster, leave: Arrive,
                 stages: Sequence[tuple[VirtualStage, ModelledWire]]) -> None:
        self._cluster, self._leave, self._stages = cluster, leave, stages
        self.recv, self.rest, self.defer = cluster.recv, cluster.rest, cluster.defer

    @property
    def ready(self) -> bool:
        return self._cluster.ready

    def send(self, msg: Message) -> None:
        self._cluster.send(msg, self._leave)

    def broadcast(self, msg: Message) -> None:
        self._cluster.broadcast(msg, self._stages)

    def urgent(self) -> Prune | None:
        return None


class Memory:
    """The number of the path of each sent node."""

    def __init__(self, paths: Answers) -> None:
        self._paths = paths
        self.deferred = False  # whether rank 0 looks up the target's outputs itself
        self._path: dict[int, dict[int, int]] = {}  # request -> node -> path

    def learn(self, segment: Segment) -> None:
        """Store the paths of a segment's nodes; its `x` are tokens."""
        if not self._path and self._paths.full:
            self._paths.clear()
        known = self._path.setdefault(segment.request, {})
        tokens = segment.x.tolist()
        for node, parent, token in zip(segment.nodes, segment.parents, tokens):
            before = known[parent] if parent != node else self._paths.root
            known[node] = self._paths.after(before, token)

    def start(self, start: Start) -> None:
        """Store the path with which a request begins in the text of another one."""
        place = self._path[start.source][start.last]
        self._path[start.request] = {start.tip: place}

    def answered(self, segment: Segment) -> Segment:
        """Return a segment with the hidden states of its rows, or with their path numbers if `deferred`."""
        if not segment.nodes:
            return segment
        known = self._path[segment.request]
        path_T = [known[node] for node in segment.nodes]
        if self.deferred:
            return replace(segment, x=torch.tensor(path_T)[:, None])
        x_TD, inner = self._paths.outputs(path_T)
        return replace(segment, x=x_TD, inner=None if segment.inner is None else inner)

    def known(self, features: Features) -> Features:
        """Return features of rows in flight, with the inputs of the inner layers; without rows if the request ended.
        """
        paths = self._path.get(features.request)
        if paths is None:
            return replace(features, nodes=[], x=features.x[:0])
        x_TD, inner_TN = self._paths.outputs([paths[node] for node in features.nodes])
        return replace(features, x=inner_TN[:, :features.layers * x_TD.shape[1]])

    def forget(self, request: int) -> None:
        """Forget an ended request."""
        self._path.pop(request, None)
