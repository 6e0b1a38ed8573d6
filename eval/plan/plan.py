"""Make a plan, from the configuration to the choice: the cluster, the record, the search."""
from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import NamedTuple, Sequence

from config.files import write_json
from config.profiles import Profile
from config.values import listed
from eval.plan.candidates import PLAIN_METHOD, Candidate, families
from eval.plan.hosts import boards_of
from eval.plan.keys import PlanConfig
from eval.plan.measure import check, measured
from eval.plan.record import Book, book_of
from eval.plan.search import Search, candidates, choice, plain_of
from eval.plan.trial import Bench, Trial
from launch.prepare import prepare

USUAL_BOARDS = 4  # default number of boards besides rank 0's


class Plan(NamedTuple):
    """The choice, all finalists, and figures of the search."""

    bench: Bench
    chosen: Trial
    trials: list[Trial]  # of the finalists, the choice included, the fastest first
    boards: int  # number of boards besides rank 0's
    candidates: int
    tried: int
    checked: Sequence[Trial] = ()  # measured on this machine, the fastest first

    @property
    def speeds(self) -> tuple[float, float]:
        """Tokens per second of the choice and of plain decoding: measured here if there is `checked`, or simulated."""
        tried = self.checked or self.trials
        ours = next(one.speed for one in tried if one.candidate == self.chosen.candidate)
        return ours, plain_of(tried).speed


def plan(config: PlanConfig) -> Plan:
    """Find the best candidate for a cluster. Raise ValueError, with the fix, if information is missing."""
    site = cluster(config)
    found = planned(config, site, book_of(config))
    return checked(config, found) if config.check else found


def cluster(config: PlanConfig) -> Profile:
    """Return the cluster to plan for, with the boards that may take part, and their memory."""
    site, hosts = config.run.cluster or measured(config), config.run.hosts
    lines = boards_of(hosts) if hosts else []
    described = len(lines) or len(site.factors) or len(site.memory)
    sizes = len(listed(config.memory))
    boards = config.boards or described or (sizes if sizes > 1 else USUAL_BOARDS)
    factors = (*site.factors, *[1.0] * boards)[:boards]
    weights = config.layer_gb * site.layers or site.weights
    of_lines = tuple(float(line.memory) for line in lines[:boards] if line.memory)
    memory = config.gigabytes(boards) or of_lines or site.memory[:boards]
    if 0 < len(memory) < boards:
        raise ValueError(f"memory is given for {len(memory)} of {boards} boards: give memory= for all, or fewer "
                         "boards=")
    if memory and not weights:
        raise ValueError("memory is given, but not the size of layers: add layer_gb=NUMBER, the GB of one layer")
    return replace(site, factors=factors, memory=memory, weights=weights)


def planned(config: PlanConfig, site: Profile, book: Book) -> Plan:
    """Find the best candidate for this cluster and this record."""
    boards = len(site.factors)
    layers = book.layers if boards <= book.layers else site.layers
    given = stages_of(config) if config.splits == "given" else ()
    if len(given) > boards:
        raise ValueError(f"the split has {len(given)} stages, but there are {boards} boards: give boards={len(given)}, "
                         "or omit splits")
    made = families(site, layers, config.chosen_methods, config.chosen_drafts, given)
    if config.splits == "first":
        made = [[one for one in family if one.in_order] for family in made]
    bench = Bench(site, config, book)
    search = Search(bench, made)
    trials = search.run()
    if boards > 1:  # to print the speed of other numbers of boards, too
        trials = search.with_other_sizes(trials)
    count = sum(map(len, made))
    return Plan(bench, choice(trials), trials, boards, count, search.tried)


def stages_of(config: PlanConfig) -> tuple[int, ...]:
    """Return the layers of each stage of the split in the keys of a run. Raise ValueError if it is no pipeline."""
    part = prepare(config.single(pipeline_type=PLAIN_METHOD, draft="none")).spec(0).part
    if len(part.stages) == 1 or len(part.shares) > 1:
        raise ValueError(f"{part.folder.parent} is split as {part.form}, but splits=given only supports pipelines of "
                         "single boards: omit splits")
    return tuple(part.stages[1:])


def checked(config: PlanConfig, found: Plan) -> Plan:
    """Measure the best candidates and plain decoding on this machine, and return the plan with the choice from them."""
    different: dict[object, Candidate] = {}
    for one in candidates(found.trials):
        different.setdefault((one.kind, one.groups, one.layers), one)
    best = islice(different.values(), config.check)
    tried = dict.fromkeys((plain_of(found.trials).candidate, *best))
    here = check(config, found.bench.book, list(tried))
    here.sort(key=lambda trial: -trial.speed)
    chosen = choice(here).candidate
    trial = next(trial for trial in found.trials if trial.candidate == chosen)
    return found._replace(chosen=trial, checked=here)


def write_preset(path: str, base: str,
                 keys: dict[str, str], found: Plan) -> None:
    """Write a file that commands take in place of a preset: these keys over those of the preset `base`.

    It also holds the choice, and tokens per second.
    """
    ours, plain = found.speeds
    chosen = {"keys": found.chosen.candidate.keys, "kind": "measured" if found.checked else "simulated",
              "tokens_per_second": ours, "plain_tokens_per_second": plain}
    write_json(path, {"preset": base, "keys": keys, "chosen": chosen})
