"""Pacing: when a segment leaves, with which rows, and whether a level is drafted before the next answer.

It is fed by what was sent and by the seconds that stages report. It knows nothing about strategies, or how guesses are
made.

- `FirstStage`: when the first stage is free. A segment spends about as long in each stage, so the first one is busy for
  a share of the time after which a segment comes back that waited for no other. It needs no message.
- `StageTimes`: what each stage takes by rows. A stage is a curve that rises with rows.
- `RowAllocator`: which guesses of all requests go into the next segment. Text goes before guesses, the prompt of the
  oldest request first. Guesses go by their probability times the priority of their request, which counts once more for
  each segment that left without any of its guesses: nobody is passed over for ever. Segments take turns, so each is for
  a share of the requests, and has as many rows for each of those as a request alone would send; beyond the rows of one
  request a guess must be worth its row.
- `Batcher`: segments of several requests that leave together. The first segments that requests have put in make the
  first message, their second ones the next.
- `DraftGate`: whether to draft a level now: what it promises, against what would wait for it meanwhile.
- `Fallback`: whether to guess at all. Where ranks share the cores of one machine, rows cost more than they bring.
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

SLACK = 0.1  # of a segment's time in the stage: as early as that, a segment may be sent
NEWS = 0.25  # the weight of a new time on the way beside all before it
FADING = 1.02  # by which the shortest time seen, of a segment or a level, grows with each new one: slower is believed
STEP = (0.5, 2.0)  # by which a single new time may move the times for other numbers of rows
POINTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # rows for which sums over stages are kept
GOOD = math.log(0.1)  # the worth from which a guess may go beyond the rows of one request
HALF = 0.5  # of the stages are passed in the mean by a guess that proves wrong behind others
MESSAGE_ROWS = 256  # rows of a message of several segments
LAST = 3.0  # seconds; text that settled so long ago counts 1 / e in its rate
DOUBT = 0.97  # by which a level's time shrinks whenever it speaks against one, so that one is tried now and then
SURE = 0.99  # no level is foreseen to be right more often
MARGIN = 2.0  # tokens that a level must promise for each token that would be settled while others wait for it
LOSS = 2.0  # tokens that guessing may be behind plain decoding before it rests
REST = 128  # tokens since it fell behind at which the rest ends; twice as many if it had begun after fewer than that
DRAINED = 2  # plain tokens after which no guess is under way any more
TRIAL = 8  # plain tokens from which on plain decoding is believed to be slower than guessing
Point = Tuple[float, float]  # rows, seconds


class Terms(NamedTuple):
    """How a request is run.

    `inner`: the draft's features are the inputs of inner layers, which segments must ask the stages for. Without
    `prunes`, stages compute guesses to the end that died on their way, and forget them when they have come back.
    """

    inner: bool = False
    prunes: bool = True
    thrifty: bool = True  # whether only those guesses are sent, and drafted, that pay
    plain: float = 0.0  # seconds of a token by plain decoding, to which a request alone falls back; 0: never
    priority: float = 1.0  # how much its guesses count beside those of others
    logprobs: LogprobRequest | None = None  # which log-probabilities are wanted


USUAL = Terms()


@dataclass
class Stay:
    """A segment in the first stage."""

    nodes: frozenset[int]
    rows: int
    sent: float
    begins: float
    ends: float


class FirstStage:
    """The stays that are not over. `share` is the part of a segment's way that it spends in the first stage."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._seconds: dict[int, float] = {}  # rows -> the shortest time seen
        self._stays: deque[Stay] = deque()  # of the segments that are not back
        self._left = 0.0  # when the newest of the others had left the stage
        self._way: float | None = None  # how long segments were on their way recently

    def send(self, nodes: list[int], now: float) -> None:
        """A segment was sent."""
        begins = max(now, self.free_at)
        ends = begins + self._takes(len(nodes))
        stay = Stay(frozenset(nodes), len(nodes), now, begins, ends)
        self._stays.append(stay)

    def back(self, rows: int, now: float) -> float:
        """The oldest segment is back, with so many of its rows; returns how long it was on its way."""
        assert self._stays, "a segment is back, and none was under way"
        stay = self._stays.popleft()
        self._left = min(stay.ends, now)
        begins = stay.begins if stay.ends <= now else stay.sent  # what was reckoned too late is not believed
        if rows:
            way = now - begins if self._way is None else self._way
            self._way = way + NEWS * (now - begins - way)
        if rows == stay.rows:
            took = (now - begins) * self._share
            known = self._seconds.get(rows, took)
            self._seconds[rows] = min(took, FADING * known)
        return now - begins

    def prune(self, dead: AbstractSet[int], now: float) -> None:
        """These nodes died: a segment without others is given up, and those behind it come earlier."""
        free = self._left
        for stay in self._stays:
            takes = stay.ends - stay.begins
            given_up = stay.ends > now and stay.nodes <= dead
            stay.begins = max(stay.sent, free)
            stay.ends = max(stay.begins, now) if given_up else stay.begins + takes
            free = stay.ends

    @property
    def free_at(self) -> float:
        """The moment at which everything that was sent has left the stage."""
        return self._stays[-1].ends if self._stays else 0.0

    @property
    def due(self) -> float:
        """The moment at which the oldest segment should be back; infinite if none is under way."""
        if not self._stays or self._way is None:
            return math.inf
        return self._stays[0].begins + self._way

    @property
    def ready_at(self) -> float:
        """The moment from which on a segment may be sent, since it would hardly wait."""
        if not self._stays:
            return 0.0
        last = self._stays[-1]
        return last.ends - SLACK * (last.ends - last.begins)

    def _takes(self, rows: int) -> float:
        """Seconds of a segment: the shortest known of one with as many rows or more, else the longest known."""
        larger = [seconds for known, seconds in self._seconds.items() if known >= rows]
        return min(larger) if larger else max(self._seconds.values(), default=0.0)


