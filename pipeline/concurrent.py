"""Work abreast: several jobs whose requests one decoder answers at once.

A job is a generator that yields nothing (None) where it waits for its request, and results as they come. What it does
beside is no concern of this file.
"""
from __future__ import annotations

from itertools import islice
from typing import Generator, Iterable, Iterator, Optional, TypeVar

from pipeline.decode import Decoder

T = TypeVar("T")
Job = Generator[Optional[T], None, None]


def abreast(jobs: Iterable[Job[T]], decoder: Decoder, places: int) -> Iterator[T]:
    """The results of all jobs as they come; the jobs begin in their order, and at most `places` are under way at once.

    When it is closed, or a job fails, those that are under way are closed.
    """
    left = iter(jobs)
    under_way: list[Job[T]] = []
    try:
        while True:
            new = islice(left, max(0, places - len(under_way)))
            under_way += new
            if not under_way:
                return
            went_on = False
            for job in list(under_way):
                try:
                    result = next(job)
                except StopIteration:
                    under_way.remove(job)
                    went_on = True
                    continue
                if result is not None:
                    went_on = True
                    yield result
            if not went_on:
                decoder.turn()
    finally:
        for job in under_way:
            job.close()
