"""The virtual cluster: rank 0's links to stages and wires that take a profile's time on a virtual clock.

One thread, and nobody sleeps. Rank 0 spends its own time on the clock; whenever it looks at a link, all that has
happened elsewhere up to that moment happens, in the order of the moments. The tokens are real: what the target says of
a row is looked up when the row comes back.
"""
from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Callable, Protocol, Sequence

from torch import Tensor

from config.profiles import Profile
from pipeline.drafters import Drafter
from pipeline.messages import NOBODY, Message, Prune, Reset, Segment, Start, joined, segments_of
from pipeline.trace import OFF, Clock, NoTrace
from sim.clock import VirtualClock
from sim.stages import VirtualStage, Work
from sim.wires import Wire, size


@dataclass(frozen=True)
class Own:
    """What a program takes beside what a profile charges, in seconds."""

    turn: float = 0.0  # of rank 0, for each message that it takes in
    message: float = 0.0  # on its way over a wire
    segment: float = 0.0  # in a stage


NO_OWN_TIME = Own()
Arrive = Callable[[Message, float], None]  # a message, and the moment


class Answers(Protocol):
    """What the target says after each path of tokens; a path is known by a number, `root` is the one without tokens."""

    root: int

    @property
    def full(self) -> bool:
        """Whether it is time to forget, once nobody holds a path any more."""

    def clear(self) -> None:
        """Forget all paths."""

    def after(self, path: int, token: int) -> int:
        """The number of a path with one more token."""

    def said(self, paths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """What the LM head reads `[T, D]` at the end of each path, and the inner features, `[T, D * inner]`."""


class Cluster:
    """Rings of stages, and rank 0's `links` to them; `rings[i][j]` is what stage j of ring i does.

    `traces` are those of rank 0 and of each stage, ring by ring. A wire leads to each stage and back to rank 0. With
    one trace only, rank 0 is in the one stage itself, and computes while it sends.
    """

    def __init__(self, profile: Profile, clock: VirtualClock, rings: Sequence[Sequence[Work]], paths: Answers,
                 traces: Sequence[NoTrace], own: Own = NO_OWN_TIME) -> None:
        self.profile, self._clock, self._own = profile, clock, own
        self._alone = len(traces) == 1
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._inbox: deque[Message] = deque()
        self._paths, self._memory = paths, Memory(paths)
        self._works = [work for works in rings for work in works]
        self._wires: list[Wire] = []
        self._trace = traces[0]
        of_stages = iter(traces[1:] or traces)
        self.links = [self._ring(works, [next(of_stages) for _ in works]) for works in rings]

    def _ring(self, works: Sequence[Work], traces: Sequence[NoTrace]) -> Way:
        """The stages of one ring, and rank 0's link to them."""
        ranks = [0, *(work.rank for work in works)]
        send = self._back(traces[-1], self._wire(ranks[-1], 0))
        stages: list[VirtualStage] = []
        befores = [self._trace, *traces]
        for work, trace, before, rank in reversed(list(zip(works, traces, befores, ranks))):
            stage = VirtualStage(self, work, send, trace)
            stages.append(stage)
            send = self._onward(stage.hear, before, self._wire(rank, work.rank))
        controls = [self._wire(0, work.rank) for work in reversed(works)]
        return Way(self, send, list(zip(stages, controls)))

    def _wire(self, sender: int, receiver: int) -> Wire:
        wire = Wire(self.profile.link(sender, receiver))
        self._wires.append(wire)
        return wire

    def restart(self) -> None:
        """Begin at a whole second what takes as long as at any other, to the last bit; no request is open.

        What the target says is computed again, since its last bits depend on the rows that are computed together.
        """
        self._clock.even()
        self._paths.clear()
        for wire in self._wires:
            wire.restart()
        for work in self._works:
            work.cool()

    # --- what rank 0 does ---------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        self._happen(self._clock.now())
        return bool(self._inbox)

    def send(self, msg: Message, leave: Arrive) -> None:
        """Hand a message to the wire that begins with `leave`."""
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
        self._clock.sleep_until(self._clock.now() + self._own.turn)
        if segments := segments_of(msg):
            return joined([self._memory.answered(segment) for segment in segments])
        if isinstance(msg, Reset) and msg.last == NOBODY:
            self._memory.forget(msg.request)
        return msg

    def rest(self, until: float) -> None:
        """Let time pass until a message is there, or until this moment."""
        self._happen(self._clock.now())
        while not self._inbox and self._events and self._events[0][0] <= until:
            self._happen_next()
        if not self._inbox:
            assert until < float("inf"), "rank 0 waits for a message that nobody will send"
            self._clock.sleep_until(until)

    def broadcast(self, msg: Message, stages: Sequence[tuple[VirtualStage, Wire]]) -> None:
        """Hand a message to the wires for control, one to each of these stages."""
        now = latest = self._clock.now()
        for stage, control in reversed(stages):
            arrival = now if self._alone else control.arrival(msg, now)
            latest = max(latest, arrival)
            self.at(arrival, partial(stage.hear, msg))
        self._note(self._trace, msg, now, latest)

    # --- what happens elsewhere ---------------------------------------------------------------------------------------

    def at(self, moment: float, event: Callable[[float], None]) -> None:
        """Call `event` with the moment when it has come."""
        heapq.heappush(self._events, (moment, next(self._order), event))

    def _happen(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            moment, _, event = heapq.heappop(self._events)
            event(moment)

    def _happen_next(self) -> None:
        self._clock.sleep_until(self._events[0][0])
        self._happen(self._clock.now())

    def _onward(self, arrive: Arrive, trace: NoTrace, wire: Wire) -> Arrive:
        """A wire to where messages `arrive`; `trace` is that of the rank before it."""
        def send(msg: Message, now: float) -> None:
            arrival = now if self._alone else wire.arrival(msg, now) + self._own.message
            self._note(trace, msg, now, arrival)
            self.at(arrival, partial(arrive, msg))

        return send

    def _back(self, trace: NoTrace, wire: Wire) -> Arrive:
        def arrive(msg: Message, now: float) -> None:
            nodes = getattr(msg, "nodes", [])
            self._trace.note("recv", now, now, kind=type(msg).__name__, nodes=nodes)
            self._inbox.append(msg)

        return self._onward(arrive, trace, wire)

    def _note(self, trace: NoTrace, msg: Message, since: float, until: float) -> None:
        weight = 0 if self._alone else size(msg, self.profile)
        trace.note("wire", since, until, kind=type(msg).__name__, bytes=weight)


class Way:
    """Rank 0's link into one ring of a cluster, which hears what comes from all of them."""

    def __init__(self, cluster: Cluster, leave: Arrive,
                 stages: Sequence[tuple[VirtualStage, Wire]]) -> None:
        self._cluster, self._leave, self._stages = cluster, leave, stages
        self.recv, self.rest = cluster.recv, cluster.rest

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
    """Which path each node that was sent stands for, and what the target says there."""

    def __init__(self, paths: Answers) -> None:
        self._paths = paths
        self._path: dict[int, dict[int, int]] = {}  # request -> node -> path

    def learn(self, segment: Segment) -> None:
        """Note the paths of a segment whose `x` are tokens."""
        if not self._path and self._paths.full:
            self._paths.clear()
        known = self._path.setdefault(segment.request, {})
        tokens = segment.x.tolist()
        for node, parent, token in zip(segment.nodes, segment.parents, tokens):
            before = known[parent] if parent != node else self._paths.root
            known[node] = self._paths.after(before, token)

    def start(self, start: Start) -> None:
        """Note where a request begins, which is a place in the text of another."""
        place = self._path[start.source][start.last]
        self._path[start.request] = {start.tip: place}

    def answered(self, segment: Segment) -> Segment:
        """A segment that came back, with the hidden states of its rows."""
        if not segment.nodes:
            return segment
        known = self._path[segment.request]
        x_TD, inner = self._paths.said([known[node] for node in segment.nodes])
        return replace(segment, x=x_TD, inner=None if segment.inner is None else inner)

    def forget(self, request: int) -> None:
        """The request is over."""
        self._path.pop(request, None)


class DrafterWay:
    """Rank 0's link to a rank with a small model, which guesses really, here and now.

    What is modelled is when a question reaches the rank, how long it drafts, and when its answer is back.
    `clock` is rank 0's, `own` that of the small model, which passes on to `own` what a level takes; both begin at 0.
    `trace` is rank 0's.
    """

    def __init__(self, profile: Profile, drafter: Drafter, clock: Clock, own: Clock, trace: NoTrace = OFF) -> None:
        self._profile, self._drafter = profile, drafter
        self._clock, self._own = clock, own
        self._trace = trace
        self._there, self._back = Wire(profile), Wire(profile)
        self._answers: deque[tuple[float, Message]] = deque()  # with the moments at which they come

    def restart(self) -> None:
        """Let the wires draw their jitter from its beginning on."""
        self._there.restart()
        self._back.restart()

    def send(self, msg: Message) -> None:
        """Hand over a message; the rank obeys it once it has come and those before it are done."""
        there = self._carry(self._there, msg, self._clock.now(), self._trace)
        self._own.sleep_until(there)
        answer = self._drafter.apply(msg)
        arrival = self._carry(self._back, answer, self._own.now(), self._drafter.trace)
        self._answers.append((arrival, answer))

    def recv(self) -> Message:
        """The next answer, once its moment has come."""
        arrival, answer = self._answers.popleft()
        self._clock.sleep_until(arrival)
        self._trace.note("recv", arrival, arrival, kind=type(answer).__name__, nodes=[])
        return answer

    def _carry(self, wire: Wire, msg: Message, now: float, trace: NoTrace) -> float:
        arrival = wire.arrival(msg, now)
        trace.note("wire", now, arrival, kind=type(msg).__name__, bytes=size(msg, self._profile))
        return arrival
