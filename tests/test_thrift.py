"""What pays: rows by what stages took last, levels by what would wait for them; the text stays what it is."""
from __future__ import annotations

import math
from dataclasses import replace

import pytest

from config.profiles import Profile
from eval.plan.candidates import Candidate
from model.tree import TokenTree
from pipeline.allocation import RowAllocator
from pipeline.gates import RATE_SECONDS, DraftGate
from pipeline.messages import Visit
from pipeline.stage_times import NEW_WEIGHT, SHORTEST_TIME_GROWTH, FirstStage, StageTimes
from tests.test_budget import Asking
from tests.test_plan import SITE, bench_of, book


def times_of(*samples, stages=1, factor=1.0):
    """The times of stages that took these seconds for these rows."""
    times = StageTimes()
    for rows, seconds in samples:
        visits = [Visit(rows, seconds * factor)] * stages
        times.learn(visits, sum(visit.seconds for visit in visits))
    return times


def test_the_time_of_one_row_more_is_that_of_all_stages_together():
    times = times_of((1, 1.0), (2, 1.0),
                     (16, 15.0), (32, 31.0), stages=3)
    assert times.seconds_per_row(20) == pytest.approx(3.0)
    assert times.slowest(16) == pytest.approx(15.0)


def test_more_rows_are_taken_to_cost_nothing_until_it_was_seen():
    times = times_of((1, 1.0), (64, 65.0))
    assert times.seconds_per_row(1) == times.seconds_per_row(8) == 0.0
    times.learn([Visit(8, 8.0)], 8.0)
    assert times.seconds_per_row(4) > 0.0


def test_a_stage_that_gets_slower_does_so_for_all_rows_and_the_newest_times_count_most():
    times = times_of((1, 1.0), (16, 2.0))
    for _ in range(20):
        times.learn([Visit(1, 3.0)], 3.0)
    left = (1 - NEW_WEIGHT) ** 20
    assert times.slowest(1) == pytest.approx(3.0 - 2.0 * left)
    assert times.slowest(16) == pytest.approx(2 * times.slowest(1))


def test_wires_count_by_the_shortest_times_and_of_fewer_rows_by_those_of_more():
    times = StageTimes()
    for rows, wires in ((1, 5.0), (9, 2.0),
                        (1, 0.5), (4, 9.0), (9, 4.0)):
        times.learn([Visit(rows, 1.0)] * 3, 3.0 + wires)
    assert times.slowest(9) == 1.0
    assert times.seconds_per_row(2) == pytest.approx((SHORTEST_TIME_GROWTH * 2.0 - 0.5) / 3)
    assert times.seconds_per_row(8) == 0.0
    times.learn([Visit(20, 1.0), Visit(7, 1.0), Visit(7, 1.0)], 99.0)
    assert times.seconds_per_row(16) == 0.0, "what was pruned on its way says nothing of wires"


def test_a_row_on_slow_wires_costs_as_much_as_in_slow_stages():
    wired = StageTimes()
    for rows in (1, 2, 4, 16):
        wired.learn([Visit(rows, 1.0)] * 4, 4.0 + rows)
    assert rows_of(wired, .4, .3, .1) == 1
    assert rows_of(wired, .4, .3, .1, text=False) == 2


def test_before_anything_is_known_every_guess_pays():
    assert StageTimes().slowest(5) == StageTimes().seconds_per_row(5) == 0.0
    assert rows_of(StageTimes(), .5, .1, .01) == 4


def rows_of(times, *chances, text=True):
    """The rows that go into a segment of at most 16."""
    tree = TokenTree([1], max_tokens=40)
    if not text:
        tree.cut()
    for token, chance in enumerate(chances, 3):
        tree.add(tree.tip, token, math.log(chance))
    bidder = Asking(tree)
    return RowAllocator(4, times).share(bidder, [bidder], 16)


def test_a_guess_goes_along_if_it_gains_more_than_the_rows_beside_it_lose():
    free = times_of((1, 1.0), (16, 1.0), stages=4)
    costly = times_of((1, 1.0), (2, 2.0),
                      (4, 4.0), (16, 16.0), stages=4)
    chances = .4, .3, .1
    assert rows_of(free, *chances) == 4
    assert rows_of(costly, *chances) == 1
    assert rows_of(costly, *chances, text=False) == 1
    assert rows_of(costly, text=False) == 0


def test_the_next_answer_is_due_after_the_time_that_the_last_segments_were_on_their_way():
    stage = FirstStage(0.5)
    assert stage.due_at == math.inf
    stage.send([1], 0.0)
    assert stage.due_at == math.inf
    stage.back(1, 4.0)
    stage.send([2], 10.0)
    assert stage.due_at == 14.0


@pytest.mark.parametrize("promise, due, pays", [(.1, 6.0, True),
                                                (.1, 4.0, False), (3.9, 4.0, False), (4.1, 4.0, True),
                                                (4.1, 0.0, False), (.01, math.inf, True)])
def test_a_level_pays_that_is_done_before_the_next_answer_or_promises_more_than_waits_for_it(promise, due, pays):
    gate = DraftGate()
    assert gate.is_worth_drafting(0.0, 0.0, 0.0), "nothing is known yet"
    gate.add_level(2.0)
    gate.add_settled(0, 0.0)
    gate.add_settled(2, 1.0)  # two tokens a second
    assert gate.is_worth_drafting(promise, due, 3.0) is pays


def test_what_was_settled_long_ago_counts_little():
    gate = DraftGate()
    gate.add_level(1.0)
    gate.add_settled(0, 0.0)
    gate.add_settled(100, 1.0)
    gate.add_settled(0, 1.0 + 5 * RATE_SECONDS)
    assert gate.is_worth_drafting(5.0, 0.0, 20.0)


def speeds(site: Profile, right: float) -> list[float]:
    """Tokens/s of plain decoding, of streaming regardless, and of streaming that is thrifty, in virtual time."""
    made = book(right, answers=2, tokens=40)
    groups = tuple((rank,) for rank in range(1, 5))
    kinds = [("ar", ()), ("streaming", (("ablate", "thrift"),)),
             ("streaming", (("ablate", ""),))]
    sizes = (("stream_rows", "16"),)
    candidates = [Candidate(kind, "eagle", groups, (2, 2, 2, 2),
                            (*sizes, *keys) if keys else ())
                  for kind, keys in kinds]
    return [bench_of(site, made).trial(one, made.answers, 40).speed for one in candidates]


@pytest.mark.parametrize("site", [replace(SITE, level=75.0),
                                  replace(SITE, model=40.0, row=20.0, free=0)],
                         ids=["slow draft", "costly rows"])
def test_where_guesses_are_wrong_and_dear_what_is_left_is_plain_decoding(site):
    plain, usual, thrifty = speeds(site, right=0.02)
    assert usual < 0.95 * plain
    assert thrifty > 0.95 * plain


def test_where_guesses_are_right_and_cheap_thrift_takes_nothing_away():
    plain, usual, thrifty = speeds(SITE, right=0.8)
    assert usual > 2 * plain
    assert thrifty > 0.97 * usual
