"""Pruning is only an optimisation: prunes that are lost, late or in bursts change no text."""
import random
from itertools import cycle

import pytest

from cluster.transport import CONTROL
from model.sample import Sampler
from pipeline.answers import Request
from pipeline.messages import Prune
from tests.tiny import SPECULATIVE, TINY, Oracle, give_up, holds_caches, pipeline, write

PROMPT = [8, 1, 33, 25, 46, 12, 9]
NEW = 18
SAMPLER = Sampler(1.0, seed=11)
PRUNING = [strategy for strategy in SPECULATIVE if strategy != "serial"]
MIXTURES = "eagle drifting twin suffix eagle+twin+suffix eagle+suffix".split()


def text():
    return TINY.text(PROMPT, NEW, SAMPLER)


def losing(chance, seed):
    """Links whose prunes are lost with this chance, for each stage by itself."""
    rng = random.Random(seed)

    def wrap(link):
        def broadcast(msg):
            for inbox in link._next_inboxes[CONTROL]:
                if not isinstance(msg, Prune) or rng.random() >= chance:
                    inbox.put(msg)
        link.broadcast = broadcast
        return link
    return wrap


def delaying(longest, seed):
    """Links whose prunes come late, out of order and in bursts."""
    rng = random.Random(seed)

    def wrap(link):
        held = []

        def broadcast(msg):
            held.append(msg)
            if len(held) > rng.randrange(longest):
                rng.shuffle(held)
                for inbox in link._next_inboxes[CONTROL]:
                    for late in held:
                        inbox.put(late)
                held.clear()
        link.broadcast = broadcast
        return link
    return wrap


@pytest.mark.parametrize("strategy, all_lost", zip(PRUNING, cycle([True, False])))
def test_any_prune_may_be_lost_or_late_and_the_text_stays(strategy, all_lost):
    head, oracle = TINY.eagle(), Oracle(PROMPT + text())
    for spoil, draft in (((losing(1.0, seed=5), head), (delaying(3, seed=6), oracle)) if all_lost else
                         ((losing(0.7, seed=5), oracle), (delaying(8, seed=6), head))):
        with pipeline(TINY, 3, strategy, draft, wrap=spoil) as decoder:
            assert write(decoder, PROMPT, NEW, SAMPLER) == text()


@pytest.mark.parametrize("names, strategy, spoil", [(names, *setting) for names, setting in zip(MIXTURES, cycle([
    ("streaming", losing(0.5, seed=8)), ("continuous", losing(1.0, seed=8)),
    ("streaming", delaying(6, seed=9))]))])
def test_mixtures_need_no_prune_either(names, strategy, spoil):
    with pipeline(TINY, 3, strategy, TINY.mixture(names), wrap=spoil) as decoder:
        assert write(decoder, PROMPT, NEW, SAMPLER) == text()


@pytest.mark.parametrize("strategy", PRUNING)
def test_prunes_of_one_request_may_arrive_in_the_next(strategy):
    with pipeline(TINY, 2, strategy, TINY.eagle(), wrap=delaying(40, seed=7)) as decoder:
        for seed in range(4):
            sampler = Sampler(1.0, seed=seed)
            assert write(decoder, PROMPT[seed:], 12, sampler) == TINY.text(PROMPT[seed:], 12, sampler)


@pytest.mark.parametrize("strategy", ["autoregressive", "serial", *PRUNING])
def test_requests_follow_one_another_and_may_be_given_up_in_mid_air(strategy):
    with pipeline(TINY, 2, strategy, TINY.eagle()) as decoder:
        for left in (0, 1, 3):
            give_up(decoder, Request(PROMPT, SAMPLER, NEW), left)
            assert not holds_caches(decoder)
            assert write(decoder, PROMPT, 8, SAMPLER) == text()[:8]


@pytest.mark.parametrize("names", MIXTURES)
def test_a_mixture_forgets_a_request_that_is_given_up(names):
    with pipeline(TINY, 2, "streaming", TINY.mixture(names)) as decoder:
        for left in (0, 1, 3):
            give_up(decoder, Request(PROMPT, SAMPLER, NEW), left)
            assert write(decoder, PROMPT[left:], 12, SAMPLER) == TINY.text(PROMPT[left:], 12, SAMPLER)


def _widest(strategy, wrap):
    """The most slots that a stage's KV cache held while a text was written."""
    long_text = TINY.text(PROMPT, 2 * NEW, SAMPLER)
    with pipeline(TINY, 2, strategy, Oracle(PROMPT + long_text), wrap=wrap) as decoder:
        _, stream = decoder.stream(Request(PROMPT, SAMPLER, 2 * NEW))
        widest = 0
        for _ in stream:
            sizes = [len(cache.nodes) for stage in decoder.stages for cache in stage.caches.values()]
            widest = max(widest, *sizes)
        return widest


@pytest.mark.parametrize("strategy", [name for name in PRUNING if name != "streaming"])
def test_prunes_keep_the_caches_small(strategy):
    """When all prunes are lost, every guess of the request stays in the caches. How many `streaming` sends depends on
    the time that steps take."""
    assert 0 < 1.5 * _widest(strategy, losing(0.0, seed=5)) < _widest(strategy, losing(1.0, seed=5))
