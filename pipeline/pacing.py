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
- `DraftGate`: whether to draft a level now, from its expected gain and the tokens that would wait for it.
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

SLACK = 0.1  # of a segment's time in the stage: the next segment may be sent this much earlier
NEWS = 0.25  # the weight of a new measurement
FADING = 1.005  # factor of the shortest measured time, of a segment, a level or a wire, at each new measurement
STEP = (0.5, 2.0)  # limits of the factor by which a new time changes those for other numbers of rows
POINTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # numbers of rows at which curves of all stages are summed
GOOD = math.log(0.1)  # minimum worth of a guess beyond the rows of one request
WRONG_SHARE = 0.5  # mean share of the stages that compute a guess that proves wrong
MESSAGE_ROWS = 256  # maximum rows of a message of several segments
LAST = 3.0  # seconds after which settled tokens have weight 1 / e in their rate
DOUBT = 0.97  # factor of a level's time after each refused level, so that a level is tried now and then
SURE = 0.99  # maximum probability that a level is accepted
MARGIN = 2.0  # tokens that a level must promise per token that would settle while an answer waits for it
LOSS = 2.0  # tokens by which guessing may fall behind plain decoding before it rests
REST = 128  # a rest ends this many tokens after guessing fell behind; doubled if guessing lasted for fewer
DRAINED = 2  # plain tokens after which no guess is in flight
TRIAL = 8  # minimum number of plain tokens for a valid rate
Point = Tuple[float, float]  # rows, seconds


class TargetOptions(NamedTuple):
    """The options of a request's target."""

    inner: bool = False  # whether the draft needs inner features, the inputs of some layers
    prunes: bool = True  # whether dead guesses are dropped in flight, or only after they came back
    thrifty: bool = True  # whether to draft and send only guesses that pay
    plain_seconds: float = 0.0  # per token of plain decoding, to which a single request falls back; 0: never
    priority: float = 1.0  # the weight of its guesses compared with other requests'
    logprobs: LogprobRequest | None = None


DEFAULT_OPTIONS = TargetOptions()


@dataclass
class Occupancy:
    """The estimated times of a segment in the first stage."""

    nodes: frozenset[int]
    sent: float
    begins: float
    ends: float


