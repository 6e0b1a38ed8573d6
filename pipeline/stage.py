"""A stage: a slice of the model and its cache; its state is a function of the messages it has had.

It knows nothing about strategies, requests or ranks: a segment brings ids, parents and positions, and the mask
follows.
"""
from __future__ import annotations

from typing import Sequence

import torch
from torch import Tensor

from model.cache import TreeCache
from model.llama import Slice
from pipeline.messages import Message, Prune, Reset, Segment, Stop
from pipeline.trace import OFF, NoTrace
from pipeline.transport import Link


class Stage:
    """Computes segments; `device` is where its weights lie.

    `keep` are those of its layers whose inputs a segment gets that asks for inner features.
    """

    def __init__(self, part: Slice, cache: TreeCache, trace: NoTrace = OFF, keep: Sequence[int] = ()) -> None:
        self.part, self.cache, self.trace, self.keep = part, cache, trace, keep
        self.device = cache.keys.device

    def apply(self, msg: Message) -> Message | None:
        """Obey one message; what it returns goes to the next stage."""
        if isinstance(msg, Segment):
            return self._forward(self.living(msg))
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

    def _forward(self, segment: Segment) -> Segment:
        """Admit the rows and run the layers; an empty segment only passes, so that rank 0's count stays true."""
        if not segment.nodes:
            return segment
        self.cache.admit(segment.nodes, segment.parents, segment.text)
        pos_T = torch.tensor(segment.pos, device=self.device)
        inner = segment.inner
        kept: dict[int, Tensor] = {} if inner is None else dict.fromkeys(self.keep, inner)
        with self.trace.span("forward", nodes=segment.nodes):
            x: Tensor = self.part(segment.x.to(self.device), pos_T, self.cache, kept)
            if inner is not None:
                inner = torch.cat([inner.to(x), *kept.values()], -1)
        return Segment(segment.nodes, segment.parents, segment.pos, segment.text, x, inner)


def serve(stage: Stage, link: Link) -> None:
    """The life of every rank but 0. A prune is obeyed before data that waits, and before what was computed leaves."""
    msg: Message | None = None
    while not isinstance(msg, Stop):
        with stage.trace.span("wait"):
            msg = link.recv()
        answer = stage.apply(msg)
        while (prune := link.urgent()) is not None:
            stage.apply(prune)
        if isinstance(answer, Segment):
            answer = stage.living(answer)
        if answer is not None:
            with stage.trace.span("send", nodes=getattr(answer, "nodes", [])):
                link.send(answer)
