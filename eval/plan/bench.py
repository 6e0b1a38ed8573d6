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
from eval.plan.record import Book, make_record
from eval.plan.search import Search, choice, nearly_best, plain_of
from eval.plan.trial import Bench, Trial
from launch.progress import ProgressBar

Row = Dict[str, Any]  # a cluster and its figures
LAYERS, ROW_BYTES = 32, 8192
STAGE, LEVEL, LATENCY = (5, 400), (1, 40), (0.05, 20)  # ms
RATE = (10, 10_000)  # Mbit/s
SLOWEST = 4.0  # largest factor of the time of a board in an uneven cluster
QUESTIONS = Range(1, 19)  # of each set, which has 20
LINE = ("{cluster}: {boards} boards, stage {stage_ms:.3g} ms, row {row_ms:.2g}, level {level_ms:.3g}, latency "
        "{latency_ms:.3g}, {mbps:.4g} Mbit/s, {kind}: {reached:.3f} of the best, {above:.2f} x ar; {keys}")


@dataclass(frozen=True)
class GridConfig(Checked):
    """Plan for many random clusters with some questions, and evaluate with others, all in virtual time."""

    PATHS = WRITES = ("output",)

    seed: int = key(0, "seed of the clusters", Range(0, 1 << 32), heading="Random clusters and plans for them")
    clusters: int = key(64, "number of clusters", Range(1, 10_000))
    tokens: int = key(24, "most tokens of each answer", Range(8, 512))
    drafts: str = key("suffix,eagle,eagle+suffix", "drafts that may be chosen; specinfer has its own")
    questions: int = key(4, "recorded questions of each of the six bundled sets", QUESTIONS)
    judges: int = key(8, "other questions of each set for the evaluation", QUESTIONS)
    workers: int = key(2, "processes", Range(1, 256))
    output: str = key("", "JSON file for the figures of every cluster; empty: none")


def finalists(bench: Bench, layers: int) -> list[Trial]:
    """Return the best of all candidates for a model of this many layers, and plain decoding."""
    config = bench.config
    found = families(bench.site, layers, config.chosen_methods, config.chosen_drafts)
    return Search(bench, found, shown=False).run()


# --- the clusters -----------------------------------------------------------------------------------------------------

def clusters(count: int, seed: int) -> list[Profile]:
    """Return random clusters on logarithmic scales; every second one has unequal boards and wires."""
    random = np.random.default_rng(seed)
    return [_cluster(random, number) for number in range(count)]


def _cluster(random: np.random.Generator, number: int) -> Profile:
    def sample(least: float, most: float) -> float:
        return float(f"{math.exp(random.uniform(math.log(least), math.log(most))):.3g}")

    boards = round(sample(0.6, 16.4)) or 1
    stage, level, latency = (sample(*bounds) for bounds in (STAGE, LEVEL, LATENCY))
    rate = sample(*RATE)
    share = round(random.uniform(0, 1), 2)
    row = share * float(random.integers(2))  # 0, so that more rows cost nothing, for half of the clusters
    free = int(random.choice([0, 16, 64]))
    site = Profile(f"cluster {number}", LAYERS, ROW_BYTES, model=stage * boards,
                   row=row * boards, free=free, token=0.0, level=level,
                   verdict=level / 2, latency=latency, mbps=rate, step=latency + 1.4)
    if number % 2 == 0:
        return replace(site, factors=(1.0,) * boards)
    factors = tuple(sample(1, SLOWEST) for _ in range(boards))
    rank = int(random.integers(boards + 1))
    longer = latency * sample(1, 10)
    following = (rank + 1) % (boards + 1)
    slow = rank, following, longer, rate / sample(1, 10)
    return replace(site, factors=factors, links=(slow,))


def facts(site: Profile) -> Row:
    """Return the description of a cluster for the file of figures."""
    boards = len(site.factors)
    return {
        "cluster": site.about, "boards": boards, "even": not site.links,
        "stage_ms": site.model / boards, "row_ms": site.row / boards, "free": site.free,
        "level_ms": site.level, "latency_ms": site.latency, "mbps": site.mbps,
        "factors": site.factors, "links": site.links}


# --- evaluated by other questions -------------------------------------------------------------------------------------

def planner(argv: list[str]) -> int:
    """Run the command `python3 -m scripts.bench planner`; return its exit code."""
    grid = read_keys(argv, GridConfig, "python3 -m scripts.bench planner")
    keys = (f"questions={grid.questions}", f"max_new_tokens={grid.tokens}", f"drafts={grid.drafts}")
    config = parse(words([TOY_PRESET, "profile=server", *keys]), COMMAND, kind=PlanConfig)

    later = replace(config.run, questions=f"{grid.questions}:{grid.questions + grid.judges}")
    books = make_record(config), make_record(replace(config, run=later))

    rows: list[Row] = []
    with ProcessPoolExecutor(grid.workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        tasks = [pool.submit(compare_choice, site, config, *books) for site in clusters(grid.clusters, grid.seed)]
        for task in ProgressBar(tasks, unit="cluster"):
            row = task.result()
            rows.append(row)

            ProgressBar.write(LINE.format(**row, kind="even" if row["even"] else "uneven", keys=typed(row["chosen"])))
            if grid.output:
                write_json(grid.output, {"keys": vars(grid), "clusters": rows})
    print(summary(rows))
    return 0


def compare_choice(site: Profile, config: PlanConfig, mine: Book, others: Book) -> Row:
    """Plan for a cluster with a record, and compare with the best for other questions, which may be more.

    Rivals are the finalists of this search, and of one with as many other questions. All other questions evaluate.
    """
    as_many = others._replace(answers=others.answers[:len(mine.answers)])
    found = finalists(Bench(site, config, mine), site.layers)
    rivals = finalists(Bench(site, config, as_many), site.layers)
    chosen, plain = choice(found).candidate, plain_of(rivals).candidate
    bench, tokens = Bench(site, config, others), config.run.max_new_tokens
    near = dict.fromkeys((chosen, plain, *nearly_best(found), *nearly_best(rivals)))
    speeds = {one: bench.trial(one, others.answers, tokens).speed for one in near}
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