class FirstStage:
    """The segments in flight; each spends a `share` of its round trip in the first stage."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._seconds: dict[int, float] = {}  # rows -> the shortest measured time
        self._under_way: deque[Occupancy] = deque()  # the oldest first
        self._left = 0.0  # time at which the newest returned segment left the stage
        self._round_trip: float | None = None  # recent seconds of a round trip

    def send(self, nodes: list[int], now: float) -> None:
        """Record a segment that was sent."""
        begins = max(now, self.free_at)
        ends = begins + self._estimated(len(nodes))
        self._under_way.append(Occupancy(frozenset(nodes), now, begins, ends))

    def back(self, rows: int, now: float) -> float:
        """Record that the oldest segment came back with `rows` rows; return its round trip in seconds."""
        assert self._under_way, "a segment came back, and none was in flight"
        segment = self._under_way.popleft()
        self._left = min(segment.ends, now)
        estimate_was_late = segment.ends > now
        seconds = now - (segment.sent if estimate_was_late else segment.begins)
        if rows:
            way = seconds if self._round_trip is None else self._round_trip
            self._round_trip = way + NEWS * (seconds - way)
        if rows == len(segment.nodes):
            took = seconds * self._share
            known = self._seconds.get(rows, took)
            self._seconds[rows] = min(took, FADING * known)
        return seconds

    def prune(self, dead: AbstractSet[int], now: float) -> None:
        """Record dead nodes: a segment without live nodes is given up, and later ones enter the stage earlier."""
        free = self._left
        for segment in self._under_way:
            takes = segment.ends - segment.begins
            given_up = segment.ends > now and segment.nodes <= dead
            segment.begins = max(segment.sent, free)
            segment.ends = max(segment.begins, now) if given_up else segment.begins + takes
            free = segment.ends

    @property
    def free_at(self) -> float:
        """Time at which all segments have left the stage."""
        return self._under_way[-1].ends if self._under_way else 0.0

    @property
    def due(self) -> float:
        """Time at which the oldest segment should come back; infinite if it is unknown, or if none is in flight."""
        if not self._under_way or self._round_trip is None:
            return math.inf
        return self._under_way[0].begins + self._round_trip

    @property
    def ready_at(self) -> float:
        """Time from which on a new segment would hardly wait."""
        if not self._under_way:
            return 0.0
        last = self._under_way[-1]
        return last.ends - SLACK * (last.ends - last.begins)

    def _estimated(self, rows: int) -> float:
        """Return the seconds of a segment: the shortest ones known for as many rows or more, else the longest."""
        larger = [seconds for known, seconds in self._seconds.items() if known >= rows]
        return min(larger) if larger else max(self._seconds.values(), default=0.0)


class Curve:
    """Seconds of one stage by rows, with one point between successive powers of two."""

    def __init__(self) -> None:
        self._points: dict[int, Point] = {}

    def learn(self, visit: Visit) -> None:
        """Add a measurement."""
        place = visit.rows.bit_length()
        rows, seconds = self._points.get(place, visit)
        newer = seconds + NEWS * (visit.seconds - seconds)
        least, most = STEP
        pace = min(max(newer / seconds, least), most) if seconds > 0 else 1.0
        for other, (at, took) in self._points.items():
            self._points[other] = at, took * pace
        self._points[place] = rows + NEWS * (visit.rows - rows), newer

    def of(self, rows: Sequence[int]) -> list[float]:
        """Return the seconds for each of these numbers of rows.

        After a point the curve keeps its slope, up to the height of the next point: a stage is assumed to be slower
        only if that was measured.
        """
        rising: list[Point] = []
        for place in sorted(self._points):
            at, seconds = self._points[place]
            least = rising[-1][1] if rising else 0.0
            rising.append((at, max(seconds, least)))
        return [_extrapolated(rising, count) for count in rows]


class StageTimes:
    """The curves of all stages of a ring, and of the wires between them."""

    def __init__(self) -> None:
        self._curves: list[Curve] = []
        self._wires: dict[int, Point] = {}  # like the points of a curve, with the shortest measured times
        self._slowest: list[Point] = []  # curve of the slowest stage; empty after a new measurement
        self._whole: list[Point] = []  # curve of all stages and wires together

    def learn(self, visits: Sequence[Visit], way: float) -> None:
        """Add the visits of a returned message, and the seconds of its round trip."""
        while len(self._curves) < len(visits):
            self._curves.append(Curve())
        for curve, visit in zip(self._curves, visits):
            curve.learn(visit)
        rows = visits[0].rows if visits else 0
        if rows and len(visits) == len(self._curves) and visits[-1].rows == rows:  # nothing was pruned in flight
            seconds = way - sum(visit.seconds for visit in visits)  # on wires, or in a queue
            place = rows.bit_length()
            known = self._wires.get(place, (rows, seconds))[1]
            self._wires[place] = rows, min(seconds, FADING * known)
        self._slowest = []

    def slowest(self, rows: int) -> float:
        """Return the seconds of the slowest stage for `rows` rows; 0 before any measurement."""
        self._update()
        return _interpolated(self._slowest, rows)

    def seconds_per_row(self, rows: int) -> float:
        """Return the seconds of one more row, beyond `rows` rows, in all stages and on all wires together."""
        self._update()
        place = min(max(bisect_right(POINTS, rows), 1), len(POINTS) - 1)
        (first, before), (last, behind) = self._whole[place - 1:place + 1]
        return (behind - before) / (last - first)

    def _update(self) -> None:
        if self._slowest:
            return
        curves = [curve.of(POINTS) for curve in self._curves]
        columns = list(zip(*curves)) or [(0.0,)] * len(POINTS)
        self._slowest = list(zip(POINTS, map(max, columns)))
        wires: list[Point] = []
        least = math.inf
        for rows, seconds in sorted(self._wires.values(), reverse=True):
            least = min(seconds, least)  # fewer rows do not take longer
            wires.insert(0, (rows, least))
        wires = wires or [(1, 0.0)]
        crossed = [_interpolated(wires, rows) for rows in POINTS]
        passed = map(add, map(sum, columns), crossed)
        self._whole = list(zip(POINTS, passed))


def _interpolated(points: Sequence[Point], at: float) -> float:
    """Return the height at a place by linear interpolation between points."""
    if at <= points[0][0]:
        return points[0][1]
    for (left, low), (right, high) in zip(points, points[1:]):
        if at <= right:
            return low + (high - low) * (at - left) / (right - left)
    return points[-1][1]


def _extrapolated(points: Sequence[Point], at: float) -> float:
    """Return the height at a place on the line through the two points before it, at most that of the next point."""
    before = [point for point in points if point[0] <= at]
    if not before:
        return points[0][1]
    behind = points[len(before):]
    highest = behind[0][1] if behind else math.inf
    left, low = before[-1]
    slope = 0.0
    if len(before) > 1:
        earlier, lower = before[-2]
        slope = (low - lower) / (left - earlier)
    return min(low + slope * (at - left), highest)


class Bidder(Protocol):
    """A request that competes for rows."""

    request: int
    tree: TokenTree
    options: TargetOptions
    passed_over: int  # number of segments since the last one with guesses of this request


class RowAllocator:
    """The division of the rows of the next segment among requests."""

    def __init__(self, segments: int, times: StageTimes) -> None:
        self._segments = max(1, segments)  # in flight at the same time
        self._times = times
        self._open = False  # whether the rows of the next segment were divided
        self._least = 0.0  # minimum worth, a logarithm, of the guesses to send
        self._left = 0  # remaining rows for guesses
        self.left_out: set[int] = set()  # requests without a row in the next segment

    def share(self, bidder: Bidder, bidders: Sequence[Bidder], size: int) -> int:
        """Return how many rows a bidder may fill, text included; `size` is the rows of a single request's segment."""
        if not self._open or len(bidders) == 1:
            self._divide(bidders, size)
        among = worths(bidder, weighed=len(bidders) > 1)
        mine = min(self._left, sum(worth >= self._least for worth in among))
        self._left -= mine
        bidder.passed_over = 0 if mine else bidder.passed_over + bool(bidder.tree.waiting)
        rows = len(bidder.tree.unsent) + mine
        if not rows and len(bidders) > 1:
            self.left_out.add(bidder.request)
        return rows

    def close(self) -> None:
        """Record that the segment has left: the next call of `share` divides the rows of the next one."""
        self._open = False
        self.left_out.clear()

    def _divide(self, bidders: Sequence[Bidder], size: int) -> None:
        text = sum(len(bidder.tree.unsent) for bidder in bidders)
        served = max(1.0, len(bidders) / self._segments)
        everything = (worth for bidder in bidders for worth in worths(bidder, len(bidders) > 1))
        room_for_all = max(0, int(size * served) - text)
        best = heapq.nlargest(room_for_all, everything)
        good = sum(worth >= GOOD for worth in best)
        room_of_one = size - text
        best = best[:max(room_of_one, good)]
        if all(bidder.options.thrifty for bidder in bidders):
            tips = sum(bool(bidder.tree.unsent) for bidder in bidders)
            best = best[:self._paying(best, text, tips)]
        self._open, self._left = True, len(best)
        self._least = best[-1] if best else math.inf

    def _paying(self, best: Sequence[float], rows: int, certain: int) -> int:
        """Return how many of the `best` guesses pay in addition to `rows` rows of text, with `certain` tips among them.

        A guess in this segment is answered earlier by a segment's time in the slowest stage, and delays each other row
        by the time of one more row in all stages. Both are weighted with the probability that a row becomes text.
        Without a tip in the segment a wrong guess dies half-way on average.
        """
        likely, passed = float(certain), 1.0 if certain else WRONG_SHARE
        for place, worth in enumerate(best):
            chance = math.exp(min(worth, 0.0))
            gained = chance * self._times.slowest(rows + place)
            lost = passed * likely * self._times.seconds_per_row(rows + place)
            if likely and gained < lost:
                return place
            likely += chance
        return len(best)


