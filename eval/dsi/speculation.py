"""Plain decoding, speculative decoding (SI) and its distributed form (DSI) with modelled acceptance, by events.

Whether the draft of a position would be right is given, the same for every method. Positions are those of the new
tokens, from 0; moments are ticks of `Events`. The algorithm is that of the paper (arXiv 2405.14105, appendix D).
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Sequence

from eval.dsi.events import Done, Events, Forward, Worker


@dataclass(frozen=True)
class Plan:
    """What is decoded, and by which workers.

    The drafter is where the coordinator is, and ends at once.
    """

    tokens: int
    lookahead: int  # drafts of a verification
    servers: int  # copies of the target
    target: Forward
    drafter: Forward
    parts: int = 0  # between which a forward of the target can be given up; 0: anywhere, 1: not at all
    hop: int = 0  # ticks of a message between the coordinator and a server
    merge: bool = False  # whether verifications that wait for a server become one, or the newest goes first
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

    def settled(self, moment: int) -> int:
        """How many tokens were settled by then."""
        return sum(count for when, count in self.commits if when <= moment)


class Method:
    """What all methods have: workers, the count of settled tokens, and when they were settled."""

    def __init__(self, plan: Plan, right: Sequence[bool]) -> None:
        self.plan, self.right, self.events = plan, right, Events(plan.seed)
        self.drafter = Worker(self.events, plan.drafter, 0)
        server = partial(Worker, self.events, plan.target, plan.parts, plan.hop)
        self.servers = [server() for _ in range(plan.servers)]
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

    def ask(self, length: int, done: Done) -> None:
        """The free server that takes the shortest time computes what its cache lacks of this many new tokens."""
        server = min(self.free, key=lambda server: server.ticks(length))
        server.compute(length, done)
        busy = len(self.servers) - len(self.free)
        self.most = max(self.most, busy)

    def commit(self, count: int) -> None:
        """Further tokens are settled at this moment."""
        self.settled += count
        self._commits.append((self.events.now, count))

    def forget(self) -> None:
        """No cache holds what is not settled, or the token that was settled last."""
        for worker in [self.drafter, *self.servers]:
            worker.truncate(self.settled - 1)


class SI(Method):
    """Draft k tokens, verify them on one server, and again; the last token of all needs no draft."""

    def __init__(self, plan: Plan, right: Sequence[bool]) -> None:
        super().__init__(replace(plan, servers=1), right)

    def begin(self) -> None:
        left = self.plan.tokens - self.settled
        self.drafts, self.wanted = 0, min(self.plan.lookahead, left - 1)
        self._go_on()

    def _go_on(self) -> None:
        length = self.settled + self.drafts
        if self.drafts < self.wanted:
            self.drafter.compute(length, self._drafted)
        else:
            self.ask(length, self._verified)

    def _drafted(self) -> None:
        self.drafts += 1
        self._go_on()

    def _verified(self) -> None:
        accepted = 0
        while accepted < self.drafts and self.right[self.settled + accepted]:
            accepted += 1
        self.rejections += accepted < self.drafts
        self.commit(accepted + 1)
        self.forget()
        if self.settled < self.plan.tokens:
            self.begin()


class NonSI(SI):
    """Plain decoding: a verification of no drafts for each token."""

    def begin(self) -> None:
        self.drafts = self.wanted = 0
        self._go_on()


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
        self.waiting: list[tuple[int, int]] = []  # the first and last positions of verifications that have no server
        self.answered: set[int] = set()  # positions at which the target's token is known
        self._go_on()

    def _go_on(self) -> None:
        """Give work to workers that are free."""
        if self.drafter.free and self.drafted < self.plan.tokens - 1:
            self.drafter.compute(self.drafted, self._draft_made)
        if self._due:
            first = self.sent
            if self.waiting and self.plan.merge:
                first, _ = self.waiting.pop()
            self.waiting.append((first, self.drafted))
            self.sent = self.drafted
        while self.waiting and self.free:
            first, last = self.waiting.pop()
            positions = range(first, last + 1)
            self.ask(last, partial(self._verified, positions))

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
        else:
            self._restart()

    def _restart(self) -> None:
        """Nothing that is under way is of use."""
        for worker in [self.drafter, *self.servers]:
            worker.give_up(self._go_on)
        self.forget()
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


METHODS: dict[str, type[Method]] = {"non-SI": NonSI, "SI": SI, "DSI": DSI}


def decode(method: str, plan: Plan, right: Sequence[bool]) -> Outcome:
    """What comes of a plan, by the name of a method.

    `right` says for each position but the last whether its draft would be the target's token.
    """
    return METHODS[method](plan, right).run()
