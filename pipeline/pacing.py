"""Pacing: when a segment leaves, which rows it has, and whether to draft a level before the next answer.

Its inputs are the sent segments, the computing times of stages and the probabilities of guesses. It knows nothing
about strategies, or about how guesses are made.

- `FirstStage`: when the first stage is free. A segment spends about the same time in each stage, so the first one is
  busy for a fixed share of the round trip of a segment that did not wait. This needs no message.
- `StageTimes`: the seconds of each stage by rows, as a rising curve.
- `RowAllocator`: which guesses of all requests go into the next segment. Text goes before guesses, the prompt of the
  oldest request first. Guesses are ordered by their probability times the priority of their request; the priority
  counts once more for each segment that left without guesses of the request. Each segment in flight serves a share of
  the requests, and has as many rows for each of them as a single request would send. Beyond the rows of one request, a
  guess must be worth its row.
- `Batcher`: which segments of several requests leave together: the first ones of all requests in one message, the
  second ones in the next.
- `DraftGate`: whether to draft a level now, from its expected tokens and the tokens that would wait for it.
- `Fallback`: whether to guess at all. If ranks share the cores of one machine, rows may cost more than they gain.
"""
from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from operator import add
from typing import AbstractSet, Iterator, NamedTuple, Protocol, Sequence, Tuple

from model.sample import LogprobRequest
from model.tree import TokenTree
from pipeline.messages import Segment, Visit

EARLY_SHARE = 0.1  # of a segment's time in the stage: the next segment may be sent this much earlier
NEW_WEIGHT = 0.25  # of a new measurement
SHORTEST_TIME_GROWTH = 1.005  # factor of the shortest time, of a segment, level or wire, at each new measurement
SCALE_LIMITS = (0.5, 2.0)  # of the factor by which a new time changes those for other numbers of rows
CURVE_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # numbers of rows at which curves of all stages are summed
LEAST_EXTRA_WORTH = math.log(0.1)  # of a guess beyond the rows of one request
WRONG_SHARE = 0.5  # mean share of the stages that compute a guess that proves wrong
MESSAGE_ROWS = 256  # maximum rows of a message of several segments
RATE_SECONDS = 3.0  # after which settled tokens have weight 1 / e in their rate
REFUSAL_DECAY = 0.97  # factor of a level's time after each refused level, so that a level is tried now and then
MAX_ACCEPTANCE = 0.99  # maximum probability that a level is accepted
TOKENS_PER_WAITING_TOKEN = 2.0  # that a level must be expected to bring, for each token that would wait for it
MAX_TOKENS_BEHIND = 2.0  # by which guessing may fall behind plain decoding before it rests
REST_TOKENS = 128  # a rest ends this many tokens after guessing fell behind; doubled if guessing lasted for fewer
DRAIN_TOKENS = 2  # autoregressive tokens after which no guess is in flight
MIN_RATE_TOKENS = 8  # autoregressive tokens for a valid rate

CurvePoint = Tuple[float, float]  # rows, seconds


class TargetOptions(NamedTuple):
    """The options of a request's target."""

    inner: bool = False  # whether the draft needs inner features, the inputs of some layers
    prunes: bool = True  # whether dead guesses are dropped in flight, or only after they came back
    thrifty: bool = True  # whether to draft and send only guesses that pay
    plain_seconds: float = 0.0  # per token of plain decoding, to which a single request falls back; 0: never
    priority: float = 1.0  # the weight of its guesses compared with other requests'
    logprobs: LogprobRequest | None = None


DEFAULT_OPTIONS = TargetOptions()


# --- times of stages and wires ----------------------------------------------------------------------------------------

@dataclass
class Occupancy:
    """The estimated times of a segment in the first stage."""

    nodes: frozenset[int]
    sent_at: float
    begins_at: float
    ends_at: float


