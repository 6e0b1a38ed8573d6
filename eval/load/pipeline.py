"""Methods under load: what requests take that arrive at random or at recorded moments, and how many at once bring how
much.

It knows nothing about how requests are served, see `eval/load/arrivals.py`. In virtual time nobody sleeps.
"""
from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Sequence

from tqdm import tqdm

from config.files import check_folder
from config.keys import over, preset_of
from config.presets import TOY_PRESET
from config.questions import by_turns
from eval.bench import decoders_of
from eval.load.arrivals import Figures, Served, figures, poisson, serve, unequal
from eval.load.keys import LoadConfig, moments
from eval.metrics import NAN, Interval
from eval.plots import Series, lines
from eval.tables import in_columns, save
from launch.pipeline import Pipeline
from launch.run import Command, run
from pipeline.decode import Decoder, Request

DEFAULTS = {"profile": "jetson-7b", "time": "virtual", "max_new_tokens": "64"}
OF_TOY = {"draft": "eagle+suffix"}
PLOTTED = {"latency": "seconds of a request, median", "latency_p95": "seconds of a request, 95th percentile",
           "ttft": "seconds to the first token, median", "tokens_per_second": "tokens/s of all requests"}
Row = Dict[str, Any]
Texts = Dict[int, tuple]  # of each request, by its number


class Table(NamedTuple):
    """The loads of one kind, by what is varied: its title and axis, the name of its files, and the columns."""

    title: str
    axis: str
    file: str
    columns: Sequence[str]


TABLES = {
    "rate": Table("requests that arrive", "requests per second that arrive", "load",
                  ("temperature", "method", "places", "rate", "requests", *Figures._fields, "kind", "profile")),
    "at_once": Table("requests at once", "requests under way at once", "at_once",
                     ("temperature", "method", "at_once", "requests", "tokens_per_second", "over_one", "latency",
                      "ttft", "kind", "profile"))}
Tables = Dict[str, List[Row]]  # by the same names


def load(argv: list[str]) -> int:
    """The command `python -m scripts.bench load`; its exit code."""
    return run(Command("scripts.bench load", measure, LoadConfig), words(argv))


def words(argv: Sequence[str]) -> list[str]:
    """The words of a measurement of load: those that were typed, and what they leave open."""
    is_toy = preset_of(argv) in ("", TOY_PRESET)
    return over(argv, {**DEFAULTS, **(OF_TOY if is_toy else {})}, TOY_PRESET)


def measure(pipeline: Pipeline, own: LoadConfig) -> None:
    """On rank 0: let each method serve each load, and report what came of it."""
    if own.results:
        check_folder(own.results, "choose another results=")
    decoders = decoders_of(pipeline, own.chosen_methods)
    arrivals = _arrivals(own)
    most = max([own.requests, *map(len, arrivals.values())])
    loads = len(arrivals) + len(own.counts)
    steps = len(decoders) * len(own.chosen_temperatures) * loads
    tables: Tables = {varied: [] for varied in TABLES}
    with tqdm(total=steps, unit="load", file=sys.stderr) as bar:
        for temperature in own.chosen_temperatures:
            asked = requests_of(pipeline, own, most, temperature)
            texts: Texts = {}
            for name, decoder in decoders.items():
                bar.set_description(f"{name} t={temperature:g}")
                for varied, row in Case(own, name, temperature, decoder, asked, texts).rows(arrivals):
                    tables[varied].append(row)
                    bar.update()
    _report(own, tables)


def _arrivals(config: LoadConfig) -> dict[float, list[float]]:
    """The moments of the arrivals, by how many there are in a second on average."""
    if config.arrivals:
        given = moments(config.arrivals)
        return {len(given) / max(given[-1], 1e-9): given}
    return {rate: poisson(rate, config.requests, config.run.seed) for rate in config.chosen_rates}


