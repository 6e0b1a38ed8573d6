"""The summary: what a results folder holds, as rows of figures."""
from __future__ import annotations

from typing import Any, Callable, NamedTuple, Sequence, TypeVar

from eval import metrics
from eval.keys import Contender
from eval.metrics import Answer, Interval
from eval.observe.time_breakdown import Account, account, utilization
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


RATIOS = (Ratio("sr_naive", "naive", "baseline"), Ratio("sr_naive_same", "naive", "same"),
          Ratio("sr_serial_same", "serial", "same"), Ratio("sr_ar", "ar", "none"))
SPEEDS = ("xi", "xi_decoding", *(ratio.column for ratio in RATIOS))  # figures that have bounds
TIMES = (*ACTIVITIES, "late")
ORIGIN = ("emulated", "profile")
SUMMARY = (*GROUP, "n", *(f"{name}{bound}" for name in SPEEDS for bound in BOUNDS),
           "tau", "ttft", "request_mean", "request_p95", "tpt_p50", "tpt_p99", "total", "equal", *TIMES, *ORIGIN)
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
    return [_row(found, contender, name, temperature) for temperature in found.temperatures for name in found.sets
            for contender in found.contenders if found.of(contender, name, temperature)]


def _row(found: Found, contender: Contender, name: str, temperature: float) -> Row:
    answers = found.of(contender, name, temperature)
    requests, tokens = metrics.request_times(answers), metrics.token_times(answers)
    row = dict(zip(GROUP, (*contender, name, temperature)),
               n=len(answers), profile=answers[0]["profile"])
    row["emulated"] = any(answer["emulated"] for answer in answers)
    row["equal"] = metrics.equality(answers, found.of(AR, name, temperature))
    row["total"] = metrics.total_speed(answers)
    row["tau"] = metrics.acceptance_length(answers)
    row["ttft"] = metrics.mean(metrics.first_token_times(answers))
    row["request_mean"] = metrics.mean(requests)
    row["request_p95"] = metrics.quantile(requests, 0.95)
    row["tpt_p50"] = metrics.quantile(tokens, 0.5)
    row["tpt_p99"] = metrics.quantile(tokens, 0.99)
    for column, interval in _speeds(found, contender, [name], temperature).items():
        row.update((f"{column}{bound}", value) for bound, value in zip(BOUNDS, interval))
    stages = [used for rank, used in utilization(found.tally, answers).items() if rank]
    row.update((key, metrics.mean([getattr(used, key) for used in stages]))
               for key in TIMES)
    return row


def stages(found: Found) -> list[Row]:
    """The rows of stages.csv, one for each method, set, temperature and rank; bytes and rows are per request."""
    return [{**_head(group, answers), "rank": rank, **used._asdict()}
            for group, answers in found.groups.items()
            for rank, used in utilization(found.tally, answers).items()]


def accounts(found: Found) -> list[Row]:
    """The rows of account.csv, one for each method, draft, set and temperature; seconds per token, and counts."""
    seen = ((_head(group, answers), account(found.tally, answers))
            for group, answers in found.groups.items())
    return [{**head, **own._asdict(), "whole": own.whole}
            for head, own in seen if own]


def _head(group: Sequence[Any], answers: Sequence[Answer]) -> Row:
    origin = {key: answers[0][key] for key in ORIGIN}
    return {**dict(zip(GROUP, group)), **origin}


class View:
    """What there is at one temperature, all data sets together; figures are by the label of a contender."""

    def __init__(self, found: Found, rows: Sequence[Row], temperature: float) -> None:
        self.found, self.temperature = found, temperature
        self.rows = [row for row in rows if row["temperature"] == temperature]
        self.where = f"({found.provenance})"  # at the end of every title
        self.labels = {found.label(contender): contender for contender in found.contenders}
        self.answers = {label: found.of_all_sets(one, temperature)
                        for label, one in self.labels.items()}
        self.means = {label: _speeds(found, one, found.sets, temperature)
                      for label, one in self.labels.items()}
        ranks = {label: utilization(found.tally, answers)
                 for label, answers in self.answers.items()}
        self.ranks = {label: own for label, own in ranks.items() if own}  # of those that the tally knows
        spent = {label: account(found.tally, answers)
                 for label, answers in self.answers.items()}
        self.accounts = {label: own for label, own in spent.items() if own}  # of those whose tally has flights

    def cells(self, label: str, value: Callable[[Row], T],
              otherwise: T) -> list[T]:
        """For each data set what `value` makes of the contender's row of the summary."""
        found = {row["set"]: value(row) for row in self.rows
                 if (row["method"], row["draft"]) == self.labels[label]}
        return [found.get(name, otherwise) for name in self.found.sets]


def views(found: Found, rows: Sequence[Row]) -> list[View]:
    """The view of each temperature, out of the rows of the summary."""
    return [View(found, rows, temperature) for temperature in found.temperatures]


def means(found: Found, contender: Contender, temperature: float) -> dict[str, Interval]:
    """The speeds and speed-ups of a contender over all sets; a speed-up over those sets that both have answered."""
    return _speeds(found, contender, found.sets, temperature)


def _speeds(found: Found, contender: Contender, sets: Sequence[str],
            temperature: float) -> dict[str, Interval]:
    """The figures that have bounds, over these sets."""
    every = [found.of(contender, name, temperature) for name in sets]
    result = {"xi": metrics.speed([metrics.sample(answers) for answers in every]),
              "xi_decoding": metrics.decoding_speed(every)}
    for ratio in RATIOS:
        other = baseline(found, ratio, contender.draft)
        others = [found.of(other, name, temperature) for name in sets]
        pairs = [metrics.paired(*both) for both in zip(every, others)]
        result[ratio.column] = metrics.speed_up(pairs)
    return result