class FirstStage:
    """The segments in flight; each spends a `share` of its round trip in the first stage."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._shortest_seconds: dict[int, float] = {}  # rows -> the shortest measured time in the stage
        self._in_flight: deque[Occupancy] = deque()  # the oldest first
        self._last_left_at = 0.0  # time at which the newest returned segment left the stage
        self._mean_round_trip: float | None = None  # seconds, of recent segments

    def send(self, nodes: list[int], now: float) -> None:
        """Record a segment that was sent."""
        begins_at = max(now, self.free_at)
        ends_at = begins_at + self._estimated_seconds(len(nodes))
        self._in_flight.append(Occupancy(frozenset(nodes), now, begins_at, ends_at))

    def back(self, num_rows: int, now: float) -> float:
        """Record that the oldest segment came back with `num_rows` rows; return its round trip in seconds."""
        assert self._in_flight, "a segment came back, and none was in flight"
        segment = self._in_flight.popleft()
        self._last_left_at = min(segment.ends_at, now)

        estimate_was_late = segment.ends_at > now
        round_trip = now - (segment.sent_at if estimate_was_late else segment.begins_at)

        if num_rows:
            mean = round_trip if self._mean_round_trip is None else self._mean_round_trip
            self._mean_round_trip = mean + NEW_WEIGHT * (round_trip - mean)

        if num_rows == len(segment.nodes):  # nothing was pruned in flight
            stage_seconds = round_trip * self._share
            shortest = self._shortest_seconds.get(num_rows, stage_seconds)
            self._shortest_seconds[num_rows] = min(stage_seconds, SHORTEST_TIME_GROWTH * shortest)
        return round_trip

    def prune(self, dead_nodes: AbstractSet[int], now: float) -> None:
        """Record dead nodes: a segment without live nodes is given up, and later ones enter the stage earlier."""
        free_at = self._last_left_at

        for segment in self._in_flight:
            stage_seconds = segment.ends_at - segment.begins_at
            is_given_up = segment.ends_at > now and segment.nodes <= dead_nodes

            segment.begins_at = max(segment.sent_at, free_at)
            segment.ends_at = max(segment.begins_at, now) if is_given_up else segment.begins_at + stage_seconds
            free_at = segment.ends_at

    def whereabouts(self, now: float) -> list[tuple[frozenset[int], float]]:
        """Return each segment in flight, the oldest first, with the share of its way that it has probably gone."""
        shares = []
        for segment in self._in_flight:
            stage_seconds = segment.ends_at - segment.begins_at
            round_trip = self._mean_round_trip or stage_seconds / self._share or math.inf
            passed = (now - segment.begins_at) / round_trip
            shares.append((segment.nodes, min(max(passed, 0.0), 1.0)))
        return shares

    @property
    def free_at(self) -> float:
        """Time at which all segments have left the stage."""
        return self._in_flight[-1].ends_at if self._in_flight else 0.0

    @property
    def due_at(self) -> float:
        """Time at which the oldest segment should come back; infinite if it is unknown, or if none is in flight."""
        if not self._in_flight or self._mean_round_trip is None:
            return math.inf
        return self._in_flight[0].begins_at + self._mean_round_trip

    @property
    def ready_at(self) -> float:
        """Time from which on a new segment would hardly wait."""
        if not self._in_flight:
            return 0.0
        newest = self._in_flight[-1]
        return newest.ends_at - EARLY_SHARE * (newest.ends_at - newest.begins_at)

    def _estimated_seconds(self, num_rows: int) -> float:
        """Return the seconds of a segment: the shortest ones known for as many rows or more, else the longest."""
        of_larger = [seconds for rows, seconds in self._shortest_seconds.items() if rows >= num_rows]
        return min(of_larger) if of_larger else max(self._shortest_seconds.values(), default=0.0)


class Curve:
    """Seconds of one stage by rows, with one point between successive powers of two."""

    def __init__(self) -> None:
        self._points: dict[int, CurvePoint] = {}  # by the number of bits of their rows

    def learn(self, visit: Visit) -> None:
        """Add a measurement."""
        num_bits = visit.rows.bit_length()
        rows, seconds = self._points.get(num_bits, visit)
        mean_seconds = seconds + NEW_WEIGHT * (visit.seconds - seconds)

        # the whole curve
        least, most = SCALE_LIMITS
        scale = min(max(mean_seconds / seconds, least), most) if seconds > 0 else 1.0
        for other_bits, (other_rows, other_seconds) in self._points.items():
            self._points[other_bits] = other_rows, other_seconds * scale

        # the measured point
        self._points[num_bits] = rows + NEW_WEIGHT * (visit.rows - rows), mean_seconds

    def of(self, row_counts: Sequence[int]) -> list[float]:
        """Return the seconds for each of these numbers of rows.

        After a point the curve keeps its slope, up to the height of the next point: a stage is assumed to be slower
        only if that was measured.
        """
        rising: list[CurvePoint] = []
        for num_bits in sorted(self._points):
            rows, seconds = self._points[num_bits]
            least = rising[-1][1] if rising else 0.0
            rising.append((rows, max(seconds, least)))
        return [_extrapolated(rising, num_rows) for num_rows in row_counts]


class StageTimes:
    """The curves of all stages of a ring, and of the wires between them."""

    def __init__(self) -> None:
        self._curves: list[Curve] = []
        self._wire_points: dict[int, CurvePoint] = {}  # like the points of a curve, with the shortest measured times
        self._slowest_stage: list[CurvePoint] = []  # curve of the slowest stage; empty after a new measurement
        self._whole_way: list[CurvePoint] = []  # curve of all stages and wires together

    def learn(self, visits: Sequence[Visit], round_trip: float) -> None:
        """Add the visits of a returned message, and the seconds of its round trip."""
        while len(self._curves) < len(visits):
            self._curves.append(Curve())
        for curve, visit in zip(self._curves, visits):
            curve.learn(visit)

        num_rows = visits[0].rows if visits else 0
        has_visited_all = len(visits) == len(self._curves)
        if num_rows and has_visited_all and visits[-1].rows == num_rows:  # nothing was pruned in flight
            wire_seconds = round_trip - sum(visit.seconds for visit in visits)  # on wires, or in a queue
            num_bits = num_rows.bit_length()
            shortest = self._wire_points.get(num_bits, (num_rows, wire_seconds))[1]
            self._wire_points[num_bits] = num_rows, min(wire_seconds, SHORTEST_TIME_GROWTH * shortest)
        self._slowest_stage = []

    def slowest(self, num_rows: int) -> float:
        """Return the seconds of the slowest stage for `num_rows` rows; 0 before any measurement."""
        self._update()
        return _interpolated(self._slowest_stage, num_rows)

    def seconds_per_row(self, num_rows: int) -> float:
        """Return the seconds of one more row, beyond `num_rows` rows, in all stages and on all wires together."""
        self._update()
        index = min(max(bisect_right(CURVE_ROWS, num_rows), 1), len(CURVE_ROWS) - 1)
        (left_rows, left_seconds), (right_rows, right_seconds) = self._whole_way[index - 1:index + 1]
        return (right_seconds - left_seconds) / (right_rows - left_rows)

    def _update(self) -> None:
        if self._slowest_stage:
            return

        # stages
        stage_curves = [curve.of(CURVE_ROWS) for curve in self._curves]
        seconds_by_stage = list(zip(*stage_curves)) or [(0.0,)] * len(CURVE_ROWS)
        self._slowest_stage = list(zip(CURVE_ROWS, map(max, seconds_by_stage)))

        # wires
        wire_curve: list[CurvePoint] = []
        least = math.inf
        for rows, seconds in sorted(self._wire_points.values(), reverse=True):
            least = min(seconds, least)  # fewer rows do not take longer
            wire_curve.insert(0, (rows, least))
        wire_curve = wire_curve or [(1, 0.0)]
        wire_seconds = [_interpolated(wire_curve, num_rows) for num_rows in CURVE_ROWS]

        # both
        whole_seconds = map(add, map(sum, seconds_by_stage), wire_seconds)
        self._whole_way = list(zip(CURVE_ROWS, whole_seconds))


def _interpolated(points: Sequence[CurvePoint], at: float) -> float:
    """Return the height of a curve by linear interpolation between its points."""
    if at <= points[0][0]:
        return points[0][1]
    for (left, low), (right, high) in zip(points, points[1:]):
        if at <= right:
            return low + (high - low) * (at - left) / (right - left)
    return points[-1][1]


def _extrapolated(points: Sequence[CurvePoint], at: float) -> float:
    """Return the height of the line through the two points before `at`, at most that of the next point."""
    before = [point for point in points if point[0] <= at]
    if not before:
        return points[0][1]

    after = points[len(before):]
    max_height = after[0][1] if after else math.inf

    last, last_height = before[-1]
    slope = 0.0
    if len(before) > 1:
        earlier, earlier_height = before[-2]
        slope = (last_height - earlier_height) / (last - earlier)
    return min(last_height + slope * (at - last), max_height)


# --- which rows leave -------------------------------------------------------------------------------------------------

class Bidder(Protocol):
    """A request that competes for rows."""

    request: int
    tree: TokenTree
    options: TargetOptions
    passed_over: int  # number of segments since the last one with guesses of this request


class RowAllocator:
    """The division of the rows of the next segment among requests."""

    def __init__(self, num_in_flight: int, times: StageTimes) -> None:
        self._num_in_flight = max(1, num_in_flight)  # segments
        self._times = times
        self._is_divided = False  # whether the rows of the next segment were divided
        self._least_worth = 0.0  # of the guesses to send, a logarithm
        self._guess_rows_left = 0
        self.left_out: set[int] = set()  # requests without a row in the next segment

    def share(self, bidder: Bidder, bidders: Sequence[Bidder], segment_size: int) -> int:
        """Return how many rows a bidder may fill, text included.

        `segment_size` is the number of rows of a single request's segment.
        """
        if not self._is_divided or len(bidders) == 1:
            self._divide(bidders, segment_size)

        guess_worths = worths(bidder, weighed=len(bidders) > 1)
        num_guesses = min(self._guess_rows_left, sum(worth >= self._least_worth for worth in guess_worths))
        self._guess_rows_left -= num_guesses
        bidder.passed_over = 0 if num_guesses else bidder.passed_over + bool(bidder.tree.unsent_guesses)

        num_rows = len(bidder.tree.unsent_text) + num_guesses
        if not num_rows and len(bidders) > 1:
            self.left_out.add(bidder.request)
        return num_rows

    def close(self) -> None:
        """Record that the segment has left: the next call of `share` divides the rows of the next one."""
        self._is_divided = False
        self.left_out.clear()

    def _divide(self, bidders: Sequence[Bidder], segment_size: int) -> None:
        """Choose the guesses of the next segment: the most worthy ones for which there is room, and which pay."""
        num_text_rows = sum(len(bidder.tree.unsent_text) for bidder in bidders)

        # the best guesses of all requests
        requests_per_segment = max(1.0, len(bidders) / self._num_in_flight)
        room_of_all = max(0, int(segment_size * requests_per_segment) - num_text_rows)
        all_worths = (worth for bidder in bidders for worth in worths(bidder, len(bidders) > 1))
        best_worths = heapq.nlargest(room_of_all, all_worths)

        # beyond the room of one request, only good ones
        room_of_one = segment_size - num_text_rows
        num_good = sum(worth >= LEAST_EXTRA_WORTH for worth in best_worths)
        best_worths = best_worths[:max(room_of_one, num_good)]

        # only those that pay
        if all(bidder.options.thrifty for bidder in bidders):
            num_tips = sum(bool(bidder.tree.unsent_text) for bidder in bidders)
            best_worths = best_worths[:self._num_paying(best_worths, num_text_rows, num_tips)]

        self._is_divided, self._guess_rows_left = True, len(best_worths)
        self._least_worth = best_worths[-1] if best_worths else math.inf

    def _num_paying(self, best_worths: Sequence[float], num_text_rows: int, num_tips: int) -> int:
        """Return how many of the best guesses pay in addition to rows of text, with `num_tips` tips among them.

        A guess in this segment is answered earlier by a segment's time in the slowest stage, and delays each other row
        by the time of one more row in all stages. Both are weighted with the probability that a row becomes text.
        Without a tip in the segment a wrong guess dies half-way on average.
        """
        expected_tokens = float(num_tips)
        share_of_stages = 1.0 if num_tips else WRONG_SHARE

        for index, worth in enumerate(best_worths):
            probability = math.exp(min(worth, 0.0))
            num_rows = num_text_rows + index
            gain = probability * self._times.slowest(num_rows)
            cost = share_of_stages * expected_tokens * self._times.seconds_per_row(num_rows)
            if expected_tokens and gain < cost:
                return index
            expected_tokens += probability
        return len(best_worths)


def worths(bidder: Bidder, weighed: bool) -> Iterator[float]:
    """Yield the worths of unsent guesses: log-probabilities, with `weighed` plus the log of the request's weight."""
    tree = bidder.tree
    log_weight = math.log(bidder.options.priority * (1 + bidder.passed_over)) if weighed else 0.0
    offset = log_weight - tree.nodes[tree.tip].score
    return (tree.nodes[node].score + offset for node in tree.unsent_guesses)


