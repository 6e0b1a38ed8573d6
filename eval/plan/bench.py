"""Whether plans are right: drawn clusters, judged by the best that other questions find, and by real emulation."""
from __future__ import annotations

import math
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Iterator, Sequence

import numpy as np
import torch
from tqdm import tqdm

from config.boards import Boards, write
from config.cli import parse
from config.files import check_output, write_json
from config.keys import read_keys
from config.ranges import Checked, Range, outside
from eval.plan.candidates import families
from eval.plan.check import seconds
from eval.plan.hosts import alone
from eval.plan.keys import COMMAND, PlanConfig, words
from eval.plan.plan import planned
from eval.plan.record import Book, made
from eval.plan.search import NEAR, Search, choice, plain_of
from eval.plan.trial import Bench
from launch.pipeline import Pipeline

DRAWN = 64  # clusters, of which some are emulated
LAYERS, ROW_BYTES = 32, 8192
STAGE, LEVEL, LATENCY, RATE = (5, 400), (1, 40), (0.05, 20), (10, 10_000)  # ms, ms, ms, Mbit/s
SLOWEST = 4.0  # times as long: the slowest board of an uneven cluster
LONG_STAGE, LONG_LEVEL = 30.0, 30.0  # ms, at least, in real emulation: shorter ones this machine cannot keep up with
SEED, TOKENS, BOARDS = Range(0, 1 << 32), Range(8, 512), Range(1, 8)
RANGES = {"clusters": Range(1, 10_000), "seed": SEED, "tokens": TOKENS, "workers": Range(1, 256),
          "questions": Range(1, 19), "judges": Range(1, 19)}
RANGES_EMULATED = {"seed": SEED, "count": Range(1, DRAWN), "least": BOARDS, "boards": BOARDS, "tokens": TOKENS,
                   "slowdown": Range(0.001, 1000)}


@dataclass(frozen=True)
class GridConfig(Checked):
    """Plans for many drawn clusters, each made with some questions and judged by others, all in virtual time."""

    PATHS = ("output",)

    # The grid
    clusters: int = 64  # clusters that are drawn
    seed: int = 0  # of the draw
    questions: int = 4  # of each of the six bundled sets, that are recorded
    judges: int = 8  # others of each of them, that judge
    tokens: int = 24  # of each answer, at most
    drafts: str = "suffix,eagle,eagle+suffix"  # those that may be chosen; specinfer has its own
    workers: int = 2  # processes
    output: str = ""  # JSON file for the figures of every cluster; empty: none

    def problems(self) -> Iterator[str]:
        yield from outside(vars(self), RANGES)
        if self.output:
            check_output(self.output, "choose another output=")


@dataclass(frozen=True)
class EmulatedConfig(Checked):
    """Plans for some of the drawn clusters, and their tokens per second in virtual time and in real time.

    Real time is a process for each rank, in slow motion, so that this machine is no slower than the cluster.
    """

    PATHS = ("output",)

    # Which clusters
    seed: int = 0  # of the draw, as for planner
    count: int = 4  # how many are emulated
    least: int = 1  # boards of a cluster, at least
    boards: int = 4  # and at most

    # How
    tokens: int = 24  # of each of six answers, at most
    slowdown: float = 4.0  # every modelled time is so many times as long, or more where levels are short
    drafts: str = "suffix,eagle,eagle+suffix"  # those that may be chosen
    output: str = ""  # JSON file for the figures; empty: none

    def problems(self) -> Iterator[str]:
        yield from outside(vars(self), RANGES_EMULATED)
        if self.output:
            check_output(self.output, "choose another output=")


def plan_of(questions: int, tokens: int, drafts: str, profile: str = "server") -> PlanConfig:
    """A plan with the bundled models: so many questions of each set are recorded, and at most so many tokens of each.
    """
    keys = (f"profile={profile}", f"question_end={questions}", f"max_new_tokens={tokens}", f"drafts={drafts}")
    return parse(words(["toy", *keys]), COMMAND, kind=PlanConfig)


