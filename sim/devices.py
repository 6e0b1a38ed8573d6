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
        started_at, profile = self.pace.now(), self.pace.profile
        num_layers = max(1, round(self.share * profile.layers))
        num_context_tokens = sum(int(pos_of_request.max()) for pos_of_request in cache.split(pos_T))
        seconds = profile.stage(self.share, len(x), num_context_tokens)

        out = self.part(x, pos_T, cache, inner)
        for layer in range(1, num_layers):
            self.pace.clock.sleep_until(started_at + seconds * layer / num_layers)
            if not still_needed():
                return None
        self.pace.spend_until(started_at + seconds)
        return out


class SlowHead:
    """An LM head that takes the time of the emulated LM head, and of rank 0's work with a message that came back."""

    def __init__(self, lm_head: Callable[[Tensor], Tensor], pace: Pace) -> None:
        self.lm_head, self.pace = lm_head, pace

    def __call__(self, x_TD: Tensor) -> Tensor:
        due_at = self.pace.now() + self.pace.profile.verdict / 1e3 + self.pace.own_seconds(num_messages=1)
        logits_TV = self.lm_head(x_TD)
        self.pace.spend_until(due_at)
        return logits_TV


class SlowPasses:
    """Passes of draft networks that take the time of the emulated draft's levels, and of rank 0's work with guesses.

    A pass that only reads text takes no emulated time: it counts as a part of the next level.
    """

    def __init__(self, passes: Passes, pace: Pace) -> None:
        self.passes, self.pace = passes, pace

    def __call__(self, readings: Sequence[Reading]) -> list[Read]:
        due_at = self.pace.now()
        for indices in by_network(readings):
            row_counts = [readings[index].num_logit_rows for index in indices]
            source = readings[indices[0]].draft.source
            due_at += self.pace.profile.drafting(source).draft(row_counts)
            due_at += self.pace.own_seconds(num_guesses=sum(row_counts))

        outputs = self.passes(readings)
        self.pace.spend_until(due_at)
        return outputs


class SlowLink:
    """A link of a rank whose messages are delayed. Data and control have one emulated wire each."""

    def __init__(self, link: Any, pace: Pace, rank: int = 0) -> None:
        self._link = link
        self._lanes = [Lane(deliver, pace, link.takes, link.failed, seed)
                       for seed, deliver in enumerate((link.send, link.broadcast), 2 * rank)]
        self.send, self.broadcast = (lane.put for lane in self._lanes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def end(self) -> None:
        for lane in self._lanes:
            lane.forget()
        self._link.end()

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()
        self._link.close()

    def drop(self) -> None:
        for lane in self._lanes:
            lane.drop()
        self._link.drop()


class Lane:
    """One emulated wire, which delivers a message at its modelled time of arrival.

    `deliver` sends the message over the real wire, whose `real_seconds` are part of the latency. `on_failure` is called
    with the error that ends the lane's thread. Jitter and losses are those of `seed`.
    """

    def __init__(self, deliver: Callable[[Message], None], pace: Pace, real_seconds: float,
                 on_failure: Failure, seed: int = 0) -> None:
        self._deliver, self._pace, self._real_seconds = deliver, pace, real_seconds
        self._seed = seed
        self._on_failure = on_failure
        self._start_thread()

    def _start_thread(self) -> None:
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._thread = guarded("emulated wire", self._run, self._on_failure)

    def forget(self) -> None:
        """Drop the messages in flight."""
        with suppress(Empty):
            while True:
                self._queue.get_nowait()
        self.close()
        self._start_thread()

    def put(self, msg: Message) -> None:
        self._queue.put((msg, self._pace.now()))

    def close(self) -> None:
        """Deliver the messages in flight, and end the thread."""
        self.drop()
        self._thread.join()

    def drop(self) -> None:
        """Deliver the messages in flight, then end the thread, without waiting for it."""
        self._queue.put(None)

    def _run(self) -> None:
        pace, wire = self._pace, ModelledWire(self._pace.profile, self._real_seconds, self._seed)
        while (queued := self._queue.get()) is not None:
            msg, sent_at = queued
            pace.spend_until(wire.arrival(msg, sent_at))
            self._deliver(msg)
            note(pace.trace, msg, pace.profile, sent_at)
