"""The accounting of the online simulator that was published with the paper on DSI: mean cost of a text, exactly.

It differs from what decoding costs. A run of n accepted drafts settles n tokens: the target's own token after them is
lost. Every run begins with a verification of no drafts, which SI waits for too. Runs are drawn until they have
more than the wanted tokens, and the last one costs one verification. The first forward of every server takes longer,
and that of the drafter until something is settled. Nothing else takes time: a process is started for nothing.

That is T + (floor(n/k) + 1)(k d + T) for a run of SI, and (floor(n/k) + 1) k d + T for a run of DSI, if there are
servers enough; the first run of DSI is followed verification by verification. The servers that later runs use count as
used before.
"""
from __future__ import annotations

import heapq
from itertools import count
from typing import Iterator, NamedTuple

import numpy as np

MOST = 20  # accepted drafts of a run, at most


class Latencies(NamedTuple):
    """Times of a forward of target and drafter, and of the first forward of each."""

    target: float
    drafter: float
    first_target: float
    first_drafter: float


def online_mean(times: Latencies, acceptance: float, lookahead: int, servers: int | None, tokens: int,
                most: int = MOST) -> float:
    """The mean cost of so many tokens by DSI with these servers, or by SI if `servers` is None.

    No run has more than `most` accepted drafts. Raises ValueError where no text would end, or the first run would.
    """
    if not 0 < acceptance <= 1 or not 0 < most < tokens:
        raise ValueError("no run settles anything, or the first one all: give an acceptance above 0, and between 0 and "
                         "the tokens for the most accepted drafts of a run")
    accepted = np.arange(most + 1)
    chance = (1 - acceptance) * float(acceptance) ** accepted
    chance[-1] = float(acceptance) ** most
    windows = accepted // lookahead + 1
    cost = windows * lookahead * times.drafter + times.target * (1 if servers else windows + 1)
    slower_draft = times.first_drafter - times.drafter
    rest = np.zeros(tokens + 1)  # mean cost with so many tokens settled
    for settled in range(tokens, -1, -1):
        then = settled + accepted
        ends = then > tokens
        run = np.where(ends, times.target, cost + (0 if settled else slower_draft))
        after = np.where(ends, 0.0, rest[np.minimum(then, tokens)])
        after[0] = 0.0  # a run without accepted drafts leaves all as it was
        rest[settled] = chance @ (run + after) / (1 - chance[0])
    if servers:
        runs = [_first_run(times, lookahead, servers, number) for number in range(most + 1)]
        first = np.array(runs)
    else:
        first = cost + slower_draft + times.first_target - times.target
    return float(chance @ (first + rest[accepted]))


def _first_run(times: Latencies, lookahead: int, servers: int, accepted: int) -> float:
    """The cost of the first run of DSI: when the first verification ends that has more drafts than are accepted."""
    pool = _Servers(times, servers)
    for drafts in count(0, lookahead):
        moment = times.first_drafter + (drafts - 1) * times.drafter if drafts else 0.0
        for end, verified in pool.ended(moment):
            if verified > accepted:
                return end
        pool.begin(moment, drafts)
    raise AssertionError("verifications never cease")


class _Servers:
    """Servers at their first run. A verification goes to one that was used and is free, else to a new one.

    Else it waits; of those that wait the newest goes first.
    """

    def __init__(self, times: Latencies, servers: int) -> None:
        self.times = times
        self.free, self.new = 0, servers
        self.busy: list[tuple[float, int]] = []  # ends of verifications, and their drafts
        self.waiting: list[int] = []  # the drafts of those that wait

    def ended(self, moment: float) -> Iterator[tuple[float, int]]:
        """The verifications that ended by a moment, with their drafts, in order."""
        while self.busy and self.busy[0][0] <= moment:
            end, drafts = heapq.heappop(self.busy)
            self.free += 1
            if self.waiting:
                self.begin(end, self.waiting.pop())
            yield end, drafts

    def begin(self, moment: float, drafts: int) -> None:
        """Verify so many drafts, at this moment or later."""
        if self.free:
            self.free -= 1
            heapq.heappush(self.busy, (moment + self.times.target, drafts))
        elif self.new:
            self.new -= 1
            heapq.heappush(self.busy, (moment + self.times.first_target, drafts))
        else:
            self.waiting.append(drafts)
