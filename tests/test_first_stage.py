"""When the first stage is free, as rank 0 reckons it from what it sent and when that came back."""
import random

import pytest

from pipeline.messages import Visit
from pipeline.stage_times import EARLY_SHARE, NEW_WEIGHT, FirstStage, StageTimes


def taught(seconds, stages=4, wires=0.0):
    """A ring that has seen a segment of so many rows spend so long in each stage, for each of these."""
    times = StageTimes()
    stage, now = FirstStage(times), 0.0
    for rows, takes in seconds.items():
        stage.send(list(range(rows)), now)
        round_trip = stage.back(rows, now + stages * takes + wires)
        times.learn([Visit(rows, takes)] * stages, round_trip)
        now += 1000
    return stage


def flown(*first_nodes, stages=4):
    """A stage that is sent segments of two rows, each of a second, at 5000."""
    stage = taught({2: 1.0}, stages)
    for node in first_nodes:
        stage.send([node, node + 1], 5000.0)
    return stage


def busy(stage, rows, now):
    """How long the stage is busy with a segment that it need not wait for."""
    stage.send(list(range(rows)), now)
    seconds = stage.free_at - now
    stage.back(0, stage.free_at)
    return seconds


def test_it_is_free_at_once_while_nothing_is_known():
    stage = FirstStage(StageTimes())
    assert stage.ready_at <= 0
    for now in (3.0, 3.5, 4.0):
        stage.send([1, 2], now)
        assert stage.ready_at == stage.free_at == now


def test_wires_are_no_part_of_the_time_after_which_the_stage_is_free():
    """A round trip of 8 s has four stages of 0.5 s in it, and 6 s of wires: 16 segments fill it."""
    stage = taught({2: 0.5}, wires=6.0)
    for index in range(16):
        stage.send([3 * index, 3 * index + 1], 5000.0)
        assert stage.free_at == 5000.0 + 0.5 * (index + 1)
    assert stage.ready_at == 5008.0 - EARLY_SHARE * 0.5
    assert stage.due_at == 5008.0


def test_a_segment_leaves_when_the_slowest_stage_can_take_it():
    """Sooner it would only wait before that stage, and its rows could no longer change."""
    times = StageTimes()
    times.learn([Visit(2, 0.5), Visit(2, 2.0), Visit(2, 1.0)], 3.5)
    stage = FirstStage(times)
    stage.send([1, 2], 10.0)
    assert stage.free_at == 12.0


def test_where_a_segment_is_follows_from_its_round_trip():
    stage = taught({2: 1.0})  # so that a round trip takes four seconds
    stage.send([1, 2], 5000.0)
    stage.send([3, 4], 5000.0)
    assert stage.whereabouts(5000.0) == [(frozenset({1, 2}), 0.0), (frozenset({3, 4}), 0.0)]
    assert stage.whereabouts(5003.0) == [(frozenset({1, 2}), 0.75), (frozenset({3, 4}), 0.5)]
    assert [share for _, share in stage.whereabouts(6000.0)] == [1.0, 1.0]


def test_segments_follow_each_other_through_the_stage():
    stage = taught({2: 1.0})
    for i in range(3):
        stage.send([10 + i, 20 + i], 5000.0)
        assert stage.free_at == pytest.approx(5001.0 + i)
    stage.back(2, 5004.0)  # which takes nothing from those behind it
    assert stage.free_at == pytest.approx(5003.0)
    stage.send([30, 31], 5010.0)
    assert stage.free_at == pytest.approx(5011.0)


def test_the_time_that_a_segment_waited_is_not_counted():
    stage = flown(10, 20, 30)
    for i in range(3):
        stage.back(2, 5004.0 + i)  # 3 stages more behind the first one
    assert busy(stage, 2, 6000.0) == pytest.approx(1.0)


def test_a_stage_that_has_become_slower_is_believed_visit_by_visit():
    stage = taught({2: 1.0})
    expected = 1.0
    for now in (6000.0, 7000.0, 8000.0):
        stage.send([1, 2], now)
        stage._times.learn([Visit(2, 3.0)] * 4, stage.back(2, now + 12.0))
        expected += NEW_WEIGHT * (3.0 - expected)
        assert busy(stage, 2, now + 100) == pytest.approx(expected)


def test_a_segment_that_had_begun_before_its_estimated_time_took_no_less_than_its_stages():
    """Two rows take 1 s in each of four stages. Eight rows before them were estimated at 3 s and given up after 1 s, so
    the two rows come back at 5 s, 2 s after the time at which they were estimated to begin."""
    stage = taught({2: 1.0, 8: 3.0})
    stage.send(list(range(8)), 5000.0)
    stage.send([8, 9], 5000.0)
    mean = stage.due_at - 5000.0
    stage.back(0, 5001.0, computed_seconds=1.0)
    stage.back(2, 5005.0, computed_seconds=4.0)
    stage.send([1, 2], 6000.0)
    assert stage.due_at == 6000.0 + mean + NEW_WEIGHT * (4.0 - mean)
    assert stage.free_at == pytest.approx(6001.0)


def test_an_estimated_time_that_the_stages_allow_is_believed():
    stage = flown(10, 20)
    assert stage.back(2, 5004.0, computed_seconds=4.0) == 4.0
    assert stage.back(2, 5005.0, computed_seconds=4.0) == 5.0  # since it was sent
    stage.send([1, 2], 6000.0)
    assert stage.due_at == 6004.0


def late_twice(wires, delays):
    """Four segments take 1 s each in each of two stages; the first two come back late by these seconds."""
    stage = taught({2: 1.0}, stages=2, wires=wires)
    for node in range(4):
        stage.send([2 * node, 2 * node + 1], 5000.0)
    for number, delay in enumerate(delays):
        stage.back(2, 5002.0 + wires + number + delay)
    return stage


