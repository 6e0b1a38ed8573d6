"""What a simulation of speculative decoding is: times, acceptance and lookahead, as the paper on DSI names them.

It knows nothing about how anything is simulated. Names, defaults and limits are those of the simulator that was
published with the paper. A command adds keys in a dataclass of its own.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Iterator

from config.ranges import Checked, Range, outside, unknown

SLACK = 1e-9  # relative: quotients that are whole but for rounding count as whole
COUNT = 1_000_000_000  # the most of anything that is counted
TOKENS = Range(1, 1_000_000)
COST = Range(0.000000001, 1_000_000_000)
HOP = Range(COST.least, COST.most, {0: "no time"})
RANGES = {  # of the keys of Simulation that are numbers
    "c": COST, "a": Range(0, 1), "k": Range(1, COUNT),
    "failure_cost": COST, "S": TOKENS,
    "num_target_servers": Range(1, COUNT, {0: "as many as it takes"}),
    "random_seed": Range(0, (1 << 32) - 1), "num_repeats": Range(1, 1_000_000),
}
ONLINE_RANGES = {  # and of those that OnlineSimulation adds
    "c_sub": COST, "failure_cost_sub": COST, "wait_for_pipe": Range(0, 3600),
    "total_tokens": Range(0, COUNT), "maximum_correct_tokens": Range(0, COUNT),
}
SHARED = ("c", "a", "k", "failure_cost", "S", "num_target_servers")  # what is simulated offline and online alike
ONLINE_CHOICES = {"simul_type": ("DSI", "SI", "both")}


@dataclass(frozen=True)
class Simulation(Checked):
    """What is simulated. Costs are in one unit, which is that of the results."""

    # What is simulated
    c: float = 0.1  # a forward of the drafter (online: its first one)
    a: float = 0.9  # chance that a draft is accepted
    k: int = 5  # lookahead: drafts that one verification checks
    failure_cost: float = 1.0  # a forward of the target (online: a server's first one)
    S: int = 1000  # tokens to produce
    num_target_servers: int = 7  # servers of the target that DSI has; 0: as many as it takes

    # How often, and by which chance
    random_seed: int = 42  # of everything that is drawn
    num_repeats: int = 5  # how often it is simulated

    def problems(self) -> Iterator[str]:
        yield from outside(vars(self), RANGES)
        if self.c > self.failure_cost:
            yield (f"c={self.c:g} is more than failure_cost={self.failure_cost:g}: the drafter may not be slower than "
                   f"the target, so give c={self.failure_cost:g} or less")
        needed = servers_needed(self.failure_cost, self.c, self.k)
        if 0 < self.num_target_servers < needed:
            least = least_lookahead(self.failure_cost, self.c, self.num_target_servers)
            yield (f"num_target_servers={self.num_target_servers} are too few for k={self.k}: a verification every "
                   f"{self.k * self.c:g} that lasts {self.failure_cost:g} needs {needed}; give "
                   f"num_target_servers={needed} or more, 0 for as many as it takes, or k={least} or more")

    @property
    def servers(self) -> float:
        """How many servers of the target there are; infinite, if as many as it takes."""
        return self.num_target_servers or math.inf


@dataclass(frozen=True)
class OnlineSimulation(Simulation):
    """What is simulated with a time of its own for the first forward of the drafter and of each server.

    Costs are seconds.
    """

    # What is simulated online
    simul_type: str = "DSI"  # the algorithm: DSI or SI
    c_sub: float = 0.01  # seconds of a later forward of the drafter
    failure_cost_sub: float = 0.1  # seconds of a later forward of a server
    total_tokens: int = 100  # tokens of the prompt
    wait_for_pipe: float = 0.1  # seconds in which a process starts, which do not count
    maximum_correct_tokens: int = 20  # accepted drafts of a run, at most

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from outside(vars(self), ONLINE_RANGES)
        yield from unknown(vars(self), ONLINE_CHOICES)
        if self.c_sub > self.failure_cost_sub:
            yield (f"c_sub={self.c_sub:g} is more than failure_cost_sub={self.failure_cost_sub:g}: the drafter may not "
                   f"be slower than the target, so give c_sub={self.failure_cost_sub:g} or less")

    @classmethod
    def of(cls, offline: Simulation) -> OnlineSimulation:
        """The same with later forwards ten times as fast as the first; seed, repeats and the rest are as usual."""
        shared = {name: getattr(offline, name) for name in SHARED}
        return cls(**shared, c_sub=offline.c / 10, failure_cost_sub=offline.failure_cost / 10)


def servers_needed(target: float, drafter: float, lookahead: int) -> int:
    """The servers with which no verification waits: ceil(T / (k d)), Eq. 1 of the paper."""
    return math.ceil(target / (lookahead * drafter) * (1 - SLACK))


def least_lookahead(target: float, drafter: float, servers: float) -> int:
    """The smallest lookahead for which these servers are enough."""
    return max(1, math.ceil(target / (servers * drafter) * (1 - SLACK)))
