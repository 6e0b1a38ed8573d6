"""What the parts of a request may ask of each other: its target, its draft, and the clock that they share.

It knows no tensors, so that strategies can be read, tested and simulated without torch.
"""
from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Callable, Generator, List, NamedTuple, Protocol, Sequence, Union

from config.run_config import Growth
from model.tree import TokenTree

if TYPE_CHECKING:
    from model.drafts.batch import Reading, Steps
    from model.logprobs import LogprobRequest
    from model.sample import Sampler


class Waiting:
    """What a strategy yields while it waits for its target."""


WAIT = Waiting()

# What a strategy yields: the tokens that it settled, that it waits, or what its draft wants read; for the last it is
# sent what was read.
Progress = Generator[Union[List[int], Waiting, "Reading"], Any, None]

Spares = Callable[[float], bool]  # whether there is time for a level that promises so many tokens


def always(promise: float) -> bool:
    """There is time for any level."""
    return True


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
    priority: float = 1.0  # how much its guesses count beside those of others
    logprobs: LogprobRequest | None = None  # which log-probabilities are wanted


USUAL = Terms()


class Draft(Protocol):
    """Who guesses, for one request at a time; `another` guesses for a second one with the same networks."""

    inner: bool  # whether its features are the inputs of inner layers, instead of the target's last hidden states

    @property
    def networks(self) -> Sequence[Draft]:
        """Those of its sources that take time, each as a draft of its own."""

    @property
    def consumed(self) -> int:
        """How many nodes of the text have features that this draft does not need any more."""

    @property
    def held(self) -> int:
        """How many leading tokens of the text it could keep for a request that begins like this one."""

    def another(self) -> Draft:
        """A twin for another request."""

    def keep(self, length: int) -> None:
        """Forget the request, but for what was read of its first `length` tokens, with which the next one begins."""

    def copy(self, other: Any, length: int) -> None:
        """Begin behind the first `length` tokens of the request of a twin."""

    def grow(self, tree: TokenTree, growth: Growth, spares: Spares = always) -> Steps[bool]:
        """Add one level of guesses; False when there is none worth drafting, or none can be drafted yet.

        Who grows wherever the likeliest guess stands asks `spares` first, which hears what the level promises.
        `yield from` it: who runs the strategy lets networks read for several requests at once.
        """

    def begin(self, sampler: Sampler) -> None:
        """A request begins, whose tokens this sampler chooses."""

    def refresh(self) -> None:
        """Begin again at the tip at the next growth."""

    def reset(self) -> None:
        """Forget the request."""

    def unlearn(self) -> None:
        """Forget what earlier requests have taught."""


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
