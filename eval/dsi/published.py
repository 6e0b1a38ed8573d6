"""What the simulators published with the paper on DSI draw and count, exactly; it differs from what decoding costs.

Online, a run of n accepted drafts settles n tokens: the target's own token after them is lost. Every run begins with a
verification of no drafts, which SI waits for too. Runs are drawn until they have more than the wanted tokens, and the
last one costs one verification. The first forward of every server takes longer, and that of the drafter until something
is settled. Nothing else takes time.

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


def offline_draws(acceptance: float, lookahead: int, tokens: int, seed: int) -> Iterator[list[int]]:
    """For text after text the drafts that are accepted window by window, as the offline simulator draws them."""
    rng = np.random.RandomState(seed)
    while True:
        if acceptance in (0, 1):
            yield [int(acceptance) * lookahead] * tokens
        else:
            accepted = rng.geometric(1 - acceptance, size=tokens) - 1
            yield np.minimum(accepted, lookahead).tolist()


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
    """The cost of the first run of DSI: when the first verification ends that has more drafts than are accepted.

    A verification goes to a server that was used and is free, else to a new one. Else it waits, the newest first.
    """
    used, new = 0, servers  # servers that are free
    busy: list[tuple[float, int]] = []  # ends of verifications, and their drafts
    waiting: list[int] = []  # the drafts of those that wait
    for drafts in count(0, lookahead):
        moment = times.first_drafter + (drafts - 1) * times.drafter if drafts else 0.0
        while busy and busy[0][0] <= moment:
            end, verified = heapq.heappop(busy)
            if waiting:
                heapq.heappush(busy, (end + times.target, waiting.pop()))
            else:
                used += 1
            if verified > accepted:
                return end
        if used:
            used -= 1
            heapq.heappush(busy, (moment + times.target, drafts))
        elif new:
            new -= 1
            heapq.heappush(busy, (moment + times.first_target, drafts))
        else:
            waiting.append(drafts)
    raise AssertionError("verifications never cease")
