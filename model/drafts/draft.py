"""The interface of drafts, the requests of their networks, and the draft that never guesses.

A draft is a generator that yields a `Reading` and is sent the result, a `Read`. So the caller of several drafts can let
a network read for all of them in one pass. torch is not imported, so that strategies can be tested without it.

Shapes: T rows that are read, A of them with logits, D output of a draft's network for a row, V its vocabulary.
"""
from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Callable, Generator, List, NamedTuple, Sequence, Tuple, TypeVar

from config.trees import Growth
from model.tree import TokenTree

if TYPE_CHECKING:
    from torch import Tensor

    from model.sample import Sampler

Result = TypeVar("Result")
Guesses = Sequence[Tuple[int, float]]  # token and probability
WorthDrafting = Callable[[Sequence[float]], int]  # how many guesses to read, by their expected tokens, the most first


class Reading(NamedTuple):
    """Rows that were admitted to a draft's cache; logits are needed for the last `num_logit_rows` of them."""

    draft: Any  # a TreeDraft (model/drafts/network.py)
    token_T: Tensor
    feature_TD: Tensor
    pos_T: Tensor
    num_logit_rows: int


class Read(NamedTuple):
    """The network's output for the rows of a `Reading`, and the logits of the last `num_logit_rows` rows."""

    out_TD: Tensor
    logits_AV: Tensor


Steps = Generator[Any, Any, Result]  # yields a Reading, and is sent a Read
Passes = Callable[[Sequence[Reading]], List[Read]]


def all_of(expected_tokens: Sequence[float]) -> int:
    """Return the number of these guesses: a level reads all of them."""
    return len(expected_tokens)


class Draft:
    """The base class of sources of guesses, for one request at a time; by default, calls are forwarded to `parts`."""

    inner = False  # whether its features are the inputs of inner layers, instead of the target's last hidden states
    drifts = False  # whether its guesses get worse when they are based on many of its own
    parts: Sequence[Any] = ()

    @property
    def networks(self) -> Sequence[Any]:
        """The sources that take time, each as a draft of its own (`Network`, in network.py)."""
        return [network for part in self.parts for network in part.networks]

    @property
    def consumed(self) -> int:
        """The number of leading nodes of the text with features that this draft no longer needs."""
        return min((part.consumed for part in self.parts), default=sys.maxsize)

    @property
    def num_keepable_tokens(self) -> int:
        """The number of leading tokens that it has read, and could keep for a request with the same beginning."""
        return self.consumed

    def catch_up(self, tree: TokenTree) -> Steps[None]:
        """Read the unread text with known features, without guessing."""
        for part in self.parts:
            yield from part.catch_up(tree)

    def another(self) -> Draft:
        """Return a twin for another request."""
        return self

    def begin(self, sampler: Sampler) -> None:
        """Begin a request, with the sampler that chooses its tokens."""
        for part in self.parts:
            part.begin(sampler)

    def keep(self, num_tokens: int) -> None:
        """Forget the request, but keep the state of its first `num_tokens` tokens, with which the next one begins."""
        self.forget()
        for part in self.parts:
            part.keep(num_tokens)

    def copy(self, twin: Any, num_tokens: int) -> None:
        """Begin after the first `num_tokens` tokens of a twin's request."""
        for mine, theirs in zip(self.parts, twin.parts):
            mine.copy(theirs, num_tokens)

    def grow(self, tree: TokenTree, growth: Growth, worth_drafting: WorthDrafting = all_of) -> Steps[bool]:
        """Add one level of guesses; return False if none is worth drafting, or none can be drafted yet.

        Best-first growth first calls `worth_drafting` with the expected tokens of each guess that it may read. Use
        `yield from`, so that the caller of the strategy can let networks read for several requests at once.
        """
        yield from ()
        return False

    def offer_sure(self, tree: TokenTree, growth: Growth) -> bool:
        """Add guesses after the tip that need no network and are rarely rejected; return whether there are any."""
        return False

    def refresh(self) -> None:
        """Begin again at the tip at the next growth."""
        for part in self.parts:
            part.refresh()

    def reset(self) -> None:
        """Forget the request."""
        self.forget()
        for part in self.parts:
            part.reset()

    def forget(self) -> None:
        """Forget the request's own state, but not that of the parts."""

    def reset_learning(self) -> None:
        """Forget everything learned from earlier requests."""


class NoDraft(Draft):
    """A draft that never guesses, so that every strategy decodes token by token."""
