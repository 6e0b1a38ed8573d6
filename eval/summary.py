"""The summary: the answers of a results folder as rows of figures."""
from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, Callable, Mapping, NamedTuple, Sequence, TypeVar

from eval import metrics
from eval.keys import Contender
from eval.metrics import Answer
from eval.observe.time_breakdown import Account, account, utilization
from eval.results_index import GROUP, Group, ResultsFolder, provenance
from eval.tables import save

BASELINES = ("naive", "ar")  # for the first table and the plots: the first that has answers
MEAN = "mean"  # in place of a set: all sets
ACTIVITIES = ("computed", "waited", "idle", "other")  # the parts of a rank's time
BOUNDS = ("", "_low", "_high")  # suffixes of the columns of a value and its interval


class Ratio(NamedTuple):
    """A speed-up: its column, and the method and draft of its baseline; the draft is `baseline`, `same` or `none`.

    `baseline` is the draft of the `naive` with which all are compared: a head of the paper's kind.
    """

    column: str
    method: str
    draft: str
    about: str

    def baseline(self, found: ResultsFolder, draft: str) -> Contender:
        """Return the contender with which a contender with this draft is compared."""
        drafts = {"baseline": found.baseline_draft, "same": draft, "none": "none"}
        return Contender(self.method, drafts[self.draft])


RATIOS = (
    Ratio("sr_naive", "naive", "baseline",
          "naive (Chunk-PP) with the draft that is every method's baseline (`baseline_draft`)."),
    Ratio("sr_naive_same", "naive", "same",
          "naive (Chunk-PP) with the draft of the row: the gain of the method alone."),
    Ratio("sr_serial_same", "serial", "same",
          "serial with the draft of the row: the gain of keeping the stages busy."),
    Ratio("sr_ar", "ar", "none", "ar, which has no draft."))
SPEEDS = ("xi", "xi_decoding", *(ratio.column for ratio in RATIOS))  # figures that have bounds
TIMES = (*ACTIVITIES, "late")
ORIGIN = ("emulated", "profile")
POSITIONS = 8  # number of positions after the first token of a verification, for which acceptance is shown
SUMMARY = (*GROUP, "n", *(f"{name}{bound}" for name in SPEEDS for bound in BOUNDS),
           "accepted_length", "tokens_per_miss", "by_position", "ttft", "request_mean",
           "request_p95", "tpt_p50", "tpt_p99", "total", "equal", "divergence", *TIMES, *ORIGIN)
STAGES = (*GROUP, "rank", *TIMES, "bytes", "control", "rows", *ORIGIN)
ACCOUNT = (*GROUP, *Account._fields, "whole", *ORIGIN)
AR = Contender("ar", "none")
Row = Mapping[str, Any]  # figures by their names; those of SPEEDS are intervals
T = TypeVar("T")


def figures(found: ResultsFolder, contender: Contender, sets: Sequence[str], temperature: float) -> Row:
    """Return a contender's figures over these sets, with its answers; a speed-up is over trials of both contenders."""
    def of_sets(other: Contender) -> list[Sequence[Answer]]:
        return [found.of(other, name, temperature) for name in sets]

    every = of_sets(contender)
    answers = list(itertools.chain(*every))
    used = utilization(found.tally, answers)
    row = {"answers": answers, "n": len(answers),
           "ranks": used, "account": account(found.tally, answers)}
    row["xi"] = metrics.speed([metrics.sample(answers) for answers in every])
    row["xi_decoding"] = metrics.decoding_speed(every)
    for ratio in RATIOS:
        other = ratio.baseline(found, contender.draft)
        samples = itertools.starmap(metrics.paired, zip(every, of_sets(other)))
        row[ratio.column] = metrics.speed_up(list(samples))
    requests, tokens = metrics.request_times(answers), metrics.token_times(answers)
    row["accepted_length"] = metrics.accepted_length(answers)
    row["tokens_per_miss"] = metrics.tokens_per_miss(answers)
    rates = metrics.acceptance_by_position(answers)[:POSITIONS]
    row["by_position"] = ", ".join(f"{rate:.3f}" for rate in rates)
    row["ttft"] = metrics.mean(metrics.first_token_times(answers))
    row["request_mean"] = metrics.mean(requests)
    row["request_p95"] = metrics.quantile(requests, 0.95)
    row["tpt_p50"] = metrics.quantile(tokens, 0.5)
    row["tpt_p99"] = metrics.quantile(tokens, 0.99)
    row["total"] = metrics.total_speed(answers)
    row["equal"] = metrics.equality(answers, itertools.chain(*of_sets(AR)))
    row["divergence"] = metrics.lossy_divergence(answers)
    for key in TIMES:
        of_stages = [getattr(own, key) for rank, own in used.items() if rank]
        row[key] = metrics.mean(of_stages)
    return row


