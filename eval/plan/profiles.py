"""Compare every method with every draft on every emulated cluster, in virtual time, from one record."""
from __future__ import annotations

from dataclasses import replace
from itertools import chain, zip_longest
from typing import Iterator, Mapping, NamedTuple, Sequence

import numpy as np

from config.cli import parse
from config.keys import raw_values, with_defaults
from config.methods import METHODS
from config.profiles import PROFILES, Profile
from eval.bench import speed
from eval.plan.candidates import evenly, families
from eval.plan.keys import PlanConfig, words
from eval.plan.record import book_of
from eval.plan.trial import Bench
from eval.tables import in_columns, number
from launch.progress import ProgressBar
from launch.words import with_model

COMMAND = "python3 -m scripts.bench profiles"
ASKED = {"methods": "ar,naive,serial,pruned,pipedec,continuous,streaming", "max_new_tokens": "128"}
BOARDS = (1.0,) * 4
OURS = "streaming"


class Row(NamedTuple):
    """The tokens per second of one method on one cluster, for each set."""

    profile: str
    draft: str
    method: str
    speeds: Sequence[float]

    @property
    def mean(self) -> float:
        return float(np.mean(self.speeds))


def profiles(argv: list[str]) -> int:
    """Run the command `python3 -m scripts.bench profiles`; return its exit code."""
    argv = with_model(argv)
    typed = raw_values(argv).get("profile")
    asked = with_defaults(argv, {**ASKED, "profile": typed or "server"})
    config = parse(words(asked), COMMAND, kind=PlanConfig)
    chosen = config.run.cluster
    rows = list(tried(config, {typed: chosen} if typed and chosen else PROFILES))
    cells = [[*row[:3], *map(number, (row.mean, *row.speeds))] for row in rows]
    heading = ("simulated", "draft", "method", "mean", *config.chosen_sets)
    print(in_columns(heading, cells, names=3))
    for line in compared(rows):
        print(line)
    return 0


def tried(config: PlanConfig, sites: Mapping[str, Profile]) -> Iterator[Row]:
    """Yield the speed of each method with each draft on these clusters, over one pipeline of all boards. Sizes that are
    not given are measured at the start."""
    book, run = book_of(config), config.run
    names = [[name] * len(questions) for name, questions in config.questions_by_set.items()]
    turns = chain.from_iterable(zip_longest(*names))
    sets = list(filter(None, turns))  # the set of each question, in the order of the record
    methods = [method for method in config.chosen_methods if METHODS[method].target == "ring"]
    for name, site in ProgressBar(sites.items(), unit="cluster", leave=False):
        site = replace(site, factors=site.factors or BOARDS)
        split = evenly(len(site.factors), site.layers)
        bench = Bench(site, config, book)
        for [one] in families(site, site.layers, methods, config.chosen_drafts, split):
            trial = bench.trial(replace(one, sizes=()), book.answers, run.max_new_tokens)
            speeds = []
            for chosen_set in config.chosen_sets:
                speeds.append(speed([answer for answer, of in zip(trial.answers, sets) if of == chosen_set]))
            yield Row(name, one.draft, one.method, speeds)


def compared(rows: Sequence[Row]) -> Iterator[str]:
    """Yield lines that compare `streaming` with the best other method, by cluster and draft."""
    for ours in rows:
        others = [row for row in rows if row.profile == ours.profile
                  and row.draft in (ours.draft, "none") and row.method != OURS]
        if ours.method == OURS and others:
            best = np.max([row.speeds for row in others], axis=0)
            shares = np.array(ours.speeds) / best
            mean = ours.mean / max(row.mean for row in others)
            yield (f"{ours.profile}, {ours.draft}: {OURS} is {mean:.3f} times the best other on average, "
                   f"{shares.min():.3f} on its worst set (simulated)")
