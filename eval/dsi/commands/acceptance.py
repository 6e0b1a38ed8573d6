"""The acceptance rate of a target and its drafter on data sets, by four definitions, and the lengths of their runs."""
from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Sequence

from tqdm import tqdm

from config.files import ROOM, write, write_json
from config.keys import read_keys
from eval.columns import in_columns
from eval.dsi.acceptance_rates import DEFINITIONS, Length, Records, lengths, rate, rate_after
from eval.metrics import Interval
from eval.pair_keys import AcceptanceConfig
from eval.pairs import Model, answer, check_pair, check_sets, open_model, prompts_of, record, sampler_of
from eval.summary import number

COMMAND = "python -m scripts.simulate acceptance"
ALL = "all"
LONGEST = 16  # runs from this length on stand in one line
CUT_OFF: dict[str, Any] = {"color": "white", "edgecolor": "black", "hatch": "////"}  # the bars of such runs


def main(argv: list[str]) -> int:
    config = read_keys(argv, AcceptanceConfig, COMMAND)
    check_sets(config.chosen_sets, config)
    target, drafter = (open_model(folder, config) for folder in (config.target, config.draft))
    check_pair(target, drafter)
    asked = {name: prompts_of(name, config, (target, drafter)) for name in config.chosen_sets}
    found = {name: of_set(name, prompts, (target, drafter), config) for name, prompts in asked.items()}
    every = [one for records in found.values() for one in records]
    print(f"target {config.target}, drafter {config.draft}, at most {config.max_new_tokens} tokens an answer, "
          f"{_choice(config)}\n")
    if len(found) > 1:
        found[ALL] = every
    print(table(found))
    print("\nruns of matches in all texts; expected: those that end, if each place matched by itself, with the rate of "
          f"all texts\nor of its own\n\n{histogram(every)}")
    if config.traces:
        write_json(config.traces, every, indent=None)
    if config.picture:
        draw(list(lengths(every)), f"{Path(config.draft).name} for {Path(config.target).name}", config.picture)
    return 0


def of_set(name: str, prompts: Sequence[list[int]], models: tuple[Model, Model],
           config: AcceptanceConfig) -> list[list[int]]:
    """The matches of each text that the target writes to the prompts of a data set, and the drafter reads."""
    target, drafter = models
    sampler = sampler_of(config)
    records = []
    for prompt in tqdm(prompts, desc=name, leave=False):
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
    rates = [f"{name}, 95 %" for name in DEFINITIONS]
    heading = ["", "prompts", "tokens", *rates, "after hit", "after miss"]
    rows = []
    for name, records in found.items():
        sizes = [str(len(records)), str(sum(map(len, records)))]
        bounds = [_bounds(rate(records, definition)) for definition in DEFINITIONS.values()]
        after = [number(rate_after(records, match), 3) for match in (1, 0)]
        rows.append([name, *sizes, *bounds, *after])
    return in_columns(heading, rows)


def _bounds(found: Interval) -> str:
    value, low, high = (number(one, 3) for one in found)
    return f"{value} [{low}, {high}]"


def histogram(records: Records) -> str:
    """A line for each length of a run: how many ended, how many the text's end cut off, and how many are expected."""
    found = list(lengths(records))
    shown = [(str(one.length), [one]) for one in found[:LONGEST]]
    if found[LONGEST:]:
        shown.append((f"{LONGEST} to {found[-1].length}", found[LONGEST:]))
    rows = []
    for name, group in shown:
        _, ended, cut, expected, by_text = (sum(column) for column in zip(*group))
        rows.append([name, str(ended), str(cut), f"{expected:.1f}", f"{by_text:.1f}"])
    return in_columns(["length", "ended", "cut off", "expected", "by text"], rows)


def draw(found: list[Length], title: str, path: str) -> None:
    """Draw the lengths of the runs into a file. Raises ValueError if it cannot be written."""
    from eval.plots import STYLE, plt

    x, ended, cut, expected, by_text = zip(*found)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7, 3.5))
        axes.bar(x, ended, color="#5b6fb5", label="ended by a miss")
        axes.bar(x, cut, bottom=ended, label="cut off by the text's end", **CUT_OFF)
        axes.plot(x, expected, "k.-", label="expected to end, if all places have one rate")
        axes.plot(x, by_text, "k+:", label="expected to end, if each text has its own")
        axes.set_xlabel("matches in a row")
        axes.set_ylabel("runs")
        axes.set_title(f"Runs of matches, measured: {title}", loc="left", parse_math=False)
        axes.legend()
        picture = io.BytesIO()
        figure.savefig(picture, format=Path(path).suffix[1:], bbox_inches="tight")
        plt.close(figure)
    write(path, picture.getvalue(), ROOM)
