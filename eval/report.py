"""The report: it turns a results folder into summary.csv, stages.csv, account.csv, report.md and plots.

It uses the existing answers, and lists the missing ones.

Usage: python3 -m eval.report DIR
"""
from __future__ import annotations

import itertools
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence, TextIO

from config.console import command
from config.files import SPACE_REMEDY, write
from eval import summary
from eval.metrics import NAN, Interval
from eval.observe.time_breakdown import SHARES, Utilization, utilization
from eval.raw_answers import RAW_ANSWERS, compressed
from eval.results_index import ResultsFolder, missing, provenance, read
from eval.summary import CHAIN, MEAN, SummaryRow, TemperatureView
from eval.tables import LABEL_WIDTH, NOT_MEASURED, in_columns, markdown, number, save

TOO_LATE = 0.03  # share of the computing time
ACCEPTANCE = ("profile", "draft", "set", "temperature", "acceptance")  # columns before those of the methods
MAX_SHOWN_GAPS = 20  # largest number of sentences about missing answers
ReportLines = Iterator[str]
LabelledCells = Mapping[str, Iterable[str]]  # cells by the label of a contender
FIGURES = (  # title, figures, digits, factor
    ("Ratio of ξ to ar, SR", ["sr_ar"], 2, 1.0),
    ("Tokens per second of decoding alone, without prefill", ["xi_decoding"], 2, 1.0),
    ("Tokens per second of all answers of a set together, several at once", ["total"], 2, 1.0),
    ("Mean accepted length: tokens per verification", ["accepted_length"], 2, 1.0),
    ("Tokens per miss: the run of correct guesses, with the token that begins it", ["tokens_per_miss"], 2, 1.0),
    ("Acceptance rate by position after the first token of a verification", ["by_position"], 2, 1.0),
    ("Request latency, s: the mean; the 95th percentile", ["request_mean", "request_p95"], 2, 1.0),
    ("Milliseconds to the first token; then per token, the median; the 99th percentile",
     ["ttft", "tpt_p50", "tpt_p99"], 0, 1e3),
    ("The same text as ar with the same seed", ["equal"], 2, 1.0),
    ("Divergence of lossy verification from the target, nats per token (KL)", ["divergence"], 3, 1.0))
FLIGHT_HEADING = ("per cent that each stage computed", "true rows in flight", "ms of a row's stay", "tokens per miss",
                  "ms of a token lost after misses")
WORDS = """\
- **ξ**: new tokens divided by seconds, over all answers of a set, prefill included. The mean is that of the sets' ξ,
  without `edits`.
- **ξ of decoding**: the tokens after the first of each turn divided by the seconds after it.
- **SR**: the ratio of two ξ on the same questions; of the mean, the ratio of the two means, with its bounds at 95 %
  confidence (bootstrap over questions).
- **accepted length**: tokens per verification, which follows each segment that came back with rows; with serial and
  naive, the last of a tree (EAGLE's τ). The target's own (bonus) token counts, that of the prefill does not.
- **tokens per miss**: a miss is a token that had to be sent as text, since no guess under way covered it.
- **time per token**: tokens that settle together share the time since the previous ones; the first ones are left out.
- **computed, waited, was idle**: fractions of a rank's time: in layers (rank 0: drafting, LM head, verification);
  waiting for messages, between its first segment of an answer and its last; before and after these. The rest is
  sending, pruning and bookkeeping.
- **drafting, verdict, waiting**: rank 0's time after the first token of an answer; **prefill** is all until then, and
  **other** is sending, pruning and bookkeeping (with tp and galaxy also rank 0's layers). They add up to the time of a
  token.
- **true rows**: rows after the prompt that became text; the target's work on all others was wasted. Their number in
  flight is the mean over the time of decoding; their **stay** lasts from sending until their return.
- **miss**: a true row that was sent only after the answer of its parent had come. **Lost** is the time of decoding in
  which no true row was in flight.
- **too late**: the total delay of emulated devices and wires after their modelled times, divided by the time of
  computing.
"""


