"""A request, a prompt with its options, and its answer: the tokens so far with their figures.

They hold token ids, no text.
"""
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Callable, Sequence

from model.grammar import Grammar
from model.law import PathLaw
from model.sample import Logprob, LogprobRequest, Penalties, Sampler


@dataclass(frozen=True)
class Request:
    """A prompt and its options. The answer ends at an `end` token, if `stop(token)`, or after `max_new_tokens`."""

    prompt: Sequence[int]
    sampler: Sampler = Sampler()
    max_new_tokens: int = 256
    end: frozenset[int] = frozenset()
    stop: Callable[[int], bool] = lambda token: False
    priority: float = 1.0  # the weight of its guesses compared with other requests'; the highest starts first
    likeliest: int | None = None  # report log-probabilities of each token and this many likeliest tokens
    echo: bool = False  # report them for the prompt, too; then no part of the prompt is reused
    grammar: Grammar | None = None  # the answer must follow it

    @property
    def logprobs(self) -> LogprobRequest | None:
        """The log-probabilities to report, if any."""
        if self.likeliest is None:
            return None
        return LogprobRequest(self.likeliest, len(self.prompt) - 1 if self.echo else 0)

    @property
    def law(self) -> PathLaw | None:
        """The part of the target's distribution that depends on the path, if any."""
        penalties = self.sampler.penalties
        if penalties == Penalties() and self.grammar is None:
            return None
        return PathLaw(penalties, len(self.prompt), self.grammar)


@dataclass
class Answer:
    """The result of a request so far. Times are in seconds."""

    prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0  # from the start to the first token
    decode_seconds: float = 0.0  # from the first token to the last
    accepted_lengths: list[int] = field(default_factory=list)  # tokens settled by each verification after the prefill
    misses: int = 0  # after the prefill: tokens that had to be sent as text, since no guess under way covered them
    segments: int = 0
    reused_tokens: int = 0  # tokens of the prompt that the stages held from another request
    logprobs: list[Logprob] = field(default_factory=list)  # of each token, computed by the target, if requested
    prompt_logprobs: list[Logprob] = field(default_factory=list)  # of each token of the prompt but the first
    sources: Counter[str] = field(default_factory=Counter)  # number of guesses of each source that became text
    divergence: float = 0.0  # in nats, over all tokens: of a lossy rule's distribution of texts from the target's (KL)
    plain_tokens: int = 0  # tokens decoded without guessing, since guessing was slower
    plain_seconds: float = 0.0  # of these tokens, but for the first one of the answer
    trial_tokens: float = 0.0  # that plain decoding would have written more, while guesses were tried and did not pay
    finish_reason: str = ""  # stop (an end token or the stop rule), length (max_new_tokens) or context (full)

    @property
    def new_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def seconds(self) -> float:
        """Seconds of prefill and decoding together."""
        return self.prefill_seconds + self.decode_seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second, with the prefill included."""
        return self.new_tokens / max(self.seconds, 1e-9)

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first token."""
        return (self.new_tokens - 1) / max(self.decode_seconds, 1e-9)

    @property
    def plain_rate(self) -> float:
        """Tokens per second of the answer's rounds without guesses; 0 if there were not two."""
        return max(0, self.plain_tokens - 1) / self.plain_seconds if self.plain_seconds else 0.0

    @property
    def mean_accepted_length(self) -> float:
        """Tokens per verification, the target's own included: of a tree verified whole this is EAGLE's tau.

        A verification follows each segment that came back with rows; with `serial` and `naive`, the last of a tree.
        Tokens that settled with the prefill do not count. 1 without any verification.
        """
        return sum(self.accepted_lengths) / len(self.accepted_lengths) if self.accepted_lengths else 1.0

    @property
    def divergence_per_token(self) -> float:
        """Nats by which a lossy rule diverges at a token, as a mean; 0 with rules that keep the distribution."""
        return self.divergence / max(self.new_tokens, 1)

    @property
    def tokens_per_miss(self) -> float:
        """The mean run of correct guesses with the token that begins it, without the token of the prefill."""
        return (self.new_tokens - 1) / self.misses if self.misses else float(self.new_tokens)

    @property
    def acceptance_by_position(self) -> list[float]:
        return by_position(self.accepted_lengths)


def by_position(lengths: Sequence[int]) -> list[float]:
    """Return the share of verifications that settled a second, third, ... token; `lengths` are tokens of each.

    Of trees that are verified whole, this is vLLM's "Per-position acceptance rate"; the sum of the rates plus one is
    its "Mean acceptance length".
    """
    return [sum(length > position for length in lengths) / len(lengths)
            for position in range(1, max(lengths, default=0))]
