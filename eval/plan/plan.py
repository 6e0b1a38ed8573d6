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
from eval.plan.record import PlanRecord, record_of
from eval.plan.search import Search, candidates, choice, plain_of
from eval.plan.trial import Bench, Trial
from launch.prepare import prepare

DEFAULT_NUM_BOARDS = 4  # besides rank 0's


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
        trials = self.checked or self.trials
        chosen_speed = next(trial.speed for trial in trials if trial.candidate == self.chosen.candidate)
        return chosen_speed, plain_of(trials).speed


def plan(config: PlanConfig) -> Plan:
    """Find the best candidate for a cluster. Raise ValueError, with the fix, if information is missing."""
    profile = cluster(config)
    simulated_plan = planned(config, profile, record_of(config))
    return checked(config, simulated_plan) if config.check else simulated_plan


def cluster(config: PlanConfig) -> Profile:
    """Return the cluster to plan for, with the boards that may take part, and their memory."""
    profile = config.run.cluster or measured(config)
    host_lines = boards_of(config.run.hosts) if config.run.hosts else []

    # boards
    num_described = len(host_lines) or len(profile.factors) or len(profile.memory)
    num_sizes = len(listed(config.memory))
    default_boards = num_sizes if num_sizes > 1 else DEFAULT_NUM_BOARDS
    num_boards = config.boards or num_described or default_boards
    factors = (*profile.factors, *[1.0] * num_boards)[:num_boards]

    # memory
    weights = config.layer_gb * profile.layers or profile.weights
    hosts_memory = tuple(float(line.memory) for line in host_lines[:num_boards] if line.memory)
    memory = config.gigabytes(num_boards) or hosts_memory or profile.memory[:num_boards]
    if 0 < len(memory) < num_boards:
        raise ValueError(f"memory is given for {len(memory)} of {num_boards} boards: give memory= for all, or fewer "
                         "boards=")
    if memory and not weights:
        raise ValueError("memory is given, but not the size of layers: add layer_gb=NUMBER, the GB of one layer")

    return replace(profile, factors=factors, memory=memory, weights=weights)


def planned(config: PlanConfig, profile: Profile, record: PlanRecord) -> Plan:
    """Find the best candidate for this cluster and this record."""
    num_boards = len(profile.factors)
    num_layers = record.layers if num_boards <= record.layers else profile.layers

    # candidates
    given_stages = stages_of(config) if config.splits == "given" else ()
    if len(given_stages) > num_boards:
        raise ValueError(f"the split has {len(given_stages)} stages, but there are {num_boards} boards: give "
                         f"boards={len(given_stages)}, or omit splits")
    all_families = families(profile, num_layers, config.chosen_methods, config.chosen_drafts, given_stages)
    if config.splits == "first":
        all_families = [[candidate for candidate in family if candidate.in_order] for family in all_families]

    # search
    bench = Bench(profile, config, record)
    search = Search(bench, all_families)
    trials = search.run()
    if num_boards > 1:  # to print the speed of other numbers of boards, too
        trials = search.with_other_sizes(trials)

    num_candidates = sum(map(len, all_families))
    return Plan(bench, choice(trials), trials, num_boards, num_candidates, search.tried)


def stages_of(config: PlanConfig) -> tuple[int, ...]:
    """Return the layers of each stage of the split in the keys of a run. Raise ValueError if it is no pipeline."""
    part = prepare(config.single(pipeline_type=PLAIN_METHOD, draft="none")).spec(0).part

    if len(part.stages) == 1 or len(part.shares) > 1:
        raise ValueError(f"{part.folder.parent} is split as {part.form}, but splits=given only supports pipelines of "
                         "single boards: omit splits")
    return tuple(part.stages[1:])


def checked(config: PlanConfig, simulated_plan: Plan) -> Plan:
    """Measure the best candidates and plain decoding on this machine, and return the plan with the choice from them."""
    best_by_setting: dict[object, Candidate] = {}  # candidates with the same setting differ only in sizes
    for candidate in candidates(simulated_plan.trials):
        best_by_setting.setdefault((candidate.kind, candidate.groups, candidate.layers), candidate)
    best_candidates = islice(best_by_setting.values(), config.check)
    to_measure = dict.fromkeys((plain_of(simulated_plan.trials).candidate, *best_candidates))

    measured_trials = check(config, simulated_plan.bench.record, list(to_measure))
    measured_trials.sort(key=lambda trial: -trial.speed)

    chosen = choice(measured_trials).candidate
    simulated_trial = next(trial for trial in simulated_plan.trials if trial.candidate == chosen)
    return simulated_plan._replace(chosen=simulated_trial, checked=measured_trials)


def write_preset(path: str, base_preset: str,
                 keys: dict[str, str], finished_plan: Plan) -> None:
    """Write a file that commands take in place of a preset: these keys over those of the preset `base_preset`.

    It also holds the choice, and tokens per second.
    """
    chosen_speed, plain_speed = finished_plan.speeds
    chosen = {
        "keys": finished_plan.chosen.candidate.keys,
        "kind": "measured" if finished_plan.checked else "simulated",
        "tokens_per_second": chosen_speed, "plain_tokens_per_second": plain_speed}
    write_json(path, {"preset": base_preset, "keys": keys, "chosen": chosen})
