"""Compute the heat maps of the paper on DSI by formulas, write them as a table, and draw them.

A cell of the grid is a drafter's forward `c`, in target forwards, and an acceptance rate `a`. Nothing is random: the
costs are those of the long run. The maps can be read without colour: slow-downs and cells without a value are hatched.
"""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, Iterator, NamedTuple

import matplotlib
import numpy as np
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.patches import Patch

from config.files import SPACE_REMEDY, check_folder, write
from eval.dsi import formulas
from eval.dsi.formulas import Array, Numbers
from eval.dsi.keys import Heatmap
from eval.plots import new_figure

COLUMNS = ("c", "a", "algorithm", "k", "cost")
DIGITS = 12  # decimals of a cost: of lookaheads with equal rounded costs the smallest is the best
LOWEST_RATE = 0.01  # bound of a grid by ndim: least drafter, least acceptance rate, and 1 minus the largest rate
SLOWER, MISSING = ("#f2b58a", "////"), ("white", "....")  # tones and hatches
HATCH_COLOUR = "0.25"


class Best(NamedTuple):
    """The cost per token, in target forwards, and the best lookahead of a method, both `[C, A]`.

    They are NaN and 0 where no lookahead is possible. Plain decoding has the lookahead 0.
    """

    cost: Array
    lookahead: Array


class Map(NamedTuple):
    """A map of the speed-up of one method over the best of others, in `num_bands` bands from 1 up to `max_band`."""

    name: str
    method: str
    other_methods: tuple[str, ...]
    max_band: float
    num_bands: int

    @property
    def compared(self) -> str:
        """The label of the methods that this one is compared with."""
        return f"min({', '.join(self.other_methods)})" if len(self.other_methods) > 1 else self.other_methods[0]


MAPS = (Map("si_over_nonsi", "SI", ("non-SI",), 10, 9),
        Map("dsi_over_si", "DSI", ("SI",), 2, 5),
        Map("dsi_over_nonsi", "DSI", ("non-SI",), 3, 10),
        Map("dsi_over_best", "DSI", ("SI", "non-SI"), 1.6, 6))
Bests = Dict[str, Best]


def main(config: Heatmap) -> int:
    """Compute the costs, draw the maps into the folder `output`, and print a line for each comparison."""
    folder = Path(config.output)
    check_folder(folder, "name another folder with output=")

    bests = best(config)
    write(folder / "heatmap.csv", table(config, bests), SPACE_REMEDY)
    for speed_map in MAPS:
        with new_figure(folder / f"{speed_map.name}.png", (6.4, 5.4), layout="constrained", dpi=160) as axes:
            draw(axes, config, speed_map, speed_up(speed_map, bests))

    print("\n".join(summary(config, bests)))
    print(f"The maps are in {folder}, simulated by formulas.")
    return 0


# --- the costs --------------------------------------------------------------------------------------------------------

def grid(config: Heatmap) -> tuple[Array, Array, range]:
    """Return the axes of the maps: drafter forwards `[C]` in target forwards, acceptance rates `[A]`, and lookaheads.

    The paper's are 100 drafters, 101 acceptance rates and 200 lookaheads. Others have `ndim` steps from 0 to 1, where
    the smallest drafter and both ends of the acceptance rates are replaced by bounds.
    """
    max_lookahead = 200 if config.grid == "paper" else config.ndim
    lookaheads = range(config.lookahead or 1, 1 + (config.lookahead or max_lookahead))
    if config.grid == "paper":
        hundredths = np.arange(101) / 100
        return hundredths[1:], hundredths, lookaheads

    steps = np.round(np.arange(config.ndim + 1) / config.ndim, DIGITS)
    return np.maximum(steps, LOWEST_RATE), np.clip(steps, LOWEST_RATE, 1 - LOWEST_RATE), lookaheads


def legal(config: Heatmap, drafters: Array, lookahead: Numbers) -> Array:
    """Return, for each drafter, whether the target servers are enough for DSI with this lookahead (Eq. 1)."""
    return formulas.servers_needed(1.0, drafters, lookahead) <= config.num_target_servers


def best(config: Heatmap) -> Bests:
    """Return every method at its best lookahead, for DSI among the `legal` ones, for SI among all."""
    drafters, acceptances, lookaheads = grid(config)
    c, a, k = drafters[:, None, None], acceptances[:, None], np.array(lookaheads)

    dsi_rate = formulas.dsi_rate(1.0, c, a, k, config.accounting)
    rates = {"SI": formulas.si_rate(1.0, c, a, k), "DSI": np.where(legal(config, c, k), dsi_rate, np.inf)}
    plain_cost = np.ones(dsi_rate.shape[:2])
    bests = {"non-SI": Best(plain_cost, np.zeros_like(plain_cost, dtype=int))}
    for method, rate in rates.items():
        rounded_cost = rate.round(DIGITS)
        min_cost, best_lookahead = rounded_cost.min(-1), k[rounded_cost.argmin(-1)]

        is_impossible = np.isinf(min_cost)
        min_cost[is_impossible], best_lookahead[is_impossible] = np.nan, 0
        bests[method] = Best(min_cost, best_lookahead)
    return bests


def speed_up(speed_map: Map, bests: Bests) -> Array:
    """Return the speed-up of the map's method over the best of its others, `[C, A]`; NaN where it is impossible."""
    other_cost = np.min([bests[method].cost for method in speed_map.other_methods], 0)
    speed_ratio = other_cost / bests[speed_map.method].cost
    return np.round(speed_ratio, DIGITS - 2)  # a tie is exactly 1, despite rounding errors


def summary(config: Heatmap, bests: Bests) -> Iterator[str]:
    """Yield a line for each map: the largest, median and smallest speed-up, and the share of slow-downs."""
    drafters, acceptances, _ = grid(config)
    for speed_map in MAPS:
        speed_ratio = speed_up(speed_map, bests)
        possible_ratios = speed_ratio[~np.isnan(speed_ratio)]

        extremes = []
        for flat_index in (np.nanargmax(speed_ratio), np.nanargmin(speed_ratio)):
            i, j = np.unravel_index(flat_index, speed_ratio.shape)
            extremes.append(f"{speed_ratio[i, j]:.3f} (a {acceptances[j]:.4g}, c {drafters[i]:.4g})")

        yield (f"{speed_map.method} over {speed_map.compared}: max {extremes[0]}, "
               f"median {np.median(possible_ratios):.3f}, min {extremes[1]}, "
               f"{100 * np.mean(possible_ratios < 1):.2f} % of {possible_ratios.size} cells below 1")


def table(config: Heatmap, bests: Bests) -> str:
    """Return the table as text: the keys of the command, the names of the columns, a row for each cell and method."""
    drafters, acceptances, _ = grid(config)
    lines = [f"# {json.dumps(vars(config))}", ",".join(COLUMNS)]
    for i, j in np.ndindex(len(drafters), len(acceptances)):
        for method, (cost, lookahead) in bests.items():
            lines.append(f"{drafters[i]},{acceptances[j]},{method},{lookahead[i, j]},{cost[i, j]}")
    return "\n".join([*lines, ""])


# --- the maps ---------------------------------------------------------------------------------------------------------

def draw(axes: Any, config: Heatmap, speed_map: Map, ratio: Array) -> None:
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
