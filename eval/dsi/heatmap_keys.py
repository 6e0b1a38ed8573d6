"""What the heat maps of speculative decoding are drawn over: the grid, what costs depend on, and the files.

It knows nothing about costs. Names, defaults and limits of the grid are those of the simulator that was published with
the paper on DSI.
"""
from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Iterator

from config.ranges import Checked, Range, outside, unknown

RANGES = {
    "ndim": Range(2, 50), "k_step": Range(1, 1000),
    "c_min": Range(0.0001, 1), "a_min": Range(0, 1), "a_max": Range(0, 1),
    "num_target_servers": Range(1, 1000), "hop": Range(0, 1000),
}
AXES = ("ndim", "c_min", "a_min", "a_max", "k_step")  # what the paper's grid is not made of
LOADS = ("load_results", "load_csv")
FILES = ("output", *LOADS)
CHOICES = {"grid": ("ndim", "paper"), "accounting": ("corrected", "original")}
EXAMPLES = """\
  python -m scripts.simulate heatmap
  python -m scripts.simulate heatmap grid=paper output=maps
  python -m scripts.simulate heatmap ndim=20 num_target_servers=3 accounting=original
  python -m scripts.simulate heatmap load_results=maps/heatmap.csv output=again"""


@dataclass(frozen=True)
class Heatmap(Checked):
    """Heat maps of how much faster SI, DSI and pipelines are, by drafter latency and acceptance rate.

    Every cell has the cost of a token in the long run, by formulas, of each method at its best lookahead: for DSI the
    best of those that its target servers are enough for, for the others the best of all.
    """

    EXAMPLES: ClassVar[str] = EXAMPLES
    PATHS: ClassVar[tuple[str, ...]] = FILES

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
        return {key: value for key, value in vars(self).items() if key not in FILES}

    def problems(self) -> Iterator[str]:
        yield from outside(vars(self), RANGES)
        yield from unknown(vars(self), CHOICES)
        if self.a_min > self.a_max:
            yield f"a_min={self.a_min:g} is more than a_max={self.a_max:g}: give a_min={self.a_max:g} or less"
        if not self.output:
            yield "output= is empty: name a folder"
        if self.load_results and self.load_csv:
            yield "load_results and load_csv mean the same: leave one of them out"
        for key in self._changed():
            if self.loaded:
                yield f"{key} is said by the table that is loaded: leave it out, or leave out load_results and load_csv"
            elif self.grid == "paper" and key in AXES:
                yield f"{key} does not count with grid=paper: leave one of them out"

    def _changed(self) -> Iterator[str]:
        """The keys of the grid and the costs that have another value than usual."""
        usual = {option.name: option.default for option in fields(self)}
        yield from (key for key, value in self.origin.items() if value != usual[key])
