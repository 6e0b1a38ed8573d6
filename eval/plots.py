"""The plots: bars and lines as PNG, readable without colour: hatches, markers and dashes tell methods apart.

They do not know how figures are computed. Every title says whether they were measured, emulated or simulated.
"""
from __future__ import annotations

import io
import math
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any, Dict, Iterator, NamedTuple, Sequence, Tuple

import matplotlib
import numpy as np

matplotlib.use("Agg")  # no screen is needed
from matplotlib import pyplot as plt  # noqa: E402

from config.files import ROOM, write  # noqa: E402
from config.methods import METHODS  # noqa: E402
from eval.keys import Contender  # noqa: E402
from eval.metrics import NAN, Answer, Interval, Utilization  # noqa: E402
from eval.results_index import Found  # noqa: E402
from eval.summary import BASELINES, BOUNDS, MEAN, Row, accounts_of_all_sets, means, utilization  # noqa: E402

STYLE = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "hatch.linewidth": 0.7,
         "axes.titlesize": 11, "legend.frameon": False, "figure.dpi": 130, "axes.axisbelow": True}
HATCHES = ("", "////", "....", "xxx", "\\\\\\\\", "", "++", "oo", "--", "**")
TONES = ("#f2f2f2", "#bcdff5", "#fde8b0", "#cfe8cf", "#e8603c", "#5b6fb5", "#d9c2e9", "#8c8c8c", "#f7c6d0", "#ffffff")
MARKERS = "osD^vP*Xd<"
LONG, DENSE = (0, (5, 1)), (0, (1, 1))  # offset, and lengths of strokes and gaps
MIXED = (0, (3, 1, 1, 1))
DASHES = ("-", "--", ":", "-.", LONG, DENSE, MIXED, "--", ":", "-.")
FILLS = {"computed": ("#5b6fb5", ""), "waited": ("white", "////"),
         "idle": ("0.9", ""), "other": ("#fde8b0", "....")}  # tone and hatch
SPENT = {"drafting": ("#e8603c", ""), "verdict": ("#5b6fb5", "...."), "waiting": ("white", "////"),
         "prefill": ("#fde8b0", ""), "other": ("0.8", "xxx")}
ABREAST = 8  # contenders in a row of a plot
Ranks = Dict[int, Utilization]
Labels = Tuple[str, str]  # of the x axis and the y axis


class Series(NamedTuple):
    """A line of a sweep, or the bars of a method: one value with its bounds for each place."""

    name: str
    values: Sequence[Interval]

    @property
    def heights(self) -> list[float]:
        """The values without their bounds."""
        return [interval.value for interval in self.values]


class Grid(NamedTuple):
    """The places of a grid, row by row, and what rows and columns mean."""

    rows: Sequence[str]
    columns: Sequence[str]
    down: str
    across: str


class Look(NamedTuple):
    """How a contender is drawn: it looks the same in every plot, and has the tone and the marker of its method."""

    number: int
    tone: str
    hatch: str
    marker: str
    dashes: Any


def _looks(names: Sequence[str]) -> dict[str, Look]:
    """How the contenders of a plot are drawn, by their labels, in the order in which all plots have them."""
    looks: dict[str, Look] = {}
    drafts: Counter[str] = Counter()
    for name in names:
        method = name.partition(", ")[0]
        number = list(METHODS).index(method) if method in METHODS else sum(map(ord, method))
        i = number % len(HATCHES)
        j = (i + 3 * drafts[method]) % len(HATCHES)
        looks[name] = Look(i, TONES[i], HATCHES[j], MARKERS[i], DASHES[j])
        drafts[method] += 1
    return looks


def draw(found: Found, rows: Sequence[Row]) -> Iterator[str]:
    """Write all plots of a results folder into it; their names."""
    for temperature in found.temperatures:
        name = f"speedup-t{temperature:g}.png"
        if _speed_ups(found, rows, temperature, found.folder / name):
            yield name
        name = f"progress-t{temperature:g}.png"
        _progress(found, temperature, found.folder / name)
        yield name
        name = f"stages-t{temperature:g}.png"
        if _stages(found, temperature, found.folder / name):
            yield name
        name = f"account-t{temperature:g}.png"
        if _account(found, temperature, found.folder / name):
            yield name


def _speed_ups(found: Found, rows: Sequence[Row], temperature: float, path: Path) -> bool:
    """Bars of the speed-ups over the first baseline that has answers; False without one, or with nothing else."""
    baseline = next((name for name in BASELINES if name in found.methods), None)
    if baseline is None or len(found.contenders) < 2:
        return False
    named = found.label(Contender(baseline, found.baseline_draft))
    ratio = f"sr_{baseline}"
    cells = {}
    for row in rows:
        if row["temperature"] == temperature:
            interval = [row[f"{ratio}{bound}"] for bound in BOUNDS]
            cells[row["method"], row["draft"], row["set"]] = Interval(*interval)
    nothing = Interval(NAN, NAN, NAN)
    series = []
    for contender in found.contenders:
        values = [cells.get((*contender, name), nothing) for name in found.sets]
        mean = means(found, contender, temperature)[ratio]
        series.append(Series(found.label(contender), [*values, mean]))
    title = f"Speed-up over {named}, temperature {temperature:g} ({found.provenance})"
    bars(path, series, [*found.sets, MEAN], title, ("data set", "SR"))
    return True


