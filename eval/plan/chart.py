"""Which method a plan chooses where: a grid of clusters that differ in two things, planned for one by one; its table.

All boards of a cluster are alike. Across the grid a stage takes longer and longer; along it either a row costs more of
that time, or a message takes longer. Everything else is as in a profile.
"""
from __future__ import annotations

import csv
import io
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Iterator, Sequence

from config.boards import Boards
from config.profiles import PROFILES
from config.ranges import Checked, Range, outside, unknown
from config.schema.untrusted import decoded, read_bytes
from eval.plan.candidates import families
from eval.plan.keys import PlanConfig
from eval.plan.record import Book
from eval.plan.search import Search, choice, plain_of
from eval.plan.trial import Bench

STAGES = (2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 400.0)  # ms of a stage, if each board has one
ALONG = {"row": (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0),  # % of a stage's time that each row takes above the free ones
         "latency": (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)}  # ms of a message
RANGES = {"boards": Range(1, 64), "questions": Range(1, 20),
          "tokens": Range(8, 512), "workers": Range(1, 256)}
REMEDY = "name a table that python -m scripts.bench planner_map wrote"


@dataclass(frozen=True)
class ChartConfig(Checked):
    """Which method a plan chooses, by the time of a stage and the cost of a row or of a message, as a table and a map.

    Every cell is a cluster of equal boards, with all else as in a profile. It is planned for in virtual time.
    """

    PATHS: ClassVar[tuple[str, ...]] = ("output", "load")
    EXAMPLES: ClassVar[str] = """\
  python -m scripts.bench planner_map
  python -m scripts.bench planner_map axes=latency boards=8 output=maps/eight
  python -m scripts.bench planner_map load=docs/planner_row.csv output=docs/planner_row"""

    # The grid
    axes: str = "row"  # what changes along the stage time: row (its cost) or latency (of a message)
    boards: int = 4  # boards that may hold layers
    profile: str = "jetson-7b"  # all else
    questions: int = 1  # of each of the six bundled sets that are recorded
    tokens: int = 24  # of each answer, at most
    drafts: str = "eagle+suffix"  # those that may be chosen; specinfer has its own
    workers: int = 2  # processes

    # The files
    output: str = "out/planner_map"  # the table and the map: this name with .csv and .png
    load: str = ""  # table to draw again; empty: the plans are made

    def problems(self) -> Iterator[str]:
        yield from outside(vars(self), RANGES)
        yield from unknown(vars(self), {"axes": tuple(ALONG), "profile": tuple(PROFILES)})
        if not self.output:
            yield "output= is empty: name a file without its ending"


@dataclass(frozen=True)
class Cell:
    """What was chosen for one cluster; speeds in tokens per second, simulated."""

    stage_ms: float
    along: float  # % of a stage's time, or ms
    method: str
    draft: str
    boards: int  # that hold layers
    keys: str
    tokens_per_second: float
    plain_tokens_per_second: float


def sites(config: ChartConfig) -> list[tuple[float, float, Boards]]:
    """The clusters of the grid, stage time by stage time, with what differs in them."""
    usual = Boards(**asdict(PROFILES[config.profile]), factors=(1.0,) * config.boards)
    found = []
    for stage in STAGES:
        for along in ALONG[config.axes]:
            whole = stage * config.boards
            site = replace(usual, model=whole, row=usual.row / usual.model * whole)
            if config.axes == "row":
                site = replace(site, row=along / 100 * whole)
            else:
                site = replace(site, latency=along, step=along + usual.step - usual.latency)
            found.append((stage, along, site))
    return found


def cell(stage: float, along: float, site: Boards, config: PlanConfig, book: Book) -> Cell:
    """Plan for one cluster."""
    made = families(site, len(site.factors), book.layers, config.chosen_methods, config.chosen_drafts)
    trials = Search(Bench(site, config, book), shown=False).run(made)
    chosen = choice(trials)
    one = chosen.candidate
    draft = one.keys.get("draft", "")
    keys = " ".join(f"{key}={value}" for key, value in one.keys.items())
    return Cell(stage, along, one.method, draft, len(one.boards), keys, chosen.speed, plain_of(trials).speed)


# --- the table --------------------------------------------------------------------------------------------------------

def table(config: ChartConfig, cells: Sequence[Cell]) -> str:
    """The table as text: a remark with the keys, the names of the columns, a row for each cell."""
    about = " ".join(f"{key}={value}" for key, value in vars(config).items() if key not in ChartConfig.PATHS)
    body = io.StringIO()
    out = csv.DictWriter(body, [column.name for column in fields(Cell)], lineterminator="\n")
    out.writeheader()
    out.writerows({key: f"{value:.5g}" if isinstance(value, float) else value for key, value in asdict(one).items()}
                  for one in cells)
    return f"# {about}\n{body.getvalue()}"


def load(path: str, config: ChartConfig) -> tuple[ChartConfig, list[Cell]]:
    """The keys and the cells of a table. Raises ValueError if the file is none."""
    head, _, body = decoded(read_bytes(path, REMEDY), path, "save it as UTF-8").partition("\n")
    types: dict[str, Any] = {"float": float, "int": int, "str": str}
    kinds = {column.name: types[str(column.type)] for column in fields(Cell)}
    try:
        about = dict(word.split("=", 1) for word in head.split()[1:])
        values = {key: type(getattr(ChartConfig, key))(value) for key, value in about.items()}
        rows = [*csv.DictReader(io.StringIO(body))]
        cells = [Cell(**{key: kind(row[key]) for key, kind in kinds.items()}) for row in rows]
        found = replace(config, **values)
        whole = {(one.stage_ms, one.along) for one in cells}
        if whole != {(stage, along) for stage in STAGES for along in ALONG[found.axes]}:
            raise ValueError("cells are missing")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path} is no map of methods: {REMEDY}") from None
    return found, cells


def summary(cells: Sequence[Cell]) -> str:
    """How many cells each method has, and what is gained."""
    counts = {name: sum(one.method == name for one in cells) for name in {one.method: None for one in cells}}
    most = sorted(counts.items(), key=lambda pair: -pair[1])
    gains = [one.tokens_per_second / one.plain_tokens_per_second for one in cells]
    named = ", ".join(f"{name} {count}" for name, count in most)
    return f"{len(cells)} cells: {named}; {min(gains):.2f} to {max(gains):.2f} times as fast as ar; simulated"
