"""Measure methods under load: latencies of requests that arrive at random or recorded times, and tokens/s by the number
of requests at once.

`eval/load/arrivals.py` serves the requests. In virtual time nothing sleeps.
"""
from __future__ import annotations

from dataclasses import replace
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any, Dict, Hashable, NamedTuple, Sequence

from config.files import check_folder
from config.keys import preset_of, with_defaults
from config.presets import TOY_PRESET
from config.questions import by_turns
from config.values import listed
from eval.bench import decoders_of
from eval.load.arrivals import Figures, figures, poisson, serve, unequal
from eval.load.keys import LoadConfig, moments
from eval.metrics import NAN, Interval
from eval.plots import Series, lines
from eval.tables import in_columns, number, save
from launch.pipeline import Pipeline
from launch.progress import ProgressBar
from launch.run import Command, run
from pipeline.decode import Request

DEFAULTS = {"profile": "jetson-7b", "time": "virtual", "max_new_tokens": "64"}
OF_TOY = {"draft": "eagle+suffix"}
PLOTTED = {"latency": "request latency, median, s", "latency_p95": "request latency, 95th percentile, s",
           "ttft": "seconds to the first token, median", "tokens_per_second": "tokens/s of all requests"}
Row = Dict[str, Any]


class LoadTable(NamedTuple):
    """The table for loads of one kind: its title and axis, the name of its files, and its columns."""

    title: str
    axis: str
    file: str
    columns: Sequence[str]


TABLES = {
    "rate": LoadTable("requests that arrive", "arrivals per second", "load",
                      ("temperature", "method", "places", "rate", "requests", *Figures._fields, "kind", "profile")),
    "at_once": LoadTable("requests at once", "requests under way at once", "at_once",
                         ("temperature", "method", "at_once", "requests", "tokens_per_second", "over_one", "latency",
                          "ttft", "kind", "profile"))}


class Load(NamedTuple):
    """One load to measure."""

    varied: str  # the quantity that varies: a key of TABLES
    value: float  # of that quantity
    moments: Sequence[float] = ()  # arrival times; empty: each request follows another


def load(argv: list[str]) -> int:
    """Run the command `python3 -m scripts.bench load`; return its exit code."""
    return run(Command("scripts.bench load", measure, LoadConfig), words(argv))


def words(argv: Sequence[str]) -> list[str]:
    """Return the given words of a measurement of load, plus its defaults."""
    is_toy = preset_of(argv) in ("", TOY_PRESET)
    return with_defaults(argv, {**DEFAULTS, **(OF_TOY if is_toy else {})}, TOY_PRESET)


def measure(pipeline: Pipeline, own: LoadConfig) -> None:
    """On rank 0: let each method serve each load, and report the figures."""
    if own.results:
        check_folder(own.results, "choose another results=")
    decoders, loads = decoders_of(pipeline, own.chosen_methods), loads_of(own)
    most = max(own.requests, *(len(one.moments) for one in loads))
    asked = {temperature: requests_of(pipeline, own, most, temperature) for temperature in own.chosen_temperatures}
    texts: dict[float, dict[int, Hashable]] = {temperature: {} for temperature in asked}
    jobs = [*product(asked, decoders, loads)]
    rows: list[Row] = []
    for temperature, method, one in ProgressBar(jobs, unit="load"):
        places = int(one.value) if one.varied == "at_once" else own.places(method)
        due = [moment * own.run.slowdown for moment in one.moments]
        requests = asked[temperature][:len(due) or own.requests]
        served = serve(decoders[method], requests, places, due)
        wrong = unequal(served, texts[temperature])
        if wrong and own.run.virtual:
            raise ValueError(f"{wrong} of {len(served)} texts by {method} differ from those of the first method, which "
                             "is a bug: please report it")
        found = figures(served, own.run.slowdown)._asdict()
        rows.append({"temperature": temperature, "method": method, one.varied: one.value,
                     "places": places, "unequal": wrong, "requests": len(served),
                     "kind": own.run.kind, "profile": own.run.profile, **found})
    _report(own, rows)


def loads_of(own: LoadConfig) -> list[Load]:
    """Return the loads: first arrivals, by their mean number per second, then numbers of requests at once."""
    if own.arrivals:
        given = moments(own.arrivals)
        by_rate = {len(given) / max(given[-1], 1e-9): given}
    else:
        rates = map(float, listed(own.rates))
        by_rate = {rate: poisson(rate, own.requests, own.run.seed) for rate in rates}
    found = [Load("rate", *arrivals) for arrivals in by_rate.items()]
    return [*found, *(Load("at_once", count) for count in own.counts)]


def requests_of(pipeline: Pipeline, own: LoadConfig, count: int, temperature: float) -> list[Request]:
    """Return `count` requests from the first turns of questions, from all sets in turn, repeated if there are fewer."""
    config = replace(own.run, temperature=temperature)
    first_turns = by_turns(own.folder, own.chosen_sets, *config.question_range)
    questions = islice(cycle(first_turns), count)
    prompts = [pipeline.prompt_ids(question, config.template) for question in questions]
    return [pipeline.request(prompt, config, config.stop) for prompt in prompts]


def _report(own: LoadConfig, rows: Sequence[Row]) -> None:
    """Print the tables, and write files and plots if `results` is given."""
    where = f"{own.run.kind}, profile {own.run.profile}"
    alone = {_series_of(row): row["tokens_per_second"] for row in rows if row.get("at_once") == 1}
    for row in rows:
        row["over_one"] = row["tokens_per_second"] / alone.get(_series_of(row), NAN)
    for varied, table in TABLES.items():
        measured = [row for row in rows if varied in row]
        if measured:
            shown = table.columns[:-2]
            found = ([row[column] for column in shown] for row in measured)
            cells = [[number(value) if isinstance(value, float) else str(value) for value in row] for row in found]
            print(f"\n{table.title} ({where}); seconds, and tokens/s of all requests together\n")
            print(in_columns(shown, cells, 2))
        if measured and own.results:
            _write(Path(own.results), varied, where, measured)
    wrong, total = (sum(row[name] for row in rows) for name in ("unequal", "requests"))
    print(f"\ntexts that differ from those of the first method: {wrong} of {total}")


def _series_of(row: Row) -> tuple[float, str]:
    return row["temperature"], row["method"]


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
                alone = varied == "rate" and row["places"] == 1
                name = f"{row['method']}, one at a time" if alone else row["method"]
                values.setdefault(name, []).append(Interval(row[column], NAN, NAN))
        path = folder / f"{table.file}-{column}-t{temperature:g}.png"
        series = [Series(name, values[name]) for name in values]
        lines(path, series, places, f"{label}, temperature {temperature:g} ({where})", (table.axis, label))
