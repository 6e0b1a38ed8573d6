"""The keys of the commands that run no model: names, defaults and limits of the published simulators.

A key that ends in _sub is of a later forward of a worker, as in the published online simulator.
"""
from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Iterator, Sequence

from config.ranges import Checked, Range, number, outside, unknown
from eval.dsi.formulas import ACCOUNTINGS, least_lookahead, servers_needed
from eval.keys import problems_of_files

COMMAND = "python -m scripts.simulate"
PICTURES = (".png", ".svg")
COUNT = 1_000_000_000  # the most of anything that is counted
COST = Range(0.000000001, 1_000_000_000)
HOP = Range(COST.least, COST.most, {0: "no time"})
RANGES = {  # of the keys that every simulation of texts has
    "c": COST, "a": Range(0, 1), "k": Range(1, COUNT),
    "failure_cost": COST, "S": Range(1, 1_000_000), "hop": HOP,
    "num_target_servers": Range(1, COUNT, {0: "as many as it takes"}),
    "random_seed": Range(0, (1 << 32) - 1), "num_repeats": Range(1, 1_000_000),
}


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
    hop: float = 0.0  # of a message from the coordinator to a server, or back; offline: of a stage
    traces: str = ""  # JSON file of recorded matches, a list of 0 and 1 for each text; empty: by chance a

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

    def problem_of_size(self, most: int) -> Iterator[str]:
        """What is wrong if all texts together may have so many tokens."""
        if self.num_repeats * self.S > most:
            yield (f"num_repeats={self.num_repeats} texts of S={self.S} tokens are too many for the memory: give "
                   f"num_repeats={max(1, most // self.S)} or less")


@dataclass(frozen=True)
class Offline(Simulation):
    """Mean and standard deviation of what a text costs, exactly, beside texts that are drawn.

    Compared are plain decoding (non-SI), draft-then-verify (SI), DSI, and the methods of this project on a pipeline of
    the same devices: one for the drafter, and as many stages as DSI has servers. Nothing is run: all is computed.
    """

    EXAMPLES: ClassVar[str] = f"""\
  {COMMAND} offline
  {COMMAND} offline c=0.05 a=0.8 k=3 S=100 accounting=original picture=costs.png
  {COMMAND} offline c=0.2 k=2 stages=4 hop=0.05 traces=matches.json"""
    PATHS: ClassVar[Sequence[str]] = ("traces", "picture")
    RANGES: ClassVar = {
        "block": Range(1, 1_000_000), "stages": Range(1, 65536, {0: "as many as DSI has servers"})}
    POSITIONS: ClassVar = 200_000_000  # of all texts that are made of traces: 1.5 GB of numbers
    LONGEST: ClassVar = 20_000  # tokens; the exact sums take a time that grows with their square

    # How it is counted
    accounting: str = "corrected"  # of DSI: corrected (by events), or original, as the published simulator counts
    block: int = 32  # neighbours of a trace that stay together in a text that is made of traces
    stages: int = 0  # devices that share the target's layers; 0: as many as DSI has servers
    picture: str = ""  # file (.png or .svg) for histograms of costs and iterations; empty: none

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from outside(vars(self), self.RANGES)
        yield from unknown(vars(self), {"accounting": ACCOUNTINGS})
        if self.S > self.LONGEST:
            yield f"S={self.S} tokens would be summed over for very long: give S={self.LONGEST} or less"
        if self.traces:
            yield from self.problem_of_size(self.POSITIONS)
        if self.picture and not self.picture.endswith(PICTURES):
            yield f"picture={self.picture} is no picture: name a file that ends in {' or '.join(PICTURES)}"
        yield from problems_of_files(self, "picture")

    @property
    def depth(self) -> int:
        """The stages of the pipeline."""
        needed = int(servers_needed(self.failure_cost, self.c, self.k))
        return self.stages or self.num_target_servers or needed


