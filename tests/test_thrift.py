"""What pays: rows by what stages took last, levels by what would wait for them; the text stays what it is."""
from __future__ import annotations

import math
from dataclasses import replace
from itertools import takewhile
from random import Random

import pytest
import torch
from torch import Tensor

from config.methods import METHODS
from config.profiles import Profile
from config.run_config import RunConfig
from config.trees import RoundCosts
from launch.probe import round_trip, sized
from model.cache import TreeCache
from model.drafts.draft import NoDraft
from model.drafts.eagle import Eagle
from model.drafts.mixture import Mixture
from model.drafts.network import TreeDraft, read_all
from model.sample import Sampler
from model.tree import TokenTree
from pipeline.allocation import RowAllocator
from pipeline.answers import Request
from pipeline.decode import Decoder, PipelineLimits
from pipeline.gates import RATE_SECONDS, DraftGate, NextLevel
from pipeline.messages import Visit
from pipeline.stage_times import NEW_WEIGHT, SHORTEST_TIME_GROWTH, FirstStage, StageTimes
from pipeline.strategies import STRATEGIES
from pipeline.trace import OFF
from sim.clock import Pace, VirtualClock
from sim.cluster import Cluster
from sim.devices import SlowHead, SlowPasses
from sim.ring import VirtualRing
from sim.stages import StageShare, work_of
from tests.test_budget import Asking

VOCAB, OFF_TEXT = 50, -2
SITE = Profile("a test", layers=8, row_bytes=4096, model=80, row=0.5, free=8, token=0, level=4, verdict=1, latency=1,
               mbps=1000, step=2, own_times=(0, 0, 0))


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


def test_rows_between_two_measurements_lie_on_a_line_and_beyond_the_last_the_line_goes_on():
    times = times_of((1, 1.0))
    assert times.seconds_per_row(1) == times.seconds_per_row(64) == 0.0, "nothing is known of more rows"
    times = times_of((1, 1.0), (64, 64.0))
    for rows in (2, 16, 64, 128):
        assert times.slowest(rows) == pytest.approx(rows)
        assert times.seconds_per_row(rows) == pytest.approx(1.0)


def test_a_stage_that_gets_slower_does_so_for_all_rows_and_the_newest_times_count_most():
    times = times_of((1, 1.0), (16, 2.0))
    for _ in range(20):
        times.learn([Visit(1, 3.0)], 3.0)
    left = (1 - NEW_WEIGHT) ** 20
    assert times.slowest(1) == pytest.approx(3.0 - 2.0 * left)
    assert times.slowest(16) == pytest.approx(2 * times.slowest(1))


@pytest.mark.parametrize("rows, slowest_of_one", [(40, 1.5), (60, 1.0)])
def test_a_longer_time_slows_the_whole_curve_unless_it_is_that_of_other_rows(rows, slowest_of_one):
    """40 and 60 rows are between the same powers of two; 40 took 2 s, and now 6."""
    times = times_of((1, 1.0), (40, 2.0))
    times.learn([Visit(rows, 6.0)], 6.0)
    assert times.slowest(1) == pytest.approx(slowest_of_one)


def test_wires_count_by_the_shortest_times_and_none_of_those_with_a_delay():
    """Four rows came back late. Of 13 rows, no time is longer than that of nine by their share."""
    times = StageTimes()
    for rows, wires in ((1, 5.0), (9, 2.0),
                        (1, 0.5), (4, 9.0), (13, 4.0)):
        times.learn([Visit(rows, 1.0)] * 3, 3.0 + wires)
    seconds_of_row = (SHORTEST_TIME_GROWTH * 2.0 - 0.5) / (9 - 1)
    assert times.slowest(8) == 1.0
    assert [times.seconds_per_row(rows) for rows in (2, 4)] == pytest.approx([seconds_of_row] * 2)

    times.learn([Visit(20, 1.0), Visit(7, 1.0), Visit(7, 1.0)], 99.0)
    assert times.seconds_per_row(4) == pytest.approx(seconds_of_row), "what was pruned in flight says nothing of wires"


