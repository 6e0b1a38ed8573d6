"""When the first stage is free, and how long stages and wires take, by the rows of a segment.

Segments leave as fast as the slowest stage takes them, by the visits of returned messages, and as wires carry their
rows. The latency of wires does not count: on long ones as many segments are in flight as leave during a round trip.

"By trial" is said of values that no recorded measurement supports: others near them may do as well.
"""
from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, deque
from dataclasses import dataclass
from operator import add, itemgetter
from typing import AbstractSet, Sequence

from config.curves import CurvePoint, extrapolated, interpolated
from pipeline.messages import Visit

# The next segment is sent this share of a segment's time in the stage before the stage is free: early enough that the
# stage does not idle, late enough that a new answer can still change its rows. By trial.
EARLY_SHARE = 0.1

# The weight of a new measurement in a mean. The last four have two thirds, so a device that becomes hot is noticed. By
# trial.
NEW_WEIGHT = 0.25

# The factor of a shortest time (of a level or wire) at each new measurement. A shortest time has no delays in
# it; growing by half a percent, it doubles in 140 measurements, and so follows a device that has become slower. With
# 1.02 queues made wires look slow, and tips left with half of the rows that were free.
SHORTEST_TIME_GROWTH = 1.005

# The largest factor by which a new time raises those for other numbers of rows: a single delay may not do more. A lower
# limit is not needed, since a mean falls by `NEW_WEIGHT` at most. By trial.
MAX_SCALE = 2.0

# A delay of at least this share of a round trip is one of a queue. Without it segments left too late on wires between
# cities. By trial.
QUEUE_SHARE = 0.25

# A wire is slower than all stages if segments that leave together come back this many times as far apart as the slowest
# stage takes: a random delay is not. By trial.
WIRE_RATIO = 1.25

# Up to this factor between two numbers of rows, a longer time says that the device has become slower. By trial.
ALIKE_ROWS = 1.25

# The rows at which the curves of all stages are summed: powers of two, as a curve has one point between two of them.
CURVE_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass
class Occupancy:
    """The estimated times of a segment in the first stage."""

    nodes: frozenset[int]
    sent_at: float
    begins_at: float
    ends_at: float
    keeps_others_back: bool  # until it is back, or dead


class FirstStage:
    """The segments in flight; each is taken to spend in the first stage what the slowest one needs, by `times`.

    If it left sooner, it would wait before the slowest stage, and its rows could no longer change.
    """

    def __init__(self, times: StageTimes) -> None:
        self._times = times
        self._in_flight: deque[Occupancy] = deque()  # the oldest first
        self._last_left_at = 0.0  # time at which the newest returned segment left the stage
        self._last_delay = 0.0  # seconds by which the newest returned segment was late
        self._mean_round_trip: float | None = None  # seconds, of recent segments

    def send(self, nodes: list[int], now: float, has_text: bool = True) -> None:
        """Record a segment that was sent.

        Before any measurement it takes no time; but guesses without text keep others back, since better ones will be
        known once they are judged.
        """
        begins_at = max(now, self.free_at)
        seconds = self._times.slowest(len(nodes))
        self._in_flight.append(Occupancy(frozenset(nodes), now, begins_at, begins_at + seconds,
                                         keeps_others_back=not (seconds or has_text)))

    def back(self, num_rows: int, now: float, computed_seconds: float = 0.0) -> float:
        """Record that the oldest segment came back with `num_rows` rows; return the seconds since it was sent.

        All stages together computed it in `computed_seconds`, and no round trip is shorter: if one seems to be, the
        segment had begun before the estimated time.
        """
        assert self._in_flight, "a segment came back, and none was in flight"
        segment = self._in_flight.popleft()

        estimate_was_late = segment.ends_at > now
        measured_seconds = now - (segment.sent_at if estimate_was_late else segment.begins_at)
        round_trip = max(measured_seconds, computed_seconds)

        if num_rows:
            mean = round_trip if self._mean_round_trip is None else self._mean_round_trip
            self._mean_round_trip = mean + NEW_WEIGHT * (round_trip - mean)

        self._last_left_at = min(segment.ends_at + self._queue_seconds(segment, now), now)
        self.prune(frozenset(), now)  # those behind it follow
        return now - segment.sent_at

    def _queue_seconds(self, segment: Occupancy, now: float) -> float:
        """Return how long a segment that comes back `now` has stood in a queue after the estimated time.

        A queue makes two in a row late, by as much as one more takes, and by `QUEUE_SHARE` of a round trip. What makes
        a single one late, or later than the other, is a delay on a wire.
        """
        num_rows = len(segment.nodes)
        stage_seconds, round_trip = self._times.slowest(num_rows), self._times.round_trip(num_rows)
        if not stage_seconds:
            return 0.0  # nothing is measured yet

        delay = now - (round_trip - stage_seconds) - segment.ends_at
        lasting_delay = min(delay, self._last_delay)
        self._last_delay = delay
        is_queue = lasting_delay > max(stage_seconds, QUEUE_SHARE * round_trip)
        return lasting_delay if is_queue else 0.0

    def prune(self, dead_nodes: AbstractSet[int], now: float) -> None:
        """Record dead nodes: a segment without live nodes is given up, and later ones enter the stage earlier."""
        free_at = self._last_left_at

        for segment in self._in_flight:
            stage_seconds = segment.ends_at - segment.begins_at
            is_dead = segment.nodes <= dead_nodes
            is_given_up = is_dead and segment.ends_at > now
            segment.keeps_others_back &= not is_dead

            segment.begins_at = max(segment.sent_at, free_at)
            segment.ends_at = max(segment.begins_at, now) if is_given_up else segment.begins_at + stage_seconds
            free_at = segment.ends_at

    def whereabouts(self, now: float) -> list[tuple[frozenset[int], float]]:
        """Return each segment in flight, the oldest first, with the share of its way that it has probably gone."""
        shares = []
        for segment in self._in_flight:
            round_trip = self._mean_round_trip or math.inf
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
        """Time from which on a new segment would hardly wait; infinite if only an answer can tell."""
        if not self._in_flight:
            return 0.0
        if any(segment.keeps_others_back for segment in self._in_flight):
            return math.inf
        newest = self._in_flight[-1]
        return newest.ends_at - EARLY_SHARE * (newest.ends_at - newest.begins_at)


