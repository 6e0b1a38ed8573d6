"""A network's recorded guesses along a text in the place of the network: no model is computed.

The record holds what the network guesses at every place of the text, by how many of its own guesses it stands on there.
A path that stands on the text gets these guesses, so what is right and what is not is as it was. A path beside the text
gets those of its place and depth, too: nothing there is ever right, and only the worth of its guesses counts, by which
they compete with others.

Shapes: T rows, W guesses of a row.
"""
from __future__ import annotations

from itertools import takewhile
from typing import NamedTuple, Sequence, Tuple

import torch
from torch import Tensor

from model.cache import Admitted, TreeCache
from model.drafts.calibration import Guesses
from model.drafts.network import TreeDraft
from model.tree import TokenTree

Listed = Tuple[Sequence[int], Sequence[float]]  # tokens, the likeliest first, and their log-probabilities
Table = Sequence[Sequence[Listed]]  # by place in the text, then by depth


class Network(NamedTuple):
    """What a network is to the code that drafts with it; names as those of `TreeDraft`."""

    source: str
    lag: int
    drifts: bool


class Replayed(TreeDraft):
    """A network that guesses what it guessed along a recorded text; `open` names that of the next request.

    What it makes of a row are two numbers: on how many of its own guesses the row stands, and its position.
    """

    def __init__(self, network: Network, slots: int) -> None:
        self.source, self.lag, self.drifts = network
        super().__init__(TreeCache((0, 1, slots, 1), torch.float64, "cpu"))
        self._prompt = 0
        self._table: Table = []

    def open(self, prompt: int, table: Table) -> None:
        """The next request has so many tokens of prompt, and these guesses along its text."""
        self._prompt, self._table = prompt, table

    def known(self, tree: TokenTree, fresh: list[int]) -> list[int]:
        if self.lag:
            above = {node: tree.nodes[tree.nodes[node].parent] for node in fresh}
            return list(takewhile(lambda node: above[node].hidden is not None, fresh))
        return [] if len(tree.unsent) > 1 else fresh

    def features(self, tree: TokenTree, fresh: list[int]) -> Tensor:
        return torch.full((len(fresh), 2), -1.0, dtype=torch.float64)

    @property
    def network(self) -> object:
        return self

    def read(self, token_T: Tensor, feature_TD: Tensor, pos_T: Tensor, cache: Admitted) -> Tensor:
        depth_T = feature_TD[:, 0] + 1 if self.lag else torch.zeros(len(pos_T))  # a small model looks at tokens alone
        return torch.stack([depth_T.double(), (pos_T + self.lag).double()], -1)

    def logits(self, out_TD: Tensor) -> Tensor:
        return out_TD  # the record is looked up where logits are read

    def guess(self, logits_TV: Tensor, width: int) -> tuple[Tensor, Tensor]:
        listed = self._listed(logits_TV)
        gains = [gains[:width] for _, gains in listed]
        tokens = [tokens[:width] for tokens, _ in listed]
        return torch.tensor(gains, dtype=torch.float64), torch.tensor(tokens)

    def predict(self, logits_TV: Tensor, positions: list[int], width: int) -> list[Guesses]:
        chances = [(tokens[:width], torch.tensor(gains[:width]).exp().tolist())
                   for tokens, gains in self._listed(logits_TV)]
        return [list(zip(tokens, chance)) for tokens, chance in chances]

    def _listed(self, out_TD: Tensor) -> list[Listed]:
        """The recorded guesses behind each row; those at the end of the record for places and depths beyond it."""
        found = []
        for depth, position in out_TD.int().tolist():
            place = min(position + 1 - self._prompt, len(self._table) - 1)
            depths = self._table[max(0, place)]
            found.append(depths[min(depth, len(depths) - 1)])
        return found
