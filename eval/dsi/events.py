"""Tasks that take time on workers, and the order in which they end: one core for a virtual clock and for the real one.

A *tick* is a whole unit of time, so that moments add up and compare exactly. A task ends at the moment that was set
when it began, and what follows from its end happens then. Chance orders tasks that end at one moment, as it does where
moments differ by less than anybody can measure; the same seed draws the same order. What waits for the end of a task is
a driver: on the virtual clock nobody does; on the real one a thread for each worker sleeps until that moment.
"""
from __future__ import annotations

import heapq
import random
import threading
import time
from itertools import count
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Callable, Protocol

Done = Callable[[], None]  # what follows from the end of a task


class Task:
    """What a worker does from `begun` to `due`, in ticks, unless it is cancelled; at its end `done` is called."""

    __slots__ = ("worker", "begun", "due", "done", "cancelled")

    def __init__(self, worker: int, begun: int, due: int, done: Done) -> None:
        self.worker, self.begun, self.due, self.done = worker, begun, due, done
        self.cancelled = False


class Driver(Protocol):
    """Who lets the time of tasks pass."""

    def begin(self, task: Task) -> None:
        """A worker begins a task; it has no other."""

    def cancel(self, task: Task) -> None:
        """The worker of this task does nothing from now on."""

    def wait(self, task: Task) -> int:
        """Return when this task is over, with the tick at which what follows from it happens."""


class Virtual:
    """Nobody waits: a task is over at its moment."""

    def begin(self, task: Task) -> None:
        pass

    def cancel(self, task: Task) -> None:
        pass

    def wait(self, task: Task) -> int:
        return task.due


class Events:
    """The tasks under way, which end one after the other; whatever happens, happens in the thread that calls `run`."""

    def __init__(self, driver: Driver, seed: int = 0) -> None:
        self.now = 0  # the tick of what happens
        self._driver, self._chance = driver, random.Random(seed)
        self._heap: list[tuple[int, float, int, Task]] = []
        self._order = count()

    def start(self, worker: int, ticks: int, done: Done) -> Task:
        """Begin a task at this moment; the worker must not have another."""
        task = Task(worker, self.now, self.now + ticks, done)
        place = task.due, self._chance.random(), next(self._order)
        heapq.heappush(self._heap, (*place, task))
        self._driver.begin(task)
        return task

    def cancel(self, task: Task) -> None:
        """A task that is under way will not end."""
        task.cancelled = True
        self._driver.cancel(task)

    def run(self) -> None:
        """Let all tasks end, and those that they start, until none is under way."""
        while self._heap:
            task = heapq.heappop(self._heap)[-1]
            if not task.cancelled:
                self.now = max(self.now, self._driver.wait(task))
                task.done()

    def stop(self) -> None:
        """Cancel whatever is under way, so that `run` returns."""
        for *_, task in self._heap:
            if not task.cancelled:
                self.cancel(task)


class Wall:
    """The real clock: threads that live as long as this object, one for each worker, sleep until a task's moment.

    Moments are absolute: what follows from a task begins at the moment when the task should have ended, so that what
    came late does not add up. With `chained` it begins when that was noticed, as where each waits for the one before.
    A tick has this many `seconds`. Use it in a `with` statement, and call `restart` before each `Events`.
    """

    def __init__(self, workers: int, seconds: float, chained: bool = False) -> None:
        self.late: list[float] = []  # seconds by which the end of a task was noticed late, since the last restart
        self.handling: list[float] = []  # seconds from each such notice to the next look: what reacting to it takes
        self._seconds, self._chained = seconds, chained
        self._over: SimpleQueue[Task] = SimpleQueue()
        self._ended: set[Task] = set()
        self._tasks: list[SimpleQueue[object]] = [SimpleQueue() for _ in range(workers)]
        self._threads = [self._thread(tasks) for tasks in self._tasks]
        self.restart()

    def __enter__(self) -> Wall:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        for tasks in self._tasks:
            tasks.put(_END)
        for thread in self._threads:
            thread.join()

    def restart(self) -> None:
        """Tick 0 is now; no task is under way."""
        self.late, self.handling = [], []
        self._zero = self._noticed = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since tick 0."""
        return time.monotonic() - self._zero

    def begin(self, task: Task) -> None:
        self._tasks[task.worker].put(task)

    def cancel(self, task: Task) -> None:
        self._tasks[task.worker].put(None)

    def wait(self, task: Task) -> int:
        self.handling.append(time.monotonic() - self._noticed)
        while task not in self._ended:
            self._ended.add(self._over.get())
        self._ended = {other for other in self._ended if other is not task and not other.cancelled}
        self._noticed = time.monotonic()
        self.late.append(self._noticed - self._moment(task))
        return round((self._noticed - self._zero) / self._seconds) if self._chained else task.due

    def _moment(self, task: Task) -> float:
        return self._zero + task.due * self._seconds

    def _thread(self, tasks: SimpleQueue[object]) -> threading.Thread:
        return threading.Thread(target=self._work, args=(tasks,), daemon=True)

    def _work(self, tasks: SimpleQueue[object]) -> None:
        """Tasks come in, and are told to be over at their moment; anything that comes meanwhile takes their place."""
        task: object = None
        while task is not _END:
            try:
                task = tasks.get(timeout=self._left(task))
            except Empty:
                if isinstance(task, Task) and not self._left(task):
                    self._over.put(task)
                    task = None

    def _left(self, task: object) -> float | None:
        """Seconds until a task is over, at least 0; None if there is no task."""
        if not isinstance(task, Task):
            return None
        return max(0.0, self._moment(task) - time.monotonic())


_END = object()  # what ends a thread
