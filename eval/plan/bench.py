"""Evaluate plans for random clusters: compare with the best plans for other questions."""
from __future__ import annotations

import math
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Dict, Sequence

import numpy as np
import torch

from config.cli import parse
from config.files import write_json
from config.keys import Checked, key, read_keys
from config.presets import TOY_PRESET
from config.profiles import Profile
from config.values import Range
from eval.plan.candidates import families, typed
from eval.plan.keys import COMMAND, PlanConfig, words
from eval.plan.record import PlanRecord, make_record
from eval.plan.search import Search, choice, nearly_best, plain_of
from eval.plan.trial import Bench, Trial
from launch.progress import ProgressBar

Row = Dict[str, Any]  # a cluster and its figures
LAYERS, ROW_BYTES = 32, 8192
STAGE_MS, LEVEL_MS, LATENCY_MS = (5, 400), (1, 40), (0.05, 20)  # least and largest
RATE_MBPS = (10, 10_000)
MAX_FACTOR = 4.0  # of the time of a board in an uneven cluster
QUESTIONS = Range(1, 19)  # of each set, which has 20
LINE = ("{cluster}: {boards} boards, stage {stage_ms:.3g} ms, row {row_ms:.2g}, level {level_ms:.3g}, latency "
        "{latency_ms:.3g}, {mbps:.4g} Mbit/s, {kind}: {reached:.3f} of the best, {above:.2f} x ar; {keys}")


@dataclass(frozen=True)
class GridConfig(Checked):
    """Plan for many random clusters with some questions, and evaluate with others, all in virtual time."""


    seed: int = key(0, "seed of the clusters", Range(0, 1 << 32), heading="Random clusters and plans for them")
    clusters: int = key(64, "number of clusters", Range(1, 10_000))
    tokens: int = key(24, "most tokens of each answer", Range(8, 512))
    drafts: str = key("suffix,eagle,eagle+suffix", "drafts that may be chosen; specinfer has its own")
    questions: int = key(4, "recorded questions of each of the six bundled sets", QUESTIONS)
    judges: int = key(8, "other questions of each set for the evaluation", QUESTIONS)
    workers: int = key(2, "processes", Range(1, 256))
    output: str = key("", "JSON file for the figures of every cluster; empty: none", names_file=True, is_output=True)


def finalists(bench: Bench, num_layers: int) -> list[Trial]:
    """Return the best of all candidates for a model of this many layers, and plain decoding."""
    config = bench.config
    all_families = families(bench.site, num_layers, config.chosen_methods, config.chosen_drafts)
    return Search(bench, all_families, shows_progress=False).run()


# --- the clusters -----------------------------------------------------------------------------------------------------

def clusters(count: int, seed: int) -> list[Profile]:
    """Return random clusters on logarithmic scales; every second one has unequal boards and wires."""
    random = np.random.default_rng(seed)
    return [_cluster(random, number) for number in range(count)]


def _cluster(random: np.random.Generator, number: int) -> Profile:
    def sample(least: float, most: float) -> float:
        return float(f"{math.exp(random.uniform(math.log(least), math.log(most))):.3g}")

    # an even cluster
    num_boards = round(sample(0.6, 16.4)) or 1
    stage_ms, level_ms, latency = (sample(*bounds) for bounds in (STAGE_MS, LEVEL_MS, LATENCY_MS))
    mbps = sample(*RATE_MBPS)
    row_share = round(random.uniform(0, 1), 2)
    row_ms = row_share * float(random.integers(2))  # 0, so that more rows cost nothing, for half of the clusters
    free_rows = int(random.choice([0, 16, 64]))
    site = Profile(f"cluster {number}", LAYERS, ROW_BYTES, model=stage_ms * num_boards,
                   row=row_ms * num_boards, free=free_rows, token=0.0, level=level_ms,
                   verdict=level_ms / 2, latency=latency, mbps=mbps, step=latency + 1.4)
    if number % 2 == 0:
        return replace(site, factors=(1.0,) * num_boards)

    # unequal boards, and one slow link
    factors = tuple(sample(1, MAX_FACTOR) for _ in range(num_boards))
    rank = int(random.integers(num_boards + 1))
    next_rank = (rank + 1) % (num_boards + 1)
    slow_latency = latency * sample(1, 10)
    slow_link = rank, next_rank, slow_latency, mbps / sample(1, 10)
    return replace(site, factors=factors, links=(slow_link,))


