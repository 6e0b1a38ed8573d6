"""What a draft may be asked for, what its networks ask to read, and the draft that never guesses.

A draft asks by yielding a `Reading`, and is sent what was `Read`: so who runs several drafts lets a network read for
all of them at once. It needs no torch, so that strategies can be read, tested and simulated without.

Shapes: T rows that are read, A of them about which is asked, D what a draft makes of a row, V its vocabulary.
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
Pays = Callable[[float], bool]  # whether there is time for a level that promises so many tokens


class Reading(NamedTuple):
    """Rows that were admitted to the cache of a draft, and how many of the last of them logits are wanted of."""

    draft: Any  # a TreeDraft (model/drafts/network.py)
    token_T: Tensor
    feature_TD: Tensor
    pos_T: Tensor
    asked: int


class Read(NamedTuple):
    """What was made of the rows, and the logits of those that were asked about."""

    out_TD: Tensor
    logits_AV: Tensor


Steps = Generator[Any, Any, Result]  # yields a Reading, and is sent what was Read
Passes = Callable[[Sequence[Reading]], List[Read]]


def always(promise: float) -> bool:
    """There is time for any level."""
    return True


class Draft:
    """Who guesses, for one request at a time; it passes on to its `parts`, if any, what it does not do itself."""

    inner = False  # whether its features are the inputs of inner layers, instead of the target's last hidden states
    drifts = False  # whether its guesses get worse where they stand on many of its own
    parts: Sequence[Any] = ()

    @property
    def networks(self) -> Sequence[Any]:
        """Those of its sources that take time, each as a draft of its own (`Network`, in network.py)."""
        return [network for part in self.parts for network in part.networks]

    @property
    def consumed(self) -> int:
        """How many leading nodes of the text have features that this draft does not need any more."""
        return min((part.consumed for part in self.parts), default=sys.maxsize)

    @property
    def held(self) -> int:
        """How many leading tokens of the text it could keep for a request that begins like this one: what was read."""
        return self.consumed

    def catch_up(self, tree: TokenTree) -> Steps[None]:
        """Read what is known of the text and was not read yet, without guessing."""
        for part in self.parts:
            yield from part.catch_up(tree)

    def another(self) -> Draft:
        """A twin for another request."""
        return self

    def begin(self, sampler: Sampler) -> None:
        """A request begins, whose tokens this sampler chooses."""
        for part in self.parts:
            part.begin(sampler)

    def keep(self, length: int) -> None:
        """Forget the request, but for what was read of its first `length` tokens, with which the next one begins."""
        self.forget()
        for part in self.parts:
            part.keep(length)

    def copy(self, other: Any, length: int) -> None:
        """Begin behind the first `length` tokens of the request of a twin."""
        for mine, theirs in zip(self.parts, other.parts):
            mine.copy(theirs, length)

    def grow(self, tree: TokenTree, growth: Growth, pays: Pays = always) -> Steps[bool]:
        """Add one level of guesses; False when there is none worth drafting, or none can be drafted yet.

        Who grows wherever the likeliest guess stands asks `pays` first, which hears what the level promises.
        `yield from` it: who runs the strategy lets networks read for several requests at once.
        """
        yield from ()
        return False

    def offer_sure(self, tree: TokenTree, growth: Growth) -> bool:
        """Add guesses behind the tip that take no network and are seldom wrong; whether there are any."""
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
        """Forget what is known of the request beside what the parts hold."""

    def unlearn(self) -> None:
        """Forget what earlier requests have taught."""


class NoDraft(Draft):
    """A draft that never guesses; with it every strategy decodes token by token."""
