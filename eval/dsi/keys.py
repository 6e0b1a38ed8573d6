"""The keys of the commands that run no model: names, defaults and limits of the published simulators."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Iterator, Sequence

from config.keys import Checked, Range
from config.run_config import COUNT
from eval.dsi.formulas import ACCOUNTINGS, least_lookahead, servers_needed

COMMAND = "python3 -m scripts.simulate"
COST = Range(0.000000001, 1_000_000_000)
MOST_TOKENS = 20_000_000  # total tokens of all texts, which are kept in memory until the end


@dataclass(frozen=True)
class Simulation(Checked):
    """The setting of a simulation. All costs and results are in one unit."""

    RANGES = {
        "c": COST, "failure_cost": COST,
        "a": Range(0, 1), "k": Range(1, COUNT),
        "S": Range(1, 20_000),  # the time for the exact sums grows with the square
        "num_target_servers": Range(1, COUNT, {0: "as many as needed"}),
        "random_seed": Range(0, (1 << 32) - 1), "num_repeats": Range(1, 1_000_000)}
    PAIRS: ClassVar[Sequence[tuple[str, str]]] = (("c", "failure_cost"),)  # forwards of drafter and target

    # Setting of the simulation
    c: float = 0.1  # cost of a drafter forward (online: of its first one)
    a: float = 0.9  # probability that a draft is accepted
    k: int = 5  # lookahead: drafts per verification
    failure_cost: float = 1.0  # cost of a target forward (online: of a server's first one)
    S: int = 1000  # tokens to generate
    num_target_servers: int = 7  # target servers of DSI; 0: as many as needed

    # Sampling
    random_seed: int = 42  # seed of all sampling
    num_repeats: int = 5  # number of simulated texts

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        for key, of_target in self.PAIRS:
            draft, target = getattr(self, key), getattr(self, of_target)
            if draft > target:
                yield (f"{key}={draft:g} exceeds {of_target}={target:g}, but the drafter must not be slower than the "
                       f"target: give {key}={target:g} or less")
        needed = servers_needed(self.failure_cost, self.c, self.k)
        if 0 < self.num_target_servers < needed:
            least = least_lookahead(self.failure_cost, self.c, self.num_target_servers)
            yield (f"num_target_servers={self.num_target_servers} is too small for k={self.k}, since a verification "
                   f"every {self.k * self.c:g} that takes {self.failure_cost:g} needs {needed}: give "
                   f"num_target_servers={needed} or more, 0 for as many as needed, or k={least} or more")
        if self.num_repeats * self.S > MOST_TOKENS:
            yield (f"num_repeats={self.num_repeats} texts of S={self.S} tokens need too much memory: give "
                   f"num_repeats={MOST_TOKENS // self.S} or less")


@dataclass(frozen=True)
class Offline(Simulation):
    """Compute the exact cost of a text by plain decoding, SI and DSI, next to that of sampled texts.

    Means and standard deviations are exact for independent drafts. No model is run.
    """

    EXAMPLES = f"""\
  {COMMAND} offline
  {COMMAND} offline c=0.05 a=0.8 k=3 S=100 accounting=original picture=costs.png"""
    PATHS = WRITES = ("picture",)
    CHOICES = {"accounting": ACCOUNTINGS}

    # Accounting
    accounting: str = "corrected"  # of DSI: corrected (as by events), or original (as in the published simulator)
    picture: str = ""  # file (.png or .svg) for histograms of costs and iterations; empty: none

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.picture and not self.picture.endswith((".png", ".svg")):
            yield f"picture={self.picture} is not a picture file: name one that ends in .png or .svg"


@dataclass(frozen=True)
class Online(Simulation):
    """Simulate SI and DSI by events on a virtual clock, with modelled acceptance, without a model; times in seconds."""

    EXAMPLES = f"""\
  {COMMAND} online
  {COMMAND} online simul_type=both S=50 num_repeats=100
  {COMMAND} online a=0.6 k=3 preemption=none"""
    PATHS = ("traces",)
    RANGES = {
        **Simulation.RANGES, "c_sub": COST, "failure_cost_sub": COST, "maximum_correct_tokens": Range(0, COUNT)}
    CHOICES = {"simul_type": ("DSI", "SI", "both"), "preemption": ("instant", "none")}
    PAIRS = (*Simulation.PAIRS, ("c_sub", "failure_cost_sub"))
    SERVERS = 1024  # a limit, since every event scans all servers

    # Decoding
    simul_type: str = "DSI"  # algorithm: DSI, SI, or both with the same samples
    maximum_correct_tokens: int = 20  # most accepted drafts in a row
    traces: str = ""  # JSON file of recorded matches, a list of 0 and 1 for each text; empty: sampled with a

    # Forwards and servers
    c_sub: float = 0.01  # seconds of a later forward of the drafter
    failure_cost_sub: float = 0.1  # seconds of a later forward of a server
    preemption: str = "instant"  # when a server aborts a useless forward: instant, or none (it runs to its end)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.servers > self.SERVERS:
            yield f"{self.servers} servers are too many: give num_target_servers={self.SERVERS} or less, or a larger k"

    @property
    def servers(self) -> int:
        """The number of servers; as many as needed: for the slowest forwards, and one more for preemption."""
        slowest, fastest = max(self.failure_cost, self.failure_cost_sub), min(self.c, self.c_sub)
        return self.num_target_servers or 1 + int(servers_needed(slowest, fastest, self.k))


@dataclass(frozen=True)
class Heatmap(Checked):
    """Draw heat maps of the speed-ups of SI, DSI and pipelines, by drafter latency and acceptance rate.

    Every cell has the cost per token in the long run, by formulas, of each method at its best lookahead: for DSI the
    best of those that its target servers allow, for the others the best of all.
    """

    EXAMPLES = f"""\
  {COMMAND} heatmap
  {COMMAND} heatmap grid=paper output=out/maps
  {COMMAND} heatmap ndim=20 num_target_servers=3 accounting=original"""
    PATHS = ("output",)
    RANGES = {
        "ndim": Range(2, 50), "num_target_servers": Range(1, 1000), "hop": Range(0, 1000)}
    CHOICES = {"grid": ("ndim", "paper"), "accounting": ACCOUNTINGS}

    # Grid and costs
    grid: str = "ndim"  # ndim: see the next key; paper: 100 drafters, 101 acceptance rates and 200 lookaheads
    ndim: int = 10  # steps from 0 to 1 of drafter latency and acceptance rate, and number of lookaheads
    num_target_servers: int = 7  # target servers of DSI, and stages of the pipelines, so that all use as many devices
    hop: float = 0.02  # time from one stage of a pipeline to the next, in target forwards
    accounting: str = "corrected"  # of a run of DSI: corrected, or original (as in the published simulator)

    # Output
    output: str = "out/heatmap"  # folder for the table heatmap.csv and the maps, as PNG and PDF

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not self.output:
            yield "output= is empty: name a folder"
        if self.grid == "paper" and self.ndim != Heatmap.ndim:
            yield "ndim is ignored with grid=paper: omit one of them"


@dataclass(frozen=True)
class Paper(Checked):
    """Recompute the speed-ups of the ten rows of Table 2, next to the published ones.

    online: in the accounting of the published online simulator, without its overhead; offline: in that of the
    published offline simulator; both with the lookaheads 1, 5 and 10 of the paper. events: by events, each with its
    best lookahead. Means are exact for independent drafts. No model is run.
    """

    EXAMPLES = f"  {COMMAND} paper\n  {COMMAND} paper num_target_servers=3 S=1000"
    RANGES = {
        "S": Range(21, 10_000),  # a run has at most 20 drafts
        "num_target_servers": Range(2, COUNT)}  # with one, Eq. 1 allows none of the paper's lookaheads

    # Setting
    S: int = 50  # tokens to generate
    num_target_servers: int = 7  # target servers of DSI
