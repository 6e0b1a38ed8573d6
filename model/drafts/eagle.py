"""A draft with a head that reads pairs, such as EAGLE's.

It knows nothing about pipelines. A pair is a token and the feature of the token before it, at the position of that
earlier token (EAGLE, section 4.1). Pairs of settled nodes have the target's features, pairs of guesses the head's
output for the pair before.

Shapes: T rows, D model, V vocabulary.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, ClassVar, NamedTuple

from torch import Tensor

from model.drafts.draft import Read, Steps
from model.drafts.heads import Head
from model.drafts.network import LMHead, TreeDraft
from model.tree import TokenTree

JUDGED_GUESSES = 32  # by which a head is judged
MIN_CORRECT_SHARE = 0.1  # of these guesses, for a head that fits


@dataclass
class Fit:
    """The accuracy of a head's best guess after settled text, over the first `JUDGED_GUESSES` guesses.

    If it is too low, `report` is called once with a sentence: a head of another model, or one that was trained with
    another template, is almost never correct.
    """

    remedy: ClassVar[str] = "take the head of this model, or add draft=suffix"
    name: str
    report: Callable[[str], None]
    num_guesses: int = 0
    num_correct: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether enough guesses were counted to judge the head."""
        return self.num_guesses >= JUDGED_GUESSES

    @property
    def counted(self) -> str:
        """The counts, as part of a sentence."""
        return f"the draft head in {self.name} foresaw {self.num_correct} of the first {self.num_guesses} tokens"

    @property
    def misfit(self) -> str:
        """The problem of the head, as part of a sentence; empty if there is none, or too few guesses were counted."""
        is_good_enough = self.num_correct >= MIN_CORRECT_SHARE * JUDGED_GUESSES
        if is_good_enough or not self.is_complete:
            return ""
        return f"{self.counted}: it was probably trained for another model or another template"

    def count(self, guessed_token: int, settled_token: int) -> None:
        """Compare a guess with the settled token."""
        self.num_guesses += 1
        self.num_correct += guessed_token == settled_token
        if self.num_guesses == JUDGED_GUESSES and self.misfit:
            self.report(f"{self.misfit}, so {self.remedy}")


class FirstGuess(NamedTuple):
    """The head's best guess after settled text."""

    text_index: int  # of the guessed token
    token: int


class Eagle(TreeDraft):
    """A draft that guesses with a head; `lm_head` computes the logits if the head has no LM head of its own."""

    source, lag = "eagle", 1

    def __init__(self, head: Head, lm_head: LMHead, capacity: int, fit: Fit | None = None) -> None:
        self.network = head
        self.lm_head = head.logits or lm_head
        self.fit = fit
        self.inner, self.drifts = bool(head.inner), head.drifts

        num_layers = head.config.layers if self.inner else 1
        super().__init__(head.config.cache(num_layers, capacity, head.like))

    def features(self, tree: TokenTree, fresh: list[int]) -> Tensor:
        feature_TD = super().features(tree, fresh)
        return self.network.join(feature_TD) if self.inner else feature_TD

    def tokens(self, draft_ids: Tensor) -> Tensor:
        shift = self.network.shift
        return draft_ids if shift is None else draft_ids + shift[draft_ids]

    def _begin_behind(self, length: int) -> None:
        super()._begin_behind(length)
        self._first_guess: FirstGuess | None = None

    def _follow(self, tree: TokenTree) -> Steps[Read | None]:
        read = yield from super()._follow(tree)
        if read is not None and self.fit and not self.fit.is_complete:
            self._judge(self.fit, tree, read.logits_AV)
        return read

    def _judge(self, fit: Fit, tree: TokenTree, logits_1V: Tensor) -> None:
        """Compare the last first guess with the text, and remember the best one after the tip."""
        guess = self._first_guess
        if guess is not None and guess.text_index < len(tree.trunk):
            settled_node = tree.trunk[guess.text_index]
            fit.count(guess.token, tree.nodes[settled_node].token)

        best_id = self.tokens(logits_1V.argmax(-1))
        self._first_guess = FirstGuess(len(tree.trunk), int(best_id))
