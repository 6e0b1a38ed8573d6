"""Replicas of the target write the one text, whatever is late, lost or given up; DSI takes the time that it should."""
import random
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle, product

import pytest

from cluster.transport import Inbox, LocalLink
from config.profiles import Profile
from model.sample import Sampler, warp
from pipeline.answers import Request
from pipeline.decode import Decoder, PipelineLimits
from pipeline.link import Peers
from pipeline.messages import Segment
from pipeline.replicas import Replicas
from pipeline.strategies import STRATEGIES
from pipeline.trace import OFF
from sim.clock import VirtualClock
from sim.cluster import Cluster
from sim.paths import Paths
from sim.stages import Work
from tests.test_exact import SAMPLERS
from tests.test_prunes import PROMPT, delaying, losing
from tests.test_sample import ALPHA, p_value
from tests.tiny import (
    TINY,
    TREE,
    HandmadeDraft,
    Oracle,
    give_up,
    holds_caches,
    in_threads,
    stages_of,
    tokens_of,
    work,
    write,
)

NEW, SHORT = 24, 18  # tokens in virtual time, and of threads
RUNS = 400  # of the test of the joint law
COUNTS = [(1, 1, 1), (1, 2, 1), (1, 5, 1), (2, 3, 1), (2, 2, 2), (3, 4, 1), (4, 3, 1), (5, 1, 4), (6, 2, 1)]
SPOILS = {"some prunes lost": lambda: losing(0.5, seed=8), "all prunes lost": lambda: losing(1.0, seed=8),
          "prunes late": lambda: delaying(6, seed=9), "segments late": lambda: jittering(0.004, 1)}
FREE = Profile("wires that take no time", layers=64, row_bytes=1, model=0,
               row=0, free=9, token=0, level=0, verdict=0,
               latency=0, mbps=1e15, step=0, own_times=(0, 0, 0))


@contextmanager
def replicas(copies, stages=1, draft=None, strategy="dsi", wrap=lambda link: link, **tree):
    """A decoder over so many copies of the model, each of `stages` threads."""
    world = 1 + copies * stages
    inboxes = [Inbox() for _ in range(world)]
    links, served = [], []
    for copy in range(copies):
        ranks = list(range(1 + copy * stages, 1 + (copy + 1) * stages))
        links.append(wrap(LocalLink(0, inboxes,
                                    Peers(ranks[-1], [ranks[0]], other_ranks=ranks))))
        for rank, after in zip(ranks, [*ranks[1:], 0]):
            served.append(wrap(LocalLink(rank, inboxes, Peers(None, [after]))))
    workers = [stage for _ in range(copies) for stage in stages_of(TINY, stages)]
    ring = Replicas(links, TINY.lm_head, stages)
    decoder = Decoder(ring, draft or TINY.eagle(),
                      STRATEGIES[strategy], replace(TREE, **tree), PipelineLimits(200))
    decoder.stages = workers
    with in_threads(work, zip(workers, served)):
        yield decoder
        ring.stop()


def jittering(longest, seed):
    """Links that keep what they send for a while, so that replicas overtake each other."""
    rng = random.Random(seed)

    def wrap(link):
        send = link.send

        def late(msg):
            if isinstance(msg, Segment):
                time.sleep(rng.random() * longest)
            send(msg)
        link.send = late
        return link
    return wrap


def text_at(temperature, new=SHORT):
    return TINY.text(PROMPT, new, SAMPLERS[temperature])


def assert_reference(decoder, temperature=1.0):
    assert write(decoder, PROMPT, SHORT, SAMPLERS[temperature]) == text_at(temperature)


@pytest.mark.parametrize("counts, temperature", [*zip(COUNTS, cycle(SAMPLERS))])
def test_any_number_of_replicas_writes_the_reference_text_at_any_lookahead(counts, temperature):
    lookahead, copies, stages = counts
    with replicas(copies, stages, TINY.mixture("twin"), lookahead=lookahead) as decoder:
        assert_reference(decoder, temperature)
        assert not holds_caches(decoder)


@pytest.mark.parametrize("names, temperature", [
    ("eagle", 0.0), ("drifting", 1.0), ("suffix", 0.0), ("eagle+twin+suffix", 1.0)])
def test_any_draft_writes_the_reference_text(names, temperature):
    with replicas(3, draft=TINY.mixture(names), lookahead=2) as decoder:
        assert_reference(decoder, temperature)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_writes_the_reference_text_over_replicas(strategy):
    with replicas(2, 2, TINY.eagle(), strategy) as decoder:
        assert_reference(decoder)


@pytest.mark.parametrize("strategy, prompt",
                         [*zip(STRATEGIES, cycle([PROMPT[:1], PROMPT[:3]]))])
