"""What an online simulation is told: times of forwards in seconds, what servers can do, and which clock counts.

It knows nothing about how anything is simulated.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Iterator, Sequence

from config.ranges import Range, number, outside
from config.simulation import COST, OnlineSimulation, servers_needed

COMMAND = "python -m scripts.simulate online"
EXAMPLES = f"""\
  {COMMAND}
  {COMMAND} a=0.6 k=3 simul_type=DSI preemption=none output=online.json
  {COMMAND} wall=false S=1000 num_repeats=100 accounting=original"""
CHOICES = {
    "simul_type": ("both", "DSI", "SI"),
    "accounting": ("corrected", "original"),
    "preemption": ("instant", "layer", "none"),
    "queue": ("newest", "merged"),
}
MORE_RANGES = {"layers": Range(1, 10_000), "hop": Range(COST.least, COST.most, {0: "no time"})}
MOST_SERVERS = 1024  # each is a thread


@dataclass(frozen=True)
class Online(OnlineSimulation):
    """SI and DSI with modelled acceptance on the real clock, and on a virtual one with the same draws.

    No model is run: a forward is a thread that sleeps. All times are in seconds.
    """

    EXAMPLES: ClassVar[str] = EXAMPLES
    PATHS: ClassVar[Sequence[str]] = ("traces", "output")

    # What is decoded
    S: int = 50  # tokens to produce
    num_repeats: int = 3  # how often it is simulated
    simul_type: str = "both"  # the algorithm: DSI, SI, or both of them with the same draws
    accounting: str = "corrected"  # or original: no token after a run, as the published online simulator counts
    traces: str = ""  # JSON file of recorded matches, a list of 0 and 1 for each text; empty: by chance a
    total_tokens: int = 100  # tokens of the prompt; reading them is in the first forwards, so it changes no time

    # Forwards and servers
    failure_cost_rows: str = ""  # seconds of a later forward over 1,2,... rows, commas between; empty: any number alike
    preemption: str = "instant"  # when a server gives a forward up: instant, layer (after the next), none (runs on)
    layers: int = 32  # equal parts of a forward, for preemption=layer
    hop: float = 0.0  # seconds of a message from the coordinator to a server, or back
    queue: str = "newest"  # verifications that wait for a server: newest first, or merged into one

    # Clocks
    wall: bool = True  # whether it takes its time on the real clock, too
    chained: bool = False  # whether a forward begins when the end of the one before was noticed, or when it was due
    wait_for_pipe: float = 0.1  # has no effect: no process is started, so none is waited for
    output: str = ""  # JSON file for every repeat; empty: none

    def problems(self) -> Iterator[str]:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                yield f"{name}={getattr(self, name)} is unknown: choose one of {', '.join(choices)}"
        yield from super().problems()
        yield from outside(vars(self), MORE_RANGES)
        if not self._rows_fit:
            yield (f"failure_cost_rows={self.failure_cost_rows} is not possible: give {COST.advice} for each count of "
                   "rows, as 0.1,0.1,0.12")
        if self.servers > MOST_SERVERS:
            yield (f"{self.servers} servers are too many, since each is a thread: give num_target_servers="
                   f"{MOST_SERVERS} or less, or a larger k")
        if self.accounting == "original" and not self.traces and not (self.a and self.maximum_correct_tokens):
            yield ("accounting=original never ends without accepted drafts, since only they count: give a and "
                   "maximum_correct_tokens more than 0, or accounting=corrected")

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
        slowest = max(self.failure_cost, *self.rows) + 2 * self.hop
        return self.num_target_servers or 1 + servers_needed(slowest, min(self.c, self.c_sub), self.k)

    @property
    def parts(self) -> int:
        """Between how many equal parts of a forward it can be given up; 0: anywhere."""
        return {"instant": 0, "layer": self.layers, "none": 1}[self.preemption]
