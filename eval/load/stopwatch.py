"""Rank 0's own time in a turn of the decoder, in which all requests that can go on do so once.

Counted is the time of the processor in this thread, without models (LM head, networks of drafts) and without the
simulated cluster.
"""
from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Any, Callable, Iterable, Iterator
from unittest.mock import patch

from eval.metrics import NAN
from pipeline.decode import Decoder

LINK = ("send", "recv", "rest", "broadcast")
NETWORK = ("guess", "predict")  # what a network does beside the passes


class Stopwatch:
    """The time of the processor that calls take; one inside of another counts once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0
        self._inside = False

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, which is timed."""
        def timed(*args: Any, **options: Any) -> Any:
            if self._inside:
                return call(*args, **options)
            self._inside, begin = True, time.thread_time()
            self.calls += 1
            try:
                return call(*args, **options)
            finally:
                self.seconds += time.thread_time() - begin
                self._inside = False
        return timed

    @contextmanager
    def on(self, places: Iterable[tuple[Any, str]]) -> Iterator[None]:
        """Time these calls, each an attribute of an object or of a class, until the end."""
        with ExitStack() as watched:
            for place, name in places:
                watched.enter_context(patch.object(place, name, self.around(getattr(place, name))))
            yield


@contextmanager
def own_time(decoder: Decoder, counted: bool) -> Iterator[dict[str, float]]:
    """At the end, how many turns there were, and milliseconds of each that were rank 0's own, if they are `counted`."""
    found = {"turns": NAN, "own_ms": NAN}
    if not counted:
        yield found
        return
    ring, models, turns = decoder.ring, Stopwatch(), Stopwatch()
    networks = {type(network) for network in decoder.draft.networks}
    places = [(ring, "lm_head"), (decoder, "passes")]
    places += [*product(ring.links, LINK), *product(networks, NETWORK)]
    with models.on(places), turns.on([(decoder, "turn")]):
        yield found
    own = turns.seconds - models.seconds
    found.update(turns=turns.calls, own_ms=1e3 * own / turns.calls)
