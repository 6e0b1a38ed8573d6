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
from eval.load.keys import LoadConfig
from eval.load.keys import moments as read_moments
from eval.metrics import NAN, Interval
from eval.plots import Series, lines
from eval.tables import in_columns, number, save
from launch.pipeline import Pipeline
from launch.progress import ProgressBar
from launch.run import Command, run
from pipeline.answers import Request

DEFAULTS = {"profile": "jetson-7b", "time": "virtual", "max_new_tokens": "64"}
TOY_DEFAULTS = {"draft": "eagle+suffix"}
PLOTTED = {"latency": "request latency, median, s", "latency_p95": "request latency, 95th percentile, s",
           "ttft": "seconds to the first token, median", "tokens_per_second": "tokens/s of all requests"}
LoadRow = Dict[str, Any]


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
    """Return the arguments of a measurement of load, plus its defaults."""
    is_toy = preset_of(argv) in ("", TOY_PRESET)
    toy_defaults = TOY_DEFAULTS if is_toy else {}
    return with_defaults(argv, {**DEFAULTS, **toy_defaults}, TOY_PRESET)


def measure(pipeline: Pipeline, load_config: LoadConfig) -> None:
    """On rank 0: let each method serve each load, and report the figures."""
    if load_config.results:
        check_folder(load_config.results, "choose another results=")
    decoders = decoders_of(pipeline, load_config.chosen_methods)
    loads = loads_of(load_config)

    max_requests = max(load_config.requests, *(len(load.moments) for load in loads))
    requests_by_temperature = {temperature: requests_of(pipeline, load_config, max_requests, temperature)
                               for temperature in load_config.chosen_temperatures}
    texts: dict[float, dict[int, Hashable]] = {temperature: {} for temperature in requests_by_temperature}

    jobs = [*product(requests_by_temperature, decoders, loads)]
    rows: list[LoadRow] = []
    for temperature, method, load in ProgressBar(jobs, unit="load"):
        max_running = int(load.value) if load.varied == "at_once" else load_config.max_running(method)
        moments = [moment * load_config.run.slowdown for moment in load.moments]
        num_requests = len(moments) or load_config.requests
        requests = requests_by_temperature[temperature][:num_requests]

        served = serve(decoders[method], requests, max_running, moments)
        num_unequal = unequal(served, texts[temperature])
        if num_unequal and load_config.run.virtual:
            raise ValueError(f"{num_unequal} of {len(served)} texts by {method} differ from those of the first method, "
                             "which is a bug: please report it")

        rows.append({
            "temperature": temperature, "method": method, load.varied: load.value,
            "places": max_running, "unequal": num_unequal, "requests": len(served),
            "kind": load_config.run.kind, "profile": load_config.run.profile,
            **figures(served, load_config.run.slowdown)._asdict()})
    _report(load_config, rows)


def loads_of(load_config: LoadConfig) -> list[Load]:
    """Return the loads: first arrivals, by their mean number per second, then numbers of requests at once."""
    if load_config.arrivals:
        arrival_times = read_moments(load_config.arrivals)
        mean_rate = len(arrival_times) / max(arrival_times[-1], 1e-9)
        by_rate = {mean_rate: arrival_times}
    else:
        rates = map(float, listed(load_config.rates))
        by_rate = {rate: poisson(rate, load_config.requests, load_config.run.seed) for rate in rates}

    loads = [Load("rate", *arrivals) for arrivals in by_rate.items()]
    loads += [Load("at_once", count) for count in load_config.counts]
    return loads


def requests_of(pipeline: Pipeline, load_config: LoadConfig, num_requests: int, temperature: float) -> list[Request]:
    """Return requests of the first turns of questions, from all sets in turn, repeated if there are fewer."""
    run_config = replace(load_config.run, temperature=temperature)
    first_turns = by_turns(load_config.folder, load_config.chosen_sets, *run_config.question_range)
    questions = islice(cycle(first_turns), num_requests)
    prompts = [pipeline.prompt_ids(question, run_config.template) for question in questions]
    return [pipeline.request(prompt_ids, run_config, run_config.stop) for prompt_ids in prompts]


# --- the report -------------------------------------------------------------------------------------------------------

def _report(load_config: LoadConfig, rows: Sequence[LoadRow]) -> None:
    """Print the tables, and write files and plots if `results` is given."""
    setting = f"{load_config.run.kind}, profile {load_config.run.profile}"

    # gain over one request at once
    speeds_of_one = {_series_of(row): row["tokens_per_second"] for row in rows if row.get("at_once") == 1}
    for row in rows:
        row["over_one"] = row["tokens_per_second"] / speeds_of_one.get(_series_of(row), NAN)

    for varied, table in TABLES.items():
        table_rows = [row for row in rows if varied in row]
        if not table_rows:
            continue
        shown_columns = table.columns[:-2]
        cells = [[_cell(row[column]) for column in shown_columns] for row in table_rows]
        print(f"\n{table.title} ({setting}); seconds, and tokens/s of all requests together\n")
        print(in_columns(shown_columns, cells, 2))

        if load_config.results:
            _write(Path(load_config.results), varied, setting, table_rows)

    num_unequal = sum(row["unequal"] for row in rows)
    num_texts = sum(row["requests"] for row in rows)
    print(f"\ntexts that differ from those of the first method: {num_unequal} of {num_texts}")


def _cell(value: Any) -> str:
    return number(value) if isinstance(value, float) else str(value)


def _series_of(row: LoadRow) -> tuple[float, str]:
    return row["temperature"], row["method"]


def _write(results_dir: Path, varied: str, setting: str, rows: Sequence[LoadRow]) -> None:
    """Write a table as CSV, and for each temperature a plot of each figure over the loads."""
    table = TABLES[varied]
    save(results_dir / f"{table.file}.csv", table.columns, rows)

    varied_values = sorted({row[varied] for row in rows})
    if len(varied_values) < 2:
        return

    temperatures = dict.fromkeys(row["temperature"] for row in rows)
    for temperature, (column, label) in product(temperatures, PLOTTED.items()):
        intervals: dict[str, list[Interval]] = {}
        for row in sorted(rows, key=lambda row: row[varied]):
            if row["temperature"] == temperature:
                is_alone = varied == "rate" and row["places"] == 1
                name = f"{row['method']}, one at a time" if is_alone else row["method"]
                intervals.setdefault(name, []).append(Interval(row[column], NAN, NAN))

        plot_path = results_dir / f"{table.file}-{column}-t{temperature:g}.png"
        series = [Series(name, values) for name, values in intervals.items()]
        title = f"{label}, temperature {temperature:g} ({setting})"
        lines(plot_path, series, varied_values, title, (table.axis, label))
