"""The plots: bars and lines as PNG, readable without colour: hatches, markers and dashes tell methods apart.

They know nothing about how figures come about. Every title says whether they were measured, emulated or simulated.
"""
from __future__ import annotations

import io
import textwrap
from pathlib import Path
from typing import Any, Iterator, Mapping, NamedTuple, Sequence

import matplotlib
import numpy as np

matplotlib.use("Agg")  # no screen is needed
from matplotlib import pyplot as plt  # noqa: E402

from config.files import ROOM, write  # noqa: E402
from config.methods import METHODS  # noqa: E402
from eval.metrics import Answer, Interval  # noqa: E402
from eval.summary import BASES, MEAN, SHARES, Found, Row, means, spent  # noqa: E402

STYLE = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "hatch.linewidth": 0.7,
         "axes.titlesize": 11, "legend.frameon": False, "figure.dpi": 130, "axes.axisbelow": True}
HATCHES = ("", "////", "....", "xxx", "\\\\\\\\", "", "++", "oo", "--", "**")
TONES = ("#f2f2f2", "#bcdff5", "#fde8b0", "#cfe8cf", "#e8603c", "#5b6fb5", "#d9c2e9", "#8c8c8c", "#f7c6d0", "#ffffff")
MARKERS, DASHES = "osD^vP*Xd<", ("-", "--", ":", "-.", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1)), "--", ":", "-.")


class Series(NamedTuple):
    """A line of a sweep, or a group of bars: one value with its bounds for each place."""

    name: str
    values: Sequence[Interval]


def _look(name: str) -> int:
    """A method looks the same in every plot."""
    return list(METHODS).index(name) % len(HATCHES) if name in METHODS else sum(map(ord, name)) % len(HATCHES)


def draw(found: Found, rows: Sequence[Row]) -> Iterator[str]:
    """All plots of a results folder, written into it; their names."""
    for temperature in found.temperatures:
        base = next((base for base in BASES if base in found.methods), None)
        if base and len(found.methods) > 1:
            name = f"speedup-t{temperature:g}.png"
            title = f"Speed-up over {base}, temperature {temperature:g} ({found.world})"
            bars(found.folder / name, _ratios(found, rows, temperature, base), [*found.sets, MEAN], title,
                 ("data set", "SR"))
            yield name
        name = f"progress-t{temperature:g}.png"
        _progress(found, temperature, found.folder / name)
        yield name
        name = f"stages-t{temperature:g}.png"
        if _stages(found, temperature, found.folder / name):
            yield name


def _ratios(found: Found, rows: Sequence[Row], temperature: float, base: str) -> list[Series]:
    cells = {(row["method"], row["set"]): Interval(*(row[f"sr_{base}{bound}"] for bound in ("", "_low", "_high")))
             for row in rows if row["temperature"] == temperature}
    nothing = Interval(np.nan, np.nan, np.nan)
    return [Series(method, [*(cells.get((method, name), nothing) for name in found.sets),
                            means(found, method, temperature)[f"sr_{base}"]]) for method in found.methods]


def bars(path: Path, series: Sequence[Series], places: Sequence[str], title: str, labels: tuple[str, str]) -> None:
    """Groups of bars with whiskers; those of the last group are labelled, all of them if there are few."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(max(6.0, 0.22 * len(series) * len(places) + 2.5), 3.8))
        width = 0.82 / len(series)
        few = len(series) * len(places) <= 16
        for i, one in enumerate(series):
            x, look = np.arange(len(places)) + (i - (len(series) - 1) / 2) * width, _look(one.name)
            axes.bar(x, [v.value for v in one.values], width, color=TONES[look], edgecolor="black", linewidth=0.8,
                     hatch=HATCHES[look], label=one.name, yerr=_whiskers(one.values), ecolor="black", capsize=2,
                     error_kw={"elinewidth": 0.8})
            for place, bar in zip(x, one.values):
                if bar.value == bar.value and (few or place > len(places) - 1.5):
                    axes.annotate(f"{bar.value:.2f}", (place, np.fmax(bar.value, bar.high)), (0, 3), fontsize=8,
                                  textcoords="offset points", ha="center", va="bottom", rotation=0 if few else 90)
        if labels[1] == "SR":
            axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
        axes.set_xticks(range(len(places)), places)
        axes.set_xlabel(labels[0])
        axes.set_ylabel(labels[1])
        axes.margins(y=0.12)
        _head(axes, title, len(series))
        _write(figure, path)


def _head(axes: Any, title: str, entries: int) -> None:
    """The title, and below it the legend."""
    axes.set_title(textwrap.fill(title, int(11 * axes.figure.get_figwidth())), loc="left", pad=26)
    axes.legend(ncols=entries, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2, handlelength=2.2,
                columnspacing=1.2)


def lines(path: Path, series: Sequence[Series], places: Sequence[float], title: str, labels: tuple[str, str]) -> None:
    """A line with whiskers for each series; `labels` are those of the axes."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(6.4, 3.8))
        for one in series:
            look = _look(one.name)
            axes.errorbar(places, [v.value for v in one.values], yerr=_whiskers(one.values), marker=MARKERS[look],
                          linestyle=DASHES[look], color="black", markerfacecolor=TONES[look], markersize=7, capsize=3,
                          elinewidth=0.8, label=one.name)
        if min(places) > 0 and max(places) >= 8 * min(places):
            axes.set_xscale("log", base=2)
            axes.minorticks_off()
        axes.set_xticks(places, [f"{place:g}" for place in places])
        axes.set_xlabel(labels[0])
        axes.set_ylabel(labels[1])
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", color="0.9")
        _head(axes, title, len(series))
        _write(figure, path)


