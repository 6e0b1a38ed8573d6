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
from eval.dsi.cost_model import DecodingRounds, mean_cost
from eval.dsi.formulas import Array, servers_needed
from eval.dsi.keys import COMMAND, Paper
from eval.dsi.published import TABLE, PaperRow, table_1, table_3

TRIED = np.array([1, 5, 10])  # the lookaheads of the published simulators
MAX_RUN = 20  # most accepted drafts of a run


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
        result = recomputed(row, config)
        lines.append(f"| {row.pair} | {row.data} | {row.target} | {row.drafter} | {100 * row.acceptance:.0f} | "
                     f"{row.published:.2f} | {result.online:.2f} | {result.offline:.2f} | {result.events:.2f} | "
                     f"{result.plain:.2f} | {result.si_lookahead}, {result.dsi_lookahead} |")
    return "\n".join(lines)


def recomputed(row: PaperRow, config: Paper) -> Recomputed:
    """Recompute one row, each algorithm with its best lookahead; for DSI it is among those that its servers allow."""
    num_tokens, num_servers = config.S, config.num_target_servers
    setting = row.target, row.drafter
    times = ForwardLatencies(*setting, row.target * row.first_target, row.drafter * row.first_drafter)

    all_lookaheads = np.arange(1, config.S)
    allowed_tried, allowed_lookaheads = (
        lookaheads[servers_needed(*setting, lookaheads) <= num_servers] for lookaheads in (TRIED, all_lookaheads))

    def mean(decoding: DecodingRounds) -> Array:
        return mean_cost(decoding, row.acceptance, num_tokens)

    def online(lookaheads: Array, servers: int | None) -> float:
        return min(online_mean(times, row.acceptance, int(k), servers, num_tokens) for k in lookaheads)

    original_costs = mean(cost_model.dsi(*setting, allowed_tried, "original"))
    offline = mean(cost_model.si(*setting, TRIED)).min() / original_costs.min()
    si_costs = mean(cost_model.si(*setting, all_lookaheads))
    dsi_costs = mean(cost_model.dsi(*setting, allowed_lookaheads))

    return Recomputed(
        online=online(TRIED, None) / online(allowed_tried, num_servers),
        offline=offline,
        events=si_costs.min() / dsi_costs.min(),
        plain=num_tokens * row.target / dsi_costs.min(),
        si_lookahead=int(all_lookaheads[si_costs.argmin()]),
        dsi_lookahead=int(allowed_lookaheads[dsi_costs.argmin()]))


# --- the accounting of the published online simulator -----------------------------------------------------------------

class ForwardLatencies(NamedTuple):
    """The times of a forward of target and drafter, and of the first forward of each."""

    target: float
    drafter: float
    first_target: float
    first_drafter: float


def online_mean(times: ForwardLatencies, acceptance: float, lookahead: int, num_servers: int | None, num_tokens: int,
                max_run: int = MAX_RUN) -> float:
    """Return the mean cost of a text by DSI with these servers, or by SI if `num_servers` is None.

    No run has more than `max_run` accepted drafts, which are fewer than the tokens. The acceptance is above 0, since
    the text would never end else.
    """
    # runs, by their accepted drafts
    num_accepted = np.arange(max_run + 1)
    chance = (1 - acceptance) * float(acceptance) ** num_accepted
    chance[-1] = float(acceptance) ** max_run
    num_windows = num_accepted // lookahead + 1
    num_awaited = 1 if num_servers else num_windows + 1  # verifications that the run waits for
    run_cost = num_windows * lookahead * times.drafter + times.target * num_awaited

    # mean remaining cost, by the number of settled tokens
    first_draft_extra = times.first_drafter - times.drafter
    remaining_cost = np.zeros(num_tokens + 1)
    for num_settled in range(num_tokens, -1, -1):
        settled_after = num_settled + num_accepted
        ends_text = settled_after > num_tokens
        next_cost = np.where(ends_text, times.target, run_cost + (0 if num_settled else first_draft_extra))
        cost_after = np.where(ends_text, 0.0, remaining_cost[np.minimum(settled_after, num_tokens)])

        # a run without accepted drafts returns to the same state, as the division considers
        cost_after[0] = 0.0
        remaining_cost[num_settled] = chance @ (next_cost + cost_after) / (1 - chance[0])

    first_cost = run_cost + first_draft_extra + times.first_target - times.target
    if num_servers:
        first_cost = np.array(_first_runs(times, lookahead, num_servers, max_run))
    return float(chance @ (first_cost + remaining_cost[num_accepted]))


def _first_runs(times: ForwardLatencies, lookahead: int, num_servers: int, max_run: int) -> list[float]:
    """Return the cost of the first run of DSI, by its accepted drafts from 0 to `max_run`.

    It is the end of the first verification with more drafts. A verification goes to an idle server that was used
    before, else to a new one. Else it waits, the newest first.
    """
    idle = [times.first_target] * num_servers  # the next forward of each idle server, the last one's first
    running: list[tuple[float, int]] = []  # verifications: their ends and their drafts
    waiting: list[int] = []  # drafts of each waiting verification
    run_costs: list[float] = []

    for num_drafts in count(0, lookahead):
        moment = times.first_drafter + (num_drafts - 1) * times.drafter if num_drafts else 0.0

        # verifications that have ended
        while running and running[0][0] <= moment:
            end_time, num_verified = heapq.heappop(running)
            run_costs += [end_time] * (num_verified - len(run_costs))
            if waiting:
                heapq.heappush(running, (end_time + times.target, waiting.pop()))
            else:
                idle.append(times.target)

        if len(run_costs) > max_run:
            break
        if idle:
            heapq.heappush(running, (moment + idle.pop(), num_drafts))
        else:
            waiting.append(num_drafts)
    return run_costs[:max_run + 1]
