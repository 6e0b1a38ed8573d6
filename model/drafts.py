"""Who guesses: the protocol of a draft, and the draft that never does.

It knows nothing about pipelines or strategies.
"""
from __future__ import annotations

from typing import Protocol

from config.run_config import Growth
from model.tree import TokenTree


class Draft(Protocol):
    """What a strategy may ask of a draft."""

    def grow(self, tree: TokenTree, growth: Growth) -> bool:
        """Add one level of guesses; False when there is none worth drafting, or none can be drafted yet."""

    def refresh(self) -> None:
        """Begin again at the tip at the next growth."""

    def reset(self) -> None:
        """Forget the request."""


class NoDraft:
    """A draft that never guesses: every strategy with it decodes token by token."""

    def grow(self, tree: TokenTree, growth: Growth) -> bool:
        return False

    def refresh(self) -> None:
        pass

    def reset(self) -> None:
        pass
