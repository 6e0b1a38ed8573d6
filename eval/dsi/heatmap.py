"""Compute the heat maps of the paper on DSI and those of pipelines by formulas, write them as a table, and draw them.

They can be read without colour: slow-downs and cells without a value are hatched.
"""
from __future__ import annotations

import math
import textwrap
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, NamedTuple, Sequence, Tuple

import matplotlib
import numpy as np
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from config.files import SPACE_REMEDY, check_folder, write
from config.keys import read_keys
from config.methods import METHODS
from eval.dsi import heatmap_costs as costs
from eval.dsi.formulas import Array
from eval.dsi.heatmap_costs import ALGORITHMS, MAPS, ONE_COPY, Bests, Map, grid
from eval.dsi.keys import COMMAND, Heatmap
from eval.plots import new_figure
from launch.progress import ProgressBar

FORMS = ("png", "pdf")
RARE = 0.005  # share of the cells: a tie in fewer of them is not listed
NARROW = 0.01  # least range of speed-ups that the bands cover
LINE = 66  # characters per line of a legend
Hatching = Tuple[str, str, str]  # tone, hatch, and the colour of the hatch
SLOWER: Hatching = "#f2b58a", "////", "#8c4a1a"
MISSING: Hatching = "white", "....", "0.65"
AS_METHODS = {"non-SI": "ar", "SI": "serial"}  # algorithms with the look of a method of another name
LOOKS = {name: (*METHODS[AS_METHODS.get(name, name)].look, "0.25") for name in ALGORITHMS if name != "DSI"}
LOOKS["DSI"] = "#20639b", "", "0.25"
WINNERS = {"fastest": (ALGORITHMS, "The fastest method"),
           "fastest_one_copy": (ONE_COPY, "The fastest method with one copy of the target")}
NAMES = (*(one.name for one in MAPS), *WINNERS)


def main(argv: Sequence[str]) -> int:
    """Compute the costs, draw the maps into the folder `output`, and print a line for each comparison."""
    config = read_keys(argv, Heatmap, f"{COMMAND} heatmap")
    folder = Path(config.output)
    check_folder(folder, "name another folder with output=")
    found = costs.best(config)
    write(folder / "heatmap.csv", costs.table(config, found), SPACE_REMEDY)
    bar = ProgressBar(draw(config, found, folder), desc="maps", total=len(NAMES), delay=1, leave=False)
    list(bar)
    print("\n".join(costs.summary(config, found)))
    print(f"The maps are in {folder}, simulated by formulas.")
    return 0


# --- the maps ---------------------------------------------------------------------------------------------------------

class Bands(NamedTuple):
    """The borders of the bands of a map, their colours, and the labels of the borders."""

    borders: Array
    colours: Sequence[Any]
    labels: Sequence[str]


class Axes(NamedTuple):
    """The axes of a map, the borders of its cells along them, and the entries of its legend."""

    axes: Any
    x: Array
    y: Array
    handles: list[Patch]

    def fill(self, values: Array, colours: Sequence[Any], borders: Array) -> Any:
        """Fill every cell `[C, A]` with the colour of its band."""
        norm, tones = BoundaryNorm(borders, len(colours), clip=True), ListedColormap(colours)
        return self.axes.pcolormesh(self.x, self.y, values.T, cmap=tones, norm=norm, rasterized=True)

    def hatch(self, mask: Array, hatching: Hatching, about: str) -> None:
        """Hatch the cells of a mask `[C, A]`, and add `about` to the legend."""
        tone, hatch, ink = hatching
        if hatch and mask.any():
            x, y = (np.repeat(edges, 2)[1:-1] for edges in (self.x, self.y))  # both ends of every cell
            corners = np.kron(mask.T, np.ones((2, 2)))
            area = self.axes.contourf(x, y, corners, [0.5, 1.5], colors="none", hatches=[hatch])
            area.set(edgecolor=ink, linewidth=0)
        drawn: dict[str, Any] = {"facecolor": tone, "hatch": hatch, "edgecolor": ink, "linewidth": 0.5}
        self.handles.append(Patch(label=textwrap.fill(about, LINE), **drawn))


def draw(config: Heatmap, found: Bests, folder: Path) -> Iterator[str]:
    """Write every map into a folder, as PNG and as PDF, and yield its name, one of NAMES."""
    for one in MAPS:
        with _map(config, folder / one.name, f"Speed-up of {one.method} over {one.compared}") as shown:
            _speed_ups(shown, one, costs.speed_up(one, found))
        yield one.name
    for name, (methods, title) in WINNERS.items():
        with _map(config, folder / name, title) as shown:
            _winners(shown, methods, costs.fastest(found, methods))
        yield name


