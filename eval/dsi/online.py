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
    correct_by_text = list(islice(texts_of(config), config.num_repeats))
    methods = ["SI", "DSI"] if config.simul_type == "both" else [config.simul_type]

    outcomes_by_method: dict[str, list[Outcome]] = {method: [] for method in (PLAIN, *methods)}
    progress = ProgressBar(correct_by_text, desc="virtual clock", unit="text", delay=1, leave=False)
    for text_number, is_correct in enumerate(progress):
        for method, outcomes in outcomes_by_method.items():
            outcomes.append(decode(method, plan_of(config, text_number), is_correct))

    print(f"k={config.k}, {config.servers} servers of the target, preemption {config.preemption}, "
          f"{config.num_repeats} texts of {config.S} tokens\n")
    print(table(config, outcomes_by_method))
    print(f"\n{NOTE}")
    return 0


def texts_of(config: Online) -> Iterator[list[bool]]:
    """Yield texts without end: for each position whether its draft is correct, sampled or recorded."""
    if config.traces:
        for trace in cycle(read_traces(config.traces)):
            yield list(islice(cycle(trace), config.S))

    random_state = np.random.RandomState(config.random_seed)
    while True:
        run_lengths = sampled(config.a, config.maximum_correct_tokens, random_state)
        yield spread(run_lengths, config.S)


def read_traces(path: str) -> list[list[bool]]:
    """Return the recorded matches of each non-empty text in a JSON file. Raise ValueError if it holds none."""
    traces = read_json_file(path)
    are_matches = fits(traces, [[lambda value: value in (0, 1)]])
    if not are_matches or not any(traces):
        raise ValueError(f"{path} holds no matches: give a JSON list with a list of 0 and 1 for each text, "
                         "such as [[1, 1, 0, 1], [0, 1]]")
    return [list(map(bool, text)) for text in traces if text]


def sampled(acceptance: float, max_accepted: int, random_state: np.random.RandomState) -> Iterator[int]:
    """Yield numbers of accepted drafts in a row, at most `max_accepted`, without end.

    With a generator of the same seed, the simulator published with the paper on DSI samples the same numbers.
    """
    while True:
        if acceptance == 1:
            yield max_accepted
        else:
            num_accepted = int(random_state.geometric(1 - acceptance)) - 1
            yield min(num_accepted, max_accepted)


def spread(run_lengths: Iterable[int], num_tokens: int) -> list[bool]:
    """Return for each of `num_tokens` positions whether its draft is correct; an incorrect one ends each run."""
    endless = (is_correct for length in run_lengths for is_correct in [True] * length + [False])
    return list(islice(endless, num_tokens))


def plan_of(config: Online, text_number: int) -> EventPlan:
    """Return the plan for the text of this number, in ticks."""
    target = Forward(ticks(config.failure_cost), ticks(config.failure_cost_sub))
    drafter = Forward(ticks(config.c), ticks(config.c_sub))

    stops_at_once = config.preemption == "instant"
    text_seed = config.random_seed + text_number
    return EventPlan(config.S, config.k, config.servers, target, drafter, stops_at_once, text_seed)


def ticks(seconds: float) -> int:
    return round(seconds / TICK)


def published(config: Online, method: str) -> float | None:
    """Return the mean seconds per text in the published simulator, or None if it has no such mean or never ends."""
    max_run = config.maximum_correct_tokens
    if method == PLAIN or config.traces or not config.a or not 0 < max_run < config.S:
        return None

    times = ForwardLatencies(config.failure_cost_sub, config.c_sub, config.failure_cost, config.c)
    num_servers = config.servers if method == "DSI" else None
    return online_mean(times, config.a, config.k, num_servers, config.S, max_run)


def table(config: Online, outcomes_by_method: dict[str, list[Outcome]]) -> str:
    """Return a table with one line for each method."""
    seconds_by_method = {}
    for method, outcomes in outcomes_by_method.items():
        seconds_by_method[method] = [outcome.ticks * TICK for outcome in outcomes]
    plain_seconds, num_tokens = mean(seconds_by_method[PLAIN]), config.S * config.num_repeats

    rows = []
    for method, outcomes in outcomes_by_method.items():
        seconds = seconds_by_method[method]
        published_seconds = published(config, method)
        num_forwards = sum(outcome.num_forwards for outcome in outcomes)
        num_rejections = sum(outcome.num_rejections for outcome in outcomes)

        rows.append([method, _shown(seconds), "-" if published_seconds is None else f"{published_seconds:.4f}",
                     f"{plain_seconds / mean(seconds):.3f}",
                     f"{num_forwards / num_tokens:.2f}", f"{num_rejections / num_tokens:.3f}",
                     str(max(outcome.max_busy_servers for outcome in outcomes))])
    return in_columns(COLUMNS, rows)


def _shown(seconds: Sequence[float]) -> str:
    if len(seconds) == 1:
        return f"{seconds[0]:.4f}"
    standard_error = stdev(seconds) / len(seconds) ** 0.5
    return f"{mean(seconds):.4f} +- {standard_error:.4f}"
