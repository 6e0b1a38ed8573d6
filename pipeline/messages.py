"""The messages of the pipeline; those between rank 0 and small models on ranks of their own are in `draft_messages.py`.

They know nothing about how they travel. Segments, alone or several together, Start, Reset and Stop go round the ring in
order; only a Prune may overtake, since node ids never change their meaning. What belongs to a request has its number,
which rises from request to request.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Sequence, Union

from torch import Tensor

from model.cache import Survivors
from pipeline.draft_messages import Ask, Drafted


class Visit(NamedTuple):
    """What a stage did with a message: it computed so many rows in so many seconds."""

    rows: int
    seconds: float


@dataclass
class Segment:
    """Rows on their way through the stages; `x`: tokens `[T]` before the first stage, hidden states `[T, D]` after it.

    The first `text` rows are settled text, the others guesses; a parent comes before its children. `inner`, where a
    draft wants it, collects what each stage keeps of its layers' inputs, `[T, 0]` at first; else it is absent. `visits`
    collects what each stage took that has computed it, with all rows of the message that it came in.
    """

    request: int
    nodes: list[int]
    parents: list[int]
    pos: list[int]
    text: int
    x: Tensor
    inner: Tensor | None = None
    visits: tuple[Visit, ...] = ()

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
        return Segment(self.request, nodes, parents, pos, text, x, inner, self.visits)


@dataclass
class Batch:
    """Segments of different requests that travel and are computed together."""

    segments: list[Segment]

    @property
    def nodes(self) -> list[int]:
        """Those of all its segments."""
        return [node for segment in self.segments for node in segment.nodes]


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


NOBODY = -1  # no node


@dataclass
class Reset:
    """The request is over. Comes back to rank 0 when every stage has forgotten it.

    If `last` is a node, the text up to it stays, for a request that begins alike: a `Start` names it then, or a second
    Reset ends it.
    """

    request: int
    last: int = NOBODY


@dataclass
class Start:
    """A request begins with `length` tokens that the stages hold already, as the beginning of another one's text.

    There they end in the node `last`, in the new request in `tip`.
    """

    request: int
    tip: int
    source: int
    last: int
    length: int


@dataclass
class Stop:
    """The pipeline is over. Passed on, then obeyed."""


Message = Union[Segment, Batch, Prune, Reset, Start, Stop, Ask, Drafted]


def joined(segments: Sequence[Segment]) -> Segment | Batch:
    """Segments of different requests as one message."""
    return segments[0] if len(segments) == 1 else Batch(list(segments))


def segments_of(msg: Message) -> list[Segment]:
    """The segments that a message holds."""
    if isinstance(msg, Batch):
        return msg.segments
    return [msg] if isinstance(msg, Segment) else []