def worths(bidder: Bidder, weighed: bool) -> Iterator[float]:
    """Yield the worths of unsent guesses: log-probabilities, with `weighed` plus the log of the request's weight."""
    tree = bidder.tree
    weight = math.log(bidder.options.priority * (1 + bidder.passed_over)) if weighed else 0.0
    added = weight - tree.nodes[tree.tip].score
    return (tree.nodes[node].score + added for node in tree.waiting)


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
        at = 0
        for place, message in enumerate(self._messages, 1):
            if any(other.request == segment.request for other in message):
                at = place
        while at < len(self._messages) and not _fits(segment, self._messages[at]):
            at += 1
        if at == len(self._messages):
            self._messages.append([])
        self._messages[at].append(segment)

    def take(self) -> list[Segment]:
        """Remove and return the next message."""
        return self._messages.popleft()

    def drop(self, request: int) -> int:
        """Drop the segments of a request; return their number."""
        before = sum(map(len, self._messages))
        left = ([segment for segment in message if segment.request != request] for message in self._messages)
        self._messages = deque(filter(None, left))
        return before - sum(map(len, self._messages))


def _fits(segment: Segment, message: list[Segment]) -> bool:
    """Return whether a message has room for a segment, and both or neither of them need inner features."""
    rows = sum(len(other.nodes) for other in message)
    alike = all((other.inner is None) == (segment.inner is None) for other in message)
    return alike and rows + len(segment.nodes) <= MESSAGE_ROWS


