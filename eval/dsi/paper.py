"""The tables of the paper on DSI: Table 1 beside the same tokens by events, Table 2 by three accountings, and Table 3.

Table 1 counts the tokens of Figure 1 at four moments: a drafter of a seventh of the target's latency, lookahead 1,
seven target servers. The moments are not given in the paper; with 2T, 4(T + d), 8T and 8(T + d) all its numbers follow.
Two of the accountings of Table 2 are those of the published simulators, which differ from the true cost (online.py,
formulas.py).
"""
from __future__ import annotations

from typing import Iterator, Mapping, NamedTuple

import numpy as np

from eval.dsi import cost_model, formulas
from eval.dsi.cost_model import DecodingRounds, mean_cost
from eval.dsi.events import EventPlan, Forward, decode
from eval.dsi.formulas import Array, servers_needed
from eval.dsi.keys import Paper
from eval.dsi.online import ForwardLatencies, online_mean
from eval.tables import markdown

TICKS = 10 ** 12  # per forward of the target
TARGET, DRAFTER, LOOKAHEAD, SERVERS = 7.0, 1.0, 1, 7
MOMENTS = {
    "2T": 2 * TARGET,
    "4(T + d)": 4 * (TARGET + DRAFTER),
    "8T": 8 * TARGET,
    "8(T + d)": 8 * (TARGET + DRAFTER),
}
METHODS = {"nonsi": "non-SI", "si": "SI", "dsi": "DSI"}
PUBLISHED_TOKENS = {
    "worst": {
        "non-SI": (2, 4, 8, 9),
        "SI": (1, 4, 7, 8),
        "DSI": (2, 4, 8, 9),
    },
    "best": {
        "non-SI": (2, 4, 8, 9),
        "SI": (2, 8, 14, 16),
        "DSI": (8, 26, 50, 58),
    },
}
TRIED = np.array([1, 5, 10])  # the lookaheads of the published simulators


class PaperRow(NamedTuple):
    """A row of the paper's Table 2: milliseconds per token, the acceptance rate, and the speed-up of DSI over SI.

    `first_target` and `first_drafter` are ratios of a first forward to a later one (Table 3, without Phi3 on Alpaca).
    """

    pair: str
    data: str
    target: float
    drafter: float
    acceptance: float
    published: float
    first_target: float = 1.2
    first_drafter: float = 1.2


TABLE = (
    PaperRow("Starcoder-15B / 168M", "HumanEval", 20.6, 6.8, 0.93, 1.92, 1.35, 1.19),
    PaperRow("Starcoder-15B / 168M", "MBPP", 21.0, 6.8, 0.90, 1.66, 1.54, 1.20),
    PaperRow("Phi3-14B / 4B", "Alpaca", 49.6, 33.4, 0.87, 1.60),
    PaperRow("Phi3-14B / 4B", "HumanEval", 52.1, 34.0, 0.95, 1.41, 1.29, 1.23),
    PaperRow("Phi3-14B / 4B", "CNN-DM", 52.4, 34.6, 0.93, 1.39, 4.77, 3.88),
    PaperRow("Phi3-14B / 4B", "MBPP", 52.2, 34.3, 0.94, 1.37, 1.43, 1.27),
    PaperRow("Vicuna-13B / 68M", "CNN-DM", 37.7, 2.5, 0.63, 1.47, 5.36, 1.04),
    PaperRow("Vicuna-13B / 68M", "Alpaca", 33.3, 2.5, 0.58, 1.41, 1.15, 1.05),
    PaperRow("Vicuna-7B / 68M", "CNN-DM", 29.4, 2.5, 0.67, 1.29, 4.53, 1.06),
    PaperRow("Vicuna-7B / 68M", "Alpaca", 26.0, 2.5, 0.59, 1.70, 1.19, 1.06),
)


class Recomputed(NamedTuple):
    """Speed-ups of DSI over SI in three accountings, and over plain decoding by events, with the best lookaheads."""

    online: float
    offline: float
    events: float
    plain: float
    si_lookahead: int
    dsi_lookahead: int


def main(config: Paper) -> int:
    print("\n".join([*table_1(), "", *table_2(config), "", *table_3()]))
    return 0


# --- Table 1 ----------------------------------------------------------------------------------------------------------

def output_tokens(target_latency: float, drafter_latency: float, lookahead: int, SP: int,
                  times: Mapping[str, float]) -> dict[str, dict[str, list[int]]]:
    """Return the tokens of Figure 1 and Table 1 at given times, if no draft is accepted (worst) or all are (best)."""
    draft_ticks = round(drafter_latency / target_latency * TICKS)
    moments = [moment / target_latency * TICKS * (1 + formulas.SLACK) for moment in times.values()]
    num_tokens = 2 + lookahead + int(max(moments) / min(TICKS, draft_ticks))

    plan = EventPlan(num_tokens, lookahead, SP, Forward(TICKS, TICKS), Forward(draft_ticks, draft_ticks))
    counts: dict[str, dict[str, list[int]]] = {"worst": {}, "best": {}}
    for bound, counts_by_method in counts.items():
        for name, method in METHODS.items():
            outcome = decode(method, plan, [bound == "best"] * num_tokens)
            counts_by_method[name] = list(map(outcome.settled_by, moments))
    return counts


def table_1() -> Iterator[str]:
    """Yield the lines of Table 1: published tokens, and those of the events of this project."""
    rows = []
    for case, tokens_by_method in output_tokens(TARGET, DRAFTER, LOOKAHEAD, SERVERS, MOMENTS).items():
        for name, computed_tokens in tokens_by_method.items():
            method = METHODS[name]
            rows.append((case, method, "paper", *map(str, PUBLISHED_TOKENS[case][method])))
            rows.append(("", "", "events", *map(str, computed_tokens)))

    yield "Table 1: tokens at four moments, if no draft is accepted (worst) and if all are (best); T = 7 d, k = 1,"
    yield "7 servers.\n"
    yield from markdown(("case", "method", "", *MOMENTS), rows)


# --- Table 2 ----------------------------------------------------------------------------------------------------------

def table_2(config: Paper) -> Iterator[str]:
    """Yield the lines of Table 2: the published speed-ups, and those by three accountings."""
    yield (f"Table 2 of the paper, {config.S} tokens, {config.num_target_servers} target servers; all columns from "
           "online on are computed.\n")
    yield ("| target / drafter | data | T ms | d ms | a % | published DSI/SI | online | offline | events | "
           "events: over non-SI | events: k of SI, DSI |")
    yield "|---|---|" + "---:|" * 9
    for row in TABLE:
        result = recomputed(row, config)
        yield (f"| {row.pair} | {row.data} | {row.target} | {row.drafter} | {100 * row.acceptance:.0f} | "
               f"{row.published:.2f} | {result.online:.2f} | {result.offline:.2f} | {result.events:.2f} | "
               f"{result.plain:.2f} | {result.si_lookahead}, {result.dsi_lookahead} |")


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


# --- Table 3 ----------------------------------------------------------------------------------------------------------

def table_3() -> Iterator[str]:
    """Yield the lines of Table 3: the published ratios of a first forward to a later one."""
    rows = [(row.pair, row.data, f"{row.first_target:.2f}", f"{row.first_drafter:.2f}") for row in TABLE
            if (row.pair, row.data) != ("Phi3-14B / 4B", "Alpaca")]
    yield "Table 3: published ratios of TTFT to TPOT, which online above uses; they are of models and GPUs, so they can"
    yield "only be measured: python3 -m scripts.simulate table target=DIR drafts=DIR does that for other models.\n"
    yield from markdown(("target / drafter", "data", "target", "drafter"), rows)
