"""What a request hears of the ring, and how long rank 0 rests: on a link by hand, and on real ones."""
import gc
import math
import threading
import time
import weakref
from collections import deque
from contextlib import contextmanager

import pytest
import torch

from cluster.transport import Inbox
from config.failure import PeerLost
from model.sample import Sampler
from model.tree import TokenTree, verify
from pipeline.messages import Prune, Reset, Segment, Visit
from pipeline.requests import Ring
from pipeline.stage import Stage
from pipeline.strategies import WAIT
from pipeline.target_options import TargetOptions
from sim.clock import Pace, VirtualClock
from sim.devices import SlowLink
from tests.test_emulate import QUICK
from tests.tiny import TINY, ring_of_threads
from tp.links import Loop

VOCAB = 9
SOON = 0.02  # seconds


class Hand:
    """A link whose messages come when the test says so; the target says that a token follows itself."""

    def __init__(self):
        self.clock = VirtualClock()
        self.sent, self.inbox = deque(), deque()
        self.broadcast = lambda msg: None

    def send(self, msg):
        if isinstance(msg, Reset):
            self.inbox.append(msg)
        else:
            self.sent.append(msg)

    def back(self, at, rows=None):
        """The oldest segment comes back at a moment, with some of its rows or all."""
        self.clock.sleep_until(at)
        msg = self.sent.popleft()
        msg = msg.take(range(len(msg.nodes)) if rows is None else rows)
        msg.x = torch.nn.functional.one_hot(msg.x, VOCAB).float()
        self.inbox.append(msg)

    @property
    def ready(self):
        return bool(self.inbox)

    def recv(self):
        return self.inbox.popleft()

    def wait_until(self, until):
        if not self.inbox:
            assert until > self.clock.now(), "nobody rests until a moment that is over"
            self.clock.sleep_until(until)


@pytest.fixture
def link():
    return Hand()


@pytest.fixture
def ring(link):
    """Two stages, in each of which a segment of one row takes a second."""
    ring = Ring(link, lambda x: x, depth=3, clock=link.clock)
    ring.pacing.first_stage.send([-1], 0.0)
    ring.pacing.times.learn([Visit(1, 1.0)] * 2, ring.pacing.first_stage.back(1, 2.0))
    link.clock.sleep_until(10.0)
    return ring


def judged(tree):
    """The nodes of which the target has said what follows them."""
    return {number for number, node in tree.nodes.items() if node.target_token is not None}


def opened(ring, prompt, **options):
    tree = TokenTree(prompt, 40, ring.ids)
    return tree, ring.open(tree, Sampler(), TargetOptions(**options))


def resting(ring, *guesses):
    """A request that waits until it may send; its tree has the guesses, and its prompt is under way."""
    tree, target = opened(ring, [1])
    assert target.free
    target.send(tree.cut())
    assert not target.free
    for token in guesses:
        tree.add(tree.tip, token, -1.0)
    rests = target.wait_until_free()
    assert next(rests) is WAIT
    return target, rests


def test_after_a_reset_a_ring_knows_the_times_that_it_keeps_and_none_of_later_answers(ring):
    ring.keep_times()
    ring.pacing.times.learn([Visit(1, 9.0)] * 2, 18.0)
    assert ring.pacing.times.slowest(1) > 1.0
    for _ in range(2):
        ring.reset_measurements()
        assert ring.pacing.times.slowest(1) == 1.0
        ring.pacing.times.learn([Visit(1, 9.0)] * 2, 18.0)


def test_guesses_that_would_not_leave_with_a_tip_do_not_make_it_wait_for_a_level(ring):
    """One more row takes a quarter of a second in each of two stages, so a sure guess leaves, and no poor one does."""
    ring.pacing.times.learn([Visit(64, 16.0)] * 2, 32.0)
    ring.pacing.gate.add_pass(1, 0.1)
    tree, target = opened(ring, [1])
    for token in (2, 3):
        tree.cut()
        tree.settle(token)
    assert len(tree.unsent_text) == 1 and target.worth_waiting([0.08]) == 0

    for token in range(30):
        tree.add(tree.tip, token, -4.0)
    assert target.worth_waiting([0.08]) == 0
    tree.add(tree.tip, 30, -0.01)
    assert target.worth_waiting([0.25]) == 1


def test_a_segment_that_comes_back_empty_is_taken_off_and_says_nothing(ring, link):
    tree, target = opened(ring, [1, 2])
    first, second, third = (tree.add(tree.tip, token, -1.0)
                            for token in (2, 3, 4))
    for nodes in (tree.cut(2), [first], [second], [third]):
        target.send(nodes)
    link.back(20.0)
    link.back(20.1, rows=[])
    link.back(20.2, rows=[])
    assert target.ready() and target.in_flight == 2
    assert list(target.wait()) == [] and tree.nodes[tree.tip].target_token == 2
    assert target.in_flight == 1
    waits = target.wait()
    assert next(waits) is WAIT and next(waits) is WAIT
    link.back(20.3)

    assert list(waits) == [] and judged(tree) == {tree.trunk[1], third}
    assert target.in_flight == 0