@contextmanager
def _map(config: Heatmap, path: Path, title: str) -> Iterator[Axes]:
    """Open the axes of a map, with its title and the parameters of the costs; write the drawing to files at exit."""
    servers = config.num_target_servers
    about = f"simulated; accounting: {config.accounting}, target servers: {servers}, hop: {config.hop:g}"
    with new_figure(path, (6.4, 5.4), forms=FORMS, layout="constrained", dpi=160) as axes:
        axes.set_title(f"{title}\n", loc="left", fontsize=12)
        axes.text(0, 1.02, about, transform=axes.transAxes, fontsize=9, color="0.3")
        axes.set_xlabel("Drafter latency (fraction of the target's)")
        axes.set_ylabel("Acceptance rate")
        drafters, acceptances, _ = grid(config)
        handles: list[Patch] = []
        yield Axes(axes, _edges(drafters), _edges(acceptances), handles)
        if handles:
            columns = 1 if len(handles) > 2 else 2
            axes.figure.legend(handles=handles, ncols=columns, loc="outside lower left", handlelength=2.2,
                               handleheight=1.2)


def _edges(middles: Array) -> Array:
    """Return the borders, `[n + 1]`, of cells with these middles, clipped to 0 and 1."""
    between = (middles[1:] + middles[:-1]) / 2
    first = 2 * middles[0] - between[0]
    last = 2 * middles[-1] - between[-1]
    return np.clip([first, *between, last], 0, 1)


def bands(one: Map, ratio: Array) -> Bands:
    """Return the bands for the speed-ups of a map: all slow-downs share the first, and all above `most` the last."""
    least, largest = float(np.nanmin(ratio)), float(np.nanmax(ratio))
    if not one.step:
        ticks = MaxNLocator(8, steps=[1, 2, 2.5, 5, 10])
        borders = np.round(ticks.tick_values(least, max(largest, least + NARROW)), 10)
        return Bands(borders, _colours(len(borders) - 1), [f"{border:g}" for border in borders])
    width = min(largest, one.most) - 1
    count = max(math.ceil(round(width / one.step, 9)), 1)
    borders = np.append(0, (1 + one.step * np.arange(count + 1)).round(9))
    labels = [f"{border:.0f}" if border == round(border) else f"{border:.2f}" for border in borders]
    if largest > borders[-1]:
        labels[-1] = f"> {labels[-1]}"
    return Bands(borders, [SLOWER[0], *_colours(count)], labels)


def _colours(count: int) -> list[Any]:
    """Return this many colours from dark to bright."""
    return list(matplotlib.colormaps["viridis"](np.linspace(0.08, 1, count)))


def _speed_ups(shown: Axes, one: Map, ratio: Array) -> None:
    """Draw a map of speed-ups `[C, A]`."""
    borders, colours, labels = bands(one, ratio)
    mesh = shown.fill(ratio, colours, borders)
    axes = shown.axes
    bar = axes.figure.colorbar(mesh, ax=axes, spacing="uniform", ticks=borders)
    bar.ax.set_yticklabels(labels)
    bar.set_label(f"cost of {one.compared} / cost of {one.method}")
    if one.step:
        shown.hatch(ratio < 1, SLOWER, f"{one.method} is slower")
        _, hatch, ink = SLOWER
        band: dict[str, Any] = {"edgecolor": ink, "hatch": hatch, "linewidth": 0}
        bar.ax.axhspan(0, 1, facecolor="none", **band)
    missing = np.isnan(ratio)
    if missing.any():
        shown.hatch(missing, MISSING, "no lookahead of the grid is possible with these servers")


def _winners(shown: Axes, names: Sequence[str], is_fastest: Array) -> None:
    """Draw the fastest method of each cell, from `[M, C, A]`; in a tie it is the first of `names`.

    The legend also lists the other methods of a tie, unless the tie is RARE.
    """
    first = is_fastest.argmax(0)
    tones = [LOOKS[name][0] for name in names]
    shown.fill(first, tones, np.arange(len(names) + 1) - 0.5)
    for i, name in enumerate(names):
        own = first == i
        if own.any():
            shares = (own & is_fastest).mean((1, 2))
            others = list(zip(names, shares))[i + 1:]
            ties = ", ".join(f"{other} {share:.1%}" for other, share in others if share > RARE)
            as_fast = f" (as fast: {ties})" if ties else ""
            shown.hatch(own, LOOKS[name], f"{name}: {own.mean():.1%} of the cells{as_fast}")
