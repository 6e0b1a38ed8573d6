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
from eval.dsi import heatmap_costs
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
NAMES = (*(speed_map.name for speed_map in MAPS), *WINNERS)


def main(argv: Sequence[str]) -> int:
    """Compute the costs, draw the maps into the folder `output`, and print a line for each comparison."""
    config = read_keys(argv, Heatmap, f"{COMMAND} heatmap")
    folder = Path(config.output)
    check_folder(folder, "name another folder with output=")

    bests = heatmap_costs.best(config)
    write(folder / "heatmap.csv", heatmap_costs.table(config, bests), SPACE_REMEDY)
    drawn_names = draw(config, bests, folder)
    list(ProgressBar(drawn_names, desc="maps", total=len(NAMES), delay=1, leave=False))

    print("\n".join(heatmap_costs.summary(config, bests)))
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
    x_borders: Array
    y_borders: Array
    legend_entries: list[Patch]

    def fill(self, values: Array, colours: Sequence[Any], borders: Array) -> Any:
        """Fill every cell `[C, A]` with the colour of its band."""
        band_norm = BoundaryNorm(borders, len(colours), clip=True)
        colour_map = ListedColormap(colours)
        return self.axes.pcolormesh(self.x_borders, self.y_borders, values.T,
                                    cmap=colour_map, norm=band_norm, rasterized=True)

    def hatch(self, mask: Array, hatching: Hatching, label: str) -> None:
        """Hatch the cells of a mask `[C, A]`, and add them to the legend with a label."""
        tone, hatch, hatch_colour = hatching
        if hatch and mask.any():
            # both ends of every cell
            x = np.repeat(self.x_borders, 2)[1:-1]
            y = np.repeat(self.y_borders, 2)[1:-1]
            corner_mask = np.kron(mask.T, np.ones((2, 2)))

            hatched_area = self.axes.contourf(x, y, corner_mask, [0.5, 1.5],
                                              colors="none", hatches=[hatch])
            hatched_area.set(edgecolor=hatch_colour, linewidth=0)

        patch_style: dict[str, Any] = {
            "facecolor": tone, "hatch": hatch, "edgecolor": hatch_colour, "linewidth": 0.5}
        self.legend_entries.append(Patch(label=textwrap.fill(label, LINE), **patch_style))


def draw(config: Heatmap, bests: Bests, folder: Path) -> Iterator[str]:
    """Write every map into a folder, as PNG and as PDF, and yield its name, one of NAMES."""
    for speed_map in MAPS:
        title = f"Speed-up of {speed_map.method} over {speed_map.compared}"
        with _map(config, folder / speed_map.name, title) as map_axes:
            _speed_ups(map_axes, speed_map, heatmap_costs.speed_up(speed_map, bests))
        yield speed_map.name

    for name, (methods, title) in WINNERS.items():
        with _map(config, folder / name, title) as map_axes:
            _winners(map_axes, methods, heatmap_costs.fastest(bests, methods))
        yield name


@contextmanager
def _map(config: Heatmap, path: Path, title: str) -> Iterator[Axes]:
    """Open the axes of a map, with its title and the parameters of the costs; write the drawing to files at exit."""
    num_servers = config.num_target_servers
    cost_note = f"simulated; accounting: {config.accounting}, target servers: {num_servers}, hop: {config.hop:g}"

    with new_figure(path, (6.4, 5.4), forms=FORMS, layout="constrained", dpi=160) as axes:
        axes.set_title(f"{title}\n", loc="left", fontsize=12)
        axes.text(0, 1.02, cost_note, transform=axes.transAxes, fontsize=9, color="0.3")
        axes.set_xlabel("Drafter latency (fraction of the target's)")
        axes.set_ylabel("Acceptance rate")

        drafters, acceptances, _ = grid(config)
        legend_entries: list[Patch] = []
        yield Axes(axes, _cell_borders(drafters), _cell_borders(acceptances), legend_entries)

        if legend_entries:
            num_columns = 1 if len(legend_entries) > 2 else 2
            axes.figure.legend(handles=legend_entries, ncols=num_columns, loc="outside lower left", handlelength=2.2,
                               handleheight=1.2)


