"""The heat maps of the paper on DSI and those of pipelines beside it: computed by formulas, kept as a table, drawn.

Usage: python -m scripts.simulate heatmap [ndim=N | grid=paper] [key=value ...]
"""
from __future__ import annotations

from pathlib import Path
from typing import Any, Sequence

from tqdm import tqdm

from config.files import ROOM, check_folder, write
from config.keys import read_keys
from eval.dsi.heatmap_keys import Heatmap
from eval.dsi.heatmaps import Bests, best, costs, grid, load, summary, table

COMMAND = "python -m scripts.simulate heatmap"
TABLE = "heatmap.csv"
REMEDY = "name another folder with output="
BAR: dict[str, Any] = {"delay": 1, "leave": False}  # what takes less than a second shows no bar


def main(argv: Sequence[str]) -> int:
    """Compute or load the costs, draw the maps into the folder `output`, and print a line for each comparison."""
    config = read_keys(argv, Heatmap, COMMAND)
    folder = Path(config.output)
    if config.loaded:
        config, found = load(config.loaded)
        check_folder(folder, REMEDY)
    else:
        check_folder(folder, REMEDY)
        found = _computed(config, folder)
    from eval.dsi.heatmap_plots import NAMES, draw  # its import takes longer than it takes to refuse a key

    with tqdm(total=len(NAMES), desc="maps", unit="map", **BAR) as bar:
        for _ in draw(config, found, folder):
            bar.update()
    print("\n".join(summary(config, found)))
    print(f"The maps are in {folder}, simulated by formulas.")
    return 0


def _computed(config: Heatmap, folder: Path) -> Bests:
    """Every method at its best lookahead; the table is written into a folder."""
    lookaheads = tqdm(grid(config).lookaheads, desc="costs", unit="lookahead", **BAR)
    every = costs(config, lookaheads)
    found = best(config, every)
    write(folder / TABLE, table(config, every, found), ROOM)
    return found
