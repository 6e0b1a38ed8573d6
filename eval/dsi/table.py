"""Pairs of models measured on data sets, and what follows for plain decoding, SI and DSI: from models to a table.

The times and the acceptance rate of a row are measured; its costs per token are predicted out of them by formulas.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import chain, product
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Tuple

import numpy as np
from tqdm import tqdm

from config.keys import Range, listed, outside, read_keys
from eval.dsi.acceptance import rate
from eval.dsi.formulas import ACCOUNTINGS, dsi_rate, least_lookahead, si_rate
from eval.dsi.keys import COMMAND, COUNT
from eval.dsi.latency import Timed, check_context, paces, passes
from eval.keys import problems_of_files
from eval.pair_keys import TARGET, TOY_DRAFTS
from eval.pairs import Model, answer, check_pair, check_sets, open_model, prompts_of, record, sampler_of
from eval.recorded import keep, kept
from eval.tables import in_columns, number

TIMES = ("target_ttft", "target_tpot", "draft_ttft", "draft_tpot")  # milliseconds
COLUMNS = ("target", "drafter", "set", "T ms", "d ms", "d/T %", "a %", "k", "plain/DSI", "SI/DSI", "original",
           "k", "plain/DSI", "SI/DSI", "best")
Row = Dict[str, Any]  # what was measured of a pair
Written = Tuple[List[List[int]], List[List[int]]]  # what a target was asked on a data set, and what it wrote
LOOKAHEADS = 200  # of SI, the best of which is taken; as many as in the paper
FLAT = {1: 1.0}  # a pass over many tokens takes as long as one over a single token
ROUNDS = 4  # in which the lookahead of DSI and the time of its verification settle


class Pair(NamedTuple):
    """A row of the table: the folders of a target and of its drafter, and the data set that both are measured on."""

    target: str
    draft: str
    set: str


@dataclass(frozen=True)
class TableConfig(Timed):
    """Pairs of models measured, and what that makes of DSI: times, acceptance, best lookaheads and speed-ups.

    Each row is a target, a drafter and a data set, on which both are timed and their tokens compared. Out of this
    follows by formulas what a token costs. Rows that output= already has, measured with the same keys, are kept.
    """

    EXAMPLES = f"""\
  {COMMAND} table
  {COMMAND} table sets=humaneval,qa num_examples=3 output=table.json
  {COMMAND} table target=DIR drafts=DIR,DIR sets=alpaca:alpaca.json num_target_servers=3"""

    # Which rows there are
    target: str = TARGET  # folder of the target
    drafts: str = ",".join(TOY_DRAFTS)  # folders of its drafters (commas between)
    num_target_servers: int = 7  # servers of the target that DSI has
    output: str = ""  # JSON file for the rows; empty: none

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from outside(vars(self), {"num_target_servers": Range(1, COUNT)})
        if not listed(self.drafts):
            yield "drafts is empty: name at least one folder"
        if self.output and Path(self.output).suffix != ".json":
            yield f"output={self.output} is no JSON file: name one that ends in .json"
        yield from problems_of_files(self, "output")

    @property
    def pairs(self) -> list[Pair]:
        """The rows of the table."""
        asked = product(listed(self.drafts), self.chosen_sets)
        return [Pair(self.target, folder, name) for folder, name in asked]

    @property
    def settings(self) -> Mapping[str, Any]:
        """The keys that decide what is measured, beside the rows themselves."""
        rest = ("target", "drafts", "sets", "output", "num_target_servers")
        return {name: value for name, value in vars(self).items() if name not in rest}


# --- what is predicted ------------------------------------------------------------------------------------------------

class Measures(NamedTuple):
    """Times of a token of target and drafter in milliseconds, and the acceptance rate."""

    target: float
    draft: float
    acceptance: float


class Prediction(NamedTuple):
    """The best lookaheads, and milliseconds per token in the long run; `original` is DSI in the accounting of the
    simulator that was published with the paper."""

    dsi_lookahead: int
    si_lookahead: int
    nonsi: float
    si: float
    dsi: float
    original: float

    @property
    def best(self) -> str:
        """The way of decoding that costs least; the plainer one of equals."""
        return min(("nonsi", "si", "dsi"), key=lambda name: getattr(self, name))


def predict(measures: Measures, servers: int, growth: Mapping[int, float] = FLAT) -> Prediction:
    """SI with its best lookahead, DSI with the smallest one for which these target servers are enough (Eq. 1).

    `growth` says how many times as long a pass over m tokens takes as one over a single token: a verification of SI
    reads k + 1 tokens, and one of DSI those that its server has not seen, about T / d + k. Between the sizes of
    `growth` it is interpolated; SI tries no lookahead beyond them, and DSI takes the last one for all that are larger.
    """
    target, draft, acceptance = measures
    rows, factors = zip(*sorted(growth.items()))
    most = LOOKAHEADS if len(rows) == 1 else max(1, rows[-1] - 1)
    looks = np.arange(1, min(most, LOOKAHEADS) + 1)
    verify = target * np.interp(looks + 1, rows, factors)
    si = si_rate(verify, draft, acceptance, looks)
    best = int(np.argmin(si))
    verification = target
    for _ in range(ROUNDS):
        lookahead = int(least_lookahead(verification, draft, servers))
        missed = verification / draft + lookahead
        verification = target * float(np.interp(missed, rows, factors))
    setting = verification, draft, acceptance, lookahead
    dsi, original = (float(dsi_rate(*setting, accounting=name)) for name in ACCOUNTINGS)
    return Prediction(lookahead, int(looks[best]), target, float(si[best]), dsi, original)


# --- what is measured -------------------------------------------------------------------------------------------------

@dataclass
class Measuring:
    """Measures row after row. Both models of a row are timed by turns.

    What the target writes and how its passes grow is found once for all of its drafters.
    """

    config: TableConfig
    models: dict[str, Model] = field(default_factory=dict)  # those of the last row
    written: dict[tuple[str, int], Written] = field(default_factory=dict)  # by set and the shorter context
    growth: dict[int, float] = field(default_factory=dict)  # T(m) by T(1)

    def row(self, pair: Pair) -> Row:
        """All that is measured of a pair. Raises ValueError for models that are none, or no pair."""
        config, sampler = self.config, sampler_of(self.config)
        self.models = {name: model for name, model in self.models.items() if name in pair}
        for folder in (pair.target, pair.draft):
            if folder not in self.models:
                self.models[folder] = open_model(folder, config)
        target, drafter = self.models[pair.target], self.models[pair.draft]
        check_pair(target, drafter)
        check_context(target, config)
        prompts, texts = self._written(pair.set, target, drafter)
        records = [record(drafter, prompt, text, sampler) for prompt, text in zip(prompts, texts)]
        both = [target.whole, drafter.whole]
        found = paces(both, prompts, config.max_new_tokens, sampler, config.repeats)
        times = {name: spread[:3] for name, spread in zip(TIMES, chain(*found))}
        bounds = [None if math.isnan(bound) else bound for bound in rate(records)]
        if not self.growth:
            sizes = sorted({1, *config.chosen_rows})
            took = passes(target.whole, sizes, config.context, sampler, config.repeats)
            self.growth = {size: spread.median / took[1].median for size, spread in took.items()}
        return {**pair._asdict(), **times, "acceptance": bounds, "growth": self.growth,
                "prompts": len(records), "tokens": sum(map(len, records))}

    def _written(self, name: str, target: Model, drafter: Model) -> Written:
        key = name, min(model.whole.config.context for model in (target, drafter))
        if key not in self.written:
            config, sampler = self.config, sampler_of(self.config)
            prompts = prompts_of(name, config, (target, drafter))
            texts = [answer(target, prompt, config.max_new_tokens, sampler) for prompt in prompts]
            self.written[key] = prompts, texts
        return self.written[key]


def main(argv: list[str]) -> int:
    config = read_keys(argv, TableConfig, f"{COMMAND} table")
    rows = rows_of(config)
    check_sets({pair.set for pair in config.pairs if pair not in rows}, config)
    measuring = Measuring(config)
    for pair in tqdm(config.pairs, desc="pairs", unit="pair"):
        if pair not in rows:
            rows[pair] = measuring.row(pair)
            if config.output:
                keep(config.output, config.settings, {"rows": [*rows.values()]})
    print(table([rows[pair] for pair in config.pairs], config.num_target_servers))
    return 0


# --- the file of rows -------------------------------------------------------------------------------------------------

def rows_of(config: TableConfig) -> dict[Pair, Row]:
    """The rows that the file of rows holds. Raises ValueError if it is another file, or of other keys."""
    found = kept(config.output, config.settings, "is no file of rows", "name another output=")
    rows = found["rows"] if found else []
    return {Pair(*map(row.get, Pair._fields)): row for row in rows}


# --- the table --------------------------------------------------------------------------------------------------------

def table(rows: list[Row], servers: int) -> str:
    """A line for each row: what was measured, and the ratios of predicted costs per token."""
    about = ("measured: T and d are medians of TPOT, a is the likeliest acceptance rate; predicted: DSI with "
             f"{servers} target servers,\nfirst as if T(m) were T(1), where original is SI/DSI in the accounting of "
             "the published simulator, then with T(m)\n\n")
    lines = []
    for row in rows:
        middles = (row[name][0] for name in ("target_tpot", "draft_tpot", "acceptance"))
        target, draft, right = measures = Measures(*middles)
        growth = {int(size): factor for size, factor in row["growth"].items()}
        flat, grown = (predict(measures, servers, known) for known in (FLAT, growth))
        folders = [Path(row[name]).name for name in ("target", "draft")]
        times = [number(target), number(draft)]
        shares = [number(100 * share, 1) for share in (draft / target, right)]
        original = number(flat.si / flat.original)
        lines.append([*folders, row["set"], *times, *shares,
                      *_ratios(flat), original, *_ratios(grown), grown.best])
    return about + in_columns(COLUMNS, lines, names=3)


def _ratios(found: Prediction) -> list[str]:
    """The lookahead of DSI, and how many times as much as DSI plain decoding and SI cost."""
    over_plain, over_si = found.nonsi / found.dsi, found.si / found.dsi
    return [str(found.dsi_lookahead), number(over_plain), number(over_si)]
