"""The chosen methods over a grid of clusters that differ in two quantities, as a table and a map.

All boards of a cluster are equal. Along one axis of the grid the time of a stage rises. Along the other, either a row
costs a larger share of that time, or a message takes longer. Everything else is as in a profile.
"""
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Iterator, NamedTuple, Sequence

from matplotlib.patches import Patch, Rectangle

from config.files import check_output
from config.keys import Checked, Range, read_keys, with_defaults
from config.methods import METHODS
from config.presets import PRESETS, TOY_PRESET
from config.profiles import PROFILES, Profile
from eval.plan.bench import QUESTIONS, TOKENS, WORKERS, finalists, in_processes, plan_of
from eval.plan.candidates import typed
from eval.plan.keys import PlanConfig
from eval.plan.record import Book, make_record
from eval.plan.search import choice, plain_of
from eval.plan.trial import Bench
from eval.plots import new_figure
from eval.tables import save
from launch.words import with_model

STAGES = (2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 400.0)  # ms of a stage, with one stage per board
ALONG = {"row": (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0),  # % of a stage's time per row beyond the free ones
         "latency": (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)}  # ms of a message
TITLES = {"row": "a row above the free ones, % of the stage's time", "latency": "a message, ms"}
INK = "0.35"  # colour of hatches


@dataclass(frozen=True)
class MapConfig(Checked):
    """Plan for a grid of clusters, by the time of a stage and the cost of a row or of a message, and map the choices.

    Every cell is a cluster of equal boards, with all else as in a profile. Plans are made in virtual time.
    """

    PATHS = ("output",)
    RANGES = {"boards": Range(1, 64), "questions": QUESTIONS, "tokens": TOKENS, "workers": WORKERS}
    CHOICES = {"base": tuple(PRESETS), "axes": tuple(ALONG), "profile": tuple(PROFILES)}
    EXAMPLES = """\
  python3 -m scripts.bench planner_map
  python3 -m scripts.bench planner_map smollm2 axes=latency boards=8 output=maps/eight"""

    # The grid
    base: str = TOY_PRESET  # preset with the model and the drafts; given as the first word
    axes: str = "row"  # second axis, next to the stage time: row (its cost) or latency (of a message)
    boards: int = 4  # boards that may hold layers
    profile: str = "jetson-7b"  # profile for everything else
    questions: int = 1  # recorded questions of each of the six bundled sets
    tokens: int = 24  # most tokens of each answer
    drafts: str = "eagle+suffix"  # drafts that may be chosen; specinfer has its own
    workers: int = 2  # processes
    output: str = "out/planner_map"  # name of the table and the map, without .csv and .png

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not self.output:
            yield "output= is empty: name a file without its ending"


class Cell(NamedTuple):
    """The choice for one cluster; speeds in tokens per second, simulated."""

    stage_ms: float
    along: float  # % of a stage's time, or ms
    method: str
    draft: str
    boards: int  # number of boards that hold layers
    keys: str
    tokens_per_second: float
    plain_tokens_per_second: float

    @property
    def gain(self) -> float:
        """The speed-up over plain decoding."""
        return self.tokens_per_second / self.plain_tokens_per_second


def planner_map(argv: list[str]) -> int:
    """Run the command `python3 -m scripts.bench planner_map`; return its exit code."""
    base, *keys = with_model(with_defaults(argv, {}, TOY_PRESET))
    config = read_keys([f"base={base}", *keys], MapConfig, "python3 -m scripts.bench planner_map")
    for ending in (".csv", ".png"):
        check_output(config.output + ending, "choose another output=")
    cells = planned(config)
    save(Path(f"{config.output}.csv"), Cell._fields, [one._asdict() for one in cells])
    draw(config, cells)
    print(f"{summary(cells)}; {config.output}.png")
    return 0


