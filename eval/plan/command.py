"""Choose method, draft and split for given boards, by simulation, before any file is split or copied.

Usage: python3 -m scripts.plan [PRESET] profile=NAME|FILE.json [key=value ...]; --help shows all keys, docs/planner.md
describes the output.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Sequence

from cluster.board import read_hosts
from config.console import command
from config.files import SPACE_REMEDY, write
from config.profiles import PROFILES, Profile
from config.profiles import write as write_profile
from config.values import listed
from eval.plan.keys import COMMAND, PlanConfig
from eval.plan.search import choice, search
from eval.plan.trial import ANY_PROFILE, Bench, Trial, open_bench
from eval.tables import in_columns, number
from launch.measure import boards_of, measured_profile
from launch.words import resolve

DEFAULT_NUM_BOARDS = 4  # besides rank 0's
NUM_SHOWN = 12  # trials in the table
NAME_WIDTH = 60  # of its first columns, at most
COLUMNS = "method", "stages", "boards", "tokens/s", "first s", "GB"


@command
def main(argv: Sequence[str]) -> int:
    resolved = resolve(argv, PlanConfig, COMMAND)
    config: PlanConfig = resolved.keys
    resolved.report()

    if config.measured:
        config = measured(config)
    with open_bench(cluster_of(config), config) as bench:
        all_trials = search(bench, config)

    chosen_trial = choice(all_trials)
    print("\n".join(report(bench, all_trials, chosen_trial)))
    if config.write_hosts:
        write_hosts(config.write_hosts, config.run.hosts, chosen_trial.split.boards)
        print(f"hosts: {config.write_hosts} lists the chosen boards, rank 0's first")
    print(" ".join(f"{key}={value}" for key, value in chosen_trial.keys.items()))
    return 0


# --- the boards -------------------------------------------------------------------------------------------------------

def measured(config: PlanConfig) -> PlanConfig:
    """Measure the boards of the hosts file into a profile's file; return the configuration with this profile."""
    with open_bench(PROFILES[ANY_PROFILE], config) as bench:
        boards_profile = measured_profile(config.run.hosts, bench.prepared, *bench.rank_0_times())

    write_profile(config.measured, boards_profile)
    return replace(config, measured="", run=replace(config.run, profile=config.measured))


def cluster_of(config: PlanConfig) -> Profile:
    """Return the cluster to plan for, with the boards that may hold layers, and their memory.

    Raises ValueError, with the fix, for a memory of other boards.
    """
    profile = config.run.cluster
    assert profile is not None, "a plan needs a cluster"
    host_lines = boards_of(config.run.hosts) if config.run.hosts else []
    typed_memory = tuple(map(float, listed(config.memory)))

    # boards
    num_described = len(host_lines) or len(profile.factors) or len(profile.memory)
    num_typed = len(typed_memory) if len(typed_memory) > 1 else 0
    num_boards = config.boards or num_described or num_typed or DEFAULT_NUM_BOARDS
    factors = (*profile.factors, *[1.0] * num_boards)[:num_boards]

    # memory
    hosts_memory = tuple(float(line.memory) for line in host_lines if line.memory)
    board_memory = typed_memory or (hosts_memory or profile.memory)[:num_boards]
    if len(typed_memory) == 1:
        board_memory = typed_memory * num_boards
    if board_memory and len(board_memory) != num_boards:
        raise ValueError(f"memory is given for {len(board_memory)} boards, and there are {num_boards}: give one number "
                         "for all, or one for each")
    if board_memory and not profile.weights:
        raise ValueError("memory is given, but not the size of layers: add weights, the GB of all layers, to "
                         f"profile={config.run.profile}")

    return replace(profile, factors=factors, memory=board_memory)


def write_hosts(path: str, all_hosts: str, chosen_boards: Sequence[int]) -> None:
    """Write a hosts file with the lines of rank 0 and of the chosen boards, from the file of all boards."""
    all_lines = read_hosts(all_hosts)
    chosen_lines = [all_lines[0], *(all_lines[rank] for rank in chosen_boards)]
    write(path, "".join(f"{line}\n" for line in chosen_lines), SPACE_REMEDY)


# --- the output -------------------------------------------------------------------------------------------------------

def report(bench: Bench, trials: Sequence[Trial], chosen_trial: Trial) -> list[str]:
    """Return the lines about a plan: the cluster, the fastest trials and the choice, and what the choice needs."""
    shown_trials = list(trials[:NUM_SHOWN])
    if chosen_trial not in shown_trials:
        shown_trials.append(chosen_trial)

    table_rows = []
    for trial in shown_trials:
        board_list = ",".join(map(str, trial.split.boards))
        max_gigabytes = max(trial.split.layers) * bench.layer_gigabytes
        figures = map(number, (trial.speed, trial.first_seconds, max_gigabytes))
        table_rows.append([" ".join(trial.contender), trial.keys["stages"], board_list, *figures])

    report_lines = [f"{bench.profile.about} (simulated)",
                    in_columns(COLUMNS, table_rows, names=3, name_width=NAME_WIDTH)]
    chosen_boards = chosen_trial.split.boards
    if chosen_boards != tuple(range(1, 1 + len(chosen_boards))):
        report_lines.append(f"note: the stages are on boards {', '.join(map(str, chosen_boards))}, and a run takes the "
                            "first boards of its hosts file: write_hosts=FILE with hosts=FILE writes one of these "
                            "alone")
    return report_lines
