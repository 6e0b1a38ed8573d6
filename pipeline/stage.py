"""A stage: a slice of the model and its cache; its state is a function of the messages it has had.

It knows nothing about strategies, requests or ranks: a segment brings ids, parents and positions, and the mask
follows.
"""
from __future__ import annotations

from typing import Callable, Sequence

import torch
from torch import Tensor

from model.cache import TreeCache, upload
from pipeline.messages import Message, Prune, Reset, Segment, Stop
from pipeline.trace import OFF, NoTrace
from pipeline.transport import Link


class Stage:
    """Computes segments with `part`, a slice; `device` is where its weights lie.

    `keep` are those of its layers whose inputs a segment gets that asks for inner features.
    """

    def __init__(self, part: Callable[..., Tensor | None], cache: TreeCache, trace: NoTrace = OFF,
                 keep: Sequence[int] = ()) -> None:
        self.part, self.cache, self.trace, self.keep = part, cache, trace, keep
        self.device = cache.keys.device

    def apply(self, msg: Message, news: Callable[[], Prune | None] = lambda: None) -> Message | None:
        """Obey one message; what it returns goes to the next stage. `news` are prunes that come meanwhile."""
        if isinstance(msg, Segment):
            return self._forward(self.living(msg), news)
        if isinstance(msg, Prune):
            with self.trace.span("prune", tip=msg.tip, keep=len(msg.keep)):
                self.cache.prune(msg.tip, msg.parent, msg.keep, msg.horizon)
            return None
        if isinstance(msg, Reset):
            self.cache.clear()
        return msg

    def living(self, segment: Segment) -> Segment:
        """The rows of a segment that no prune has declared dead."""
        return segment.take(self.cache.alive(segment.nodes))

    def _forward(self, segment: Segment, news: Callable[[], Prune | None]) -> Segment:
        """Admit the rows and run the layers; an empty segment only passes, so that rank 0's count stays true.

        A segment whose rows have all died meanwhile is given up between two layers.
        """
        if not segment.nodes:
            return segment
        prunes: list[Prune] = []  # obeyed in the end, since the layers count on the cache as it is

        def alive() -> bool:
            while (prune := news()) is not None:
                prunes.append(prune)
            return not prunes or any(all(prune.spares(node) for prune in prunes) for node in segment.nodes)

        self.cache.admit(segment.nodes, segment.parents, segment.text)
        pos_T = upload(torch.tensor(segment.pos), self.device)
        inner = segment.inner
        kept: dict[int, Tensor] = {} if inner is None else dict.fromkeys(self.keep, inner)
        with self.trace.span("forward", nodes=segment.nodes):
            x = self.part(upload(segment.x, self.device), pos_T, self.cache, kept, alive)
            if inner is not None and x is not None:
                inner = torch.cat([upload(inner.to(x.dtype), self.device), *kept.values()], -1)
        for prune in prunes:
            self.apply(prune)
        if x is None:
            return segment.take([])
        return Segment(segment.nodes, segment.parents, segment.pos, segment.text, x, inner)


def serve(stage: Stage, link: Link) -> None:
    """The life of every rank but 0. A prune is obeyed before data that waits, and before what was computed leaves."""
    msg: Message | None = None
    while not isinstance(msg, Stop):
        with stage.trace.span("wait"):
            msg = link.recv()
        answer = stage.apply(msg, link.urgent)
        while (prune := link.urgent()) is not None:
            stage.apply(prune)
        if isinstance(answer, Segment):
            answer = stage.living(answer)
        if answer is not None:
            with stage.trace.span("send", kind=type(answer).__name__, nodes=getattr(answer, "nodes", [])):
                link.send(answer)
