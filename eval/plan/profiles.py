"""Every method of one pipeline with every draft on every emulated cluster, in virtual time, out of one record."""
from __future__ import annotations

import sys
from dataclasses import replace
from typing import Iterator, NamedTuple, Sequence

import numpy as np
from tqdm import tqdm

from config.cli import parse
from config.keys import over, raw_values
from config.methods import METHODS
from config.profiles import PROFILES, Profile
from config.questions import load
from eval.plan.candidates import Candidate, evenly
from eval.plan.keys import PlanConfig, words
from eval.plan.record import book_of
from eval.plan.trial import Bench, Trial
from eval.tables import in_columns
from launch.words import with_model

COMMAND = "python -m scripts.bench profiles"
ASKED = {"methods": "ar,naive,serial,pruned,pipedec,continuous,streaming", "max_new_tokens": "128"}
BOARDS = 4
OURS = "streaming"


class Row(NamedTuple):
    """Tokens per second of one method on one cluster, set by set."""

    profile: str
    draft: str
    method: str
    speeds: Sequence[float]

    @property
    def mean(self) -> float:
        return float(np.mean(self.speeds))


def profiles(argv: list[str]) -> int:
    """The command `python -m scripts.bench profiles`; its exit code."""
    argv = with_model(argv)
    typed = raw_values(argv).get("profile")
    config = parse(words(over(argv, {**ASKED, "profile": typed or "server"})), COMMAND, kind=PlanConfig)
    chosen = config.run.cluster
    sites = {typed: chosen} if typed and chosen else PROFILES
    rows = list(tried(config, sites))
    cells = [(*row[:3], f"{row.mean:.2f}", *(f"{speed:.2f}" for speed in row.speeds)) for row in rows]
    print(in_columns(("simulated", "draft", "method", "mean", *config.chosen_sets), cells, names=3))
    for line in compared(rows):
        print(line)
    return 0


def tried(config: PlanConfig, sites: dict[str, Profile]) -> Iterator[Row]:
    """What each method reaches with each draft on these clusters; sizes that were left open are measured at the start.
    """
    book = book_of(config)
    sets = _sets(config)
    jobs = [(name, *one) for name in sites for one in contenders(config)]
    for name, method, draft in tqdm(jobs, unit="trial", leave=False, file=sys.stderr):
        site = replace(sites[name], factors=sites[name].factors or (1.0,) * BOARDS)
        boards = len(site.factors)
        candidate = Candidate(method, draft, tuple(zip(range(1, 1 + boards))), evenly(boards, site.layers))
        trial = Bench(site, config, book).trial(candidate, book.answers, config.run.max_new_tokens)
        yield Row(name, draft, method, [_speed(trial, sets, one) for one in config.chosen_sets])


def contenders(config: PlanConfig) -> Iterator[tuple[str, str]]:
    """The methods that run on one pipeline, each with its draft or with all that may be chosen."""
    for method in config.chosen_methods:
        about = METHODS[method]
        if about.target == "ring":
            for draft in config.chosen_drafts if about.draft == "eagle" else [about.draft]:
                yield method, draft


def _sets(config: PlanConfig) -> list[str]:
    """The set of each question, in the order of the record."""
    run, names = config.run, config.chosen_sets
    sizes = [len(load(config.folder, name, run.question_begin, run.question_end)) for name in names]
    return [name for turn in range(max(sizes)) for name, size in zip(names, sizes) if turn < size]


def _speed(trial: Trial, sets: Sequence[str], name: str) -> float:
    """Tokens per second over the questions of a set, prefill included."""
    spent = [one for one, of in zip(trial.spent, sets) if of == name]
    return sum(one.tokens for one in spent) / sum(one.seconds for one in spent)


def compared(rows: Sequence[Row]) -> Iterator[str]:
    """How `streaming` does beside the best other method, by cluster and draft."""
    for ours in rows:
        others = [row for row in rows if row.profile == ours.profile and row.draft in (ours.draft, "none")
                  and row.method != OURS]
        if ours.method == OURS and others:
            best = np.max([row.speeds for row in others], axis=0)
            shares = np.array(ours.speeds) / best
            mean = ours.mean / max(row.mean for row in others)
            yield (f"{ours.profile}, {ours.draft}: {OURS} is {mean:.3f} times the best other in the mean, "
                   f"{shares.min():.3f} on its worst set (simulated)")
