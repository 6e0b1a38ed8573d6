"""The summary: what a results folder holds, as rows of figures, and what is missing in it.

It knows nothing about how answers were made, or how figures are shown. It works on what is there.
"""
from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, Mapping, Sequence

from config.files import ROOM, fits, lines, whole, write
from config.methods import METHODS
from config.questions import load
from eval import metrics
from eval.metrics import Interval

BASES = ("naive", "ar")  # what methods are compared with
MEAN = "mean"
SETS = ("mt_bench", "humaneval", "gsm8k", "alpaca", "sum", "qa")  # in the order of the papers
SHARES = ("computed", "waited", "idle", "other")
SUMMARY = ("method", "set", "temperature", "n", "xi", "xi_low", "xi_high",
           *(f"sr_{base}{bound}" for base in BASES for bound in ("", "_low", "_high")),
           "tau", "ttft", "tpt_p50", "tpt_p99", "equal", *SHARES, "late", "emulated", "profile")
STAGES = ("method", "set", "temperature", "rank", *SHARES, "late", "bytes", "control", "rows", "emulated", "profile")
DELETE = "delete this line"
GONE = "delete it, or put it back; without it nobody knows what is missing"
Row = dict  # one line of a table
Group = tuple  # method, set, temperature


def _temperatures(value: Any) -> bool:
    try:
        return fits([float(word) for word in _words(value)], [float])
    except (ValueError, AttributeError):
        return False


ENVIRONMENT = {"config": dict, "machine": dict, "starts": [{
    "methods": str, "sets": str, "temperatures": _temperatures, "question_begin": int, "question_end": int,
    "repeats": int}]}


@dataclass(frozen=True)
class Found:
    """What a results folder holds: the answers by method, set and temperature, env.json, and the lines of the tally."""

    folder: Path
    groups: Mapping[Group, Sequence[metrics.Answer]]
    env: Mapping[str, Any]
    tally: Sequence[Mapping[str, Any]]

    @property
    def methods(self) -> list[str]:
        """In the order in which they were asked for."""
        asked = [name for start in self.env.get("starts", ()) for name in _words(start["methods"])]
        return _ordered({method for method, _, _ in self.groups}, [*dict.fromkeys(asked), *METHODS])

    @property
    def sets(self) -> list[str]:
        return _ordered({name for _, name, _ in self.groups}, list(SETS))

    @property
    def temperatures(self) -> list[float]:
        return sorted({temperature for _, _, temperature in self.groups})

    @property
    def world(self) -> str:
        """Where the figures come from, as every table and plot has to say."""
        return world([answer for group in self.groups.values() for answer in group])

    def of(self, method: str, name: str, temperature: float) -> Sequence[metrics.Answer]:
        return self.groups.get((method, name, temperature), ())


class NoAnswers(ValueError):
    """There is nothing to report yet."""


def world(answers: Sequence[metrics.Answer]) -> str:
    """Measured, emulated or simulated, and on which cluster."""
    kinds = {"simulated" if answer.get("simulated") else "emulated" if answer["emulated"] else "measured"
             for answer in answers}
    profiles = sorted({answer["profile"] for answer in answers} - {"none"})
    return " and ".join(sorted(kinds)) + (f", profile {', '.join(profiles)}" if profiles else "")


def read(folder: str | Path) -> Found:
    """A results folder. Raises NoAnswers if it has none, and another ValueError for a line that is spoiled."""
    folder = Path(folder)
    groups: dict[Group, list[metrics.Answer]] = {}
    for path in sorted(folder.glob("answers/*/*.jsonl")):
        for answer in _lines(path, metrics.ANSWER):
            groups.setdefault((answer["method"], answer["set"], answer["temperature"]), []).append(answer)
    if not groups:
        raise NoAnswers(f"{folder} has no answers: make some with bash run_eval.sh results={folder}")
    tally = [{**line, "launch": path.parent.name} for path in sorted(folder.glob("tally/*/rank_*.jsonl"))
             for line in _lines(path, metrics.TOLD)]
    return Found(folder, groups, _environment(folder / "env.json"), tally)


def _environment(path: Path) -> dict[str, Any]:
    """What env.json says; nothing if it is not there."""
    if not path.is_file():
        return {}
    env: dict[str, Any] = whole(path, GONE)
    if not fits({"starts": [], "config": {}, "machine": {}, **env} if isinstance(env, dict) else env, ENVIRONMENT):
        raise ValueError(f"{path} is none that an evaluation wrote: {GONE}")
    return env


