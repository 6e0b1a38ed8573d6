"""Whether to draft a level now, and whether to guess at all.

Both compare tokens: what a level is expected to bring with what would settle meanwhile, and what guessing has brought
with what plain decoding would have. If ranks share the cores of one machine, rows may cost more than they gain.
"""
from __future__ import annotations

import math
from collections import defaultdict
from typing import NamedTuple, Sequence

from config.trees import RoundCosts
from pipeline.stage_times import ShortestTimes

# Seconds after which settled tokens have weight 1 / e in their rate. More is calmer, less follows the text at hand. By
# trial.
RATE_SECONDS = 3.0

# The tokens that a level must be expected to bring for each token that would wait for it. Above 1, since an expectation
# is less sure than a delay. By trial.
TOKENS_PER_WAITING_TOKEN = 2.0

# The factor of the expected time of levels after each refused level, which is not measured: the time halves in 700
# refusals, so that a level is tried now and then. By trial: with 0.97, levels delayed the answers of eight requests.
REFUSAL_DECAY = 0.999

MAX_ACCEPTANCE = 0.99  # maximum probability that a level is accepted, so that the sum of its powers stays finite

# Requests rest once guessing is this many tokens of each behind plain decoding: about what each trial costs. By trial.
MAX_TOKENS_BEHIND = 2.0

# A rest ends this many tokens after guessing fell behind; doubled if guessing lasted for fewer, so that a text that
# cannot be guessed loses less and less; two lost tokens are 1.6 % of 128.
REST_TOKENS = 128

# The longest rest, so that a long text that cannot be guessed does not keep those after it from being guessed. Two lost
# tokens are 0.05 % of it.
MAX_REST_TOKENS = 4096

DRAIN_TOKENS = 2  # autoregressive tokens after which no guess is in flight
MIN_RATE_TOKENS = 8  # autoregressive tokens before their rate may end a rest; by trial
MAX_RUN = 16  # the longest run of right guesses that is counted, and the most levels of a trial that is considered
ADDED_RUNS = 2.0  # expected runs, added to those so far, since a good draft may miss at first; by trial

# The acceptance of a draft that was not tried yet, about that of SmolLM2's head (0.59). What does not pay with it is
# first tried after a rest, of which a trial is a small part.
FIRST_ACCEPTANCE = 0.6