class Curve:
    """Seconds of one stage by rows, with one point between successive powers of two."""

    def __init__(self) -> None:
        self._points: dict[int, CurvePoint] = {}  # by the number of bits of their rows
        self._num_visits: Counter[int] = Counter()  # of each point
        self.num_rows = 0  # so far

    def learn(self, visit: Visit) -> None:
        """Add a measurement."""
        num_bits = visit.rows.bit_length()
        self._num_visits[num_bits] += 1
        self.num_rows += visit.rows
        rows, seconds = self._points.get(num_bits, visit)
        mean_seconds = seconds + NEW_WEIGHT * (visit.seconds - seconds)

        # the whole curve, unless it took another time because of other rows
        is_alike = max(rows, visit.rows) <= ALIKE_ROWS * min(rows, visit.rows)
        scale = min(mean_seconds / seconds, MAX_SCALE) if seconds > 0 and is_alike else 1.0
        for other_bits, (other_rows, other_seconds) in self._points.items():
            self._points[other_bits] = other_rows, other_seconds * scale

        # the measured point
        self._points[num_bits] = rows + NEW_WEIGHT * (visit.rows - rows), mean_seconds

    @property
    def usual_rows(self) -> int:
        """The rows of the most frequent visits."""
        [(num_bits, _)] = self._num_visits.most_common(1)
        return round(self._points[num_bits][0])

    def of(self, row_counts: Sequence[int]) -> list[float]:
        """Return the seconds for each of these numbers of rows; more rows do not take less time."""
        rising: list[CurvePoint] = []
        for num_bits in sorted(self._points):
            rows, seconds = self._points[num_bits]
            least = rising[-1][1] if rising else 0.0
            rising.append((rows, max(seconds, least)))
        return [extrapolated(rising, num_rows) for num_rows in row_counts]


