"""What the parts of a request may ask of each other: its target, and the clock that they share.

It knows no tensors, so that strategies can be read, tested and simulated without torch.
"""
from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Generator, List, NamedTuple, Protocol, Sequence, Union

if TYPE_CHECKING:
    from model.drafts.draft import Reading
    from model.sample import LogprobRequest


class Waiting:
    """What a strategy yields while it waits for its target."""


WAIT = Waiting()

# What a strategy yields: the tokens that it settled, that it waits, or what its draft wants read; for the last it is
# sent what was read.
Progress = Generator[Union[List[int], Waiting, "Reading"], Any, None]


class Clock(Protocol):
    """Where time is read and spent: real, or modelled."""

    def now(self) -> float:
        """Seconds of a clock that never goes back."""

    def sleep_until(self, due: float) -> None:
        """Return once `now()` is `due` or later."""


class RealClock:
    """The machine's monotonic clock, in seconds."""

    def now(self) -> float:
        return time.monotonic()

    def sleep_until(self, due: float) -> None:
        while (left := due - time.monotonic()) > 0:
            time.sleep(left)


REAL = RealClock()


class Terms(NamedTuple):
    """How a request is run.

    `inner`: the draft's features are the inputs of inner layers, which segments must ask the stages for. Without
    `prunes`, stages compute guesses to the end that died on their way, and forget them when they have come back.
    """

    inner: bool = False
    prunes: bool = True
    thrifty: bool = True  # whether only those guesses are sent, and drafted, that pay
    plain: float = 0.0  # seconds of a token by plain decoding, to which a request alone falls back; 0: never
    priority: float = 1.0  # how much its guesses count beside those of others
    logprobs: LogprobRequest | None = None  # which log-probabilities are wanted


USUAL = Terms()


class Target(Protocol):
    """The pipeline, as the strategy of one request sees it."""

    @property
    def depth(self) -> int:
        """How many segments fill the pipeline."""

    @property
    def in_flight(self) -> int:
        """How many segments of this request were sent and have not been verified."""

    @property
    def has_room(self) -> bool:
        """Whether the next segment would find the pipeline not yet full."""

    @property
    def free(self) -> bool:
        """Whether a segment that is sent now would hardly wait for the first stage."""

    def share(self, size: int | None) -> int | None:
        """How many of `size` rows of the next segment this request may fill; None is no bound."""

    @property
    def ready(self) -> bool:
        """Whether a segment has come back, so that `wait` would return at once."""

    def spares(self, promise: float) -> bool:
        """Whether there is time for a level of guesses that promises so many tokens, before the next answer or after.
        """

    def holds(self, promise: float) -> bool:
        """Whether what is to be sent should wait for a level that promises so many tokens, and leave with it."""

    def send(self, nodes: Sequence[int]) -> None:
        """Send these nodes of the tree; does not wait."""

    def wait(self) -> Progress:
        """Yield until something has happened to this request, and note in the tree what it says: a segment came back.

        `yield from` it: the scheduler sees `WAIT` for as long as there is nothing to do, and serves other requests.
        """

    def rest(self) -> Progress:
        """Yield until a segment has come back or, if there is something to send, until the first stage is free."""

    def prune(self) -> None:
        """Tell every stage what has died."""

    def close(self) -> None:
        """End the request: every stage has forgotten it on return."""