@dataclass(frozen=True)
class Online(Simulation):
    """SI and DSI by events on a virtual clock, with modelled acceptance; no model is run. Times are in seconds."""

    EXAMPLES: ClassVar[str] = f"""\
  {COMMAND} online
  {COMMAND} online simul_type=both S=50 num_repeats=100
  {COMMAND} online a=0.6 k=3 simul_type=DSI preemption=none output=online.json"""
    PATHS: ClassVar[Sequence[str]] = ("traces", "output")
    CHOICES: ClassVar = {
        "simul_type": ("DSI", "SI", "both"),
        "preemption": ("instant", "layer", "none"),
        "queue": ("newest", "merged")}
    RANGES: ClassVar = {
        "c_sub": COST, "failure_cost_sub": COST, "wait_for_pipe": Range(0, 3600),
        "total_tokens": Range(0, COUNT), "maximum_correct_tokens": Range(0, COUNT), "layers": Range(1, 10_000)}
    SERVERS: ClassVar = 1024  # each is looked at for every event
    TOKENS: ClassVar = 2_000_000  # of all texts, which are kept until the end

    # What is decoded
    simul_type: str = "DSI"  # the algorithm: DSI, SI, or both of them with the same draws
    maximum_correct_tokens: int = 20  # accepted drafts in a row, at most
    total_tokens: int = 100  # tokens of the prompt; reading them is in the first forwards, so it changes no time

    # Forwards and servers
    c_sub: float = 0.01  # seconds of a later forward of the drafter
    failure_cost_sub: float = 0.1  # seconds of a later forward of a server
    failure_cost_rows: str = ""  # seconds of a later forward over 1,2,... rows, commas between; empty: any number alike
    preemption: str = "instant"  # when a server gives a forward up: instant, layer (after the next), none (runs on)
    layers: int = 32  # equal parts of a forward, for preemption=layer
    queue: str = "newest"  # verifications that wait for a server: newest first, or merged into one
    wait_for_pipe: float = 0.1  # has no effect: no process is started, so none is waited for
    output: str = ""  # JSON file for every repeat; empty: none

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from outside(vars(self), self.RANGES)
        yield from unknown(vars(self), self.CHOICES)
        if self.c_sub > self.failure_cost_sub:
            yield (f"c_sub={self.c_sub:g} is more than failure_cost_sub={self.failure_cost_sub:g}: the drafter may not "
                   f"be slower than the target, so give c_sub={self.failure_cost_sub:g} or less")
        if not self._rows_fit:
            yield (f"failure_cost_rows={self.failure_cost_rows} is not possible: give {COST.advice} for each count of "
                   "rows, as 0.1,0.1,0.12")
        if self.servers > self.SERVERS:
            yield f"{self.servers} servers are too many: give num_target_servers={self.SERVERS} or less, or a larger k"
        yield from self.problem_of_size(self.TOKENS)
        yield from problems_of_files(self, "output")

    @property
    def rows(self) -> tuple[float, ...]:
        """Seconds of a server's later forwards over 1, 2, ... rows; the last is that of more. Raises ValueError."""
        words = self.failure_cost_rows.split(",") if self.failure_cost_rows else []
        return tuple(number(word.strip()) for word in words) or (self.failure_cost_sub,)

    @property
    def _rows_fit(self) -> bool:
        try:
            return all(COST.holds(value) for value in self.rows)
        except ValueError:
            return False

    @property
    def servers(self) -> int:
        """How many servers there are; as many as it takes means: for the slowest forwards, and one for preemption."""
        if self.num_target_servers:
            return self.num_target_servers
        slowest = max(self.failure_cost, *self.rows) + 2 * self.hop
        return 1 + int(servers_needed(slowest, min(self.c, self.c_sub), self.k))


