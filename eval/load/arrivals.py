"""Serve requests that arrive at given times, or a constant number of them at once, and compute their latencies.

This module knows nothing about methods, files or tables. All seconds are those of the pipeline's clock.
"""
from __future__ import annotations

from contextlib import closing
from statistics import median
from typing import Hashable, Iterator, NamedTuple, Sequence

import numpy as np

from eval.metrics import quantile
from pipeline.answers import Request
from pipeline.concurrent import Coroutine, Until, concurrent
from pipeline.decode import Decoder

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


def poisson(rate: float, num_arrivals: int, seed: int) -> list[float]:
    """Return the times `[num_arrivals]` of random arrivals, on average `rate` per second."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, num_arrivals)
    return [float(moment) for moment in gaps.cumsum()]


def serve(decoder: Decoder, requests: Sequence[Request], max_running: int,
          moments: Sequence[float] = ()) -> list[Served]:
    """Serve requests, at most `max_running` at once, and return their answers in the order of their numbers.

    They arrive at these times, in seconds from the start; while `max_running` others run, they wait in their order. If
    `moments` is empty, the next request arrives when one ends.
    """
    decoder.max_running = max_running
    clock = decoder.ring.clock
    start_time = clock.now()

    arrival_times: Iterator[float] = iter(clock.now, None)  # without moments: the time at which a request may begin
    num_clients = max_running
    if moments:
        arrival_times = (start_time + moment for moment in moments)
        num_clients = len(requests)

    arrivals = zip(range(len(requests)), requests, arrival_times)
    clients = (_client(decoder, start_time, *arrival) for arrival in arrivals)
    return sorted(concurrent(clients, decoder, num_clients))


def _client(decoder: Decoder, start_time: float, number: int,
            request: Request, arrival_time: float) -> Coroutine[Served]:
    """Wait for the arrival of a request, and serve it."""
    clock = decoder.ring.clock
    while clock.now() < arrival_time:
        yield Until(arrival_time)

    settled_at: list[float] = []
    answer, stream = decoder.submit(request, waits=False)
    with closing(stream):  # type: ignore[type-var]
        for new_tokens in stream:
            if new_tokens:
                settled_at.append(clock.now() - start_time)
            yield None

    text = tuple(answer.token_ids)
    yield Served(number, arrival_time - start_time, settled_at[0], settled_at[-1], len(text), text)


def figures(served: Sequence[Served], scale: float = 1.0) -> Figures:
    """Return the figures of a load, from first arrival to last token; `scale` seconds are one modelled second."""
    latencies = [(answer.ended - answer.arrived) / scale for answer in served]
    first_token_times = [(answer.first - answer.arrived) / scale for answer in served]

    first_arrival = min(answer.arrived for answer in served)
    last_end = max(answer.ended for answer in served)
    num_tokens = sum(answer.tokens for answer in served)

    return Figures(
        latency=median(latencies),
        latency_p95=quantile(latencies, TAIL),
        ttft=median(first_token_times),
        ttft_p95=quantile(first_token_times, TAIL),
        tokens_per_second=num_tokens / (last_end - first_arrival) * scale)


def unequal(served: Sequence[Served], reference: dict[int, Hashable]) -> int:
    """Return how many texts differ from those of `reference`, and add the texts that it lacks."""
    return sum(reference.setdefault(answer.number, answer.text) != answer.text for answer in served)