# --- the clusters -----------------------------------------------------------------------------------------------------

def clusters(count: int, seed: int) -> list[Boards]:
    """So many clusters, drawn on logarithmic scales; every second one has boards and wires that differ."""
    random = np.random.default_rng(seed)
    return [_cluster(random, number) for number in range(count)]


def _cluster(random: np.random.Generator, number: int) -> Boards:
    def drawn(least: float, most: float) -> float:
        return float(f"{math.exp(random.uniform(math.log(least), math.log(most))):.3g}")

    boards = round(drawn(0.6, 16.4)) or 1
    stage, level, latency, rate = drawn(*STAGE), drawn(*LEVEL), drawn(*LATENCY), drawn(*RATE)
    row = round(float(random.uniform(0, 1)), 2) * float(random.integers(2))
    site = Boards(
        f"cluster {number}", layers=LAYERS, row_bytes=ROW_BYTES, model=stage * boards, row=row * boards,
        free=int(random.choice([0, 16, 64])), token=0.0, level=level, verdict=level / 2, latency=latency,
        mbps=rate, step=latency + 1.4)
    if number % 2 == 0:
        return replace(site, factors=(1.0,) * boards)
    factors = tuple(drawn(1, SLOWEST) for _ in range(boards))
    place = int(random.integers(boards + 1))
    slow = (place, (place + 1) % (boards + 1), latency * drawn(1, 10), rate / drawn(1, 10))
    return replace(site, factors=factors, links=(slow,))


def facts(site: Boards) -> dict[str, Any]:
    """A cluster as the file of figures describes it."""
    boards = len(site.factors)
    return {"cluster": site.about, "boards": boards, "even": not site.links, "stage_ms": site.model / boards,
            "row_ms": site.row / boards, "free": site.free, "level_ms": site.level, "latency_ms": site.latency,
            "mbps": site.mbps, "factors": site.factors, "links": site.links}


def line(row: dict[str, Any], result: str) -> str:
    """A cluster and what came of it, in one line."""
    chosen = " ".join(f"{key}={value}" for key, value in row["chosen"].items())
    return (f"{row['cluster']}: {row['boards']} boards, stage {row['stage_ms']:.3g} ms, row {row['row_ms']:.2g}, level "
            f"{row['level_ms']:.3g}, latency {row['latency_ms']:.3g}, {row['mbps']:.4g} Mbit/s, "
            f"{'even' if row['even'] else 'uneven'}: {result}; {chosen}")


# --- judged by other questions ----------------------------------------------------------------------------------------

