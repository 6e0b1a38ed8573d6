"""Compute the heat maps of the paper on DSI by formulas, write them as a table, and draw them.

They can be read without colour: slow-downs and cells without a value are hatched.
"""
from __future__ import annotations

from pathlib import Path
from typing import Any, Iterator, Sequence

import matplotlib
import numpy as np
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.patches import Patch

from config.files import SPACE_REMEDY, check_folder, write
from config.keys import read_keys
from eval.dsi import heatmap_costs
from eval.dsi.formulas import Array
from eval.dsi.heatmap_costs import MAPS, Bests, Map, grid
from eval.dsi.keys import COMMAND, Heatmap
from eval.plots import new_figure
from launch.progress import ProgressBar

SLOWER, MISSING = ("#f2b58a", "////"), ("white", "....")  # tones and hatches
HATCH_COLOUR = "0.25"


def main(argv: Sequence[str]) -> int:
    """Compute the costs, draw the maps into the folder `output`, and print a line for each comparison."""
    config = read_keys(argv, Heatmap, f"{COMMAND} heatmap")
    folder = Path(config.output)
    check_folder(folder, "name another folder with output=")

    bests = heatmap_costs.best(config)
    write(folder / "heatmap.csv", heatmap_costs.table(config, bests), SPACE_REMEDY)
    drawn_names = draw(config, bests, folder)
    list(ProgressBar(drawn_names, desc="maps", total=len(MAPS), delay=1, leave=False))

    print("\n".join(heatmap_costs.summary(config, bests)))
    print(f"The maps are in {folder}, simulated by formulas.")
    return 0


# --- the maps ---------------------------------------------------------------------------------------------------------

def draw(config: Heatmap, bests: Bests, folder: Path) -> Iterator[str]:
    """Write every map into a folder, and yield its name."""
    for speed_map in MAPS:
        with new_figure(folder / f"{speed_map.name}.png", (6.4, 5.4), layout="constrained", dpi=160) as axes:
            _draw_map(axes, config, speed_map, heatmap_costs.speed_up(speed_map, bests))
        yield speed_map.name


def _draw_map(axes: Any, config: Heatmap, speed_map: Map, ratio: Array) -> None:
    """Draw the speed-ups `[C, A]` of a map, brighter where they are larger; slow-downs share the first band."""
    cost_note = f"simulated; accounting: {config.accounting}, target servers: {config.num_target_servers}"
    axes.set_title(f"Speed-up of {speed_map.method} over {speed_map.compared}\n{cost_note}", loc="left")
    axes.set(xlabel="Drafter latency (fraction of the target's)", ylabel="Acceptance rate", xlim=(0, 1), ylim=(0, 1))

    # the bands
    borders = np.append(0, np.linspace(1, speed_map.max_band, speed_map.num_bands + 1).round(9))
    colours = list(matplotlib.colormaps["viridis"](np.linspace(0.08, 1, len(borders) - 1)))
    colours[0] = SLOWER[0]
    drafters, acceptances, _ = grid(config)
    mesh = axes.pcolormesh(drafters, acceptances, ratio.T, cmap=ListedColormap(colours),
                           norm=BoundaryNorm(borders, len(colours), clip=True), shading="nearest")

    # cells that are hatched, with their entries in the legend
    patches = []
    for mask, (tone, hatch), label in (
            (np.isnan(ratio), MISSING, "no lookahead of the grid is possible with these servers"),
            (ratio < 1, SLOWER, f"{speed_map.method} is slower")):
        if mask.any():
            hatched_area = axes.contourf(drafters, acceptances, mask.T, [0.5, 1.5], colors="none", hatches=[hatch])
            hatched_area.set(edgecolor=HATCH_COLOUR, linewidth=0)
            patches.append(Patch(facecolor=tone, hatch=hatch, edgecolor=HATCH_COLOUR, linewidth=0.5, label=label))
    axes.figure.legend(handles=patches, ncols=2, loc="outside lower left")

    # the scale
    labels = [f"{border:g}" for border in borders]
    if np.nanmax(ratio) > borders[-1]:
        labels[-1] = f"> {labels[-1]}"
    colour_bar = axes.figure.colorbar(mesh, ax=axes, spacing="uniform", ticks=borders)
    colour_bar.ax.set_yticklabels(labels)
    colour_bar.set_label(f"cost of {speed_map.compared} / cost of {speed_map.method}")
