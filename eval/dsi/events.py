"""Event simulation of plain decoding, speculative decoding (SI) and distributed SI (DSI) with modelled acceptance.

An input says for each position whether its draft would be correct, the same for every method. Positions count the new
tokens, from 0. The algorithm is that of the paper (arXiv 2405.14105, appendix D).

A *tick* is a whole unit of time, so that times add up and compare exactly. Events at the same time occur in random
order, as real events with immeasurable differences do; the same seed gives the same order.
"""
from __future__ import annotations

import heapq
import random
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Callable, NamedTuple, Sequence

Done = Callable[[], None]  # called at the end of a forward


class Forward(NamedTuple):
    """Ticks of the first forward of a worker, and of each later one."""

    first: int
    later: int

    def takes(self, begun: int) -> int:
        """Return the ticks of a forward after `begun` others."""
        return self.later if begun else self.first


@dataclass(frozen=True)
class EventPlan:
    """The text to decode and the workers."""

    tokens: int
    lookahead: int  # drafts per verification
    servers: int  # copies of the target
    target: Forward
    drafter: Forward
    stops: bool = True  # whether a server aborts a useless forward at once, or runs it to its end
    seed: int = 0  # of the order of events at the same time


class Outcome(NamedTuple):
    """The result of a plan: times in ticks, the work of the target in forwards."""

    commits: tuple[tuple[int, int], ...]  # pairs of a time and the number of tokens settled then
    forwards: int  # of the target, including aborted ones
    rejections: int
    most: int  # largest number of servers that computed at the same time

    @property
    def ticks(self) -> int:
        """The time at which the last token was settled."""
        return self.commits[-1][0]

    def settled(self, moment: float) -> int:
        """Return the number of tokens that were settled by a time."""
        return sum(count for when, count in self.commits if when <= moment)


def decode(method: str, plan: EventPlan, right: Sequence[bool]) -> Outcome:
    """Simulate a plan by DSI, SI or non-SI, which is SI without drafts.

    `right` says for each position except the last whether its draft would be the target's token.
    """
    if method == "DSI":
        return DSI(plan, right).run()
    return _si(plan, right, plan.lookahead if method == "SI" else 0)


def _si(plan: EventPlan, right: Sequence[bool], lookahead: int) -> Outcome:
    """Alternate between drafting k tokens and verifying them on one server; the last token of the text has no draft."""
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

    An aborted forward counts as the first one, as in the simulator published with the paper on DSI.
    """

    forward: Forward
    stops: bool = True  # whether it aborts a useless forward at once, or runs it to its end
    forwards: int = 0  # number of forwards begun
    task: int | None = None  # number of the current forward
    due: int = 0  # time at which that ends
    done: Done | None = None  # called then, if the result is still useful

    @property
    def ticks(self) -> int:
        """The ticks of the next forward."""
        return self.forward.takes(self.forwards)


class DSI:
    """Simulation of DSI: the drafter never waits; a server verifies every k drafts; a rejection begins a new epoch.

    An epoch begins with a verification of no drafts; its answer is the next token. If all servers are busy,
    verifications wait, and the newest goes first. A server that has finished gets a waiting verification before its
    answer is compared. Answers are compared strictly in the order of positions. The answer after a verification's last
    draft decides on the first draft of the next one. A token that is settled before its draft exists begins a new
    epoch, too. If no answer for the next position is under way, even fewer than k drafts are verified.
    """

    def __init__(self, plan: EventPlan, right: Sequence[bool]) -> None:
        self.plan, self.right = plan, right
        self.drafter = Worker(plan.drafter)
        self.servers = [Worker(plan.target, plan.stops) for _ in range(plan.servers)]
        self.now = self.settled = self.rejections = self.most = 0
        self._commits: list[tuple[int, int]] = []
        self._tasks: list[tuple[int, float, int, Worker]] = []  # a heap by end time
        self._chance, self._numbers = random.Random(plan.seed), count()

    def run(self) -> Outcome:
        """Simulate until all tokens are settled."""
        self.begin()
        while self.settled < self.plan.tokens:
            due, _, number, worker = heapq.heappop(self._tasks)
            if worker.task == number:  # else it was aborted
                self.now, worker.task = due, None
                (worker.done or self._schedule)()
        forwards = sum(server.forwards for server in self.servers)
        return Outcome(tuple(self._commits), forwards, self.rejections, self.most)

    # --- workers ------------------------------------------------------------------------------------------------------

    @property
    def free(self) -> list[Worker]:
        """The idle servers."""
        return [server for server in self.servers if server.task is None]

    def compute(self, worker: Worker, done: Done) -> None:
        """Begin a forward and call `done` at its end."""
        worker.task, worker.done = next(self._numbers), done
        worker.due = self.now + worker.ticks
        worker.forwards += 1
        entry = worker.due, self._chance.random(), worker.task, worker
        heapq.heappush(self._tasks, entry)

    def ask(self, done: Done) -> None:
        """Begin a forward on the idle server that takes the shortest time."""
        self.compute(min(self.free, key=lambda server: server.ticks), done)
        self.most = max(self.most, len(self.servers) - len(self.free))

    def discard(self, worker: Worker) -> None:
        """Discard the current result of a worker. It is idle now, or after its forward if it does not stop at once."""
        worker.done = None
        if worker.stops or worker.due == self.now:
            worker.task = None

    # --- tokens -------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin an epoch after the settled tokens."""
        self.drafted, self.sent = self.settled, self.settled - 1  # end of the drafts; last position sent to a server
        self.waiting: list[range] = []  # the positions of verifications without a server
        self.answered: set[int] = set()  # positions with a known token of the target
        self._schedule()

    def _schedule(self) -> None:
        """Start work on idle workers."""
        if self.drafter.task is None and self.drafted < self.plan.tokens - 1:
            self.compute(self.drafter, self._draft_made)
        if self._due:
            self.waiting.append(range(self.sent, self.drafted + 1))
            self.sent = self.drafted
        while self.waiting and self.free:
            self.ask(partial(self._verified, self.waiting.pop()))

    @property
    def _due(self) -> bool:
        """Whether a verification of the drafts not yet sent, or of the next position, is due."""
        drafts, last = self.drafted - self.sent, self.drafted == self.plan.tokens - 1
        return self.settled > self.sent or drafts >= (1 if last else self.plan.lookahead)

    def _draft_made(self) -> None:
        self.drafted += 1
        self._schedule()

    def _verified(self, positions: range) -> None:
        self.answered.update(positions)
        self._schedule()
        before, holds = self.settled, self._judge()
        if self.settled > before:
            self._commits.append((self.now, self.settled - before))
        if not holds:  # no result under way is useful
            for worker in (self.drafter, *self.servers):
                self.discard(worker)
            self.begin()
        elif self.settled < self.plan.tokens:
            self._schedule()

    def _judge(self) -> bool:
        """Settle the tokens that follow without a gap, and return whether the drafts after them are still valid."""
        while self.settled in self.answered:
            position = self.settled
            self.settled += 1
            drafted = position < self.drafted
            if self.settled < self.plan.tokens and not (drafted and self.right[position]):
                self.rejections += drafted
                return False
        return True
