"""The plots: bars and lines as PNG, readable without colour, since methods differ in hatches, markers and dashes.

Every title states whether the figures were measured, emulated or simulated.
"""
from __future__ import annotations

import io
import itertools
import math
import textwrap
from collections import Counter
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any, Iterator, Mapping, NamedTuple, Sequence, Tuple

import matplotlib
import numpy as np

matplotlib.use("Agg")  # no screen is needed
from matplotlib import pyplot as plt  # noqa: E402

from config.files import SPACE_REMEDY, write  # noqa: E402
from config.methods import METHODS  # noqa: E402
from eval.metrics import NO_INTERVAL, Interval  # noqa: E402
from eval.summary import AR, MEAN, TemperatureView  # noqa: E402

STYLE = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "hatch.linewidth": 0.7,
         "axes.titlesize": 11, "legend.frameon": False, "figure.dpi": 130, "axes.axisbelow": True}
LOOKS = [about.look for about in METHODS.values()]  # tones and hatches
MARKERS = "osD^vP*Xd<>ph8H"  # as many as there are methods; an added method may share the first
LONG, DENSE = (0, (5, 1)), (0, (1, 1))  # offset, and lengths of strokes and gaps
MIXED = (0, (3, 1, 1, 1))
DASHES = ("-", "--", ":", "-.", LONG, DENSE, MIXED, "--", ":", "-.")
SPENT: Mapping[str, tuple[str, str]] = {  # tone and hatch
    "drafting": ("#e8603c", ""), "verdict": ("#5b6fb5", "...."), "waiting": ("white", "////"),
    "prefill": ("#fde8b0", ""), "other": ("0.8", "xxx")}
EDGE = {"edgecolor": "black", "linewidth": 0.8}  # of bars
LINE_SIZE = (6.4, 3.8)  # inches
TREE = "serial"  # the method that sends one tree at a time
MAX_LEVEL_LABELS = 16  # bars whose labels have room beside each other
Labels = Tuple[str, str]  # of the x axis and the y axis


class Series(NamedTuple):
    """A line of a sweep, or the bars of a method: a value with its bounds for each place."""

    name: str
    values: Sequence[Interval]

    @property
    def heights(self) -> list[float]:
        return [interval.value for interval in self.values]

    @property
    def whiskers(self) -> np.ndarray:
        """Distances from the values to their bounds, `[2, places]`; 0 without bounds."""
        value, low, high = np.array(self.values).T
        return np.maximum(np.nan_to_num([value - low, high - value]), 0)


PlottedSeries = Sequence[Series]


class Style(NamedTuple):
    """The look of a contender, which is the same in every plot; tone and marker are those of its method."""

    tone: str
    hatch: str
    marker: str
    dashes: Any


def styles_of(names: Sequence[str]) -> dict[str, Style]:
    """Return the styles of the contenders of a plot, by their labels, which are in the order of all plots."""
    styles: dict[str, Style] = {}
    num_drafts: Counter[str] = Counter()
    for label in names:
        method = label.partition(", ")[0]
        method_number = list(METHODS).index(method) if method in METHODS else sum(map(ord, method))
        tone_index = method_number % len(LOOKS)
        hatch_index = (tone_index + 3 * num_drafts[method]) % len(LOOKS)

        tone, hatch = LOOKS[tone_index][0], LOOKS[hatch_index][1]
        marker, dashes = MARKERS[tone_index % len(MARKERS)], DASHES[hatch_index % len(DASHES)]
        styles[label] = Style(tone, hatch, marker, dashes)
        num_drafts[method] += 1
    return styles