class ShortestTimes:
    """The shortest seconds by rows that were measured lately, with one point between successive powers of two."""

    def __init__(self) -> None:
        self._points: dict[int, CurvePoint] = {}  # by the number of bits of their rows

    def learn(self, num_rows: int, seconds: float) -> None:
        """Add a measurement."""
        num_bits = num_rows.bit_length()
        rows, shortest = self._points.get(num_bits, (num_rows, seconds))
        longer = rows, SHORTEST_TIME_GROWTH * shortest
        self._points[num_bits] = min((num_rows, seconds), longer, key=itemgetter(1))

    def curve(self) -> list[CurvePoint]:
        """Return the points, the fewest rows first; no time before any measurement.

        Fewer rows do not take longer, and each further row takes no less than the one before. So a point above the
        line between others was measured with a delay, and is left out.
        """
        points: list[CurvePoint] = []
        least = math.inf

        for rows, seconds in sorted(self._points.values(), reverse=True):
            least = min(seconds, least)
            point = rows, least
            while len(points) > 1 and _slope(point, points[0]) >= _slope(points[0], points[1]):
                del points[0]
            points.insert(0, point)

        return points or [(1, 0.0)]

    def line(self) -> tuple[float, float]:
        """Return the seconds without rows and those of one more row, by the line through both ends of the curve."""
        curve = self.curve()
        (first_rows, first_seconds), (last_rows, last_seconds) = curve[0], curve[-1]
        seconds_per_row = (last_seconds - first_seconds) / max(1, last_rows - first_rows)
        return max(0.0, first_seconds - first_rows * seconds_per_row), seconds_per_row


def _slope(left: CurvePoint, right: CurvePoint) -> float:
    """Return the seconds of a row between two points of a curve."""
    return (right[1] - left[1]) / (right[0] - left[0])


class StageTimes:
    """The curves of all stages of a ring, and of the wires between them."""

    def __init__(self) -> None:
        self.curves: list[Curve] = []  # of each stage that was visited
        self._wire_times = ShortestTimes()  # of all wires together
        self._slowest_wire_share = 0.0  # of the time of a row on all wires; 0: all have the same
        self._slowest_stage: list[CurvePoint] = []  # curve of the slowest stage; empty after a new measurement
        self._whole_way: list[CurvePoint] = []  # curve of all stages and wires together

    def learn(self, visits: Sequence[Visit], seconds: float) -> None:
        """Add the visits of a returned message, and the seconds since it was sent."""
        while len(self.curves) < len(visits):
            self.curves.append(Curve())
        for curve, visit in zip(self.curves, visits):
            curve.learn(visit)

        num_rows = visits[0].rows if visits else 0
        has_visited_all = len(visits) == len(self.curves)
        wire_seconds = seconds - sum(visit.seconds for visit in visits)  # on wires, or in a queue
        is_whole = num_rows and has_visited_all and visits[-1].rows == num_rows  # nothing was pruned in flight
        if is_whole and wire_seconds > 0:  # 0 would stay the shortest for ever
            self._wire_times.learn(num_rows, wire_seconds)
        self._slowest_stage = []

    def learn_interval(self, num_rows: int, seconds: float) -> None:
        """Add the seconds between the returns of segments of `num_rows` rows that left together.

        They follow each other as fast as the slowest stage, or wire, lets them.
        """
        _, seconds_per_row = self._wire_times.line()
        if seconds > WIRE_RATIO * self.slowest(num_rows) and seconds_per_row:
            self._slowest_wire_share = min(1.0, seconds / num_rows / seconds_per_row)
            self._slowest_stage = []

    def slowest(self, num_rows: int) -> float:
        """Return the seconds of the slowest stage for `num_rows` rows; 0 before any measurement."""
        self._update()
        return interpolated(self._slowest_stage, num_rows)

    def round_trip(self, num_rows: int) -> float:
        """Return the seconds of all stages and wires together for `num_rows` rows; 0 before any measurement."""
        self._update()
        return interpolated(self._whole_way, num_rows)

    def num_in_flight(self, num_rows: int) -> float:
        """Return how many segments leave during the round trip of one; infinite before any measurement."""
        slowest = self.slowest(num_rows)
        return self.round_trip(num_rows) / slowest if slowest else math.inf

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
        stage_curves = [curve.of(CURVE_ROWS) for curve in self.curves]
        seconds_by_stage = list(zip(*stage_curves)) or [(0.0,)] * len(CURVE_ROWS)

        # wires
        wire_curve = self._wire_times.curve()
        wire_seconds = [interpolated(wire_curve, num_rows) for num_rows in CURVE_ROWS]

        # the slowest stage, or wire: rows follow each other on it, too
        _, seconds_per_row = self._wire_times.line()
        equal_share = 1 / max(1, len(self.curves))  # as many wires carry the rows from stage to stage
        wire_share = self._slowest_wire_share or equal_share
        self._slowest_stage = [(num_rows, max(*stages, wire_share * seconds_per_row * num_rows))
                               for num_rows, stages in zip(CURVE_ROWS, seconds_by_stage)]

        # both
        whole_seconds = map(add, map(sum, seconds_by_stage), wire_seconds)
        self._whole_way = list(zip(CURVE_ROWS, whole_seconds))
