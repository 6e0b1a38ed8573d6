"""Which method a plan chooses where, as a table and a map."""
from __future__ import annotations

import sys
import time
from concurrent.futures import ProcessPoolExecutor

import torch
from tqdm import tqdm

from config.boards import Boards
from config.files import ROOM, check_output, write
from config.keys import read_keys
from eval.plan.chart import Cell, ChartConfig, cell, load, sites, summary, table
from eval.plan.chart_plot import draw
from eval.plan.judge import plan_of
from eval.plan.keys import PlanConfig
from eval.plan.record import Book, made


def planner_map(argv: list[str]) -> int:
    """The command `python -m scripts.bench planner_map`; its exit code."""
    config = read_keys(argv, ChartConfig, "python -m scripts.bench planner_map")
    for ending in (".csv", ".png"):
        check_output(config.output + ending, "choose another output=")
    since = time.monotonic()
    if config.load:
        config, cells = load(config.load, config)
    else:
        cells = _planned(config)
        write(f"{config.output}.csv", table(config, cells), ROOM)
    write(f"{config.output}.png", draw(config, cells), ROOM)
    print(f"{summary(cells)}; {config.output}.png in {time.monotonic() - since:.0f} s")
    return 0


def _planned(config: ChartConfig) -> list[Cell]:
    """A plan for every cell, each in one of some processes."""
    plan = plan_of(config.questions, config.tokens, config.drafts, config.profile)
    book = made(plan)
    with ProcessPoolExecutor(config.workers) as pool:
        jobs = [pool.submit(_cell, *where, plan, book) for where in sites(config)]
        return [job.result() for job in tqdm(jobs, unit="cell", file=sys.stderr)]


def _cell(stage: float, along: float, site: Boards, plan: PlanConfig, book: Book) -> Cell:
    """One cell, in a process of its own."""
    torch.set_num_threads(1)
    return cell(stage, along, site, plan, book)
