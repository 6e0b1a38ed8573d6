"""TensorParallel: how ranks share the layers of a stage, or of the whole model, as the keys say (tensor parallel).

It knows nothing about heads or ranks: speeds in, which `tp/shares.py` makes into shares.
"""
from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Iterator

from config.methods import METHODS, SHARINGS
from config.ranges import Range, number, outside

USUAL = 4  # ranks of a method without a pipeline
RANKS = Range(1, 1024, {0: "those of the split"})
SPEEDS = re.compile(r"\s*[0-9]*\.?[0-9]+(\s*,\s*[0-9]*\.?[0-9]+)*\s*")
SPEED = Range(0.001, 1000)  # of a rank beside the others


@dataclass(frozen=True)
class TensorParallel:
    """The values of the keys about tensor parallelism, and what follows from them."""

    pipeline_type: str
    tp: int
    tp_shares: str

    @property
    def whole(self) -> bool:
        """Whether the method is one without a pipeline: all ranks share all layers."""
        return METHODS[self.pipeline_type].target in SHARINGS

    @property
    def comm(self) -> str:
        """How the ranks of a stage add up their sums: tp or galaxy, the name of a target in `METHODS`."""
        return METHODS[self.pipeline_type].target if self.whole else SHARINGS[0]

    @property
    def speeds(self) -> tuple[float, ...]:
        """The speeds of the ranks that share a stage, beside each other; a single one if nothing is shared."""
        words = (word.strip() for word in self.tp_shares.split(","))
        given = tuple(number(word) for word in words if word)
        usual = USUAL if self.whole else 1
        return given or (1.0,) * (self.tp or usual)

    @property
    def asked(self) -> str:
        """The key that asks for sharing, with its value as it is typed; empty if none does."""
        if self.tp_shares:
            return f"tp_shares={self.tp_shares}"
        return f"tp={self.tp}" if self.tp else ""

    def problems(self) -> Iterator[str]:
        """What is wrong with the keys, each in a sentence that names the fix."""
        yield from outside({"tp": self.tp}, {"tp": RANKS})
        if self.tp_shares and not SPEEDS.fullmatch(self.tp_shares):
            yield f"tp_shares={self.tp_shares} is no list of speeds: write one for each rank of a stage, as 2,1,1,1"
        elif self.tp_shares and not all(map(SPEED.holds, self.speeds)):
            yield f"tp_shares={self.tp_shares} is not possible: give {SPEED.advice} for each rank"
        elif self.tp_shares and self.tp not in (0, len(self.speeds)):
            yield (f"tp_shares={self.tp_shares} is for {len(self.speeds)} ranks, not for tp={self.tp}: give one number "
                   "for each")
