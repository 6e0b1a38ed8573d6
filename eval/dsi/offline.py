"""Compute the exact mean cost of a text by plain decoding, SI and DSI in one setting, and that of sampled texts."""
from __future__ import annotations

from itertools import islice
from typing import Iterator, Mapping

import numpy as np

from eval.dsi import cost_model
from eval.dsi.formulas import Array
from eval.dsi.keys import Offline
from eval.dsi.online import accepted_runs
from eval.tables import in_columns
from launch.progress import ProgressBar

BINS = 30
COLUMNS = ("", "exact mean", "per token", "speed-up", "texts: mean", "sd", "iterations")
TONES = {"cost": "#bcdff5", "iterations": "#fde8b0"}  # colours of the histograms
CostsByAlgorithm = Mapping[str, Array]  # the cost and the iterations of each text, `[2, texts]`, by algorithm


def main(config: Offline) -> int:
    setting = config.failure_cost, config.c
    decoding_by_name = {
        "non-SI": cost_model.si(*setting, 0),
        "SI": cost_model.si(*setting, config.k),
        "DSI": cost_model.dsi(*setting, config.k, config.accounting)}

    text_costs = []
    windows_by_text = islice(sampled(config), config.num_repeats)
    for windows in ProgressBar(windows_by_text, desc="texts", total=config.num_repeats, delay=1, leave=False):
        text_costs.append([cost_model.counted(decoding, windows, config.S) for decoding in decoding_by_name.values()])
    samples_by_name = dict(zip(decoding_by_name, np.transpose(text_costs, (1, 2, 0))))

    num_servers = config.num_target_servers or "enough"
    print(f"Simulated: c={config.c:g}, a={config.a:.4g}, k={config.k}, failure_cost={config.failure_cost:g}, "
          f"S={config.S}, DSI in the {config.accounting} accounting with {num_servers} servers.\n"
          f"Exact: for independent drafts. Texts: {config.num_repeats}, sampled with seed {config.random_seed}.\n")

    mean_costs = [cost_model.mean_cost(decoding, config.a, config.S).item() for decoding in decoding_by_name.values()]
    rows = [[name, f"{mean_cost:.6g}", f"{mean_cost / config.S:.5g}", f"{mean_costs[0] / mean_cost:.3f}",
             f"{costs.mean():.6g}", f"{costs.std():.4g}", f"{iterations.mean():.6g}"]
            for mean_cost, (name, (costs, iterations)) in zip(mean_costs, samples_by_name.items())]
    print(in_columns(COLUMNS, rows))

    if config.picture:
        draw(samples_by_name, config)
        print(f"\nThe histograms are in {config.picture}.")
    return 0


def sampled(config: Offline) -> Iterator[Array]:
    """Yield, for one text after another, the correct drafts of its windows, as the published offline simulator does."""
    run_lengths = accepted_runs(config.a, config.k, np.random.RandomState(config.random_seed))
    while True:
        yield np.fromiter(run_lengths, int, config.S)


def draw(samples_by_name: CostsByAlgorithm, config: Offline) -> None:
    """Draw histograms of costs and of iterations by SI and DSI into a file. Raise ValueError if it cannot be written.
    """
    from eval.plots import new_figure  # slow to import

    with new_figure(config.picture, (9, 6), (2, 2), layout="constrained") as axes_grid:
        for axes_row, name in zip(axes_grid, ("SI", "DSI")):
            for axes, (quantity, tone), values in zip(axes_row, TONES.items(), samples_by_name[name]):
                axes.hist(values, BINS, density=True, color=tone, edgecolor="black", linewidth=0.5)
                axes.axvline(values.mean(), color="black", linestyle="--", label=f"mean {values.mean():.5g}")
                axes.set(xlabel=f"{quantity} of {config.S} tokens by {name}, simulated", ylabel="density")
                axes.legend()