def _lines(path: Path, form: Any) -> Iterator[dict[str, Any]]:
    """The whole lines of a file that somebody may still be writing."""
    for number, entry in lines(path, DELETE, growing=True):
        if not fits(entry, form):
            raise ValueError(f"line {number} of {path} is none that an evaluation wrote: {DELETE}")
        yield entry


def _ordered(names: set[str], known: Sequence[str]) -> list[str]:
    return sorted(names, key=lambda name: (known.index(name) if name in known else len(known), name))


def summary(found: Found) -> list[Row]:
    """One row per method, set and temperature."""
    rows = []
    for temperature in found.temperatures:
        for name in found.sets:
            for method in found.methods:
                if answers := found.of(method, name, temperature):
                    rows.append(_row(found, answers, (method, name, temperature)))
    return rows


def _row(found: Found, answers: Sequence[metrics.Answer], group: Group) -> Row:
    method, name, temperature = group
    row = {"method": method, "set": name, "temperature": temperature, "n": len(answers),
           **_bounds("xi", metrics.speed([metrics.sample(answers)])),
           "tau": metrics.accepted(answers), "ttft": metrics.first_token(answers),
           "tpt_p50": metrics.token_time(answers, 0.5), "tpt_p99": metrics.token_time(answers, 0.99),
           "equal": metrics.equality(answers, found.of("ar", name, temperature)),
           "emulated": any(answer["emulated"] for answer in answers), "profile": answers[0]["profile"]}
    for base in BASES:
        pairs = metrics.paired(answers, found.of(base, name, temperature))
        row.update(_bounds(f"sr_{base}", metrics.speed_up([pairs])))
    stages = [share for rank, share in spent(found, answers).items() if rank]
    for i, key in enumerate((*SHARES, "late")):
        row[key] = sum(share[i] for share in stages) / len(stages) if stages else metrics.NAN
    return row


def _bounds(name: str, interval: Interval) -> dict[str, float]:
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}


def spent(found: Found, answers: Sequence[metrics.Answer]) -> dict[int, metrics.Shares]:
    """What each rank did while these answers were made."""
    kept = {(answer["launch"], request) for answer in answers for request in answer["requests"]}
    return metrics.shares(found.tally, kept)


def stages(found: Found) -> list[Row]:
    """One row per method, set, temperature and rank; bytes and rows are per request."""
    return [{"method": method, "set": name, "temperature": temperature, "rank": rank, **share._asdict(),
             "emulated": answers[0]["emulated"], "profile": answers[0]["profile"]}
            for (method, name, temperature), answers in found.groups.items()
            for rank, share in spent(found, answers).items()]


def means(found: Found, method: str, temperature: float) -> dict[str, Interval]:
    """xi and the ratios over all sets; a ratio over those sets that both have."""
    every = {name: found.of(method, name, temperature) for name in found.sets}
    result = {"xi": metrics.speed([metrics.sample(answers) for answers in every.values()])}
    for base in BASES:
        pairs = [metrics.paired(answers, found.of(base, name, temperature)) for name, answers in every.items()]
        result[f"sr_{base}"] = metrics.speed_up(pairs)
    return result


def missing(found: Found) -> list[str]:
    """What was asked for and is not there yet, a sentence for each method, set and temperature."""
    gaps = {}
    for start in found.env.get("starts", ()):
        for name in _words(start["sets"]):
            try:
                data = found.env["config"]["data"]
                count = len(load(data, name, start["question_begin"], start["question_end"])) * start["repeats"]
            except (ValueError, KeyError):
                count = max((len(answers) for (_, there, _), answers in found.groups.items() if there == name),
                            default=0)
            for method in _words(start["methods"]):
                for temperature in map(float, _words(start["temperatures"])):
                    if (have := len(found.of(method, name, temperature))) < count:
                        gaps[method, name, temperature] = (
                            f"{method} has {have} of {count} answers on {name} at temperature {temperature:g}")
    return [text for group, text in sorted(gaps.items())]


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def save(path: Path, columns: Sequence[str], rows: Sequence[Row]) -> None:
    """A CSV file; what was not measured is an empty cell."""
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_cell(row[column]) for column in columns])
    write(path, table.getvalue(), ROOM)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return "" if value != value else f"{value:.6g}"
    return str(value)
