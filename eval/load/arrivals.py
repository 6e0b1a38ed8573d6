"""Load: requests that arrive at given moments, or so many at once, and what they take.

It knows nothing about methods, files or tables. All seconds are those of the pipeline's clock.
"""
from __future__ import annotations

from contextlib import closing
from statistics import median
from typing import Hashable, Iterator, NamedTuple, Sequence

import numpy as np

from eval.metrics import NAN, quantile
from pipeline.decode import Coroutine, Decoder, Request, Until, concurrent

TAIL = 0.95


class Served(NamedTuple):
    """An answer to the number-th request; moments are in seconds from the start."""

    number: int
    arrived: float
    first: float  # when its first token had settled
    ended: float  # when its last one had
    tokens: int
    text: Hashable  # or the token ids
    error: str = ""  # what went wrong


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


def serve(decoder: Decoder, asked: Sequence[Request], places: int,
          moments: Sequence[float] = ()) -> list[Served]:
    """Serve requests, at most `places` of them at once.

    They arrive at these moments, and those that find no place wait in their order. Without any moments the next request
    comes when one ends.
    """
    decoder.places = places
    clock = decoder.ring.clock
    start = clock.now()
    arrivals: Iterator[float] = iter(clock.now, None)  # a request is made when it may begin
    if moments:
        arrivals = (start + moment for moment in moments)
    due = zip(range(len(asked)), asked, arrivals)
    clients = (_client(decoder, start, *one) for one in due)
    return sorted(concurrent(clients, decoder, len(asked) if moments else places))


def _client(decoder: Decoder, start: float, number: int,
            request: Request, arrival: float) -> Coroutine[Served]:
    """Serve one request from its arrival on."""
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
    """The figures of a load, from the first arrival to the last token; `scale` seconds are a modelled one."""
    if not served:
        return Figures(NAN, NAN, NAN, NAN, NAN)
    latencies = [(each.ended - each.arrived) / scale for each in served]
    waits = [(each.first - each.arrived) / scale for each in served]
    seconds = max(each.ended for each in served) - min(each.arrived for each in served)
    speed = sum(each.tokens for each in served) / seconds * scale
    return Figures(median(latencies), quantile(latencies, TAIL),
                   median(waits), quantile(waits, TAIL), speed)


def unequal(served: Sequence[Served], reference: dict[int, Hashable]) -> int:
    """How many texts differ from those of the reference, which learns the texts that it does not have."""
    return sum(reference.setdefault(each.number, each.text) != each.text for each in served)
