"""Whether plans are right: clusters of many kinds, each planned for with some questions and judged by others."""
from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple, Sequence

import numpy as np

from config.boards import Boards
from eval.plan.candidates import families
from eval.plan.keys import PlanConfig
from eval.plan.record import Book
from eval.plan.search import NEAR, Search, choice, plain_of
from eval.plan.trial import Bench, Trial

LAYERS, ROW_BYTES = 32, 8192
STAGE, LEVEL, LATENCY, RATE = (5, 400), (1, 40), (0.05, 20), (10, 10_000)  # ms, ms, ms, Mbit/s
SLOWEST = 4.0  # times as long: the slowest board of an uneven cluster


class Judged(NamedTuple):
    """What was chosen for a cluster, and on the other questions the speeds of that, of the best, and of plain decoding.
    """

    site: Boards
    chosen: Trial
    best: Trial
    plain: float
    by_method: dict[str, float]  # the best speed of each method, as far as it was tried on few tokens

    @property
    def reached(self) -> float:
        """What the choice reaches of the best speed."""
        return self.chosen.speed / self.best.speed


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


def judge(site: Boards, config: PlanConfig, mine: Book, others: Book) -> Judged:
    """Plan for a cluster with a record, and compare with the best for other questions, of which there may be more.

    The rivals are what this search found, and what it finds with as many of the others. All of the others judge.
    """
    made = families(site, len(site.factors), site.layers, config.chosen_methods, config.chosen_drafts)
    found = Search(Bench(site, config, mine), shown=False).run(made)
    as_many = others._replace(answers=others.answers[:len(mine.answers)])
    search = Search(Bench(site, config, as_many), shown=False)
    rivals = search.run(made)
    bench = Bench(site, config, others)
    named = [choice(found), plain_of(rivals), *_near(found), *_near(rivals)]
    trials = {one: bench.trial(one, others.answers, config.run.max_new_tokens)
              for one in dict.fromkeys(trial.candidate for trial in named)}
    chosen, plain = (trials[trial.candidate] for trial in named[:2])
    best = max(trials.values(), key=lambda trial: trial.speed)
    return Judged(site, chosen, best, plain.speed, search.by_method())


def _near(finalists: Sequence[Trial]) -> list[Trial]:
    """Those that other questions might find the best ones."""
    return [trial for trial in finalists if trial.speed >= NEAR * finalists[0].speed]


def figures(judged: Judged) -> dict[str, Any]:
    """The figures of one cluster, as a file keeps them."""
    site, boards = judged.site, len(judged.site.factors)
    cluster = {
        "cluster": site.about, "boards": boards, "even": not site.links, "stage_ms": site.model / boards,
        "row_ms": site.row / boards, "free": site.free, "level_ms": site.level, "latency_ms": site.latency,
        "mbps": site.mbps, "factors": site.factors, "links": site.links}
    return {
        **cluster, "chosen": judged.chosen.candidate.keys, "chosen_speed": judged.chosen.speed,
        "best": judged.best.candidate.keys, "best_speed": judged.best.speed, "plain_speed": judged.plain,
        "reached": judged.reached, "by_method": judged.by_method}


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """What a whole grid says, in one line."""
    reached = np.array([row["reached"] for row in rows])
    above = np.array([row["chosen_speed"] / row["plain_speed"] for row in rows])
    return (f"{len(rows)} clusters: the choice reaches {reached.mean():.3f} of the best in the mean, "
            f"{np.median(reached):.3f} in the median, {reached.min():.3f} at least, 0.97 or more in "
            f"{(reached >= 0.97).sum()}; of plain decoding {above.min():.3f} at least, {np.median(above):.2f} in the "
            "median")