def report(folder: str | Path, screen: TextIO | None = None) -> Path:
    """Write all tables and plots into a results folder, and the speeds also to `screen`; return report.md's path.

    Raise ValueError without answers.
    """
    results = read(folder)
    rows = summary.summary(results)
    views = [TemperatureView(results, rows, temperature) for temperature in results.temperatures]
    summary.save_tables(results.folder, rows.values())
    write(results.folder / RAW_ANSWERS, compressed(results.answers), SPACE_REMEDY)
    if CHAIN in results.methods:
        save(results.folder / "acceptance.csv", (*ACCEPTANCE, *results.methods),
             itertools.chain.from_iterable(map(_acceptance_rows, views)))

    report_path = results.folder / "report.md"
    write(report_path, "\n".join([*_text(results, views), ""]), SPACE_REMEDY)

    if screen:
        print("\n".join(map(_screen_table, views)), file=screen)
    return report_path


def _acceptance_rows(view: TemperatureView) -> Iterator[SummaryRow]:
    """Yield the rows of acceptance.csv at a temperature, with the tokens per second of each method."""
    for set_name in (*view.results.sets, MEAN):
        for acceptance, rows in view.by_acceptance(set_name):
            speeds = {method: row["xi"].value for method, row in rows.items() if row}
            yield {**dict.fromkeys(view.results.methods, NAN), **rows[CHAIN], **speeds, "acceptance": acceptance}


def _text(results: ResultsFolder, views: Sequence[TemperatureView]) -> ReportLines:
    origin = f"({provenance(results.answers)})"
    yield f"# Results {origin}\n"
    yield from _about(results)

    for view in views:
        yield f"## Temperature {view.temperature:g} {view.where}\n"
        for tables in (_paper_table, _ratio_table, _figure_tables, _stage_tables, _account_tables, _source_table):
            yield from tables(view)

    try:
        from eval import plots
    except ImportError:
        yield "Plots need matplotlib, which is not installed here.\n"
    else:
        yield f"## Plots {origin}\n"
        yield from (f"![{name}]({name})\n" for name in plots.draw(views))

    yield f"## What the words mean\n\n{WORDS}"


# --- above all tables -------------------------------------------------------------------------------------------------

def _about(results: ResultsFolder) -> ReportLines:
    """Yield the origin of the figures, and what is missing."""
    config = results.env.get("config", {})
    machine = results.env.get("machine", {})
    model_dir = config.get("model_dir") or config.get("base_dir") or ""
    facts = {"model": Path(model_dir).name, "stages": config.get("stages"),
             "tokens a turn, at most": config.get("max_new_tokens"),
             "machine": machine.get("cpu"), "cores": machine.get("cores"),
             "commit": results.env.get("commit")}
    yield from (f"- {name}: {value}" for name, value in facts.items() if value)

    if config.get("concurrency", 1) > 1:
        yield (f"- a method answers {config['concurrency']} questions at once: ξ is the speed of one, and a table "
               "has that of all together; it is unknown what each rank did, and whether it kept pace")

    yield from _emulation(results)
    yield from _missing(results)
    yield ""


def _emulation(results: ResultsFolder) -> ReportLines:
    """Yield how much slower than modelled an emulated cluster ran, and whether this machine kept that pace."""
    scales = {answer["scale"] for answer in results.answers} - {1.0}
    if scales:
        yield f"- all emulated times were {max(scales):g} times as long, and the figures are divided by that"
    late_shares = [used.late for group in results.groups.values()
                   for used in utilization(results.tally, group).values()]
    late_share = sum(late_shares) / len(late_shares) if late_shares else 0.0
    if late_share > TOO_LATE:
        yield (f"- **this machine did not keep pace**: emulated times were {late_share:.0%} late on average; run "
               "nothing else at the same time, or give slowdown=2")


def _missing(results: ResultsFolder) -> ReportLines:
    gaps = missing(results)
    if not results.env:
        yield "- env.json does not exist, so it is unknown whether anything is missing"
    elif gaps:
        yield f"- missing: answers of {len(gaps)} groups"
    else:
        yield "- missing: nothing"
    yield from (f"  - {gap}" for gap in gaps[:MAX_SHOWN_GAPS])
    if len(gaps) > MAX_SHOWN_GAPS:
        yield f"  - … and {len(gaps) - MAX_SHOWN_GAPS} more"


