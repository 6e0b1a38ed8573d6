"""Methods under load: what requests take that arrive at random or at recorded moments, and how many at once bring how
much.

It knows nothing about how requests are served, see `eval/load/arrivals.py`. In virtual time nobody sleeps.
"""
from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Dict, Iterator, Mapping, Sequence

from tqdm import tqdm

from config.files import check_folder
from config.questions import by_turns
from config.typed import over, preset_of
from eval.load.arrivals import Served, arriving, at_once, figures, poisson, unequal
from eval.load.keys import LoadConfig, moments
from eval.metrics import NAN, Interval
from eval.plots import Series, lines
from eval.tables import in_columns, save
from launch.pipeline import Pipeline
from launch.run import Command, run
from model.sample import Sampler
from pipeline.decode import Decoder, Request

USUAL = {"profile": "jetson-7b", "time": "virtual", "max_new_tokens": "64"}
OF_TOY = {"draft": "eagle+suffix"}
LOAD = ("temperature", "method", "places", "rate", "requests", "latency", "latency_p95", "ttft", "ttft_p95",
        "tokens_per_second", "kind", "profile")
COUNTED = ("temperature", "method", "at_once", "requests", "tokens_per_second", "over_one", "latency", "ttft",
           "kind", "profile")
SECONDS = ("latency", "latency_p95", "ttft", "ttft_p95")
AXES = {"rate": "requests per second that arrive", "at_once": "requests under way at once"}
PLOTTED = {"latency": "seconds of a request, median", "latency_p95": "seconds of a request, 95th percentile",
           "ttft": "seconds to the first token, median", "tokens_per_second": "tokens/s of all requests"}
Row = Dict[str, Any]
Texts = Dict[int, tuple]  # of each request, by its number


def load(argv: list[str]) -> int:
    """The command `python -m scripts.bench load`; its exit code."""
    usual = USUAL if preset_of(argv) not in ("", "toy") else {**USUAL, **OF_TOY}
    return run(Command("scripts.bench load", measure, LoadConfig), over(argv, usual))


def measure(pipeline: Pipeline, own: LoadConfig) -> None:
    """On rank 0: let each method serve each load, and report what came of it."""
    config = own.run
    if own.results:
        check_folder(own.results, "choose another results=")
    decoders = {name: pipeline.decoder_for(replace(config, pipeline_type=name)) for name in own.chosen_methods}
    arrivals = _arrivals(own)
    prompts = list(prompts_of(pipeline, own, max([own.requests, *map(len, arrivals.values())])))
    loaded: list[Row] = []
    counted: list[Row] = []
    steps = len(decoders) * len(own.chosen_temperatures) * (len(arrivals) + len(own.counts))
    with tqdm(total=steps, unit="load", file=sys.stderr) as bar:
        for temperature in own.chosen_temperatures:
            sampler = Sampler(temperature, config.top_p, config.top_k, config.seed, config.verify)
            asked = [request(pipeline, prompt, sampler) for prompt in prompts]
            texts: Texts = {}
            for name, decoder in decoders.items():
                bar.set_description(f"{name} t={temperature:g}")
                case = Case(own, name, temperature, decoder, asked, pipeline.scale, texts)
                for rows, measured in ((loaded, case.loads(arrivals)), (counted, case.counts())):
                    for row in measured:
                        rows.append(row)
                        bar.update()
    _report(own, loaded, counted)


def _arrivals(config: LoadConfig) -> dict[float, list[float]]:
    """The moments of the arrivals, by how many there are in a second on average."""
    if config.arrivals:
        given = moments(config.arrivals)
        return {len(given) / max(given[-1], 1e-9): given}
    return {rate: poisson(rate, config.requests, config.run.seed) for rate in config.chosen_rates}


def prompts_of(pipeline: Pipeline, own: LoadConfig, count: int) -> Iterator[list[int]]:
    """The first turns of so many questions, those of all sets by turns, and from the start again where they end."""
    config, text = pipeline.config, pipeline.text
    assert text is not None
    asked = by_turns(own.data, own.chosen_sets, config.question_begin, config.question_end)
    for question in islice(cycle(asked), count):
        yield text.prompt_ids([question], config.template)