class Curve:
    """Seconds of one stage by rows; numbers of rows between the same two powers of two count as alike."""

    def __init__(self) -> None:
        self._points: dict[int, Point] = {}

    def learn(self, visit: Visit) -> None:
        """The stage has computed so many rows in so many seconds."""
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

        Between two that are known the curve goes on as it did before them, up to the height of the second: a stage is
        not taken to be slower for more rows before it was.
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
        self._slowest: list[Point] = []  # of the stages; empty: not reckoned since the last news
        self._whole: list[Point] = []  # all stages and wires together

    def learn(self, visits: Sequence[Visit], way: float) -> None:
        """A message has come back that was computed by the first of the stages, as these say, and on its way so long.
        """
        while len(self._curves) < len(visits):
            self._curves.append(Curve())
        for curve, visit in zip(self._curves, visits):
            curve.learn(visit)
        first = visits[0].rows if visits else 0
        if first and len(visits) == len(self._curves) and visits[-1].rows == first:  # nothing was pruned on its way
            self._cross(first, way - sum(visit.seconds for visit in visits))
        self._slowest = []

    def _cross(self, rows: int, seconds: float) -> None:
        """So many rows were so long between the stages, on wires or in a queue."""
        place = rows.bit_length()
        known = self._wires.get(place, (rows, seconds))[1]
        self._wires[place] = rows, min(seconds, FADING * known)

    def slowest(self, rows: int) -> float:
        """Seconds of the slowest stage for so many rows; 0 before any is known."""
        self._reckon()
        return _between(self._slowest, rows)

    def more(self, rows: int) -> float:
        """Seconds that one row more takes in all stages and on all wires together, beside so many rows."""
        self._reckon()
        place = min(max(bisect_right(POINTS, rows), 1), len(POINTS) - 1)
        (first, before), (last, behind) = self._whole[place - 1:place + 1]
        return (behind - before) / (last - first)

    def _reckon(self) -> None:
        if self._slowest:
            return
        curves = [curve.of(POINTS) for curve in self._curves]
        columns = list(zip(*curves)) or [(0.0,)] * len(POINTS)
        self._slowest = list(zip(POINTS, map(max, columns)))
        wires: list[Point] = []
        least = math.inf
        for rows, seconds in sorted(self._wires.values(), reverse=True):
            least = min(seconds, least)  # fewer rows need no longer
            wires.insert(0, (rows, least))
        wires = wires or [(1, 0.0)]
        crossed = [_between(wires, rows) for rows in POINTS]
        passed = map(add, map(sum, columns), crossed)
        self._whole = list(zip(POINTS, passed))


