"""The sampler: it chooses the next token from the target's logits, and reports log-probabilities.

It knows nothing about trees or strategies. The noise is keyed by (seed, position), so the token at a position does not
depend on the caller, the time or the number of calls: with one seed, every strategy writes the same text.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Sequence

import numpy as np
import torch
from torch import Tensor

NOISE, JUDGING, DRAWING = 0, 1, 2  # purposes of random streams


def not_finite(model_name: str, dtype: torch.dtype, likely_cause: str) -> ValueError:
    """Return the error for logits with NaN or infinity, with their likely cause, which is another one for float16."""
    cause = likely_cause if dtype != torch.float16 else (
        "float16 ends at 65504, which some models exceed: add dtype=bfloat16, or dtype=float32 if that is unsupported")
    return ValueError(f"the {model_name}'s logits are not finite (NaN or infinity); {cause}")


def damaged(dtype: torch.dtype) -> ValueError:
    """Return the error for logits of the target that are not finite."""
    return not_finite("model", dtype, "its weights or its config.json are damaged: compare the split with its hashes "
                      "(python split_and_save_models.py --check FOLDER), or split it again")


def stream(seed: int, position: int, purpose: int, drafter_number: int = 0) -> np.random.Generator:
    """Return the random stream of these four numbers; no two streams share numbers."""
    key = np.array([seed, position], dtype=np.uint64)  # without dtype, numpy converts 2**63 and more to floats
    counter = np.array([0, 0, drafter_number, purpose], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(counter=counter, key=key))


@lru_cache(maxsize=32)  # the positions of guesses under way recur
def _exponential(seed: int, position: int, size: int) -> np.ndarray:
    return stream(seed, position, NOISE).standard_exponential(size)


def gumbel(seed: int, position: int, size: int, tokens: Any = slice(None)) -> Tensor:
    """Return the Gumbel noise of one position in float64: `[size]`, or that of some tokens."""
    return torch.from_numpy(-np.log(_exponential(seed, position, size)[tokens]))


def warp(logits_TV: Tensor, temperature: float, top_k: int, top_p: float,
         min_p: float = 0.0) -> Tensor:
    """Apply temperature, top-k (0: off), top-p (1: off) and min-p (0: off), in this order as Hugging Face does."""
    logits_TV = logits_TV / temperature

    if 0 < top_k < logits_TV.shape[-1]:
        min_logit = logits_TV.topk(top_k, -1).values[:, -1:]
        logits_TV = logits_TV.masked_fill(logits_TV < min_logit, float("-inf"))

    if top_p < 1.0:
        # only tokens that may be inside are sorted: all below the least probability together have less than 1 - top_p
        probability_TV = logits_TV.softmax(-1)
        is_below_TV = probability_TV < (1.0 - top_p) / logits_TV.shape[-1]
        num_sorted = max(1, int((~is_below_TV).sum(-1).max()))
        token_TK = probability_TV.topk(num_sorted).indices.sort(-1).values

        # likeliest first, equal ones in the order of their numbers
        ascending_TK, order_TK = probability_TV.gather(1, token_TK).sort(stable=True, dim=-1)
        mass_before_TK = ascending_TK.flip(-1).cumsum(-1).roll(1, -1)
        is_outside_TK = mass_before_TK >= top_p
        is_outside_TK[:, 0] = False  # the likeliest token always stays
        token_TK = token_TK.gather(1, order_TK).flip(-1)
        inside_TK = logits_TV.gather(1, token_TK).masked_fill(is_outside_TK, float("-inf"))
        logits_TV = torch.full_like(logits_TV, float("-inf")).scatter(1, token_TK, inside_TK)

    if min_p > 0.0:
        probability_TV = logits_TV.softmax(-1)
        min_probability = min_p * probability_TV.max(-1, keepdim=True).values
        logits_TV = logits_TV.masked_fill(probability_TV < min_probability, float("-inf"))

    return logits_TV


class Penalties(NamedTuple):
    """Changes of logits (model/law.py), applied before temperature in this order, as in vLLM."""

    bias: tuple[tuple[int, float], ...] = ()  # pairs of a token and a number to add to its logit
    repetition: float = 1.0  # divides positive logits of tokens in prompt or answer, multiplies negative ones
    frequency: float = 0.0  # subtracted from the logit of a token for each occurrence in the answer
    presence: float = 0.0  # subtracted once from the logit of a token that occurs in the answer

    @property
    def counts(self) -> bool:
        """Whether the changes depend on the tokens of the path."""
        return self != Penalties(self.bias)


@dataclass(frozen=True)
class Sampler:
    """Argmax at temperature 0, above it an exact sample by the Gumbel-max rule.

    `seed` is a whole number from 0 to 2**64 - 1. `rule` is the rule of verification above temperature 0: `match` is the
    sampler itself, the others are in model/rules.py, where lossy ones are marked. `penalties` are not applied here:
    callers have already changed the logits by them (model/law.py).
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
        """Whether a guess is accepted if and only if this sampler chooses it; at temperature 0 by every rule."""
        return self.rule == "match" or not self.temperature

    def warped(self, logits_TV: Tensor) -> Tensor:
        """Return the logits of the sampled distribution in float64; at temperature 0, the model's logits."""
        if not self.temperature:
            return logits_TV
        return warp(logits_TV.double(), self.temperature, self.top_k, self.top_p, self.min_p)

    def noise(self, positions: Sequence[int], token_V: Tensor) -> Tensor:
        """Return the noise `[T, V]` of these tokens at each position; zeros if the sampler adds none."""
        if not self.temperature or self.rule != "match":
            return torch.zeros(len(positions), 1, device=token_V.device)
        size = int(token_V.max()) + 1
        tokens = token_V.cpu().numpy()
        noise_of = {position: gumbel(self.seed, position, size, tokens) for position in {*positions}}
        return torch.stack([noise_of[position] for position in positions]).to(token_V.device)

    def __call__(self, logits_TV: Tensor, positions: Sequence[int]) -> list[int]:
        """Return the tokens at `positions`, which the rows predict; all rows are fetched from the device at once."""
        noisy_TV = logits_TV
        if self.temperature > 0.0:
            noisy_TV = self.warped(logits_TV).cpu()
            for row_V, position in zip(noisy_TV.numpy(), positions):
                possible_tokens = np.flatnonzero(row_V != -np.inf)
                row_V[possible_tokens] += gumbel(self.seed, position, len(row_V), possible_tokens).numpy()

        # the largest is NaN if there is one, and minus infinity, which excludes a token, only if all are excluded
        tokens, largest = _largest(noisy_TV)
        if not all(map(math.isfinite, largest)):
            raise damaged(logits_TV.dtype)
        return tokens