def planned(config: MapConfig) -> list[Cell]:
    """Plan for every cell, in several processes, and return the choices."""
    plan = plan_of(config.questions, config.tokens, config.drafts, config.base, config.profile)
    book = make_record(plan)
    jobs = [(*where, plan, book) for where in sites(config)]
    return list(in_processes(config.workers, cell, jobs, "cell"))


def sites(config: MapConfig) -> list[tuple[float, float, Profile]]:
    """Return the clusters of the grid, each after its two coordinates; the second one varies fastest."""
    usual = replace(PROFILES[config.profile], factors=(1.0,) * config.boards)
    found = []
    for stage, along in product(STAGES, ALONG[config.axes]):
        whole = stage * config.boards
        if config.axes == "row":
            site = replace(usual, model=whole, row=along / 100 * whole)
        else:
            site = replace(usual, model=whole, row=usual.row / usual.model * whole,
                           latency=along, step=along + usual.step - usual.latency)
        found.append((stage, along, site))
    return found


def cell(stage: float, along: float, site: Profile, config: PlanConfig, book: Book) -> Cell:
    """Plan for one cluster."""
    trials = finalists(Bench(site, config, book), book.layers)
    chosen, plain = choice(trials), plain_of(trials)
    one = chosen.candidate
    how = one.method, one.keys.get("draft", ""), len(one.boards), typed(one.keys)
    return Cell(stage, along, *how, chosen.speed, plain.speed)


def summary(cells: Sequence[Cell]) -> str:
    """Return a line with the number of cells of each method, and the range of speed-ups."""
    counts = Counter(one.method for one in cells)
    named = ", ".join(f"{name} {count}" for name, count in counts.most_common())
    gains = [one.gain for one in cells]
    return f"{len(cells)} cells: {named}; {min(gains):.2f} to {max(gains):.2f} times as fast as ar; simulated"


def draw(config: MapConfig, cells: Sequence[Cell]) -> None:
    """Write the map, readable without colour: every method has a hatch, every cell shows its figures."""
    along = ALONG[config.axes]
    counts = Counter(one.method for one in cells)
    with new_figure(f"{config.output}.png", (7.6, 6.0), layout="constrained", dpi=160) as axes:
        for one in cells:
            x, y = STAGES.index(one.stage_ms), along.index(one.along)
            axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, **_look(one.method)))
            axes.text(x, y, f"{one.boards}\n{one.gain:.1f}×", ha="center", va="center", fontsize=9,
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5, "alpha": 0.9})
        for axis, places in ((axes.xaxis, STAGES), (axes.yaxis, along)):
            axis.set_ticks(range(len(places)), [f"{place:g}" for place in places])
            axis.set_view_interval(-0.5, len(places) - 0.5, ignore=True)
        axes.set_xlabel(f"a stage, ms, if all {config.boards} boards have one")
        axes.set_ylabel(TITLES[config.axes])
        title = "The fastest method, its boards that hold layers, its speed over ar"
        axes.set_title(f"{title}\n\n", loc="left", fontsize=12)
        axes.text(0, 1.02, _about(config), transform=axes.transAxes, color="0.3", fontsize=9)
        looks = [Patch(**_look(name), label=f"{name}: {counts[name]} cells") for name in METHODS if counts[name]]
        place = "outside lower left"
        axes.figure.legend(handles=looks, ncols=4, loc=place, handlelength=1.8, handleheight=1.2, fontsize=9)


def _about(config: MapConfig) -> str:
    site = PROFILES[config.profile]
    wire = f", a message {site.latency:g} ms" if config.axes == "row" else ""
    what = f"{config.base}, {config.boards} boards, drafts {config.drafts}; {site.free} rows of a segment are free"
    return (f"simulated; {what},\na level takes {site.level:g} ms, a verdict {site.verdict:g} ms{wire}; "
            f"{site.mbps:g} Mbit/s")


def _look(method: str) -> dict[str, Any]:
    tone, hatch = METHODS[method].look
    return {"facecolor": tone, "hatch": hatch, "edgecolor": INK, "linewidth": 0.5}
