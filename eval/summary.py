"""The summary: what a results folder holds, as rows of figures, and what is missing in it.

It knows nothing about how answers were made, or how figures are shown. It works on what is there.
"""
from __future__ import annotations

import csv
import io
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, Mapping, Sequence

from config.files import ROOM, fits, lines, whole, write
from config.methods import METHODS
from config.questions import load
from eval import metrics
from eval.metrics import Answer, Interval, Utilization
from eval.results import read_answers
from pipeline.trace import rank_files

BASELINES = ("naive", "ar")  # what methods are compared with
MEAN = "mean"
NONE = "–"  # in a cell of a table that people read
SETS = ("mt_bench", "humaneval", "gsm8k", "alpaca", "sum", "qa")  # in the order of the papers
ACTIVITIES = ("computed", "waited", "idle", "other")  # what a rank's time is spent with
BOUNDS = ("", "_low", "_high")  # ends of the columns of a value and its interval
GROUP = ("method", "set", "temperature")
SPEED_UPS = tuple(f"sr_{baseline}{bound}" for baseline in BASELINES for bound in BOUNDS)
TIMES = (*ACTIVITIES, "late")
SUMMARY = (*GROUP, "n", "xi", "xi_low", "xi_high", *SPEED_UPS,
           "tau", "ttft", "tpt_p50", "tpt_p99", "equal", *TIMES, "emulated", "profile")
STAGES = (*GROUP, "rank", *TIMES, "bytes", "control", "rows", "emulated", "profile")
DELETE = "delete this line"
GONE = "delete it, or put it back; without it the report cannot say what is missing"
Row = dict  # one line of a table
Group = tuple  # method, set, temperature


def _temperatures(value: Any) -> bool:
    """Whether a value is a text of numbers with commas between."""
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
    groups: Mapping[Group, Sequence[Answer]]
    env: Mapping[str, Any]
    tally: Sequence[metrics.TallyLine]

    @property
    def methods(self) -> list[str]:
        """The methods that have answers, in the order in which they were asked for."""
        starts = self.env.get("starts", ())
        asked = dict.fromkeys(name for start in starts for name in _words(start["methods"]))
        return _ordered({method for method, _, _ in self.groups}, [*asked, *METHODS])

    @property
    def sets(self) -> list[str]:
        """The data sets that have answers, in the order of the papers."""
        return _ordered({name for _, name, _ in self.groups}, SETS)

    @property
    def temperatures(self) -> list[float]:
        """The temperatures that have answers, rising."""
        return sorted({temperature for _, _, temperature in self.groups})

    @property
    def answers(self) -> list[Answer]:
        """All answers, group by group."""
        return [answer for group in self.groups.values() for answer in group]

    @property
    def provenance(self) -> str:
        """Where the figures come from, as every table and plot has to say."""
        return provenance(self.answers)

    def of(self, method: str, name: str, temperature: float) -> Sequence[Answer]:
        """The answers of a method to the data set `name` at a temperature; none if it was not asked."""
        return self.groups.get((method, name, temperature), ())

    def of_all_sets(self, method: str, temperature: float) -> list[Answer]:
        """The answers of a method to all data sets at a temperature."""
        return [answer for name in self.sets for answer in self.of(method, name, temperature)]


class NoAnswers(ValueError):
    """There is nothing to report yet."""


def provenance(answers: Sequence[Answer]) -> str:
    """Whether answers were measured, emulated or simulated, and on which cluster."""
    kinds = sorted({_kind(answer) for answer in answers})
    profiles = sorted({answer["profile"] for answer in answers} - {"none"})
    cluster = f", profile {', '.join(profiles)}" if profiles else ""
    return " and ".join(kinds) + cluster


def _kind(answer: Answer) -> str:
    if answer.get("simulated"):
        return "simulated"
    return "emulated" if answer["emulated"] else "measured"


def read(folder: str | Path) -> Found:
    """Read a results folder. Raises NoAnswers if it has none, and another ValueError for a line that is spoiled."""
    folder = Path(folder)
    groups: dict[Group, list[Answer]] = {}
    for path in sorted(folder.glob("answers/*/*.jsonl")):
        for answer in read_answers(path):
            group = tuple(answer[key] for key in GROUP)
            groups.setdefault(group, []).append(answer)
    if not groups:
        raise NoAnswers(f"{folder} has no answers: make some with bash run_eval.sh results={folder}")
    tally = []
    for start in sorted(folder.glob("tally/*")):
        for path in rank_files(start):
            tally += [{**line, "launch": start.name} for line in _tally_lines(path)]
    return Found(folder, groups, _environment(folder / "env.json"), tally)


def _environment(path: Path) -> dict[str, Any]:
    """What env.json says; nothing if it is not there. Raises ValueError if no evaluation wrote it."""
    if not path.is_file():
        return {}
    env: dict[str, Any] = whole(path, GONE)
    empty: dict[str, Any] = {"starts": [], "config": {}, "machine": {}}
    if not isinstance(env, dict) or not fits({**empty, **env}, ENVIRONMENT):
        raise ValueError(f"{path} is not what an evaluation writes: {GONE}")
    return env


