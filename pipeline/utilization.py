"""A rank's meter: for how much of its last seconds it was at work, and did not wait for messages.

It knows nothing about what the work is.
"""
from __future__ import annotations

import time
from collections import deque
from contextlib import contextmanager
from typing import Iterator

LAST = 2.0  # seconds of which a share is given


class Meter:
    """What happens inside `with meter:` is work, but for what happens inside `with meter.idle():` there.

    One thread works, and another may look.
    """

    def __init__(self) -> None:
        self._counted: tuple[float, float | None] = (0.0, None)  # seconds so far; since when there is more, if there is
        self._looks: deque[tuple[float, float]] = deque([(time.monotonic(), 0.0)])  # moments, and seconds until then

    @property
    def seconds(self) -> float:
        """The seconds of work since the start."""
        done, since = self._counted
        return done if since is None else done + time.monotonic() - since

    def __enter__(self) -> None:
        self._counted = self.seconds, time.monotonic()

    def __exit__(self, *error: object) -> None:
        self._counted = self.seconds, None

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Nothing is done meanwhile."""
        working = self._counted[1] is not None
        self.__exit__()
        try:
            yield
        finally:
            if working:
                self.__enter__()

    def share(self) -> float:
        """The share of work, from 0 to 1, in the time since a look `LAST` seconds ago, or since the oldest after that.
        """
        now, seconds = time.monotonic(), self.seconds
        self._looks.append((now, seconds))
        while len(self._looks) > 2 and self._looks[1][0] <= now - LAST:
            self._looks.popleft()
        then, before = self._looks[0]
        return min(1.0, (seconds - before) / max(now - then, 1e-9))
