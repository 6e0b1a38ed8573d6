"""The acceptance rate of a target and its drafter on data sets, by four definitions, and the lengths of their runs."""
from __future__ import annotations

import io
import json
import sys
from pathlib import Path

from tqdm import tqdm

from config.files import ROOM, write
from config.keys import read_keys
from config.measures import AcceptanceConfig
from eval.acceptance import DEFINITIONS, Length, Records, lengths, rate, rate_after
from eval.pairs import Model, answer, check_pair, open_model, prompts_of, record, sampler_of
from eval.summary import number

COMMAND = "python -m scripts.simulate acceptance"
ALL = "all"
LONGEST = 16  # runs from this length on stand in one line


def main(argv: list[str]) -> int:
    config = read_keys(argv, AcceptanceConfig, COMMAND)
    target, drafter = (open_model(folder, config) for folder in (config.target, config.draft))
    check_pair(target, drafter)
    found = {name: of_set(name, target, drafter, config) for name in config.chosen_sets}
    every = [one for records in found.values() for one in records]
    print(f"target {config.target}, drafter {config.draft}, at most {config.max_new_tokens} tokens an answer, "
          f"{_choice(config)}\n")
    if len(found) > 1:
        found[ALL] = every
    print(table(found))
    print("\nruns of matches in all texts; expected: those that end, if each place matched by itself, with the rate of "
          f"all texts\nor of its own\n\n{histogram(every)}")
    if config.traces:
        write(config.traces, json.dumps(every) + "\n", ROOM)
    if config.picture:
        draw(list(lengths(every)), f"{Path(config.draft).name} for {Path(config.target).name}", config.picture)
    return 0


def of_set(name: str, target: Model, drafter: Model, config: AcceptanceConfig) -> list[list[int]]:
    """The matches of each text that the target writes to the prompts of a data set."""
    sampler = sampler_of(config)
    records = []
    for prompt in tqdm(prompts_of(name, config, (target, drafter)), desc=name, leave=False, file=sys.stderr):
        text = answer(target, prompt, config.max_new_tokens, sampler)
        records.append(record(drafter, prompt, text, sampler))
    return records


def _choice(config: AcceptanceConfig) -> str:
    if not config.do_sample:
        return "the likeliest token each"
    drawn = f"temperature {config.temperature:g}, top-p {config.top_p:g}"
    return f"drawn by both with the noise of seed {config.seed}, {drawn}"


def table(found: dict[str, list[list[int]]]) -> str:
    """A line for each data set with its rates."""
    columns = ("prompts", "tokens", *(f"{name}, 95 %" for name in DEFINITIONS), "after hit", "after miss")
    lines = [f"{'':<14}" + "".join(f"{name:>{_width(name)}}" for name in columns)]
    for name, records in found.items():
        bounds = [[number(value, 3) for value in rate(records, definition)] for definition in DEFINITIONS.values()]
        cells = [str(len(records)), str(sum(map(len, records))),
                 *(f"{value} [{low}, {high}]" for value, low, high in bounds),
                 *(number(rate_after(records, match), 3) for match in (1, 0))]
        line = "".join(f"{cell:>{_width(column)}}" for column, cell in zip(columns, cells))
        lines.append(f"{name[-13:]:<14}" + line)
    return "\n".join(lines)


def _width(column: str) -> int:
    return 22 if "95 %" in column else len(column) + 2


def histogram(records: Records) -> str:
    """A line for each length of a run: how many ended, how many the text's end cut off, and how many are expected."""
    lines = ["".join(f"{name:>10}" for name in ("length", "ended", "cut off", "expected", "by text"))]
    found = list(lengths(records))
    shown = [(str(one.length), [one]) for one in found[:LONGEST]]
    if found[LONGEST:]:
        shown.append((f"{LONGEST} to {found[-1].length}", found[LONGEST:]))
    for name, group in shown:
        _, ended, cut, *expected = (sum(column) for column in zip(*group))
        lines.append(f"{name:>10}{ended:>10}{cut:>10}" + "".join(f"{count:>10.1f}" for count in expected))
    return "\n".join(lines)


def draw(found: list[Length], title: str, path: str) -> None:
    """Draw the lengths of the runs into a file. Raises ValueError if it cannot be written."""
    from eval.plots import STYLE, plt

    x = [one.length for one in found]
    ended = [one.ended for one in found]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7, 3.5))
        axes.bar(x, ended, color="#5b6fb5", label="ended by a miss")
        axes.bar(x, [one.cut for one in found], bottom=ended, color="white", edgecolor="black", hatch="////",
                 label="cut off by the text's end")
        axes.plot(x, [one.expected for one in found], "k.-", label="expected to end, if all places have one rate")
        axes.plot(x, [one.by_text for one in found], "k+:", label="expected to end, if each text has its own")
        axes.set_xlabel("matches in a row")
        axes.set_ylabel("runs")
        axes.set_title(f"Runs of matches, measured: {title}", loc="left", parse_math=False)
        axes.legend()
        picture = io.BytesIO()
        figure.savefig(picture, format=Path(path).suffix[1:], bbox_inches="tight")
        plt.close(figure)
    write(path, picture.getvalue(), ROOM)
