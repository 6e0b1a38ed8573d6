"""Plain decoding, speculative decoding (SI) and its distributed form (DSI) with modelled acceptance, by events.

Whether the draft of a position would be right is given, the same for every method. Positions are those of the new
tokens, from 0. The algorithm is that of the paper (arXiv 2405.14105, appendix D).

A *tick* is a whole unit of time, so that moments add up and compare exactly. Chance orders what ends at one moment, as
it does where moments differ by less than anybody can measure; the same seed draws the same order.
"""
from __future__ import annotations

import heapq
import random
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Callable, NamedTuple, Sequence

Done = Callable[[], None]  # what follows from the end of a forward


class Forward(NamedTuple):
    """Ticks of the first forward of a worker, and of each later one."""

    first: int
    later: int

    def takes(self, begun: int) -> int:
        """The ticks of a forward behind so many others."""
        return self.later if begun else self.first


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


def decode(method: str, plan: Plan, right: Sequence[bool]) -> Outcome:
    """What comes of a plan by DSI, SI or non-SI, which is SI without drafts.

    `right` says for each position but the last whether its draft would be the target's token.
    """
    if method == "DSI":
        return DSI(plan, right).run()
    return _si(plan, right, plan.lookahead if method == "SI" else 0)


def _si(plan: Plan, right: Sequence[bool], lookahead: int) -> Outcome:
    """Draft k tokens, verify them on one server, and again; the last token of all needs no draft."""
    now = settled = drafted = rejections = 0
    commits: list[tuple[int, int]] = []
    while settled < plan.tokens:
        drafts = min(lookahead, plan.tokens - settled - 1)
        now += sum(map(plan.drafter.takes, range(drafted, drafted + drafts)))
        now += plan.target.takes(len(commits))
        accepted = 0
        while accepted < drafts and right[settled + accepted]:
            accepted += 1
        drafted += drafts
        rejections += accepted < drafts
        settled += accepted + 1
        commits.append((now, accepted + 1))
    return Outcome(tuple(commits), len(commits), rejections, most=1)


@dataclass(eq=False)
class Worker:
    """A drafter, or one copy of the target: it computes one forward at a time.

    What is given up counts as the first forward, as in the simulator published with the paper on DSI.
    """

    forward: Forward
    stops: bool = True  # whether it gives a forward up at once, or runs on to its end
    forwards: int = 0  # how many were begun
    task: int | None = None  # the number of what it does
    due: int = 0  # when that ends
    done: Done | None = None  # what then follows, if the result is still of use

    @property
    def ticks(self) -> int:
        """What the next forward takes."""
        return self.forward.takes(self.forwards)


class DSI:
    """The drafter never waits; every k drafts another server verifies; a rejection begins a new epoch.

    An epoch begins with a verification of no drafts, whose answer is the token that follows. Of those that find all
    servers busy the newest goes first. When a server is done, it gets what waits before its answer is judged. Answers
    are judged strictly in the order of positions; that of the position behind a verification's last draft judges the
    first draft of the next one. A token that is settled before its draft is there begins a new epoch, too. If no answer
    is under way for the next position, what was drafted so far is verified without waiting for k drafts.
    """

    def __init__(self, plan: Plan, right: Sequence[bool]) -> None:
        self.plan, self.right = plan, right
        self.drafter = Worker(plan.drafter)
        self.servers = [Worker(plan.target, plan.stops) for _ in range(plan.servers)]
        self.now = self.settled = self.rejections = self.most = 0
        self._commits: list[tuple[int, int]] = []
        self._tasks: list[tuple[int, float, int, Worker]] = []  # a heap: the first to end comes first
        self._chance, self._numbers = random.Random(plan.seed), count()

    def run(self) -> Outcome:
        """Settle all tokens."""
        self.begin()
        while self.settled < self.plan.tokens:
            due, _, number, worker = heapq.heappop(self._tasks)
            if worker.task == number:  # else it was given up
                self.now, worker.task = due, None
                (worker.done or self._go_on)()
        forwards = sum(server.forwards for server in self.servers)
        return Outcome(tuple(self._commits), forwards, self.rejections, self.most)

    # --- workers ------------------------------------------------------------------------------------------------------

    @property
    def free(self) -> list[Worker]:
        """The servers that can begin a forward."""
        return [server for server in self.servers if server.task is None]

    def compute(self, worker: Worker, done: Done) -> None:
        """Begin a forward, after which `done` is called."""
        worker.task, worker.done = next(self._numbers), done
        worker.due = self.now + worker.ticks
        worker.forwards += 1
        entry = worker.due, self._chance.random(), worker.task, worker
        heapq.heappush(self._tasks, entry)

    def ask(self, done: Done) -> None:
        """The free server that takes the shortest time computes."""
        self.compute(min(self.free, key=lambda server: server.ticks), done)
        self.most = max(self.most, len(self.servers) - len(self.free))

    def give_up(self, worker: Worker) -> None:
        """What a worker computes is of no use: it is free now, or once it has run on to the end."""
        worker.done = None
        if worker.stops or worker.due == self.now:
            worker.task = None

    # --- tokens -------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin an epoch at what is settled."""
        self.drafted, self.sent = self.settled, self.settled - 1  # so many drafts; the last position asked about
        self.waiting: list[range] = []  # the positions of verifications that have no server
        self.answered: set[int] = set()  # positions at which the target's token is known
        self._go_on()

    def _go_on(self) -> None:
        """Give work to workers that are free."""
        if self.drafter.task is None and self.drafted < self.plan.tokens - 1:
            self.compute(self.drafter, self._draft_made)
        if self._due:
            self.waiting.append(range(self.sent, self.drafted + 1))
            self.sent = self.drafted
        while self.waiting and self.free:
            self.ask(partial(self._verified, self.waiting.pop()))

    @property
    def _due(self) -> bool:
        """Whether a verification of the drafts after the last one, or of the next position, is due."""
        drafts, last = self.drafted - self.sent, self.drafted == self.plan.tokens - 1
        return self.settled > self.sent or drafts >= (1 if last else self.plan.lookahead)

    def _draft_made(self) -> None:
        self.drafted += 1
        self._go_on()

    def _verified(self, positions: range) -> None:
        self.answered.update(positions)
        self._go_on()
        before, holds = self.settled, self._judge()
        if self.settled > before:
            self._commits.append((self.now, self.settled - before))
        if not holds:  # nothing that is under way is of use
            for worker in (self.drafter, *self.servers):
                self.give_up(worker)
            self.begin()
        elif self.settled < self.plan.tokens:
            self._go_on()

    def _judge(self) -> bool:
        """Settle the tokens that are answered one after the other; whether the drafts behind them still hold."""
        while self.settled in self.answered:
            position = self.settled
            self.settled += 1
            drafted = position < self.drafted
            if self.settled < self.plan.tokens and not (drafted and self.right[position]):
                self.rejections += drafted
                return False
        return True