def request(pipeline: Pipeline, prompt: list[int], sampler: Sampler) -> Request:
    """The request for an answer to this prompt."""
    config, text = pipeline.config, pipeline.text
    assert text is not None
    end = frozenset() if config.ignore_eos else frozenset(text.end_ids)
    return Request(prompt, sampler, config.max_new_tokens, end, text.stop_rule(config.stop))


@dataclass(frozen=True)
class Case:
    """A method at a temperature; `texts` are those that others wrote, and `scale` seconds pass for a modelled one."""

    config: LoadConfig
    method: str
    temperature: float
    decoder: Decoder
    asked: Sequence[Request]
    scale: float
    texts: Texts

    def loads(self, arrivals: Mapping[float, Sequence[float]]) -> Iterator[Row]:
        """A row for each load, by the requests in a second."""
        places = self.config.places(self.method)
        for rate, moments_ in arrivals.items():
            due = [moment * self.scale for moment in moments_]
            served = arriving(self.decoder, self.asked[:len(due)], due, places)
            yield self._row(served, rate=rate, places=places)

    def counts(self) -> Iterator[Row]:
        """A row for each number of requests that are under way at once."""
        alone = NAN
        for count in self.config.counts:
            row = self._row(at_once(self.decoder, self.asked[:self.config.requests], count), at_once=count)
            alone = row["tokens_per_second"] if count == 1 else alone
            yield {**row, "over_one": row["tokens_per_second"] / alone}

    def _row(self, served: Sequence[Served], **facts: Any) -> Row:
        """What a load brought. Raises ValueError if a text is not the one that was written before."""
        wrong = unequal(served, self.texts)
        if wrong and self.config.run.virtual:
            raise ValueError(f"{self.method} wrote {wrong} of {len(served)} texts otherwise than before, which must "
                             "not be: please report it")
        found = figures(served)
        seconds = [value / self.scale for value in found[:-1]]
        return {"temperature": self.temperature, "method": self.method, "requests": len(served), "unequal": wrong,
                **dict(zip(SECONDS, seconds)), "tokens_per_second": found.speed * self.scale,
                "kind": self.config.run.kind, "profile": self.config.run.profile, **facts}


def _report(config: LoadConfig, loaded: Sequence[Row], counted: Sequence[Row]) -> None:
    """Print the tables, and write files and plots where that is asked for."""
    where = f"{config.run.kind}, profile {config.run.profile}"
    for title, columns, rows in ((f"requests that arrive ({where})", LOAD, loaded),
                                 (f"requests at once ({where})", COUNTED, counted)):
        if rows:
            shown = columns[:-2]
            print(f"\n{title}; seconds, and tokens/s of all requests together\n")
            print(in_columns(shown, [[_cell(row[column]) for column in shown] for row in rows], 2))
    wrong = sum(row["unequal"] for row in (*loaded, *counted))
    print(f"\ntexts that differ from those of the first method: {wrong} of "
          f"{sum(row['requests'] for row in (*loaded, *counted))}")
    if config.results:
        _write(Path(config.results), where, loaded, counted)


def _cell(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _write(folder: Path, where: str, loaded: Sequence[Row], counted: Sequence[Row]) -> None:
    """Write the tables as CSV, and a plot of each figure over the load."""
    if counted:
        save(folder / "at_once.csv", COUNTED, counted)
    if loaded:
        save(folder / "load.csv", LOAD, loaded)
    for temperature in dict.fromkeys(row["temperature"] for row in (*loaded, *counted)):
        for rows, axis, named in ((loaded, "rate", "load"), (counted, "at_once", "at_once")):
            here = [row for row in rows if row["temperature"] == temperature]
            places = sorted({row[axis] for row in here})
            for column, label in PLOTTED.items() if len(places) > 1 else ():
                series = [Series(f"{name}, one at a time" if alone else name, _heights(here, name, axis, column))
                          for name, alone in dict.fromkeys((row["method"], row.get("places") == 1) for row in here)]
                path = folder / f"{named}-{column}-t{temperature:g}.png"
                lines(path, series, places, f"{label}, temperature {temperature:g} ({where})", (AXES[axis], label))


def _heights(rows: Sequence[Row], method: str, axis: str, column: str) -> list[Interval]:
    own = sorted((row for row in rows if row["method"] == method), key=lambda row: row[axis])
    return [Interval(row[column], NAN, NAN) for row in own]