def test_a_wait_ends_when_all_that_is_under_way_was_empty(ring, link):
    tree, target = opened(ring, [1])
    target.send(tree.cut())
    waits = target.wait()
    next(waits)
    link.back(20.0, rows=[])
    assert list(waits) == [] and target.in_flight == 0 and not judged(tree)


def test_a_rest_ends_when_the_first_stage_is_free_if_there_is_something_to_send(ring, link):
    target, rests = resting(ring, 5)
    ring.listen()
    assert list(rests) == [] and target.free and not target.ready()
    assert link.clock.now() == ring.pacing.first_stage.ready_at


def test_the_next_chunk_of_a_prompt_leaves_as_soon_as_the_first_stage_is_free_beside_other_requests(ring, link):
    (tree, target), _ = opened(ring, [1, 2]), opened(ring, [3])
    assert target.free
    target.send(tree.cut(None, 1))  # it leaves when all requests have asked
    rests = target.wait_until_free()
    assert next(rests) is WAIT
    ring.listen()
    assert list(rests) == [] and target.free and not target.ready()
    assert link.clock.now() == ring.pacing.first_stage.ready_at


def test_a_rest_ends_with_a_message_that_comes_before(ring, link):
    target, rests = resting(ring, 5)
    link.back(10.5)
    ring.listen()
    assert list(rests) == [] and target.ready() and link.clock.now() == 10.5


def test_who_has_nothing_to_send_rests_until_a_message_comes(ring, link):
    target, rests = resting(ring)
    link.clock.sleep_until(15.0)
    assert target.free and next(rests) is WAIT
    link.back(16.0)
    ring.listen()  # hears what has come; there is no moment to rest until
    assert list(rests) == [] and target.ready()


def test_a_request_with_nothing_under_way_rests_until_the_segments_of_others_have_left(ring, link):
    (other, busy), (_, target) = opened(ring, [1]), opened(ring, [2])
    busy.send(other.cut())
    ring.depart()
    rests = target.wait_until_free()
    assert next(rests) is WAIT
    link.back(11.5)
    ring.listen()
    assert busy.ready() and list(rests) == [] and target.free


def test_all_that_were_left_out_for_rows_that_nobody_sends_may_ask_again(ring):
    (rich_tree, rich), (poor_tree, poor) = (opened(ring, [token], segment_rows=1) for token in (1, 2))
    for tree, score in ((rich_tree, -0.1), (poor_tree, -5.0)):
        tree.cut()
        tree.add(tree.tip, 5, score)
    assert poor.share() == 0 and not poor.free
    rich_tree.nodes[max(rich_tree.live)].score = -9.0  # what has come back meanwhile speaks against its guess
    assert rich.share() == 0 and not rich.free
    ring.listen()  # nothing is under way, so nothing can come
    assert rich.free and poor.free and poor.share() == 1


def test_rows_of_a_request_that_ends_before_they_leave_are_for_the_others(ring):
    (rich_tree, rich), (poor_tree, poor) = (opened(ring, [token], segment_rows=1) for token in (1, 2))
    poor.send(poor_tree.cut())
    ring.depart()
    ring.link.clock.sleep_until(ring.pacing.first_stage.ready_at)
    rich_tree.cut()
    rich_tree.add(rich_tree.tip, 5, -0.1)
    poor_tree.add(poor_tree.tip, 5, -5.0)
    assert poor.share() == 0 and not poor.free
    rich.end()
    assert poor.free and poor.share() == 1


def test_requests_that_had_nothing_to_send_have_rows_once_they_have_guesses(ring):
    opened_requests = [opened(ring, [token], segment_rows=1) for token in (1, 2)]
    for tree, _ in opened_requests:
        tree.cut()
    assert [target.share() for _, target in opened_requests] == [0, 0]
    for tree, target in opened_requests:
        tree.add(tree.tip, 5, -0.1)
        assert target.free
    assert [target.share() for _, target in opened_requests] == [1, 0]


def test_a_tip_leaves_although_its_request_had_no_row_before(ring, link):
    (rich_tree, rich), (poor_tree, poor) = (opened(ring, [token], segment_rows=1) for token in (1, 2))
    poor.send(poor_tree.cut())
    ring.depart()
    rich_tree.cut()
    rich_tree.add(rich_tree.tip, 5, -0.1)
    assert poor.share() == 0
    link.back(12.0)
    assert list(poor.wait()) == [] and verify(poor_tree) == [2]
    poor.prune()
    assert poor.free and poor.share() == 1