def test_segments_leave_no_faster_than_rows_follow_each_other_on_the_wires():
    """Over three wires 32 rows take 9.3 s longer than one: on each of them a row takes 0.1 s."""
    times = StageTimes()
    for rows in (1, 32):
        times.learn([Visit(rows, 1.0)] * 3, 3.0 + 7.0 + 0.3 * (rows - 1))
    assert [times.slowest(rows) for rows in (1, 8, 16, 32)] == pytest.approx([1.0, 1.0, 1.6, 3.2])


@pytest.mark.parametrize("seconds_apart, slowest", [(3.2, 3.2), (1.9, 1.6)])
def test_segments_leave_no_faster_than_the_slowest_wire_lets_them_follow_each_other(seconds_apart, slowest):
    """A row takes 0.3 s on three wires; the slowest of them has two thirds, or a delay of less than a quarter."""
    times = StageTimes()
    for rows in (1, 32):
        times.learn([Visit(rows, 1.0)] * 3, 3.0 + 0.3 * rows)
    times.learn_interval(16, seconds_apart)
    assert [times.slowest(rows) for rows in (16, 32)] == pytest.approx([slowest, 2 * slowest])


def test_no_wire_is_taken_to_need_less_than_no_time():
    """Rows of 1, 4 and 16 spend 5 s on wires; by rounding, 4 rows seem to spend less than nothing, a thousand times."""
    times = StageTimes()
    for rows in (1, 4, 16):
        times.learn([Visit(rows, 1.0)] * 3, 8.0)
    for _ in range(1000):
        times.learn([Visit(4, 1.0)] * 3, 3.0 - 2.0 ** -40)
        times.learn([Visit(4, 1.0)] * 3, 3.0)
    assert [times.seconds_per_row(rows) for rows in (1, 4, 16)] == [0.0, 0.0, 0.0]

    times.learn([Visit(4, 1.0)] * 3, 7.0)
    assert times.seconds_per_row(1) == 0.0, "one row needs no more than four"
    assert times.seconds_per_row(8) == pytest.approx((5.0 - 4.0) / (16 - 4))


def test_a_row_on_slow_wires_costs_as_much_as_in_slow_stages():
    wired = StageTimes()
    for rows in (1, 2, 4, 16):
        wired.learn([Visit(rows, 1.0)] * 4, 4.0 + rows)
    assert rows_of(wired, .3, .3, .1) == 1, "0.3 of half a round trip of 5 s is less than a row's second"
    assert rows_of(wired, .3, .1, .01, text=False) == 2
    falling = [.3, .29, .28, .27, .26, .25, .24, .23, .22]
    assert rows_of(wired, *falling, text=False) == 5, "a guess gains no more because others make the round trip longer"


def test_a_guess_gains_half_a_round_trip_where_wires_are_long_and_a_stages_time_where_they_are_short():
    """One row takes 1 s, a second one 1 s more; with 3 s of wires half a round trip of one row is 2 s."""
    times = times_of((1, 1.0), (2, 2.0))
    assert rows_of(times, .9, .9, text=True) == 1
    long_wires = StageTimes()
    for rows, seconds in ((1, 1.0), (2, 2.0)):
        long_wires.learn([Visit(rows, seconds)], seconds + 3.0)
    assert long_wires.round_trip(1) == 4.0 and long_wires.round_trip(2) == 5.0
    assert rows_of(long_wires, .6) == 2
    assert rows_of(long_wires, .4) == 1


def test_before_anything_is_known_every_guess_pays():
    assert StageTimes().slowest(5) == StageTimes().seconds_per_row(5) == 0.0
    assert rows_of(StageTimes(), .5, .1, .01) == 4


def bidding(*chances, text=False):
    tree = TokenTree([1], max_tokens=40)
    if not text:
        tree.cut()
    for token, chance in enumerate(chances, 3):
        tree.add(tree.tip, token, math.log(chance))
    return Asking(tree)


def rows_of(times, *chances, text=True):
    """The rows that go into a segment of at most 16."""
    bidder = bidding(*chances, text=text)
    return RowAllocator(times).share(bidder, [bidder], 16)


def test_a_guess_goes_along_if_it_gains_more_than_the_rows_beside_it_lose():
    free = times_of((1, 1.0), (16, 1.0), stages=4)
    costly = times_of((1, 1.0), (2, 2.0),
                      (4, 4.0), (16, 16.0), stages=4)
    chances = .4, .3, .1
    assert rows_of(free, *chances) == 4
    assert rows_of(costly, *chances) == 1
    assert rows_of(costly, *chances, text=False) == 1
    assert rows_of(costly, text=False) == 0