def requests_of(pipeline: Pipeline, own: LoadConfig, count: int, temperature: float) -> list[Request]:
    """The first turns of so many questions, those of all sets by turns, and from the start again where they end."""
    config = replace(own.run, temperature=temperature)
    asked = by_turns(own.folder, own.chosen_sets, config.question_begin, config.question_end)
    questions = islice(cycle(asked), count)
    prompts = [pipeline.prompt_ids(question, config.template) for question in questions]
    return [pipeline.request(prompt, config, config.stop) for prompt in prompts]


@dataclass(frozen=True)
class Case:
    """A method at a temperature; `texts` are those that others wrote."""

    config: LoadConfig
    method: str
    temperature: float
    decoder: Decoder
    asked: Sequence[Request]
    texts: Texts

    def rows(self, arrivals: Mapping[float, Sequence[float]]) -> Iterator[tuple[str, Row]]:
        """A row for each load, with what is varied there."""
        places = self.config.places(self.method)
        for rate, moments_ in arrivals.items():
            due = [moment * self.config.run.slowdown for moment in moments_]
            served = serve(self.decoder, self.asked[:len(due)], places, due)
            yield "rate", self._row(served, rate=rate, places=places)
        alone = NAN
        for count in self.config.counts:
            served = serve(self.decoder, self.asked[:self.config.requests], count)
            row = self._row(served, at_once=count)
            alone = row["tokens_per_second"] if count == 1 else alone
            yield "at_once", {**row, "over_one": row["tokens_per_second"] / alone}

    def _row(self, served: Sequence[Served], **facts: Any) -> Row:
        """What a load brought. Raises ValueError if a text is not the one that was written before."""
        run, wrong = self.config.run, unequal(served, self.texts)
        if wrong and run.virtual:
            raise ValueError(f"{self.method} wrote {wrong} of {len(served)} texts otherwise than before, which must "
                             "not be: please report it")
        found = figures(served, run.slowdown)._asdict()
        return {"temperature": self.temperature, "method": self.method, "requests": len(served), "unequal": wrong,
                **found, "kind": run.kind, "profile": run.profile, **facts}


def _report(config: LoadConfig, tables: Tables) -> None:
    """Print the tables, and write files and plots where that is asked for."""
    where = f"{config.run.kind}, profile {config.run.profile}"
    measured = {varied: rows for varied, rows in tables.items() if rows}
    for varied, rows in measured.items():
        shown = TABLES[varied].columns[:-2]
        cells = [[_cell(row[column]) for column in shown] for row in rows]
        print(f"\n{TABLES[varied].title} ({where}); seconds, and tokens/s of all requests together\n")
        print(in_columns(shown, cells, 2))
    every = [row for rows in measured.values() for row in rows]
    wrong = sum(row["unequal"] for row in every)
    print(f"\ntexts that differ from those of the first method: {wrong} of {sum(row['requests'] for row in every)}")
    if config.results:
        for varied, rows in measured.items():
            _write(Path(config.results), varied, where, rows)


def _cell(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _write(folder: Path, varied: str, where: str, rows: Sequence[Row]) -> None:
    """Write a table as CSV, and for each temperature a plot of each figure over the loads."""
    table, places = TABLES[varied], sorted({row[varied] for row in rows})
    save(folder / f"{table.file}.csv", table.columns, rows)
    if len(places) < 2:
        return
    temperatures = dict.fromkeys(row["temperature"] for row in rows)
    for temperature, (column, label) in product(temperatures, PLOTTED.items()):
        values: dict[str, list[Interval]] = {}
        for row in sorted(rows, key=lambda row: row[varied]):
            if row["temperature"] == temperature:
                name = f"{row['method']}, one at a time" if row.get("places") == 1 else row["method"]
                values.setdefault(name, []).append(Interval(row[column], NAN, NAN))
        path = folder / f"{table.file}-{column}-t{temperature:g}.png"
        series = [Series(name, values[name]) for name in values]
        lines(path, series, places, f"{label}, temperature {temperature:g} ({where})", (table.axis, label))
