"""The gain of Speculative Pipeline Decoding (arXiv 2605.30852), from published acceptance in our model of costs.

It guesses one token for each step of a stage, from features of rows at different depths. Nothing here runs it, neither
its message of partial features nor its head. The acceptance rate follows from a published theoretical speed: a correct
guess costs a step, a wrong one a step of each stage. All times are milliseconds.
"""
from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Sequence

from config.profiles import PROFILES, Profile

PLAIN = 1e3 / 35.26  # a token of Qwen3.5-4B on one of the authors' devices
LAYER = 3.49 / 3  # a layer of their head
FIXED = 1.2  # of a step in lock step: verdict, messages, synchronization; fitted to the speeds with 4 and 8 stages


class Published(NamedTuple):
    """A line of the authors' table at temperature 0, mean of three sets: speeds over plain decoding."""

    stages: int
    layers: int  # of the head
    theory: float
    wall: float


SITES = ("jetson-7b", "lan-1g", "server")
TABLE = (
    Published(4, 4, 2.64, 2.27),
    Published(8, 3, 3.39, 2.53),
    Published(16, 2, 3.70, 1.43))


def acceptance_rate(stages: int, theory: float) -> float:
    """Return the rate of correct guesses, 0 to 1, from the theoretical speed of a pipeline of `stages` stages."""
    return 1 - (stages / theory - 1) / (stages - 1)


def over_plain(site: Profile, stages: int, chance: float) -> float:
    """Return the speed over plain decoding of this pipeline without lock step; `chance` is the rate of correct guesses.

    A correct guess takes the time of the slowest part, a wrong one a draft and the whole way.
    """
    way = site.model + site.latency * (stages + 1) + site.verdict
    step = max(site.model / stages, site.level, site.verdict)
    return way / (chance * step + (1 - chance) * (way + site.level))


def spd(words: Sequence[str]) -> int:
    """Print the authors' speeds next to those of the model of costs."""
    if words:
        raise ValueError(f"{words[0]} is unknown, since spd has no arguments: type python3 -m scripts.bench spd")
    print("simulated from published acceptance; over plain decoding\n")
    print("stages  right  theory  wall (paper)  in lock step  without  " + "  ".join(SITES))
    for line in TABLE:
        chance = acceptance_rate(line.stages, line.theory)
        step = max(PLAIN / line.stages, LAYER * line.layers) + FIXED  # in lock step it waits for the slowest part
        locked = PLAIN * line.theory / line.stages / step
        theirs = replace(PROFILES["server"], model=PLAIN, level=LAYER * line.layers)
        sites = [theirs, *map(PROFILES.__getitem__, SITES)]
        speeds = "".join(f"{over_plain(site, line.stages, chance):>9.2f}" for site in sites)
        print(f"{line.stages:>6}{chance:>7.3f}{line.theory:>8.2f}{line.wall:>14.2f}{locked:>14.2f}{speeds}")
    return 0
