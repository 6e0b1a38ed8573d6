"""When the first stage is free, as rank 0 reckons it from what it sent and when that came back."""
import random

import pytest

from pipeline.stage_times import EARLY_SHARE, SHORTEST_TIME_GROWTH, FirstStage


def taught(seconds, share=0.25):
    """A model that has seen a segment of so many rows spend so long in the first stage, for each of these."""
    stage, now = FirstStage(share), 0.0
    for rows, takes in seconds.items():
        stage.send(list(range(rows)), now)
        stage.back(rows, now + takes / share)
        now += 1000
    return stage


def flown(*first_nodes, share=0.25):
    """A stage that is sent segments of two rows, each of a second, at 5000."""
    stage = taught({2: 1.0}, share)
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
    stage = FirstStage(0.5)
    assert stage.ready_at <= 0
    for now in (3.0, 3.5, 4.0):
        stage.send([1, 2], now)
        assert stage.ready_at == stage.free_at == now


def test_a_segment_takes_its_share_of_the_time_after_which_such_a_one_came_back():
    stage = FirstStage(0.25)
    stage.send([1, 2], 10.0)
    stage.back(2, 18.0)
    stage.send([3, 4], 20.0)
    assert stage.free_at == pytest.approx(22.0)
    assert stage.ready_at == pytest.approx(22.0 - EARLY_SHARE * 2.0)


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


def test_the_shortest_time_counts_and_fades_so_that_a_slower_pipeline_is_believed():
    stage = taught({2: 1.0})
    stage.send([1, 2], 5000.0)
    stage.back(2, 5080.0)  # in which something else kept it
    assert busy(stage, 2, 6000.0) == pytest.approx(SHORTEST_TIME_GROWTH)
    stage.send([1, 2], 7000.0)
    stage.back(2, 7002.0)
    assert busy(stage, 2, 8000.0) == pytest.approx(0.5)
    for i in range(400):
        stage.send([1, 2], 9000.0 + 100 * i)
        stage.back(2, 9012.0 + 100 * i)
    assert busy(stage, 2, 60000.0) == pytest.approx(3.0)


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_a_time_that_was_far_too_long_makes_no_later_one_too_short(share):
    stage = taught({2: 100.0}, share)
    for _ in range(3):
        stage.send([1, 2], 5000.0)
    for i in range(3):
        stage.back(2, 5000.0 + (1 + i * share) / share)  # 1 s in every stage
    assert busy(stage, 2, 6000.0) >= 1.0
    stage.send([1, 2], 7000.0)
    stage.back(2, 7000.0 + 1 / share)
    assert busy(stage, 2, 8000.0) == pytest.approx(1.0)


def test_a_segment_that_had_begun_before_its_estimated_time_took_no_less_than_its_stages():
    """Two rows take 1 s in each of four stages. Eight rows before them were estimated at 3 s, and given up after 1 s:
    the two rows come back at 5 s, 2 s after the time at which they were estimated to begin."""
    stage = taught({2: 1.0, 8: 3.0})
    stage.send(list(range(8)), 5000.0)
    stage.send([8, 9], 5000.0)
    stage.back(0, 5001.0, computed_seconds=1.0)
    assert stage.back(2, 5005.0, computed_seconds=4.0) == 4.0
    assert busy(stage, 2, 6000.0) == pytest.approx(1.0)


def test_an_estimated_time_that_the_stages_allow_is_believed():
    stage = flown(10, 20)
    assert stage.back(2, 5004.0, computed_seconds=4.0) == 4.0
    assert stage.back(2, 5005.0, computed_seconds=4.0) == 4.0


def test_what_came_back_with_fewer_rows_or_none_teaches_nothing():
    stage = taught({4: 1.0})
    for rows in (0, 3):
        stage.send([1, 2, 3, 4], 5000.0)
        stage.back(rows, 5000.1)
    assert busy(stage, 4, 6000.0) == pytest.approx(1.0)


@pytest.mark.parametrize("rows, seconds", [(1, 1.0), (2, 1.0),
                                           (3, 3.0), (8, 3.0), (9, 3.0)])
def test_rows_that_were_not_seen_take_as_long_as_the_next_larger_segment_and_else_as_the_slowest(rows, seconds):
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
    stage = flown(10, 20, 30, share=0.5)
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