def _largest(x_TV: Tensor) -> tuple[list[int], list[float]]:
    """Return the first column of each row's largest number, and that number."""
    if x_TV.is_cuda:
        best = x_TV.max(-1)
        return best.indices.tolist(), best.values.tolist()

    rows = x_TV.to(torch.promote_types(torch.float32, x_TV.dtype)).numpy()
    columns = rows.argmax(-1)  # 15 times as fast as torch's
    return columns.tolist(), rows[range(len(rows)), columns].tolist()


# --- log-probabilities of a text --------------------------------------------------------------------------------------

class Logprob(NamedTuple):
    """A token, its log-probability, and the likeliest tokens at its position with theirs, in descending order."""

    token: int
    logprob: float
    likeliest: list[tuple[int, float]]


def logprobs(logits_TV: Tensor, tokens: Sequence[int], likeliest: int) -> list[Logprob]:
    """Return each row's log-probability of a token and the likeliest ones, in float32 or finer, before `warp`."""
    exact_dtype = torch.promote_types(logits_TV.dtype, torch.float32)
    logprob_TV = logits_TV.log_softmax(-1, dtype=exact_dtype)

    token_T = torch.tensor(tokens, device=logprob_TV.device)
    token_logprobs: list[float] = logprob_TV.gather(1, token_T[:, None])[:, 0].tolist()

    best = logprob_TV.topk(min(likeliest, logprob_TV.shape[-1]), -1)
    best_rows = zip(best.indices.tolist(), best.values.tolist())
    likeliest_pairs = [list(zip(*row)) for row in best_rows]
    return [Logprob(*row) for row in zip(tokens, token_logprobs, likeliest_pairs)]


class LogprobRequest(NamedTuple):
    """The number of `likeliest` tokens to report per token, also after the first `echoed` nodes of the prompt."""

    likeliest: int
    echoed: int = 0
