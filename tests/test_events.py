"""The workers of DSI: when their forwards end, in which order, and what gives them up."""
from __future__ import annotations

import pytest

from eval.dsi.events import DSI, EventPlan, Forward, Worker


class Workers(DSI):
    """Workers without a text: `run` lets whatever is under way end, and what follows from that."""

    def __init__(self, server: Forward = Forward(12, 12), stops: bool = True, seed: int = 0) -> None:  # noqa: B008
        super().__init__(EventPlan(1, 1, 2, server,
                                   Forward(1, 1), stops, seed), [])
        self.log: list = []

    def begin(self) -> None:
        """Nothing begins by itself."""

    def noted(self, name: str, after=lambda: None):
        def done() -> None:
            self.log.append((self.now, name))
            after()
        return done

    def _schedule(self) -> None:
        self.log.append((self.now, "free"))

    def start(self, worker: Worker, ticks: int, done) -> None:
        """A worker computes for so long, and then `done` is called."""
        worker.forward = Forward(ticks, ticks)
        self.compute(worker, done)

    def until_all_ended(self) -> list:
        self.start(Worker(Forward(1, 1)), 1000, lambda: setattr(self, "settled", 1))
        self.run()
        return self.log


def test_forwards_end_at_their_moments_and_one_that_is_given_up_never_does():
    workers = Workers()
    long, first, beside = (Worker(Forward(ticks, ticks)) for ticks in (50, 3, 4))

    def stop_it() -> None:
        workers.discard(long)
        workers.start(long, 2, workers.noted("in its place"))
    workers.compute(long, workers.noted("never"))
    workers.compute(first,
                    workers.noted("first", lambda: workers.compute(first, workers.noted("second", stop_it))))
    workers.compute(beside, workers.noted("beside"))
    assert workers.until_all_ended() == [(3, "first"),
                                         (4, "beside"), (6, "second"), (8, "in its place")]


def test_chance_orders_what_ends_at_one_moment_and_a_seed_repeats_it():
    def order(seed: int) -> list:
        workers = Workers(seed=seed)
        for name in range(6):
            workers.start(Worker(Forward(5, 5)), 5, workers.noted(str(name)))
        return workers.until_all_ended()
    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(20)}) > 10
    assert {tuple(sorted(order(seed))) for seed in range(20)} == {tuple((5, str(name)) for name in range(6))}


def test_nothing_ends_behind_the_last_token():
    workers = Workers()

    def settle() -> None:
        workers.start(Worker(Forward(1, 1)), 1, workers.noted("no"))
        workers.settled = 1
    workers.start(Worker(Forward(1, 1)), 1, workers.noted("the end", settle))
    workers.start(Worker(Forward(1, 1)), 2, workers.noted("no"))
    workers.run()
    assert workers.log == [(1, "the end")]


@pytest.mark.parametrize(("stops", "at", "log"), [
    (True, 5, []), (True, 0, []),
    (False, 0, [(12, "free")]), (False, 5, [(12, "free")])])
def test_a_forward_is_given_up_at_once_or_at_its_end(stops: bool, at: int, log: list):
    workers = Workers(stops=stops)
    server = workers.servers[0]

    def give_up() -> None:
        for _ in range(2):  # the second time changes nothing
            workers.discard(server)
        assert (server.task is None) == stops
    workers.compute(server, workers.noted("unwanted"))
    workers.start(Worker(Forward(1, 1)), at, give_up)
    assert workers.until_all_ended() == log and server.task is None


def test_a_server_that_runs_on_is_free_at_once_where_its_forward_ends_at_that_moment():
    workers = Workers(Forward(0, 0), stops=False)
    server = workers.servers[0]
    workers.compute(server, workers.noted("unwanted"))
    workers.discard(server)
    assert server.task is None and workers.until_all_ended() == []


def test_the_first_forward_takes_what_a_first_one_takes():
    workers = Workers(Forward(100, 10))
    server = workers.servers[0]

    def again() -> None:
        if server.forwards < 3:
            workers.compute(server, workers.noted("done", again))
    workers.compute(server, workers.noted("done", again))
    assert workers.until_all_ended() == [(100, "done"), (110, "done"), (120, "done")]
    assert server.forwards == 3


def test_the_server_that_takes_the_shortest_time_is_asked():
    workers = Workers(Forward(100, 10))
    workers.servers[1].forwards = 1
    workers.ask(lambda: None)
    assert [server.forwards for server in workers.servers] == [0, 2] and workers.most == 1
    workers.ask(lambda: None)
    assert workers.free == [] and workers.most == 2