@pytest.mark.parametrize("delays, free_at", [
    ((0.0, 0.0), 5004.0), ((1.0, 1.0), 5004.0),  # no more than one segment takes
    ((1.5, 1.5), 5005.5), ((10.0, 10.0), 5014.0),
    ((1.5, 4.0), 5005.5), ((4.0, 3.0), 5007.0),  # a wire has delayed one of them by the rest
    ((1.5, 0.5), 5004.0), ((0.0, 10.0), 5004.0)])
def test_two_segments_that_are_late_by_a_whole_one_have_queued_and_those_behind_them_are_as_late(delays, free_at):
    assert late_twice(wires=0.0, delays=delays).free_at == pytest.approx(free_at)


@pytest.mark.parametrize("delay, free_at", [(2.9, 5004.0), (3.1, 5007.1)])
def test_on_long_wires_a_queue_takes_a_quarter_of_a_round_trip(delay, free_at):
    assert late_twice(wires=10.0, delays=(delay, delay)).free_at == pytest.approx(free_at)


def test_a_queue_drains_and_is_no_part_of_the_wires():
    """Each of five segments comes back 6 s later than from stages and wires alone, which take 3 s."""
    stage = taught({2: 1.0}, stages=2, wires=1.0)
    for node in range(5):
        stage.send([2 * node, 2 * node + 1], 5000.0)
    assert stage.free_at == pytest.approx(5005.0)

    for index in range(5):
        assert index < 2 or stage.free_at == pytest.approx(5011.0)
        stage._times.learn([Visit(2, 1.0)] * 2, stage.back(2, 5009.0 + index))
    assert stage._times.round_trip(2) == pytest.approx(3.0, rel=0.02)


def test_more_rows_take_no_less_than_one_row_on_a_device_that_has_become_slower():
    """200 rows took 0.5 s before the device became slower, which one row shows."""
    stage = taught({200: 0.5, 1: 3.0})
    assert busy(stage, 1, 90000.0) == busy(stage, 200, 99500.0) == 3.0


def test_rows_that_died_on_the_way_and_the_round_trip_of_the_others_change_no_stages_time():
    stage = taught({4: 1.0})
    stage.send([1, 2, 3, 4], 5000.0)
    stage._times.learn([Visit(4, 1.0), Visit(3, 0.1)], stage.back(3, 5001.1))
    assert busy(stage, 4, 6000.0) == pytest.approx(1.0)


@pytest.mark.parametrize("rows, seconds", [(1, 1.0), (2, 1.0), (4, 1.0 + 2 * 2 / 6), (8, 3.0), (16, 3.0 + 8 * 2 / 6)])
def test_rows_that_were_not_seen_lie_on_the_line_through_their_neighbours_or_the_last_two(rows, seconds):
    assert busy(taught({2: 1.0, 8: 3.0}), rows, 5000.0) == pytest.approx(seconds)


@pytest.mark.parametrize("seed", range(20))
def test_no_segment_is_reckoned_shorter_than_one_with_fewer_rows(seed):
    rng = random.Random(seed)
    stage = taught({rng.randrange(1, 40): rng.random() for _ in range(8)})
    seconds = [busy(stage, rows, 10000.0 + rows) for rows in range(1, 50)]
    assert all(a <= b + 1e-9 for a, b in zip(seconds, seconds[1:]))


def test_a_dead_segment_frees_the_stage_at_once_and_what_waits_behind_it_begins():
    stage = flown(10, 20, 30)
    stage.prune({10, 11, 20}, 5000.25)  # one row of the second lives
    assert stage.free_at == pytest.approx(5002.25)
    stage.prune({10, 11, 20, 21}, 5000.5)
    assert stage.free_at == pytest.approx(5001.5)
    stage.prune({10, 11, 20, 21, 30, 31}, 5001.0)
    assert stage.free_at == pytest.approx(5001.0)
    stage.prune({10, 11, 20, 21, 30, 31}, 5009.0)
    assert stage.free_at == pytest.approx(5001.0)


def test_a_segment_that_dies_while_it_waits_takes_no_time():
    stage = flown(10, 20, 30)
    stage.prune({20, 21}, 5000.5)
    assert stage.free_at == pytest.approx(5002.0)


def test_a_segment_that_has_left_the_stage_frees_nothing_when_it_dies():
    stage = flown(10, 20)
    stage.prune({10, 11}, 5001.5)
    assert stage.free_at == pytest.approx(5002.0)


def test_a_prune_lets_no_segment_begin_before_those_that_are_back_had_left():
    stage = flown(10, 20, 30, stages=2)
    stage.back(2, 5002.0)
    stage.prune(set(), 5002.0)
    assert stage.free_at == pytest.approx(5003.0)


@pytest.mark.parametrize("seed", range(20))
def test_a_prune_brings_the_moment_nearer_and_never_into_the_past(seed):
    rng = random.Random(seed)
    stage = taught({1: 0.4, 2: 1.0, 5: 1.5})
    now = 9000.0
    flying = []
    dead = set()
    for first in range(0, 500, 10):
        now += rng.random()
        flying.append(list(range(first, first + rng.randrange(1, 7))))
        stage.send(flying[-1], now)
        assert stage.free_at >= stage.ready_at >= now
        if rng.random() < 0.5:
            before = stage.free_at
            dead.update(node for nodes in flying for node in nodes if rng.random() < 0.7)
            stage.prune(dead, now)
            assert now <= stage.free_at <= before + 1e-9
        if len(flying) > 3:
            stage.back(len(flying.pop(0)), now)
