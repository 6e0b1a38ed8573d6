"""The keys of the commands that run no model: names, defaults and limits of the published simulators."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Iterator, Sequence

from config.keys import Checked, key
from config.values import COUNT, Choices, Range
from eval.dsi.formulas import ACCOUNTINGS, least_lookahead, servers_needed

COMMAND = "python3 -m scripts.simulate"
COST = Range(0.000000001, 1_000_000_000)


@dataclass(frozen=True)
class Simulation(Checked):
    """The setting of a simulation. All costs and results are in one unit."""

    COST_PAIRS: ClassVar[Sequence[tuple[str, str]]] = (("c", "failure_cost"),)  # forwards of drafter and target

    c: float = key(0.1, "cost of a drafter forward (online: of its first one)", COST,
        heading="Setting of the simulation")
    a: float = key(0.9, "probability that a draft is accepted", Range(0, 1))
    k: int = key(5, "lookahead: drafts per verification", Range(1, COUNT))
    failure_cost: float = key(1.0, "cost of a target forward (online: of a server's first one)", COST)
    S: int = key(1000, "tokens to generate", Range(1, 20_000))  # the exact sums take time with the square
    num_target_servers: int = key(7, "target servers of DSI; 0: as many as needed",
        Range(1, COUNT, {0: "as many as needed"}))

    random_seed: int = key(42, "seed of all sampling", Range(0, (1 << 32) - 1), heading="Sampling")
    num_repeats: int = key(5, "number of simulated texts", Range(1, 1_000_000))

    def problems(self) -> Iterator[str]:
        yield from super().problems()

        for draft_key, target_key in self.COST_PAIRS:
            draft_cost, target_cost = getattr(self, draft_key), getattr(self, target_key)
            if draft_cost > target_cost:
                yield (f"{draft_key}={draft_cost:g} exceeds {target_key}={target_cost:g}, but the drafter must not be "
                       f"slower than the target: give {draft_key}={target_cost:g} or less")

        min_servers = servers_needed(self.failure_cost, self.c, self.k)
        if 0 < self.num_target_servers < min_servers:
            min_lookahead = least_lookahead(self.failure_cost, self.c, self.num_target_servers)
            yield (f"num_target_servers={self.num_target_servers} is too small for k={self.k}, since a verification "
                   f"every {self.k * self.c:g} that takes {self.failure_cost:g} needs {min_servers}: give "
                   f"num_target_servers={min_servers} or more, 0 for as many as needed, or k={min_lookahead} or more")


@dataclass(frozen=True)
class Offline(Simulation):
    """Compute the exact cost of a text by plain decoding, SI and DSI, next to that of sampled texts.

    The mean is exact for independent drafts. No model is run.
    """

    EXAMPLES = f"""\
  {COMMAND} offline
  {COMMAND} offline c=0.05 a=0.8 k=3 S=100 accounting=original"""

    accounting: str = key("corrected", "of DSI: corrected (as by events), or original (as in the published simulator)",
        Choices(ACCOUNTINGS), heading="Accounting")


@dataclass(frozen=True)
class Online(Simulation):
    """Simulate SI and DSI by events on a virtual clock, with modelled acceptance, without a model; times in seconds.

    Both decode the same texts.
    """

    EXAMPLES = f"""\
  {COMMAND} online
  {COMMAND} online S=50 num_repeats=100
  {COMMAND} online a=0.6 k=3 preemption=none"""
    COST_PAIRS = (*Simulation.COST_PAIRS, ("c_sub", "failure_cost_sub"))
    MAX_SERVERS = 1024  # a limit, since every event scans all servers

    maximum_correct_tokens: int = key(20, "most accepted drafts in a row", Range(0, COUNT), heading="Decoding")
    traces: str = key("", "JSON file of recorded matches, a list of 0 and 1 for each text; empty: sampled with a",
        names_file=True)

    c_sub: float = key(0.01, "seconds of a later forward of the drafter", COST, heading="Forwards and servers")
    failure_cost_sub: float = key(0.1, "seconds of a later forward of a server", COST)
    preemption: str = key("instant", "when a server aborts a useless forward: instant, or none (it runs to its end)",
        Choices(("instant", "none")))

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.servers > self.MAX_SERVERS:
            yield (f"{self.servers} servers are too many: give num_target_servers={self.MAX_SERVERS} or less, "
                   "or a larger k")

    @property
    def servers(self) -> int:
        """The number of servers; as many as needed: for the slowest forwards, and one more for preemption."""
        slowest_target, fastest_draft = max(self.failure_cost, self.failure_cost_sub), min(self.c, self.c_sub)
        return self.num_target_servers or 1 + int(servers_needed(slowest_target, fastest_draft, self.k))


@dataclass(frozen=True)
class Heatmap(Checked):
    """Draw heat maps of the speed-ups of SI and DSI, by drafter latency and acceptance rate.

    Every cell has the cost per token in the long run, by formulas, of each method at its best lookahead: for DSI the
    best of those that its target servers allow, for SI the best of all.
    """

    EXAMPLES = f"""\
  {COMMAND} heatmap
  {COMMAND} heatmap grid=paper output=out/maps
  {COMMAND} heatmap grid=paper lookahead=5 num_target_servers=20
  {COMMAND} heatmap ndim=20 num_target_servers=3 accounting=original"""

    grid: str = key("ndim", "ndim: see the next key; paper: 100 drafters, 101 acceptance rates and 200 lookaheads",
        Choices(("ndim", "paper")), heading="Grid and costs")
    ndim: int = key(10, "steps from 0 to 1 of drafter latency and acceptance rate, and number of lookaheads",
        Range(2, 50))
    lookahead: int = key(0, "the only lookahead, as 5 in Figure 7 of the paper; 0: the best of each method",
        Range(1, 200, {0: "the best"}))
    num_target_servers: int = key(7, "target servers of DSI", Range(1, 1000))
    accounting: str = key("corrected", "of a run of DSI: corrected, or original (as in the published simulator)",
        Choices(ACCOUNTINGS))

    output: str = key("out/heatmap", "folder for the table heatmap.csv and the maps", heading="Output", names_file=True)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not self.output:
            yield "output= is empty: name a folder"
        if self.grid == "paper" and self.ndim != Heatmap.ndim:
            yield "ndim is ignored with grid=paper: omit one of them"


@dataclass(frozen=True)
class Paper(Checked):
    """Recompute the tables of the paper: tokens at four moments, speed-ups, and ratios of first forwards.

    Of the ten rows of Table 2, online is in the accounting of the published online simulator, without its overhead;
    offline in that of the published offline simulator; both with the lookaheads 1, 5 and 10 of the paper. events: by
    events, each with its best lookahead. Means are exact for independent drafts. No model is run.
    """

    EXAMPLES = f"  {COMMAND} paper\n  {COMMAND} paper num_target_servers=3 S=1000"

    # a run has at most 20 drafts
    S: int = key(50, "tokens to generate in Table 2", Range(21, 10_000), heading="Setting")
    # with one server, Eq. 1 allows none of the paper's lookaheads
    num_target_servers: int = key(7, "target servers of DSI in Table 2", Range(2, COUNT))
