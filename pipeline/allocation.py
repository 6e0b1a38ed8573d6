"""Which rows leave: the rows of the next message for each request, and the segments that leave in it.

Text goes before guesses, the prompt of the oldest request first. Guesses are ordered by their probability times the
priority of their request; the priority counts once more for each message that left without guesses of the request. Each
message in flight serves a share of the requests, and has as many rows for each of them as a single request would send.
Beyond the rows of one request, a guess must be worth its row.
"""
from __future__ import annotations

import heapq
import math
from collections import deque
from typing import Iterator, Protocol, Sequence, Tuple

from model.tree import TokenTree
from pipeline.messages import Segment
from pipeline.stage_times import StageTimes
from pipeline.target_options import TargetOptions

# The least worth of a guess beyond the rows of one request: one that becomes text once in ten times. Less would fill
# segments more, which delays all requests. By trial.
LEAST_EXTRA_WORTH = math.log(0.1)

WRONG_SHARE = 0.5  # mean share of the stages that compute a guess that proves wrong: prunes meet it half-way
MESSAGE_ROWS = 256  # maximum rows of a message of several segments, for which ranks reserve memory; by trial
Bid = Tuple[float, float]  # of a guess: its worth, a logarithm, and the probability that it becomes text


class Bidder(Protocol):
    """A request that competes for rows."""

    request: int
    tree: TokenTree
    options: TargetOptions
    passed_over: int  # number of messages that left without its guesses, since the last one with some


class RowAllocator:
    """The division of the rows of the next message among requests."""

    def __init__(self, times: StageTimes) -> None:
        self._times = times
        self._is_divided = False  # whether some requests have rows of the next message
        self._least_bid = 0.0, 0.0  # of the guesses to send: the least worth, and the least probability
        self._guess_rows_left = 0
        self.left_out: set[int] = set()  # requests without a row in the next message

    def share(self, bidder: Bidder, bidders: Sequence[Bidder], segment_size: int) -> int:
        """Take rows of the next message for a bidder, text included; return their number. It is called once a message.

        `segment_size` is the number of rows of a single request's segment.
        """
        if not self._is_divided:
            self._divide(bidders, segment_size)

        least_worth, least_probability = self._least_bid
        num_chosen = sum(worth >= least_worth and probability >= least_probability
                         for worth, probability in bids(bidder, weighed=len(bidders) > 1))
        num_guesses = min(self._guess_rows_left, num_chosen)
        self._guess_rows_left -= num_guesses
        bidder.passed_over = 0 if num_guesses else bidder.passed_over + bool(bidder.tree.unsent_guesses)

        num_rows = len(bidder.tree.unsent_text) + num_guesses
        if not num_rows and self._is_divided:
            self.left_out.add(bidder.request)
        return num_rows

    def paying(self, bidder: Bidder, segment_size: int | None) -> Sequence[float]:
        """Return the probabilities of the guesses that a request would send if it were the only one."""
        num_text_rows = len(bidder.tree.unsent_text)
        probabilities = sorted((probability for _, probability in bids(bidder, weighed=False)), reverse=True)
        if segment_size is not None:
            probabilities = probabilities[:max(0, segment_size - num_text_rows)]
        return probabilities[:self._num_paying(probabilities, num_text_rows, num_tips=bool(num_text_rows))]

    def divide_again(self) -> None:
        """Divide rows at the next call of `share`: the message has left, or a request with rows of it has ended."""
        self._is_divided = False
        self.left_out.clear()

    def _divide(self, bidders: Sequence[Bidder], segment_size: int) -> None:
        """Choose the guesses of the next message: the most worthy ones for which there is room, and which pay."""
        num_text_rows = sum(len(bidder.tree.unsent_text) for bidder in bidders)

        # the best guesses of all requests
        requests_per_segment = max(1.0, len(bidders) / self._times.num_in_flight(segment_size))
        room_of_all = max(0, int(segment_size * requests_per_segment) - num_text_rows)
        all_bids = (bid for bidder in bidders for bid in bids(bidder, len(bidders) > 1))
        best_bids = heapq.nlargest(room_of_all, all_bids)

        # beyond the room of one request, only good ones
        room_of_one = segment_size - num_text_rows
        num_good = sum(worth >= LEAST_EXTRA_WORTH for worth, _ in best_bids)
        best_bids = best_bids[:max(room_of_one, num_good)]

        # only those that pay
        if all(bidder.options.thrifty for bidder in bidders):
            num_tips = sum(bool(bidder.tree.unsent_text) for bidder in bidders)
            probabilities = sorted((probability for _, probability in best_bids), reverse=True)
            paying = probabilities[:self._num_paying(probabilities, num_text_rows, num_tips)]
            least_paying = min(paying, default=math.inf)
            best_bids = [(worth, probability) for worth, probability in best_bids if probability >= least_paying]

        self._guess_rows_left = len(best_bids)
        self._is_divided = len(bidders) > 1 and num_text_rows + len(best_bids) > 0
        least_worth = min((worth for worth, _ in best_bids), default=math.inf)
        least_probability = min((probability for _, probability in best_bids), default=math.inf)
        self._least_bid = least_worth, least_probability

    def _num_paying(self, probabilities: Sequence[float], num_text_rows: int, num_tips: int) -> int:
        """Return how many of the best guesses pay in addition to rows of text, with `num_tips` tips among them.

        A guess in this segment is answered earlier than in the next one by a segment's time in the slowest stage. But
        better guesses may fill that, until the guess leaves as text, a round trip later: half of it is the mean. The
        guess delays each other row by the time of one more row in all stages. Both are weighted with the probability
        that a row becomes text. Without a tip in the segment a wrong guess dies half-way on average.
        """
        expected_tokens = float(num_tips)
        half_round_trip = self._times.round_trip(max(1, num_text_rows)) / 2  # guesses must not pay for each other
        share_of_stages = 1.0 if num_tips else WRONG_SHARE

        for index, probability in enumerate(probabilities):
            num_rows = num_text_rows + index
            seconds_earlier = max(self._times.slowest(num_rows), half_round_trip)
            gain = probability * seconds_earlier
            cost = share_of_stages * expected_tokens * self._times.seconds_per_row(num_rows)
            if expected_tokens and gain < cost:
                return index
            expected_tokens += probability
        return len(probabilities)


def bids(bidder: Bidder, weighed: bool) -> Iterator[Bid]:
    """Yield the bids of unsent guesses. Worths are log-probabilities, with `weighed` plus the request's log-weight."""
    tree = bidder.tree
    tip_score = tree.nodes[tree.tip].score
    log_weight = math.log(bidder.options.priority * (1 + bidder.passed_over)) if weighed else 0.0

    for node in tree.unsent_guesses:
        log_probability = tree.nodes[node].score - tip_score
        yield log_probability + log_weight, math.exp(min(log_probability, 0.0))


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
