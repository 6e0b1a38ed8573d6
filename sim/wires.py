"""The arithmetic of a wire: the time at which a message arrives at its other end.

It does not know whether a sleeping thread or a simulation uses that time.
"""
from __future__ import annotations

import random

from config.profiles import Profile
from pipeline.messages import Batch, Features, Message, Prune, Segment
from pipeline.trace import NoTrace

NUMBERS = 24  # bytes of a row's node, parent and position on the wire
TOKEN = 8  # bytes of a row that is a token


class ModelledWire:
    """One wire of a profile, over which messages follow each other; its jitter is its own random stream.

    The real wire that carries the messages takes `takes` seconds of the latency.
    """

    def __init__(self, profile: Profile, takes: float = 0.0) -> None:
        self._profile, self._takes = profile, takes
        self.restart()
        self._free = 0.0  # time at which the last message has left
        self._arrived = 0.0  # time at which it arrives

    def restart(self) -> None:
        """Restart the random jitter."""
        self._jitter = random.Random(0)

    def arrival(self, msg: Message, asked: float) -> float:
        """Return the time of arrival of a message that is sent at `asked`, in seconds of the same clock."""
        return self.carried(size(msg, self._profile), asked)

    def carried(self, count: int, asked: float) -> float:
        """Return the time at which this many bytes arrive: they leave after earlier ones, then take the latency."""
        profile = self._profile
        self._free = max(self._free, asked) + profile.transfer(count)
        latency = (profile.latency + profile.jitter * self._jitter.random()) / 1e3
        self._arrived = max(self._arrived, self._free + max(0.0, latency - self._takes))
        return self._arrived


def size(msg: Message, profile: Profile) -> int:
    """Return the bytes of a message between the devices of a profile that run its model."""
    if isinstance(msg, Prune):
        return 8 * len(msg.keep)
    if isinstance(msg, Batch):
        return sum(size(segment, profile) for segment in msg.segments)
    if isinstance(msg, Features):
        return len(msg.nodes) * (NUMBERS + msg.layers * profile.row_bytes)
    if not isinstance(msg, Segment) or not msg.nodes:
        return 0
    rows = len(msg.nodes)
    if msg.x.dim() == 1:
        return rows * (NUMBERS + TOKEN)
    width = msg.x.shape[1]
    inner_states = 0 if msg.inner is None else msg.inner.shape[1] // width
    return rows * (NUMBERS + (1 + inner_states) * profile.row_bytes)


def note(trace: NoTrace, msg: Message, profile: Profile | None, *moments: float) -> None:
    """Trace a message on a wire between two times, or from one time until now; without a profile it has no bytes.
    """
    weight = size(msg, profile) if profile else 0
    trace.note("wire", *moments, kind=type(msg).__name__, bytes=weight)
