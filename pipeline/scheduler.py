"""The scheduler: requests by turns over one ring. It alone knows who waits for what.

It knows nothing about strategies, text or what is drafted. A request is a generator that yields the tokens that
settled, nothing while it waits for its target, and what its draft wants read.
"""
from __future__ import annotations

from collections import deque
from typing import Sequence

from model.reading import Passes, Read, Reading
from pipeline.interfaces import Progress
from pipeline.ring import Ring
from pipeline.target import RequestTarget


class Task:
    """A request that is under way, and what it has settled that nobody has taken yet."""

    def __init__(self, steps: Progress, target: RequestTarget) -> None:
        self.settled: deque[list[int]] = deque()
        self.target = target
        self.over = False
        self.reading: Reading | None = None  # what it waits for, if that is a network
        self.error: BaseException | None = None  # what it ended with
        self._steps = steps

    def go_on(self, read: Read | None = None) -> bool:
        """Let it go on until it waits or has settled tokens; whether it has."""
        self.reading = None
        try:
            result = self._steps.send(read)
        except StopIteration:
            self.over = True
            return True
        except Exception as error:  # which is that of this request alone, and raised where its answer is read
            self.over, self.error = True, error
            return True
        if isinstance(result, list):
            if result:
                self.settled.append(result)
            return bool(result)
        self.reading = result
        return False


class Scheduler:
    """The requests that share a ring; `passes` runs the networks of their drafts."""

    def __init__(self, ring: Ring, passes: Passes) -> None:
        self.ring, self._passes = ring, passes
        self.tasks: list[Task] = []  # the oldest first

    def turn(self) -> None:
        """Let the requests go on, or wait until one of them can.

        First those whose segments are back are judged. Once all are, everybody may send, and what they send leaves
        together; then the networks read for all of them at once.
        """
        if self._go_on([task for task in self.tasks if task.reading is None and task.target.ready]):
            return
        settled = self._go_on([task for task in self.tasks if task.reading is None])
        self.ring.depart()
        asking = [task for task in self.tasks if task.reading is not None]
        if asking:
            self._read(asking)
        elif not settled:
            self.ring.listen()

    def _go_on(self, tasks: Sequence[Task]) -> bool:
        """Whether one of these has settled tokens, or is over."""
        settled = [task.go_on() for task in tasks]
        self.tasks = [task for task in self.tasks if not task.over]
        return any(settled)

    def _read(self, asking: Sequence[Task]) -> None:
        """Let the networks read what is asked for, and those who asked go on."""
        read = self._passes([task.reading for task in asking if task.reading is not None])
        for task, said in zip(asking, read):
            task.go_on(said)
        self.tasks = [task for task in self.tasks if not task.over]
