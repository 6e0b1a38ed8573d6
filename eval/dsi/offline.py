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
    progress = ProgressBar(results(config), desc="computed", total=3, delay=1, leave=False)
    all_results = list(progress)

    num_servers = config.num_target_servers or "enough"
    print(f"Simulated: c={config.c:g}, a={config.a:.4g}, k={config.k}, failure_cost={config.failure_cost:g}, "
          f"S={config.S}, DSI in the {config.accounting} accounting with {num_servers} servers.\n"
          f"Exact: for independent drafts. Texts: {config.num_repeats}, sampled with seed "
          f"{config.random_seed}; in brackets\nthe 2.5th and the 97.5th percentile of their costs; "
          "off: difference of their mean from the exact one, in standard errors.\n")
    print(table(all_results, config.S))

    if config.picture:
        draw(all_results[1:], config)
        print(f"\nThe histograms are in {config.picture}.")
    return 0


def results(config: Offline) -> Iterator[Result]:
    """Yield the result of every algorithm: exact, and over the same sampled texts."""
    setting = config.failure_cost, config.c
    decoding_by_name = {
        PLAIN: cost_model.si(*setting, 0),
        "SI": cost_model.si(*setting, config.k),
        "DSI": cost_model.dsi(*setting, config.k, config.accounting)}
    windows_by_text = list(islice(sampled(config), config.num_repeats))

    for name, decoding in decoding_by_name.items():
        text_costs = [counted(decoding, windows, config.S) for windows in windows_by_text]
        exact_moments = moments(decoding, config.a, config.S)
        yield Result(name, exact_moments, *np.array(text_costs).T)


def sampled(config: Offline) -> Iterator[Array]:
    """Yield, for one text after another, the correct drafts of its windows, as the published offline simulator does."""
    random_state = np.random.RandomState(config.random_seed)
    while True:
        if config.a in (0, 1):
            yield np.full(config.S, int(config.a) * config.k)
        else:
            num_correct = random_state.geometric(1 - config.a, size=config.S) - 1
            yield np.minimum(num_correct, config.k)


def table(all_results: Sequence[Result], num_tokens: int) -> str:
    """Return a table with one line for each algorithm."""
    plain_cost = float(all_results[0].exact.mean[0])
    rows = []
    for name, exact, costs, iterations in all_results:
        exact_mean, exact_deviation = float(exact.mean[0]), float(exact.deviation[0])
        low, high = np.percentile(costs, [LOW, HIGH])

        exact_cells = [f"{exact_mean:.6g}", f"{exact_deviation:.4g}", f"{exact_mean / num_tokens:.5g}",
                       f"{plain_cost / exact_mean:.3f}"]
        text_cells = [f"{costs.mean():.6g}", f"{costs.std():.4g}", f"[{low:.6g}, {high:.6g}]",
                      off(exact_mean, exact_deviation, costs), f"{iterations.mean():.6g}"]
        rows.append([name, *exact_cells, *text_cells])
    return in_columns(COLUMNS, rows)


def off(exact_mean: float, exact_deviation: float, costs: Array) -> str:
    """Return the difference of the sampled mean from the exact one in standard errors, or a dash if nothing varies."""
    if exact_deviation <= 1e-9 * exact_mean:
        return "-"
    return f"{(costs.mean() - exact_mean) / exact_deviation * np.sqrt(costs.size):.2f}"


def draw(drawn_results: Sequence[Result], config: Offline) -> None:
    """Draw histograms of costs and of iterations into a file. Raise ValueError if it cannot be written."""
    from eval.plots import new_figure  # slow to import

    figure_size, grid_shape = (9, 3 * len(drawn_results)), (len(drawn_results), 2)
    with new_figure(config.picture, figure_size, grid_shape, layout="constrained") as axes_grid:
        for axes_row, (name, _, *samples) in zip(axes_grid, drawn_results):
            for axes, (quantity, tone), values in zip(axes_row, TONES.items(), samples):
                axes.hist(values, BINS, density=True, color=tone, edgecolor="black", linewidth=0.5)
                axes.axvline(values.mean(), color="black", linestyle="--", label=f"mean {values.mean():.5g}")
                axes.set(xlabel=f"{quantity} of {config.S} tokens by {name}, simulated", ylabel="density")
                axes.legend()