def _tally_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a file that somebody may still be writing. Raises ValueError for one of another form."""
    for number, entry in lines(path, DELETE, growing=True):
        if not fits(entry, metrics.TALLY_LINE):
            raise ValueError(f"line {number} of {path} is not what an evaluation writes: {DELETE}")
        yield entry


def _ordered(names: set[str], known: Sequence[str]) -> list[str]:
    """Names that are known in their order, then the others by the alphabet."""
    first = dict.fromkeys(name for name in known if name in names)
    return [*first, *sorted(names - set(known))]


def summary(found: Found) -> list[Row]:
    """The rows of summary.csv, one for each method, set and temperature that has answers."""
    rows = []
    for temperature in found.temperatures:
        for name in found.sets:
            for method in found.methods:
                if found.of(method, name, temperature):
                    rows.append(_row(found, (method, name, temperature)))
    return rows


def _row(found: Found, group: Group) -> Row:
    _, name, temperature = group
    answers = found.of(*group)
    assert answers, f"a row for {group}, which has no answers"
    row = dict(zip(GROUP, group), n=len(answers), profile=answers[0]["profile"])
    row["emulated"] = any(answer["emulated"] for answer in answers)
    row["equal"] = metrics.equality(answers, found.of("ar", name, temperature))
    row["tau"] = metrics.acceptance_length(answers)
    row["ttft"] = metrics.time_to_first_token(answers)
    row["tpt_p50"] = metrics.time_per_token(answers, 0.5)
    row["tpt_p99"] = metrics.time_per_token(answers, 0.99)
    row.update(_bounds("xi", metrics.speed([metrics.sample(answers)])))
    for baseline in BASELINES:
        pairs = metrics.paired(answers, found.of(baseline, name, temperature))
        row.update(_bounds(f"sr_{baseline}", metrics.speed_up([pairs])))
    stages = [used for rank, used in utilization(found, answers).items() if rank]
    for key in TIMES:
        values = [getattr(used, key) for used in stages]
        row[key] = sum(values) / len(values) if values else metrics.NAN
    return row


def _bounds(name: str, interval: Interval) -> dict[str, float]:
    return {f"{name}{bound}": value for bound, value in zip(BOUNDS, interval)}


def utilization(found: Found, answers: Sequence[Answer]) -> dict[int, Utilization]:
    """The utilization of each rank while these answers were made."""
    kept = {(answer["launch"], request) for answer in answers for request in answer["requests"]}
    return metrics.utilization(found.tally, kept)


def stages(found: Found) -> list[Row]:
    """The rows of stages.csv, one for each method, set, temperature and rank; bytes and rows are per request."""
    rows = []
    for group, answers in found.groups.items():
        origin = {key: answers[0][key] for key in ("emulated", "profile")}
        for rank, used in utilization(found, answers).items():
            row = {**dict(zip(GROUP, group)), "rank": rank}
            rows.append({**row, **used._asdict(), **origin})
    return rows


def means(found: Found, method: str, temperature: float) -> dict[str, Interval]:
    """The xi and the speed-ups of a method over all sets; a speed-up over those sets that both methods have."""
    every = {name: found.of(method, name, temperature) for name in found.sets}
    samples = [metrics.sample(answers) for answers in every.values()]
    result = {"xi": metrics.speed(samples)}
    for baseline in BASELINES:
        pairs = []
        for name, answers in every.items():
            pairs.append(metrics.paired(answers, found.of(baseline, name, temperature)))
        result[f"sr_{baseline}"] = metrics.speed_up(pairs)
    return result


def missing(found: Found) -> list[str]:
    """What was asked for and is not there yet, a sentence for each method, set and temperature."""
    gaps = {}
    for start in found.env.get("starts", ()):
        temperatures = [float(word) for word in _words(start["temperatures"])]
        for name in _words(start["sets"]):
            wanted = _wanted(found, name, start)
            for group in itertools.product(_words(start["methods"]), [name], temperatures):
                there = len(found.of(*group))
                if there < wanted:
                    gaps[group] = f"{group[0]} has {there} of {wanted} answers on {name} at temperature {group[2]:g}"
    return [text for _, text in sorted(gaps.items())]


def _wanted(found: Found, name: str, start: Mapping[str, Any]) -> int:
    """How many answers to a data set each method was asked for; where the set is gone, the most that one has given."""
    try:
        data = found.env["config"]["data"]
        questions = load(data, name, start["question_begin"], start["question_end"])
        return len(questions) * int(start["repeats"])
    except (ValueError, KeyError):
        groups = [group for group in found.groups if group[1] == name]
        return max((len(found.of(*group)) for group in groups), default=0)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def save(path: Path, columns: Sequence[str], rows: Sequence[Row]) -> None:
    """Write a CSV file; what was not measured is an empty cell."""
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


def number(value: float, digits: int = 2) -> str:
    """A figure as it stands in a table; what was not measured (NaN) is a dash."""
    return NONE if value != value else f"{value:.{digits}f}"
