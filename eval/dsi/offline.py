"""Compute the exact cost of a text by plain decoding, SI and DSI in one setting, and that of sampled texts."""
from __future__ import annotations

from itertools import islice
from typing import Iterator, NamedTuple, Sequence

import numpy as np

from config.keys import read_keys
from eval.dsi import cost_model
from eval.dsi.cost_model import Moments, counted, moments
from eval.dsi.formulas import Array
from eval.dsi.keys import COMMAND, Offline
from eval.tables import in_columns
from launch.progress import ProgressBar

PLAIN = "non-SI"
LOW, HIGH = 2.5, 97.5  # percentiles of an interval of 95 %
BINS = 30
COLUMNS = ("", "exact mean", "sd", "per token", "speed-up", "texts: mean", "sd", "interval", "off", "iterations")
TONES = {"cost": "#bcdff5", "iterations": "#fde8b0"}  # colours of the histograms


class Result(NamedTuple):
    """The exact cost of a text by an algorithm, and the costs and iterations of each sampled text."""

    name: str
    exact: Moments
    costs: Array
    iterations: Array


def main(argv: Sequence[str]) -> int:
    config = read_keys(argv, Offline, f"{COMMAND} offline")
    bar = ProgressBar(results(config), desc="computed", total=3, delay=1, leave=False)
    found = list(bar)
    servers = config.num_target_servers or "enough"
    print(f"Simulated: c={config.c:g}, a={config.a:.4g}, k={config.k}, failure_cost={config.failure_cost:g}, "
          f"S={config.S}, DSI in the {config.accounting} accounting with {servers} servers.\n"
          f"Exact: for independent drafts. Texts: {config.num_repeats}, sampled with seed "
          f"{config.random_seed}; in brackets\nthe 2.5th and the 97.5th percentile of their costs; "
          "off: difference of their mean from the exact one, in standard errors.\n")
    print(table(found, config.S))
    if config.picture:
        draw(found[1:], config)
        print(f"\nThe histograms are in {config.picture}.")
    return 0


def results(config: Offline) -> Iterator[Result]:
    """Yield the result of every algorithm: exact, and over the same sampled texts."""
    setting = config.failure_cost, config.c
    algorithms = {
        PLAIN: cost_model.si(*setting, 0),
        "SI": cost_model.si(*setting, config.k),
        "DSI": cost_model.dsi(*setting, config.k, config.accounting)}
    texts = list(islice(sampled(config), config.num_repeats))
    for name, decoding in algorithms.items():
        counts = [counted(decoding, windows, config.S) for windows in texts]
        exact = moments(decoding, config.a, config.S)
        yield Result(name, exact, *np.array(counts).T)


def sampled(config: Offline) -> Iterator[Array]:
    """Yield, for one text after another, the correct drafts of its windows, as the published offline simulator does."""
    rng = np.random.RandomState(config.random_seed)
    while True:
        if config.a in (0, 1):
            yield np.full(config.S, int(config.a) * config.k)
        else:
            right = rng.geometric(1 - config.a, size=config.S) - 1
            yield np.minimum(right, config.k)


def table(found: Sequence[Result], tokens: int) -> str:
    """Return a table with one line for each algorithm."""
    plain = float(found[0].exact.mean[0])
    rows = []
    for name, exact, costs, iterations in found:
        mean, deviation = float(exact.mean[0]), float(exact.deviation[0])
        low, high = np.percentile(costs, [LOW, HIGH])
        rows.append([name, f"{mean:.6g}", f"{deviation:.4g}", f"{mean / tokens:.5g}", f"{plain / mean:.3f}",
                     f"{costs.mean():.6g}", f"{costs.std():.4g}", f"[{low:.6g}, {high:.6g}]",
                     off(mean, deviation, costs), f"{iterations.mean():.6g}"])
    return in_columns(COLUMNS, rows)


def off(mean: float, deviation: float, costs: Array) -> str:
    """Return the difference of the sampled mean from the exact one in standard errors, or a dash if nothing varies."""
    if deviation <= 1e-9 * mean:
        return "-"
    return f"{(costs.mean() - mean) / deviation * np.sqrt(costs.size):.2f}"


def draw(found: Sequence[Result], config: Offline) -> None:
    """Draw histograms of costs and of iterations into a file. Raise ValueError if it cannot be written."""
    from eval.plots import new_figure as figure  # slow to import

    size, places = (9, 3 * len(found)), (len(found), 2)
    with figure(config.picture, size, places, layout="constrained") as grid:
        for row, (name, _, *samples) in zip(grid, found):
            for axes, (what, tone), values in zip(row, TONES.items(), samples):
                axes.hist(values, BINS, density=True, color=tone, edgecolor="black", linewidth=0.5)
                axes.axvline(values.mean(), color="black", linestyle="--", label=f"mean {values.mean():.5g}")
                axes.set(xlabel=f"{what} of {config.S} tokens by {name}, simulated", ylabel="density")
                axes.legend()
