"""Whether to draft a level now, and whether to guess at all.

Both compare tokens: what a level is expected to bring with what would settle meanwhile, and what guessing has brought
with what plain decoding would have. If ranks share the cores of one machine, rows may cost more than they gain.
"""
from __future__ import annotations

import math

from pipeline.stage_times import SHORTEST_TIME_GROWTH

# Seconds after which settled tokens have weight 1 / e in their rate. More is calmer, less follows the text at hand. By
# trial.
RATE_SECONDS = 3.0

# The tokens that a level must be expected to bring for each token that would wait for it. Above 1, since an expectation
# is less sure than a delay. By trial.
TOKENS_PER_WAITING_TOKEN = 2.0

# The factor of a level's time after each refused level, which is not measured: it halves in 23 refusals, so that a
# level is tried now and then. By trial.
REFUSAL_DECAY = 0.97

MAX_ACCEPTANCE = 0.99  # maximum probability that a level is accepted, so that the sum of its powers stays finite

# A single request rests once guessing is this many tokens behind plain decoding: about what each trial costs. By
# trial.
MAX_TOKENS_BEHIND = 2.0

# A rest ends this many tokens after guessing fell behind; doubled if guessing lasted for fewer, so that a text that
# cannot be guessed loses less and less; two lost tokens are 1.6 % of 128.
REST_TOKENS = 128

# The longest rest, so that a long text that cannot be guessed does not keep those after it from being guessed. Two lost
# tokens are 0.05 % of it.
MAX_REST_TOKENS = 4096

DRAIN_TOKENS = 2  # autoregressive tokens after which no guess is in flight
MIN_RATE_TOKENS = 8  # autoregressive tokens before their rate may end a rest; by trial