class Batcher:
    """The messages to send, the next one first."""

    def __init__(self) -> None:
        self._messages: deque[list[Segment]] = deque()

    def __len__(self) -> int:
        return len(self._messages)

    def holds(self, request: int) -> bool:
        """Return whether a segment of this request waits."""
        return any(segment.request == request for message in self._messages for segment in message)

    def put(self, segment: Segment) -> None:
        """Add a segment after all other segments of its request."""
        index = 0
        for next_index, message in enumerate(self._messages, 1):
            if any(other.request == segment.request for other in message):
                index = next_index

        while index < len(self._messages) and not _fits(segment, self._messages[index]):
            index += 1
        if index == len(self._messages):
            self._messages.append([])
        self._messages[index].append(segment)

    def take(self) -> list[Segment]:
        """Remove and return the next message."""
        return self._messages.popleft()

    def drop(self, request: int) -> int:
        """Drop the segments of a request; return their number."""
        num_before = sum(map(len, self._messages))
        kept = ([segment for segment in message if segment.request != request] for message in self._messages)
        self._messages = deque(filter(None, kept))
        return num_before - sum(map(len, self._messages))


def _fits(segment: Segment, message: list[Segment]) -> bool:
    """Return whether a message has room for a segment, and both or neither of them need inner features."""
    num_rows = sum(len(other.nodes) for other in message)
    is_alike = all((other.inner is None) == (segment.inner is None) for other in message)
    return is_alike and num_rows + len(segment.nodes) <= MESSAGE_ROWS