@dataclass(frozen=True)
class Heatmap(Checked):
    """Heat maps of how much faster SI, DSI and pipelines are, by drafter latency and acceptance rate.

    Every cell has the cost of a token in the long run, by formulas, of each method at its best lookahead: for DSI the
    best of those that its target servers are enough for, for the others the best of all.
    """

    EXAMPLES: ClassVar[str] = f"""\
  {COMMAND} heatmap
  {COMMAND} heatmap grid=paper output=maps
  {COMMAND} heatmap ndim=20 num_target_servers=3 accounting=original
  {COMMAND} heatmap load_results=maps/heatmap.csv output=again"""
    PATHS: ClassVar[Sequence[str]] = ("output", "load_results", "load_csv")
    CHOICES: ClassVar = {"grid": ("ndim", "paper"), "accounting": ACCOUNTINGS}
    RANGES: ClassVar = {
        "ndim": Range(2, 50), "k_step": Range(1, 1000),
        "c_min": Range(0.0001, 1),
        "a_min": Range(0, 1), "a_max": Range(0, 1),
        "num_target_servers": Range(1, 1000), "hop": Range(0, 1000)}
    AXES: ClassVar = ("ndim", "c_min", "a_min", "a_max", "k_step")  # what the paper's grid is not made of

    # The grid
    grid: str = "ndim"  # ndim: as the keys below say; paper: 100 drafters, 101 acceptance rates and 200 lookaheads
    ndim: int = 10  # steps from 0 to 1 of the drafter's latency c, in target forwards, and of the acceptance rate a
    c_min: float = 0.01  # the drafter's latency in place of smaller ones
    a_min: float = 0.01  # the acceptance rate in place of smaller ones
    a_max: float = 0.99  # and of larger ones
    k_step: int = 1  # the lookaheads are 1, 1 + k_step and so on, ndim of them

    # The costs
    num_target_servers: int = 7  # servers of DSI, and stages of the pipelines, which have as many devices then
    hop: float = 0.02  # from one stage of a pipeline to the next, in target forwards
    accounting: str = "corrected"  # of a run of DSI: corrected, or original as in the simulator of the paper

    # The files
    output: str = "out/heatmap"  # folder for the table heatmap.csv and the maps, as PNG and PDF
    load_results: str = ""  # draw the maps of this heatmap.csv, which says the grid and the costs, and compute nothing
    load_csv: str = ""  # the same

    @property
    def loaded(self) -> str:
        """The table to draw the maps of; empty if they are to be computed."""
        return self.load_results or self.load_csv

    @property
    def origin(self) -> dict[str, Any]:
        """The keys that the costs follow from, which is all of them but files."""
        return {key: value for key, value in vars(self).items() if key not in self.PATHS}

    def problems(self) -> Iterator[str]:
        yield from outside(vars(self), self.RANGES)
        yield from unknown(vars(self), self.CHOICES)
        if self.a_min > self.a_max:
            yield f"a_min={self.a_min:g} is more than a_max={self.a_max:g}: give a_min={self.a_max:g} or less"
        if not self.output:
            yield "output= is empty: name a folder"
        if self.load_results and self.load_csv:
            yield "load_results and load_csv mean the same: leave one of them out"
        usual = {option.name: option.default for option in fields(self)}
        for key, value in self.origin.items():
            if value == usual[key]:
                continue
            if self.loaded:
                yield f"{key} is said by the table that is loaded: leave it out, or leave out load_results and load_csv"
            elif self.grid == "paper" and key in self.AXES:
                yield f"{key} does not count with grid=paper: leave one of them out"


@dataclass(frozen=True)
class Paper(Checked):
    """The speed-ups of the ten rows of Table 2, beside the published ones.

    online: in the accounting of the published online simulator, without its overhead; offline: in that of the
    published offline simulator; both with the lookaheads of the paper. events: by events, each with its best lookahead.
    Means are exact, with independent drafts. Nothing is run.
    """

    EXAMPLES: ClassVar[str] = f"  {COMMAND} paper\n  {COMMAND} paper num_target_servers=3 S=1000"
    RANGES: ClassVar = {"S": Range(21, 10_000), "num_target_servers": Range(1, COUNT)}  # a run has at most 20 drafts
    LIST: ClassVar = re.compile(r"[1-9][0-9]{0,3}(,[1-9][0-9]{0,3})*")

    # What is computed
    S: int = 50  # tokens to produce
    num_target_servers: int = 7  # servers of the target that DSI has
    lookaheads: str = "1,5,10"  # those of online and offline, with commas between

    def problems(self) -> Iterator[str]:
        yield from outside(vars(self), self.RANGES)
        if not self.LIST.fullmatch(self.lookaheads):
            yield f"lookaheads={self.lookaheads} is no list of lookaheads: write numbers with commas between, as 1,5,10"