def facts(site: Profile) -> Row:
    """Return the description of a cluster for the file of figures."""
    num_boards = len(site.factors)
    return {
        "cluster": site.about, "boards": num_boards, "even": not site.links,
        "stage_ms": site.model / num_boards, "row_ms": site.row / num_boards, "free": site.free,
        "level_ms": site.level, "latency_ms": site.latency, "mbps": site.mbps,
        "factors": site.factors, "links": site.links}


# --- evaluated by other questions -------------------------------------------------------------------------------------

def planner(argv: list[str]) -> int:
    """Run the command `python3 -m scripts.bench planner`; return its exit code."""
    grid = read_keys(argv, GridConfig, "python3 -m scripts.bench planner")
    plan_keys = (f"questions={grid.questions}", f"max_new_tokens={grid.tokens}", f"drafts={grid.drafts}")
    config = parse(words([TOY_PRESET, "profile=server", *plan_keys]), COMMAND, kind=PlanConfig)

    # records
    judging_run = replace(config.run, questions=f"{grid.questions}:{grid.questions + grid.judges}")
    records = make_record(config), make_record(replace(config, run=judging_run))

    # clusters
    rows: list[Row] = []
    with ProcessPoolExecutor(grid.workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        tasks = [pool.submit(compare_choice, site, config, *records) for site in clusters(grid.clusters, grid.seed)]
        for task in ProgressBar(tasks, unit="cluster"):
            row = task.result()
            rows.append(row)

            cluster_kind = "even" if row["even"] else "uneven"
            ProgressBar.write(LINE.format(**row, kind=cluster_kind, keys=typed(row["chosen"])))
            if grid.output:
                write_json(grid.output, {"keys": vars(grid), "clusters": rows})

    print(summary(rows))
    return 0


def compare_choice(site: Profile, config: PlanConfig, plan_record: PlanRecord, judging_record: PlanRecord) -> Row:
    """Plan for a cluster with a record, and compare with the best for other questions, which may be more.

    Rivals are the finalists of this search, and of one with as many other questions. All other questions evaluate.
    """
    # candidates
    rival_record = judging_record._replace(answers=judging_record.answers[:len(plan_record.answers)])
    plan_trials = finalists(Bench(site, config, plan_record), site.layers)
    rival_trials = finalists(Bench(site, config, rival_record), site.layers)
    chosen, plain = choice(plan_trials).candidate, plain_of(rival_trials).candidate
    rivals = dict.fromkeys((chosen, plain, *nearly_best(plan_trials), *nearly_best(rival_trials)))

    # evaluation
    bench, max_tokens = Bench(site, config, judging_record), config.run.max_new_tokens
    speeds = {rival: bench.trial(rival, judging_record.answers, max_tokens).speed for rival in rivals}
    best = max(speeds, key=speeds.__getitem__)
    return {
        **facts(site),
        "chosen": chosen.keys, "chosen_speed": speeds[chosen],
        "best": best.keys, "best_speed": speeds[best], "plain_speed": speeds[plain],
        "reached": speeds[chosen] / speeds[best], "above": speeds[chosen] / speeds[plain]}


def summary(rows: Sequence[Row]) -> str:
    """Return the results of a whole grid in one line."""
    reached = np.array([row["reached"] for row in rows])
    above = np.array([row["above"] for row in rows])
    return (f"{len(rows)} clusters: the choice reaches {reached.mean():.3f} of the best on average, "
            f"{np.median(reached):.3f} in the median, {reached.min():.3f} at least, 0.97 or more in "
            f"{(reached >= 0.97).sum()}; of plain decoding {above.min():.3f} at least, {np.median(above):.2f} in the "
            "median")
