"""An answer ends where it should, whatever the strategy had settled beyond."""
from dataclasses import replace
from types import SimpleNamespace

import pytest

from config.failure import PeerLost
from model.sample import Sampler
from pipeline.answers import Request
from pipeline.decode import TokenStream
from pipeline.requests import RequestTarget
from pipeline.strategies import STRATEGIES, autoregressive
from tests.checkpoints import refused
from tests.tiny import TINY, TREE, Oracle, holds_caches, pipeline, tokens_of

PROMPT = [6, 21, 44, 3]
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


def text():
    return TINY.text(PROMPT, 60, Sampler(1.0, seed=2))


def written(strategy, stages=2, **wishes):
    """An answer and the sizes of the pieces in which it came, with guesses that settle many tokens at once."""
    with pipeline(TINY, stages, strategy, Oracle(PROMPT + text())) as decoder:
        answer, stream = decoder.stream(Request(PROMPT, Sampler(1.0, seed=2), **wishes))
        pieces = list(stream)
        assert not holds_caches(decoder)
    assert tokens_of(pieces) == answer.token_ids
    return answer, [*map(len, pieces)]


def answers(strategy, **wishes):
    return written(strategy, **wishes)[0]


@every_strategy
def test_nothing_comes_after_an_end_token(strategy):
    end = text()[25]
    got = answers(strategy, max_new_tokens=60, end=frozenset([end])).token_ids
    assert got == text()[:text().index(end) + 1]


@every_strategy
def test_nothing_comes_after_the_token_that_completes_a_stop(strategy):
    seen = []

    def stop(token):
        seen.append(token)
        return len(seen) == 17

    assert answers(strategy, max_new_tokens=60, stop=stop).token_ids == text()[:17] == seen


@pytest.mark.parametrize("new", [1, 2, 31])
@every_strategy
def test_there_are_never_more_tokens_than_wished(strategy, new):
    assert answers(strategy, max_new_tokens=new).token_ids == text()[:new]


@every_strategy
def test_the_context_ends_an_answer_too(strategy):
    long = TINY.text(PROMPT, 1, Sampler()) * 193  # with the prompt three tokens short of the context of 200
    with pipeline(TINY, 2, strategy, TINY.eagle()) as decoder:
        answer, stream = decoder.stream(Request(PROMPT + long, max_new_tokens=60))
        assert len(tokens_of(stream)) == 3
        assert answer.prompt_tokens + answer.new_tokens == decoder.max_length


def test_a_prompt_that_fills_the_context_is_refused():
    with pipeline(TINY, 1, "naive", TINY.eagle()) as decoder:
        with refused("shorten the prompt or raise max_length"):
            decoder.stream(Request([1] * 200))


def test_accepted_length_counts_the_targets_own_token_and_not_the_prefill():
    plain = answers("autoregressive", max_new_tokens=20)
    assert (plain.misses, plain.tokens_per_miss, plain.mean_accepted_length) == (19, 1.0, 1.0)
    guessed = answers("serial", max_new_tokens=20)
    assert guessed.tokens_per_miss == 19 / guessed.misses > 2
    assert guessed.mean_accepted_length == 16 / 5, "the oracle guesses three tokens behind the prompt"
    assert plain.accepted_lengths == [1] * 19 and plain.acceptance_by_position == []


@pytest.mark.parametrize("strategy", ["serial", "naive"])
def test_accepted_lengths_are_those_of_each_tree_behind_the_prefill(strategy):
    answer, (_, *pieces) = written(strategy, max_new_tokens=20)
    assert answer.accepted_lengths == pieces and len(pieces) == answer.misses
    rates = answer.acceptance_by_position
    assert rates == sorted(rates, reverse=True)
    assert 1 + sum(rates) == pytest.approx(sum(pieces) / len(pieces))


@pytest.mark.parametrize("strategy", ["pruned", "continuous", "pipedec"])
def test_a_miss_counts_though_the_answer_ends_behind_it(strategy):
    """The oracle errs at every seventh position, so the target begins again at these, and nowhere else."""
    begun = [position for position in range(len(PROMPT), len(PROMPT) + 14) if position % 7 == 0]
    got = answers(strategy, max_new_tokens=14)
    # the first token of all was not guessed either, and an answer may come before the guess for its place has left
    assert len(begun) <= got.misses <= len(got.token_ids) // 2


@pytest.mark.parametrize("strategy", ["continuous", "streaming", "pipedec", "pruned", "pipeinfer"])
def test_each_segment_that_comes_back_with_rows_is_a_verification(strategy, monkeypatch):
    """One that settles nothing counts, too, so accepted lengths of methods that never stop compare with others'."""
    judged, judge = [], RequestTarget._judge

    def counted(target):
        judged.append(target)
        judge(target)

    monkeypatch.setattr(RequestTarget, "_judge", counted)
    answer, (first, *_) = written(strategy, 3, max_new_tokens=20)
    assert len(answer.accepted_lengths) == len(judged) - 1  # without the prefill's
    assert sum(answer.accepted_lengths) == 20 - first
    assert answer.mean_accepted_length == (20 - first) / (len(judged) - 1)


def test_parts_of_a_prompt_are_no_verifications():
    with pipeline(TINY, 2, "continuous", TINY.eagle(), replace(TREE, chunk=4)) as decoder:
        answer = decoder.complete(Request(PROMPT * 3, max_new_tokens=2))
    assert len(answer.accepted_lengths) <= 3 and sum(answer.accepted_lengths) <= 1


def test_the_prefill_ends_with_the_first_token_and_decoding_with_the_last():
    """The clock moves by 3 s until the first token has come, and by half a second for each one after it."""
    moves = iter([3.0, *[0.5] * 19])
    clock = SimpleNamespace(time=100.0, now=lambda: clock.time)

    def timed(*given):
        for settled in autoregressive(*given):
            clock.time += next(moves) if isinstance(settled, list) else 0.0
            yield settled

    with pipeline(TINY, 2, "autoregressive") as decoder:
        decoder.ring.clock, decoder.strategy = clock, timed
        answer, stream = decoder.stream(Request(PROMPT, max_new_tokens=20))
        assert len(list(stream)) == 20
    assert (answer.prefill_seconds, answer.decode_seconds) == (3.0, 9.5)
    assert answer.tokens_per_second == pytest.approx(20 / 12.5)


def test_a_request_whose_pipeline_is_lost_is_taken_back_once():
    taken = []

    def lost(task):
        taken.append(task)
        raise PeerLost("rank 1 was lost")

    decoder = SimpleNamespace(add=lambda task: None, remove=lost, turn=lambda: lost("turn"))
    settled = TokenStream(SimpleNamespace(tree=None, unread=[], ended=False), decoder, waits=True)
    with pytest.raises(PeerLost):
        next(settled)
    settled.close()
    assert len(taken) == 2, "the turn, and taking it back"
