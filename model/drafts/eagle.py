"""A draft with a head that reads pairs, such as EAGLE's.

It knows nothing about pipelines. A pair is a token and the feature of the token before it, at the position of that
earlier token (EAGLE, section 4.1). Pairs of settled nodes have the target's features, pairs of guesses the head's
output for the pair before.

Shapes: T rows, D model, V vocabulary.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, ClassVar, Sequence

from torch import Tensor

from model.drafts.draft import Read, Steps
from model.drafts.heads import Head
from model.drafts.network import LMHead, TreeDraft
from model.tree import TokenTree

TRIED, LEAST = 32, 0.1  # guesses by which a head is judged, and the least acceptable share of correct ones


@dataclass
class Fit:
    """The accuracy of a head's best guess after settled text, over the first `TRIED` guesses.

    If it is too low, `report` is called once with a sentence: a head of another model, or one that was trained with
    another template, is almost never correct.
    """

    remedy: ClassVar[str] = "take the head of this model, or add draft=suffix"
    name: str
    report: Callable[[str], None]
    tried: int = 0
    right: int = 0

    @property
    def counted(self) -> str:
        """The counts, as part of a sentence."""
        return f"the draft head in {self.name} foresaw {self.right} of the first {self.tried} tokens"

    @property
    def misfit(self) -> str:
        """The problem of the head, as part of a sentence; empty if there is none, or too few guesses were counted."""
        if self.tried < TRIED or self.right >= LEAST * TRIED:
            return ""
        return f"{self.counted}: it was probably trained for another model or another template"

    def count(self, guessed: int, became: int) -> None:
        """Compare a guess with the settled token."""
        self.tried += 1
        self.right += guessed == became
        if self.tried == TRIED and self.misfit:
            self.report(f"{self.misfit}, so {self.remedy}")


class Eagle(TreeDraft):
    """A draft that guesses with a head; `lm_head` computes the logits if the head has no LM head of its own."""

    source, lag = "eagle", 1

    def __init__(self, head: Head, lm_head: LMHead, capacity: int, fit: Fit | None = None) -> None:
        self.network, self.lm_head, self.fit = head, head.logits or lm_head, fit
        self.inner, self.drifts = bool(head.inner), head.drifts
        layers = head.config.layers if self.inner else 1
        super().__init__(head.config.cache(layers, capacity, head.like))

    def features(self, tree: TokenTree, fresh: list[int]) -> Tensor:
        feature_TD = super().features(tree, fresh)
        return self.network.join(feature_TD) if self.inner else feature_TD

    def _begin_behind(self, length: int) -> None:
        super()._begin_behind(length)
        self._foreseen: tuple[int, int] | None = None  # an index in the text, and the token that was guessed for it

    def _follow(self, tree: TokenTree,
                ahead: Sequence[int] = ()) -> Steps[Read | None]:
        read = yield from super()._follow(tree, ahead)
        if self.fit and self.fit.tried < TRIED and read is not None:
            place = len(tree.trunk)
            if self._foreseen and self._foreseen[0] < place:
                known, guessed = self._foreseen
                self.fit.count(guessed, tree.nodes[tree.trunk[known]].token)
            best = self.tokens(read.logits_AV[:1].argmax(-1))
            self._foreseen = place, int(best)
        return read

    def tokens(self, place: Tensor) -> Tensor:
        shift = self.network.shift
        return place if shift is None else place + shift[place]
