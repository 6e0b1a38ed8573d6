"""The core of tasks: when they end, in which order, and what cancels them."""
from __future__ import annotations

import pytest

from eval.dsi.events import Events, Forward, Worker


def told(events: Events, log: list, name: str, after=lambda: None):
    def done() -> None:
        log.append((events.now, name))
        after()
    return done


def story() -> list:
    """Tasks that end, follow one another, and are cancelled: moments and names of those that ended."""
    events, log = Events(), []
    long = events.start(50, told(events, log, "never"))

    def stop_it() -> None:
        long.cancelled = True
        events.start(2, told(events, log, "in its place"))
    events.start(3, told(events, log, "first", lambda: events.start(3, told(events, log, "second", stop_it))))
    events.start(4, told(events, log, "beside"))
    events.run()
    return log


STORY = [(3, "first"), (4, "beside"), (6, "second"), (8, "in its place")]


def test_tasks_end_at_their_moments_and_one_that_is_cancelled_never_does():
    assert story() == STORY


def test_chance_orders_what_ends_at_one_moment_and_a_seed_repeats_it():
    def order(seed: int) -> list:
        events, log = Events(seed), []
        for worker in range(6):
            events.start(5, told(events, log, str(worker)))
        events.run()
        return log
    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(20)}) > 10
    assert {tuple(sorted(order(seed))) for seed in range(20)} == {tuple((5, str(worker)) for worker in range(6))}


def test_stop_leaves_nothing_to_end():
    events, log = Events(), []
    events.start(1, told(events, log, "the end", lambda: (events.start(1, told(events, log, "no")),
                                                             events.stop())))
    events.start(2, told(events, log, "no"))
    events.run()
    assert log == [(1, "the end")]


@pytest.mark.parametrize(("parts", "at", "free"), [
    (0, 5, 5), (1, 0, 12), (1, 5, 12), (3, 0, 4), (3, 4, 4), (3, 5, 8), (3, 11, 12), (5, 3, 5), (5, 0, 3)])
def test_a_forward_is_given_up_at_the_next_border_of_its_parts(parts: int, at: int, free: int):
    events, log = Events(), []
    server = Worker(events, Forward(12, (12,)), parts)
    server.compute(0, told(events, log, "unwanted"))

    def give_up() -> None:
        server.give_up(told(events, log, "free"))
        server.give_up(told(events, log, "twice"))
        if server.free:
            log.append((events.now, "free"))
    events.start(at, give_up)
    events.run()
    assert log == [(free, "free")] and server.free and server.held == 0


def test_a_forward_takes_what_the_rows_take_that_the_cache_lacks_and_the_first_one_what_a_first_one_takes():
    events, ends = Events(), []
    server = Worker(events, Forward(100, (10, 12, 15)), 0, hop=1)
    for length in (3, 4, 6, 9, 30, 30):
        server.compute(length, lambda: ends.append(events.now))
        events.run()
    server.truncate(28)
    assert ends == [102, 114, 128, 145, 162, 174] and (server.held, server.forwards) == (28, 6)


def test_what_a_server_computes_is_given_up_when_the_message_is_there_and_its_answer_may_be_under_way():
    events, log = Events(), []
    server = Worker(events, Forward(10, (10,)), parts=2, hop=3)  # answers at 16; computes from 3 to 13
    for at, free in ((1, 5), (6, 10), (10, 10), (12, 12)):
        server.compute(0, told(events, log, "unwanted"))
        begun = events.now
        events.start(at, lambda: server.give_up(told(events, log, "free")) or server.free and log.append(
            (events.now, "free")))
        events.run()
        assert log == [(begun + free, "free")]
        log.clear()


def test_a_task_is_under_way_from_its_begin_to_its_end():
    task = Events().start(7, lambda: None)
    assert (task.begun, task.due, task.cancelled) == (0, 7, False)
