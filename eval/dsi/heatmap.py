"""Compute the heat maps of the paper on DSI and those of pipelines by formulas, write them as a table, and draw them.

They can be read without colour: slow-downs and cells without a value are hatched.
"""
from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, NamedTuple, Sequence

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

NARROW = 0.01  # least range of speed-ups that the bands cover
SLOWER, MISSING = ("#f2b58a", "////"), ("white", "....")  # tones and hatches
HATCH_COLOUR = "0.25"
METHOD_NAMES = {"non-SI": "ar", "SI": "serial", "DSI": "dsi"}  # of algorithms that METHODS has by another name
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

class MapAxes(NamedTuple):
    """The axes of a map, the middles of its cells along them, and the entries of its legend."""

    axes: Any
    drafters: Array
    acceptances: Array
    legend_entries: list[Patch]

    def fill(self, values: Array, colours: Sequence[Any], borders: Array) -> Any:
        """Fill every cell `[C, A]` with the colour of its band."""
        band_norm = BoundaryNorm(borders, len(colours), clip=True)
        return self.axes.pcolormesh(self.drafters, self.acceptances, values.T, cmap=ListedColormap(colours),
                                    norm=band_norm, shading="nearest")

    def hatch(self, mask: Array, look: tuple[str, str], label: str) -> None:
        """Hatch the cells of a mask `[C, A]`, if there are any, and add their tone and hatch to the legend."""
        tone, hatch = look
        if mask.any():
            hatched_area = self.axes.contourf(self.drafters, self.acceptances, mask.T, [0.5, 1.5],
                                              colors="none", hatches=[hatch])
            hatched_area.set(edgecolor=HATCH_COLOUR, linewidth=0)
            patch = Patch(facecolor=tone, hatch=hatch, edgecolor=HATCH_COLOUR, linewidth=0.5, label=label)
            self.legend_entries.append(patch)


def draw(config: Heatmap, bests: Bests, folder: Path) -> Iterator[str]:
    """Write every map into a folder, and yield its name, one of NAMES."""
    for speed_map in MAPS:
        title = f"Speed-up of {speed_map.method} over {speed_map.compared}"
        with _map(config, folder / f"{speed_map.name}.png", title) as map_axes:
            _speed_ups(map_axes, speed_map, heatmap_costs.speed_up(speed_map, bests))
        yield speed_map.name

    for name, (methods, title) in WINNERS.items():
        with _map(config, folder / f"{name}.png", title) as map_axes:
            _winners(map_axes, methods, heatmap_costs.fastest(bests, methods))
        yield name


@contextmanager
def _map(config: Heatmap, path: Path, title: str) -> Iterator[MapAxes]:
    """Open the axes of a map, with its title and the parameters of the costs; write the drawing to a file at exit."""
    num_servers = config.num_target_servers
    cost_note = f"simulated; accounting: {config.accounting}, target servers: {num_servers}, hop: {config.hop:g}"

    with new_figure(path, (6.4, 5.4), layout="constrained", dpi=160) as axes:
        axes.set_title(f"{title}\n{cost_note}", loc="left")
        axes.set(xlabel="Drafter latency (fraction of the target's)", ylabel="Acceptance rate",
                 xlim=(0, 1), ylim=(0, 1))

        drafters, acceptances, _ = grid(config)
        map_axes = MapAxes(axes, drafters, acceptances, legend_entries=[])
        yield map_axes
        axes.figure.legend(handles=map_axes.legend_entries, ncols=2, loc="outside lower left")


def bands(speed_map: Map, ratio: Array) -> Array:
    """Return the borders of the bands for the speed-ups of a map; of its own, slow-downs share the first."""
    if speed_map.band_width:
        band_ends = np.arange(1, speed_map.max_band + NARROW, speed_map.band_width)
        return np.append(0, band_ends.round(9))

    min_ratio, max_ratio = float(np.nanmin(ratio)), float(np.nanmax(ratio))
    locator = MaxNLocator(8, steps=[1, 2, 2.5, 5, 10])
    return np.round(locator.tick_values(min_ratio, max(max_ratio, min_ratio + NARROW)), 10)


def _speed_ups(map_axes: MapAxes, speed_map: Map, ratio: Array) -> None:
    """Draw a map of speed-ups `[C, A]`, brighter where they are larger."""
    borders = bands(speed_map, ratio)
    colours = list(matplotlib.colormaps["viridis"](np.linspace(0.08, 1, len(borders) - 1)))
    labels = [f"{border:g}" for border in borders]
    if np.nanmax(ratio) > borders[-1]:
        labels[-1] = f"> {labels[-1]}"
    if speed_map.band_width:
        colours[0] = SLOWER[0]

    mesh = map_axes.fill(ratio, colours, borders)
    map_axes.hatch(np.isnan(ratio), MISSING, "no lookahead of the grid is possible with these servers")
    if speed_map.band_width:
        map_axes.hatch(ratio < 1, SLOWER, f"{speed_map.method} is slower")

    colour_bar = map_axes.axes.figure.colorbar(mesh, ax=map_axes.axes, spacing="uniform", ticks=borders)
    colour_bar.ax.set_yticklabels(labels)
    colour_bar.set_label(f"cost of {speed_map.compared} / cost of {speed_map.method}")


def _winners(map_axes: MapAxes, methods: Sequence[str], fastest: Array) -> None:
    """Draw the fastest method of each cell, from its index `[C, A]`."""
    looks = [METHODS[METHOD_NAMES.get(method, method)].look for method in methods]
    map_axes.fill(fastest, [tone for tone, _ in looks], np.arange(len(methods) + 1) - 0.5)

    for i, (method, look) in enumerate(zip(methods, looks)):
        method_cells = fastest == i
        map_axes.hatch(method_cells, look, f"{method}: {method_cells.mean():.1%} of the cells")