def test_a_prompt_that_leaves_together_with_guesses_changes_nothing(strategy, prompt):
    text = TINY.text(prompt, 20, SAMPLERS[1.0])
    with replicas(3, 1, Oracle(prompt + text), strategy) as decoder:
        assert write(decoder, prompt, 20, SAMPLERS[1.0]) == text


@pytest.mark.parametrize("spoil, strategy, copies, stages", [
    (*pair, *counts)
    for pair, counts in zip(product(SPOILS, ["dsi", "continuous", "streaming"]), cycle([(3, 1), (2, 2)]))])
def test_what_is_lost_late_or_reordered_changes_nothing(spoil, strategy, copies, stages):
    draft = TINY.mixture("twin") if stages == 1 else Oracle(PROMPT + text_at(1.0))
    with replicas(copies, stages, draft, strategy, wrap=SPOILS[spoil](), lookahead=2) as decoder:
        assert_reference(decoder)


@pytest.mark.parametrize("strategy", ["dsi", "continuous"])
def test_without_prunes_nothing_changes(strategy):
    with replicas(3, 1, TINY.mixture("twin"), strategy, prunes=False, lookahead=2) as decoder:
        assert_reference(decoder)


def test_requests_follow_one_another_and_may_be_given_up_in_mid_air():
    with replicas(3, draft=TINY.mixture("twin"), lookahead=1) as decoder:
        for left in (0, 1, 3):
            give_up(decoder, Request(PROMPT, SAMPLERS[1.0], SHORT), left)
            assert not holds_caches(decoder)
            assert_reference(decoder)


def test_an_answer_of_one_token_and_an_end_token_among_unverified_guesses():
    with replicas(3, draft=TINY.mixture("twin"), lookahead=2) as decoder:
        assert write(decoder, PROMPT, 1, SAMPLERS[0.0]) == text_at(0.0)[:1]
        text = text_at(1.0)
        end = text[9]
        answer, stream = decoder.stream(Request(PROMPT, SAMPLERS[1.0], SHORT, end=frozenset([end])))
        assert tokens_of(stream) == text[:text.index(end) + 1]
        assert answer.finish_reason == "stop"


# --- how long it takes, in virtual time -------------------------------------------------------------------------------

class Known(HandmadeDraft):
    """A drafter that takes `seconds` for a guess, of which every `wrong`-th in a row is wrong; 0: none is."""

    def __init__(self, clock, seconds, wrong, text):
        self.clock, self.seconds, self.wrong, self.text = clock, seconds, wrong, text

    def grow(self, tree, growth, *worth_drafting):
        yield from ()
        node = max(tree.live, default=tree.tip)
        position = tree.nodes[node].pos + 1
        if position >= tree.max_tokens - 1:  # the last token is the target's
            return False
        self.clock.sleep_until(self.clock.now() + self.seconds)
        place = position - len(PROMPT) + 1
        token = self.text[position - len(PROMPT)]
        if self.wrong and place % self.wrong == 0:
            token = (token + 1) % TINY.config.vocab
        tree.add(node, token, tree.nodes[node].score - 0.1)
        return True


class Watched(Replicas):
    """Replicas that remember how many segments were under way at once, of those that are not given up."""

    most = 0

    def open(self, *request):
        target = super().open(*request)
        send = target.send

        def counted(nodes):
            send(nodes)
            self.most = max(self.most, sum(copy.num_live_segments for copy in target._copies.values()))
        target.send = counted
        return target


PATHS = Paths([TINY.slice(0, 4)], (), TINY.lm_head.weight)


def virtual(seconds, guess, lookahead, servers, wrong):
    """A decoder over replicas in virtual time that verify in `seconds()`, with a drafter that knows the text."""
    clock = VirtualClock()
    work = Work(lambda rows, text: seconds(), layers=64)
    cluster = Cluster(FREE, clock, [[work]] * servers, PATHS, [OFF] * (servers + 1))
    ring = Watched(cluster.links, TINY.lm_head, 1, clock=clock)
    draft = Known(clock, guess, wrong, text_at(1.0, NEW))
    tree = replace(TREE, lookahead=lookahead, chunk=64)
    return Decoder(ring, draft, STRATEGIES["dsi"], tree, PipelineLimits(200))


def takes(new, verification, guess, lookahead, servers, wrong):
    """The seconds of `new` tokens at temperature 1, and the most verifications that were under way at once."""
    decoder = virtual(lambda: verification, guess, lookahead, servers, wrong)
    answer, stream = decoder.stream(Request(PROMPT, SAMPLERS[1.0], new))
    assert tokens_of(stream) == text_at(1.0, NEW)[:new]
    return answer.prefill_seconds + answer.decode_seconds, decoder.ring.most