# --- tables -----------------------------------------------------------------------------------------------------------

def _table(title: str, head: Sequence[str], cells_by_label: LabelledCells) -> ReportLines:
    """Yield a table with the cells of each contender."""
    yield f"{title}:\n"
    lines = ([label, *cells] for label, cells in cells_by_label.items())
    yield from markdown(["method", *head], lines)
    yield ""


def _paper_table(view: TemperatureView) -> ReportLines:
    """Yield table 1 in the FlowSpec paper's layout: methods by data sets, speed and ratio, the mean at the end."""
    results, baseline = view.results, view.results.baseline
    ratio_column = f"sr_{baseline.method}"
    cells_by_label = {}

    for label, by_set in view.rows.items():
        cells = view.cells(label, lambda row: f"{_shown(row['xi'])} ({_shown(row[ratio_column])})", NOT_MEASURED)
        mean_row = by_set[MEAN]
        cells_by_label[label] = [*cells, f"{_shown(mean_row['xi'])} ({_interval(mean_row[ratio_column])})"]

    title = f"Tokens per second, ξ, and in brackets the ratio to {results.label(baseline)}, SR {view.where}"
    return _table(title, [*results.sets, MEAN], cells_by_label)


def _screen_table(view: TemperatureView) -> str:
    """Return table 1 as a terminal shows it: speeds alone, then the mean's ratio."""
    results, baseline = view.results, view.results.baseline
    title = (f"\nTokens per second (ξ) at temperature {view.temperature:g}, and the ratio of the {MEAN} to "
             f"{results.label(baseline)} (SR) {view.where}:\n")

    table_rows = []
    for label, by_set in view.rows.items():
        speeds = view.cells(label, lambda row: _shown(row["xi"]), NOT_MEASURED)
        mean_row = by_set[MEAN]
        table_rows.append([label, *speeds, _shown(mean_row["xi"]), _shown(mean_row[f"sr_{baseline.method}"])])

    heading = ["method", *results.sets, MEAN, "SR"]
    return f"{title}\n{in_columns(heading, table_rows, name_width=LABEL_WIDTH)}"


def _ratio_table(view: TemperatureView) -> ReportLines:
    """Yield the means over the sets: both speeds, and a ratio for each baseline that has answers."""
    results = view.results
    draft_suffixes = {"baseline": f" with {results.baseline_draft}", "same": " with the same draft", "none": ""}
    ratios_by_heading = {}
    for ratio in summary.RATIOS:
        baselines = {ratio.baseline(results, contender.draft) for contender in results.contenders}
        if not baselines.isdisjoint(results.contenders):
            ratios_by_heading[f"SR to {ratio.method}{draft_suffixes[ratio.draft]}"] = ratio

    columns = ("xi", "xi_decoding", *(ratio.column for ratio in ratios_by_heading.values()))
    cells_by_label = {label: [_interval(by_set[MEAN][column]) for column in columns]
                      for label, by_set in view.rows.items()}

    title = f"Means over the sets: ξ, ξ of decoding alone, and their SR to each baseline {view.where}"
    yield from _table(title, ["ξ", "ξ of decoding", *ratios_by_heading], cells_by_label)
    yield from (f"- **{heading}**: {ratio.about}" for heading, ratio in ratios_by_heading.items())
    yield ""


def _figure_tables(view: TemperatureView) -> ReportLines:
    """Yield, by contender and data set, a table for each of FIGURES that was measured."""
    for title, figure_names, num_digits, factor in FIGURES:
        to_cell = partial(_cell, figure_names, num_digits, factor)
        cells_by_label = {label: view.cells(label, to_cell, NOT_MEASURED) for label in view.rows}
        has_figures = any(cell.strip(f"{NOT_MEASURED}; ") for cells in cells_by_label.values() for cell in cells)
        if has_figures:
            yield from _table(f"{title} {view.where}", view.results.sets, cells_by_label)


