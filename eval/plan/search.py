"""The search of a plan: each method with each draft climbs along the splits that may be best."""
from __future__ import annotations

from functools import partial
from typing import Callable, Sequence

from config.methods import METHODS
from eval.plan.keys import PLAIN_METHOD, PlanConfig
from eval.plan.trial import Bench, Trial
from launch.progress import ProgressBar
from launch.splits import Split, best_splits

USUAL_ROWS = 16  # of a segment with guesses
NUM_FIRST = 4  # of the splits, evenly spaced, that are tried first
WORTH = 1.02  # least speed-up over plain decoding that justifies guesses


def search(bench: Bench, config: PlanConfig) -> list[Trial]:
    """Return trials of each method with each draft, the fastest first; raises ValueError if the model fits no split."""
    profile, num_layers = bench.profile, bench.num_layers
    max_layers = [num_layers] * len(profile.factors)
    if profile.memory:
        max_layers = [min(num_layers, int(gigabytes / bench.layer_gigabytes)) for gigabytes in profile.memory]

    all_trials = []
    for contender in ProgressBar(config.contenders, desc="plan", unit="method", leave=False):
        num_rows = 1 if METHODS[contender.method].tree == "none" else USUAL_ROWS
        splits = best_splits(profile, max_layers, num_layers, num_rows)
        if not splits:
            raise ValueError(_too_large_message(bench))
        all_trials += climb(splits, partial(bench.trial, contender))

    return sorted(all_trials, key=lambda trial: (-trial.speed, len(trial.split.boards)))


def _too_large_message(bench: Bench) -> str:
    board_sizes = ", ".join(f"{gigabytes:g}" for gigabytes in bench.profile.memory)
    return (f"no split fits: {bench.num_layers} layers take {bench.layer_gigabytes:.2g} GB each, with keys and values, "
            f"and the boards have {board_sizes}: add boards, give the weights of quantized layers in "
            "profile=FILE.json, or give a smaller max_length")


def climb(splits: Sequence[Split], try_split: Callable[[Split], Trial]) -> list[Trial]:
    """Return trials of some splits, ever closer around the fastest one.

    Beside it the speed falls to both sides: towards shorter rounds, where the slowest stage takes longer, and back.
    """
    trials: dict[int, Trial] = {}  # by the index of their splits
    step = max(1, len(splits) // NUM_FIRST)
    next_indices = {*range(0, len(splits), step), len(splits) - 1}

    while step:
        for split_index in sorted(next_indices):
            trials[split_index] = try_split(splits[split_index])

        best_index = max(trials, key=lambda index: trials[index].speed)
        neighbours = {best_index - step, best_index + step}
        next_indices = neighbours.intersection(range(len(splits))) - trials.keys()
        if not next_indices:
            step //= 2

    return list(trials.values())


def choice(trials: Sequence[Trial]) -> Trial:
    """Return the first trial, the fastest, or plain decoding if that is hardly slower."""
    plain_trial = next(trial for trial in trials if trial.contender.method == PLAIN_METHOD)
    return trials[0] if trials[0].speed >= WORTH * plain_trial.speed else plain_trial
