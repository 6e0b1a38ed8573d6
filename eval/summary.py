"""The summary: what a results folder holds, as rows of figures.

It knows nothing about how answers were made, or how figures are shown.
"""
from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any, NamedTuple, Sequence

from config.files import ROOM, write
from eval import metrics
from eval.keys import Contender
from eval.metrics import Answer, Interval, Utilization
from eval.observe.time_breakdown import Account, account
from eval.results_index import GROUP, Found

BASELINES = ("naive", "ar")  # what the first table and the plots compare with, if it is there
MEAN = "mean"
NONE = "–"  # in a cell of a table that people read
ACTIVITIES = ("computed", "waited", "idle", "other")  # what a rank's time is spent with
BOUNDS = ("", "_low", "_high")  # ends of the columns of a value and its interval


class Ratio(NamedTuple):
    """A speed-up: its column, the method that is its baseline, and that one's draft: of the baseline, the same, none.

    The draft of the baseline is the one whose `naive` all are compared with: a head of the paper's kind.
    """

    column: str
    method: str
    draft: str


RATIOS = (Ratio("sr_naive", "naive", "baseline"), Ratio("sr_naive_same", "naive", "same"),
          Ratio("sr_serial_same", "serial", "same"), Ratio("sr_ar", "ar", "none"))
SPEEDS = ("xi", "xi_decoding", *(ratio.column for ratio in RATIOS))  # figures that have bounds
TIMES = (*ACTIVITIES, "late")
SUMMARY = (*GROUP, "n", *(f"{name}{bound}" for name in SPEEDS for bound in BOUNDS),
           "tau", "ttft", "request_mean", "request_p95", "tpt_p50", "tpt_p99", "total", "equal", *TIMES,
           "emulated", "profile")
STAGES = (*GROUP, "rank", *TIMES, "bytes", "control", "rows", "emulated", "profile")
ACCOUNT = (*GROUP, *Account._fields, "whole", "emulated", "profile")
AR = Contender("ar", "none")
Row = dict  # one line of a table


def baseline(found: Found, ratio: Ratio, draft: str) -> Contender:
    """What a contender with this draft is compared with."""
    drafts = {"baseline": found.baseline_draft, "same": draft, "none": "none"}
    return Contender(ratio.method, drafts[ratio.draft])


def ratios(found: Found) -> list[Ratio]:
    """The speed-ups whose baseline has answers."""
    there = found.contenders
    return [ratio for ratio in RATIOS if any(baseline(found, ratio, own.draft) in there for own in there)]


def summary(found: Found) -> list[Row]:
    """The rows of summary.csv, one for each method, draft, set and temperature that has answers."""
    rows = []
    for temperature in found.temperatures:
        for name in found.sets:
            for contender in found.contenders:
                if found.of(contender, name, temperature):
                    rows.append(_row(found, contender, name, temperature))
    return rows


def _row(found: Found, contender: Contender, name: str, temperature: float) -> Row:
    answers = found.of(contender, name, temperature)
    assert answers, f"a row for {contender} on {name}, which has no answers"
    row = dict(zip(GROUP, (*contender, name, temperature)), n=len(answers), profile=answers[0]["profile"])
    row["emulated"] = any(answer["emulated"] for answer in answers)
    row["equal"] = metrics.equality(answers, found.of(AR, name, temperature))
    row["total"] = metrics.total_speed(answers)
    row["tau"] = metrics.acceptance_length(answers)
    row["ttft"] = metrics.time_to_first_token(answers)
    row["request_mean"] = metrics.request_time(answers)
    row["request_p95"] = metrics.request_time_quantile(answers, 0.95)
    row["tpt_p50"] = metrics.time_per_token(answers, 0.5)
    row["tpt_p99"] = metrics.time_per_token(answers, 0.99)
    for column, interval in _speeds(found, contender, [name], temperature).items():
        row.update(_bounds(column, interval))
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


def accounts(found: Found) -> list[Row]:
    """The rows of account.csv, one for each method, draft, set and temperature; seconds per token, and counts."""
    rows = []
    for group, answers in found.groups.items():
        seen = account(found.tally, answers)
        if seen:
            origin = {key: answers[0][key] for key in ("emulated", "profile")}
            rows.append({**dict(zip(GROUP, group)), **seen._asdict(), "whole": seen.whole, **origin})
    return rows


def accounts_of_all_sets(found: Found, temperature: float) -> dict[str, Account]:
    """The account of each contender, all sets together, by its label; of those whose tally has flights."""
    seen = {}
    for contender in found.contenders:
        own = account(found.tally, found.of_all_sets(contender, temperature))
        if own:
            seen[found.label(contender)] = own
    return seen


def means(found: Found, contender: Contender, temperature: float) -> dict[str, Interval]:
    """The speeds and speed-ups of a contender over all sets; a speed-up over those sets that both have answered."""
    return _speeds(found, contender, found.sets, temperature)


def _speeds(found: Found, contender: Contender, sets: Sequence[str], temperature: float) -> dict[str, Interval]:
    """The figures that have bounds, over these sets."""
    every = [found.of(contender, name, temperature) for name in sets]
    result = {"xi": metrics.speed([metrics.sample(answers) for answers in every]),
              "xi_decoding": metrics.decoding_speed(every)}
    for ratio in RATIOS:
        other = baseline(found, ratio, contender.draft)
        others = [found.of(other, name, temperature) for name in sets]
        result[ratio.column] = metrics.speed_up([metrics.paired(*both) for both in zip(every, others)])
    return result


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
