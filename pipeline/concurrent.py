"""Coroutines that share a decoder, as the questions of a file or the users of a load test."""
from __future__ import annotations

from itertools import islice
from typing import Any, Generator, Iterable, Iterator, NamedTuple, TypeVar, Union

from pipeline.decode import Decoder

T = TypeVar("T")


class Until(NamedTuple):
    """A time on the ring's clock, yielded by a coroutine that waits for it."""

    moment: float


Coroutine = Generator[Union[T, Until, None], None, None]


def concurrent(coroutines: Iterable[Coroutine[T]], decoder: Decoder, max_running: int) -> Iterator[T]:
    """Yield the results of all coroutines as they come; at most `max_running` run at the same time, started in order.

    A coroutine is a generator. It yields None while it waits for its request, `Until` to wait for a time, and results.
    Running coroutines are closed when this generator is closed, or when one of them fails.
    """
    not_started = iter(coroutines)
    running: list[Coroutine[T]] = []
    end: Any = object()
    try:
        while True:
            running += islice(not_started, max(0, max_running - len(running)))
            if not running:
                return

            has_progress = False
            wake_times: list[float] = []
            for coroutine in list(running):
                result = next(coroutine, end)
                if isinstance(result, Until):
                    wake_times.append(result.moment)
                    continue

                has_progress |= result is not None
                if result is end:
                    running.remove(coroutine)
                elif result is not None:
                    yield result

            if not has_progress:
                decoder.turn(min(wake_times, default=None))
    finally:
        for coroutine in running:
            coroutine.close()
