"""SI and DSI by events: every repeat on the real clock beside the same on a virtual clock."""
from __future__ import annotations

from dataclasses import asdict
from itertools import cycle, islice
from statistics import mean, stdev
from typing import Any, Iterator, NamedTuple, Sequence

import numpy as np
from tqdm import tqdm

from config.files import check_output, write_json
from config.keys import read_keys
from eval.columns import in_columns
from eval.dsi.events import Driver, Wall
from eval.dsi.forwards import Forward
from eval.dsi.online_keys import COMMAND, Online
from eval.dsi.original import replay
from eval.dsi.runs import drawn, gathered, read_traces, spread, until
from eval.dsi.speculation import Outcome, Plan, decode

TICK = 1e-9  # seconds
BAR = "{desc}: {percentage:3.0f}%|{bar}| {n:.1f}/{total:.1f} s [{elapsed}<{remaining}]"
PLAIN = "non-SI"
COLUMNS = ("predicted s", "measured s", "ratio", "late ms", "most ms", "react us", "plain/it", "forwards",
           "rejected", "servers")
NOTE = """\
Simulated: no model is run. Times are seconds a text, the mean of the repeats, +- the standard error of that mean.
predicted  on the virtual clock, where nothing but forwards and messages takes time
"""
OF_WALL = """\
measured   on the real clock; ratio: measured/predicted
late       how late the end of a forward was noticed, in the mean and at most; react: the coordinator's own time for it
"""
OF_BOTH = """\
plain/it   predicted time of plain decoding over that of the method
forwards   of the target for a token, with those given up; rejected: drafts for a token; servers: at work at once"""


class Repeat(NamedTuple):
    """One text by one method; times in seconds, of the real clock empty if it was not asked for."""

    method: str
    predicted: float
    tokens: int
    outcome: Outcome
    measured: float | None = None
    late: Sequence[float] = ()  # seconds, for each end of a forward
    react: Sequence[float] = ()


class Text(NamedTuple):
    """What is drawn for one text: the lengths of runs for the original accounting, positions otherwise."""

    runs: list[int]
    right: list[bool]


def main(argv: Sequence[str]) -> int:
    config = read_keys(argv, Online, COMMAND)
    if config.output:
        check_output(config.output, "choose another output=")
    texts = list(islice(drawn_texts(config), config.num_repeats))
    bar = tqdm(texts, desc="virtual clock", unit="text", delay=1, leave=False)
    repeats = [one for number, text in enumerate(bar) for one in predicted(config, text, number)]
    note = NOTE + OF_BOTH
    if config.wall:
        repeats = measured(config, texts, repeats)
        note = NOTE + OF_WALL + OF_BOTH
    print(f"k={config.k}, {config.servers} servers of the target, preemption {config.preemption}, {config.accounting} "
          f"accounting, {config.num_repeats} texts of {config.S} tokens after {config.total_tokens}\n")
    print(table(repeats))
    print(f"\n{note}")
    if config.output:
        write_json(config.output, report(config, repeats))
    return 0


def drawn_texts(config: Online) -> Iterator[Text]:
    """The texts, without end: drawn one after the other by one generator, or recorded ones by turns."""
    chance = np.random.RandomState(config.random_seed)
    original = config.accounting == "original"
    traces = matches(config) if config.traces else [[]]
    for trace in cycle(traces):
        runs = gathered(trace) if trace else drawn(config.a, config.maximum_correct_tokens, chance)
        if original:
            yield Text(until(runs, config.S), [])
        elif trace:
            yield Text([], list(islice(cycle(trace), config.S)))
        else:
            yield Text([], spread(runs, config.S))


def matches(config: Online) -> list[list[bool]]:
    """The recorded matches of each text. Raises ValueError if the accounting makes nothing of them."""
    found = read_traces(config.traces)
    if config.accounting == "original" and any(len(set(text)) == 1 for text in found):
        raise ValueError(f"{config.traces} has a text whose drafts are all right, or all wrong, of which "
                         "accounting=original makes no runs: leave it out, or give accounting=corrected")
    fewest = min(sum(text) / (len(text) - sum(text) or 1) for text in found)
    for problem in config.problems_of_runs(fewest, f"a text of {config.traces}"):
        raise ValueError(problem)
    return found


def plan_of(config: Online, number: int) -> Plan:
    """What is decoded for a text, in ticks."""
    later = tuple(map(ticks, config.rows))
    target = Forward(ticks(config.failure_cost), later)
    drafter = Forward(ticks(config.c), (ticks(config.c_sub),))
    return Plan(config.S, config.k, config.servers, target, drafter,
                parts=config.parts, hop=ticks(config.hop),
                merge=config.queue == "merged", seed=config.random_seed + number)


