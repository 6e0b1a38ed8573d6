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
SPEED = Range(0.001, 1000)  # of a rank beside the others


@dataclass(frozen=True)
class TensorParallel:
    """The keys that tell of it."""

    pipeline_type: str
    tp: int
    tp_shares: str
    tp_type: str

    @property
    def whole(self) -> bool:
        """Whether the method is one without a pipeline: all ranks share all layers."""
        return METHODS[self.pipeline_type].target in SHARINGS

    @property
    def comm(self) -> str:
        """How they add up: tp or galaxy, the name of a target in `METHODS`."""
        return self.tp_type or (METHODS[self.pipeline_type].target if self.whole else SHARINGS[0])

    @property
    def speeds(self) -> tuple[float, ...]:
        """Of the ranks of a group; a single one if there is nothing to share."""
        given = tuple(number(word.strip()) for word in self.tp_shares.split(",") if word.strip())
        return given or (1.0,) * (self.tp or (USUAL if self.whole else 1))

    @property
    def asked(self) -> str:
        """What is said of it, in the words of the keys; empty if nothing is."""
        return f"tp_shares={self.tp_shares}" if self.tp_shares else f"tp={self.tp}" if self.tp else ""

    def problems(self) -> Iterator[str]:
        """What is wrong with it, each in a sentence that names the fix."""
        yield from outside({"tp": self.tp}, {"tp": RANKS})
        if self.tp_shares and not re.fullmatch(r"\s*[0-9]*\.?[0-9]+(\s*,\s*[0-9]*\.?[0-9]+)*\s*", self.tp_shares):
            yield f"tp_shares={self.tp_shares} is no list of speeds: write one for each rank of a stage, as 2,1,1,1"
        elif self.tp_shares and not all(map(SPEED.holds, self.speeds)):
            yield f"tp_shares={self.tp_shares} is not possible: give {SPEED.advice} for each rank"
        elif self.tp_shares and self.tp not in (0, len(self.speeds)):
            yield (f"tp_shares={self.tp_shares} is for {len(self.speeds)} ranks, not for tp={self.tp}: give one number "
                   "for each")
        if self.tp_type not in ("", *SHARINGS):
            yield f"tp_type={self.tp_type} is unknown: choose one of {', '.join(SHARINGS)}"
        elif self.whole and self.comm != self.pipeline_type:
            yield f"tp_type={self.tp_type} is another method: say pipeline_type={self.tp_type}"
