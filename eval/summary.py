"""The summary: the answers of a results folder as rows of figures."""
from __future__ import annotations

import itertools
from operator import itemgetter
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, NamedTuple, Sequence, TypeVar

import numpy as np

from eval import metrics
from eval.keys import Contender
from eval.metrics import AnswerRecord
from eval.observe.time_breakdown import Account, account, utilization
from eval.raw_answers import text_hash
from eval.results_index import GROUP, GroupKey, ResultsFolder, provenance
from eval.tables import save

MEAN = "mean"  # in place of a set: all averaged sets
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

    def baseline(self, results: ResultsFolder, draft: str) -> Contender:
        """Return the contender with which a contender with this draft is compared."""
        drafts = {"baseline": results.baseline_draft, "same": draft, "none": "none"}
        return Contender(self.method, drafts[self.draft])


RATIOS = (
    Ratio("sr_naive", "naive", "baseline",
          "naive (Chunk-PP) with the draft that is every method's baseline (`baseline_draft`)."),
    Ratio("sr_naive_same", "naive", "same",
          "naive (Chunk-PP) with the draft of the row: the gain of the method alone."),
    Ratio("sr_serial_same", "serial", "same",
          "serial with the draft of the row: the gain of keeping the stages busy."),
    Ratio("sr_ar", "ar", "none", "ar, which has no draft."))
SPEED_COLUMNS = ("xi", "xi_decoding", *(ratio.column for ratio in RATIOS))  # figures that have bounds
SEED_COLUMNS = ("xi_by_seed", "sr_naive_same_by_seed")  # a figure for each seed, if there are several
TIME_COLUMNS = (*ACTIVITIES, "late")
ORIGIN_COLUMNS = ("emulated", "profile")
NUM_POSITIONS = 8  # number of positions after the first token of a verification, for which acceptance is shown
SUMMARY = (*GROUP, "n", *(f"{name}{bound}" for name in SPEED_COLUMNS for bound in BOUNDS),
           *SEED_COLUMNS, "accepted_length", "tokens_per_miss", "by_position", "ttft", "request_mean",
           "request_p95", "tpt_p50", "tpt_p99", "total", "equal", "texts", "divergence", *TIME_COLUMNS, *ORIGIN_COLUMNS)
STAGES = (*GROUP, "rank", *TIME_COLUMNS, "bytes", "control", "rows", *ORIGIN_COLUMNS)
ACCOUNT = (*GROUP, *Account._fields, "whole", *ORIGIN_COLUMNS)
AR = Contender("ar", "none")
CHAIN = "windows"  # the method that sends nothing but the best guesses, so that its misses are theirs
AnswerSets = Sequence[Sequence[AnswerRecord]]  # the answers to each set
SummaryRow = Mapping[str, Any]  # figures by their names; those of SPEED_COLUMNS are intervals
T = TypeVar("T")


def figures(results: ResultsFolder, contender: Contender, sets: Sequence[str], temperature: float) -> SummaryRow:
    """Return a contender's figures over these sets, with its answers; a speed-up is over trials of both contenders."""
    def of_sets(other: Contender) -> list[Sequence[AnswerRecord]]:
        return [results.of(other, name, temperature) for name in sets]

    answers_by_set = of_sets(contender)
    answers = list(itertools.chain(*answers_by_set))
    used_by_rank = utilization(results.tally, answers)
    used_by_stages = [used for rank, used in used_by_rank.items() if rank]

    speed_figures = {
        "xi": metrics.speed([metrics.sample(answers) for answers in answers_by_set]),
        "xi_decoding": metrics.decoding_speed(answers_by_set),
        "total": metrics.total_speed(answers)}
    baselines = {ratio.column: of_sets(ratio.baseline(results, contender.draft)) for ratio in RATIOS}
    for column, baseline_answers in baselines.items():
        speed_figures[column] = metrics.speed_up(list(map(metrics.paired, answers_by_set, baseline_answers)))

    acceptance_rates = metrics.acceptance_by_position(answers)[:NUM_POSITIONS]
    length_figures = {
        "accepted_length": metrics.accepted_length(answers),
        "tokens_per_miss": metrics.tokens_per_miss(answers),
        "by_position": ", ".join(f"{rate:.3f}" for rate in acceptance_rates)}

    request_seconds, token_seconds = metrics.request_times(answers), metrics.token_times(answers)
    time_figures = {
        "ttft": metrics.mean(metrics.first_token_times(answers)),
        "request_mean": metrics.mean(request_seconds), "request_p95": metrics.quantile(request_seconds, 0.95),
        "tpt_p50": metrics.quantile(token_seconds, 0.5), "tpt_p99": metrics.quantile(token_seconds, 0.99),
        **{column: metrics.mean([getattr(used, column) for used in used_by_stages]) for column in TIME_COLUMNS}}

    text_figures = {
        "texts": text_hash(answers),
        "equal": metrics.equality(answers, itertools.chain(*of_sets(AR))),
        "divergence": metrics.lossy_divergence(answers)}
    return {"answers": answers, "n": len(answers), "ranks": used_by_rank, "account": account(results.tally, answers),
            **speed_figures, **_seed_figures(answers_by_set, baselines["sr_naive_same"]),
            **length_figures, **time_figures, **text_figures}


