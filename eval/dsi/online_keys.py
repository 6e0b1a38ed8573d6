"""What an online simulation is told: times of forwards in seconds, what servers can do, and which clock counts.

It knows nothing about how anything is simulated.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Iterator, Sequence

from config.ranges import Range, number, outside, unknown
from eval.dsi.simulation import COST, HOP, OnlineSimulation, servers_needed

COMMAND = "python -m scripts.simulate online"
EXAMPLES = f"""\
  {COMMAND}
  {COMMAND} simul_type=both S=50 num_repeats=3
  {COMMAND} a=0.6 k=3 simul_type=DSI preemption=none output=online.json
  {COMMAND} wall=false S=1000 num_repeats=100 accounting=original"""
CHOICES = {
    "simul_type": ("DSI", "SI", "both"),
    "accounting": ("corrected", "original"),
    "preemption": ("instant", "layer", "none"),
    "queue": ("newest", "merged"),
}
MORE_RANGES = {"layers": Range(1, 10_000), "hop": HOP}
MOST_SERVERS = 1024  # each is a thread
MOST_TOKENS = 2_000_000  # of all texts, which are kept until the end
MOST_RUNS = 100_000  # of all texts in the original accounting, less than a minute on the virtual clock


@dataclass(frozen=True)
class Online(OnlineSimulation):
    """SI and DSI with modelled acceptance on the real clock, and on a virtual one with the same draws.

    No model is run: a forward is a thread that sleeps. All times are in seconds.
    """

    EXAMPLES: ClassVar[str] = EXAMPLES
    PATHS: ClassVar[Sequence[str]] = ("traces", "output")

    # What is decoded
    simul_type: str = "DSI"  # the algorithm: DSI, SI, or both of them with the same draws
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
        yield from unknown(vars(self), CHOICES)
        yield from super().problems()
        yield from outside(vars(self), MORE_RANGES)
        if not self._rows_fit:
            yield (f"failure_cost_rows={self.failure_cost_rows} is not possible: give {COST.advice} for each count of "
                   "rows, as 0.1,0.1,0.12")
        if self.servers > MOST_SERVERS:
            yield (f"{self.servers} servers are too many, since each is a thread: give num_target_servers="
                   f"{MOST_SERVERS} or less, or a larger k")
        if self.num_repeats * self.S > MOST_TOKENS:
            yield (f"num_repeats={self.num_repeats} texts of S={self.S} tokens are too many to keep: give num_repeats="
                   f"{max(1, MOST_TOKENS // self.S)} or less")
        if not self.traces:
            yield from self.problems_of_runs(self._accepted, f"a={self.a:g}")

    def problems_of_runs(self, accepted: float, where: str) -> Iterator[str]:
        """What is wrong if a run has so many accepted drafts in the mean; `where` says why it has.

        In the original accounting only they count, so that it takes many runs where few are accepted.
        """
        if self.accounting != "original":
            return
        if not accepted:
            yield ("accounting=original never ends without accepted drafts, since only they count: give a and "
                   "maximum_correct_tokens more than 0, or accounting=corrected")
        elif self.num_repeats * self.S > MOST_RUNS * accepted:
            runs = self.num_repeats * self.S / accepted
            yield (f"accounting=original counts accepted drafts alone, and with {where} it takes about {runs:.1g} runs "
                   f"for {self.num_repeats} texts of {self.S} tokens, of which {MOST_RUNS} are the most: give more "
                   "drafts that are right, a smaller S or num_repeats, or accounting=corrected")

    @property
    def _accepted(self) -> float:
        """Accepted drafts of a run, in the mean."""
        if self.a == 1:
            return self.maximum_correct_tokens
        capped = self.a ** (self.maximum_correct_tokens + 1)
        return (self.a - capped) / (1 - self.a)

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
        return 1 + servers_needed(slowest, min(self.c, self.c_sub), self.k)

    @property
    def parts(self) -> int:
        """Between how many equal parts of a forward it can be given up; 0: anywhere."""
        return {"instant": 0, "layer": self.layers, "none": 1}[self.preemption]
