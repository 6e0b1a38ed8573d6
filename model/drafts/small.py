"""A small model that drafts: it reads tokens, and nothing of the target.

Shapes: T rows, D what the model makes of a row, V vocabulary.
"""
from __future__ import annotations

from typing import Callable

from torch import Tensor

from model.cache import Admitted, TreeCache
from model.drafts.batch import Reading
from model.drafts.network import TreeDraft
from model.tree import TokenTree


class ModelDraft(TreeDraft):
    """A draft that guesses with a whole small model of the same vocabulary; it reads tokens alone."""

    source = "model"

    def __init__(self, model: Callable[[Tensor, Tensor, Admitted], Tensor],
                 lm_head: Callable[[Tensor], Tensor], cache: TreeCache) -> None:
        self.model, self.lm_head = model, lm_head
        super().__init__(cache)

    def known(self, tree: TokenTree, fresh: list[int]) -> list[int]:
        """All, once the prompt is on its way: the pipeline shall not wait while its prompt is read here."""
        return [] if len(tree.unsent) > 1 else fresh

    def features(self, tree: TokenTree, fresh: list[int]) -> Tensor:
        return self._out

    def _reading(self, tree: TokenTree, nodes: list[int], feature_TD: Tensor, asked: int) -> Reading:
        """What is to be read, without features."""
        return super()._reading(tree, nodes, feature_TD.new_empty(len(nodes), 0), asked)

    @property
    def network(self) -> object:
        return self.model

    def read(self, token_T: Tensor, feature_TD: Tensor, pos_T: Tensor, cache: Admitted) -> Tensor:
        return self.model(token_T, pos_T, cache)

    def logits(self, out_TD: Tensor) -> Tensor:
        return self.lm_head(out_TD)
