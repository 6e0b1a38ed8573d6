"""Evaluate plans for random clusters: compare with the best plans for other questions, and with real emulation."""
from __future__ import annotations

import math
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Callable, Dict, Iterable, Iterator, Sequence

import numpy as np
import torch
from tqdm import tqdm

from config.cli import parse
from config.files import write_json
from config.keys import Checked, Range, read_keys
from config.presets import TOY_PRESET
from config.profiles import Profile, write
from eval.bench import speed
from eval.plan.candidates import families, typed
from eval.plan.hosts import only_chosen
from eval.plan.keys import COMMAND, PlanConfig, words
from eval.plan.measure import answers_of
from eval.plan.plan import planned
from eval.plan.record import Book, make_record
from eval.plan.search import Search, choice, nearly_best, plain_of
from eval.plan.trial import Bench, Trial
from launch.pipeline import Pipeline

Row = Dict[str, Any]  # a cluster and its figures
DRAWN = 64  # random clusters to choose those for emulation from
LAYERS, ROW_BYTES = 32, 8192
STAGE, LEVEL, LATENCY = (5, 400), (1, 40), (0.05, 20)  # ms
RATE = (10, 10_000)  # Mbit/s
SLOWEST = 4.0  # largest factor of the time of a board in an uneven cluster
LONG_STAGE, LONG_LEVEL = 30.0, 30.0  # least ms in real emulation, as this machine may not keep up with shorter ones
WORKERS, TOKENS = Range(1, 256), Range(8, 512)
QUESTIONS = Range(1, 19)  # of each set, which has 20
ABOUT = ("{cluster}: {boards} boards, stage {stage_ms:.3g} ms, row {row_ms:.2g}, level {level_ms:.3g}, latency "
         "{latency_ms:.3g}, {mbps:.4g} Mbit/s, {kind}: ")


@dataclass(frozen=True)
class Drawn(Checked):
    """The keys of commands for random clusters."""

    PATHS = WRITES = ("output",)
    RANGES = {"seed": Range(0, 1 << 32), "tokens": TOKENS}

    # Random clusters and plans for them
    seed: int = 0  # seed of the clusters
    tokens: int = 24  # most tokens of each answer
    drafts: str = "suffix,eagle,eagle+suffix"  # drafts that may be chosen; specinfer has its own
    output: str = ""  # JSON file for the figures of every cluster; empty: none

    def collect(self, rows: Iterable[Row], result: str) -> list[Row]:
        """Print a line for each row once it is ready, write all into the file, and return them."""
        found = []
        for row in rows:
            found.append(row)
            even = "even" if row["even"] else "uneven"
            line = ABOUT + result
            tqdm.write(line.format(**row, kind=even, keys=typed(row["chosen"])))
            if self.output:
                write_json(self.output, {"keys": vars(self), "clusters": found})
        return found


@dataclass(frozen=True)
class GridConfig(Drawn):
    """Plan for many random clusters with some questions, and evaluate with others, all in virtual time."""

    RANGES = {**Drawn.RANGES, "clusters": Range(1, 10_000), "workers": WORKERS,
              "questions": QUESTIONS, "judges": QUESTIONS}

    # The grid
    clusters: int = 64  # number of clusters
    questions: int = 4  # recorded questions of each of the six bundled sets
    judges: int = 8  # other questions of each set for the evaluation
    workers: int = 2  # processes


@dataclass(frozen=True)
class EmulatedConfig(Drawn):
    """Plan for some of the random clusters, and compare tokens per second in virtual time and in real time.

    Six questions are answered. In real time each rank is a process, in slow motion, so that this machine can keep up
    with the cluster.
    """

    RANGES = {**Drawn.RANGES, "count": Range(1, DRAWN), "slowdown": Range(0.001, 1000),
              "least": Range(1, 8), "boards": Range(1, 8)}

    # Emulation
    count: int = 4  # number of clusters, chosen from those of planner
    least: int = 1  # least boards of a cluster
    boards: int = 4  # most boards of a cluster
    slowdown: float = 4.0  # factor of all modelled times; larger where levels are short


