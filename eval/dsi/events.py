"""Event simulation of plain decoding, speculative decoding (SI) and distributed SI (DSI) with modelled acceptance.

An input says for each position whether its draft would be correct, the same for every method. Positions count the new
tokens, from 0. The algorithm is that of the paper (arXiv 2405.14105, appendix D).

A *tick* is a whole unit of time, so that times add up and compare exactly. Events at the same time occur in random
order, as real events with immeasurable differences do; the same seed gives the same order.
"""
from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from typing import Callable, NamedTuple, Sequence

Done = Callable[[], None]  # called at the end of a forward


class Forward(NamedTuple):
    """Ticks of the first forward of a worker, and of each later one."""

    first: int
    later: int

    def takes(self, num_begun: int) -> int:
        """Return the ticks of a forward after `num_begun` others."""
        return self.later if num_begun else self.first


@dataclass(frozen=True)
class EventPlan:
    """The text to decode and the workers."""

    num_tokens: int
    lookahead: int  # drafts per verification
    num_servers: int  # copies of the target
    target: Forward
    drafter: Forward
    stops: bool = True  # whether a server aborts a useless forward at once, or runs it to its end
    seed: int = 0  # of the order of events at the same time


class Outcome(NamedTuple):
    """The result of a plan: times in ticks, the work of the target in forwards."""

    commits: list[tuple[int, int]]  # pairs of a time and the number of tokens settled then
    num_forwards: int  # of the target, including aborted ones

    @property
    def ticks(self) -> int:
        """The time at which the last token was settled."""
        return self.commits[-1][0]

    def settled_by(self, moment: float) -> int:
        """Return the number of tokens that were settled by a time."""
        return sum(num_tokens for commit_time, num_tokens in self.commits if commit_time <= moment)


def decode(method: str, plan: EventPlan, is_correct: Sequence[bool]) -> Outcome:
    """Simulate a plan by DSI, SI or non-SI, which is SI without drafts.

    `is_correct` says for each position except the last whether its draft would be the target's token.
    """
    if method == "DSI":
        return DSI(plan, is_correct).run()
    assert method in ("SI", "non-SI"), method
    return _si(plan, is_correct, plan.lookahead if method == "SI" else 0)


def _si(plan: EventPlan, is_correct: Sequence[bool], lookahead: int) -> Outcome:
    """Alternate between drafting k tokens and verifying them on one server; the last token of the text has no draft."""
    now = num_settled = num_drafted = 0
    commits: list[tuple[int, int]] = []
    while num_settled < plan.num_tokens:
        # draft, then verify
        num_drafts = min(lookahead, plan.num_tokens - num_settled - 1)
        now += sum(map(plan.drafter.takes, range(num_drafted, num_drafted + num_drafts)))
        now += plan.target.takes(len(commits))

        num_accepted = 0
        while num_accepted < num_drafts and is_correct[num_settled + num_accepted]:
            num_accepted += 1

        num_drafted += num_drafts
        num_settled += num_accepted + 1
        commits.append((now, num_accepted + 1))
    return Outcome(commits, len(commits))


@dataclass(eq=False)
class Worker:
    """A drafter, or one copy of the target: it computes one forward at a time.

    An aborted forward counts as the first one, as in the simulator published with the paper on DSI.
    """

    forward: Forward
    stops: bool = True  # whether it aborts a useless forward at once, or runs it to its end
    num_begun: int = 0  # number of forwards begun
    end: tuple[int, float] | None = None  # when the current one ends, and its order among those that end then
    done: Done | None = None  # called then, if the result is still useful

    @property
    def ticks(self) -> int:
        """The ticks of the next forward."""
        return self.forward.takes(self.num_begun)


