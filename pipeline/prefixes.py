"""Prefixes: the texts that the stages hold, with which a request may begin that has the same first tokens.

It knows nothing about how a cache is taken over. Texts of requests that are over lie in places that nobody else needs
now; the one that was used least recently makes room.
"""
from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Iterable, Sequence

from pipeline.interfaces import Draft

LEAST = 16  # tokens: shorter beginnings are read anew


@dataclass
class Held:
    """The beginning of a text that every stage holds, by the number of its request; `draft` has read it, too."""

    request: int
    nodes: Sequence[int]
    tokens: Sequence[int]
    draft: Draft
    over: bool  # whether its request is over, so that the text can be taken over; else it is copied

    def shared(self, tokens: Sequence[int]) -> int:
        """With how many of its tokens a text could begin.

        One token that both have is read anew, since the target has to say what follows it, and the feature that belongs
        to it is gone.
        """
        alike = takewhile(lambda pair: pair[0] == pair[1], zip(self.tokens, tokens))
        common = sum(1 for _ in alike)
        return min(common - 1, len(self.nodes), self.draft.held)


class Prefixes:
    """The texts of requests that are over, that which was used least recently first."""

    def __init__(self) -> None:
        self._over: list[Held] = []

    def __len__(self) -> int:
        return len(self._over)

    def add(self, held: Held) -> None:
        """Hold a text."""
        self._over.append(held)

    def take(self, held: Held) -> None:
        """A text is another request's from now on."""
        self._over.remove(held)

    def oldest(self) -> Held:
        """The text that makes room."""
        return self._over.pop(0)

    def longest(self, tokens: Sequence[int], running: Iterable[Held]) -> tuple[Held | None, int]:
        """The text that shares most tokens with this one, also among those of requests under way, and how many."""
        everybody = [*running, *self._over]
        best = max(everybody, key=lambda held: held.shared(tokens), default=None)
        length = best.shared(tokens) if best else 0
        return (best, length) if length >= LEAST else (None, 0)