def _between(points: Sequence[Point], at: float) -> float:
    """The height at a place, on straight lines between these points."""
    if at <= points[0][0]:
        return points[0][1]
    for (left, low), (right, high) in zip(points, points[1:]):
        if at <= right:
            return low + (high - low) * (at - left) / (right - left)
    return points[-1][1]


def _foreseen(points: Sequence[Point], at: float) -> float:
    """The height at a place, if the line through the two points before it goes on up to the height of the next."""
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
    passed_over: int  # segments that left without any of its guesses, since one left with some


class RowAllocator:
    """The rows of the segment that is being put together."""

    def __init__(self, segments: int, times: StageTimes) -> None:
        self._segments = max(1, segments)  # that are under way at once
        self._times = times
        self._open = False  # whether it was reckoned since the last segment left
        self._least = 0.0  # the worth of the last guess that goes, as a logarithm
        self._left = 0  # rows for guesses
        self.left_out: set[int] = set()  # requests that got no row of it

    def share(self, bidder: Bidder, bidders: Sequence[Bidder], size: int) -> int:
        """How many of `size` rows this one of the bidders may fill; those of its text are among them."""
        if not self._open or len(bidders) == 1:  # who is alone waits for nobody else
            self._reckon(bidders, size)
        among = worths(bidder, weighed=len(bidders) > 1)
        mine = min(self._left, sum(worth >= self._least for worth in among))
        self._left -= mine
        bidder.passed_over = 0 if mine else bidder.passed_over + bool(bidder.tree.waiting)
        rows = len(bidder.tree.unsent) + mine
        if not rows and len(bidders) > 1:
            self.left_out.add(bidder.request)
        return rows

    def close(self) -> None:
        """The segment has left, and all may ask for rows of the next one."""
        self._open = False
        self.left_out.clear()

    def _reckon(self, bidders: Sequence[Bidder], size: int) -> None:
        text = sum(len(bidder.tree.unsent) for bidder in bidders)
        served = max(1.0, len(bidders) / self._segments)
        everything = (worth for bidder in bidders for worth in worths(bidder, len(bidders) > 1))
        best = heapq.nlargest(max(0, int(size * served) - text), everything)
        good = sum(worth >= GOOD for worth in best)
        best = best[:max(size - text, good)]
        if all(bidder.terms.thrifty for bidder in bidders):
            tips = sum(bool(bidder.tree.unsent) for bidder in bidders)
            best = best[:self._paying(best, text, tips)]
        self._open, self._left = True, len(best)
        self._least = best[-1] if best else math.inf

    def _paying(self, best: Sequence[float], rows: int, certain: int) -> int:
        """How many of these guesses pay, the best first, beside rows of text of which so many are last tokens.

        One that goes along is answered earlier by the time of a segment in the slowest stage, and each other row later
        by what one more row takes in all stages. Both count as much as the rows are likely to become text. Beside a
        last token no guess is judged on the way; where guesses are alone, a wrong one dies half-way in the mean.
        """
        likely, passed = float(certain), 1.0 if certain else HALF
        for place, worth in enumerate(best):
            chance = math.exp(min(worth, 0.0))
            gained = chance * self._times.slowest(rows + place)
            lost = passed * likely * self._times.more(rows + place)
            if likely and gained < lost:
                return place
            likely += chance
        return len(best)


def worths(bidder: Bidder, weighed: bool) -> Iterator[float]:
    """The logarithms of what the guesses that wait are worth: their probability, and beside others what weighs it."""
    tree = bidder.tree
    weight = math.log(bidder.terms.priority * (1 + bidder.passed_over)) if weighed else 0.0
    added = weight - tree.nodes[tree.tip].score
    return (tree.nodes[node].score + added for node in tree.waiting)


class Batcher:
    """Messages that are being put together, the next one first."""

    def __init__(self) -> None:
        self._messages: deque[list[Segment]] = deque()

    def __len__(self) -> int:
        return len(self._messages)

    def holds(self, request: int) -> bool:
        """Whether a segment of this request waits."""
        return any(segment.request == request for message in self._messages for segment in message)

    def put(self, segment: Segment) -> None:
        """Add a segment, behind all others of its request."""
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
        """The segments of the next message."""
        return self._messages.popleft()

    def drop(self, request: int) -> int:
        """Drop what a request has put in; returns how many segments that were."""
        before = sum(map(len, self._messages))
        left = ([segment for segment in message if segment.request != request] for message in self._messages)
        self._messages = deque(message for message in left if message)
        return before - sum(map(len, self._messages))


