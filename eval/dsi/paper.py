"""Recompute Table 2 of the paper on DSI by three accountings, two of them from the simulators published with it.

Those two differ from the true cost. In the online simulator a run of n accepted drafts settles n tokens: the target's
own token after them is lost. Every run begins with a verification of no drafts, and SI waits for it, too. Runs are
sampled until they have more than the wanted tokens, and the last one costs one verification. The first forward of every
server takes longer, and so does that of the drafter until a token is settled. Nothing else takes time.

So a run of SI costs T + (floor(n/k) + 1)(k d + T), and a run of DSI (floor(n/k) + 1) k d + T if it has enough servers.
The first run of DSI is simulated verification by verification. Later runs are assumed to use servers that have
computed before.
"""
from __future__ import annotations

import heapq
from itertools import count
from typing import NamedTuple, Sequence

import numpy as np

from config.keys import read_keys
from eval.dsi import cost_model
from eval.dsi.cost_model import DecodingRounds, moments
from eval.dsi.formulas import Array, servers_needed
from eval.dsi.keys import COMMAND, Paper
from eval.dsi.published import TABLE, PaperRow, table_1, table_3

TRIED = np.array([1, 5, 10])  # the lookaheads of the published simulators
LONGEST_RUN = 20  # most accepted drafts of a run


class Recomputed(NamedTuple):
    """Speed-ups of DSI over SI in three accountings, and over plain decoding by events, with the best lookaheads."""

    online: float
    offline: float
    events: float
    plain: float
    si_lookahead: int
    dsi_lookahead: int


def main(argv: Sequence[str]) -> int:
    config = read_keys(argv, Paper, f"{COMMAND} paper")
    if config.table != "2":
        print("\n".join(table_1() if config.table == "1" else table_3()))
        return 0
    print(f"Table 2 of the paper, {config.S} tokens, {config.num_target_servers} target servers; all columns from "
          "online on are computed.\n")
    print(table(config))
    return 0


def table(config: Paper) -> str:
    """Return the rows as a table in Markdown."""
    lines = ["| target / drafter | data | T ms | d ms | a % | published DSI/SI | online | offline | events | "
             "events: over non-SI | events: k of SI, DSI |", "|---|---|" + "---:|" * 9]
    for row in TABLE:
        found = recomputed(row, config)
        lines.append(f"| {row.pair} | {row.data} | {row.target} | {row.drafter} | {100 * row.acceptance:.0f} | "
                     f"{row.published:.2f} | {found.online:.2f} | {found.offline:.2f} | {found.events:.2f} | "
                     f"{found.plain:.2f} | {found.si_lookahead}, {found.dsi_lookahead} |")
    return "\n".join(lines)


def recomputed(row: PaperRow, config: Paper) -> Recomputed:
    """Recompute one row, each algorithm with its best lookahead; for DSI it is among those that its servers allow."""
    tokens, servers, every = config.S, config.num_target_servers, np.arange(1, config.S)
    setting = row.target, row.drafter
    times = ForwardLatencies(*setting, row.target * row.first_target, row.drafter * row.first_drafter)
    tried, legal = (each[servers_needed(*setting, each) <= servers] for each in (TRIED, every))

    def mean(decoding: DecodingRounds) -> Array:
        return moments(decoding, row.acceptance, tokens).mean

    def online(lookaheads: Array, copies: int | None) -> float:
        return min(online_mean(times, row.acceptance, int(k), copies, tokens) for k in lookaheads)

    original = mean(cost_model.dsi(*setting, tried, "original"))
    offline = mean(cost_model.si(*setting, TRIED)).min() / original.min()
    by_si = mean(cost_model.si(*setting, every))
    by_dsi = mean(cost_model.dsi(*setting, legal))
    return Recomputed(
        online=online(TRIED, None) / online(tried, servers),
        offline=offline,
        events=by_si.min() / by_dsi.min(),
        plain=tokens * row.target / by_dsi.min(),
        si_lookahead=int(every[by_si.argmin()]),
        dsi_lookahead=int(legal[by_dsi.argmin()]))


# --- the accounting of the published online simulator -----------------------------------------------------------------

class ForwardLatencies(NamedTuple):
    """The times of a forward of target and drafter, and of the first forward of each."""

    target: float
    drafter: float
    first_target: float
    first_drafter: float


def online_mean(times: ForwardLatencies, acceptance: float, lookahead: int, servers: int | None, tokens: int,
                most: int = LONGEST_RUN) -> float:
    """Return the mean cost of `tokens` tokens by DSI with these servers, or by SI if `servers` is None.

    No run has more than `most` accepted drafts. Raises ValueError if no text would end, or the first run would end it.
    """
    if not 0 < acceptance <= 1 or not 0 < most < tokens:
        raise ValueError("the runs settle no token, or the first one could settle all: give an acceptance above 0, and "
                         "a number between 0 and the tokens for the most accepted drafts of a run")
    accepted = np.arange(most + 1)
    chance = (1 - acceptance) * float(acceptance) ** accepted
    chance[-1] = float(acceptance) ** most
    windows = accepted // lookahead + 1
    cost = windows * lookahead * times.drafter + times.target * (1 if servers else windows + 1)
    slower_draft = times.first_drafter - times.drafter
    rest = np.zeros(tokens + 1)  # mean remaining cost, by the number of settled tokens
    for settled in range(tokens, -1, -1):
        then = settled + accepted
        ends = then > tokens
        run = np.where(ends, times.target, cost + (0 if settled else slower_draft))
        after = np.where(ends, 0.0, rest[np.minimum(then, tokens)])
        after[0] = 0.0  # a run without accepted drafts returns to the same state, as the division below considers
        rest[settled] = chance @ (run + after) / (1 - chance[0])
    if servers:
        runs = [_first_run(times, lookahead, servers, number) for number in range(most + 1)]
        first = np.array(runs)
    else:
        first = cost + slower_draft + times.first_target - times.target
    return float(chance @ (first + rest[accepted]))


def _first_run(times: ForwardLatencies, lookahead: int, servers: int, accepted: int) -> float:
    """Return the cost of the first run of DSI: the end of the first verification with more drafts than are accepted.

    A verification goes to an idle server that was used before, else to a new one. Else it waits, the newest first.
    """
    used, new = 0, servers  # idle servers
    busy: list[tuple[float, int]] = []  # running verifications: their ends and their drafts
    waiting: list[int] = []  # drafts of each waiting verification
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
    raise AssertionError("the sequence of verifications has no end")