class TokenRate:
    """A recent rate of settled tokens."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0  # sums with exponentially decaying weights

    def add(self, num_tokens: int, seconds: float) -> None:
        """Add tokens that settled in these seconds."""
        decay = math.exp(-seconds / RATE_SECONDS)
        mean_weight = RATE_SECONDS * (1 - decay) / seconds if seconds else 1.0
        self._tokens = self._tokens * decay + num_tokens * mean_weight
        self._seconds = self._seconds * decay + seconds * mean_weight

    @property
    def mean(self) -> float:
        """Tokens per second; 0 before any measurement."""
        return self._tokens / self._seconds if self._seconds else 0.0


class DraftGate:
    """The decision to draft a level, from the recent rate of all requests and the recent time of a level."""

    def __init__(self) -> None:
        self._rate = TokenRate()
        self._last_settled_at: float | None = None
        self._level_seconds: float | None = None

    def is_worth_waiting(self, level_tokens: float, segment_tokens: float, stage_seconds: float) -> bool:
        """Return whether a segment of `segment_tokens` expected tokens should wait for a level of `level_tokens`.

        If it waits, it leaves later by the level's time. Otherwise the level leaves after it, by a segment's time in a
        stage. Levels that are drafted in these `stage_seconds` would leave with it; they are delayed, too.
        """
        level_seconds = self._level_seconds or 0.0
        num_levels = int(stage_seconds / level_seconds) if level_seconds else 0

        # expected tokens of those levels, if each brings this share of the one before: the sum of acceptance ** n for n
        # from 2 to num_levels
        acceptance = min(level_tokens, MAX_ACCEPTANCE)
        later_tokens = 0.0
        if num_levels > 1:
            later_tokens = (acceptance ** 2 - acceptance ** (num_levels + 1)) / (1 - acceptance)

        return level_tokens * (stage_seconds - level_seconds) > (segment_tokens + later_tokens) * level_seconds

    def add_settled(self, num_tokens: int, now: float) -> None:
        """Add settled tokens."""
        self._rate.add(num_tokens, 0.0 if self._last_settled_at is None else now - self._last_settled_at)
        self._last_settled_at = now

    def add_level(self, seconds: float) -> None:
        """Add the seconds that networks took for one level."""
        shortest = seconds if self._level_seconds is None else SHORTEST_TIME_GROWTH * self._level_seconds
        self._level_seconds = min(seconds, shortest)  # a longer level also read a prompt, or was interrupted

    def is_worth_drafting(self, level_tokens: float, due_at: float, now: float) -> bool:
        """Decide whether to begin a level of `level_tokens` expected tokens if the next answer is due at `due_at`.

        A refusal shortens the level's expected time, so that a level is tried again.
        """
        if not self._level_seconds or not self._rate.mean:
            return True

        seconds_late = now + self._level_seconds - max(due_at, now)
        if level_tokens >= TOKENS_PER_WAITING_TOKEN * self._rate.mean * seconds_late:
            return True

        self._level_seconds *= REFUSAL_DECAY
        return False


class Fallback:
    """The decision whether a single request guesses, or rests while plain decoding is faster.

    It rests once it is `MAX_TOKENS_BEHIND` tokens behind plain decoding and has recently been slower. A rest that
    begins soon after another one is longer, up to `MAX_REST_TOKENS`, so little is lost. Plain decoding is measured at
    the start and in every rest.
    """

    def __init__(self) -> None:
        self.guesses = True
        self._is_measured = False  # whether the rate without guesses comes from tokens of answers, not from the start
        self._plain_rate, self._guessing_rate = TokenRate(), TokenRate()
        self._lag = 0.0  # tokens by which guessing is behind plain decoding
        self._tokens_behind = 0  # settled since `_lag` was 0
        self._period_tokens = REST_TOKENS // 2  # the first rest doubles it
        self._rest_tokens = 0  # length of the present rest
        self._num_tokens = 0  # settled since guessing, or the rest, began
        self._last_settled_at: float | None = None

    def begin(self, plain_seconds: float) -> None:
        """Begin a request, or a time in which it is the only one.

        `plain_seconds` are those of a token without guesses, as measured at the start.
        """
        self._last_settled_at = None
        if plain_seconds and not self._plain_rate.mean:
            self._plain_rate.add(1, plain_seconds)

    @property
    def measured_plain_rate(self) -> float:
        """Tokens per second without guesses, by the rounds of a rest; 0 before the first one."""
        return self._plain_rate.mean if self._is_measured else 0.0

    def add_settled(self, num_tokens: int, now: float) -> None:
        """Add settled tokens of the single request."""
        last_settled_at, self._last_settled_at = self._last_settled_at, now
        if last_settled_at is None or not self._plain_rate.mean:
            return

        self._num_tokens += num_tokens
        if self.guesses:
            self._weigh(num_tokens, now - last_settled_at)
        elif self._num_tokens > DRAIN_TOKENS:
            self._recover(num_tokens, now - last_settled_at)

    def _weigh(self, num_tokens: int, seconds: float) -> None:
        """Begin a rest if guessing has fallen too far behind."""
        self._guessing_rate.add(num_tokens, seconds)
        self._lag = max(0.0, self._lag + seconds * self._plain_rate.mean - num_tokens)
        self._tokens_behind = self._tokens_behind + num_tokens if self._lag else 0

        guessing_is_slower = self._guessing_rate.mean < self._plain_rate.mean
        if self._lag > MAX_TOKENS_BEHIND and guessing_is_slower:
            has_lasted = self._num_tokens > REST_TOKENS
            longer_period = min(2 * self._period_tokens, MAX_REST_TOKENS)
            self._period_tokens = REST_TOKENS if has_lasted else longer_period
            self._rest_tokens = self._period_tokens - self._tokens_behind
            self._turn(guesses=False)

    def _recover(self, num_tokens: int, seconds: float) -> None:
        """Guess again after the rest, or as soon as plain decoding proves slower."""
        if self._num_tokens <= DRAIN_TOKENS + num_tokens:
            self._plain_rate = TokenRate()
            self._is_measured = True
        self._plain_rate.add(num_tokens, seconds)

        is_measured = self._num_tokens >= MIN_RATE_TOKENS
        plain_is_slower = is_measured and self._guessing_rate.mean > self._plain_rate.mean
        if plain_is_slower or self._num_tokens >= self._rest_tokens:
            self._turn(guesses=True)

    def _turn(self, guesses: bool) -> None:
        self.guesses = guesses
        self._lag, self._tokens_behind, self._num_tokens = 0.0, 0, 0