def plan_of(questions: int, tokens: int, drafts: str, preset: str = TOY_PRESET, profile: str = "server") -> PlanConfig:
    """Return the keys of a plan with a preset's models, with this many questions of each set and tokens per answer."""
    keys = (f"profile={profile}", f"questions={questions}", f"max_new_tokens={tokens}", f"drafts={drafts}")
    return parse(words([preset, *keys]), COMMAND, kind=PlanConfig)


def finalists(bench: Bench, layers: int) -> list[Trial]:
    """Return the best of all candidates for a model of this many layers, and plain decoding."""
    config = bench.config
    found = families(bench.site, layers, config.chosen_methods, config.chosen_drafts)
    return Search(bench, found, shown=False).run()


def in_processes(workers: int, make: Callable[..., Any], jobs: Iterable[Any], unit: str) -> Iterator[Any]:
    """Yield the result of a function for the arguments of each job, from this many processes of one thread each."""
    with ProcessPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        tasks = [pool.submit(make, *job) for job in jobs]
        for task in tqdm(tasks, unit=unit):
            yield task.result()


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
    config = plan_of(grid.questions, grid.tokens, grid.drafts)
    later = replace(config.run, questions=f"{grid.questions}:{grid.questions + grid.judges}")
    books = make_record(config), make_record(replace(config, run=later))
    jobs = [(site, config, *books) for site in clusters(grid.clusters, grid.seed)]
    rows = in_processes(grid.workers, compare_choice, jobs, "cluster")
    print(summary(grid.collect(rows, "{reached:.3f} of the best, {above:.2f} x ar; {keys}")))
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


# --- in real emulation ------------------------------------------------------------------------------------------------

def planner_emulated(argv: list[str]) -> int:
    """Run the command `python3 -m scripts.bench planner_emulated`; return its exit code."""
    config = read_keys(argv, EmulatedConfig, "python3 -m scripts.bench planner_emulated")
    plan = plan_of(1, config.tokens, config.drafts)
    book = make_record(plan)
    sites = tqdm(sampled(config), unit="cluster")
    rows = (emulated(config, plan, site, book) for site in sites)
    config.collect(rows, "{simulated:.3g} tokens/s simulated, {emulated:.3g} emulated with slowdown {slowdown:.3g}, "
                         "{reached:.3f}; {keys}")
    return 0


def sampled(config: EmulatedConfig) -> list[Profile]:
    """Return the clusters to emulate, in the order of the grid. Raise ValueError if there are too few."""
    sizes = range(config.least, config.boards + 1)
    fitting = [site for site in clusters(DRAWN, config.seed)
               if len(site.factors) in sizes and site.model / len(site.factors) >= LONG_STAGE]
    if len(fitting) < config.count:
        raise ValueError(f"only {len(fitting)} of the clusters have {config.least} to {config.boards} boards and "
                         f"stages of at least {LONG_STAGE:g} ms: give a smaller count, or other bounds")
    random = np.random.default_rng(0)
    places = random.choice(len(fitting), config.count, replace=False)
    return [fitting[place] for place in sorted(places.tolist())]


def emulated(config: EmulatedConfig, plan: PlanConfig, site: Profile, book: Book) -> Row:
    """Plan for one cluster, and return the speeds of the choice in virtual time and in real time."""
    chosen = planned(plan, site, book).chosen
    one = chosen.candidate
    slowdown = max(config.slowdown, LONG_LEVEL / site.level)
    with tempfile.TemporaryDirectory(prefix="flowspec-") as folder:
        path = f"{folder}/cluster.json"
        write(path, only_chosen(site, one))
        run: dict[str, Any] = {"profile": path, "slowdown": slowdown, "timeout": 120}
        with Pipeline.open("toy", **one.keys, **run) as pipeline:
            took = speed(answers_of(pipeline, book.answers, config.tokens)) * pipeline.config.slowdown
    speeds = {"simulated": chosen.speed, "emulated": took, "reached": took / chosen.speed}
    return {**facts(site), "chosen": one.keys, "slowdown": slowdown, **speeds}