def bars(path: Path, series: Sequence[Series], places: Sequence[str], title: str, labels: Labels) -> None:
    """Draw groups of bars with whiskers; those of the last group are labelled, all of them if there are few."""
    with plt.rc_context(STYLE):
        count = len(series) * len(places)
        figure, axes = plt.subplots(figsize=(max(6.0, 0.22 * count + 2.5), 3.8))
        width = 0.82 / len(series)
        few = count <= 16
        looks = _looks([one.name for one in series])
        for i, one in enumerate(series):
            offset = (i - (len(series) - 1) / 2) * width
            x = np.arange(len(places)) + offset
            look = looks[one.name]
            whiskers: dict[str, Any] = {"yerr": _whiskers(one.values), "ecolor": "black", "capsize": 2}
            axes.bar(x, one.heights, width, label=one.name, color=look.tone, hatch=look.hatch,
                     edgecolor="black", linewidth=0.8, error_kw={"elinewidth": 0.8}, **whiskers)
            for place, value in zip(x, one.values):
                if few or place > len(places) - 1.5:
                    _annotate(axes, place, value, 0 if few else 90)
        if labels[1] == "SR":
            axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
        axes.set_xticks(range(len(places)), places)
        axes.set_xlabel(labels[0])
        axes.set_ylabel(labels[1])
        axes.margins(y=0.12)
        _head(axes, title)
        _write(figure, path)


def _annotate(axes: Any, place: float, value: Interval, rotation: int) -> None:
    """Write a bar's value above its whisker, unless it was not measured."""
    if value.value == value.value:
        top = np.fmax(value.value, value.high)
        axes.annotate(f"{value.value:.2f}", (place, top), (0, 3), textcoords="offset points",
                      fontsize=8, ha="center", va="bottom", rotation=rotation)


