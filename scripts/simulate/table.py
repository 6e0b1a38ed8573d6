"""Pairs of models measured on data sets, and what follows for plain decoding, SI and DSI: from models to a table.

The times and the acceptance rate of a row are measured; its costs per token are predicted out of them by formulas.
"""
from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, NamedTuple

from tqdm import tqdm

from config.files import ROOM, fits, whole, write
from config.keys import read_keys
from config.measures import Pair, TableConfig
from eval.acceptance import rate
from eval.latency import paces, passes
from eval.metrics import Interval
from eval.pairs import Model, answer, check_pair, open_model, prompts_of, record, sampler_of
from eval.prediction import FLAT, Measures, Prediction, predict
from eval.summary import number, save
from scripts.simulate.latency import check_context

COMMAND = "python -m scripts.simulate table"
TIMES = ("target_ttft", "target_tpot", "draft_ttft", "draft_tpot")  # milliseconds
COUNTS = ("prompts", "tokens")
SPREADS = ("median", "low", "high")  # low and high: quartiles
Row = Dict[str, Any]  # what was measured of a pair
MEASURED = {  # the form of such a row in a file
    **dict.fromkeys(Pair._fields, str), **dict.fromkeys(COUNTS, int), **dict.fromkeys(TIMES, (float, float, float)),
    "acceptance": lambda bounds: fits(bounds, (float, _is_bound, _is_bound)),
    "growth": lambda growth: isinstance(growth, dict) and all(map(_is_growth, growth.items()))}


def _is_bound(value: Any) -> bool:
    """Whether this is a bound of an acceptance rate, which one text alone does not have."""
    return value is None or fits(value, float)


def _is_growth(entry: tuple[str, Any]) -> bool:
    return entry[0].isdigit() and fits(entry[1], float)


class Written(NamedTuple):
    """What a target was asked on a data set, and what it wrote."""

    prompts: list[list[int]]
    texts: list[list[int]]


@dataclass
class Measuring:
    """Measures row after row. Both models of a row are timed by turns; what a target writes and how its passes grow is
    found once for all of its drafters."""

    config: TableConfig
    models: dict[str, Model] = field(default_factory=dict)  # those of the last row
    written: dict[tuple[str, str, int], Written] = field(default_factory=dict)  # by target, set and shorter context
    growths: dict[str, dict[int, float]] = field(default_factory=dict)  # T(m) by T(1) of each target

    def row(self, pair: Pair) -> Row:
        """All that is measured of a pair. Raises ValueError for models that are none, or no pair."""
        config, sampler = self.config, sampler_of(self.config)
        target, drafter = self._open(pair)
        check_pair(target, drafter)
        check_context(target, config)
        done = self._written(pair, target, drafter)
        records = [record(drafter, *both, sampler) for both in zip(done.prompts, done.texts)]
        found = paces([target.whole, drafter.whole], done.prompts, config.max_new_tokens, sampler, config.repeats)
        spreads = [spread for own in found for spread in own]
        times = {name: [getattr(spread, part) for part in SPREADS] for name, spread in zip(TIMES, spreads)}
        bounds = [None if math.isnan(bound) else bound for bound in rate(records)]
        return {**pair._asdict(), **times, "acceptance": bounds, "growth": self._growth(pair, target),
                "prompts": len(records), "tokens": sum(map(len, records))}

    def _open(self, pair: Pair) -> tuple[Model, Model]:
        """Both models; those of the row before stay in memory only if they are among them."""
        self.models = {name: model for name, model in self.models.items() if name in pair}
        for folder in (pair.target, pair.draft):
            self.models.setdefault(folder, self.models.get(folder) or open_model(folder, self.config))
        return self.models[pair.target], self.models[pair.draft]

    def _written(self, pair: Pair, target: Model, drafter: Model) -> Written:
        context = min(model.whole.config.context for model in (target, drafter))
        key = pair.target, pair.set, context
        if key not in self.written:
            config, sampler = self.config, sampler_of(self.config)
            prompts = prompts_of(pair.set, config, (target, drafter))
            texts = [answer(target, prompt, config.max_new_tokens, sampler) for prompt in prompts]
            self.written[key] = Written(prompts, texts)
        return self.written[key]

    def _growth(self, pair: Pair, target: Model) -> dict[int, float]:
        """How many times as long as one over a single token a pass over m tokens takes, by m."""
        if pair.target not in self.growths:
            config = self.config
            took = passes(target.whole, sorted({1, *config.chosen_rows}), config.context, sampler_of(config),
                          config.repeats)
            self.growths[pair.target] = {size: spread.median / took[1].median for size, spread in took.items()}
        return self.growths[pair.target]


