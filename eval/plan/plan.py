"""A plan, from the configuration to the choice: the cluster, the record, the search."""
from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from config.boards import Boards, uneven
from config.files import write_json
from config.plan_config import PlanConfig
from eval.plan.candidates import families
from eval.plan.hosts import answered, boards_of
from eval.plan.measure import measured
from eval.plan.record import Book, book_of
from eval.plan.search import Search, choice
from eval.plan.trial import Bench, Trial

USUAL = 4  # boards beside rank 0's


class Plan(NamedTuple):
    """The choice, the other finalists with it, the fastest first, and how it was found."""

    bench: Bench
    chosen: Trial
    trials: list[Trial]
    boards: int  # that there are
    candidates: int
    tried: int

    @property
    def in_own_layers(self) -> bool:
        """Whether splits count the layers of the recorded model, and not of the one that a profile stands for."""
        return sum(self.chosen.candidate.layers) == self.bench.book.layers


def plan(config: PlanConfig) -> Plan:
    """The best that is found for a cluster. Raises ValueError, with the fix, where there is nothing to plan with."""
    site = cluster(config)
    return planned(config, site, book_of(config))


def cluster(config: PlanConfig) -> Boards:
    """The cluster that is planned for, with as many boards as may take part, and their memory."""
    if config.profile == "none":
        site = measured(config)
    else:
        there = config.cluster
        assert there is not None, config.profile
        site = uneven(there)
    if config.hosts:
        site = answered(site, config.hosts)
    named = len(boards_of(config.hosts)) if config.hosts else 0
    boards = config.boards or named or len(site.factors) or max(len(config.gigabytes(0)), USUAL)
    factors = (*site.factors, *[1.0] * boards)[:boards]
    weights = config.layer_gb * site.layers or site.weights
    memory = config.gigabytes(boards) or site.memory[:boards]
    if memory and not weights:
        raise ValueError("memory is given, but not what layers take: add layer_gb=NUMBER, the GB of one layer")
    return replace(site, factors=factors, memory=memory, weights=weights)


def planned(config: PlanConfig, site: Boards, book: Book) -> Plan:
    """The same for this cluster and this record."""
    boards = len(site.factors)
    layers = book.layers if boards <= book.layers else site.layers
    made = families(site, boards, layers, config.chosen_methods, config.chosen_drafts)
    bench = Bench(site, config, book)
    search = Search(bench)
    trials = search.run(made)
    chosen = choice(trials)
    if len(chosen.candidate.boards) < boards:  # what all of them would reach is told, too
        trials = search.beside(trials, chosen.candidate, made)
    return Plan(bench, chosen, trials, boards, sum(map(len, made)), search.tried)


def write_preset(path: str, base: str, keys: dict[str, str]) -> None:
    """Write a file that commands take in place of a preset: these keys over those of the preset `base`."""
    write_json(path, {"preset": base, "keys": keys})