# --- whether to guess -------------------------------------------------------------------------------------------------

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

        # expected tokens of those levels: the sum of probability ** n for n from 2 to num_levels
        probability = min(level_tokens, MAX_ACCEPTANCE)
        later_tokens = 0.0
        if num_levels > 1:
            later_tokens = (probability ** 2 - probability ** (num_levels + 1)) / (1 - probability)

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
        """Return whether to begin a level of `level_tokens` expected tokens if the next answer is due at `due_at`."""
        if not self._level_seconds or not self._rate.mean:
            return True

        seconds_late = now + self._level_seconds - max(due_at, now)
        if level_tokens >= TOKENS_PER_WAITING_TOKEN * self._rate.mean * seconds_late:
            return True

        self._level_seconds *= REFUSAL_DECAY
        return False


class Fallback:
    """The decision whether a single request guesses, or rests while plain decoding is faster.

    It rests once it is `MAX_TOKENS_BEHIND` tokens behind plain decoding and has recently been slower. A rest
    that begins soon after another one is longer, so the loss is bounded. Plain decoding is measured at the
    start and in every rest.
    """

    def __init__(self) -> None:
        self.guesses = True
        self._is_measured = False  # whether the rate without guesses comes from tokens of answers, not from the start
        self._plain_rate, self._guessing_rate = TokenRate(), TokenRate()
        self._lead = 0.0  # tokens by which guessing is ahead of plain decoding, at most 0
        self._tokens_behind = 0  # settled since `_lead` was 0
        self._period_tokens = REST_TOKENS // 2
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
    def measured_rate(self) -> float:
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
        self._lead = min(0.0, self._lead + num_tokens - seconds * self._plain_rate.mean)
        self._tokens_behind = self._tokens_behind + num_tokens if self._lead else 0

        guessing_is_slower = self._guessing_rate.mean < self._plain_rate.mean
        if self._lead < -MAX_TOKENS_BEHIND and guessing_is_slower:
            has_lasted = self._num_tokens > REST_TOKENS
            self._period_tokens = REST_TOKENS if has_lasted else 2 * self._period_tokens
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
        self._lead, self._tokens_behind, self._num_tokens = 0.0, 0, 0


class Pacing:
    """The pacing of one ring, which is filled by `depth` segments."""

    def __init__(self, depth: int) -> None:
        self.first_stage = FirstStage(1 / max(1, depth - 1))
        self.times = StageTimes()
        self.rows = RowAllocator(depth - 1, self.times)
        self.batcher = Batcher()
        self.gate = DraftGate()
        self.fallback = Fallback()
