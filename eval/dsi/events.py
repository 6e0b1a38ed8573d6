"""Workers whose forwards take modelled time, on a virtual clock: what a forward takes, and when it can be given up.

A *tick* is a whole unit of time, so that moments add up and compare exactly. Chance orders tasks that end at one
moment, as it does where moments differ by less than anybody can measure; the same seed draws the same order.
"""
from __future__ import annotations

import heapq
import random
from dataclasses import dataclass
from itertools import count
from typing import Callable, NamedTuple

Done = Callable[[], None]  # what follows from the end of a task


@dataclass(eq=False)
class Task:
    """What is done from `begun` to `due`, in ticks, unless it is cancelled; at its end `done` is called."""

    begun: int
    due: int
    done: Done
    cancelled: bool = False


class Events:
    """The tasks under way, which end one after the other."""

    def __init__(self, seed: int = 0) -> None:
        self.now = 0  # the tick of what happens
        self._chance = random.Random(seed)
        self._heap: list[tuple[int, float, int, Task]] = []
        self._order = count()

    def start(self, ticks: int, done: Done) -> Task:
        """Begin a task at this moment."""
        task = Task(self.now, self.now + ticks, done)
        place = task.due, self._chance.random(), next(self._order)
        heapq.heappush(self._heap, (*place, task))
        return task

    def run(self) -> None:
        """Let all tasks end, and those that they start, until none is under way."""
        while self._heap:
            task = heapq.heappop(self._heap)[-1]
            if not task.cancelled:
                self.now = task.due
                task.done()

    def stop(self) -> None:
        """Cancel whatever is under way, so that `run` returns."""
        for *_, task in self._heap:
            task.cancelled = True


class Forward(NamedTuple):
    """What a forward takes, in ticks: the first one of a worker, and later ones over 1, 2, ... rows.

    The last entry of `later` is that of more rows, too; a table of one entry says that rows do not count.
    """

    first: int
    later: tuple[int, ...]

    def ticks(self, rows: int, used: bool) -> int:
        """What a forward takes over this many rows, at least one, on a worker that was used before or not."""
        if not used:
            return self.first
        place = min(max(rows, 1), len(self.later))
        return self.later[place - 1]


class Worker:
    """A drafter, or one copy of the target: it computes one forward at a time.

    `parts` says between how many equal parts of a forward it can be given up: with 1 it runs to its end and comes to
    nothing, with 0 it ends at once. What is given up leaves nothing in the cache, but it counts as the first forward,
    as in the simulator published with the paper on DSI. `hop` is what a message to the worker takes, and one back.
    """

    def __init__(self, events: Events, forward: Forward, parts: int, hop: int = 0) -> None:
        self._events, self._forward = events, forward
        self._parts, self._hop = parts, hop
        self._task: Task | None = None
        self._wanted = False  # whether the result is still of use
        self.forwards = 0  # how many were begun
        self.held = 0  # how many new tokens its cache holds

    @property
    def free(self) -> bool:
        """Whether it can begin a forward."""
        return self._task is None

    def ticks(self, length: int) -> int:
        """What a forward takes that computes what its cache lacks of this many new tokens, messages included."""
        lacks = length - self.held
        return 2 * self._hop + self._forward.ticks(lacks, used=self.forwards > 0)

    def compute(self, length: int, done: Done) -> None:
        """Begin a forward, after which the cache holds this many new tokens; the worker must be free."""
        def end() -> None:
            self._task, self.held = None, length
            done()
        self._task = self._events.start(self.ticks(length), end)
        self.forwards, self._wanted = self.forwards + 1, True

    def truncate(self, length: int) -> None:
        """Of new tokens, only this many stay in the cache."""
        self.held = min(self.held, length)

    def give_up(self, freed: Done) -> None:
        """The result is of no use: `done` will not be called, but `freed` if the worker is not free at once."""
        def end() -> None:
            self._task = None
            freed()
        if self._task is not None and self._wanted:
            self._wanted = False
            rest = self._rest(self._task)
            self._task.cancelled = True
            self._task = self._events.start(rest, end) if rest else None

    def _rest(self, task: Task) -> int:
        """Ticks until a forward can be given up: to the next border of its parts, the first of which runs already."""
        spent = self._events.now - task.begun
        whole = task.due - task.begun - 2 * self._hop
        if not self._parts or spent >= whole:
            return 0
        border = max(1, -(-spent * self._parts // whole)) * whole
        return -(-border // self._parts) - spent
