"""The keys of the commands that run no model: names, defaults and limits of the published simulators."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Iterator, Sequence

from config.keys import Checked, Range
from config.run_config import COUNT
from eval.dsi.formulas import ACCOUNTINGS, least_lookahead, servers_needed

COMMAND = "python -m scripts.simulate"
COST = Range(0.000000001, 1_000_000_000)
MOST_TOKENS = 20_000_000  # tokens of all texts together, which are kept until the end


@dataclass(frozen=True)
class Simulation(Checked):
    """What is simulated. Costs are in one unit, which is that of the results."""

    RANGES = {
        "c": COST, "failure_cost": COST,
        "a": Range(0, 1), "k": Range(1, COUNT),
        "S": Range(1, 20_000),  # the exact sums take a time that grows with the square
        "num_target_servers": Range(1, COUNT, {0: "as many as it takes"}),
        "random_seed": Range(0, (1 << 32) - 1), "num_repeats": Range(1, 1_000_000)}
    PAIRS: ClassVar[Sequence[tuple[str, str]]] = (("c", "failure_cost"),)  # forwards of drafter and target

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
        yield from super().problems()
        for key, of_target in self.PAIRS:
            draft, target = getattr(self, key), getattr(self, of_target)
            if draft > target:
                yield (f"{key}={draft:g} is more than {of_target}={target:g}: the drafter may not be slower than the "
                       f"target, so give {key}={target:g} or less")
        needed = servers_needed(self.failure_cost, self.c, self.k)
        if 0 < self.num_target_servers < needed:
            least = least_lookahead(self.failure_cost, self.c, self.num_target_servers)
            yield (f"num_target_servers={self.num_target_servers} are too few for k={self.k}: a verification every "
                   f"{self.k * self.c:g} that lasts {self.failure_cost:g} needs {needed}; give "
                   f"num_target_servers={needed} or more, 0 for as many as it takes, or k={least} or more")
        if self.num_repeats * self.S > MOST_TOKENS:
            yield (f"num_repeats={self.num_repeats} texts of S={self.S} tokens are too many for the memory: give "
                   f"num_repeats={MOST_TOKENS // self.S} or less")


@dataclass(frozen=True)
class Offline(Simulation):
    """Mean and standard deviation of what a text costs by plain decoding, SI and DSI, beside texts that are drawn.

    Means and deviations are exact, for independent drafts. Nothing is run: all is computed.
    """

    EXAMPLES = f"""\
  {COMMAND} offline
  {COMMAND} offline c=0.05 a=0.8 k=3 S=100 accounting=original picture=costs.png"""
    PATHS = WRITES = ("picture",)
    CHOICES = {"accounting": ACCOUNTINGS}

    # How it is counted
    accounting: str = "corrected"  # of DSI: corrected (by events), or original, as the published simulator counts
    picture: str = ""  # file (.png or .svg) for histograms of costs and iterations; empty: none

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.picture and not self.picture.endswith((".png", ".svg")):
            yield f"picture={self.picture} is no picture: name a file that ends in .png or .svg"


@dataclass(frozen=True)
class Online(Simulation):
    """SI and DSI by events on a virtual clock, with modelled acceptance; no model is run. Times are in seconds."""

    EXAMPLES = f"""\
  {COMMAND} online
  {COMMAND} online simul_type=both S=50 num_repeats=100
  {COMMAND} online a=0.6 k=3 preemption=none"""
    PATHS = ("traces",)
    RANGES = {
        **Simulation.RANGES, "c_sub": COST, "failure_cost_sub": COST, "maximum_correct_tokens": Range(0, COUNT)}
    CHOICES = {"simul_type": ("DSI", "SI", "both"), "preemption": ("instant", "none")}
    PAIRS = (*Simulation.PAIRS, ("c_sub", "failure_cost_sub"))
    SERVERS = 1024  # each is looked at for every event

    # What is decoded
    simul_type: str = "DSI"  # the algorithm: DSI, SI, or both of them with the same draws
    maximum_correct_tokens: int = 20  # accepted drafts in a row, at most
    traces: str = ""  # JSON file of recorded matches, a list of 0 and 1 for each text; empty: by chance a

    # Forwards and servers
    c_sub: float = 0.01  # seconds of a later forward of the drafter
    failure_cost_sub: float = 0.1  # seconds of a later forward of a server
    preemption: str = "instant"  # when a server gives a forward up: instant, or none (it runs to its end)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.servers > self.SERVERS:
            yield f"{self.servers} servers are too many: give num_target_servers={self.SERVERS} or less, or a larger k"

    @property
    def servers(self) -> int:
        """How many servers there are; as many as it takes means: for the slowest forwards, and one for preemption."""
        slowest, fastest = max(self.failure_cost, self.failure_cost_sub), min(self.c, self.c_sub)
        return self.num_target_servers or 1 + int(servers_needed(slowest, fastest, self.k))


@dataclass(frozen=True)
class Heatmap(Checked):
    """Heat maps of how much faster SI, DSI and pipelines are, by drafter latency and acceptance rate.

    Every cell has the cost of a token in the long run, by formulas, of each method at its best lookahead: for DSI the
    best of those that its target servers are enough for, for the others the best of all.
    """

    EXAMPLES = f"""\
  {COMMAND} heatmap
  {COMMAND} heatmap grid=paper output=maps
  {COMMAND} heatmap ndim=20 num_target_servers=3 accounting=original"""
    PATHS = ("output",)
    RANGES = {
        "ndim": Range(2, 50), "num_target_servers": Range(1, 1000), "hop": Range(0, 1000)}
    CHOICES = {"grid": ("ndim", "paper"), "accounting": ACCOUNTINGS}

    # What is computed
    grid: str = "ndim"  # ndim: as the next key says; paper: 100 drafters, 101 acceptance rates and 200 lookaheads
    ndim: int = 10  # steps from 0 to 1 of the drafter's latency and of the acceptance rate, and as many lookaheads
    num_target_servers: int = 7  # servers of DSI, and stages of the pipelines, which have as many devices then
    hop: float = 0.02  # from one stage of a pipeline to the next, in target forwards
    accounting: str = "corrected"  # of a run of DSI: corrected, or original as in the simulator of the paper

    # The files
    output: str = "out/heatmap"  # folder for the table heatmap.csv and the maps, as PNG and PDF

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not self.output:
            yield "output= is empty: name a folder"
        if self.grid == "paper" and self.ndim != Heatmap.ndim:
            yield "ndim does not count with grid=paper: leave one of them out"


@dataclass(frozen=True)
class Paper(Checked):
    """The speed-ups of the ten rows of Table 2, beside the published ones.

    online: in the accounting of the published online simulator, without its overhead; offline: in that of the
    published offline simulator; both with the lookaheads 1, 5 and 10 of the paper. events: by events, each with its
    best lookahead. Means are exact, with independent drafts. Nothing is run.
    """

    EXAMPLES = f"  {COMMAND} paper\n  {COMMAND} paper num_target_servers=3 S=1000"
    RANGES = {
        "S": Range(21, 10_000),  # a run has at most 20 drafts
        "num_target_servers": Range(2, COUNT)}  # with one, Eq. 1 allows none of the paper's lookaheads

    # What is computed
    S: int = 50  # tokens to produce
    num_target_servers: int = 7  # servers of the target that DSI has
