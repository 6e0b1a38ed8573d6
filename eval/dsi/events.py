"""Plain decoding, speculative decoding (SI) and its distributed form (DSI) with modelled acceptance, by events.

Whether the draft of a position would be right is given, the same for every method. Positions are those of the new
tokens, from 0. The algorithm is that of the paper (arXiv 2405.14105, appendix D).

A *tick* is a whole unit of time, so that moments add up and compare exactly. Chance orders tasks that end at one
moment, as it does where moments differ by less than anybody can measure; the same seed draws the same order.
"""
from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Callable, NamedTuple, Sequence

Done = Callable[[], None]  # what follows from the end of a task


# --- tasks and workers ------------------------------------------------------------------------------------------------

@dataclass(eq=False)
class Task:
    """What ends at a tick, unless it is cancelled; at its end `done` is called."""

    due: int
    done: Done
    cancelled: bool = False


class Events:
    """The tasks under way, which end one after the other."""

    def __init__(self, seed: int = 0) -> None:
        self.now = 0
        self._chance = random.Random(seed)
        self._heap: list[tuple[int, float, int, Task]] = []
        self._order = count()

    def start(self, ticks: int, done: Done) -> Task:
        """Begin a task at this moment."""
        task = Task(self.now + ticks, done)
        place = task.due, self._chance.random(), next(self._order)
        heapq.heappush(self._heap, (*place, task))
        return task

    def run(self) -> None:
        """Let all tasks end, and those that they start, until none is under way."""
        while self._heap:
            task = heapq.heappop(self._heap)[-1]
            if not task.cancelled:
                self.now = task.due
                task.done()

    def stop(self) -> None:
        """Cancel whatever is under way, so that `run` returns."""
        for *_, task in self._heap:
            task.cancelled = True


class Forward(NamedTuple):
    """Ticks of the first forward of a worker, and of each later one."""

    first: int
    later: int


class Worker:
    """A drafter, or one copy of the target: it computes one forward at a time.

    What is given up counts as the first forward, as in the simulator published with the paper on DSI.
    """

    def __init__(self, events: Events, forward: Forward, stops: bool = True) -> None:
        self._events, self._forward, self._stops = events, forward, stops
        self._task: Task | None = None
        self._wanted = False  # whether the result is still of use
        self.forwards = 0  # how many were begun

    @property
    def free(self) -> bool:
        """Whether it can begin a forward."""
        return self._task is None

    @property
    def ticks(self) -> int:
        """What the next forward takes."""
        return self._forward.later if self.forwards else self._forward.first

    def compute(self, done: Done) -> None:
        """Begin a forward; the worker must be free."""
        def end() -> None:
            self._task = None
            done()
        self._task = self._events.start(self.ticks, end)
        self.forwards, self._wanted = self.forwards + 1, True

    def give_up(self, freed: Done) -> None:
        """The result is of no use: `done` will not be called, but `freed` if the worker runs on to the end."""
        def end() -> None:
            self._task = None
            freed()
        if self._task is not None and self._wanted:
            self._wanted = False
            self._task.cancelled = True
            rest = 0 if self._stops else self._task.due - self._events.now
            self._task = self._events.start(rest, end) if rest else None


# --- decoding ---------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Plan:
    """What is decoded, and by which workers."""

    tokens: int
    lookahead: int  # drafts of a verification
    servers: int  # copies of the target
    target: Forward
    drafter: Forward
    stops: bool = True  # whether a server gives a forward up at once, or runs on to its end
    seed: int = 0  # of the order of what happens at one moment


class Outcome(NamedTuple):
    """What came of a plan: moments in ticks, the work of the target in forwards."""

    commits: tuple[tuple[int, int], ...]  # a moment, and how many tokens were settled then
    forwards: int  # of the target, with those that were given up
    rejections: int
    most: int  # servers that computed at one moment

    @property
    def ticks(self) -> int:
        """When the last token was settled."""
        return self.commits[-1][0]

    def settled(self, moment: float) -> int:
        """How many tokens were settled by then."""
        return sum(count for when, count in self.commits if when <= moment)