@pytest.mark.parametrize("lookahead, servers", [(1, 8), (2, 5),
                                                (3, 4), (4, 3), (8, 2), (5, 7)])
def test_with_a_drafter_that_is_always_right_only_the_last_verification_is_waited_for(lookahead, servers):
    seconds, most = takes(NEW, 8.0, 1.0, lookahead, servers, wrong=0)
    assert most <= servers
    assert seconds == (NEW - 1) * 1.0 + 8.0


@pytest.mark.parametrize("lookahead, servers", [(1, 8), (3, 3), (8, 1)])
@pytest.mark.parametrize("new", [1, 2, NEW])
def test_with_a_drafter_that_is_never_right_it_takes_as_long_as_plain_decoding(new, lookahead, servers):
    seconds, most = takes(new, 8.0, 1.0, lookahead, servers, wrong=1)
    assert most <= servers
    assert seconds == new * 8.0


@pytest.mark.parametrize("lookahead, servers", [(1, 9),
                                                (2, 5), (3, 4), (4, 3)])
@pytest.mark.parametrize("wrong", [4, 5, 8])
def test_a_run_of_right_guesses_takes_its_drafting_and_one_verification(wrong, lookahead, servers):
    """In the first run the drafter works while the prompt is read; in the last one it stops before the last token."""
    runs = NEW // wrong
    windows = -(-(wrong - 1) // lookahead)
    whole = windows * lookahead * 1.0 + 8.0
    last = (wrong - 1) * 1.0 + 8.0
    seconds, most = takes(runs * wrong, 8.0, 1.0, lookahead, servers, wrong)
    assert most <= servers
    assert seconds == 16.0 + (runs - 2) * whole + last


@pytest.mark.parametrize("lookahead", [1, 2, 3, 6])
@pytest.mark.parametrize("servers", [1, 2, 5])
def test_verifications_that_end_in_any_order_change_nothing_and_none_is_under_way_without_a_server(lookahead, servers):
    chance = random.Random(10 * lookahead + servers)
    wrong, temperature = [(0, 0.7), (0, 1.0), (1, 1.0), (3, 1.0), (3, 0.0)][(lookahead + servers) % 5]
    decoder = virtual(lambda: chance.choice([0.5, 3.0, 8.0, 21.0]), 1.0, lookahead, servers, wrong)
    assert write(decoder, PROMPT, NEW, SAMPLERS[temperature]) == text_at(temperature, NEW)
    assert decoder.ring.most <= servers


@pytest.mark.parametrize("lookahead, servers", [(1, 2), (2, 5), (3, 3)])
def test_a_row_that_several_replicas_compute_goes_through_the_lm_head_once(lookahead, servers):
    """Every replica reads the prompt, of which each token's log-probability is wanted."""
    rows = Counter()

    def watched(x_TD):
        rows.update(map(tuple, x_TD.tolist()))
        return TINY.lm_head(x_TD)

    decoder = virtual(lambda: 8.0, 1.0, lookahead, servers, wrong=3)
    decoder.ring.lm_head = watched
    answer = decoder.complete(Request(PROMPT, SAMPLERS[1.0], NEW, likeliest=0, echo=True))

    assert answer.token_ids == text_at(1.0, NEW)
    assert len(rows) >= len(PROMPT) + NEW - 1
    assert max(rows.values()) == 1


def test_tokens_follow_the_joint_law_of_the_model():
    """Two tokens, each of the seven likeliest, over many seeds: guessed rightly and wrongly, judged by two replicas."""
    chance, decoded = random.Random(5), Counter()
    decoder = virtual(lambda: chance.choice([0.5, 3.0, 8.0]), 1.0, 1, 2, wrong=0)
    for seed in range(RUNS):
        decoded[tuple(write(decoder, PROMPT, 3, Sampler(1.0, top_k=7, seed=seed))[:2])] += 1
    first = law_of(PROMPT)
    law = {(a, b): first[a] * then[b] for a in first
           for then in [law_of([*PROMPT, a])] for b in then}
    assert len(law) == 49 and decoded.keys() <= law.keys()
    number = {pair: i for i, pair in enumerate(law)}
    assert p_value([number[pair] for pair in decoded.elements()], list(law.values())) > ALPHA


def law_of(text):
    """The chances of the seven likeliest tokens behind a text."""
    law = warp(TINY.logits(text)[-1:], 1.0, top_k=7, top_p=1.0).softmax(-1)[0]
    return {token: float(law[token]) for token in law.nonzero().flatten().tolist()}