def _cell_borders(middles: Array) -> Array:
    """Return the borders, `[n + 1]`, of cells with these middles, clipped to 0 and 1."""
    inner_borders = (middles[1:] + middles[:-1]) / 2
    first_border = 2 * middles[0] - inner_borders[0]
    last_border = 2 * middles[-1] - inner_borders[-1]
    return np.clip([first_border, *inner_borders, last_border], 0, 1)


def bands(speed_map: Map, ratio: Array) -> Bands:
    """Return the bands for the speed-ups of a map: slow-downs share the first, and those above `max_band` the last."""
    min_ratio, max_ratio = float(np.nanmin(ratio)), float(np.nanmax(ratio))
    if not speed_map.band_width:
        locator = MaxNLocator(8, steps=[1, 2, 2.5, 5, 10])
        borders = np.round(locator.tick_values(min_ratio, max(max_ratio, min_ratio + NARROW)), 10)
        return Bands(borders, _colours(len(borders) - 1), [f"{border:g}" for border in borders])

    banded_range = min(max_ratio, speed_map.max_band) - 1
    num_bands = max(math.ceil(round(banded_range / speed_map.band_width, 9)), 1)
    band_ends = 1 + speed_map.band_width * np.arange(num_bands + 1)
    borders = np.append(0, band_ends.round(9))

    labels = [f"{border:.0f}" if border == round(border) else f"{border:.2f}" for border in borders]
    if max_ratio > borders[-1]:
        labels[-1] = f"> {labels[-1]}"
    return Bands(borders, [SLOWER[0], *_colours(num_bands)], labels)


def _colours(num_colours: int) -> list[Any]:
    """Return this many colours from dark to bright."""
    return list(matplotlib.colormaps["viridis"](np.linspace(0.08, 1, num_colours)))


def _speed_ups(map_axes: Axes, speed_map: Map, ratio: Array) -> None:
    """Draw a map of speed-ups `[C, A]`."""
    borders, colours, labels = bands(speed_map, ratio)
    mesh = map_axes.fill(ratio, colours, borders)
    axes = map_axes.axes

    colour_bar = axes.figure.colorbar(mesh, ax=axes, spacing="uniform", ticks=borders)
    colour_bar.ax.set_yticklabels(labels)
    colour_bar.set_label(f"cost of {speed_map.compared} / cost of {speed_map.method}")

    if speed_map.band_width:
        map_axes.hatch(ratio < 1, SLOWER, f"{speed_map.method} is slower")
        _, hatch, hatch_colour = SLOWER
        span_style: dict[str, Any] = {"edgecolor": hatch_colour, "hatch": hatch, "linewidth": 0}
        colour_bar.ax.axhspan(0, 1, facecolor="none", **span_style)

    is_missing = np.isnan(ratio)
    if is_missing.any():
        map_axes.hatch(is_missing, MISSING, "no lookahead of the grid is possible with these servers")


def _winners(map_axes: Axes, methods: Sequence[str], is_fastest: Array) -> None:
    """Draw the fastest method of each cell, from `[M, C, A]`; in a tie it is the first of `methods`.

    The legend also lists the other methods of a tie, unless the tie is RARE.
    """
    first_fastest = is_fastest.argmax(0)
    tones = [LOOKS[method][0] for method in methods]
    map_axes.fill(first_fastest, tones, np.arange(len(methods) + 1) - 0.5)

    for i, method in enumerate(methods):
        method_cells = first_fastest == i
        if method_cells.any():
            tie_shares = (method_cells & is_fastest).mean((1, 2))
            later_shares = list(zip(methods, tie_shares))[i + 1:]
            ties = ", ".join(f"{other} {share:.1%}" for other, share in later_shares if share > RARE)

            as_fast = f" (as fast: {ties})" if ties else ""
            map_axes.hatch(method_cells, LOOKS[method], f"{method}: {method_cells.mean():.1%} of the cells{as_fast}")
