"""The outbox: segments of several requests that wait to leave together.

It knows nothing about when that is. The first segments that requests have put in make the first message, their second
ones the next, and so on; a message takes no more rows than `MOST`, but for one that has a single segment.
"""
from __future__ import annotations

from collections import deque

from pipeline.messages import Segment

MOST = 256  # rows of a message of several segments


class Outbox:
    """Messages that are being put together, the next one first."""

    def __init__(self) -> None:
        self._messages: deque[list[Segment]] = deque()

    def __len__(self) -> int:
        return len(self._messages)

    def holds(self, request: int) -> bool:
        """Whether a segment of this request waits."""
        return any(segment.request == request for message in self._messages for segment in message)

    def put(self, segment: Segment) -> None:
        """Add a segment, behind all others of its request."""
        at = 0
        for place, message in enumerate(self._messages, 1):
            if any(other.request == segment.request for other in message):
                at = place
        while at < len(self._messages) and not _fits(segment, self._messages[at]):
            at += 1
        if at == len(self._messages):
            self._messages.append([])
        self._messages[at].append(segment)

    def take(self) -> list[Segment]:
        """The segments of the next message."""
        return self._messages.popleft()

    def drop(self, request: int) -> int:
        """Drop what a request has put in; returns how many segments that were."""
        before = sum(map(len, self._messages))
        left = ([segment for segment in message if segment.request != request] for message in self._messages)
        self._messages = deque(message for message in left if message)
        return before - sum(map(len, self._messages))


def _fits(segment: Segment, message: list[Segment]) -> bool:
    """Whether a message has room for a segment, and asks for inner features as it does."""
    rows = sum(len(other.nodes) for other in message)
    alike = all((other.inner is None) == (segment.inner is None) for other in message)
    return alike and rows + len(segment.nodes) <= MOST
