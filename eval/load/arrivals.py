"""Load: requests that arrive at given moments, or so many at once, and what they take.

It knows nothing about methods, files or tables. All seconds are those of the pipeline's clock.
"""
from __future__ import annotations

from contextlib import closing
from statistics import median
from typing import NamedTuple, Sequence

import numpy as np

from eval.metrics import quantile
from pipeline.decode import Decoder, Job, Request, Until, concurrent

TAIL = 0.95


class Served(NamedTuple):
    """A request that was answered, the number-th one; moments are in seconds from the start."""

    number: int
    arrived: float
    first: float  # when its first token had settled
    ended: float  # when its last one had
    tokens: tuple[int, ...]

    @property
    def latency(self) -> float:
        """The seconds from its arrival to its last token."""
        return self.ended - self.arrived

    @property
    def wait(self) -> float:
        """The seconds from its arrival to its first token."""
        return self.first - self.arrived


class Figures(NamedTuple):
    """What a load brought: seconds, and tokens per second of all requests together."""

    latency: float  # median
    latency_p95: float
    ttft: float  # to the first token, median
    ttft_p95: float
    tokens_per_second: float


def poisson(rate: float, count: int, seed: int) -> list[float]:
    """The moments `[count]` of arrivals at random, `rate` of them per second on average."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, count)
    return [float(moment) for moment in gaps.cumsum()]


def arriving(decoder: Decoder, asked: Sequence[Request], moments: Sequence[float], places: int) -> list[Served]:
    """Serve requests that arrive at these moments, at most `places` of them at once; the others wait in their order."""
    decoder.scheduler.places = places
    start = decoder.ring.clock.now()
    jobs = (_job(decoder, request, number, start, start + moment)
            for number, (request, moment) in enumerate(zip(asked, moments)))
    return sorted(concurrent(jobs, decoder, len(asked)))


def at_once(decoder: Decoder, asked: Sequence[Request], places: int) -> list[Served]:
    """Serve requests of which `places` are under way at once, until none is left: the next one comes when one ends."""
    decoder.scheduler.places = places
    start = decoder.ring.clock.now()
    jobs = (_job(decoder, request, number, start) for number, request in enumerate(asked))
    return sorted(concurrent(jobs, decoder, places))


def _job(decoder: Decoder, request: Request, number: int, start: float, arrival: float = 0.0) -> Job[Served]:
    """Serve one request from its arrival on, or at once if that has passed."""
    clock = decoder.ring.clock
    while clock.now() < arrival:
        yield Until(arrival)
    arrived = arrival or clock.now()
    settled: list[float] = []
    answer, stream = decoder.submit(request, waits=False)
    with closing(stream):  # type: ignore[type-var]
        for new in stream:
            if new:
                settled.append(clock.now() - start)
            yield None
    yield Served(number, arrived - start, settled[0], settled[-1], tuple(answer.token_ids))


def figures(served: Sequence[Served], scale: float = 1.0) -> Figures:
    """The figures of a load, which lasts from the first arrival to the last token; `scale` seconds are a modelled one.
    """
    latencies = [each.latency / scale for each in served]
    waits = [each.wait / scale for each in served]
    seconds = max(each.ended for each in served) - min(each.arrived for each in served)
    made = sum(len(each.tokens) for each in served)
    return Figures(median(latencies), quantile(latencies, TAIL), median(waits), quantile(waits, TAIL),
                   made / seconds * scale)


def unequal(served: Sequence[Served], reference: dict[int, tuple[int, ...]]) -> int:
    """How many texts differ from those of the reference, which learns the texts that it does not have."""
    return sum(reference.setdefault(each.number, each.tokens) != each.tokens for each in served)
