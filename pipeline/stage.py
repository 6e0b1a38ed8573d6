"""A stage: a slice of the model and a cache for each request; its state is a function of the messages it has had.

It knows nothing about strategies or ranks: a segment brings ids, parents and positions, and the mask follows.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Callable, Sequence

import torch
from torch import Tensor

from model.cache import Survivors, TreeCache, upload
from pipeline.messages import Message, Prune, Reset, Segment, Stop
from pipeline.trace import OFF, NoTrace
from pipeline.transport import Link


class Stage:
    """Computes segments with `part`, a slice; `new_cache` makes the cache of a request.

    `keep` are those of its layers whose inputs a segment gets that asks for inner features.
    """

    def __init__(self, part: Callable[..., Tensor | None], new_cache: Callable[[], TreeCache], trace: NoTrace = OFF,
                 keep: Sequence[int] = ()) -> None:
        self.part, self.trace = part, trace
        self.keep = keep
        self.caches: dict[int, TreeCache] = {}  # of the requests that are open here
        self._new_cache = new_cache
        self._spare = [new_cache()]  # taken before the first request comes, so that a lack of memory is told at once
        self._newest = -1  # the highest number of a request whose segments or Reset have come
        self.device = self._spare[0].keys.device

    def apply(self, msg: Message, news: Callable[[], Prune | None] = lambda: None) -> Message | None:
        """Obey one message; what it returns goes to the next stage. `news` are prunes that come meanwhile."""
        if isinstance(msg, Segment):
            self._newest = max(self._newest, msg.request)
            return self._forward(self.living(msg), news)
        if isinstance(msg, Prune):
            self._prune(msg)
            return None
        if isinstance(msg, Reset):
            self._newest = max(self._newest, msg.request)
            self._close(msg.request)
        return msg

    def living(self, segment: Segment) -> Segment:
        """The rows of a segment that no prune has declared dead."""
        return segment.take(self.cache(segment.request).alive(segment.nodes))

    def cache(self, request: int) -> TreeCache:
        """That of a request, which opens with its first message."""
        if request not in self.caches:
            self.caches[request] = self._spare.pop() if self._spare else self._new_cache()
        return self.caches[request]

    def _close(self, request: int) -> None:
        cache = self.caches.pop(request, None)
        if cache is not None:
            cache.clear()
            self._spare.append(cache)

    def _prune(self, prune: Prune) -> None:
        """Obey a prune, unless its request may be over.

        One that is not open here is sure not to be over only if its number is above all that have come; then its Reset
        will close the cache that the prune opens.
        """
        if prune.request not in self.caches and prune.request <= self._newest:
            return
        with self.trace.span("prune", tip=prune.tip, keep=len(prune.keep)):
            self.cache(prune.request).prune(prune.tip, prune.parent, prune.keep, prune.horizon)

    def _forward(self, segment: Segment, news: Callable[[], Prune | None]) -> Segment:
        """Admit the rows and run the layers; an empty segment only passes, so that rank 0's count stays true.

        A segment whose rows have all died meanwhile is given up between two layers.
        """
        if not segment.nodes:
            return segment
        prunes: list[Prune] = []  # obeyed in the end, since the layers count on the cache as it is
        survivors: list[Survivors] = []  # of those that are of this request

        def alive() -> bool:
            while (prune := news()) is not None:
                prunes.append(prune)
                if prune.request == segment.request:
                    survivors.append(prune.survivors)
            return any(all(each.spare(node) for each in survivors) for node in segment.nodes)

        cache = self.cache(segment.request)
        cache.admit(segment.nodes, segment.parents, segment.text)
        pos_T = upload(torch.tensor(segment.pos), self.device)
        inner = segment.inner
        kept: dict[int, Tensor] = {}
        if inner is not None:
            kept = dict.fromkeys(self.keep, inner)
        with self.trace.span("forward", nodes=segment.nodes):
            x = self.part(upload(segment.x, self.device), pos_T, cache, kept, alive)
            if inner is not None and x is not None:
                before = upload(inner.to(x.dtype), self.device)
                inner = torch.cat([before, *kept.values()], -1)
        for prune in prunes:
            self._prune(prune)
        if x is None:
            return segment.take([])
        return replace(segment, x=x, inner=inner)


def run_stage(stage: Stage, link: Link) -> None:
    """The life of every rank but 0. A prune is obeyed before data that waits, and before what was computed leaves."""
    msg: Message | None = None
    while not isinstance(msg, Stop):
        with stage.trace.span("wait"):
            msg = link.recv()
        result = stage.apply(msg, link.urgent)
        while (prune := link.urgent()) is not None:
            stage.apply(prune)
        if isinstance(result, Segment):
            result = stage.living(result)
        if result is not None:
            nodes = getattr(result, "nodes", [])
            with stage.trace.span("send", kind=type(result).__name__, nodes=nodes):
                link.send(result)