class DSI:
    """Simulation of DSI: the drafter never waits; a server verifies every k drafts; a rejection begins a new epoch.

    An epoch begins with a verification of no drafts; its answer is the next token. If all servers are busy,
    verifications wait, and the newest goes first. A server that has finished gets a waiting verification before its
    answer is compared. Answers are compared strictly in the order of positions. The answer after a verification's last
    draft decides on the first draft of the next one. A token that is settled before its draft exists begins a new
    epoch, too. If no answer for the next position is under way, even fewer than k drafts are verified.
    """

    def __init__(self, plan: EventPlan, is_correct: Sequence[bool]) -> None:
        self.plan, self.is_correct = plan, is_correct
        self.drafter = Worker(plan.drafter)
        self.servers = [Worker(plan.target, plan.stops) for _ in range(plan.num_servers)]

        self.now = self.num_settled = 0
        self._commits: list[tuple[int, int]] = []
        self._random = random.Random(plan.seed)

    def run(self) -> Outcome:
        """Simulate until all tokens are settled."""
        self.begin()
        while self.num_settled < self.plan.num_tokens:
            end, worker = min((worker.end, worker) for worker in (self.drafter, *self.servers) if worker.end)
            self.now, worker.end = end[0], None
            on_end = worker.done or self._schedule  # a discarded result only leaves its worker idle
            on_end()
        return Outcome(self._commits, sum(server.num_begun for server in self.servers))

    # --- workers ------------------------------------------------------------------------------------------------------

    @property
    def free(self) -> list[Worker]:
        """The idle servers."""
        return [server for server in self.servers if server.end is None]

    def compute(self, worker: Worker, done: Done) -> None:
        """Begin a forward and call `done` at its end."""
        worker.end, worker.done = (self.now + worker.ticks, self._random.random()), done
        worker.num_begun += 1

    def ask(self, done: Done) -> None:
        """Begin a forward on the idle server that takes the shortest time."""
        self.compute(min(self.free, key=lambda server: server.ticks), done)

    def discard(self, worker: Worker) -> None:
        """Discard the current result of a worker. It is idle now, or after its forward if it does not stop at once."""
        worker.done = None
        if worker.end and (worker.stops or worker.end[0] == self.now):
            worker.end = None

    # --- tokens -------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin an epoch after the settled tokens."""
        self.drafts_end, self.last_sent = self.num_settled, self.num_settled - 1  # position after the drafts; last sent
        self.waiting: list[range] = []  # the positions of verifications without a server
        self.answered: set[int] = set()  # positions with a known token of the target
        self._schedule()

    def _schedule(self) -> None:
        """Start work on idle workers."""
        last_position = self.plan.num_tokens - 1
        if self.drafter.end is None and self.drafts_end < last_position:
            self.compute(self.drafter, self._draft_ended)

        if self._is_due:
            self.waiting.append(range(self.last_sent, self.drafts_end + 1))
            self.last_sent = self.drafts_end

        while self.waiting and self.free:
            self.ask(partial(self._verified, self.waiting.pop()))

    @property
    def _is_due(self) -> bool:
        """Whether a verification of the drafts not yet sent, or of the next position, is due."""
        num_unsent = self.drafts_end - self.last_sent
        are_all_drafted = self.drafts_end == self.plan.num_tokens - 1
        return self.num_settled > self.last_sent or num_unsent >= (1 if are_all_drafted else self.plan.lookahead)

    def _draft_ended(self) -> None:
        self.drafts_end += 1
        self._schedule()

    def _verified(self, positions: range) -> None:
        self.answered.update(positions)
        self._schedule()

        settled_before, drafts_hold = self.num_settled, self._judge()
        if self.num_settled > settled_before:
            self._commits.append((self.now, self.num_settled - settled_before))

        if not drafts_hold:  # no result under way is useful
            for worker in (self.drafter, *self.servers):
                self.discard(worker)
            self.begin()
        elif self.num_settled < self.plan.num_tokens:
            self._schedule()

    def _judge(self) -> bool:
        """Settle the tokens that follow without a gap, and return whether the drafts after them are still valid."""
        while self.num_settled in self.answered:
            position = self.num_settled
            self.num_settled += 1

            is_accepted = position < self.drafts_end and self.is_correct[position]
            if self.num_settled < self.plan.num_tokens and not is_accepted:
                return False
        return True