def ticks(seconds: float) -> int:
    return round(seconds / TICK)


def methods(config: Online) -> list[str]:
    return ["SI", "DSI"] if config.simul_type == "both" else [config.simul_type]


def run(config: Online, method: str, text: Text, number: int,
        driver: Driver | None = None) -> Outcome:
    """What comes of one text by one method; nobody waits if no driver is given."""
    plan = plan_of(config, number)
    if text.runs and method != PLAIN:
        return replay(method, plan, text.runs, driver)
    return decode(method, plan, text.right, driver)


def predicted(config: Online, text: Text, number: int) -> Iterator[Repeat]:
    """One text by plain decoding and every method, on the virtual clock."""
    for method in [PLAIN, *methods(config)]:
        outcome = run(config, method, text, number)
        tokens = sum(count for _, count in outcome.commits)
        yield Repeat(method, outcome.ticks * TICK, tokens, outcome)


def measured(config: Online, texts: list[Text],
             repeats: list[Repeat]) -> list[Repeat]:
    """The same on the real clock, with the methods by turns; plain decoding is only predicted."""
    seconds = sum(one.predicted for one in repeats if one.method != PLAIN)
    done, each = [], len(repeats) // len(texts)
    with Wall(1 + config.servers, TICK, config.chained) as wall, tqdm(
            total=seconds, desc="real clock", bar_format=BAR, leave=False) as bar:
        for number, one in enumerate(repeats):
            if one.method != PLAIN:
                wall.restart()
                text = number // each
                outcome = run(config, one.method, texts[text], text, wall)
                one = one._replace(outcome=outcome, measured=wall.elapsed, late=wall.late, react=wall.handling)
                bar.update(one.predicted)
            done.append(one)
    return done


def table(repeats: list[Repeat]) -> str:
    """A line for each method; columns of the real clock only if it ran."""
    by_method: dict[str, list[Repeat]] = {}
    for one in repeats:
        by_method.setdefault(one.method, []).append(one)
    plain = mean(one.predicted for one in by_method[PLAIN])
    cells = {method: _cells(some, plain) for method, some in by_method.items()}
    columns = [column for column in COLUMNS if any(column in row for row in cells.values())]
    rows = []
    for method, row in cells.items():
        rows.append([method, *(row.get(column, "-") for column in columns)])
    return in_columns(["", *columns], rows)


def _cells(some: list[Repeat], plain: float) -> dict[str, str]:
    """What the columns say of the texts of one method; `plain` is what plain decoding takes, predicted."""
    foretold = [one.predicted for one in some]
    tokens = sum(one.tokens for one in some)
    outcomes = [one.outcome for one in some]
    forwards = sum(outcome.forwards for outcome in outcomes)
    rejections = sum(outcome.rejections for outcome in outcomes)
    cells = {"predicted s": _shown(foretold), "plain/it": f"{plain / mean(foretold):.3f}",
             "forwards": f"{forwards / tokens:.2f}", "rejected": f"{rejections / tokens:.3f}",
             "servers": str(max(outcome.most for outcome in outcomes))}
    taken = [one.measured for one in some if one.measured is not None]
    if taken:
        late = [seconds for one in some for seconds in one.late]
        react = mean(seconds for one in some for seconds in one.react)
        cells.update({"measured s": _shown(taken), "ratio": f"{sum(taken) / sum(foretold):.4f}",
                      "late ms": f"{mean(late) * 1e3:.3f}", "most ms": f"{max(late) * 1e3:.2f}",
                      "react us": f"{react * 1e6:.0f}"})
    return cells


def _shown(seconds: Sequence[float]) -> str:
    if len(seconds) == 1:
        return f"{seconds[0]:.4f}"
    error = stdev(seconds) / len(seconds) ** 0.5
    return f"{mean(seconds):.4f} +- {error:.4f}"


def report(config: Online, repeats: list[Repeat]) -> dict[str, Any]:
    """What the output file says: the keys, and every repeat."""
    return {"simulated": True, "keys": asdict(config), "repeats": list(map(_reported, repeats))}


def _reported(one: Repeat) -> dict[str, Any]:
    settled = [[when * TICK, count] for when, count in one.outcome.commits]
    return {"method": one.method, "predicted_seconds": one.predicted, "measured_seconds": one.measured,
            "tokens": one.tokens, "forwards": one.outcome.forwards, "rejections": one.outcome.rejections,
            "most_servers": one.outcome.most, "late_seconds": one.late, "react_seconds": one.react,
            "settled": settled}