def test_a_guess_that_was_passed_over_pays_no_more_than_before_and_stops_no_other():
    """A second row costs half of what a sure guess gains."""
    poor, rich = bidding(.3), bidding(.9, text=True)
    poor.passed_over = 20
    rows = RowAllocator(times_of((1, 1.0), (2, 1.5)))
    assert [rows.share(bidder, [poor, rich], 16) for bidder in (poor, rich)] == [0, 2]


def test_before_any_measurement_guesses_keep_others_back_until_they_are_back_or_dead():
    stage = FirstStage(StageTimes())
    for node in range(3):
        stage.send([node], 1.0)
        assert stage.ready_at == 1.0
    stage.send([3, 4], 2.0, has_text=False)
    assert stage.ready_at == math.inf

    stage.prune({4}, 3.0)
    assert stage.ready_at == math.inf
    stage.send([5], 3.0)
    assert stage.ready_at == math.inf
    stage.prune({3, 4}, 4.0)
    assert stage.ready_at == 3.0


def test_the_next_answer_is_due_after_the_time_that_the_last_segments_were_on_their_way():
    stage = FirstStage(StageTimes())
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
    level = NextLevel(1, promise, 2.0)
    assert gate.is_worth_drafting(level, 0.0, 0.0), "nothing is known yet"
    gate.add_settled(0, 0.0)
    gate.add_settled(2, 1.0)  # two tokens a second
    assert gate.is_worth_drafting(level, due, 3.0) is pays


@pytest.mark.parametrize("seconds_per_guess", [0.0, 0.01, 0.5, 1.0, 8.0])
@pytest.mark.parametrize("num_requests", [1, 4])
def test_a_level_reads_as_many_guesses_as_bring_most_tokens_a_second(seconds_per_guess, num_requests):
    """The number is found by trying all; passes that only read text say nothing of guesses."""
    gate, expected_tokens = DraftGate(), [0.9, 0.5, 0.25, 0.125, 0.0625, 0.03125]
    assert gate.next_level(expected_tokens, num_requests).num_guesses == 6, "nothing is known yet"
    for num_guesses in (1, 11):
        gate.add_pass(0, 0.1)
        gate.add_pass(num_guesses, 3.0 + num_guesses * seconds_per_guess)

    rates = [sum(expected_tokens[:num_guesses]) / (3.0 / num_requests + num_guesses * seconds_per_guess)
             for num_guesses in range(1, 7)]
    assert gate.next_level(expected_tokens, num_requests).num_guesses == 1 + rates.index(max(rates))


@pytest.mark.parametrize("num_requests", [1, 4])
def test_a_level_takes_as_long_as_networks_need_for_all_requests(num_requests):
    """Three seconds and one more for each guess; each request has two guesses."""
    gate = DraftGate()
    assert gate.next_level([0.9, 0.5], num_requests) == (2, 1.4, 0.0), "nothing is known yet"
    for num_guesses in (1, 11):
        gate.add_pass(num_guesses, 3.0 + num_guesses)
    assert gate.next_level([0.9, 0.8], num_requests) == (2, 0.9 + 0.8, 3.0 + 2 * num_requests)


def test_a_refused_level_is_tried_again_in_time_and_one_that_is_measured_ends_that():
    gate = DraftGate()
    gate.add_pass(1, 3.0)
    gate.add_settled(0, 0.0)
    gate.add_settled(2, 1.0)

    def is_tried() -> bool:
        return gate.is_worth_drafting(gate.next_level([0.9], 1), due_at=2.0, now=1.0)

    refusals = list(takewhile(lambda tried: not tried, (is_tried() for _ in range(2000))))
    assert 100 < len(refusals) < 2000
    assert is_tried()
    gate.add_pass(1, 3.0)
    assert not is_tried()


def test_what_was_settled_long_ago_counts_little():
    gate = DraftGate()
    gate.add_settled(0, 0.0)
    gate.add_settled(100, 1.0)
    gate.add_settled(0, 1.0 + 5 * RATE_SECONDS)
    assert gate.is_worth_drafting(NextLevel(1, 5.0, 1.0), 0.0, 20.0)


