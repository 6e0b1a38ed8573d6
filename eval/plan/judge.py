"""Whether plans are right: many drawn clusters, each planned for with some questions and judged by others."""
from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Iterator

import torch
from tqdm import tqdm

from config.cli import parse
from config.files import check_output, write_json
from config.keys import read_keys
from config.ranges import Checked, Range, outside
from eval.plan.grid import clusters, figures, judge, summary
from eval.plan.keys import COMMAND, PlanConfig, words
from eval.plan.record import Book, made

RANGES = {"clusters": Range(1, 10_000), "first": Range(0, 9_999),
          "seed": Range(0, 1 << 32), "tokens": Range(8, 512), "workers": Range(1, 256),
          "questions": Range(1, 19), "judges": Range(1, 19)}


@dataclass(frozen=True)
class GridConfig(Checked):
    """Plans for many drawn clusters, each made with some questions and judged by others, all in virtual time."""

    PATHS: ClassVar[tuple[str, ...]] = ("output",)

    # The grid
    clusters: int = 64  # clusters that are drawn
    first: int = 0  # the number of the first one that is judged, from 0
    seed: int = 0  # of the draw
    questions: int = 4  # of each of the six bundled sets, that are recorded
    judges: int = 8  # others of each of them, that judge
    tokens: int = 24  # of each answer, at most
    drafts: str = "suffix,eagle,eagle+suffix"  # those that may be chosen; specinfer has its own
    workers: int = 2  # processes
    output: str = ""  # JSON file for the figures of every cluster; empty: none

    def problems(self) -> Iterator[str]:
        yield from outside(vars(self), RANGES)
        if self.first >= self.clusters:
            yield f"first={self.first} leaves no cluster: give less than clusters={self.clusters}"
        if self.output:
            check_output(self.output, "choose another output=")


def planner(argv: list[str]) -> int:
    """The command `python -m scripts.bench planner`; its exit code."""
    grid = read_keys(argv, GridConfig, "python -m scripts.bench planner")
    config = plan_of(grid.questions, grid.tokens, grid.drafts)
    later = replace(config.run, question_begin=grid.questions, question_end=grid.questions + grid.judges)
    others = replace(config, run=later)
    books = [made(config), made(others)]
    rows = []
    with ProcessPoolExecutor(grid.workers) as pool:
        jobs = [pool.submit(_judged, number, grid, books) for number in range(grid.first, grid.clusters)]
        for job in tqdm(jobs, unit="cluster", file=sys.stderr):
            rows.append(job.result())
            if grid.output:
                write_json(grid.output, {"keys": vars(grid), "clusters": rows})
            tqdm.write(line(rows[-1]))
    print(summary(rows))
    return 0


def plan_of(questions: int, tokens: int, drafts: str, profile: str = "server") -> PlanConfig:
    """A plan with the bundled models: so many questions of each set are recorded, and at most so many tokens of each.
    """
    keys = (f"profile={profile}", f"question_end={questions}", f"max_new_tokens={tokens}", f"drafts={drafts}")
    return parse(words(["toy", *keys]), COMMAND, kind=PlanConfig)


def _judged(number: int, grid: GridConfig, books: list[Book]) -> dict[str, Any]:
    """One cluster, in a process of its own."""
    torch.set_num_threads(1)
    site = clusters(grid.clusters, grid.seed)[number]
    return figures(judge(site, plan_of(grid.questions, grid.tokens, grid.drafts), *books))


def line(row: dict[str, Any]) -> str:
    """A cluster in one line."""
    chosen = " ".join(f"{key}={value}" for key, value in row["chosen"].items())
    return (f"{row['boards']:>3} boards, stage {row['stage_ms']:.3g} ms, row {row['row_ms']:.2g}, level "
            f"{row['level_ms']:.3g}, latency {row['latency_ms']:.3g}, {row['mbps']:.4g} Mbit/s, "
            f"{'even' if row['even'] else 'uneven'}: {row['reached']:.3f} of the best, "
            f"{row['chosen_speed'] / row['plain_speed']:.2f} x ar; {chosen}")