def _stage_tables(view: TemperatureView) -> ReportLines:
    """Yield tables of how every rank spent its time and what it sent."""
    used_by_label = view.means("ranks")
    all_ranks = sorted({rank for ranks in used_by_label.values() for rank in ranks})

    def rank_table(title: str, figures_of: Callable[[Utilization], Sequence[float]], num_digits: int) -> ReportLines:
        cells_by_label = {}
        for label, ranks in used_by_label.items():
            cells = {rank: _joined(figures_of(used), num_digits) for rank, used in ranks.items()}
            cells_by_label[label] = [cells.get(rank, NOT_MEASURED) for rank in all_ranks]
        return _table(f"{title} {view.where}", [f"rank {rank}" for rank in all_ranks], cells_by_label)

    if all_ranks:
        yield from rank_table("Per cent of the time that each rank computed; waited; was idle",
                              lambda used: [100 * share for share in used[:3]], 0)
        yield from rank_table("Per turn of a conversation, kB that a rank sent to the next; kB of prunes; rows",
                              lambda used: [used.bytes / 1e3, used.control / 1e3, used.rows], 1)
    if any(used.late for ranks in used_by_label.values() for used in ranks.values()):
        yield from rank_table("Delay of emulated times in per cent of computing", lambda used: [100 * used.late], 1)


def _account_tables(view: TemperatureView) -> ReportLines:
    """Yield tables of where the time of a token went on rank 0, and of the rows in flight."""
    share_rows, flight_rows = {}, {}
    for label, account in view.means("account").items():
        seconds = (*account[:len(SHARES)], account.whole)
        share_rows[label] = [number(1e3 * part_seconds, 1) for part_seconds in seconds]

        used_by_rank = view.rows[label][MEAN]["ranks"]
        busy_shares = _joined([100 * used_by_rank[rank].computed for rank in used_by_rank if rank], 0)
        flight_rows[label] = [busy_shares or NOT_MEASURED, number(account.aloft), number(1e3 * account.stay, 0),
                              number(account.tokens_per_miss), number(1e3 * account.lost, 1)]

    if share_rows:
        yield from _table("Milliseconds of a token, by what rank 0 did; prefill is all until the first token "
                          f"{view.where}", [*SHARES, "in total"], share_rows)
        yield from _table(f"What was in flight while decoding, and how busy the stages were {view.where}",
                          FLIGHT_HEADING, flight_rows)


def _source_table(view: TemperatureView) -> ReportLines:
    """Yield a table of how much of the text each source of the drafts had guessed; a guess may have several."""
    counts_by_label: dict[str, Counter[str]] = {}
    for label, answers in view.means("answers").items():
        turns = [turn for answer in answers for turn in answer.get("sources", ())]
        counts_by_label[label] = sum(map(Counter, turns), Counter())

    sources = sorted({source for counts in counts_by_label.values() for source in counts})
    if len(sources) > 1:
        cells_by_label = {label: [str(counts[source]) for source in sources]
                          for label, counts in counts_by_label.items() if counts}
        yield from _table(f"Guesses that became text, by source {view.where}", sources, cells_by_label)


def _cell(figure_names: Sequence[str], num_digits: int, factor: float, row: SummaryRow) -> str:
    """Return these figures of a row as one cell."""
    return "; ".join(_shown(row[name], num_digits, factor) for name in figure_names)


def _shown(figure: Any, num_digits: int = 2, factor: float = 1.0) -> str:
    """Return a figure as a cell: a text, a number, or the value of an interval."""
    if isinstance(figure, str):
        return figure or NOT_MEASURED
    return number(factor * (figure.value if isinstance(figure, Interval) else figure), num_digits)


def _joined(values: Iterable[float], num_digits: int) -> str:
    return "; ".join(number(value, num_digits) for value in values)


def _interval(interval: Interval) -> str:
    bounds = "" if interval.low != interval.low else f"; {interval.low:.2f} to {interval.high:.2f}"
    return number(interval.value) + bounds


@command
def main(argv: Sequence[str]) -> int:
    if len(argv) != 1 or argv[0].startswith("-"):
        print(__doc__)
        return 0 if argv in (["-h"], ["--help"]) else 2
    print(f"\ntables and plots: {report(argv[0], sys.stdout)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
