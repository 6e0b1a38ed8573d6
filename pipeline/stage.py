"""A stage: a slice of the model and a cache per request. Its state depends only on the received messages.

It knows nothing about strategies or ranks: ids, parents and positions in a segment define the attention mask.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Callable, Sequence

import torch
from torch import Tensor

from model.cache import Survivors, TreeCache, together
from model.devices import upload
from pipeline.link import Link
from pipeline.messages import (
    NOBODY,
    Message,
    Prune,
    Reset,
    Segment,
    Start,
    Stop,
    Visit,
    facts_of,
    joined,
    newest_request,
    segments_of,
)
from pipeline.trace import OFF, REAL, Clock, NoTrace


class Stage:
    """A stage that computes segments with the slice `part`; `new_cache` creates the cache of a request.

    To a segment that needs inner features it adds the inputs of the slice's `inner_layers`. `num_requests` caches are
    allocated at the start. Visits have times of `clock`.
    """

    clock: Clock = REAL

    def __init__(self, part: Callable[..., Tensor | None],
                 new_cache: Callable[[], TreeCache],
                 trace: NoTrace = OFF,
                 inner_layers: Sequence[int] = (),
                 num_requests: int = 1) -> None:
        self.part, self.trace, self.inner_layers = part, trace, inner_layers
        self.caches: dict[int, TreeCache] = {}  # of open requests
        self.ended_caches: dict[int, TreeCache] = {}  # of ended requests; others may begin with their text
        self._new_cache = new_cache
        self._spare_caches = [new_cache() for _ in range(num_requests)]
        self._early_prunes: dict[int, Prune] = {}  # request that has not begun here -> its newest prune
        self._newest_request = -1  # the highest request number of all segments, Starts and Resets so far
        self.device = self._spare_caches[0].like.device

    def forget(self) -> None:
        """Forget all requests, also after an interruption, when caches may be half written."""
        for cache in [*self.caches.values(), *self.ended_caches.values()]:
            cache.clear()
            self._spare_caches.append(cache)
        self.caches, self.ended_caches, self._early_prunes = {}, {}, {}

    def apply(self, msg: Message, next_prune: Callable[[], Prune | None] = lambda: None) -> Message | None:
        """Apply one message, and return the message for the next stage; `next_prune` returns one that has arrived."""
        if isinstance(msg, Prune):
            self._prune(msg)
            return None
        segments = self.accept(msg)
        return joined(self.compute(segments, next_prune)) if segments else msg

    def accept(self, msg: Message) -> list[Segment]:
        """Apply a message other than a prune, except for its computation; return its segments with their live rows."""
        self._newest_request = max(self._newest_request, newest_request(msg))

        if isinstance(msg, Start):
            self._start(msg)
        if isinstance(msg, Reset):
            self._close(msg)

        return [self.live_rows(segment) for segment in segments_of(msg)]

    def without_dead_rows(self, msg: Message) -> Message:
        """Return an applied message as it leaves: without the rows that died meanwhile."""
        segments = segments_of(msg)
        return joined([self.live_rows(segment) for segment in segments]) if segments else msg

    def live_rows(self, segment: Segment) -> Segment:
        """Return the live rows of a segment."""
        return segment.take(self.cache(segment.request).alive(segment.nodes))

    def cache(self, request: int) -> TreeCache:
        """Return the cache of a request; its first segment opens one, unless a Start has.

        A new cache is allocated only if several decoders keep texts.
        """
        if request not in self.caches:
            self._open(request, self._spare_caches.pop() if self._spare_caches else self._new_cache())
        return self.caches[request]

    def _open(self, request: int, cache: TreeCache) -> None:
        """Open a request, and apply the prune that came before it."""
        self.caches[request] = cache
        early_prune = self._early_prunes.pop(request, None)
        if early_prune is not None:
            self._prune(early_prune)

    def _start(self, start: Start) -> None:
        """Begin a request with the text of an ended one, or with a copy of the text of an open one."""
        ended_cache = self.ended_caches.pop(start.source, None)
        if ended_cache is None:
            self.cache(start.request).copy(self.caches[start.source], start.length)
        else:
            ended_cache.truncate(start.length)
            self._open(start.request, ended_cache)

    def _close(self, reset: Reset) -> None:
        """End a request; its text is kept up to the node in the Reset, if any."""
        self._early_prunes.pop(reset.request, None)
        cache = self.caches.pop(reset.request, None) or self.ended_caches.pop(reset.request, None)
        if cache is None:
            return

        if reset.last == NOBODY:
            cache.clear()
            self._spare_caches.append(cache)
        else:
            cache.end(reset.last)
            self.ended_caches[reset.request] = cache

    def _prune(self, prune: Prune) -> None:
        """Apply a prune, unless its request may have ended.

        A request that is not open has certainly not ended only if its number is above all earlier ones. Then the prune
        waits for the first segment or Start, since earlier requests may need the spare cache.
        """
        if prune.request in self.caches:
            with self.trace.span("prune", tip=prune.tip, keep=len(prune.keep)):
                cache = self.caches[prune.request]
                cache.prune(prune.tip, prune.parent, prune.keep, prune.horizon)
        elif prune.request > self._newest_request:
            early_prune = self._early_prunes.get(prune.request, prune)
            self._early_prunes[prune.request] = max(early_prune, prune, key=lambda each: each.horizon)

    def compute(self, segments: list[Segment],
                next_prune: Callable[[], Prune | None] = lambda: None) -> list[Segment]:
        """Run the layers for these segments; empty ones are passed on, since rank 0 counts segments.

        If all rows die meanwhile, the segments are given up between two layers.
        """
        to_compute = [segment for segment in segments if segment.nodes]
        if not to_compute:
            return segments

        late_prunes: list[Prune] = []  # applied at the end, since the layers use the caches
        survivors: dict[int, list[Survivors]] = {}  # by request

        def any_row_alive() -> bool:
            while (prune := next_prune()) is not None:
                late_prunes.append(prune)
                survivors.setdefault(prune.request, []).append(prune.survivors)
            return not survivors or any(all(each.spare(node) for each in survivors.get(segment.request, ()))
                                        for segment in to_compute for node in segment.nodes)

        computed = self._compute(to_compute, any_row_alive)
        for prune in late_prunes:
            self._prune(prune)

        return [computed.get(segment.request, segment) for segment in segments]

    def _compute(self, segments: list[Segment], any_row_alive: Callable[[], bool]) -> dict[int, Segment]:
        """Compute segments, at most one of each request; return them by request, without rows if they were given up."""
        # slots in the caches, and inputs
        for segment in segments:
            self.cache(segment.request).admit(segment.nodes, segment.parents, segment.text)
        num_rows = [len(segment.nodes) for segment in segments]
        caches = together([self.cache(segment.request) for segment in segments], num_rows)
        positions = [pos for segment in segments for pos in segment.pos]
        pos_T = upload(torch.tensor(positions), self.device)
        input_T = upload(torch.cat([segment.x for segment in segments]), self.device)
        earlier_features = [segment.inner for segment in segments if segment.inner is not None]
        layer_inputs: dict[int, Tensor] = dict.fromkeys(self.inner_layers, input_T) if earlier_features else {}

        # layers
        begin = self.clock.now()
        with self.trace.span("forward", nodes=joined(segments).nodes):
            with torch.inference_mode():  # saves a seventh of the time between kernels
                x_TD = self.part(input_T, pos_T, caches, layer_inputs, any_row_alive)
            if x_TD is not None and x_TD.is_cuda:  # wait for the kernels, as sending would
                torch.cuda.current_stream(x_TD.device).synchronize()
        visit = Visit(sum(num_rows), self.clock.now() - begin)
        if x_TD is None:
            return {segment.request: segment.take([]) for segment in segments}

        # one segment for each request
        features_of_segments = [None] * len(segments)
        if earlier_features:
            features_TF = upload(torch.cat(earlier_features).to(x_TD.dtype), self.device)
            features_of_segments = torch.cat([features_TF, *layer_inputs.values()], -1).split(num_rows)
        return {segment.request: replace(segment, x=x, inner=features, visits=(*segment.visits, visit))
                for segment, x, features in zip(segments, x_TD.split(num_rows), features_of_segments)}


def run_stage(stage: Stage, link: Link) -> None:
    """Run the main loop of a stage. Prunes are applied before queued data, and before a computed segment leaves."""
    msg: Message | None = None
    while not isinstance(msg, Stop):
        with stage.trace.span("wait"):
            msg = link.recv()

        result = stage.apply(msg, link.urgent)
        while (prune := link.urgent()) is not None:
            stage.apply(prune)

        if result is not None:
            result = stage.without_dead_rows(result)
            with stage.trace.span("send", **facts_of(result)):
                link.send(result)
