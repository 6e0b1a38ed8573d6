"""The core of tasks: when they end, in which order, and what cancels them."""
from __future__ import annotations

import pytest

from eval.dsi.events import Events, Forward, Worker


def note(events: Events, log: list, name: str, after=lambda: None):
    def done() -> None:
        log.append((events.now, name))
        after()
    return done


def story() -> list:
    """Tasks that end, follow one another, and are cancelled: moments and names of those that ended."""
    events, log = Events(), []
    long = events.start(50, note(events, log, "never"))

    def stop_it() -> None:
        long.cancelled = True
        events.start(2, note(events, log, "in its place"))
    events.start(3, note(events, log, "first", lambda: events.start(3, note(events, log, "second", stop_it))))
    events.start(4, note(events, log, "beside"))
    events.run()
    return log


STORY = [(3, "first"), (4, "beside"), (6, "second"), (8, "in its place")]


def test_tasks_end_at_their_moments_and_one_that_is_cancelled_never_does():
    assert story() == STORY


def test_chance_orders_what_ends_at_one_moment_and_a_seed_repeats_it():
    def order(seed: int) -> list:
        events, log = Events(seed), []
        for worker in range(6):
            events.start(5, note(events, log, str(worker)))
        events.run()
        return log
    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(20)}) > 10
    assert {tuple(sorted(order(seed))) for seed in range(20)} == {tuple((5, str(worker)) for worker in range(6))}


def test_stop_leaves_nothing_to_end():
    events, log = Events(), []
    events.start(1, note(events, log, "the end", lambda: (events.start(1, note(events, log, "no")),
                                                             events.stop())))
    events.start(2, note(events, log, "no"))
    events.run()
    assert log == [(1, "the end")]


@pytest.mark.parametrize(("stops", "at", "free"), [
    (True, 5, 5), (True, 0, 0), (False, 0, 12), (False, 5, 12), (False, 12, 12)])
def test_a_forward_is_given_up_at_once_or_at_its_end(stops: bool, at: int, free: int):
    events, log = Events(), []
    server = Worker(events, Forward(12, 12), stops)

    def give_up() -> None:
        server.give_up(note(events, log, "free"))
        server.give_up(note(events, log, "twice"))
        if server.free:
            log.append((events.now, "free"))
    if at < 12:
        server.compute(note(events, log, "unwanted"))
        events.start(at, give_up)
    else:
        server.compute(give_up)
    events.run()
    assert log == [(free, "free")] and server.free


def test_the_first_forward_takes_what_a_first_one_takes():
    events, ends = Events(), []
    server = Worker(events, Forward(100, 10))
    for _ in range(3):
        server.compute(lambda: ends.append(events.now))
        events.run()
    assert ends == [100, 110, 120] and server.forwards == 3


def test_a_task_is_under_way_to_its_end():
    task = Events().start(7, lambda: None)
    assert (task.due, task.cancelled) == (7, False)