class Written:
    """A target that writes a text: a path along it is the position of its last token, any other one OFF_TEXT."""

    root, full = -1, False
    clear = None

    def __init__(self, text: list[int]) -> None:
        self.text = text

    def after(self, path: int, token: int) -> int:
        position = path + 1
        is_on_text = path != OFF_TEXT and position < len(self.text) and self.text[position] == token
        return position if is_on_text else OFF_TEXT

    def outputs(self, paths: list[int]) -> tuple[Tensor, Tensor]:
        next_T = torch.tensor([self.text[(path + 1) % len(self.text)] for path in paths], dtype=torch.float64)
        return next_T[:, None], next_T.new_empty(len(paths), 0)

    def lm_head(self, token_T1: Tensor) -> Tensor:
        logits_TV = token_T1.new_full((len(token_T1), VOCAB), -math.inf)
        return logits_TV.scatter(1, token_T1.long(), 0.0)


class Guessing(TreeDraft):
    """A head whose likeliest guess at each position is the text's with this chance, else perhaps the second one."""

    source, lag, drifts = "eagle", 1, True
    readable = Eagle.readable

    def __init__(self, text: list[int], right: float) -> None:
        random = Random(7)
        logits_PV = torch.full((len(text) + 99, VOCAB), -math.inf, dtype=torch.float64)
        logits_PV[len(text):, 0] = 0.0
        for position, token in enumerate(text):
            guesses = [(token + step) % VOCAB for step in (1, 2, 3)]
            guesses.insert(0 if random.random() < right else random.choice([1, 3]), token)
            logits_PV[position, guesses] = torch.tensor([-0.3, -1.5, -2.5, -3.5], dtype=torch.float64)

        self.network, self.lm_head = self, lambda position_T1: logits_PV[position_T1[:, 0].long()]
        super().__init__(TreeCache((0, 1, 9999, 1), torch.float64, "cpu"))

    def features(self, tree, fresh):
        return torch.zeros(len(fresh), 1)

    def read(self, token_T, feature_TD, pos_T, cache):
        return 1.0 + self.lag + pos_T[:, None]


def speed(site: Profile, right: float, method: str, ablate: str) -> float:
    """Tokens/s of a method over four boards in virtual time."""
    random, clock = Random(7), VirtualClock()
    text = [random.randrange(VOCAB) for _ in range(45)]
    written, pace = Written(text), Pace(site, clock)
    works = [work_of(site, StageShare([rank], 1 / 4)) for rank in range(1, 5)]
    cluster = Cluster(site, clock, [works], written, [OFF] * 5)
    ring = VirtualRing(cluster.links[0], SlowHead(written.lm_head, pace), 5, clock=clock)

    run = RunConfig(pipeline_type=method, subseq_token=16, ablate=ablate)
    tree = sized(run, lambda: RoundCosts(((1, round_trip(ring)),)), lambda: 16)
    draft = NoDraft() if method == "ar" else Mixture([Guessing(text, right)], None)
    decoder = Decoder(ring, draft, STRATEGIES[METHODS[method].strategy], tree, PipelineLimits(512),
                      SlowPasses(read_all, pace))
    answers = [decoder.complete(Request(text[:5], Sampler(), 40)) for _ in range(2)]
    assert [answer.token_ids for answer in answers] == [text[5:]] * 2
    return 80 / sum(answer.seconds for answer in answers)


def speeds(site: Profile, right: float) -> list[float]:
    """Tokens/s of plain decoding, of streaming regardless, and of streaming that is thrifty."""
    return [speed(site, right, *kind) for kind in (("ar", ""), ("streaming", "thrift"), ("streaming", ""))]


@pytest.mark.parametrize("site", [replace(SITE, level=75.0),
                                  replace(SITE, model=40.0, row=25.0, free=0, level=12.0)],
                         ids=["slow draft", "costly rows"])
def test_where_guesses_are_wrong_and_dear_what_is_left_is_plain_decoding(site):
    plain, usual, thrifty = speeds(site, right=0.02)
    assert usual < 0.95 * plain
    assert thrifty > 0.95 * plain


def test_where_guesses_are_right_and_cheap_thrift_takes_nothing_away():
    plain, usual, thrifty = speeds(SITE, right=0.8)
    assert usual > 2 * plain
    assert thrifty > 0.97 * usual
