"""The four messages of the pipeline, and the two between rank 0 and small models on ranks of their own.

They know nothing about how they travel. Segment, Reset and Stop go round the ring in order; only a Prune may overtake,
since node ids never change their meaning. All but Stop belong to a request, whose number rises from request to request.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence, Union

from torch import Tensor

from model.cache import Survivors
from pipeline.proposals import Ask, Drafted


@dataclass
class Segment:
    """Rows on their way through the stages; `x`: tokens `[T]` before the first stage, hidden states `[T, D]` after it.

    The first `text` rows are settled text, the others guesses; a parent comes before its children. `inner`, where a
    draft wants it, collects what each stage keeps of its layers' inputs, `[T, 0]` at first; else it is absent.
    """

    request: int
    nodes: list[int]
    parents: list[int]
    pos: list[int]
    text: int
    x: Tensor
    inner: Tensor | None = None

    def take(self, rows: Sequence[int]) -> Segment:
        """The segment with only these of its rows, in this order; the segment itself if they are all."""
        if len(rows) == len(self.nodes):
            return self
        nodes = [self.nodes[i] for i in rows]
        parents = [self.parents[i] for i in rows]
        pos = [self.pos[i] for i in rows]
        text = sum(i < self.text for i in rows)
        x = self.x[list(rows)]
        inner = None if self.inner is None else self.inner[list(rows)]
        return Segment(self.request, nodes, parents, pos, text, x, inner)


@dataclass
class Prune:
    """The text ends in `tip` below `parent`; of the nodes older than `horizon` only those and `keep` live."""

    request: int
    tip: int
    parent: int
    horizon: int
    keep: list[int]

    @property
    def survivors(self) -> Survivors:
        """The nodes that this prune does not declare dead."""
        return Survivors.after(self.tip, self.keep, self.horizon)


@dataclass
class Reset:
    """The request is over. Comes back to rank 0 when every stage has forgotten it."""

    request: int


@dataclass
class Stop:
    """The pipeline is over. Passed on, then obeyed."""


Message = Union[Segment, Prune, Reset, Stop, Ask, Drafted]
