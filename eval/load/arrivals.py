"""Serve requests that arrive at given times, or a constant number of them at once, and compute their latencies.

This module knows nothing about methods, files or tables. All seconds are those of the pipeline's clock.
"""
from __future__ import annotations

from contextlib import closing
from statistics import median
from typing import Hashable, Iterator, NamedTuple, Sequence

import numpy as np

from eval.metrics import quantile
from pipeline.decode import Coroutine, Decoder, Request, Until, concurrent

TAIL = 0.95


class Served(NamedTuple):
    """The answer to a request; times are in seconds from the start."""

    number: int  # of the request
    arrived: float
    first: float  # time at which its first token was settled
    ended: float  # time at which its last token was settled
    tokens: int
    text: Hashable  # the token ids


class Figures(NamedTuple):
    """The results of a load: seconds, and tokens per second of all requests together."""

    latency: float  # median
    latency_p95: float
    ttft: float  # to the first token, median
    ttft_p95: float
    tokens_per_second: float


def poisson(rate: float, count: int, seed: int) -> list[float]:
    """Return the times `[count]` of random arrivals, on average `rate` per second."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, count)
    return [float(moment) for moment in gaps.cumsum()]


def serve(decoder: Decoder, asked: Sequence[Request], places: int,
          moments: Sequence[float] = ()) -> list[Served]:
    """Serve requests, at most `places` at once, and return their answers in the order of their numbers.

    They arrive at these times; without a free place they wait in their order. If `moments` is empty, the next request
    arrives when one ends.
    """
    decoder.max_running = places
    clock = decoder.ring.clock
    start = clock.now()
    arrivals: Iterator[float] = iter(clock.now, None)  # without moments: the time at which a request may begin
    if moments:
        arrivals = (start + moment for moment in moments)
    due = zip(range(len(asked)), asked, arrivals)
    clients = (_client(decoder, start, *one) for one in due)
    return sorted(concurrent(clients, decoder, len(asked) if moments else places))


def _client(decoder: Decoder, start: float, number: int,
            request: Request, arrival: float) -> Coroutine[Served]:
    """Wait for the arrival of a request, and serve it."""
    clock = decoder.ring.clock
    while clock.now() < arrival:
        yield Until(arrival)
    settled: list[float] = []
    answer, stream = decoder.submit(request, waits=False)
    with closing(stream):  # type: ignore[type-var]
        for new in stream:
            if new:
                settled.append(clock.now() - start)
            yield None
    text = tuple(answer.token_ids)
    yield Served(number, arrival - start, settled[0], settled[-1], len(text), text)


def figures(served: Sequence[Served], scale: float = 1.0) -> Figures:
    """Return the figures of a load, from first arrival to last token; `scale` seconds are one modelled second."""
    latencies = [(each.ended - each.arrived) / scale for each in served]
    waits = [(each.first - each.arrived) / scale for each in served]
    seconds = max(each.ended for each in served) - min(each.arrived for each in served)
    speed = sum(each.tokens for each in served) / seconds * scale
    return Figures(median(latencies), quantile(latencies, TAIL),
                   median(waits), quantile(waits, TAIL), speed)


def unequal(served: Sequence[Served], reference: dict[int, Hashable]) -> int:
    """Return how many texts differ from those of `reference`, and add the texts that it lacks."""
    return sum(reference.setdefault(each.number, each.text) != each.text for each in served)