def main(argv: list[str]) -> int:
    config = read_keys(argv, TableConfig, COMMAND)
    rows = kept(config)
    measuring = Measuring(config)
    for pair in tqdm(config.pairs, desc="pairs", unit="pair", file=sys.stderr):
        if pair not in rows:
            rows[pair] = measuring.row(pair)
            keep(config, rows)
    asked = [rows[pair] for pair in config.pairs]
    print(table(asked, config.num_target_servers))
    if config.output:
        keep(config, rows)
    return 0


# --- the file of rows -------------------------------------------------------------------------------------------------

def kept(config: TableConfig) -> dict[Pair, Row]:
    """The rows that the file of rows holds. Raises ValueError if it is another file, or of other keys."""
    path = Path(config.output)
    if not config.output or not path.is_file():
        return {}
    other = "name another output="
    found = whole(path, other)
    if not fits(found, {"keys": dict, "rows": [MEASURED]}):
        raise ValueError(f"{path} is no file of rows: {other}")
    mine = json.loads(json.dumps(config.settings))
    for name in sorted(mine.keys() | found["keys"].keys()):
        if mine.get(name) != found["keys"].get(name):
            raise ValueError(f"{path} was measured with {name}={found['keys'].get(name)}, and {name}={mine.get(name)} "
                             f"is asked for: {other}")
    return {Pair(*(row[name] for name in Pair._fields)): row for row in found["rows"]}


def keep(config: TableConfig, rows: dict[Pair, Row]) -> None:
    """Write all rows, and the table beside them, if there is a file for them."""
    if config.output:
        found = list(rows.values())
        content = {"keys": config.settings, "rows": found}
        write(config.output, json.dumps(content, indent=1) + "\n", ROOM)
        flat = [_cells(row, config.num_target_servers) for row in found]
        save(Path(config.output).with_suffix(".csv"), list(flat[0]), flat)


def predictions(row: Row, servers: int) -> tuple[Prediction, Prediction]:
    """What decoding costs if a pass over many tokens takes as long as one over a single token, and with T(m)."""
    measures = Measures(row["target_tpot"][0], row["draft_tpot"][0], row["acceptance"][0])
    growth = {int(size): factor for size, factor in row["growth"].items()}
    return predict(measures, servers, FLAT), predict(measures, servers, growth)


def _cells(row: Row, servers: int) -> dict[str, Any]:
    """A line of the CSV file."""
    cells = {name: row[name] for name in (*Pair._fields, *COUNTS)}
    for name in TIMES:
        cells.update({f"{name}_{part}_ms": value for part, value in zip(SPREADS, row[name])})
    for name, bound in zip(Interval._fields, row["acceptance"]):
        cells[f"acceptance_{name}"] = math.nan if bound is None else bound
    cells["servers"] = servers
    for kind, found in zip(("flat", "rows"), predictions(row, servers)):
        cells.update({f"{kind}_{name}": value for name, value in found._asdict().items()})
        cells[f"{kind}_best"] = found.best
    return cells


# --- the table --------------------------------------------------------------------------------------------------------

def table(rows: list[Row], servers: int) -> str:
    """A line for each row: what was measured, and the ratios of predicted costs per token."""
    columns = ("T ms", "d ms", "d/T %", "a %", "k", "plain/DSI", "SI/DSI", "original", "k", "plain/DSI", "SI/DSI",
               "best")
    lines = [f"measured: T and d are medians of TPOT, a is the likeliest acceptance rate; predicted: DSI with "
             f"{servers} target servers,", "first as if T(m) were T(1), where original is SI/DSI in the accounting of "
             "the published simulator, then with T(m)", "",
             f"{'target':<14}{'drafter':<14}{'set':<14}" + "".join(f"{name:>10}" for name in columns)]
    for row in rows:
        flat, grown = predictions(row, servers)
        target, draft, right = row["target_tpot"][0], row["draft_tpot"][0], row["acceptance"][0]
        cells = [number(target), number(draft), number(100 * draft / target, 1), number(100 * right, 1),
                 str(flat.dsi_lookahead), *_ratios(flat), number(flat.si / flat.original),
                 str(grown.dsi_lookahead), *_ratios(grown), grown.best]
        names = (Path(row["target"]).name, Path(row["draft"]).name, row["set"])
        lines.append("".join(f"{name[-13:]:<14}" for name in names) + "".join(f"{cell:>10}" for cell in cells))
    return "\n".join(lines)


def _ratios(found: Prediction) -> list[str]:
    """How many times as much as DSI plain decoding and SI cost."""
    return [number(found.nonsi / found.dsi), number(found.si / found.dsi)]
