"""Pacing: when a segment leaves, with which rows, and whether a level is drafted before the next answer.

Its inputs are the segments sent, the seconds that stages report and what guesses promise. It knows nothing about
strategies, or how guesses are made.

- `FirstStage`: when the first stage is free. A segment spends equal times in all stages, about, so the first one is
  busy for a share of the round trip of a segment that did not wait. This needs no message.
- `StageTimes`: the time of each stage by rows, as a rising curve.
- `RowAllocator`: which guesses of all requests go into the next segment. Text goes before guesses, the prompt of the
  oldest request first. Guesses go by their probability times the priority of their request, which counts once more for
  each segment that left without any of its guesses. Segments take turns, so each is for a share of the requests, and
  has as many rows for each of those as a request alone would send; beyond the rows of one request a guess must be worth
  its row.
- `Batcher`: segments of several requests that leave together: the first ones of all requests in one message, the second
  ones in the next.
- `DraftGate`: whether to draft a level now: its expected gain against the tokens that would wait for it.
- `Fallback`: whether to guess at all. Where ranks share the cores of one machine, rows may cost more than they gain.
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

SLACK = 0.1  # of a segment's time in the stage: the next one may be sent this much earlier
NEWS = 0.25  # the weight of a new measurement
FADING = 1.02  # growth of the shortest time seen, of a segment or a level, with each new one
STEP = (0.5, 2.0)  # by which one new time may change the times for other numbers of rows
POINTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # rows for which sums over stages are kept
GOOD = math.log(0.1)  # the worth from which a guess may go beyond the rows of one request
WRONG_SHARE = 0.5  # of the stages, in the mean, compute a guess that proves wrong
MESSAGE_ROWS = 256  # rows of a message of several segments
LAST = 3.0  # seconds after which settled text counts 1 / e in its rate
DOUBT = 0.97  # factor of a level's time whenever it prevents one, so that a level is tried now and then
SURE = 0.99  # highest probability that a level is right
MARGIN = 2.0  # tokens that a level must promise for each token that would settle while others wait for it
LOSS = 2.0  # tokens by which guessing may be behind plain decoding before it rests
REST = 128  # tokens since it fell behind at which the rest ends; doubled if guessing had lasted for fewer
DRAINED = 2  # plain tokens after which no guess is under way any more
TRIAL = 8  # plain tokens from which on their measured rate counts
Point = Tuple[float, float]  # rows, seconds


class Terms(NamedTuple):
    """How a request is run."""

    inner: bool = False  # whether the draft needs inputs of inner layers
    prunes: bool = True  # whether dead guesses are dropped on their way, or only after they came back
    thrifty: bool = True  # whether only those guesses are drafted and sent that pay
    plain_seconds: float = 0.0  # seconds of a token by plain decoding, to which a request alone falls back; 0: never
    priority: float = 1.0  # the weight of its guesses beside those of others
    logprobs: LogprobRequest | None = None


USUAL = Terms()


@dataclass
class Occupancy:
    """The time of a segment in the first stage."""

    nodes: frozenset[int]
    sent: float
    begins: float
    ends: float


class FirstStage:
    """The segments under way; each spends a `share` of its way in the first stage."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._seconds: dict[int, float] = {}  # rows -> the shortest time seen
        self._under_way: deque[Occupancy] = deque()  # the oldest first
        self._left = 0.0  # when the newest returned segment left the stage
        self._way: float | None = None  # recent seconds of a segment's way

    def send(self, nodes: list[int], now: float) -> None:
        """Note a segment that was sent."""
        begins = max(now, self.free_at)
        ends = begins + self._takes(len(nodes))
        self._under_way.append(Occupancy(frozenset(nodes), now, begins, ends))

    def back(self, rows: int, now: float) -> float:
        """Note that the oldest segment came back with `rows` of its rows; returns the seconds of its way."""
        assert self._under_way, "a segment is back, and none was under way"
        segment = self._under_way.popleft()
        self._left = min(segment.ends, now)
        estimate_was_late = segment.ends > now
        seconds = now - (segment.sent if estimate_was_late else segment.begins)
        if rows:
            way = seconds if self._way is None else self._way
            self._way = way + NEWS * (seconds - way)
        if rows == len(segment.nodes):
            took = seconds * self._share
            known = self._seconds.get(rows, took)
            self._seconds[rows] = min(took, FADING * known)
        return seconds

    def prune(self, dead: AbstractSet[int], now: float) -> None:
        """Note dead nodes: a segment without others is given up, and later ones enter the stage earlier."""
        free = self._left
        for segment in self._under_way:
            takes = segment.ends - segment.begins
            given_up = segment.ends > now and segment.nodes <= dead
            segment.begins = max(segment.sent, free)
            segment.ends = max(segment.begins, now) if given_up else segment.begins + takes
            free = segment.ends

    @property
    def free_at(self) -> float:
        """The moment at which all segments have left the stage."""
        return self._under_way[-1].ends if self._under_way else 0.0

    @property
    def due(self) -> float:
        """The moment at which the oldest segment should come back; infinite if there is none."""
        if not self._under_way or self._way is None:
            return math.inf
        return self._under_way[0].begins + self._way

    @property
    def ready_at(self) -> float:
        """The moment from which on a segment would hardly wait."""
        if not self._under_way:
            return 0.0
        last = self._under_way[-1]
        return last.ends - SLACK * (last.ends - last.begins)

    def _takes(self, rows: int) -> float:
        """Seconds of a segment: the shortest known one with as many rows or more, else the longest known one."""
        larger = [seconds for known, seconds in self._seconds.items() if known >= rows]
        return min(larger) if larger else max(self._seconds.values(), default=0.0)