def _fits(segment: Segment, message: list[Segment]) -> bool:
    """Whether a message has room for a segment, and asks for inner features as it does."""
    rows = sum(len(other.nodes) for other in message)
    alike = all((other.inner is None) == (segment.inner is None) for other in message)
    return alike and rows + len(segment.nodes) <= MESSAGE_ROWS


class Rate:
    """How fast text grows, recently."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0  # settled, and passed; what is old counts less

    def add(self, tokens: int, passed: float) -> None:
        """So many tokens have become text, in so many seconds."""
        fading = math.exp(-passed / LAST)
        counts = LAST * (1 - fading) / passed if passed else 1.0  # of what happened meanwhile, and in the mean
        self._tokens = self._tokens * fading + tokens * counts
        self._seconds = self._seconds * fading + passed * counts

    @property
    def mean(self) -> float:
        """Tokens per second; 0 before any is known."""
        return self._tokens / self._seconds if self._seconds else 0.0


class DraftGate:
    """How fast the text of all requests grows, and how long a level takes, recently."""

    def __init__(self) -> None:
        self._rate = Rate()
        self._since: float | None = None
        self._level: float | None = None

    def holds(self, promise: float, likely: float, behind: float) -> bool:
        """Whether a level that promises so many tokens should leave together with what waits, of so many tokens.

        What waits leaves later by the level's time. Behind it the level would wait for so many seconds, the time of a
        segment in a stage, and the levels drafted in that time would leave together with it, so they are later, too.
        """
        level = self._level or 0.0
        beside = int(behind / level) if level else 0
        chance = min(promise, SURE)
        later = (chance ** 2 - chance ** (beside + 1)) / (1 - chance) if beside > 1 else 0.0
        return promise * (behind - level) > (likely + later) * level

    def settled(self, tokens: int, now: float) -> None:
        """So many tokens have become text."""
        self._rate.add(tokens, 0.0 if self._since is None else now - self._since)
        self._since = now

    def drafted(self, seconds: float) -> None:
        """The networks have computed for so long on one level."""
        known = seconds if self._level is None else FADING * self._level
        self._level = min(seconds, known)  # what takes longer has read a prompt, too, or was held up

    def pays(self, promise: float, due: float, now: float) -> bool:
        """Whether to begin a level that promises so many tokens, if the next answer is due at this moment."""
        if not self._level or not self._rate.mean:
            return True
        waits = now + self._level - max(due, now)
        if promise >= MARGIN * self._rate.mean * waits:
            return True
        self._level *= DOUBT
        return False


class Fallback:
    """Whether a request that is alone guesses, or decodes plainly for a while because that is quicker.

    It rests once it is `LOSS` tokens behind plain decoding and was slower over the last tokens, the longer the sooner
    that was, so what it may lose is bounded. What plain decoding takes is measured at the start, and in every rest.
    """

    def __init__(self) -> None:
        self.guesses = True
        self._plain, self._guessing = Rate(), Rate()
        self._lead = 0.0  # tokens by which guessing is ahead, 0 at most …
        self._behind = 0  # … and tokens that settled since it was 0
        self._period = REST // 2
        self._rest = 0  # tokens that the rest lasts
        self._tokens = 0  # settled since it began to guess, or to rest
        self._since: float | None = None  # when tokens settled last

    def begin(self, plain: float) -> None:
        """A request begins, or others end beside it; `plain` are the seconds of a token, measured at the start."""
        self._since = None
        if plain and not self._plain.mean:
            self._plain.add(1, plain)

    def settled(self, tokens: int, now: float) -> None:
        """So many tokens of the request have become text."""
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
        """Guess again after the rest, or as soon as plain decoding proves to be slower."""
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
    """All of these, of one ring that so many segments fill."""

    def __init__(self, depth: int) -> None:
        self.first_stage = FirstStage(1 / max(1, depth - 1))
        self.times = StageTimes()
        self.rows = RowAllocator(depth - 1, self.times)
        self.batcher = Batcher()
        self.gate = DraftGate()
        self.fallback = Fallback()
