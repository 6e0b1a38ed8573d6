"""The sampler: which token follows, given the target's logits.

It knows nothing about trees or strategies. The noise is keyed by (seed, position), so that the token at a position
does not depend on who asks, when, or how often: with one seed every strategy writes one text.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Sequence

import numpy as np
import torch
from torch import Tensor


@lru_cache(maxsize=64)  # the positions of the guesses in flight come again and again
def gumbel(seed: int, position: int, size: int) -> Tensor:
    """Gumbel noise `[size]` in float64 for one position: a counter-based stream with (seed, position) as its key."""
    stream = np.random.Generator(np.random.Philox(key=[seed, position]))
    return torch.from_numpy(-np.log(stream.standard_exponential(size)))


def warp(logits_TV: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Temperature, then top-k, then top-p, as Hugging Face's processors do, in that order; 0 and 1 switch off."""
    logits_TV = logits_TV / temperature
    if 0 < top_k < logits_TV.shape[-1]:
        weakest = logits_TV.topk(top_k, -1).values[:, -1:]
        logits_TV = logits_TV.masked_fill(logits_TV < weakest, float("-inf"))
    if top_p < 1.0:
        ascending, order = logits_TV.sort(-1)
        outside = ascending.softmax(-1).cumsum(-1) <= 1.0 - top_p
        outside[:, -1] = False  # the likeliest token always stays
        logits_TV = logits_TV.masked_fill(outside.scatter(1, order, outside), float("-inf"))
    return logits_TV


@dataclass(frozen=True)
class Sampler:
    """Argmax at temperature 0; above it an exact sample by the Gumbel-max rule.

    `seed` is a whole number from 0 to 2**64 - 1.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __call__(self, logits_TV: Tensor, positions: Sequence[int]) -> list[int]:
        """The tokens at `positions`, which the rows predict; one fetch from the device for all rows."""
        if self.temperature == 0.0:
            return logits_TV.max(-1).indices.tolist()  # three times as fast as argmax on a CPU
        noise = torch.stack([gumbel(self.seed, position, logits_TV.shape[-1]) for position in positions])
        warped = warp(logits_TV.double(), self.temperature, self.top_k, self.top_p)
        return (warped + noise.to(warped.device)).argmax(-1).tolist()
