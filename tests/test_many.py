"""Requests that come, go and share what they have read write what each writes alone, whatever becomes of prunes."""
from dataclasses import replace
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config.trees import RoundCosts
from model.sample import Sampler
from pipeline import decode as prefixes
from pipeline import gates
from pipeline.answers import Request
from tests.test_prunes import delaying, losing
from tests.tiny import DEEP, SPECULATIVE, TINY, TREE, pipeline

TEXT = [5, 17, 40, 3, 28, 11, 9, 9, 21, 4, 7, 1, 1, 30, 52, 18, 2, 6]
BEGINNINGS = [[], TEXT[:6], TEXT[:10]]
SPOILED = {"as sent": lambda link: link, "all lost": losing(1.0, seed=8),
           "some lost": losing(0.5, seed=8),
           "late": delaying(6, seed=9)}
DRAFTS = ["eagle", "twin+suffix", "drifting+suffix", "suffix"]


@lru_cache(None)
def alone(prompt, new, temperature, seed):
    return TINY.text(list(prompt), new, Sampler(temperature, seed=seed))


@st.composite
def asked(draw):
    """Requests: a prompt, tokens, temperature and seed, priority, and after how many pieces the answer is given up.

    A prompt has its own ending behind a common beginning, or behind an earlier prompt, perhaps with the text after it.
    """
    requests = []
    for _ in range(draw(st.integers(2, 7))):
        earlier = draw(st.none() | st.sampled_from(requests)) if requests else None
        if earlier is None:
            beginning = draw(st.sampled_from(BEGINNINGS))
        else:
            prompt, new, temperature, seed, _, _ = earlier
            beginning = [*prompt, *alone(prompt, new, temperature, seed)][:draw(st.sampled_from([len(prompt), 99]))]
        requests.append(draw(one(tuple(beginning))))
    return requests


@st.composite
def one(draw, beginning):
    least = 0 if beginning else 1
    ending = draw(st.lists(st.integers(0, 52), min_size=least, max_size=7))
    new = draw(st.integers(1, 14))
    chance = draw(st.sampled_from([(0.0, 0), (1.0, 3), (0.7, 4)]))
    priority = draw(st.sampled_from([0.5, 1.0, 4.0]))
    given_up = draw(st.none() | st.integers(0, 3))
    return (*beginning, *ending), new, *chance, priority, given_up


TWO = [((5, 17, 40, 3, 28), 12, 0.0, 0, 1.0, None), ((5, 17, 40, 9, 50, 2), 12, 1.0, 3, 1.0, None),
       ((31, 7, 7, 19), 8, 0.7, 4, 1.0, 2)]


@pytest.mark.parametrize("model, names, strategy", [
    (DEEP, "block", "streaming"), (DEEP, "block", "continuous"),
    (TINY, "other+suffix", "continuous")])
def test_drafts_that_guess_several_levels_at_once_draft_for_several_requests(model, names, strategy):
    with pipeline(model, 2, strategy, model.mixture(names)) as decoder:
        for number, (answer, given_up) in run(decoder, TWO, 3).items():
            prompt, new, temperature, seed, *_ = TWO[number]
            text = model.text(list(prompt), new, Sampler(temperature, seed=seed))
            whole = len(answer.token_ids) if given_up else new
            assert answer.token_ids == text[:whole]


def run(decoder, requests, together):
    """Let requests come one after the other, each once `together` are under way, and read them by turns; their texts.
    """
    waiting, reading, texts = list(enumerate(requests)), {}, {}
    while waiting or reading:
        if waiting and len(reading) < together:
            number, (prompt, new, temperature, seed, priority, _) = waiting.pop(0)
            request = Request(prompt, Sampler(temperature, seed=seed), new, priority=priority)
            reading[number] = [*decoder.submit(request), 0]
            continue
        for number, (answer, stream, pieces) in list(reading.items()):
            given_up = requests[number][5]
            if given_up == pieces:
                stream.close()
            elif next(stream, None) is not None:
                reading[number][2] += 1
                continue
            del reading[number]
            texts[number] = answer, given_up == pieces
    return texts


