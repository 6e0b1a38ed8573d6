"""Log-probabilities beside a text: what the target's own distribution says of each token, where a request wants it.

It is that of the model itself, before temperature, top-k and top-p, so it is the same whichever method decodes.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping, NamedTuple, Sequence

import torch
from torch import Tensor

from model.tree import TokenTree


class Logprob(NamedTuple):
    """A token, its log-probability, and the likeliest tokens in its place with theirs, the likeliest first."""

    token: int
    logprob: float
    likeliest: list[tuple[int, float]]


def logprobs(logits_TV: Tensor, tokens: Sequence[int], likeliest: int) -> list[Logprob]:
    """What each row says of one token and of so many likeliest ones, in float32 or finer."""
    exact = torch.promote_types(logits_TV.dtype, torch.float32)
    said_TV = logits_TV.log_softmax(-1, dtype=exact)
    token_T = torch.tensor(tokens, device=said_TV.device)
    chosen: list[float] = said_TV.gather(1, token_T[:, None])[:, 0].tolist()
    best = said_TV.topk(min(likeliest, said_TV.shape[-1]), -1)
    pairs = [list(zip(*row)) for row in zip(best.indices.tolist(), best.values.tolist())]
    return [Logprob(*row) for row in zip(tokens, chosen, pairs)]


@dataclass(frozen=True)
class LogprobRequest:
    """The log-probabilities that a request wants: of how many `likeliest` tokens beside each one of the answer.

    It wants the same of the tokens of the prompt behind its first `echoed` nodes.
    """

    likeliest: int
    echoed: int = 0

    def echoes(self, tree: TokenTree, node: int) -> bool:
        """Whether the token of the prompt behind a node is wanted."""
        return node in tree.nodes and tree.nodes[node].pos < self.echoed

    def keep(self, tree: TokenTree, logits: Mapping[int, Tensor], said: Mapping[int, int]) -> None:
        """Keep in the tree the log-probabilities of the tokens that are `said` after nodes, and of the prompt's."""
        after = dict(said)
        for node in logits:
            if self.echoes(tree, node):
                following = tree.trunk[tree.nodes[node].pos + 1]
                after[node] = tree.nodes[following].token
        if after:
            logits_TV = torch.stack([logits[node] for node in after])
            found = logprobs(logits_TV, list(after.values()), self.likeliest)
            for node, logprob in zip(after, found):
                tree.nodes[node].logprob = logprob