class Rate:
    """A recent rate of settled tokens."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0  # sums with exponentially decaying weights

    def add(self, tokens: int, passed: float) -> None:
        """Add tokens that settled in `passed` seconds."""
        fading = math.exp(-passed / LAST)
        counts = LAST * (1 - fading) / passed if passed else 1.0  # mean weight of these seconds
        self._tokens = self._tokens * fading + tokens * counts
        self._seconds = self._seconds * fading + passed * counts

    @property
    def mean(self) -> float:
        """Tokens per second; 0 before any measurement."""
        return self._tokens / self._seconds if self._seconds else 0.0


class DraftGate:
    """The decision to draft a level, from the recent rate of all requests and the recent time of a level."""

    def __init__(self) -> None:
        self._rate = Rate()
        self._since: float | None = None
        self._level: float | None = None

    def waits_for(self, promise: float, likely: float, stage_seconds: float) -> bool:
        """Return whether a segment of `likely` expected tokens should wait for a level of `promise` expected tokens.

        If it waits, it leaves later by the level's time. Otherwise the level leaves after it, by a segment's time in a
        stage. Levels that are drafted in these `stage_seconds` would leave with it; they are delayed, too.
        """
        level = self._level or 0.0
        levels = int(stage_seconds / level) if level else 0
        chance = min(promise, SURE)
        # the expected tokens of those levels: the sum of chance ** n for n from 2 to `levels`
        later = (chance ** 2 - chance ** (levels + 1)) / (1 - chance) if levels > 1 else 0.0
        return promise * (stage_seconds - level) > (likely + later) * level

    def settled(self, tokens: int, now: float) -> None:
        """Add settled tokens."""
        self._rate.add(tokens, 0.0 if self._since is None else now - self._since)
        self._since = now

    def drafted(self, seconds: float) -> None:
        """Add the seconds that networks took for one level."""
        known = seconds if self._level is None else FADING * self._level
        self._level = min(seconds, known)  # a longer level also read a prompt, or was interrupted

    def pays(self, promise: float, due: float, now: float) -> bool:
        """Return whether to begin a level of `promise` expected tokens if the next answer is due at the time `due`."""
        if not self._level or not self._rate.mean:
            return True
        waits = now + self._level - max(due, now)
        if promise >= MARGIN * self._rate.mean * waits:
            return True
        self._level *= DOUBT
        return False


class Fallback:
    """The decision whether a single request guesses, or rests from guessing while plain decoding is faster.

    It rests once it is `LOSS` tokens behind plain decoding and has recently been slower. A rest that begins soon after
    another one is longer, so the loss is bounded. Plain decoding is measured at the start and in every rest.
    """

    def __init__(self) -> None:
        self.guesses = True
        self._plain, self._guessing = Rate(), Rate()
        self._lead = 0.0  # tokens by which guessing is ahead of plain decoding, at most 0
        self._behind = 0  # tokens settled since `_lead` was 0
        self._period = REST // 2
        self._rest = 0  # length of the present rest in tokens
        self._tokens = 0  # settled since guessing, or the rest, began
        self._since: float | None = None  # time at which tokens last settled

    def begin(self, plain: float) -> None:
        """Begin a request, or a time in which it is the only one; `plain` is the measured seconds of a plain token."""
        self._since = None
        if plain and not self._plain.mean:
            self._plain.add(1, plain)

    def settled(self, tokens: int, now: float) -> None:
        """Add settled tokens of the single request."""
        since, self._since = self._since, now
        if since is None or not self._plain.mean:
            return
        self._tokens += tokens
        if self.guesses:
            self._weigh(tokens, now - since)
        elif self._tokens > DRAINED:
            self._recover(tokens, now - since)

    def _weigh(self, tokens: int, seconds: float) -> None:
        """Begin a rest if guessing has fallen too far behind."""
        self._guessing.add(tokens, seconds)
        self._lead = min(0.0, self._lead + tokens - seconds * self._plain.mean)
        self._behind = self._behind + tokens if self._lead else 0
        if self._lead < -LOSS and self._guessing.mean < self._plain.mean:
            self._period = REST if self._tokens > REST else 2 * self._period
            self._rest = self._period - self._behind
            self._turn(guesses=False)

    def _recover(self, tokens: int, seconds: float) -> None:
        """Guess again after the rest, or as soon as plain decoding proves slower."""
        if self._tokens <= DRAINED + tokens:
            self._plain = Rate()
        self._plain.add(tokens, seconds)
        slower = self._tokens >= TRIAL and self._guessing.mean > self._plain.mean
        if slower or self._tokens >= self._rest:
            self._turn(guesses=True)

    def _turn(self, guesses: bool) -> None:
        self.guesses = guesses
        self._lead, self._behind, self._tokens = 0.0, 0, 0


class Pacing:
    """The pacing of one ring, which is filled by `depth` segments."""

    def __init__(self, depth: int) -> None:
        self.first_stage = FirstStage(1 / max(1, depth - 1))
        self.times = StageTimes()
        self.rows = RowAllocator(depth - 1, self.times)
        self.batcher = Batcher()
        self.gate = DraftGate()
        self.fallback = Fallback()