@pytest.mark.parametrize("spoil", SPOILED)
@settings(max_examples=8)
@given(data=st.data(), reuses=st.booleans())
def test_requests_that_come_and_go_write_what_each_writes_alone(spoil, data, reuses):
    strategy = data.draw(st.sampled_from([*reversed(SPECULATIVE), "autoregressive"]))
    names = data.draw(st.sampled_from(DRAFTS))
    requests = data.draw(asked())
    places = data.draw(st.integers(1, 4))
    together = data.draw(st.integers(1, 5))
    with pytest.MonkeyPatch.context() as patch, pipeline(TINY,
                                                         data.draw(st.integers(1, 4)), strategy,
                                                         TINY.mixture(names), wrap=SPOILED[spoil]) as decoder:
        patch.setattr(prefixes, "MIN_SHARED_TOKENS", 1)
        decoder.max_running, decoder.reuses_texts = places, reuses
        for number, (answer, given_up) in run(decoder, requests, together).items():
            prompt, new, temperature, seed, _, _ = requests[number]
            text = alone(prompt, new, temperature, seed)
            assert answer.token_ids == (text[:answer.new_tokens] if given_up else text)
        held = len(decoder._prefixes)
        assert all(not stage.caches and len(stage.ended_caches) == held for stage in decoder.stages)
        assert held <= places and (reuses or not held)


def test_of_texts_that_are_kept_the_one_used_least_recently_makes_room():
    first, second, third = ([5 + number, *range(3, 30)] for number in range(3))
    with pipeline(TINY, 3, "streaming", TINY.mixture("suffix")) as decoder:
        decoder.max_running, decoder.reuses_texts = 2, True

        def reused(text):
            answer = decoder.complete(Request(text, Sampler(), 4))
            assert answer.token_ids == alone(tuple(text), 4, 0.0, 0)
            return answer.reused_tokens

        assert [reused(text) for text in (first, second)] == [0, 0]
        assert reused(first) > 16 and reused(third) == 0, "the second makes room"
        assert reused(first) > 16 and reused(second) == 0
        decoder.forget()
        assert reused(second) == 0


@pytest.mark.parametrize("names", ["eagle", "eagle3+suffix", "twin"])
def test_a_draft_that_rested_reads_what_it_has_left_out_before_its_text_is_kept(names, monkeypatch):
    monkeypatch.setattr(gates, "MIN_RATE_TOKENS", 1000)  # it rests for as long as the answers last
    text = TEXT
    with pipeline(TINY, 3, "streaming", TINY.mixture(names), replace(TREE, costs=RoundCosts(((1, 1e-12),)))) as decoder:
        decoder.reuses_texts = True
        for turn in range(3):
            answer = decoder.complete(Request(text, Sampler(), 40))
            assert answer.token_ids == alone(tuple(text), 40, 0.0, 0) and answer.plain_tokens > 20
            assert answer.reused_tokens == 0 if turn == 0 else answer.reused_tokens >= len(text) - 5
            text = [*text, *answer.token_ids, turn, 33]


@pytest.mark.parametrize("spoil", SPOILED)
@pytest.mark.parametrize("strategy, names", [("streaming", "eagle+suffix"), ("serial", "twin"),
                                             ("autoregressive", "suffix")])
def test_the_next_turn_of_a_conversation_begins_behind_all_that_was_said(strategy, names, spoil):
    with pipeline(TINY, 3, strategy, TINY.mixture(names), wrap=SPOILED[spoil]) as decoder:
        decoder.max_running, decoder.reuses_texts = 2, True
        text = [*TEXT]
        for turn in range(3):
            text += [turn, 33]
            said = len(text)
            answer = decoder.complete(Request(text, Sampler(0.7, seed=turn), 12))
            assert answer.token_ids == alone(tuple(text), 12, 0.7, turn)
            # the last token of an answer was not sent, and before it comes what the draft has not read
            assert answer.reused_tokens == 0 if turn == 0 else said - 8 <= answer.reused_tokens <= said - 3
            text += answer.token_ids