class Curve:
    """Seconds of one stage by rows, with a point between any two powers of two."""

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
        """Seconds for each of these numbers of rows.

        Between two points the curve continues its slope up to the height of the second one: a stage is not assumed to
        be slower before that was measured.
        """
        rising: list[Point] = []
        for place in sorted(self._points):
            at, seconds = self._points[place]
            least = rising[-1][1] if rising else 0.0
            rising.append((at, max(seconds, least)))
        return [_foreseen(rising, count) for count in rows]


class StageTimes:
    """The curves of all stages of a ring, and of the wires between them."""

    def __init__(self) -> None:
        self._curves: list[Curve] = []
        self._wires: dict[int, Point] = {}  # as the points of a curve, with the shortest times seen
        self._slowest: list[Point] = []  # of the stages; empty after a new measurement
        self._whole: list[Point] = []  # of all stages and wires together

    def learn(self, visits: Sequence[Visit], way: float) -> None:
        """Add the visits of a returned message, and the seconds of its whole way."""
        while len(self._curves) < len(visits):
            self._curves.append(Curve())
        for curve, visit in zip(self._curves, visits):
            curve.learn(visit)
        rows = visits[0].rows if visits else 0
        if rows and len(visits) == len(self._curves) and visits[-1].rows == rows:  # nothing was pruned on its way
            seconds = way - sum(visit.seconds for visit in visits)  # on wires, or in a queue
            place = rows.bit_length()
            known = self._wires.get(place, (rows, seconds))[1]
            self._wires[place] = rows, min(seconds, FADING * known)
        self._slowest = []

    def slowest(self, rows: int) -> float:
        """Seconds of the slowest stage for `rows` rows; 0 before any measurement."""
        self._update()
        return _between(self._slowest, rows)

    def more(self, rows: int) -> float:
        """Seconds that one row more takes in all stages and on all wires, beside `rows` rows."""
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
        crossed = [_between(wires, rows) for rows in POINTS]
        passed = map(add, map(sum, columns), crossed)
        self._whole = list(zip(POINTS, passed))


def _between(points: Sequence[Point], at: float) -> float:
    """The height at a place, on straight lines between points."""
    if at <= points[0][0]:
        return points[0][1]
    for (left, low), (right, high) in zip(points, points[1:]):
        if at <= right:
            return low + (high - low) * (at - left) / (right - left)
    return points[-1][1]


