"""SI and DSI by events on a virtual clock: texts with modelled or recorded acceptance."""
from __future__ import annotations

from dataclasses import asdict
from itertools import cycle, islice
from statistics import mean, stdev
from typing import Any, Iterable, Iterator, NamedTuple, Sequence

import numpy as np
from tqdm import tqdm

from config.files import write_json
from config.keys import read_keys
from eval.dsi.counting import read_traces
from eval.dsi.events import Forward
from eval.dsi.keys import COMMAND, Online
from eval.dsi.published import Latencies, online_mean
from eval.dsi.speculation import Outcome, Plan, decode
from eval.tables import in_columns

TICK = 1e-9  # seconds
PLAIN = "non-SI"
COLUMNS = ("", "predicted s", "published s", "plain/it", "forwards", "rejected", "servers")
NOTE = """\
Simulated: no model is run. Times are seconds a text.
predicted  where nothing but forwards and messages takes time: the mean of the repeats, +- its standard error
published  the exact mean in the accounting of the published online simulator, with servers enough and without hops
plain/it   predicted time of plain decoding over that of the method
forwards   of the target for a token, with those given up; rejected: drafts for a token; servers: at work at once"""


class Repeat(NamedTuple):
    """One text by one method."""

    method: str
    outcome: Outcome

    @property
    def predicted(self) -> float:
        """Seconds."""
        return self.outcome.ticks * TICK

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.outcome.commits)


def main(argv: Sequence[str]) -> int:
    config = read_keys(argv, Online, f"{COMMAND} online")
    texts = list(islice(texts_of(config), config.num_repeats))
    bar = tqdm(texts, desc="virtual clock", unit="text", delay=1, leave=False)
    repeats = [one for number, right in enumerate(bar) for one in predicted(config, right, number)]
    print(f"k={config.k}, {config.servers} servers of the target, preemption {config.preemption}, "
          f"{config.num_repeats} texts of {config.S} tokens after {config.total_tokens}\n")
    print(table(config, repeats))
    print(f"\n{NOTE}")
    if config.output:
        reported = list(map(_reported, repeats))
        write_json(config.output, {"simulated": True, "keys": asdict(config), "repeats": reported})
    return 0


def texts_of(config: Online) -> Iterator[list[bool]]:
    """The texts, without end: for each position whether its draft is right, drawn or recorded."""
    if config.traces:
        for trace in cycle(read_traces(config.traces)):
            yield list(islice(cycle(trace), config.S))
    chance = np.random.RandomState(config.random_seed)
    while True:
        yield spread(drawn(config.a, config.maximum_correct_tokens, chance), config.S)


def drawn(acceptance: float, most: int, chance: np.random.RandomState) -> Iterator[int]:
    """Numbers of accepted drafts in a row, at most `most`, without end.

    They are those that the simulator published with the paper on DSI draws from a generator of the same seed.
    """
    while True:
        yield most if acceptance == 1 else min(int(chance.geometric(1 - acceptance)) - 1, most)


def spread(runs: Iterable[int], tokens: int) -> list[bool]:
    """For each of so many positions whether its draft is right; a wrong one ends each run of accepted drafts."""
    endless = (right for length in runs for right in [True] * length + [False])
    return list(islice(endless, tokens))


def plan_of(config: Online, number: int) -> Plan:
    """What is decoded for a text, in ticks."""
    later = tuple(map(ticks, config.rows))
    target = Forward(ticks(config.failure_cost), later)
    drafter = Forward(ticks(config.c), (ticks(config.c_sub),))
    parts = {"instant": 0, "layer": config.layers, "none": 1}[config.preemption]
    seed = config.random_seed + number
    return Plan(config.S, config.k, config.servers, target, drafter, parts, ticks(config.hop),
                config.queue == "merged", seed)


def ticks(seconds: float) -> int:
    return round(seconds / TICK)


def predicted(config: Online, right: Sequence[bool], number: int) -> Iterator[Repeat]:
    """One text by plain decoding and every method."""
    methods = ["SI", "DSI"] if config.simul_type == "both" else [config.simul_type]
    for method in [PLAIN, *methods]:
        yield Repeat(method, decode(method, plan_of(config, number), right))


def published(config: Online, method: str) -> float | None:
    """The mean seconds of a text as the published simulator counts; None where it counts nothing, or never ends."""
    most = config.maximum_correct_tokens
    if method == PLAIN or config.traces or not config.a or not 0 < most < config.S:
        return None
    times = Latencies(config.failure_cost_sub, config.c_sub, config.failure_cost, config.c)
    servers = config.servers if method == "DSI" else None
    return online_mean(times, config.a, config.k, servers, config.S, most)


def table(config: Online, repeats: Sequence[Repeat]) -> str:
    """A line for each method."""
    by_method: dict[str, list[Repeat]] = {}
    for one in repeats:
        by_method.setdefault(one.method, []).append(one)
    plain = mean(one.predicted for one in by_method[PLAIN])
    rows = []
    for method, some in by_method.items():
        seconds = [one.predicted for one in some]
        tokens = sum(one.tokens for one in some)
        forwards = sum(one.outcome.forwards for one in some)
        rejections = sum(one.outcome.rejections for one in some)
        exact = published(config, method)
        rows.append([method, _shown(seconds), "-" if exact is None else f"{exact:.4f}", f"{plain / mean(seconds):.3f}",
                     f"{forwards / tokens:.2f}", f"{rejections / tokens:.3f}",
                     str(max(one.outcome.most for one in some))])
    return in_columns(COLUMNS, rows)


def _shown(seconds: Sequence[float]) -> str:
    if len(seconds) == 1:
        return f"{seconds[0]:.4f}"
    error = stdev(seconds) / len(seconds) ** 0.5
    return f"{mean(seconds):.4f} +- {error:.4f}"


def _reported(one: Repeat) -> dict[str, Any]:
    settled = [[when * TICK, count] for when, count in one.outcome.commits]
    return {"method": one.method, "predicted_seconds": one.predicted, "tokens": one.tokens,
            "forwards": one.outcome.forwards, "rejections": one.outcome.rejections,
            "most_servers": one.outcome.most, "settled": settled}
