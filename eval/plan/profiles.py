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
from eval.plan.record import record_of
from eval.plan.trial import Bench
from eval.tables import in_columns, number
from launch.progress import ProgressBar
from launch.words import with_model

COMMAND = "python3 -m scripts.bench profiles"
DEFAULT_KEYS = {"methods": "ar,naive,serial,pruned,pipedec,continuous,streaming", "max_new_tokens": "128"}
DEFAULT_FACTORS = (1.0,) * 4
COMPARED_METHOD = "streaming"


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
    typed_profile = raw_values(argv).get("profile")
    all_words = with_defaults(argv, {**DEFAULT_KEYS, "profile": typed_profile or "server"})
    config = parse(words(all_words), COMMAND, kind=PlanConfig)

    typed_cluster = config.run.cluster
    clusters = {typed_profile: typed_cluster} if typed_profile and typed_cluster else PROFILES
    rows = list(tried(config, clusters))

    cells = [[*row[:3], *map(number, (row.mean, *row.speeds))] for row in rows]
    heading = ("simulated", "draft", "method", "mean", *config.chosen_sets)
    print(in_columns(heading, cells, names=3))
    for line in compared(rows):
        print(line)
    return 0


def tried(config: PlanConfig, clusters: Mapping[str, Profile]) -> Iterator[Row]:
    """Yield the speed of each method with each draft on these clusters, over one pipeline of all boards. Sizes that are
    not given are measured at the start."""
    record, max_tokens = record_of(config), config.run.max_new_tokens
    methods = [method for method in config.chosen_methods if METHODS[method].target == "ring"]

    # the set of each question, in the order of the record
    names_by_set = [[name] * len(questions) for name, questions in config.questions_by_set.items()]
    set_turns = chain.from_iterable(zip_longest(*names_by_set))
    set_names = list(filter(None, set_turns))

    for profile_name, cluster in ProgressBar(clusters.items(), unit="cluster", leave=False):
        cluster = replace(cluster, factors=cluster.factors or DEFAULT_FACTORS)
        even_split = evenly(len(cluster.factors), cluster.layers)
        bench = Bench(cluster, config, record)

        for [candidate] in families(cluster, cluster.layers, methods, config.chosen_drafts, even_split):
            trial = bench.trial(replace(candidate, sizes=()), record.answers, max_tokens)
            speeds = []
            for chosen_set in config.chosen_sets:
                answers = [answer for answer, set_name in zip(trial.answers, set_names) if set_name == chosen_set]
                speeds.append(speed(answers))
            yield Row(profile_name, candidate.draft, candidate.method, speeds)


def compared(rows: Sequence[Row]) -> Iterator[str]:
    """Yield lines that compare `streaming` with the best other method, by cluster and draft."""
    for row in rows:
        other_rows = [other for other in rows if other.profile == row.profile
                      and other.draft in (row.draft, "none") and other.method != COMPARED_METHOD]

        if row.method == COMPARED_METHOD and other_rows:
            best_speeds = np.max([other.speeds for other in other_rows], axis=0)
            speed_ratios = np.array(row.speeds) / best_speeds
            mean_ratio = row.mean / max(other.mean for other in other_rows)
            yield (f"{row.profile}, {row.draft}: {COMPARED_METHOD} is {mean_ratio:.3f} times the best other on "
                   f"average, {speed_ratios.min():.3f} on its worst set (simulated)")
