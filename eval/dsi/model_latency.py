"""How long a model takes: for its first token, for each later one, and for a pass over so many tokens at once.

It knows nothing about drafts. A time ends when the chosen tokens are on the CPU, which waits for the device. What is
compared is measured by turns, and the first turn warms up and does not count.
"""
from __future__ import annotations

import time
from itertools import islice
from typing import Iterator, NamedTuple, Sequence

import numpy as np

from model.sample import Sampler
from model.whole import Whole


class Spread(NamedTuple):
    """The median of some times, their quartiles, and how many they are."""

    median: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.median:9.3f}  [{self.low:.3f}, {self.high:.3f}]  n={self.n}"


def spread(seconds: Sequence[float]) -> Spread:
    """What is told of times in seconds: milliseconds."""
    low, median, high = 1e3 * np.percentile(seconds, [25, 50, 75])
    return Spread(float(median), float(low), float(high), len(seconds))


class Pace(NamedTuple):
    """The time to the first token of an answer (TTFT), and that of each later one (TPOT), in milliseconds."""

    first: Spread
    later: Spread


def turns(repeats: int) -> Iterator[bool]:
    """So many turns that count, behind one that does not."""
    yield False
    for _ in range(repeats):
        yield True


def paces(models: Sequence[Whole], prompts: Sequence[Sequence[int]], new: int,
          sampler: Sampler, repeats: int) -> list[Pace]:
    """The pace of each model with answers of `new` tokens, at least 2; they go on behind an end token, to be as long.

    TPOT is one figure per answer: the time behind its first token, by the number of tokens that follow.
    """
    first: list[list[float]] = [[] for _ in models]
    later: list[list[float]] = [[] for _ in models]
    for counts in turns(repeats):
        for prompt in prompts:
            for model, firsts, laters in zip(models, first, later):
                begun, rest = _answer(model, prompt, new, sampler)
                if counts:
                    firsts.append(begun)
                    laters.append(rest / (new - 1))
    return list(map(Pace, map(spread, first), map(spread, later)))


def _answer(model: Whole, prompt: Sequence[int], new: int,
            sampler: Sampler) -> tuple[float, float]:
    """The seconds to the first token of an answer, and from there to the last one."""
    words = model.words(prompt, model.cache(len(prompt) + new), sampler)
    start = time.perf_counter()
    next(words)
    begun = time.perf_counter()
    for _ in islice(words, new - 1):
        pass
    return begun - start, time.perf_counter() - begun


def passes(model: Whole, rows: Sequence[int], context: int, sampler: Sampler,
           repeats: int) -> dict[int, Spread]:
    """T(m): the milliseconds of a pass over m tokens behind `context` others, LM head and choice of each included."""
    cache = model.cache(context + max(rows))
    if context:
        model.logits([0] * context, cache, 1)
    took: dict[int, list[float]] = {size: [] for size in rows}
    for counts in turns(repeats):
        for size in rows:
            start = time.perf_counter()
            logits_TV = model.logits([0] * size, cache, size, text=False)
            sampler(logits_TV, range(context, context + size))
            seconds = time.perf_counter() - start
            cache.drop()
            if counts:
                took[size].append(seconds)
    return {size: spread(seconds) for size, seconds in took.items()}
