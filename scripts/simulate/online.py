"""SI and DSI by events: every repeat on the real clock beside the same on a virtual clock."""
from __future__ import annotations

import json
from dataclasses import asdict
from itertools import cycle, islice
from statistics import mean, stdev
from typing import Any, Iterator, NamedTuple, Sequence

import numpy as np
from tqdm import tqdm

from config.files import ROOM, check_output, write
from config.keys import read_keys
from config.online import COMMAND, Online
from scripts.simulate.offline import read_traces
from sim.events import Driver, Wall
from sim.forwards import Forward
from sim.original import replay
from sim.runs import drawn, gathered, spread, until
from sim.speculation import Outcome, Plan, decode

TICK = 1e-9  # seconds
BAR = "{desc}: {percentage:3.0f}%|{bar}| {n:.1f}/{total:.1f} s [{elapsed}<{remaining}]"
PLAIN = "non-SI"
COLUMNS = ("predicted s", "measured s", "ratio", "late ms", "most ms", "react us", "plain/it", "forwards",
           "rejected", "servers")
NOTE = """\
Simulated: no model is run. Times are seconds a text, the mean of the repeats, +- the standard error of that mean.
predicted  on the virtual clock, where nothing but forwards and messages takes time
measured   on the real clock; ratio: measured/predicted
late       how late the end of a forward was noticed, in the mean and at most; react: the coordinator's own time for it
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
    repeats = [one for number, text in enumerate(texts) for one in predicted(config, text, number)]
    if config.wall:
        repeats = measured(config, texts, repeats)
    print(f"k={config.k}, {config.servers} servers of the target, preemption {config.preemption}, {config.accounting} "
          f"accounting, {config.num_repeats} texts of {config.S} tokens after {config.total_tokens}\n")
    print(table(repeats))
    print(f"\n{NOTE}")
    if config.output:
        write(config.output, json.dumps(report(config, repeats), indent=1) + "\n", ROOM)
    return 0


def drawn_texts(config: Online) -> Iterator[Text]:
    """The texts, without end: drawn one after the other by one generator, or recorded ones by turns."""
    chance = np.random.RandomState(config.random_seed)
    original = config.accounting == "original"
    for trace in cycle(matches(config)) if config.traces else cycle([[]]):
        runs = gathered(trace) if trace else drawn(config.a, config.maximum_correct_tokens, chance)
        if original:
            yield Text(until(runs, config.S), [])
        else:
            yield Text([], list(islice(cycle(trace), config.S)) if trace else spread(runs, config.S))


def matches(config: Online) -> list[list[bool]]:
    """The recorded matches of each text. Raises ValueError if the accounting makes nothing of them."""
    found = [text.tolist() for text in read_traces(config.traces)]
    if config.accounting == "original" and any(len(set(text)) == 1 for text in found):
        raise ValueError(f"{config.traces} has a text whose drafts are all right, or all wrong, of which "
                         "accounting=original makes no runs: leave it out, or give accounting=corrected")
    return found


def plan_of(config: Online, number: int) -> Plan:
    """What is decoded for a text, in ticks."""
    first, *later = (round(seconds / TICK) for seconds in (config.failure_cost, *config.rows))
    drafter = Forward(round(config.c / TICK), (round(config.c_sub / TICK),))
    return Plan(config.S, config.k, config.servers, Forward(first, tuple(later)), drafter, config.parts,
                round(config.hop / TICK), config.queue == "merged", config.random_seed + number)


def methods(config: Online) -> list[str]:
    return ["SI", "DSI"] if config.simul_type == "both" else [config.simul_type]


def run(config: Online, method: str, text: Text, number: int, driver: Driver | None = None) -> Outcome:
    """What comes of one text by one method; nobody waits if no driver is given."""
    plan = plan_of(config, number)
    if text.runs and method != PLAIN:
        return replay(method, plan, text.runs, driver)
    return decode(method, plan, text.right, driver)


def predicted(config: Online, text: Text, number: int) -> Iterator[Repeat]:
    """One text by plain decoding and every method, on the virtual clock."""
    for method in [PLAIN, *methods(config)]:
        outcome = run(config, method, text, number)
        yield Repeat(method, outcome.ticks * TICK, sum(count for _, count in outcome.commits), outcome)


def measured(config: Online, texts: list[Text], repeats: list[Repeat]) -> list[Repeat]:
    """The same on the real clock, with the methods by turns; plain decoding is only predicted."""
    seconds = sum(one.predicted for one in repeats if one.method != PLAIN)
    done, each = [], len(repeats) // len(texts)
    with Wall(1 + config.servers, TICK, config.chained) as wall, tqdm(
            total=seconds, desc="real clock", bar_format=BAR, leave=False) as bar:
        for number, one in enumerate(repeats):
            if one.method != PLAIN:
                wall.restart()
                outcome = run(config, one.method, texts[number // each], number // each, wall)
                one = one._replace(measured=wall.elapsed, late=wall.late, react=wall.handling, outcome=outcome)
                bar.update(one.predicted)
            done.append(one)
    return done


def table(repeats: list[Repeat]) -> str:
    """A line for each method; columns of the real clock only if it ran."""
    plain = mean(one.predicted for one in repeats if one.method == PLAIN)
    cells = {method: _cells([one for one in repeats if one.method == method], plain)
             for method in dict.fromkeys(one.method for one in repeats)}
    columns = [column for column in COLUMNS if any(column in row for row in cells.values())]
    lines = [f"{'':<8}" + "".join(f"{column:>{_width(column)}}" for column in columns)]
    for method, row in cells.items():
        lines.append(f"{method:<8}" + "".join(f"{row.get(column, '-'):>{_width(column)}}" for column in columns))
    return "\n".join(lines)


def _width(column: str) -> int:
    return 18 if column.endswith(" s") else len(column) + 2


def _cells(some: list[Repeat], plain: float) -> dict[str, str]:
    """What the columns say of the texts of one method; `plain` is what plain decoding takes, predicted."""
    foretold = [one.predicted for one in some]
    tokens = sum(one.tokens for one in some)
    cells = {"predicted s": _shown(foretold), "plain/it": f"{plain / mean(foretold):.3f}",
             "forwards": f"{sum(one.outcome.forwards for one in some) / tokens:.2f}",
             "rejected": f"{sum(one.outcome.rejections for one in some) / tokens:.3f}",
             "servers": str(max(one.outcome.most for one in some))}
    taken = [one.measured for one in some if one.measured is not None]
    if taken:
        late = [seconds for one in some for seconds in one.late]
        react = mean(seconds for one in some for seconds in one.react)
        cells.update({"measured s": _shown(taken), "ratio": f"{sum(taken) / sum(foretold):.4f}",
                      "late ms": f"{mean(late) * 1e3:.3f}", "most ms": f"{max(late) * 1e3:.2f}",
                      "react us": f"{react * 1e6:.0f}"})
    return cells


def _shown(seconds: Sequence[float]) -> str:
    error = f" +- {stdev(seconds) / len(seconds) ** 0.5:.4f}" if len(seconds) > 1 else ""
    return f"{mean(seconds):.4f}{error}"


def report(config: Online, repeats: list[Repeat]) -> dict[str, Any]:
    """What the output file says: the keys, and every repeat."""
    return {"simulated": True, "keys": asdict(config), "repeats": [
        {"method": one.method, "predicted_seconds": one.predicted, "measured_seconds": one.measured,
         "tokens": one.tokens, "forwards": one.outcome.forwards, "rejections": one.outcome.rejections,
         "most_servers": one.outcome.most, "late_seconds": list(one.late), "react_seconds": list(one.react),
         "settled": [[when * TICK, count] for when, count in one.outcome.commits]} for one in repeats]}


