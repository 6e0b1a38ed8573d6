"""What plans take in real emulation, beside their simulation: a few of the drawn clusters, a process for each rank."""
from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Iterator

import numpy as np
from tqdm import tqdm

from config.boards import Boards, write
from config.files import check_output, write_json
from config.keys import read_keys
from config.ranges import Checked, Range, outside
from eval.plan.chosen import alone
from eval.plan.grid import clusters
from eval.plan.judge import plan_of
from eval.plan.keys import PlanConfig
from eval.plan.plan import planned
from eval.plan.record import Book, made
from eval.plan.trial import Trial
from launch.pipeline import Pipeline
from model.sample import Sampler
from pipeline.decode import Request

BOARDS, SEED, MILLISECONDS = Range(1, 8), Range(0, 1 << 32), Range(0, 10_000)
RANGES = {"clusters": Range(1, 10_000), "seed": SEED, "draw": SEED, "count": Range(1, 64), "least": BOARDS,
          "boards": BOARDS, "stage": MILLISECONDS, "tokens": Range(8, 512), "level": MILLISECONDS,
          "slowdown": Range(0.001, 1000)}


@dataclass(frozen=True)
class EmulatedConfig(Checked):
    """Plans for some of the drawn clusters, and their tokens per second in virtual time and in real time.

    Real time is a process for each rank, in slow motion, so that this machine is no slower than the cluster.
    """

    PATHS: ClassVar[tuple[str, ...]] = ("output",)

    # Which clusters
    clusters: int = 64  # clusters that are drawn
    seed: int = 0  # of that draw
    count: int = 4  # of these, how many are emulated
    draw: int = 0  # seed of the draw among those that are possible
    least: int = 1  # boards of a cluster, at least
    boards: int = 4  # and at most
    stage: float = 30.0  # milliseconds of a stage, at least

    # How
    tokens: int = 24  # of each of six answers, at most
    slowdown: float = 4.0  # every modelled time is so many times as long, or more
    level: float = 30.0  # milliseconds that a level of the draft takes then, at least
    drafts: str = "suffix,eagle,eagle+suffix"  # those that may be chosen
    output: str = ""  # JSON file for the figures; empty: none

    def problems(self) -> Iterator[str]:
        yield from outside(vars(self), RANGES)
        if self.output:
            check_output(self.output, "choose another output=")


def planner_emulated(argv: list[str]) -> int:
    """The command `python -m scripts.bench planner_emulated`; its exit code."""
    config = read_keys(argv, EmulatedConfig, "python -m scripts.bench planner_emulated")
    plan = plan_of(1, config.tokens, config.drafts)
    book = made(plan)
    rows: list[dict[str, Any]] = []
    for site in tqdm(drawn(config), unit="cluster", file=sys.stderr):
        rows.append(compared(config, plan, site, book))
        tqdm.write(line(rows[-1]))
        if config.output:
            write_json(config.output, {"keys": vars(config), "clusters": rows})
    return 0


def drawn(config: EmulatedConfig) -> list[Boards]:
    """The clusters that are emulated, in the order of the grid. Raises ValueError if there are too few."""
    def stage(site: Boards) -> float:
        return site.model / len(site.factors)

    every = clusters(config.clusters, config.seed)
    fitting = [site for site in every if config.least <= len(site.factors) <= config.boards
               and stage(site) >= config.stage]
    if len(fitting) < config.count:
        raise ValueError(f"only {len(fitting)} of the clusters have {config.least} to {config.boards} boards and "
                         f"stages of {config.stage:g} ms or more: give a smaller count, or other bounds")
    places = np.random.default_rng(config.draw).choice(len(fitting), config.count, replace=False)
    return [fitting[place] for place in sorted(places.tolist())]


def compared(config: EmulatedConfig, plan: PlanConfig, site: Boards, book: Book) -> dict[str, Any]:
    """What the plan for one cluster takes in virtual time and in real time."""
    chosen = planned(plan, site, book).chosen
    slowdown = max(config.slowdown, config.level / site.level)
    took = _emulated(chosen, alone(site, chosen.candidate), book, config.tokens, slowdown)
    tokens = sum(one.tokens for one in chosen.spent)
    return {"cluster": site.about, "boards": len(site.factors), "stage_ms": site.model / len(site.factors),
            "row_ms": site.row / len(site.factors), "level_ms": site.level, "latency_ms": site.latency,
            "even": not site.links, "chosen": chosen.candidate.keys, "slowdown": slowdown,
            "simulated": chosen.speed, "emulated": tokens / took}


def _emulated(chosen: Trial, site: Boards, book: Book, tokens: int, slowdown: float) -> float:
    """Seconds of the cluster's time for all answers in real emulation."""
    with tempfile.TemporaryDirectory(prefix="flowspec-") as folder:
        path = Path(folder) / "cluster.json"
        write(str(path), site)
        keys: dict[str, Any] = {**chosen.candidate.keys, "profile": path, "slowdown": slowdown, "timeout": 120}
        with Pipeline.open("toy", **keys) as pipeline:
            took = 0.0
            for one in tqdm(book.answers, unit="answer", leave=False, file=sys.stderr):
                answer = pipeline.decoder.whole(Request(one.prompt, Sampler(), tokens, frozenset(book.ends)))
                assert answer.token_ids == one.text, "the text of an emulation is the recorded one"
                took += answer.prefill_seconds + answer.decode_seconds
            return took / pipeline.scale


def line(row: dict[str, Any]) -> str:
    """A cluster in one line."""
    chosen = " ".join(f"{key}={value}" for key, value in row["chosen"].items())
    return (f"{row['cluster']}: {row['boards']} boards, stage {row['stage_ms']:.3g} ms, level {row['level_ms']:.3g}, "
            f"{'even' if row['even'] else 'uneven'}: {row['simulated']:.3g} tokens/s simulated, {row['emulated']:.3g} "
            f"emulated with slowdown {row['slowdown']:.3g}, {row['emulated'] / row['simulated']:.3f}; {chosen}")