@pytest.mark.parametrize("together", [False, True])
def test_a_prune_of_one_request_frees_the_stage_of_no_row_of_another(ring, link, together):
    (other, busy), (tree, target) = opened(ring, [1]), opened(ring, [2])
    tree.add(tree.tip, 5, -1.0)
    target.send(tree.cut(1))
    ring.depart()
    link.back(12.0)  # two stages, a second each
    target.send(tree.cut(1))
    if together:
        busy.send(other.cut())
    ring.depart()
    assert ring.pacing.first_stage.free_at == pytest.approx(13.0)
    link.clock.sleep_until(12.5)
    assert list(target.wait()) == [] and verify(tree) == [2]
    target.prune()

    assert ring.pacing.first_stage.free_at == pytest.approx(13.0 if together else 12.5)


def test_a_prune_is_sent_as_long_as_a_stage_may_hold_a_guess_and_no_longer(ring, link):
    kept = []
    link.broadcast = lambda prune: kept.append(prune.keep)
    tree, target = opened(ring, [1])
    target.prune()
    assert kept == []
    guess = tree.add(tree.tip, 5, -1.0)
    target.send(tree.cut())
    target.prune()
    tree.settle(2)
    target.prune()
    link.back(20.0)
    list(target.wait())
    target.prune()
    target.prune()

    assert [guess in keep for keep in kept] == [True, False]


def test_a_request_that_is_given_up_in_its_rest_ends_at_its_reset(ring, link):
    target, rests = resting(ring, 5)
    link.clock.sleep_until(30.0)
    link.back(30.0, rows=[])
    target.close()
    assert target.wakes_at == math.inf and not link.inbox


@pytest.mark.parametrize("late", [0, 1, 2])
def test_nothing_is_left_of_a_request_whatever_came_back_before_its_end(ring, link, late):
    """The first of three segments is judged; of the others, `late` come back after the end of the request."""
    tree, target = opened(ring, [1])
    guesses = [tree.add(tree.tip, token, -1.0) for token in (1, 2)]
    for nodes in (tree.cut(), *([guess] for guess in guesses)):
        target.send(nodes)
    for _ in range(3 - late):
        link.back(20.0)

    assert list(target.wait()) == [] and target.in_flight == 2
    target.end()
    end = link.inbox.pop()
    for _ in range(late):
        link.back(30.0)
    link.inbox.append(end)
    target.close()
    left = weakref.ref(target)
    gc.disable()  # it would hide a cycle
    try:
        del target
        assert left() is None
    finally:
        gc.enable()


# Real links


@contextmanager
def soon(action):
    """Something that happens in a moment, and that has happened behind the block."""
    timer = threading.Timer(SOON, action)
    timer.start()
    yield
    timer.join()


def an_hour_later():
    return time.monotonic() + 3600


def local():
    return ring_of_threads(2)


def slow():
    return [SlowLink(link, Pace(QUICK)) for link in local()]


@pytest.mark.parametrize("make", [local, slow])
def test_a_link_rests_until_its_moment_or_until_a_message_has_come(make):
    first, second = make()
    until = time.monotonic() + SOON
    second.wait_until(until)
    assert time.monotonic() >= until and not second.ready
    second.wait_until(time.monotonic() - SOON)
    with soon(lambda: first.send(Reset(7))):
        second.wait_until(an_hour_later())
        assert second.ready and second.recv() == Reset(7)
    for link in (first, second):
        link.close()


def test_a_prune_ends_a_rest_too_and_a_message_that_is_there_lets_nobody_rest():
    inbox, prune = Inbox(), Prune(0, 2, 1, 3, [])
    with soon(lambda: inbox.put(prune)):
        inbox.wait_until(an_hour_later())
        inbox.wait_until(an_hour_later())
        assert inbox.get() == prune


def test_the_loss_of_a_peer_ends_a_rest_and_reaches_who_listens():
    inbox = Inbox()
    with soon(lambda: inbox.fail(PeerLost("rank 1 was lost"))):
        inbox.wait_until(an_hour_later())
        with pytest.raises(PeerLost, match="rank 1 was lost"):
            inbox.get()


def test_a_ring_that_is_one_group_has_each_answer_when_it_has_sent_and_never_rests():
    stage = Stage(TINY.whole, TINY.new_cache)
    link = Loop(stage, None)
    link.send(Segment(0, [0, 1], [0, 0],
                      [0, 1], 2, torch.tensor([3, 4])))
    link.wait_until(an_hour_later())
    assert link.ready and link.recv().nodes == [0, 1] and not link.ready
