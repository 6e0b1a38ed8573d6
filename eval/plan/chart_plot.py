"""The map of methods as a picture, readable without colour: every method has a hatch, every cell shows its figures."""
from __future__ import annotations

import io
from typing import Any, Sequence

import matplotlib
import numpy as np

matplotlib.use("Agg")  # no screen is needed
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.patches import Patch, Rectangle  # noqa: E402

from config.methods import METHODS  # noqa: E402
from config.profiles import PROFILES  # noqa: E402
from eval.plan.chart import ALONG, STAGES, Cell, ChartConfig  # noqa: E402
from eval.plots import STYLE  # noqa: E402

SIZE = (7.6, 6.0)
DOTS = 160  # an inch
INK = "0.35"  # of hatches
TITLES = {"row": "a row above the free ones, % of the stage's time", "latency": "a message, ms"}


def draw(config: ChartConfig, cells: Sequence[Cell]) -> bytes:
    """The map as PNG."""
    along = ALONG[config.axes]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=SIZE, layout="constrained")
        for one in cells:
            _fill(axes, one, STAGES.index(one.stage_ms), along.index(one.along))
        axes.set_xlim(-0.5, len(STAGES) - 0.5)
        axes.set_ylim(-0.5, len(along) - 0.5)
        axes.set_xticks(np.arange(len(STAGES)), [f"{stage:g}" for stage in STAGES])
        axes.set_yticks(np.arange(len(along)), [f"{value:g}" for value in along])
        axes.set_xlabel(f"a stage, ms, if all {config.boards} boards have one")
        axes.set_ylabel(TITLES[config.axes])
        title = "The fastest method, its boards that hold layers, its speed over ar"
        axes.set_title(f"{title}\n\n", loc="left", fontsize=12)
        axes.text(0, 1.02, _about(config), transform=axes.transAxes, fontsize=9, color="0.3")
        _legend(figure, cells)
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=DOTS)
        plt.close(figure)
    return picture.getvalue()


def _about(config: ChartConfig) -> str:
    site = PROFILES[config.profile]
    wire = f", a message {site.latency:g} ms" if config.axes == "row" else ""
    return (f"simulated; {config.boards} boards, drafts {config.drafts}; {site.free} rows of a segment are free,\n"
            f"a level takes {site.level:g} ms, a verdict {site.verdict:g} ms{wire}; {site.mbps:g} Mbit/s")


def _fill(axes: Any, one: Cell, x: int, y: int) -> None:
    tone, hatch = METHODS[one.method].look
    corner = x - 0.5, y - 0.5
    axes.add_patch(Rectangle(corner, 1, 1, facecolor=tone, edgecolor=INK, hatch=hatch, linewidth=0.5))
    gain = one.tokens_per_second / one.plain_tokens_per_second
    axes.text(x, y, f"{one.boards}\n{gain:.1f}×", ha="center", va="center", fontsize=9,
              bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5, "alpha": 0.9})


def _legend(figure: Any, cells: Sequence[Cell]) -> None:
    handles = []
    for name, method in METHODS.items():
        tone, hatch = method.look
        count = sum(one.method == name for one in cells)
        if count:
            label = f"{name}: {count} cells"
            handles.append(Patch(facecolor=tone, hatch=hatch, edgecolor=INK, linewidth=0.5, label=label))
    figure.legend(handles=handles, ncols=4, loc="outside lower left", handlelength=1.8, handleheight=1.2, fontsize=9)