def summary(found: ResultsFolder) -> dict[Group, Row]:
    """Return the figures of each method, draft, set and temperature that has answers."""
    rows: dict[Group, Row] = {}
    for temperature, name, contender in itertools.product(found.temperatures, found.sets, found.contenders):
        group = (*contender, name, temperature)
        if group in found.groups:
            rows[group] = _identified(group, figures(found, contender, [name], temperature))
    return rows


def _identified(group: Group, row: Row) -> Row:
    """Return figures with the columns that say whose they are, and where they come from."""
    origin = {"emulated": any(answer["emulated"] for answer in row["answers"]),
              "profile": row["answers"][0]["profile"]}
    return {**dict(zip(GROUP, group)), **row, **origin}


def flat(row: Row) -> Row:
    """Return a row with columns for the bounds of its intervals."""
    bounds = (zip(BOUNDS, row[name]) for name in SPEEDS)
    named = zip(SPEEDS, bounds)
    return {**row, **{f"{name}{bound}": value for name, pairs in named for bound, value in pairs}}


def save_tables(folder: Path, rows: Sequence[Row]) -> None:
    """Write summary.csv; stages.csv, with bytes and rows per request; and account.csv, with seconds per token."""
    stages, accounts = [], []
    for row in rows:
        stages += [{**row, "rank": rank, **used._asdict()}
                   for rank, used in row["ranks"].items()]
        if own := row["account"]:
            accounts.append({**row, **own._asdict(), "whole": own.whole})
    save(folder / "summary.csv", SUMMARY, map(flat, rows))
    save(folder / "stages.csv", STAGES, stages)
    save(folder / "account.csv", ACCOUNT, accounts)


class TemperatureView:
    """The figures at one temperature, by the label of a contender, then by data set, or MEAN for all sets."""

    def __init__(self, found: ResultsFolder, rows: Mapping[Group, Row], temperature: float) -> None:
        self.found, self.temperature = found, temperature
        own_answers = [answer for answer in found.answers if answer["temperature"] == temperature]
        self.where = f"({provenance(own_answers)})"  # at the end of every title
        self.rows: dict[str, dict[str, Row]] = {}
        for contender in found.contenders:
            groups = {name: (*contender, name, temperature) for name in found.sets}
            own = {name: rows[group] for name, group in groups.items() if group in rows}
            means = figures(found, contender, found.sets, temperature)
            own[MEAN] = _identified((*contender, MEAN, temperature), means) if means["answers"] else means
            self.rows[found.label(contender)] = own

    def means(self, name: str) -> dict[str, Any]:
        """Return this figure over all sets, for the contenders that have it."""
        return {label: own[MEAN][name]
                for label, own in self.rows.items() if own[MEAN][name]}

    def cells(self, label: str, value: Callable[[Row], T],
              otherwise: T) -> list[T]:
        """Return `value` of the contender's figures for each data set, or `otherwise` without figures."""
        own = self.rows[label]
        return [value(own[name]) if name in own else otherwise for name in self.found.sets]