@contextmanager
def new_figure(path: str | Path, size: tuple[float, float], **options: Any) -> Iterator[Any]:
    """Yield the axes of a figure; then write the figure to a file."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=size, **options)
        yield axes
        picture = io.BytesIO()
        figure.savefig(picture, format=Path(path).suffix[1:], bbox_inches="tight")
        write(path, picture.getvalue(), SPACE_REMEDY)
        plt.close(figure)


# --- kinds of plots ---------------------------------------------------------------------------------------------------

def bars(path: Path, series: PlottedSeries, x_labels: Sequence[str], title: str, axis_labels: Labels) -> None:
    """Draw groups of bars with whiskers and labels, which are upright if the bars are many."""
    num_bars = len(series) * len(x_labels)
    bar_width = 0.82 / len(series)
    styles = styles_of([method_bars.name for method_bars in series])

    with new_figure(path, (max(6.0, 0.22 * num_bars + 2.5), 3.8)) as axes:
        for series_index, method_bars in enumerate(series):
            bars_from_middle = series_index - (len(series) - 1) / 2
            bar_positions = np.arange(len(x_labels)) + bars_from_middle * bar_width
            style = styles[method_bars.name]
            drawn_bars = axes.bar(bar_positions, method_bars.heights, bar_width, **EDGE,
                                  label=method_bars.name, color=style.tone, hatch=style.hatch,
                                  error_kw={"elinewidth": 0.8}, yerr=method_bars.whiskers, ecolor="black", capsize=2)

            label_angle = 0 if num_bars <= MAX_LEVEL_LABELS else 90
            axes.bar_label(drawn_bars, fmt="%.2f", padding=3, fontsize=8, rotation=label_angle)

        if axis_labels[1] == "SR":
            axes.axhline(1, color="black", linewidth=0.8, linestyle=":")

        axes.set_xticks(range(len(x_labels)), x_labels)
        axes.set(xlabel=axis_labels[0], ylabel=axis_labels[1])
        axes.margins(y=0.12)
        _head(axes, title)


def _head(axes: Any, title: str) -> None:
    """Write the title, and the legend below it, in as many rows as its entries need."""
    line_length = int(11 * axes.figure.get_figwidth())  # characters in a line
    labels = axes.get_legend_handles_labels()[1]
    max_label_length = max(map(len, labels))
    num_columns = min(len(labels), max(1, line_length // (max_label_length + 8)))
    num_rows = math.ceil(len(labels) / num_columns)

    axes.set_title(textwrap.fill(title, line_length), loc="left", pad=10 + 16 * num_rows)
    axes.legend(ncols=num_columns, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2,
                handlelength=2.2, columnspacing=1.2)


def lines(path: Path, series: PlottedSeries, x_values: Sequence[float], title: str, axis_labels: Labels) -> None:
    """Draw a line with whiskers for each series; the x axis is logarithmic if the places span a factor of 8."""
    styles = styles_of([line.name for line in series])

    with new_figure(path, LINE_SIZE) as axes:
        for line in series:
            style = styles[line.name]
            axes.errorbar(x_values, line.heights, yerr=line.whiskers, label=line.name,
                          linestyle=style.dashes, color="black", marker=style.marker,
                          markerfacecolor=style.tone, markersize=7, capsize=3, elinewidth=0.8)

        if min(x_values) > 0 and max(x_values) >= 8 * min(x_values):
            axes.set_xscale("log", base=2)
            axes.minorticks_off()

        axes.set_xticks(x_values, [f"{x_value:g}" for x_value in x_values])
        axes.set(xlabel=axis_labels[0], ylabel=axis_labels[1])
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", color="0.9")
        _head(axes, title)


# --- of a results folder ----------------------------------------------------------------------------------------------

def draw(views: Sequence[TemperatureView]) -> Iterator[str]:
    """Write all plots of a results folder into it; yield their names."""
    plots = {"speedup": _speed_ups, "account": _account, "acceptance": _acceptance}
    for view, (kind, plot) in itertools.product(views, plots.items()):
        path = view.results.folder / f"{kind}-t{view.temperature:g}.png"
        if plot(view, path, f"temperature {view.temperature:g} {view.where}"):
            yield path.name


def _speed_ups(view: TemperatureView, path: Path, where: str) -> bool:
    """Draw speed-ups over the first baseline that has answers; return False without one, or without others."""
    results, baseline = view.results, view.results.baseline
    if baseline.method not in results.methods or len(results.contenders) < 2:
        return False

    series, ratio_of = [], itemgetter(f"sr_{baseline.method}")
    for label, by_set in view.rows.items():
        cells = view.cells(label, ratio_of, NO_INTERVAL)
        series.append(Series(label, [*cells, ratio_of(by_set[MEAN])]))

    bars(path, series, [*results.sets, MEAN], f"Speed-up over {results.label(baseline)}, {where}", ("data set", "SR"))
    return True


def _account(view: TemperatureView, path: Path, where: str) -> bool:
    """Draw a bar for each contender, stacked from the parts of its time per token; return False without any."""
    accounts = view.means("account")
    if not accounts:
        return False

    with new_figure(path, (7.2, 0.42 * len(accounts) + 1.3)) as axes:
        left_edges = np.zeros(len(accounts))
        for part, (tone, hatch) in SPENT.items():
            widths = np.array([1e3 * getattr(account, part) for account in accounts.values()])
            last_bars = axes.barh(list(accounts), widths, left=left_edges,
                                  color=tone, hatch=hatch, label=part, **EDGE)
            left_edges = left_edges + widths

        axes.bar_label(last_bars, fmt="%.0f", padding=3, fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel("ms per token")
        _head(axes, f"Where the time of a token went, {where}")
    return True


def _acceptance(view: TemperatureView, path: Path, where: str) -> bool:
    """Draw speed-ups over one tree at a time by the acceptance of a chain; return False with fewer than two drafts."""
    rows_by_acceptance = view.by_acceptance(MEAN)
    if len(rows_by_acceptance) < 2 or TREE not in view.results.methods:
        return False

    speed_up_of = itemgetter(f"sr_{TREE}_same")
    series = [Series(method, [speed_up_of(rows[method]) for _, rows in rows_by_acceptance])
              for method in view.results.methods if method not in (AR.method, TREE)]
    shares = [round(share, 2) for share, _ in rows_by_acceptance]
    title = f"Speed-up over {TREE} by the share of a chain's guesses that are right, {where}"
    lines(path, series, shares, title, ("share of guesses that are right", "SR"))
    return True
