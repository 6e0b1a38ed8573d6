"""Measure pairs of models on data sets, and predict plain decoding, SI and DSI from the measurements, as a table.

The times and the acceptance rate of a row are measured; its costs per token are predicted from them by formulas.
"""
from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from itertools import chain, groupby, product
from operator import itemgetter
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, Mapping, NamedTuple, Tuple

import numpy as np

from config.files import read_json_file, write_json
from config.keys import key
from config.values import COUNT, Range, TextForm, listed
from eval.dsi.acceptance import measured_records, rate
from eval.dsi.formulas import dsi_rate, least_lookahead, si_rate
from eval.dsi.keys import COMMAND
from eval.dsi.latency import Timed, paces
from eval.pair_keys import TARGET, TOY_DRAFTS
from eval.pairs import check_sets, open_model, prompts_of
from eval.tables import in_columns, number
from launch.progress import ProgressBar

TIMES = ("target_ttft", "target_tpot", "draft_ttft", "draft_tpot")  # milliseconds
COLUMNS = ("target", "drafter", "set", "T ms", "d ms", "d/T %", "a %", "k", "plain/DSI", "SI/DSI")
Row = Dict[str, Any]  # the measurements of a pair
Pair = Tuple[str, str, str]  # the folders of a target and of its drafter, and the data set for the measurement
pair_of = itemgetter("target", "draft", "set")  # from a row to its pair
OTHER_OUTPUT = "name another output="
MAX_LOOKAHEAD = 200  # of SI, as in the paper: the best is chosen from those up to it


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

    target: str = key(TARGET, "folder of the target", heading="Rows", names_file=True)
    drafts: str = key(",".join(TOY_DRAFTS), "folders of its drafters (comma-separated)")
    num_target_servers: int = key(7, "target servers of DSI", Range(1, COUNT))
    output: str = key("", "JSON file for the rows; empty: none",
        TextForm(r".*\.json", "a file that ends in .json"), names_file=True, is_output=True)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not listed(self.drafts):
            yield "drafts is empty: name at least one folder"

    @property
    def settings(self) -> Mapping[str, Any]:
        """The keys that determine a measurement, besides those of the rows themselves."""
        other_keys = ("target", "drafts", "sets", "output", "num_target_servers")
        return {name: value for name, value in vars(self).items() if name not in other_keys}


# --- prediction -------------------------------------------------------------------------------------------------------

class TablePrediction(NamedTuple):
    """The lookahead of DSI, and milliseconds per token of SI and DSI in the long run."""

    dsi_lookahead: int
    si: float
    dsi: float


def predict(target: float, draft: float, acceptance: float, num_servers: int) -> TablePrediction:
    """Predict SI with its best lookahead, and DSI with the smallest one that Eq. 1 allows for these target servers.

    `target` and `draft` are milliseconds per token.
    """
    si_costs = si_rate(target, draft, acceptance, np.arange(1, MAX_LOOKAHEAD + 1))
    dsi_lookahead = int(least_lookahead(target, draft, num_servers))
    dsi_cost = float(dsi_rate(target, draft, acceptance, dsi_lookahead))
    return TablePrediction(dsi_lookahead, float(si_costs.min()), dsi_cost)


# --- measurement ------------------------------------------------------------------------------------------------------

def measured(config: TableConfig, pairs: Iterable[Pair]) -> Iterator[Row]:
    """Yield measured rows. Both models of a row are timed alternately.

    Raises ValueError for folders without a model, or models that do not match.
    """
    target = open_model(config.target, config)
    for draft, draft_pairs in groupby(pairs, itemgetter(1)):
        drafter = open_model(draft, config, target)

        for _, _, set_name in draft_pairs:
            prompts = prompts_of(set_name, config, (target, drafter))
            records = measured_records(target, drafter, prompts, config)
            times = dict(zip(TIMES, chain(*paces([target.whole, drafter.whole], prompts, config))))
            acceptance = [None if math.isnan(bound) else bound for bound in rate(records)]
            yield {"target": config.target, "draft": draft, "set": set_name, **times, "acceptance": acceptance,
                   "prompts": len(records), "tokens": sum(map(len, records))}


def main(config: TableConfig) -> int:
    row_by_pair = {pair_of(row): row for row in recorded_rows(config)}
    pairs = list(product([config.target], listed(config.drafts), config.chosen_sets))
    missing_pairs = [pair for pair in pairs if pair not in row_by_pair]
    check_sets({set_name for _, _, set_name in missing_pairs}, config)

    new_rows = measured(config, missing_pairs) if missing_pairs else ()
    for row in ProgressBar(new_rows, desc="pairs", unit="pair", total=len(missing_pairs)):
        row_by_pair[pair_of(row)] = row
        if config.output:
            record = {"keys": config.settings, "rows": [*row_by_pair.values()]}
            write_json(config.output, {**record, "sha256": _digest(record)}, indent=None)

    print(table([row_by_pair[pair] for pair in pairs], config.num_target_servers))
    return 0


def recorded_rows(config: TableConfig) -> list[Row]:
    """Return the rows in the file of `output`; none if it does not exist.

    Raises ValueError for a file that this command did not write, or wrote with other keys.
    """
    path = config.output
    if not path or not Path(path).is_file():
        return []

    record = read_json_file(path, OTHER_OUTPUT)
    written_digest = record.pop("sha256", "") if isinstance(record, dict) else ""
    if written_digest != _digest(record):
        raise ValueError(f"{path} is not a file of rows: {OTHER_OUTPUT}")

    for name, value in config.settings.items():
        recorded_value = record["keys"].get(name)
        if recorded_value != value:
            raise ValueError(f"{path} was recorded with {name}={recorded_value}, and {name}={value} is requested: "
                             f"{OTHER_OUTPUT}")
    rows: list[Row] = record["rows"]
    return rows


def _digest(record: Any) -> str:
    """Return a checksum, which shows that a file is read as it was written."""
    return hashlib.sha256(json.dumps(record).encode()).hexdigest()


# --- the table --------------------------------------------------------------------------------------------------------

def table(rows: list[Row], num_servers: int) -> str:
    """Return a table with one line for each row: the measurements, and the ratios of predicted costs per token."""
    note = ("measured: T and d are medians of TPOT, a is the acceptance rate `likeliest`; predicted: DSI with "
            f"{num_servers} target servers\n\n")
    lines = []
    for row in rows:
        target_ms, draft_ms, acceptance = (row[name][0] for name in ("target_tpot", "draft_tpot", "acceptance"))
        percentages = [number(100 * share, 1) for share in (draft_ms / target_ms, acceptance)]
        cells = [Path(row["target"]).name, Path(row["draft"]).name, row["set"],
                 number(target_ms), number(draft_ms), *percentages]

        prediction = predict(target_ms, draft_ms, acceptance, num_servers)
        cost_ratios = [number(cost / prediction.dsi) for cost in (target_ms, prediction.si)]
        lines.append([*cells, str(prediction.dsi_lookahead), *cost_ratios])
    return note + in_columns(COLUMNS, lines, names=3)
