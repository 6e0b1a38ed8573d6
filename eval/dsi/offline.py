"""Compute the exact mean cost of a text by plain decoding, SI and DSI in one setting, and that of sampled texts."""
from __future__ import annotations

import numpy as np

from eval.dsi import cost_model
from eval.dsi.keys import Offline
from eval.dsi.online import accepted_runs
from eval.tables import in_columns
from launch.progress import ProgressBar

COLUMNS = ("", "exact mean", "per token", "speed-up", "texts: mean", "sd", "iterations")


def main(config: Offline) -> int:
    setting = config.failure_cost, config.c
    decoding_by_name = {
        "non-SI": cost_model.si(*setting, 0),
        "SI": cost_model.si(*setting, config.k),
        "DSI": cost_model.dsi(*setting, config.k, config.accounting)}

    # texts are drawn as by the published offline simulator
    run_lengths = accepted_runs(config.a, config.k, np.random.RandomState(config.random_seed))
    text_costs = []
    for _ in ProgressBar(range(config.num_repeats), desc="texts", delay=1, leave=False):
        windows = np.fromiter(run_lengths, int, config.S)
        text_costs.append([cost_model.counted(decoding, windows, config.S) for decoding in decoding_by_name.values()])

    num_servers = config.num_target_servers or "enough"
    print(f"Simulated: c={config.c:g}, a={config.a:.4g}, k={config.k}, failure_cost={config.failure_cost:g}, "
          f"S={config.S}, DSI in the {config.accounting} accounting with {num_servers} servers.\n"
          f"Exact: for independent drafts. Texts: {config.num_repeats}, sampled with seed {config.random_seed}.\n")

    rows = []
    plain_cost = config.S * config.failure_cost
    for (name, decoding), (costs, iterations) in zip(decoding_by_name.items(), np.transpose(text_costs, (1, 2, 0))):
        mean_cost = cost_model.mean_cost(decoding, config.a, config.S).item()
        rows.append([name, f"{mean_cost:.6g}", f"{mean_cost / config.S:.5g}", f"{plain_cost / mean_cost:.3f}",
                     f"{costs.mean():.6g}", f"{costs.std():.4g}", f"{iterations.mean():.6g}"])
    print(in_columns(COLUMNS, rows))
    return 0
