"""The arithmetic of a wire: the time at which a message arrives at its other end.

It does not know whether a sleeping thread or a simulation uses that time.
"""
from __future__ import annotations

import random

from config.profiles import Profile
from pipeline.messages import Batch, Message, Prune, Segment
from pipeline.trace import NoTrace

NODE_BYTES = 24  # of a row's node, parent and position on the wire
TOKEN_BYTES = 8  # of a row that is a token


class ModelledWire:
    """One wire of a profile, over which messages follow each other; jitter and losses are the random stream of `seed`.

    The real wire that carries the messages takes `real_seconds` of the latency.
    """

    def __init__(self, profile: Profile, real_seconds: float = 0.0, seed: int = 0) -> None:
        self._profile, self._real_seconds = profile, real_seconds
        self._seed = seed
        self.restart()

    def restart(self) -> None:
        """Restart as at the start, also after a message that is still under way."""
        self._random = random.Random(self._seed)
        self._free_at = 0.0  # time at which the last message has left
        self._last_arrival = 0.0

    def arrival(self, msg: Message, sent_at: float) -> float:
        """Return the time of arrival of a message that is sent at `sent_at`, in seconds of the same clock.

        It leaves after earlier ones, then takes the latency, and arrives after them, also if one was lost and repeated.
        """
        profile = self._profile
        self._free_at = max(self._free_at, sent_at) + profile.transfer(size(msg, profile))

        latency = profile.latency + profile.jitter * self._random.random()
        while profile.loss and self._random.random() < profile.loss:
            latency += profile.repeat
        remaining_latency = max(0.0, latency / 1e3 - self._real_seconds)
        self._last_arrival = max(self._last_arrival, self._free_at + remaining_latency)
        return self._last_arrival


def size(msg: Message, profile: Profile) -> int:
    """Return the bytes of a message between the devices of a profile that run its model."""
    if isinstance(msg, Prune):
        return 8 * len(msg.keep)
    if isinstance(msg, Batch):
        return sum(size(segment, profile) for segment in msg.segments)
    if not isinstance(msg, Segment) or not msg.nodes:
        return 0

    num_rows, is_tokens = len(msg.nodes), msg.x.dim() == 1
    if is_tokens:
        return num_rows * (NODE_BYTES + TOKEN_BYTES)
    row_width = msg.x.shape[1]
    num_inner = 0 if msg.inner is None else msg.inner.shape[1] // row_width
    return num_rows * (NODE_BYTES + (1 + num_inner) * profile.row_bytes)


def note(trace: NoTrace, msg: Message, profile: Profile | None, *moments: float) -> None:
    """Trace a message on a wire between two times, or from one time until now; without a profile it has no bytes."""
    num_bytes = size(msg, profile) if profile else 0
    trace.note("wire", *moments, kind=type(msg).__name__, bytes=num_bytes)
