"""The sampler: which token follows, given the target's logits, and how likely the target held it.

It knows nothing about trees or strategies. The noise is keyed by (seed, position), so that the token at a position
does not depend on who asks, when, or how often: with one seed every strategy writes one text.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Sequence

import numpy as np
import torch
from torch import Tensor

NONE = -1  # in place of a token that nothing can be said of
NOISE, JUDGING, DRAWING = 0, 1, 2  # what a stream of chance is for


def not_finite(whose: str, dtype: torch.dtype, otherwise: str) -> ValueError:
    """The error for logits with NaN or infinity, with the likely cause: `otherwise` for all types but float16."""
    cause = otherwise if dtype != torch.float16 else (
        "float16 ends at 65504, which some models exceed: add dtype=bfloat16, or dtype=float32 where that is unknown")
    return ValueError(f"the {whose}'s logits are not finite (NaN or infinity); {cause}")


def damaged(dtype: torch.dtype) -> ValueError:
    """The error for logits of the target that are not finite."""
    return not_finite("model", dtype, "its weights or its config.json are damaged: compare the split with its hashes "
                      "(python split_and_save_models.py --check FOLDER), or split it again")


def stream(seed: int, position: int, purpose: int,
           who: int = 0) -> np.random.Generator:
    """Chance keyed by (seed, position); its counter has purpose and who, so that no two streams share numbers."""
    key = np.array([seed, position], dtype=np.uint64)  # of a list with 2**63 or more numpy makes floats
    counter = np.array([0, 0, who, purpose], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(counter=counter, key=key))


@lru_cache(maxsize=64)  # the positions of the guesses in flight come again and again
def gumbel(seed: int, position: int, size: int) -> Tensor:
    """Gumbel noise `[size]` in float64 for one position."""
    exponential = stream(seed, position, NOISE).standard_exponential(size)
    return torch.from_numpy(-np.log(exponential))


def warp(logits_TV: Tensor, temperature: float, top_k: int, top_p: float,
         min_p: float = 0.0) -> Tensor:
    """Temperature, then top-k, top-p and min-p, as Hugging Face's processors do, in that order; 0 and 1 switch off."""
    logits_TV = logits_TV / temperature
    if 0 < top_k < logits_TV.shape[-1]:
        weakest = logits_TV.topk(top_k, -1).values[:, -1:]
        logits_TV = logits_TV.masked_fill(logits_TV < weakest, float("-inf"))
    if top_p < 1.0:
        ascending, order = logits_TV.sort(-1)
        outside = ascending.softmax(-1).cumsum(-1) <= 1.0 - top_p
        outside[:, -1] = False  # the likeliest token always stays
        logits_TV = logits_TV.masked_fill(outside.scatter(1, order, outside), float("-inf"))
    if min_p > 0.0:
        chance_TV = logits_TV.softmax(-1)
        least = min_p * chance_TV.max(-1, keepdim=True).values
        logits_TV = logits_TV.masked_fill(chance_TV < least, float("-inf"))
    return logits_TV


class Penalties(NamedTuple):
    """Changes of logits by the tokens of a path (model/law.py) before temperature, in this order, as vLLM's."""

    bias: tuple[tuple[int, float], ...] = ()  # pairs of a token and what is added to its logit
    repetition: float = 1.0  # divides logits above 0 of tokens of prompt and answer, multiplies those below
    frequency: float = 0.0  # is taken from the logit of a token of the answer for each time that it occurs there …
    presence: float = 0.0  # … and once

    @property
    def counts(self) -> bool:
        """Whether it matters which tokens a path has."""
        return self != Penalties(self.bias)


@dataclass(frozen=True)
class Sampler:
    """Argmax at temperature 0; above it an exact sample by the Gumbel-max rule.

    `seed` is a whole number from 0 to 2**64 - 1. `rule` names who judges guesses above temperature 0: `match` is the
    sampler itself, the others are in model/rules.py. `penalties` are no part of what is done here: who asks the
    sampler has changed the logits by them (model/law.py).
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    rule: str = "match"
    min_p: float = 0.0
    penalties: Penalties = Penalties()

    @property
    def matches(self) -> bool:
        """Whether a guess is right if it is the token that this sampler chooses; at temperature 0 by every rule."""
        return self.rule == "match" or not self.temperature

    def warped(self, logits_TV: Tensor) -> Tensor:
        """The logits of the distribution that is sampled from, in float64; at temperature 0 those of the model."""
        if not self.temperature:
            return logits_TV
        return warp(logits_TV.double(), self.temperature, self.top_k, self.top_p, self.min_p)

    def noise(self, positions: Sequence[int], token_V: Tensor) -> Tensor:
        """The noise `[T, V]` of these tokens at each position, by which one of them wins; 0 where there is none."""
        if not self.temperature or self.rule != "match":
            return torch.zeros(len(positions), 1, device=token_V.device)
        size = int(token_V.max()) + 1
        noise_TV = torch.stack([gumbel(self.seed, position, size) for position in positions])
        return noise_TV.to(token_V.device)[:, token_V]

    def __call__(self, logits_TV: Tensor, positions: Sequence[int]) -> list[int]:
        """The tokens at `positions`, which the rows predict; one fetch from the device for all rows."""
        worth_TV = logits_TV
        if self.temperature > 0.0:
            vocab = logits_TV.shape[-1]
            noise_TV = torch.stack([gumbel(self.seed, position, vocab) for position in positions])
            warped_TV = self.warped(logits_TV)
            worth_TV = warped_TV + noise_TV.to(warped_TV.device)
        best = worth_TV.max(-1)  # three times as fast as argmax on a CPU
        # NaN counts as the largest, and minus infinity, which rules a token out, is the best only where all are
        broken_T = ~best.values.isfinite()
        tokens: list[int] = best.indices.masked_fill(broken_T, NONE).tolist()
        if NONE in tokens:
            raise damaged(logits_TV.dtype)
        return tokens


# --- log-probabilities beside a text ----------------------------------------------------------------------------------

class Logprob(NamedTuple):
    """A token, its log-probability, and the likeliest tokens in its place with theirs, the likeliest first."""

    token: int
    logprob: float
    likeliest: list[tuple[int, float]]


def logprobs(logits_TV: Tensor, tokens: Sequence[int], likeliest: int) -> list[Logprob]:
    """What each row says of a token and the likeliest ones, in float32 or finer, before temperature and top-p."""
    exact = torch.promote_types(logits_TV.dtype, torch.float32)
    said_TV = logits_TV.log_softmax(-1, dtype=exact)
    token_T = torch.tensor(tokens, device=said_TV.device)
    chosen: list[float] = said_TV.gather(1, token_T[:, None])[:, 0].tolist()
    best = said_TV.topk(min(likeliest, said_TV.shape[-1]), -1)
    rows = zip(best.indices.tolist(), best.values.tolist())
    pairs = [list(zip(*row)) for row in rows]
    return [Logprob(*row) for row in zip(tokens, chosen, pairs)]


class LogprobRequest(NamedTuple):
    """How many `likeliest` tokens a request wants beside each; of the prompt, behind its first `echoed` nodes."""

    likeliest: int
    echoed: int = 0
