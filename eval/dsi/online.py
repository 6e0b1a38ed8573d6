"""Simulate SI and DSI by events on a virtual clock, over texts with modelled or recorded acceptance."""
from __future__ import annotations

from itertools import cycle, islice
from statistics import mean, stdev
from typing import Iterable, Iterator, Sequence

import numpy as np

from config.files import fits, read_json_file
from config.keys import read_keys
from eval.dsi.events import EventPlan, Forward, Outcome, decode
from eval.dsi.keys import COMMAND, Online
from eval.dsi.paper import ForwardLatencies, online_mean
from eval.tables import in_columns
from launch.progress import ProgressBar

TICK = 1e-9  # seconds
PLAIN = "non-SI"
COLUMNS = ("", "predicted s", "published s", "plain/it", "forwards", "rejected", "servers")
NOTE = """\
Simulated: no model is run. Times are seconds per text.
predicted  mean over the repeats +- its standard error, if only forwards take time
published  exact mean in the accounting of the published online simulator, with enough servers
plain/it   predicted time of plain decoding divided by that of the method
forwards   of the target per token, aborted ones included; rejected: drafts per token; servers: most at work at once"""


def main(argv: Sequence[str]) -> int:
    config = read_keys(argv, Online, f"{COMMAND} online")
    texts = list(islice(texts_of(config), config.num_repeats))
    methods = ["SI", "DSI"] if config.simul_type == "both" else [config.simul_type]
    found: dict[str, list[Outcome]] = {method: [] for method in (PLAIN, *methods)}
    bar = ProgressBar(texts, desc="virtual clock", unit="text", delay=1, leave=False)
    for number, right in enumerate(bar):
        for method, outcomes in found.items():
            outcomes.append(decode(method, plan_of(config, number), right))
    print(f"k={config.k}, {config.servers} servers of the target, preemption {config.preemption}, "
          f"{config.num_repeats} texts of {config.S} tokens\n")
    print(table(config, found))
    print(f"\n{NOTE}")
    return 0


def texts_of(config: Online) -> Iterator[list[bool]]:
    """Yield texts without end: for each position whether its draft is correct, sampled or recorded."""
    if config.traces:
        for trace in cycle(read_traces(config.traces)):
            yield list(islice(cycle(trace), config.S))
    chance = np.random.RandomState(config.random_seed)
    while True:
        yield spread(sampled(config.a, config.maximum_correct_tokens, chance), config.S)


def read_traces(path: str) -> list[list[bool]]:
    """Return the recorded matches of each non-empty text in a JSON file. Raise ValueError if it holds none."""
    found = read_json_file(path)
    are_matches = fits(found, [[lambda value: value in (0, 1)]])
    if not are_matches or not any(found):
        raise ValueError(f"{path} holds no matches: give a JSON list with a list of 0 and 1 for each text, "
                         "such as [[1, 1, 0, 1], [0, 1]]")
    return [list(map(bool, text)) for text in found if text]


def sampled(acceptance: float, most: int, chance: np.random.RandomState) -> Iterator[int]:
    """Yield numbers of accepted drafts in a row, at most `most`, without end.

    With a generator of the same seed, the simulator published with the paper on DSI samples the same numbers.
    """
    while True:
        yield most if acceptance == 1 else min(int(chance.geometric(1 - acceptance)) - 1, most)


def spread(runs: Iterable[int], tokens: int) -> list[bool]:
    """Return for each of `tokens` positions whether its draft is correct; an incorrect one ends each run."""
    endless = (right for length in runs for right in [True] * length + [False])
    return list(islice(endless, tokens))


def plan_of(config: Online, number: int) -> EventPlan:
    """Return the plan for the text of this number, in ticks."""
    target = Forward(ticks(config.failure_cost), ticks(config.failure_cost_sub))
    drafter = Forward(ticks(config.c), ticks(config.c_sub))
    stops = config.preemption == "instant"
    seed = config.random_seed + number
    return EventPlan(config.S, config.k, config.servers, target, drafter, stops, seed)


def ticks(seconds: float) -> int:
    return round(seconds / TICK)


def published(config: Online, method: str) -> float | None:
    """Return the mean seconds per text in the published simulator, or None if it has no such mean or never ends."""
    most = config.maximum_correct_tokens
    if method == PLAIN or config.traces or not config.a or not 0 < most < config.S:
        return None
    times = ForwardLatencies(config.failure_cost_sub, config.c_sub, config.failure_cost, config.c)
    servers = config.servers if method == "DSI" else None
    return online_mean(times, config.a, config.k, servers, config.S, most)


def table(config: Online, found: dict[str, list[Outcome]]) -> str:
    """Return a table with one line for each method."""
    seconds = {}
    for method, outcomes in found.items():
        seconds[method] = [outcome.ticks * TICK for outcome in outcomes]
    plain, tokens = mean(seconds[PLAIN]), config.S * config.num_repeats
    rows = []
    for method, outcomes in found.items():
        forwards = sum(outcome.forwards for outcome in outcomes)
        rejections = sum(outcome.rejections for outcome in outcomes)
        exact = published(config, method)
        rows.append([method, _shown(seconds[method]), "-" if exact is None else f"{exact:.4f}",
                     f"{plain / mean(seconds[method]):.3f}", f"{forwards / tokens:.2f}", f"{rejections / tokens:.3f}",
                     str(max(outcome.most for outcome in outcomes))])
    return in_columns(COLUMNS, rows)


def _shown(seconds: Sequence[float]) -> str:
    if len(seconds) == 1:
        return f"{seconds[0]:.4f}"
    error = stdev(seconds) / len(seconds) ** 0.5
    return f"{mean(seconds):.4f} +- {error:.4f}"
