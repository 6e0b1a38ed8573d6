"""The ring: the stages as rank 0 sees them, shared by all requests; what they send leaves together.

It knows nothing about trees or what is said of their nodes: each request has a target of its own (`target.py`).
"""
from __future__ import annotations

import heapq
from itertools import count
from typing import Any, Callable, ContextManager, Iterator, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from model.sample import Sampler
from model.tree import TokenTree
from pipeline.budget import Budget
from pipeline.clock import REAL
from pipeline.first_stage import FirstStage
from pipeline.interfaces import Clock
from pipeline.leisure import Leisure
from pipeline.messages import Message, Prune, Reset, Segment, Stop, joined, segments_of
from pipeline.meter import Meter
from pipeline.outbox import Outbox
from pipeline.stage_times import StageTimes
from pipeline.target import RequestTarget, Returned, RingTarget
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
        self.places = 1  # for requests that are under way at once
        self.trace, self.clock = trace, clock
        self.meter = Meter()  # of rank 0's work
        self.alarms: list[float] = []  # a heap of moments at which listening ends, whatever has come
        self.outbox = Outbox()
        self.unlearn()
        self.segments = 0  # sent since the start
        self.shared = 0  # how often the rows of the next segment were shared out anew
        self.requests = 0  # closed since the start
        self.heard = 0  # messages that have come back since the start
        self.unanswered = 0  # of those that `ask` has sent
        self.stopped = False  # whether it was ended
        self.ids: Iterator[int] = count()  # of the nodes of all requests, so that no id ever means two nodes
        self._numbers: Iterator[int] = count()  # of the requests
        self._question = -1  # the number of what `ask` has sent last
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
        self.first_stage = FirstStage(1 / max(1, self.depth - 1))
        self.times = StageTimes()
        self.leisure = Leisure()
        self._budget = Budget(self.depth - 1, self.times)

    def open(self, tree: TokenTree, sampler: Sampler, inner: bool = False, prunes: bool = True) -> RequestTarget:
        """The target of a new request.

        `inner`: the draft's features are the inputs of inner layers, which segments must ask the stages for. Without
        `prunes`, stages compute guesses to the end that died on their way, and forget them when they have come back.
        """
        request = next(self._numbers)
        target = RingTarget(self, request, tree, sampler, inner, prunes)
        self._open[request] = target
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
        self.outbox.put(segment)
        if len(self.running) == 1:
            self.depart()

    def share(self, target: RequestTarget, size: int | None) -> int | None:
        """How many of `size` rows of the next segment are for this request; None is no bound."""
        running = self.running
        if size is None or (len(running) < 2 and not target.thrifty):
            return size
        return self._budget.share(target, running, size)

    def share_anew(self) -> None:
        """Let everybody ask for rows of the next segment, who was left out of this one, too."""
        self._budget.close()
        self.shared += 1

    @property
    def free(self) -> bool:
        """Whether a segment that leaves now would hardly wait for the first stage."""
        return self.clock.now() >= self.first_stage.ready_at

    def depart(self) -> None:
        """Let leave what was put together, one message after the other, each as the first stage gets free for it."""
        while self.outbox and (self.free or len(self.running) < 2):
            segments = [self._open[segment.request].alive(segment) for segment in self.outbox.take()]
            nodes = [node for segment in segments for node in segment.nodes]
            self.first_stage.send(nodes, self.clock.now())
            for segment in segments[:-1]:
                with sending(self.trace, segment):
                    pass
            with sending(self.trace, segments[-1]):
                self.link.send(joined(segments))
            self.segments += len(segments)
            self.share_anew()

    # --- back ---------------------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Wait for a message, for something else that an open request waits for, or an alarm; hand out messages."""
        self.depart()
        if self.alarms and self.alarms[0] <= self.clock.now():
            heapq.heappop(self.alarms)  # whoever set it goes on before anybody waits
            return
        moments = [target.wakes for target in self.running if target.wakes is not None] + self.alarms[:1]
        if self.outbox:
            moments.append(self.first_stage.ready_at)
        if moments:
            self.link.rest(min(moments))
            self.poll()
        elif self.closing or any(target.in_flight for target in self.running):
            self._hand_out(self.link.recv())
        else:
            self.share_anew()  # everybody was left out for somebody who has nothing to send any more

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
        group: WeakKeyDictionary[Returned, None] = WeakKeyDictionary()
        for segment in segments:
            self._target(segment.request).take(segment, group)

    def _target(self, request: int) -> RequestTarget:
        assert request in self._open, f"a message for request {request}, which is not open"
        return self._open[request]

    def _is_back(self, segments: Sequence[Segment]) -> None:
        """Note that the oldest message has come round."""
        rows = sum(len(segment.nodes) for segment in segments)
        self.first_stage.back(rows, self.clock.now())
        self.times.learn(max((segment.visits for segment in segments), key=len))

    # --- all of it ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Wait until every stage has passed a first message on, which shows that it is there."""
        self._round(Reset(next(self._numbers)))

    def ask(self) -> None:
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

    def _round(self, msg: Message) -> None:
        """Send a message round every ring, and drop what comes back before it."""
        for link in self.links:
            link.send(msg)
        under_way = len(self.links)
        while under_way:
            under_way -= isinstance(self.link.recv(), type(msg))


def sending(trace: NoTrace, segment: Segment, **facts: Any) -> ContextManager[object]:
    """The span in which a segment leaves."""
    facts.update(nodes=segment.nodes, tokens=segment.x.tolist(), parents=segment.parents, text=segment.text)
    return trace.span("send", **facts)