class Method:
    """What all methods have: workers, the count of settled tokens, and when they were settled."""

    def __init__(self, plan: Plan, right: Sequence[bool]) -> None:
        self.plan, self.right, self.events = plan, right, Events(plan.seed)
        self.drafter = Worker(self.events, plan.drafter)
        self.servers = [Worker(self.events, plan.target, plan.stops) for _ in range(plan.servers)]
        self.settled = self.rejections = self.most = 0
        self._commits: list[tuple[int, int]] = []

    def run(self) -> Outcome:
        """Settle all tokens."""
        self.begin()
        self.events.run()
        forwards = sum(server.forwards for server in self.servers)
        return Outcome(tuple(self._commits), forwards, self.rejections, self.most)

    def begin(self) -> None:
        """Begin the first forwards."""
        raise NotImplementedError

    @property
    def free(self) -> list[Worker]:
        """The servers that can begin a forward."""
        return [server for server in self.servers if server.free]

    def ask(self, done: Done) -> None:
        """The free server that takes the shortest time computes."""
        min(self.free, key=lambda server: server.ticks).compute(done)
        self.most = max(self.most, len(self.servers) - len(self.free))

    def commit(self, count: int) -> None:
        """Further tokens are settled at this moment."""
        self.settled += count
        self._commits.append((self.events.now, count))


class SI(Method):
    """Draft k tokens, verify them on one server, and again; the last token of all needs no draft."""

    def begin(self) -> None:
        left = self.plan.tokens - self.settled
        self.drafts, self.wanted = 0, min(self.plan.lookahead, left - 1)
        self._go_on()

    def _go_on(self) -> None:
        if self.drafts < self.wanted:
            self.drafter.compute(self._drafted)
        else:
            self.ask(self._verified)

    def _drafted(self) -> None:
        self.drafts += 1
        self._go_on()

    def _verified(self) -> None:
        accepted = 0
        while accepted < self.drafts and self.right[self.settled + accepted]:
            accepted += 1
        self.rejections += accepted < self.drafts
        self.commit(accepted + 1)
        if self.settled < self.plan.tokens:
            self.begin()


class DSI(Method):
    """The drafter never waits; every k drafts another server verifies; a rejection begins a new epoch.

    An epoch begins with a verification of no drafts, whose answer is the token that follows. Of those that find all
    servers busy the newest goes first. When a server is done, it gets what waits before its answer is judged. Answers
    are judged strictly in the order of positions; that of the position behind a verification's last draft judges the
    first draft of the next one. A token that is settled before its draft is there begins a new epoch, too. If no answer
    is under way for the next position, what was drafted so far is verified without waiting for k drafts.
    """

    def begin(self) -> None:
        """Begin an epoch at what is settled."""
        self.drafted, self.sent = self.settled, self.settled - 1  # so many drafts; the last position asked about
        self.waiting: list[range] = []  # the positions of verifications that have no server
        self.answered: set[int] = set()  # positions at which the target's token is known
        self._go_on()

    def _go_on(self) -> None:
        """Give work to workers that are free."""
        if self.drafter.free and self.drafted < self.plan.tokens - 1:
            self.drafter.compute(self._draft_made)
        if self._due:
            self.waiting.append(range(self.sent, self.drafted + 1))
            self.sent = self.drafted
        while self.waiting and self.free:
            self.ask(partial(self._verified, self.waiting.pop()))

    @property
    def _due(self) -> bool:
        """Whether a verification of the drafts after the last one, or of the next position, is due."""
        drafts = self.drafted - self.sent
        last = self.drafted == self.plan.tokens - 1
        return self.settled > self.sent or drafts >= (1 if last else self.plan.lookahead)

    def _draft_made(self) -> None:
        self.drafted += 1
        self._go_on()

    def _verified(self, positions: range) -> None:
        self.answered.update(positions)
        self._go_on()
        count, holds = self._judge()
        if count:
            self.commit(count)
        if self.settled == self.plan.tokens:
            self.events.stop()
        elif holds:
            self._go_on()
        else:  # nothing that is under way is of use
            for worker in [self.drafter, *self.servers]:
                worker.give_up(self._go_on)
            self.begin()

    def _judge(self) -> tuple[int, bool]:
        """How many further tokens are settled by the answers, and whether the drafts after them still hold."""
        position = self.settled
        while position in self.answered:
            position += 1
            if position < self.plan.tokens and not self._holds(position - 1):
                self.rejections += position <= self.drafted
                return position - self.settled, False
        return position - self.settled, True

    def _holds(self, position: int) -> bool:
        """Whether there is a draft of a position, and it is right."""
        return position < self.drafted and self.right[position]


def decode(method: str, plan: Plan, right: Sequence[bool]) -> Outcome:
    """What comes of a plan by DSI, SI or non-SI, which is SI without drafts.

    `right` says for each position but the last whether its draft would be the target's token.
    """
    if method == "DSI":
        return DSI(plan, right).run()
    lookahead = plan.lookahead if method == "SI" else 0
    return SI(replace(plan, servers=1, lookahead=lookahead), right).run()