def _foreseen(points: Sequence[Point], at: float) -> float:
    """The height at a place on the line through the two points before it, up to the height of the next one."""
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
    """A request that has guesses."""

    request: int
    tree: TokenTree
    terms: Terms
    passed_over: int  # segments since one that carried guesses of it


class RowAllocator:
    """Divides the rows of the next segment among requests."""

    def __init__(self, segments: int, times: StageTimes) -> None:
        self._segments = max(1, segments)  # that are under way at once
        self._times = times
        self._open = False  # whether rows were divided since the last segment left
        self._least = 0.0  # the lowest worth, a logarithm, of the guesses that go
        self._left = 0  # rows for guesses
        self.left_out: set[int] = set()  # requests that got no row

    def share(self, bidder: Bidder, bidders: Sequence[Bidder], size: int) -> int:
        """How many of `size` rows a bidder may fill, with those of its text."""
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
        """The segment has left; divide the rows of the next one."""
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
        if all(bidder.terms.thrifty for bidder in bidders):
            tips = sum(bool(bidder.tree.unsent) for bidder in bidders)
            best = best[:self._paying(best, text, tips)]
        self._open, self._left = True, len(best)
        self._least = best[-1] if best else math.inf

    def _paying(self, best: Sequence[float], rows: int, certain: int) -> int:
        """How many of the `best` guesses pay beside `rows` rows of text, of which `certain` are last tokens.

        A guess that goes along is answered earlier by a segment's time in the slowest stage, and delays each other row
        by the time of one more row in all stages; both are weighted with the probability that a row becomes text.
        Without a last token a wrong guess dies half-way, in the mean.
        """
        likely, passed = float(certain), 1.0 if certain else WRONG_SHARE
        for place, worth in enumerate(best):
            chance = math.exp(min(worth, 0.0))
            gained = chance * self._times.slowest(rows + place)
            lost = passed * likely * self._times.more(rows + place)
            if likely and gained < lost:
                return place
            likely += chance
        return len(best)


def worths(bidder: Bidder, weighed: bool) -> Iterator[float]:
    """The worths of the waiting guesses: logarithms of their probability, `weighed` with the request's priority."""
    tree = bidder.tree
    weight = math.log(bidder.terms.priority * (1 + bidder.passed_over)) if weighed else 0.0
    added = weight - tree.nodes[tree.tip].score
    return (tree.nodes[node].score + added for node in tree.waiting)


class Batcher:
    """Messages that wait to leave, the next one first."""

    def __init__(self) -> None:
        self._messages: deque[list[Segment]] = deque()

    def __len__(self) -> int:
        return len(self._messages)

    def holds(self, request: int) -> bool:
        """Whether a segment of this request waits."""
        return any(segment.request == request for message in self._messages for segment in message)

    def put(self, segment: Segment) -> None:
        """Add a segment behind all others of its request."""
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
        """Drop the segments of a request; returns their number."""
        before = sum(map(len, self._messages))
        left = ([segment for segment in message if segment.request != request] for message in self._messages)
        self._messages = deque(filter(None, left))
        return before - sum(map(len, self._messages))


def _fits(segment: Segment, message: list[Segment]) -> bool:
    """Whether a message has room for a segment, and needs inner features if and only if it does."""
    rows = sum(len(other.nodes) for other in message)
    alike = all((other.inner is None) == (segment.inner is None) for other in message)
    return alike and rows + len(segment.nodes) <= MESSAGE_ROWS