def _seed_figures(answers_by_set: AnswerSets, naive_answers: AnswerSets) -> dict[str, str]:
    """Return the speed, and its ratio to `naive` with the same draft, for each seed in ascending order; a column is
    empty if there is one seed, or no answer of `naive`."""
    seeds = sorted({answer["seed"] for answer in itertools.chain(*answers_by_set)})
    if len(seeds) < 2:
        return dict.fromkeys(SEED_COLUMNS, "")

    speeds, speed_ups = [], []
    for seed in seeds:
        sets_of_seed = [[answer for answer in answers if answer["seed"] == seed] for answers in answers_by_set]
        speeds.append(metrics.speed(list(map(metrics.sample, sets_of_seed))).value)
        speed_ups.append(metrics.speed_up(list(map(metrics.paired, sets_of_seed, naive_answers))).value)

    columns = zip(SEED_COLUMNS, (speeds, speed_ups))
    return {column: "" if np.isnan(values).any() else ", ".join(f"{value:.3f}" for value in values)
            for column, values in columns}


def summary(results: ResultsFolder) -> dict[GroupKey, SummaryRow]:
    """Return the figures of each method and draft at each temperature: for each set with answers, and their mean.

    The latter have `MEAN` in place of a set.
    """
    sets_by_name = {**{set_name: [set_name] for set_name in results.sets}, MEAN: results.averaged_sets}
    rows_by_group: dict[GroupKey, SummaryRow] = {}

    for temperature, set_name, contender in itertools.product(results.temperatures, sets_by_name, results.contenders):
        group = (*contender, set_name, temperature)
        if group in results.groups or set_name == MEAN:
            row = figures(results, contender, sets_by_name[set_name], temperature)
            origin = {"emulated": any(answer["emulated"] for answer in row["answers"]),
                      "profile": next((answer["profile"] for answer in row["answers"]), "")}
            rows_by_group[group] = {**dict(zip(GROUP, group)), **row, **origin}
    return rows_by_group


def flat(row: SummaryRow) -> SummaryRow:
    """Return a row with columns for the bounds of its intervals."""
    bound_columns = {f"{column}{bound}": value for column in SPEED_COLUMNS for bound, value in zip(BOUNDS, row[column])}
    return {**row, **bound_columns}


def save_tables(folder: Path, rows: Iterable[SummaryRow]) -> None:
    """Write summary.csv; stages.csv, with bytes and rows per request; and account.csv, with seconds per token.

    The rows over all sets are the last.
    """
    ordered_rows = sorted((row for row in rows if row["answers"]), key=lambda row: row["set"] == MEAN)
    stage_rows, account_rows = [], []
    for row in ordered_rows:
        for rank, used in row["ranks"].items():
            stage_rows.append({**row, "rank": rank, **used._asdict()})
        if token_account := row["account"]:
            account_rows.append({**row, **token_account._asdict(), "whole": token_account.whole})

    save(folder / "summary.csv", SUMMARY, map(flat, ordered_rows))
    save(folder / "stages.csv", STAGES, stage_rows)
    save(folder / "account.csv", ACCOUNT, account_rows)


class TemperatureView:
    """The figures at one temperature, by the label of a contender, then by data set, or MEAN for all sets."""

    def __init__(self, results: ResultsFolder, rows: Mapping[GroupKey, SummaryRow], temperature: float) -> None:
        self.results, self.temperature = results, temperature
        answers = [answer for answer in results.answers if answer["temperature"] == temperature]
        self.where = f"({provenance(answers)})"  # at the end of every title

        self.rows: dict[str, dict[str, SummaryRow]] = {}
        for contender in results.contenders:
            group_by_set = {set_name: (*contender, set_name, temperature) for set_name in [*results.sets, MEAN]}
            rows_by_set = {set_name: rows[group] for set_name, group in group_by_set.items() if group in rows}
            self.rows[results.label(contender)] = rows_by_set

    def means(self, figure: str) -> dict[str, Any]:
        """Return this figure over all sets, for the contenders that have it."""
        return {label: rows_by_set[MEAN][figure]
                for label, rows_by_set in self.rows.items() if rows_by_set[MEAN][figure]}

    def by_acceptance(self, set_name: str) -> list[tuple[float, dict[str, SummaryRow]]]:
        """Return, for each draft of `windows`, the share of a chain's guesses that are right, and the methods' rows.

        The smallest share is the first.
        """
        shares_and_rows = []
        for draft in self.results.drafts:
            rows = {contender.method: self.rows[self.results.label(contender)].get(set_name, {})
                    for contender in self.results.contenders if contender.draft in (draft, AR.draft)}
            if rows.get(CHAIN):
                shares_and_rows.append((metrics.acceptance(rows[CHAIN]["answers"]), rows))
        return sorted(shares_and_rows, key=itemgetter(0))

    def cells(self, label: str, cell_of: Callable[[SummaryRow], T],
              otherwise: T) -> list[T]:
        """Return `cell_of` of the contender's figures for each data set, or `otherwise` without figures."""
        rows_by_set = self.rows[label]
        return [cell_of(rows_by_set[name]) if name in rows_by_set else otherwise for name in self.results.sets]
