"""The summary: what a results folder holds, as rows of figures."""
from __future__ import annotations

import itertools
from typing import Any, Callable, NamedTuple, Sequence, TypeVar

from eval import metrics
from eval.keys import Contender
from eval.metrics import Answer, Interval
from eval.observe.time_breakdown import Account, Utilization, account, utilization
from eval.results_index import GROUP, Found

BASELINES = ("naive", "ar")  # what the first table and the plots compare with, if it is there
MEAN = "mean"
ACTIVITIES = ("computed", "waited", "idle", "other")  # what a rank's time is spent with
BOUNDS = ("", "_low", "_high")  # ends of the columns of a value and its interval


class Ratio(NamedTuple):
    """A speed-up: its column, the method that is its baseline, and that one's draft: of the baseline, the same, none.

    The draft of the baseline is the one whose `naive` all are compared with: a head of the paper's kind.
    """

    column: str
    method: str
    draft: str
    about: str


RATIOS = (
    Ratio("sr_naive", "naive", "baseline",
          "naive (Chunk-PP) with the draft that is every method's baseline (`baseline_draft`)."),
    Ratio("sr_naive_same", "naive", "same",
          "naive (Chunk-PP) with the draft of the row: what the method alone brings."),
    Ratio("sr_serial_same", "serial", "same",
          "serial with the draft of the row: what keeping the stages busy brings."),
    Ratio("sr_ar", "ar", "none", "ar, which has no draft."))
SPEEDS = ("xi", "xi_decoding", *(ratio.column for ratio in RATIOS))  # figures that have bounds
TIMES = (*ACTIVITIES, "late")
ORIGIN = ("emulated", "profile")
POSITIONS = 8  # behind the first token of a target pass, whose acceptance is shown
SUMMARY = (*GROUP, "n", *(f"{name}{bound}" for name in SPEEDS for bound in BOUNDS),
           "tau", "by_position", "ttft", "request_mean",
           "request_p95", "tpt_p50", "tpt_p99", "total", "equal", *TIMES, *ORIGIN)
STAGES = (*GROUP, "rank", *TIMES, "bytes", "control", "rows", *ORIGIN)
ACCOUNT = (*GROUP, *Account._fields, "whole", *ORIGIN)
AR = Contender("ar", "none")
Row = dict  # one line of a table
T = TypeVar("T")


def baseline(found: Found, ratio: Ratio, draft: str) -> Contender:
    """What a contender with this draft is compared with."""
    drafts = {"baseline": found.baseline_draft, "same": draft, "none": "none"}
    return Contender(ratio.method, drafts[ratio.draft])


def ratios(found: Found) -> list[Ratio]:
    """The speed-ups whose baseline has answers."""
    there = found.contenders
    return [ratio for ratio in RATIOS
            if any(baseline(found, ratio, own.draft) in there for own in there)]


def summary(found: Found) -> list[Row]:
    """The rows of summary.csv, one for each method, draft, set and temperature that has answers."""
    every = itertools.product(found.temperatures, found.sets, found.contenders)
    return [_row(found, contender, name, temperature) for temperature, name, contender in every
            if found.of(contender, name, temperature)]


def _row(found: Found, contender: Contender, name: str, temperature: float) -> Row:
    answers = found.of(contender, name, temperature)
    requests, tokens = metrics.request_times(answers), metrics.token_times(answers)
    row = {**_head((*contender, name, temperature), answers), "n": len(answers)}
    row["emulated"] = any(answer["emulated"] for answer in answers)
    row["equal"] = metrics.equality(answers, found.of(AR, name, temperature))
    row["total"] = metrics.total_speed(answers)
    row["tau"] = metrics.acceptance_length(answers)
    rates = metrics.acceptance_by_position(answers)[:POSITIONS]
    row["by_position"] = ", ".join(f"{rate:.3f}" for rate in rates)
    row["ttft"] = metrics.mean(metrics.first_token_times(answers))
    row["request_mean"] = metrics.mean(requests)
    row["request_p95"] = metrics.quantile(requests, 0.95)
    row["tpt_p50"] = metrics.quantile(tokens, 0.5)
    row["tpt_p99"] = metrics.quantile(tokens, 0.99)
    for column, interval in speeds(found, contender, [name], temperature).items():
        row.update((f"{column}{bound}", value) for bound, value in zip(BOUNDS, interval))
    stages = [used for rank, used in utilization(found.tally, answers).items() if rank]
    for key in TIMES:
        row[key] = metrics.mean([getattr(used, key) for used in stages])
    return row


def stages(found: Found) -> list[Row]:
    """The rows of stages.csv, one for each method, set, temperature and rank; bytes and rows are per request."""
    return [{**_head(group, answers), "rank": rank, **used._asdict()}
            for group, answers in found.groups.items()
            for rank, used in utilization(found.tally, answers).items()]


def accounts(found: Found) -> list[Row]:
    """The rows of account.csv, one for each method, draft, set and temperature; seconds per token, and counts."""
    return [{**_head(group, answers), **own._asdict(), "whole": own.whole}
            for group, answers in found.groups.items() if (own := account(found.tally, answers))]


def _head(group: Sequence[Any], answers: Sequence[Answer]) -> Row:
    """Whose answers these are, and where they were made."""
    origin = {key: answers[0][key] for key in ORIGIN}
    return {**dict(zip(GROUP, group)), **origin}


def speeds(found: Found, contender: Contender, sets: Sequence[str], temperature: float) -> dict[str, Interval]:
    """The speeds and speed-ups of a contender over these sets; a speed-up over those that both have answered."""
    every = [found.of(contender, name, temperature) for name in sets]
    result = {"xi": metrics.speed([metrics.sample(answers) for answers in every]),
              "xi_decoding": metrics.decoding_speed(every)}
    for ratio in RATIOS:
        other = baseline(found, ratio, contender.draft)
        others = [found.of(other, name, temperature) for name in sets]
        result[ratio.column] = metrics.speed_up([metrics.paired(*both) for both in zip(every, others)])
    return result


class View:
    """What there is at one temperature, all data sets together; figures are by the label of a contender."""

    def __init__(self, found: Found, rows: Sequence[Row], temperature: float) -> None:
        self.found, self.temperature = found, temperature
        self.rows = [row for row in rows if row["temperature"] == temperature]
        self.where = f"({found.provenance})"  # at the end of every title
        self.labels = {found.label(contender): contender for contender in found.contenders}
        self.answers: dict[str, list[Answer]] = {}
        self.means: dict[str, dict[str, Interval]] = {}
        self.ranks: dict[str, dict[int, Utilization]] = {}  # of those that the tally knows
        self.accounts: dict[str, Account] = {}  # of those whose tally has flights
        for label, contender in self.labels.items():
            by_set = (found.of(contender, name, temperature) for name in found.sets)
            self.answers[label] = answers = list(itertools.chain.from_iterable(by_set))
            self.means[label] = speeds(found, contender, found.sets, temperature)
            if used := utilization(found.tally, answers):
                self.ranks[label] = used
            if spent := account(found.tally, answers):
                self.accounts[label] = spent

    def cells(self, label: str, value: Callable[[Row], T], otherwise: T) -> list[T]:
        """For each data set what `value` makes of the contender's row of the summary."""
        found = {row["set"]: value(row) for row in self.rows
                 if (row["method"], row["draft"]) == self.labels[label]}
        return [found.get(name, otherwise) for name in self.found.sets]
