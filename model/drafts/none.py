"""A draft that never guesses."""
from __future__ import annotations

import sys
from typing import Sequence

from config.trees import Growth
from model.drafts.batch import Steps
from model.sample import Sampler
from model.tree import TokenTree


class NoDraft:
    """A draft that never guesses; with it every strategy decodes token by token."""

    inner = False
    drifts = False
    consumed = sys.maxsize
    networks: Sequence[NoDraft] = ()
    held = sys.maxsize

    def another(self) -> NoDraft:
        return self

    def keep(self, length: int) -> None:
        pass

    def copy(self, other: NoDraft, length: int) -> None:
        pass

    def begin(self, sampler: Sampler) -> None:
        pass

    def grow(self, tree: TokenTree, growth: Growth, spares: object = None) -> Steps[bool]:
        yield from ()
        return False

    def refresh(self) -> None:
        pass

    def reset(self) -> None:
        pass

    def unlearn(self) -> None:
        pass
