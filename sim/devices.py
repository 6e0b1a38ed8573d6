"""The emulated cluster: stages, drafts and wires that take at least the time of those that they stand for.

Processes, messages and tokens are real, the time is modelled: whoever is done early sleeps until the moment at which
the emulated device would be done, so that errors do not add up. It knows nothing about strategies or ranks.
"""
from __future__ import annotations

from queue import SimpleQueue
from typing import Any, Callable

from torch import Tensor

from config.run_config import Growth
from model.cache import TreeCache
from model.tree import TokenTree
from pipeline.loss import Failure, guarded
from pipeline.messages import Message
from pipeline.transport import Link
from sim.pace import Pace
from sim.wires import Wire, size


class SlowSlice:
    """A slice of the model that takes as long as a share of the emulated model's layers would.

    `share` is that share, from 0 to 1. The time passes layer by layer, of the emulated model's layers, and between two
    of them `go_on` is asked whether the segment is still worth computing, as a real slice asks between its own.
    """

    def __init__(self, part: Callable[..., Tensor | None], pace: Pace, share: float) -> None:
        self.part, self.pace, self.share = part, pace, share

    def __call__(self, x: Tensor, pos_T: Tensor, cache: TreeCache, inner: dict[int, Tensor],
                 go_on: Callable[[], bool] = lambda: True) -> Tensor | None:
        start, profile = self.pace.now(), self.pace.profile
        layers = max(1, round(self.share * profile.layers))
        context = int(pos_T.max())
        seconds = profile.stage(self.share, len(x), context)
        out = self.part(x, pos_T, cache, inner)
        for layer in range(1, layers):
            self.pace.clock.sleep_until(start + seconds * layer / layers)
            if not go_on():
                return None
        self.pace.spend_until(start + seconds)
        return out


class SlowHead:
    """An LM head that takes the time of the emulated LM head and of the verification that follows it."""

    def __init__(self, lm_head: Callable[[Tensor], Tensor], pace: Pace) -> None:
        self.lm_head, self.pace = lm_head, pace

    def __call__(self, x_TD: Tensor) -> Tensor:
        due = self.pace.now() + self.pace.profile.verdict / 1e3
        logits_TV = self.lm_head(x_TD)
        self.pace.spend_until(due)
        return logits_TV


class SlowDraft:
    """A draft each of whose levels takes the time of a level of the emulated draft."""

    def __init__(self, draft: Any, pace: Pace) -> None:
        self.draft, self.pace = draft, pace

    def __getattr__(self, name: str) -> Any:
        return getattr(self.draft, name)

    def expand(self, tree: TokenTree, nodes: list[int], width: int) -> Any:
        since = self.pace.now()
        guesses = self.draft.expand(tree, nodes, width)
        if guesses is not None:
            self.pace.spend_until(since + self.pace.profile.level / 1e3)
        return guesses

    def grow(self, tree: TokenTree, growth: Growth) -> bool:
        since = self.pace.now()
        grew: bool = self.draft.grow(tree, growth)
        if grew:
            self.pace.spend_until(since + self.pace.profile.level / 1e3)
        return grew


class SlowLink:
    """A link whose messages come later. Data share one wire and follow each other; control has a wire of its own."""

    def __init__(self, link: Any, pace: Pace) -> None:
        self._link = link
        self._data = Lane(link.send, pace, link.takes, link.failed)
        self._control = Lane(link.broadcast, pace, link.takes, link.failed)
        self.send, self.broadcast = self._data.put, self._control.put
        self.recv, self.rest, self.urgent, self.fail = link.recv, link.rest, link.urgent, link.fail

    @property
    def ready(self) -> bool:
        link: Link = self._link
        return link.ready

    def close(self) -> None:
        self._data.close()
        self._control.close()
        self._link.close()


class Lane:
    """One emulated wire, which delivers a message at the moment at which it would arrive.

    `deliver` sends it over the real wire, whose own `takes` seconds are a part of the latency. `failed` is told what
    the lane's thread dies of.
    """

    def __init__(self, deliver: Callable[[Message], None], pace: Pace, takes: float, failed: Failure) -> None:
        self._deliver, self._pace, self._takes = deliver, pace, takes
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._thread = guarded("emulated wire", self._run, failed)

    def put(self, msg: Message) -> None:
        self._queue.put((msg, self._pace.now()))

    def close(self) -> None:
        """Deliver what is under way, and end."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        pace, wire = self._pace, Wire(self._pace.profile, self._takes)
        while (item := self._queue.get()) is not None:
            msg, asked = item
            pace.spend_until(wire.arrival(msg, asked))
            self._deliver(msg)
            pace.trace.note("wire", asked, kind=type(msg).__name__, bytes=size(msg, pace.profile))