class Rate:
    """A recent rate of settled tokens."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0  # with fading weights

    def add(self, tokens: int, passed: float) -> None:
        """Add tokens that settled in `passed` seconds."""
        fading = math.exp(-passed / LAST)
        counts = LAST * (1 - fading) / passed if passed else 1.0  # the mean weight of these seconds
        self._tokens = self._tokens * fading + tokens * counts
        self._seconds = self._seconds * fading + passed * counts

    @property
    def mean(self) -> float:
        """Tokens per second; 0 before any measurement."""
        return self._tokens / self._seconds if self._seconds else 0.0


class DraftGate:
    """Decides about levels by the recent rate of all requests and the recent time of a level."""

    def __init__(self) -> None:
        self._rate = Rate()
        self._since: float | None = None
        self._level: float | None = None

    def waits_for(self, promise: float, likely: float, behind: float) -> bool:
        """Whether a waiting segment, of `likely` expected tokens, should leave together with a level of `promise`.

        The segment leaves later by the level's time. Otherwise the level would wait for `behind` seconds, a segment's
        time in a stage, and the levels drafted in that time would leave with it; they are later, too.
        """
        level = self._level or 0.0
        beside = int(behind / level) if level else 0
        chance = min(promise, SURE)
        # the sum of chance ** n for n from 2 to beside: what those levels promise
        later = (chance ** 2 - chance ** (beside + 1)) / (1 - chance) if beside > 1 else 0.0
        return promise * (behind - level) > (likely + later) * level

    def settled(self, tokens: int, now: float) -> None:
        """Add settled tokens."""
        self._rate.add(tokens, 0.0 if self._since is None else now - self._since)
        self._since = now

    def drafted(self, seconds: float) -> None:
        """Add the seconds of networks for one level."""
        known = seconds if self._level is None else FADING * self._level
        self._level = min(seconds, known)  # a longer one has also read a prompt, or was interrupted

    def pays(self, promise: float, due: float, now: float) -> bool:
        """Whether to begin a level of `promise` expected tokens, if the next answer is due at a moment."""
        if not self._level or not self._rate.mean:
            return True
        waits = now + self._level - max(due, now)
        if promise >= MARGIN * self._rate.mean * waits:
            return True
        self._level *= DOUBT
        return False


class Fallback:
    """Whether a request that is alone guesses, or rests and decodes plainly for a while because that is faster.

    It rests once it is `LOSS` tokens behind plain decoding and was slower recently. A rest that begins soon after
    another one is longer, so the loss is bounded. Plain decoding is measured at the start, and in every rest.
    """

    def __init__(self) -> None:
        self.guesses = True
        self._plain, self._guessing = Rate(), Rate()
        self._lead = 0.0  # tokens by which guessing is ahead, at most 0
        self._behind = 0  # tokens that settled since `_lead` was 0
        self._period = REST // 2
        self._rest = 0  # tokens of the present rest
        self._tokens = 0  # settled since it began to guess, or to rest
        self._since: float | None = None  # moment at which tokens last settled

    def begin(self, plain: float) -> None:
        """A request begins, or is alone again; `plain` are the seconds of a plain token, measured at the start."""
        self._since = None
        if plain and not self._plain.mean:
            self._plain.add(1, plain)

    def settled(self, tokens: int, now: float) -> None:
        """Add settled tokens of the request."""
        since, self._since = self._since, now
        if since is None or not self._plain.mean:
            return
        self._tokens += tokens
        if self.guesses:
            self._weigh(tokens, now - since)
        elif self._tokens > DRAINED:
            self._recover(tokens, now - since)

    def _weigh(self, tokens: int, seconds: float) -> None:
        """Rest if guessing has lost too much."""
        self._guessing.add(tokens, seconds)
        self._lead = min(0.0, self._lead + tokens - seconds * self._plain.mean)
        self._behind = self._behind + tokens if self._lead else 0
        if self._lead < -LOSS and self._guessing.mean < self._plain.mean:
            self._period = REST if self._tokens > REST else 2 * self._period
            self._rest = self._period - self._behind
            self._turn(guesses=False)

    def _recover(self, tokens: int, seconds: float) -> None:
        """Guess again after the rest, or as soon as plain decoding is slower."""
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
    """The pacing of one ring, which `depth` segments fill."""

    def __init__(self, depth: int) -> None:
        self.first_stage = FirstStage(1 / max(1, depth - 1))
        self.times = StageTimes()
        self.rows = RowAllocator(depth - 1, self.times)
        self.batcher = Batcher()
        self.gate = DraftGate()
        self.fallback = Fallback()
