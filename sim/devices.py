"""The emulated cluster: stages, drafts and wires that take at least the time of those that they stand for.

Processes, messages and tokens are real, the time is modelled: whoever is done early sleeps until the moment at which
the emulated device would be done, so that errors do not add up. It knows nothing about strategies or ranks.
"""
from __future__ import annotations

import random
import time
from queue import SimpleQueue
from typing import Any, Callable

from torch import Tensor

from config.profiles import Profile
from config.run_config import Growth
from model.cache import TreeCache
from model.tree import TokenTree
from pipeline.loss import Failure, guarded
from pipeline.messages import Message, Prune, Segment
from pipeline.trace import OFF, NoTrace
from pipeline.transport import Link

NUMBERS = 24  # bytes of a row's node, parent and position on the wire


def sleep_until(due: float, trace: NoTrace = OFF) -> None:
    """Sleep until a moment of the monotonic clock; what it is missed by is noted as `late`."""
    while (left := due - time.monotonic()) > 0:
        time.sleep(left)
    trace.note("late", due)


class SlowSlice:
    """A slice that takes the time of `share` of the emulated model's layers, and is asked to go on as often as they."""

    def __init__(self, part: Callable[..., Tensor | None], profile: Profile, share: float, trace: NoTrace = OFF
                 ) -> None:
        self.part, self.profile, self.share, self.trace = part, profile, share, trace

    def __call__(self, x: Tensor, pos_T: Tensor, cache: TreeCache, inner: dict[int, Tensor],
                 go_on: Callable[[], bool] = lambda: True) -> Tensor | None:
        start, layers = time.monotonic(), max(1, round(self.share * self.profile.layers))
        takes = self.profile.stage(self.share, len(x), int(pos_T.max()))
        out = self.part(x, pos_T, cache, inner)
        for layer in range(1, layers):
            sleep_until(start + takes * layer / layers)
            if not go_on():
                return None
        sleep_until(start + takes, self.trace)
        return out


class SlowHead:
    """An LM head that takes the time of a verdict."""

    def __init__(self, lm_head: Callable[[Tensor], Tensor], profile: Profile, trace: NoTrace = OFF) -> None:
        self.lm_head, self.profile, self.trace = lm_head, profile, trace

    def __call__(self, x_TD: Tensor) -> Tensor:
        due = time.monotonic() + self.profile.verdict / 1e3
        logits_TV = self.lm_head(x_TD)
        sleep_until(due, self.trace)
        return logits_TV


class SlowDraft:
    """A draft whose levels take their time."""

    def __init__(self, draft: Any, profile: Profile, trace: NoTrace = OFF) -> None:
        self.draft, self.profile, self.trace = draft, profile, trace
        self.inner, self.refresh, self.reset = draft.inner, draft.refresh, draft.reset

    @property
    def consumed(self) -> int:
        return int(self.draft.consumed)

    def grow(self, tree: TokenTree, growth: Growth) -> bool:
        since = time.monotonic()
        grew: bool = self.draft.grow(tree, growth)
        if grew:
            sleep_until(since + self.profile.level / 1e3, self.trace)
        return grew


class SlowLink:
    """A link whose messages come later. Data share one wire and follow each other; control has a way of its own."""

    def __init__(self, link: Any, profile: Profile, trace: NoTrace = OFF) -> None:
        self._link = link
        ways = link.send, link.broadcast
        self._lanes = [Lane(way, profile, link.takes, trace, link.failed) for way in ways]
        self.send, self.broadcast = (lane.put for lane in self._lanes)
        self.recv, self.urgent, self.fail = link.recv, link.urgent, link.fail

    @property
    def ready(self) -> bool:
        link: Link = self._link
        return link.ready

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()
        self._link.close()


class Lane:
    """One way of an emulated wire: a message leaves when those before it have, and arrives a latency later.

    The seconds that the real way `takes` are a part of that. `failed` is told if the lane dies.
    """

    def __init__(self, deliver: Callable[[Message], None], profile: Profile, takes: float, trace: NoTrace,
                 failed: Failure) -> None:
        self._deliver, self._profile, self._takes, self._trace = deliver, profile, takes, trace
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._thread = guarded("emulated wire", self._run, failed)

    def put(self, msg: Message) -> None:
        self._queue.put((msg, time.monotonic()))

    def close(self) -> None:
        """Deliver what is under way, and end."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        free, jitter = 0.0, random.Random(0)
        while (item := self._queue.get()) is not None:
            msg, asked = item
            weight = size(msg, self._profile.row_bytes)
            free = max(free, asked) + self._profile.transfer(weight)
            latency = (self._profile.latency + self._profile.jitter * jitter.random()) / 1e3
            sleep_until(free + max(0.0, latency - self._takes), self._trace)
            self._deliver(msg)
            self._trace.note("wire", asked, kind=type(msg).__name__, bytes=weight)


def size(msg: Message, row_bytes: int) -> int:
    """The bytes of a message if each row of hidden states had so many."""
    if isinstance(msg, Prune):
        return 8 * len(msg.keep)
    if not isinstance(msg, Segment) or not msg.nodes:
        return 0
    if msg.x.dim() == 1:
        return len(msg.nodes) * (NUMBERS + 8)
    states = 1 + (0 if msg.inner is None else msg.inner.shape[1] // msg.x.shape[1])
    return len(msg.nodes) * (NUMBERS + states * row_bytes)