def planner(argv: list[str]) -> int:
    """The command `python -m scripts.bench planner`; its exit code."""
    grid = read_keys(argv, GridConfig, "python -m scripts.bench planner")
    config = plan_of(grid.questions, grid.tokens, grid.drafts)
    later = replace(config.run, question_begin=grid.questions, question_end=grid.questions + grid.judges)
    others = replace(config, run=later)
    books = [made(config), made(others)]
    rows = []
    with ProcessPoolExecutor(grid.workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        jobs = [pool.submit(judged, site, config, *books) for site in clusters(grid.clusters, grid.seed)]
        for job in tqdm(jobs, unit="cluster", file=sys.stderr):
            row = job.result()
            rows.append(row)
            if grid.output:
                write_json(grid.output, {"keys": vars(grid), "clusters": rows})
            tqdm.write(line(row, f"{row['reached']:.3f} of the best, {_above(row):.2f} x ar"))
    print(summary(rows))
    return 0


def judged(site: Boards, config: PlanConfig, mine: Book, others: Book) -> dict[str, Any]:
    """Plan for a cluster with a record, and compare with the best for other questions, of which there may be more.

    The rivals are what this search found, and what it finds with as many of the others. All of the others judge.
    """
    made_of = families(site, len(site.factors), site.layers, config.chosen_methods, config.chosen_drafts)
    as_many = others._replace(answers=others.answers[:len(mine.answers)])
    found, rivals = (Search(Bench(site, config, book), shown=False).run(made_of) for book in (mine, as_many))
    chosen, plain = choice(found).candidate, plain_of(rivals).candidate
    near = [trial.candidate for trials in (found, rivals) for trial in trials if trial.speed >= NEAR * trials[0].speed]
    bench = Bench(site, config, others)
    speeds = {one: bench.trial(one, others.answers, config.run.max_new_tokens).speed
              for one in dict.fromkeys((chosen, plain, *near))}
    best = max(speeds, key=lambda one: speeds[one])
    return {**facts(site), "chosen": chosen.keys, "chosen_speed": speeds[chosen], "best": best.keys,
            "best_speed": speeds[best], "plain_speed": speeds[plain], "reached": speeds[chosen] / speeds[best]}


def _above(row: dict[str, Any]) -> float:
    """How many times as fast as plain decoding the choice is."""
    above: float = row["chosen_speed"] / row["plain_speed"]
    return above


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """What a whole grid says, in one line."""
    reached = np.array([row["reached"] for row in rows])
    above = np.array([_above(row) for row in rows])
    return (f"{len(rows)} clusters: the choice reaches {reached.mean():.3f} of the best in the mean, "
            f"{np.median(reached):.3f} in the median, {reached.min():.3f} at least, 0.97 or more in "
            f"{(reached >= 0.97).sum()}; of plain decoding {above.min():.3f} at least, {np.median(above):.2f} in the "
            "median")


# --- in real emulation ------------------------------------------------------------------------------------------------

def planner_emulated(argv: list[str]) -> int:
    """The command `python -m scripts.bench planner_emulated`; its exit code."""
    config = read_keys(argv, EmulatedConfig, "python -m scripts.bench planner_emulated")
    plan = plan_of(1, config.tokens, config.drafts)
    book = made(plan)
    rows: list[dict[str, Any]] = []
    for site in tqdm(drawn(config), unit="cluster", file=sys.stderr):
        row = emulated(config, plan, site, book)
        rows.append(row)
        tqdm.write(line(row, f"{row['simulated']:.3g} tokens/s simulated, {row['emulated']:.3g} emulated with slowdown "
                             f"{row['slowdown']:.3g}, {row['emulated'] / row['simulated']:.3f}"))
        if config.output:
            write_json(config.output, {"keys": vars(config), "clusters": rows})
    return 0


def drawn(config: EmulatedConfig) -> list[Boards]:
    """The clusters that are emulated, in the order of the grid. Raises ValueError if there are too few."""
    fitting = [site for site in clusters(DRAWN, config.seed) if config.least <= len(site.factors) <= config.boards
               and site.model / len(site.factors) >= LONG_STAGE]
    if len(fitting) < config.count:
        raise ValueError(f"only {len(fitting)} of the clusters have {config.least} to {config.boards} boards and "
                         f"stages of {LONG_STAGE:g} ms or more: give a smaller count, or other bounds")
    places = np.random.default_rng(0).choice(len(fitting), config.count, replace=False)
    return [fitting[place] for place in sorted(places.tolist())]


def emulated(config: EmulatedConfig, plan: PlanConfig, site: Boards, book: Book) -> dict[str, Any]:
    """What the plan for one cluster takes in virtual time and in real time."""
    chosen = planned(plan, site, book).chosen
    slowdown = max(config.slowdown, LONG_LEVEL / site.level)
    with tempfile.TemporaryDirectory(prefix="flowspec-") as folder:
        path = Path(folder) / "cluster.json"
        write(str(path), alone(site, chosen.candidate))
        keys: dict[str, Any] = {**chosen.candidate.keys, "profile": path, "slowdown": slowdown, "timeout": 120}
        with Pipeline.open("toy", **keys) as pipeline:
            took = sum(seconds(pipeline.decoder, book, book.answers, config.tokens)) / pipeline.scale
    tokens = sum(one.tokens for one in chosen.spent)
    return {**facts(site), "chosen": chosen.candidate.keys, "slowdown": slowdown, "simulated": chosen.speed,
            "emulated": tokens / took}