class TokenRate:
    """A recent rate of settled tokens."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0  # sums with exponentially decaying weights

    def add(self, num_tokens: float, seconds: float) -> None:
        """Add tokens that settled in these seconds."""
        decay = math.exp(-seconds / RATE_SECONDS)
        mean_weight = RATE_SECONDS * (1 - decay) / seconds if seconds else 1.0
        self._tokens = self._tokens * decay + num_tokens * mean_weight
        self._seconds = self._seconds * decay + seconds * mean_weight

    @property
    def mean(self) -> float:
        """Tokens per second; 0 before any measurement."""
        return self._tokens / self._seconds if self._seconds else 0.0


class NextLevel(NamedTuple):
    """A level that a request may draft."""

    num_guesses: int  # that networks read for the request
    tokens: float  # that it is expected to bring
    seconds: float  # that it takes if networks read as many guesses for each other request


class DraftGate:
    """The decision to draft a level, from the recent rate of all requests and the recent time of networks."""

    def __init__(self) -> None:
        self._rate = TokenRate()
        self._last_settled_at: float | None = None
        self._pass_times = ShortestTimes()  # by guesses that networks read, for all requests together
        self._refusals_factor = 1.0  # of a pass's time, by the levels refused since one was measured

    def is_worth_waiting(self, level: NextLevel, segment_tokens: float, stage_seconds: float) -> bool:
        """Return whether a segment of `segment_tokens` expected tokens should wait for a level.

        If it waits, it leaves later by the level's time. Otherwise the level leaves after it, by a segment's time in a
        stage. Levels that are drafted in these `stage_seconds` would leave with it; they are delayed, too.
        """
        num_levels = int(stage_seconds / level.seconds) if level.seconds else 0

        # expected tokens of those levels, if each brings this share of the one before: the sum of acceptance ** n for n
        # from 2 to num_levels
        acceptance = min(level.tokens, MAX_ACCEPTANCE)
        later_tokens = 0.0
        if num_levels > 1:
            later_tokens = (acceptance ** 2 - acceptance ** (num_levels + 1)) / (1 - acceptance)

        return level.tokens * (stage_seconds - level.seconds) > (segment_tokens + later_tokens) * level.seconds

    def add_settled(self, num_tokens: int, now: float) -> None:
        """Add settled tokens."""
        self._rate.add(num_tokens, 0.0 if self._last_settled_at is None else now - self._last_settled_at)
        self._last_settled_at = now

    def add_pass(self, num_guesses: int, seconds: float) -> None:
        """Add the seconds in which networks have read this many guesses, of all requests together."""
        if num_guesses:  # else only text was read
            self._pass_times.learn(num_guesses, seconds)
            self._refusals_factor = 1.0

    def next_level(self, expected_tokens: Sequence[float], num_requests: int) -> NextLevel:
        """Return the level of a request whose guesses have these expected tokens, the most first.

        It reads the number of guesses that brings most tokens a second. One more guess raises that if it alone brings
        more a second than the level before. Requests share the time of a pass without guesses, since networks read for
        all at once.
        """
        seconds_of_pass, seconds_per_guess = self._pass_times.line()
        request_seconds = seconds_of_pass / num_requests  # of the level, for one of the requests
        num_guesses, level_tokens = 0, 0.0

        for tokens in expected_tokens:
            if tokens * request_seconds < level_tokens * seconds_per_guess:
                break
            request_seconds += seconds_per_guess
            level_tokens += tokens
            num_guesses += 1

        return NextLevel(num_guesses, level_tokens, self._refusals_factor * num_requests * request_seconds)

    def is_worth_drafting(self, level: NextLevel, due_at: float, now: float) -> bool:
        """Decide whether to begin a level if the next answer is due at `due_at`.

        A refusal shortens the expected time of levels, so that one is tried again.
        """
        if not self._rate.mean:
            return True

        seconds_late = now + level.seconds - max(due_at, now)
        if level.tokens >= TOKENS_PER_WAITING_TOKEN * self._rate.mean * seconds_late:
            return True

        self._refusals_factor *= REFUSAL_DECAY
        return False


class Fallback:
    """The decision whether the running requests guess, or rest while plain decoding is faster.

    It is one for all of them, and counts the tokens of each. They rest once they are `MAX_TOKENS_BEHIND` tokens behind
    plain decoding and have recently been slower, or if what was accepted so far, at most, is not worth its levels and
    rows. A rest that begins soon after another one is longer, up to `MAX_REST_TOKENS`, so little is lost. Plain
    decoding is measured at the start, for as many rows as there are requests, and in every rest.
    """

    def __init__(self) -> None:
        self.guesses = True
        self._costs = RoundCosts()
        self._num_running = 1
        self._runs = [0.0] * (MAX_RUN + 1)  # by length, the number of runs of right guesses that were as long or longer

        # tokens per second of each request, by the number of requests; without guesses, as measured in the last rest
        self._plain_rates: defaultdict[int, TokenRate] = defaultdict(TokenRate)
        self._guessing_rates: defaultdict[int, TokenRate] = defaultdict(TokenRate)

        # tokens of each request
        self._lag = 0.0  # by which guessing is behind plain decoding
        self._tokens_behind = 0.0  # settled since `_lag` was 0
        self._period_tokens = REST_TOKENS // 2  # the first rest doubles it
        self._rest_tokens = 0.0  # length of the present rest
        self._num_tokens = 0.0  # settled since guessing, or the rest, began

        # the present round, in which each request settles tokens once
        self._last_round_at: float | None = None
        self._num_settlements = 0
        self._round_tokens = 0.0

    def begin(self, costs: RoundCosts, num_running: int) -> None:
        """Begin a request, one of `num_running`, or a time that follows the reading of a prompt."""
        self._last_round_at = None
        self._costs, self._num_running = costs, num_running
        if self.guesses and costs.seconds_by_rows and not self._can_pay(FIRST_ACCEPTANCE):
            self._rest(REST_TOKENS)

    @property
    def _plain_rate(self) -> float:
        """Tokens per second of each request without guesses."""
        return self._plain_rates[self._num_running].mean or 1 / self._costs.round_seconds(self._num_running)

    def is_late(self, now: float) -> bool:
        """Return whether another level would bring a request further behind plain decoding than a trial may."""
        if not self._costs.level_seconds or self._last_round_at is None:
            return False
        seconds = now + self._costs.level_seconds - self._last_round_at
        return self._lag + seconds * self._plain_rate - 1 > MAX_TOKENS_BEHIND

    def add_run(self, length: int) -> None:
        """Add a run of right guesses, which ended at a token that was not guessed."""
        if self.guesses:
            for shorter in range(min(length, MAX_RUN) + 1):
                self._runs[shorter] += 1

    def add_settled(self, num_tokens: int, num_running: int, now: float) -> float:
        """Add settled tokens of one of the running requests; return the tokens that a trial cost each, if it ended."""
        self._num_running = num_running
        self._num_settlements += 1
        self._round_tokens += num_tokens / num_running
        if self._last_round_at is not None and self._num_settlements < num_running:
            return 0.0

        # a round has ended
        last_round_at, self._last_round_at = self._last_round_at, now
        tokens_of_each, self._round_tokens, self._num_settlements = self._round_tokens, 0.0, 0
        if last_round_at is None or not self._costs.seconds_by_rows:
            return 0.0

        seconds = now - last_round_at
        self._num_tokens += tokens_of_each
        if self.guesses:
            return self._weigh(tokens_of_each, seconds)
        if self._num_tokens > DRAIN_TOKENS:
            self._recover(tokens_of_each, seconds)
        return 0.0

    def _weigh(self, num_tokens: float, seconds: float) -> float:
        """Begin a rest if guessing has fallen too far behind, or cannot pay; return what that has cost."""
        guessing_rate, plain_rate = self._guessing_rates[self._num_running], self._plain_rate
        guessing_rate.add(num_tokens, seconds)
        self._lag = max(0.0, self._lag + seconds * plain_rate - num_tokens)
        self._tokens_behind = self._tokens_behind + num_tokens if self._lag else 0.0

        is_behind = self._lag > MAX_TOKENS_BEHIND or not self._can_pay()
        if not is_behind or guessing_rate.mean >= plain_rate:
            return 0.0

        has_lasted = self._num_tokens > REST_TOKENS
        longer_period = min(2 * self._period_tokens, MAX_REST_TOKENS)
        self._period_tokens = REST_TOKENS if has_lasted else longer_period
        lost_tokens = self._lag
        self._rest(self._period_tokens - self._tokens_behind)
        return lost_tokens

    def _can_pay(self, acceptance: float = 1.0) -> bool:
        """Return whether some number of levels brings more than plain decoding by what was accepted so far.

        To the runs of right guesses so far `ADDED_RUNS` are added in which each guess has this probability.
        """
        costs, num_tokens = self._costs, 1.0
        for depth in range(1, MAX_RUN + 1):
            num_added = ADDED_RUNS * acceptance ** depth
            num_tokens += (self._runs[depth] + num_added) / (self._runs[0] + ADDED_RUNS)
            seconds = depth * costs.level_seconds + costs.round_seconds(self._num_running * (depth + 1))
            if num_tokens > seconds * self._plain_rate:
                return True
        return False

    def _recover(self, num_tokens: float, seconds: float) -> None:
        """Guess again after the rest if that can pay, or as soon as plain decoding proves slower."""
        if self._num_tokens <= DRAIN_TOKENS + num_tokens:
            self._plain_rates.clear()
        plain_rate = self._plain_rates[self._num_running]
        plain_rate.add(num_tokens, seconds)

        is_measured = self._num_tokens >= MIN_RATE_TOKENS
        if is_measured and self._guessing_rates[self._num_running].mean > plain_rate.mean:
            self._turn(guesses=True)
        elif self._num_tokens >= self._rest_tokens:
            self._runs = [count / 2 for count in self._runs]
            if self._can_pay():
                self._turn(guesses=True)
            else:
                self._rest(REST_TOKENS)

    def _rest(self, num_tokens: float) -> None:
        self._rest_tokens = num_tokens
        self._turn(guesses=False)

    def _turn(self, guesses: bool) -> None:
        self.guesses = guesses
        self._lag, self._tokens_behind, self._num_tokens = 0.0, 0.0, 0.0