def _head(axes: Any, title: str) -> None:
    """Write the title, and the legend below it, in as many rows as its entries need."""
    room = int(11 * axes.figure.get_figwidth())  # characters in a line
    names = axes.get_legend_handles_labels()[1]
    columns = min(len(names), max(1, room // (max(map(len, names)) + 8)))
    rows = math.ceil(len(names) / columns)
    axes.set_title(textwrap.fill(title, room), loc="left", pad=10 + 16 * rows)
    axes.legend(ncols=columns, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2,
                handlelength=2.2, columnspacing=1.2)


def lines(path: Path, series: Sequence[Series], places: Sequence[float], title: str, labels: Labels) -> None:
    """Draw a line with whiskers for each series; the x axis is logarithmic if the places span a factor of 8."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(6.4, 3.8))
        looks = _looks([one.name for one in series])
        for one in series:
            look = looks[one.name]
            axes.errorbar(places, one.heights, yerr=_whiskers(one.values), label=one.name,
                          linestyle=look.dashes, color="black", marker=look.marker,
                          markerfacecolor=look.tone, markersize=7, capsize=3, elinewidth=0.8)
        if min(places) > 0 and max(places) >= 8 * min(places):
            axes.set_xscale("log", base=2)
            axes.minorticks_off()
        axes.set_xticks(places, [f"{place:g}" for place in places])
        axes.set_xlabel(labels[0])
        axes.set_ylabel(labels[1])
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", color="0.9")
        _head(axes, title)
        _write(figure, path)


def heat(path: Path, series: Sequence[Series], places: Grid, title: str) -> None:
    """Draw a grid of cells for each series, brighter where the value is larger, which each cell says as well."""
    shape = len(places.rows), len(places.columns)
    with plt.rc_context({**STYLE, "axes.spines.left": False, "axes.spines.bottom": False}):
        size = (max(6.0, (0.62 * shape[1] + 1.2) * len(series)), 0.5 * shape[0] + 1.4)
        figure, grid = plt.subplots(1, len(series), squeeze=False, figsize=size, layout="constrained")
        for axes, one in zip(grid[0], series):
            cells = np.array(one.heights).reshape(shape)
            picture = axes.imshow(cells, cmap="cividis", aspect="auto")
            for (row, column), value in np.ndenumerate(cells):
                if value == value:
                    dark = picture.norm(value) < 0.5
                    axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8,
                              color="white" if dark else "black")
            axes.set_xticks(range(shape[1]), places.columns)
            axes.set_yticks(range(shape[0]), places.rows)
            axes.tick_params(length=0)
            axes.set_title(one.name, fontsize=10)
            axes.set_xlabel(places.across)
        grid[0][0].set_ylabel(places.down)
        room = int(11 * size[0])
        figure.suptitle(textwrap.fill(f"{title}, tokens/s", room), x=0.01, ha="left", fontsize=11)
        _write(figure, path)


def _whiskers(values: Sequence[Interval]) -> np.ndarray:
    """Distances from the values to their bounds, `[2, places]`; 0 where there are no bounds."""
    below = [interval.value - interval.low for interval in values]
    above = [interval.high - interval.value for interval in values]
    return np.maximum(np.nan_to_num(np.array([below, above])), 0)


def _progress(found: Found, temperature: float, path: Path) -> None:
    """Draw how the text grows: tokens settled after so many seconds, the mean over the turns of all answers."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(6.4, 3.8))
        looks = _looks(list(map(found.label, found.contenders)))
        for contender, (label, look) in zip(found.contenders, looks.items()):
            answers = found.of_all_sets(contender, temperature)
            if any(turn for answer in answers for turn in answer["settled"]):
                axes.plot(*_growth(answers), label=label,
                          color="black", linestyle=look.dashes, linewidth=1,
                          marker=look.marker, markevery=(look.number, 12), markerfacecolor=look.tone)
        axes.set_xlabel("seconds since the request began")
        axes.set_ylabel("tokens settled, mean over answers")
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.grid(color="0.9")
        axes.legend(loc="lower right", frameon=True, edgecolor="none")
        axes.set_title(f"How the text grows, temperature {temperature:g} ({found.provenance})", loc="left")
        _write(figure, path)


def _growth(answers: Sequence[Answer]) -> tuple[np.ndarray, np.ndarray]:
    """Seconds `[97]`, and the mean number of tokens `[97]` that all turns had settled by then."""
    settled = [turn for answer in answers for turn in answer["settled"]]
    turns = [np.array(turn, dtype=float) for turn in settled if turn]
    time = np.linspace(0, max(turn[-1, 0] for turn in turns), 97)
    counts = []
    for turn in turns:
        total = np.concatenate([[0], turn[:, 1].cumsum()])
        counts.append(total[np.searchsorted(turn[:, 0], time, "right")])
    return time, np.mean(counts, 0)


def _stages(found: Found, temperature: float, path: Path) -> bool:
    """Draw a bar for each rank and contender, stacked of what the rank did; False if there is no tally."""
    ranks_of: dict[str, Ranks] = {}
    for contender in found.contenders:
        if ranks := utilization(found, found.of_all_sets(contender, temperature)):
            ranks_of[found.label(contender)] = ranks
    if not ranks_of:
        return False
    columns = min(len(ranks_of), ABREAST)
    rows = math.ceil(len(ranks_of) / columns)
    with plt.rc_context(STYLE):
        size = (1.75 * columns + 1.2, 2.9 * rows)
        figure, grid = plt.subplots(rows, columns, sharey=True, squeeze=False, figsize=size, layout="constrained")
        first, places = grid[0][0], grid.flatten()
        for axes, (label, ranks) in zip(places, ranks_of.items()):
            _stack(axes, ranks)
            axes.set_title(label.replace(", ", ",\n"), fontsize=9)
        for axes in places[len(ranks_of):]:
            axes.axis("off")
        first.invert_yaxis()
        first.set_ylabel("rank (0 drafts)")
        title = f"What each rank did, temperature {temperature:g} ({found.provenance})"
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        handles, names = first.get_legend_handles_labels()
        figure.legend(handles, names, ncols=len(names), handlelength=1.8, loc="outside lower left")
        _write(figure, path)
    return True


def _stack(axes: Any, ranks: Ranks) -> None:
    """Draw a bar for each rank; its pieces are the fractions of the rank's time."""
    names = [str(rank) for rank in ranks]
    left = np.zeros(len(ranks))
    for activity, (tone, hatch) in FILLS.items():
        width = np.array([getattr(used, activity) for used in ranks.values()])
        axes.barh(names, width, left=left, color=tone, hatch=hatch, edgecolor="black",
                  linewidth=0.8, label=activity)
        left += width
    axes.set_xlim(0, 1)
    axes.set_xticks([0, 0.5, 1], ["0", "50", "100"])
    axes.set_xlabel("% of its time")


def _account(found: Found, temperature: float, path: Path) -> bool:
    """Draw a bar for each contender, stacked of what its tokens' time went into; False if the tally has none of it."""
    seen = accounts_of_all_sets(found, temperature)
    if not seen:
        return False
    names = list(seen)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7.2, 0.42 * len(names) + 1.3))
        left = np.zeros(len(names))
        for share, (tone, hatch) in SPENT.items():
            width = np.array([1e3 * getattr(own, share) for own in seen.values()])
            axes.barh(names, width, left=left, color=tone, hatch=hatch, edgecolor="black", linewidth=0.8, label=share)
            left += width
        for place, total in enumerate(left.tolist()):
            axes.annotate(f"{total:.0f}", (total, place), (3, 0), textcoords="offset points", fontsize=8, va="center")
        axes.invert_yaxis()
        axes.set_xlabel("ms per token")
        _head(axes, f"Where the time of a token went, temperature {temperature:g} ({found.provenance})")
        _write(figure, path)
    return True


def _write(figure: Any, path: Path) -> None:
    picture = io.BytesIO()
    figure.savefig(picture, bbox_inches="tight")
    plt.close(figure)
    write(path, picture.getvalue(), ROOM)
