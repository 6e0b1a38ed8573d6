"""How the rows of a segment are shared: text first, then the best guesses of all requests, and nobody for ever last."""
from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from model.tree import TokenTree
from pipeline.allocation import MESSAGE_ROWS, Batcher, RowAllocator
from pipeline.messages import Segment, Visit
from pipeline.stage_times import StageTimes
from pipeline.target_options import DEFAULT_OPTIONS, TargetOptions


@dataclass
class Asking:
    """A request with guesses below its tip."""

    tree: TokenTree
    options: TargetOptions = DEFAULT_OPTIONS
    request: int = 0
    passed_over: int = 0


def asking(*chances, sent=True, **kind):
    tree = TokenTree([1, 2], max_tokens=40)
    if sent:
        tree.cut()
    for token, chance in enumerate(chances, 3):
        tree.add(tree.tip, token, math.log(chance))
    return Asking(tree, TargetOptions(**kind))


def shares(bidders, size):
    rows = RowAllocator(StageTimes())
    return [rows.share(bidder, bidders, size) for bidder in bidders]


def test_the_best_guesses_of_all_requests_go_whose_ever_they_are():
    assert shares([asking(.9, .5, .1), asking(.8, .7), asking(.2)], 4) == [2, 2, 0]
    assert shares([asking(.9, .5, .1), asking(.8, .7), asking(.2)], 6) == [3, 2, 1]


def test_a_guess_counts_by_its_probability_below_its_own_tip():
    old = asking(.9)
    old.tree.nodes[old.tree.tip].score = -30.0  # of a long text
    old.tree.nodes[max(old.tree.live)].score = -30.0 + math.log(.9)
    assert shares([asking(.8), old], 1) == [0, 1]


def test_text_goes_before_guesses_and_always_goes():
    assert shares([asking(.9, .8), asking(sent=False), asking(.7)], 3) == [1, 2, 0]
    assert shares([asking(.9), asking(sent=False), asking(sent=False)], 3) == [0, 2, 2]


def test_with_as_many_texts_as_rows_it_is_plain_batched_decoding():
    texts = [asking(.9, sent=False) for _ in range(4)]
    assert shares(texts, 8) == [2] * 4


def test_with_more_requests_than_segments_in_flight_each_has_the_rows_of_one_for_guesses_that_are_worth_them():
    crowd = [asking(.9, .5, .2, .05) for _ in range(4)]
    for segments, size, wanted in ((4, 4, 4),
                                   (2, 4, 8), (1, 4, 12),
                                   (1, 2, 8), (1, 14, 14), (1, 16, 16)):
        times = StageTimes()
        times.learn([Visit(size, 1.0)] * segments, segments)
        rows = RowAllocator(times)
        assert sum(rows.share(bidder, crowd, size) for bidder in crowd) == wanted, (segments, size)


def test_priority_counts_as_so_many_times_the_probability():
    assert shares([asking(.9, .8), asking(.3, .2, priority=4.0)], 2) == [1, 1]


@pytest.mark.parametrize("chance", [.5, .1, .01])
def test_who_is_passed_over_counts_more_each_time_until_it_is_its_turn(chance):
    rich, poor = asking(.9, .8, .7), asking(chance)
    rows, waited = RowAllocator(StageTimes()), 0
    while True:
        mine = [rows.share(bidder, [rich, poor], 3) for bidder in (rich, poor)]
        rows.divide_again()
        if mine[1]:
            break
        waited += 1
        assert poor.passed_over == waited
    assert waited == math.ceil(.7 / chance) - 1 and poor.passed_over == 0


def segment(request, rows, inner=None):
    nodes = list(range(rows))
    return Segment(request, nodes, nodes, nodes, 0, torch.zeros(rows), inner)


def test_the_first_segments_of_all_requests_leave_together_and_then_the_second_ones():
    batcher = Batcher()
    for request, rows in ((1, 5), (1, 6), (2, 7),
                          (1, 8), (3, 9), (2, 10)):
        batcher.put(segment(request, rows))
    assert batcher.holds(3) and not batcher.holds(4) and len(batcher) == 3
    leaving = [[(one.request, len(one.nodes)) for one in batcher.take()]
               for _ in range(3)]
    assert leaving == [[(1, 5), (2, 7), (3, 9)],
                       [(1, 6), (2, 10)], [(1, 8)]]
    assert not batcher


def test_a_message_has_a_bound_of_rows_which_only_a_single_segment_exceeds():
    batcher = Batcher()
    for request, rows in ((1, MESSAGE_ROWS - 5), (2, 6),
                          (3, 5), (4, MESSAGE_ROWS + 1), (3, 1)):
        batcher.put(segment(request, rows))
    leaving = [[one.request for one in batcher.take()] for _ in range(len(batcher))]
    assert leaving == [[1, 3], [2, 3], [4]]


def test_segments_with_and_without_inner_features_do_not_mix():
    batcher = Batcher()
    batcher.put(segment(1, 2, torch.zeros(2, 0)))
    batcher.put(segment(2, 2))
    assert len(batcher) == 2


def test_what_a_request_has_put_in_is_dropped_with_it():
    batcher = Batcher()
    for request in (1, 2, 1, 1):
        batcher.put(segment(request, 1))
    assert batcher.drop(1) == 3
    assert [one.request for one in batcher.take()] == [2] and not batcher