def _whiskers(values: Sequence[Interval]) -> np.ndarray:
    """Distances to the bounds, `[2, places]`; none where there are no bounds."""
    gaps = np.array([[v.value - v.low for v in values], [v.high - v.value for v in values]])
    return np.maximum(np.nan_to_num(gaps), 0)


def _progress(found: Found, temperature: float, path: Path) -> None:
    """How the text grows: tokens settled after so many seconds, the mean over the answers."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(6.4, 3.8))
        for method in found.methods:
            answers = [answer for name in found.sets for answer in found.of(method, name, temperature)]
            if any(turn for answer in answers for turn in answer["settled"]):
                look, (time, count) = _look(method), _growth(answers)
                axes.plot(time, count, marker=MARKERS[look], markevery=(look, 12), linestyle=DASHES[look], linewidth=1,
                          color="black", markerfacecolor=TONES[look], label=method)
        axes.set_xlabel("seconds since the request began")
        axes.set_ylabel("tokens settled, mean over answers")
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.grid(color="0.9")
        axes.legend(loc="lower right", frameon=True, edgecolor="none")
        axes.set_title(f"How the text grows, temperature {temperature:g} ({found.world})", loc="left")
        _write(figure, path)


def _growth(answers: Sequence[Answer]) -> tuple[np.ndarray, np.ndarray]:
    """Seconds, and the mean number of tokens that all turns had settled by then."""
    turns = [np.array(turn, dtype=float) for answer in answers for turn in answer["settled"] if turn]
    time = np.linspace(0, max(turn[-1, 0] for turn in turns), 97)
    count = [np.concatenate([[0], turn[:, 1].cumsum()])[np.searchsorted(turn[:, 0], time, "right")] for turn in turns]
    return time, np.mean(count, 0)


def _stages(found: Found, temperature: float, path: Path) -> bool:
    """A bar per rank and method, stacked of what the rank did; False if no rank has told."""
    told: Mapping[str, Any] = {method: spent(found, [answer for name in found.sets
                                                     for answer in found.of(method, name, temperature)])
                               for method in found.methods}
    told = {method: ranks for method, ranks in told.items() if ranks}
    if not told:
        return False
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(1, len(told), sharey=True, squeeze=False, figsize=(1.75 * len(told) + 1.2, 2.9))
        for axes, (method, ranks) in zip(grid[0], told.items()):
            left = np.zeros(len(ranks))
            for i, (share, tone, hatch) in enumerate(zip(SHARES, ("#5b6fb5", "white", "0.9", "#fde8b0"),
                                                         ("", "////", "", "...."))):
                width = np.array([spent[i] for spent in ranks.values()])
                axes.barh([str(rank) for rank in ranks], width, left=left, color=tone, hatch=hatch, edgecolor="black",
                          linewidth=0.8, label=share)
                left += width
            axes.set_title(method, fontsize=10)
            axes.set_xlim(0, 1)
            axes.set_xticks([0, 0.5, 1], ["0", "50", "100"])
            axes.set_xlabel("% of its time")
        grid[0][0].invert_yaxis()
        grid[0][0].set_ylabel("rank (0 drafts)")
        figure.suptitle(f"What each rank did, temperature {temperature:g} ({found.world})", x=0.01, y=1.13, ha="left",
                        fontsize=11)
        handles, names = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, names, ncols=len(SHARES), loc="upper left", bbox_to_anchor=(0, 1.09), handlelength=1.8)
        _write(figure, path)
    return True


def _write(figure: Any, path: Path) -> None:
    picture = io.BytesIO()
    figure.savefig(picture, bbox_inches="tight")
    plt.close(figure)
    write(path, picture.getvalue(), ROOM)
