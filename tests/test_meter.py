"""The meter: what share of its last seconds a rank was at work, and what its heartbeat tells of it."""
import threading

import pytest

from cluster.folder import Folder
from cluster.heartbeat import Heartbeat
from cluster.transport import Inbox
from pipeline import trace as meter
from pipeline.messages import Stop
from tests.saved import wait_until


@pytest.fixture
def now(monkeypatch):
    moment = [0.0]
    monkeypatch.setattr(meter.time, "monotonic", lambda: moment[0])
    return moment


def test_work_counts_without_its_pauses_and_while_it_lasts(now):
    own = meter.Meter()
    now[0] = 5.0
    with own:
        now[0] = 6.0
        with own.idle():
            now[0] = 16.0
            assert own.seconds == 1.0
        now[0] = 18.0
        assert own.seconds == 3.0
    now[0] = 30.0
    with own.idle():  # outside of work a pause begins none
        pass
    now[0] = 40.0

    assert own.seconds == 3.0


def test_a_share_is_that_of_the_last_seconds(now):
    own, shares = meter.Meter(), []
    for second in range(1, 11):
        now[0] = second - 1.0
        if second <= 5:
            with own:
                now[0] += 0.5
        now[0] = float(second)
        shares.append(own.share())
    assert shares == [0.5] * 5 + [0.25] + [0.0] * 4


def test_who_waits_for_a_message_is_idle(now):
    own = meter.Meter()
    inbox = Inbox(meter=own)

    def later():
        now[0] = 100.0
        inbox.put(Stop())

    with own:
        inbox.wait_until(0.0)
        now[0] = 2.0
        threading.Timer(0.3, later).start()
        assert isinstance(inbox.get(), Stop)
    assert own.seconds == 2.0


def test_a_total_rises_by_its_last_seconds_and_one_that_begins_again_has_no_rate(now):
    rate, rates = meter.Rate(), []
    for second, total in enumerate((4, 8, 8, 8, 3, 5), 1):
        now[0] = float(second)
        rates.append(rate.of(total))
    assert rates == [4.0, 4.0, 2.0, 0.0, 0.0, 0.0]


def test_every_rank_hears_how_busy_the_others_are_and_what_memory_they_have(tmp_path):
    ranks = [Heartbeat(Folder(str(tmp_path)), rank, 2, timeout=30) for rank in range(2)]
    ranks[1].memory = lambda: (7.5, 0.25)
    for each in ranks:
        each.start(print)
    with ranks[1].meter:
        assert wait_until(lambda: ranks[0].states()["rank 1"].busy > 0.9, 30)
        first, second = ranks[0].states().values()
        assert (first.busy, first.free, second.free, second.layer) == (0.0, 0.0, 7.5, 0.25)
        assert second.away > 0 and list(ranks[1].states()) == ["rank 0", "rank 1"]
    for each in ranks:
        each.stop()
