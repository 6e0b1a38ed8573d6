"""The emulated cluster: stages, drafts and wires that take at least the time of the hardware that they model.

Processes, messages and tokens are real, the time is modelled: after the real work a device sleeps until the time at
which the emulated device would finish, so that errors do not add up. It knows nothing about strategies or ranks.
"""
from __future__ import annotations

from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Callable, Sequence

from torch import Tensor

from config.failure import Failure, guarded
from model.cache import SegmentCache
from model.drafts.draft import Passes, Read, Reading
from model.drafts.network import by_network
from pipeline.messages import Message
from sim.clock import Pace
from sim.wires import ModelledWire, note


class SlowSlice:
    """A slice of the model that takes the time of a share of the emulated model's layers.

    `share` is from 0 to 1. `still_needed` is called between two layers of the emulated model, as a real slice does
    between its own layers; it returns whether the segment is still worth computing.
    """

    def __init__(self, part: Callable[..., Tensor | None], pace: Pace, share: float) -> None:
        self.part, self.pace, self.share = part, pace, share

    def __call__(self, x: Tensor, pos_T: Tensor, cache: SegmentCache, inner: dict[int, Tensor],
                 still_needed: Callable[[], bool] = lambda: True) -> Tensor | None:
        start, profile = self.pace.now(), self.pace.profile
        layers = max(1, round(self.share * profile.layers))
        context = sum(int(rows.max()) for rows in cache.split(pos_T))
        seconds = profile.stage(self.share, len(x), context)
        out = self.part(x, pos_T, cache, inner)
        for layer in range(1, layers):
            self.pace.clock.sleep_until(start + seconds * layer / layers)
            if not still_needed():
                return None
        self.pace.spend_until(start + seconds)
        return out


class SlowHead:
    """An LM head that takes the time of the emulated LM head and verification."""

    def __init__(self, lm_head: Callable[[Tensor], Tensor], pace: Pace) -> None:
        self.lm_head, self.pace = lm_head, pace

    def __call__(self, x_TD: Tensor) -> Tensor:
        due = self.pace.now() + self.pace.profile.verdict / 1e3
        logits_TV = self.lm_head(x_TD)
        self.pace.spend_until(due)
        return logits_TV


class SlowPasses:
    """Passes of draft networks that take the time of the emulated draft's levels.

    A pass that only reads text takes no emulated time: it counts as a part of the next level.
    """

    def __init__(self, passes: Passes, pace: Pace) -> None:
        self.passes, self.pace = passes, pace

    def __call__(self, readings: Sequence[Reading]) -> list[Read]:
        due = self.pace.now()
        for places in by_network(readings):
            asked = [readings[place].num_logit_rows for place in places]
            source = readings[places[0]].draft.source
            due += self.pace.profile.drafting(source).draft(asked)
        read = self.passes(readings)
        self.pace.spend_until(due)
        return read


class SlowLink:
    """A link whose messages are delayed. Data, control and reports have one emulated wire each."""

    def __init__(self, link: Any, pace: Pace) -> None:
        self._link = link
        ways = link.send, link.broadcast, link.report
        self._lanes = [Lane(way, pace, link.takes, link.failed) for way in ways]
        self.send, self.broadcast, self.report = (lane.put for lane in self._lanes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def end(self) -> None:
        for lane in self._lanes:
            lane.forget()
        self._link.end()

    def close(self) -> None:
        for each in (*self._lanes, self._link):
            each.close()

    def drop(self) -> None:
        for each in (*self._lanes, self._link):
            each.drop()


class Lane:
    """One emulated wire, which delivers a message at its modelled time of arrival.

    `deliver` sends the message over the real wire, whose `takes` seconds are part of the latency. `failed` is called
    with the error that ends the lane's thread.
    """

    def __init__(self, deliver: Callable[[Message], None], pace: Pace, takes: float,
                 failed: Failure) -> None:
        self._deliver, self._pace, self._takes = deliver, pace, takes
        self._failed = failed
        self._begin()

    def _begin(self) -> None:
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._thread = guarded("emulated wire", self._run, self._failed)

    def forget(self) -> None:
        """Drop the messages in flight."""
        with suppress(Empty):
            while True:
                self._queue.get_nowait()
        self.close()
        self._begin()

    def put(self, msg: Message) -> None:
        self._queue.put((msg, self._pace.now()))

    def close(self) -> None:
        """Deliver the messages in flight, and end the thread."""
        self.drop()
        self._thread.join()

    def drop(self) -> None:
        """Do as `close`, without waiting for the thread."""
        self._queue.put(None)

    def _run(self) -> None:
        pace, wire = self._pace, ModelledWire(self._pace.profile, self._takes)
        while (item := self._queue.get()) is not None:
            msg, asked = item
            pace.spend_until(wire.arrival(msg, asked))
            self._deliver(msg)
            note(pace.trace, msg, pace.profile, asked)
