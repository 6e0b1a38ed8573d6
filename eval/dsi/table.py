"""Measure pairs of models on data sets, and predict plain decoding, SI and DSI from the measurements, as a table.

The times and the acceptance rate of a row are measured; its costs per token are predicted from them by formulas.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain, groupby, product
from operator import attrgetter
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, Mapping, NamedTuple

import numpy as np

from config.keys import key, read_keys
from config.values import COUNT, Range, listed
from eval.dsi.acceptance import rate
from eval.dsi.formulas import ACCOUNTINGS, dsi_rate, least_lookahead, si_rate
from eval.dsi.keys import COMMAND
from eval.dsi.latency import Timed, check_context, paces, passes
from eval.pair_keys import TARGET, TOY_DRAFTS
from eval.pairs import answer, check_sets, open_model, prompts_of, record, sampler_of
from eval.recorded import load, save
from eval.tables import in_columns, number
from launch.progress import ProgressBar

TIMES = ("target_ttft", "target_tpot", "draft_ttft", "draft_tpot")  # milliseconds
COLUMNS = ("target", "drafter", "set", "T ms", "d ms", "d/T %", "a %", "k", "plain/DSI", "SI/DSI", "original",
           "k", "plain/DSI", "SI/DSI", "best")
Row = Dict[str, Any]  # the measurements of a pair
Growth = Mapping[int, float]  # T(m) / T(1), by m
LOOKAHEADS = 200  # number of lookaheads of SI to choose the best from, as in the paper
FLAT: Growth = {1: 1.0}  # a pass over many tokens takes as long as one over a single token
ROUNDS = 4  # iterations in which the lookahead of DSI and the time of its verification converge


class ModelPair(NamedTuple):
    """A row of the table: the folders of a target and of its drafter, and the data set for the measurement."""

    target: str
    draft: str
    set: str


@dataclass(frozen=True)
class TableConfig(Timed):
    """Measure pairs of models, and predict the speed-up of DSI: times, acceptance, best lookaheads and speed-ups.

    Each row is a target, a drafter and a data set, on which both are timed and their tokens compared. Formulas give the
    cost per token from these figures. Rows in the file of output= that were measured with the same keys are kept.
    """

    EXAMPLES = f"""\
  {COMMAND} table
  {COMMAND} table sets=humaneval,qa num_examples=3 output=table.json
  {COMMAND} table target=DIR drafts=DIR,DIR sets=alpaca:alpaca.json num_target_servers=3"""

    WRITES = ("output",)

    target: str = key(TARGET, "folder of the target", heading="Rows")
    drafts: str = key(",".join(TOY_DRAFTS), "folders of its drafters (comma-separated)")
    num_target_servers: int = key(7, "target servers of DSI", Range(1, COUNT))
    output: str = key("", "JSON file for the rows; empty: none")

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not listed(self.drafts):
            yield "drafts is empty: name at least one folder"
        if self.output and Path(self.output).suffix != ".json":
            yield f"output={self.output} is not a JSON file: name one that ends in .json"

    @property
    def pairs(self) -> list[ModelPair]:
        """The rows of the table."""
        choices = product(listed(self.drafts), self.chosen_sets)
        return [ModelPair(self.target, folder, name) for folder, name in choices]

    @property
    def settings(self) -> Mapping[str, Any]:
        """The keys that determine a measurement, besides those of the rows themselves."""
        rest = ("target", "drafts", "sets", "output", "num_target_servers")
        return {name: value for name, value in vars(self).items() if name not in rest}


# --- prediction -------------------------------------------------------------------------------------------------------

class TablePrediction(NamedTuple):
    """The best lookaheads, and milliseconds per token in the long run; `original` is DSI in the accounting of the
    simulator published with the paper."""

    dsi_lookahead: int
    si_lookahead: int
    nonsi: float
    si: float
    dsi: float
    original: float

    @property
    def best(self) -> str:
        """The name of the cheapest method; in a tie the simpler one."""
        return min(("nonsi", "si", "dsi"), key=lambda name: getattr(self, name))


def predict(target: float, draft: float, acceptance: float, servers: int,
            growth: Growth = FLAT) -> TablePrediction:
    """Predict SI with its best lookahead, and DSI with the smallest one that Eq. 1 allows for these target servers.

    `target` and `draft` are milliseconds per token. `growth` is the ratio of the time of a pass over m tokens to that
    over a single token. A verification of SI reads k + 1 tokens; one of DSI reads those that its server has not seen,
    about T / d + k. Between the sizes of `growth` it is interpolated. SI tries no lookahead beyond them, and DSI uses
    the last ratio for all larger sizes.
    """
    rows, factors = zip(*sorted(growth.items()))
    most = LOOKAHEADS if len(rows) == 1 else max(1, rows[-1] - 1)
    looks = np.arange(1, min(most, LOOKAHEADS) + 1)
    verify = target * np.interp(looks + 1, rows, factors)
    si = si_rate(verify, draft, acceptance, looks)
    best = si.argmin()
    verification = target
    for _ in range(ROUNDS):
        lookahead = int(least_lookahead(verification, draft, servers))
        missed = verification / draft + lookahead
        verification = target * float(np.interp(missed, rows, factors))
    setting = verification, draft, acceptance, lookahead
    dsi, original = (float(dsi_rate(*setting, accounting=name)) for name in ACCOUNTINGS)
    return TablePrediction(lookahead, int(looks[best]), target, float(si[best]), dsi, original)


# --- measurement ------------------------------------------------------------------------------------------------------

def measured(config: TableConfig, pairs: Iterable[ModelPair]) -> Iterator[Row]:
    """Yield measured rows. Both models of a row are timed alternately; T(m) of the target is measured once for all.

    Raises ValueError for folders without a model, or models that do not match.
    """
    sampler, target = sampler_of(config), open_model(config.target, config)
    check_context(target, config)
    took = passes(target.whole, sorted({1, *config.chosen_rows}), config)
    single = took[1].median
    growth = {size: spread.median / single for size, spread in took.items()}
    for folder, rows in groupby(pairs, attrgetter("draft")):
        drafter = open_model(folder, config, target)
        for pair in rows:
            prompts = prompts_of(pair.set, config, (target, drafter))
            texts = (answer(target, prompt, config.max_new_tokens, sampler) for prompt in prompts)
            records = [record(drafter, prompt, text, sampler) for prompt, text in zip(prompts, texts)]
            spreads = chain(*paces([target.whole, drafter.whole], prompts, config))
            times = {name: spread[:3] for name, spread in zip(TIMES, spreads)}
            bounds = [None if math.isnan(bound) else bound for bound in rate(records)]
            yield {**pair._asdict(), **times, "acceptance": bounds, "growth": growth,
                   "prompts": len(records), "tokens": sum(map(len, records))}


def main(argv: list[str]) -> int:
    config = read_keys(argv, TableConfig, f"{COMMAND} table")
    found = load(config.output, config.settings, "is not a file of rows", "name another output=")
    rows = {pair_of(row): row for row in found["rows"]} if found else {}
    missing = [pair for pair in config.pairs if pair not in rows]
    check_sets({pair.set for pair in missing}, config)
    made = measured(config, missing) if missing else ()
    for row in ProgressBar(made, desc="pairs", unit="pair", total=len(missing)):
        rows[pair_of(row)] = row
        if config.output:
            save(config.output, config.settings, {"rows": [*rows.values()]})
    print(table([rows[pair] for pair in config.pairs], config.num_target_servers))
    return 0


def pair_of(row: Row) -> ModelPair:
    return ModelPair(*(row[name] for name in ModelPair._fields))


# --- the table --------------------------------------------------------------------------------------------------------

def table(rows: list[Row], servers: int) -> str:
    """Return a table with one line for each row: the measurements, and the ratios of predicted costs per token."""
    about = ("measured: T and d are medians of TPOT, a is the acceptance rate `likeliest`; predicted: DSI with "
             f"{servers} target servers,\nfirst as if T(m) were T(1), where original is SI/DSI in the accounting of "
             "the published simulator, then with T(m)\n\n")
    lines = []
    for row in rows:
        target, draft, right = (row[name][0] for name in ("target_tpot", "draft_tpot", "acceptance"))
        growth = {int(size): factor for size, factor in row["growth"].items()}
        flat = predict(target, draft, right, servers)
        grown = predict(target, draft, right, servers, growth)
        folders = [Path(row[name]).name for name in ("target", "draft")]
        times = [number(target), number(draft)]
        shares = [number(100 * share, 1) for share in (draft / target, right)]
        original = number(flat.si / flat.original)
        lines.append([*folders, row["set"], *times, *shares, *_ratios(flat), original,
                      *_ratios(grown), grown.best])
    return about + in_columns(COLUMNS, lines, names=3)


def _ratios(found: TablePrediction) -> list[str]:
    """Return the lookahead of DSI, and the costs of plain decoding and of SI relative to DSI."""
    over_plain, over_si = found.nonsi / found.dsi, found.si / found.dsi
    return [str(found.dsi_lookahead), number(over_plain), number(over_si)]
