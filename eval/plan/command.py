"""Choose method, draft and split for given boards, by simulation, before any file is split or copied.

Usage: python3 -m scripts.plan [PRESET] profile=NAME|FILE.json [key=value ...]; --help shows all keys, docs/planner.md
describes the output.
"""
from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Sequence

from cluster.board import Line, read_hosts
from config.console import command
from config.files import SPACE_REMEDY, write
from config.methods import METHODS
from config.profiles import PROFILES, Profile
from config.profiles import write as write_profile
from config.values import listed
from eval.plan.keys import COMMAND, PLAIN_METHOD, PlanConfig
from eval.plan.splits import best_splits
from eval.plan.trial import ANY_PROFILE, Bench, Trial, climb, open_bench
from eval.tables import in_columns, number
from launch.measure import boards_of, measured_profile
from launch.progress import ProgressBar
from launch.words import resolve

DEFAULT_NUM_BOARDS = 4  # besides rank 0's
USUAL_ROWS = 16  # of a segment with guesses
WORTH = 1.02  # least speed-up over plain decoding that justifies guesses
NUM_SHOWN = 12  # trials in the table
COLUMNS = "method", "stages", "boards", "tokens/s", "first s", "GB"


@command
def main(argv: Sequence[str]) -> int:
    resolved = resolve(argv, PlanConfig, COMMAND)
    config: PlanConfig = resolved.keys
    resolved.report()

    if config.measured:
        config = measured(config)
    site = cluster(config)
    with open_bench(site, config) as bench:
        trials = search(bench, config)
    chosen = choice(trials)
    print("\n".join(report(bench, trials, chosen)))

    if config.write_hosts:
        lines = read_hosts(config.run.hosts)
        write(config.write_hosts, "".join(map(_written, [lines[rank] for rank in (0, *chosen.split.boards)])),
              SPACE_REMEDY)
        print(f"hosts: {config.write_hosts} lists the chosen boards, rank 0's first")
    print(" ".join(f"{key}={value}" for key, value in chosen.keys.items()))
    return 0


def _written(line: Line) -> str:
    """Return the line of a board as a hosts file has it."""
    words = [f"{key}={value}" for key, value in line._asdict().items() if value and key != "address"]
    return " ".join([line.address, *words]) + "\n"


def measured(config: PlanConfig) -> PlanConfig:
    """Measure the boards of the hosts file into a profile's file; return the configuration with this profile."""
    with open_bench(PROFILES[ANY_PROFILE], config) as bench:
        profile = measured_profile(config.run.hosts, bench.prepared, *bench.rank_0_times())
    write_profile(config.measured, profile)
    return replace(config, measured="", run=replace(config.run, profile=config.measured))


def cluster(config: PlanConfig) -> Profile:
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
    memory = typed_memory * num_boards if len(typed_memory) == 1 else typed_memory
    memory = memory or (hosts_memory or profile.memory)[:num_boards]
    if memory and len(memory) != num_boards:
        raise ValueError(f"memory is given for {len(memory)} boards, and there are {num_boards}: give one number for "
                         "all, or one for each")
    if memory and not profile.weights:
        raise ValueError("memory is given, but not the size of layers: add weights, the GB of all layers, to "
                         f"profile={config.run.profile}")
    return replace(profile, factors=factors, memory=memory)


# --- the search -------------------------------------------------------------------------------------------------------

def search(bench: Bench, config: PlanConfig) -> list[Trial]:
    """Return trials of each method with each draft, the fastest first; raises ValueError if the model fits no split."""
    site, num_layers, trials = bench.site, bench.num_layers, []
    max_layers = [min(num_layers, int(size / bench.layer_gigabytes)) for size in site.memory]

    for contender in ProgressBar(config.contenders, desc="plan", unit="method", leave=False):
        num_rows = 1 if METHODS[contender.method].tree == "none" else USUAL_ROWS
        splits = best_splits(site, max_layers or [num_layers] * len(site.factors), num_layers, num_rows)
        if not splits:
            sizes = ", ".join(f"{size:g}" for size in site.memory)
            raise ValueError(f"no split fits: {num_layers} layers take {bench.layer_gigabytes:.2g} GB each, with keys "
                             f"and values, and the boards have {sizes}: add boards, give the weights of quantized "
                             "layers in profile=FILE.json, or give a smaller max_length")
        trials += climb(splits, partial(bench.trial, contender))
    return sorted(trials, key=lambda trial: (-trial.speed, len(trial.split.boards)))


def choice(trials: Sequence[Trial]) -> Trial:
    """Return the first trial, the fastest, or plain decoding if that is hardly slower."""
    plain = next(trial for trial in trials if trial.contender.method == PLAIN_METHOD)
    return trials[0] if trials[0].speed >= WORTH * plain.speed else plain


def report(bench: Bench, trials: Sequence[Trial], chosen: Trial) -> list[str]:
    """Return the lines about a plan: the cluster, the fastest trials and the choice, and what the choice needs."""
    shown = list(trials[:NUM_SHOWN])
    if chosen not in shown:
        shown.append(chosen)

    rows = []
    for trial in shown:
        names = " ".join(trial.contender), trial.keys["stages"], ",".join(map(str, trial.split.boards))
        gigabytes = max(trial.split.layers) * bench.layer_gigabytes
        rows.append([*names, *map(number, (trial.speed, trial.first_seconds, gigabytes))])
    lines = [f"{bench.site.about} (simulated)", in_columns(COLUMNS, rows, names=3, name_width=60)]

    boards = chosen.split.boards
    if boards != tuple(range(1, 1 + len(boards))):
        lines.append(f"note: the stages are on boards {', '.join(map(str, boards))}, and a run takes the first boards "
                     "of its hosts file: write_hosts=FILE with hosts=FILE writes one of these alone")
    return lines
