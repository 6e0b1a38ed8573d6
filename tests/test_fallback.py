"""A request that is alone falls back to plain decoding while that is quicker; what it loses meanwhile is bounded."""
from dataclasses import asdict, replace

import pytest

from config.profiles import PROFILES
from config.trees import RoundCosts
from eval import bench
from launch.ask import table
from launch.pipeline import Pipeline
from model.drafts.mixture import Mixture
from model.drafts.suffix import Suffix
from model.sample import Sampler
from pipeline import gates
from pipeline.answers import Answer, Request
from pipeline.gates import MAX_REST_TOKENS, MAX_TOKENS_BEHIND, MIN_RATE_TOKENS, REST_TOKENS, Fallback
from tests.json_files import save_json
from tests.tiny import TINY, TREE, Oracle, pipeline, write

PROMPT = [3, 1, 4, 1, 5]


def opened(plain=1.0):
    fallback = Fallback()
    fallback.begin(RoundCosts(((1, plain),)) if plain else RoundCosts(), 1)
    fallback.add_settled(1, 1, 0.0)
    return fallback


def settle(fallback, count, guessing, plain=1.0, start=0.0):
    """Settle so many tokens, each in the time that its way takes; whether each was guessed, and when the last came."""
    ways, now = [], start
    for _ in range(count):
        ways.append(fallback.guesses)
        now += guessing if fallback.guesses else plain
        fallback.add_settled(1, 1, now)
    return ways, now


@pytest.mark.parametrize("guessing", [1.01, 1.5, 10.0])
def test_what_guessing_loses_is_bounded_however_slow_it_is(guessing):
    ways, seconds = settle(opened(), 1000, guessing)
    trials = sum(now and not before for before, now in zip([False, *ways], ways))
    assert trials <= 5
    assert seconds <= 1000 + trials * (MAX_TOKENS_BEHIND + guessing)


def test_guessing_that_is_quicker_goes_on_through_some_misses():
    fallback, now = opened(), 0.0
    for _ in range(100):
        for tokens in (1, 1, 1, 1, 4, 6):
            now += 1.2
            fallback.add_settled(tokens, 1, now)
            assert fallback.guesses


def test_each_rest_is_twice_as_long_until_guessing_has_gone_well_for_a_while():
    fallback = opened()
    ways, now = settle(fallback, 3 * REST_TOKENS, 2.0)
    assert ways.count(True) == 6 and fallback.guesses
    _, now = settle(fallback, 2 * REST_TOKENS, 0.5, start=now)
    ways, _ = settle(fallback, REST_TOKENS, 2.0, start=now)
    assert ways.count(True) == 3 and fallback.guesses


def test_a_text_that_cannot_be_guessed_however_long_is_followed_by_a_bounded_rest():
    """Rests of 128, 256, ... tokens, each counted from where guessing fell behind."""
    fallback = opened()
    ways, now = settle(fallback, 50_000, 2.0)
    trials = [index for index, guesses in enumerate(ways) if guesses and not ways[index - 1]]
    assert trials[:4] == [0, 128, 128 + 256, 128 + 256 + 512]
    assert {later - earlier for earlier, later in zip(trials[7:], trials[8:])} == {MAX_REST_TOKENS}

    ways, _ = settle(fallback, MAX_REST_TOKENS + 1000, 0.5, start=now)
    assert ways.count(False) <= MAX_REST_TOKENS and all(ways[-1000:])


def test_guessing_that_is_hardly_slower_hardly_rests():
    ways, _ = settle(opened(), REST_TOKENS, 1.02)
    assert 0.7 * REST_TOKENS < ways.count(True) < REST_TOKENS


def test_a_machine_on_which_everything_gets_slower_guesses_again_at_once():
    fallback = opened()
    _, now = settle(fallback, 40, 0.8)
    ways, now = settle(fallback, 100, 1.6, plain=4.0, start=now)
    assert ways.count(False) == MIN_RATE_TOKENS
    assert fallback.guesses


def rounds_of(costs, num_running, seconds_of_rounds, count):
    """Settle tokens in rounds, as many tokens of each request as the first of a pair, or one plain round's.

    Whether each round was guessed, and the tokens that trials have cost each request.
    """
    fallback = Fallback()
    fallback.begin(costs, num_running)
    for _ in range(num_running):
        fallback.add_settled(1, num_running, 0.0)
    ways, now, cost = [], 0.0, 0.0
    for _ in range(count):
        ways.append(fallback.guesses)
        tokens, seconds = seconds_of_rounds if fallback.guesses else (1, costs.round_seconds(num_running))
        now += seconds
        cost += sum(fallback.add_settled(tokens, num_running, now) for _ in range(num_running))
    return ways, cost


@pytest.mark.parametrize("row, paying", [(0.125, {1, 2, 4, 8}), (0.25, {1, 2}), (0.5, {1, 2})])
@pytest.mark.parametrize("num_running", [1, 2, 4, 8])
def test_requests_at_once_guess_exactly_where_their_rows_leave_time_for_it(num_running, row, paying):
    """Four rows are free. Two tokens of each take a level, and twice the rows of a plain round.

    With rows of 0.125 s, two tokens of each of four requests take 0.4 + 1 + 4 * 0.125 = 1.9 s instead of 2.
    """
    costs = RoundCosts(tuple((rows, 1 + row * max(0, rows - 4)) for rows in (1, 2, 4, 8, 16, 32, 64)), 0.4)
    guessing = 2, 0.4 + costs.round_seconds(2 * num_running)
    assert (guessing[1] < 2 * costs.round_seconds(num_running)) == (num_running in paying)

    ways, cost = rounds_of(costs, num_running, guessing, 400)
    assert cost == 0
    assert all(ways[-200:]) if num_running in paying else not any(ways)


@pytest.mark.parametrize("num_running", [1, 2, 4, 8])
def test_what_a_trial_costs_each_request_does_not_depend_on_their_number(num_running):
    """A round of guesses takes two plain rounds: the third one is too much, and three tokens of each are lost."""
    costs = RoundCosts(((num_running, float(num_running)), (64, float(num_running))))  # guesses add no time
    ways, cost = rounds_of(costs, num_running, (1, 2.0 * num_running), REST_TOKENS)
    assert ways.count(True) == 3 and cost == pytest.approx(3.0)


def test_seconds_of_rows_are_linear_between_measured_numbers_and_keep_their_last_slope():
    costs = RoundCosts(((1, 1.0), (4, 2.5), (16, 8.5)))
    assert [costs.round_seconds(rows) for rows in (1, 2, 4, 10, 16, 32)] == [1.0, 1.5, 2.5, 5.5, 8.5, 16.5]
    assert RoundCosts(((1, 1.0),)).round_seconds(32) == 1.0


def test_a_level_waits_if_it_would_bring_a_trial_further_behind_than_it_may():
    """After 12.5 seconds a level ends three seconds after the last token, of which plain decoding takes one."""
    fallback = Fallback()
    fallback.begin(RoundCosts(((1, 1.0), (64, 1.0)), 0.5), 1)
    assert not fallback.is_late(100.0)
    fallback.add_settled(1, 1, 10.0)
    assert [fallback.is_late(now) for now in (12.25, 12.5, 12.75)] == [False, False, True]


def test_a_trial_ends_once_what_was_accepted_cannot_pay():
    """A level takes 0.3 of a plain round; after four misses it brings at most 2 / (4 + 2) tokens, after five 2 / 7."""
    fallback = Fallback()
    fallback.begin(RoundCosts(((1, 1.0), (64, 1.0)), 0.3), 1)
    fallback.add_settled(1, 1, 0.0)
    ways = []
    for misses in range(1, 6):
        fallback.add_run(0)
        fallback.add_settled(1, 1, 1.2 * misses)
        ways.append(fallback.guesses)
    assert ways == [True, True, True, True, False]


def test_the_rate_of_plain_decoding_is_measured_by_plain_rounds_once_there_are_any():
    fallback = opened()
    assert fallback._plain_rates[1].mean == 0
    settle(fallback, 40, 2.0)
    assert not fallback.guesses and fallback._plain_rates[1].mean == pytest.approx(1.0)


def test_nothing_is_weighed_before_plain_decoding_was_measured_nor_across_requests():
    ways, _ = settle(opened(plain=0.0), 100, 50.0)
    assert all(ways)
    fallback = opened()
    for request in range(10):
        fallback.begin(RoundCosts(((1, 1.0),)), 1)
        fallback.add_settled(1, 1, 1000.0 * request)
    assert fallback.guesses


@pytest.mark.parametrize("strategy", ["continuous", "streaming"])
@pytest.mark.parametrize("plain", [1e-12, 1e12])
def test_the_text_is_the_same_with_guesses_or_without(strategy, plain, monkeypatch):
    monkeypatch.setattr(gates, "MIN_RATE_TOKENS", 1000)  # so that what this machine measures does not end the rest
    text = TINY.text(PROMPT, 60, Sampler())
    with pipeline(TINY, 3, strategy, Oracle([*PROMPT, *text]),
                  replace(TREE, costs=RoundCosts(((1, plain),)))) as decoder:
        assert write(decoder, PROMPT, 60) == text
        assert decoder.ring.pacing.fallback.guesses == (plain > 1)


@pytest.mark.parametrize("strategy", ["continuous", "streaming"])
def test_a_rest_asks_no_network_and_copies_behind_a_long_match(strategy, monkeypatch):
    monkeypatch.setattr(gates, "MIN_RATE_TOKENS", 1000)
    text = TINY.text(PROMPT, 60, Sampler())
    network, asked = TINY.twin(), []
    expand = network.expand
    draft = Mixture([network], Suffix([PROMPT + text], keep=list))
    with pipeline(TINY, 3, strategy, draft, replace(TREE, costs=RoundCosts(((1, 1e-12),)))) as decoder:
        fallback = decoder.ring.pacing.fallback
        monkeypatch.setattr(network, "expand", lambda *of: asked.append(fallback.guesses) or expand(*of))
        answer = decoder.complete(Request(PROMPT, Sampler(), 60))

    assert answer.token_ids == text
    assert asked and all(asked)
    assert answer.sources["suffix"] > 30


@pytest.mark.parametrize("row", [25.0, 100.0])
def test_where_rows_cost_much_four_requests_are_about_as_fast_as_by_plain_decoding(row, tmp_path):
    save_json(tmp_path / "site.json", asdict(replace(PROFILES["lan-1g"], row=row, free=0)))
    seconds, questions = {}, ["What does a baker do?", "Name a bird.", "Why is the sea salty?", "Count to ten."]
    with Pipeline.open("toy", time="virtual", profile=str(tmp_path / "site.json"), draft="suffix", stages=1,
                       max_new_tokens=100, ignore_eos=True, temperature=1.0, max_requests=4) as pipeline:
        for name, decoder in bench.decoders_of(pipeline, ("ar", "continuous")).items():
            begun_at = pipeline.ring.clock.now()
            for answer, _ in [decoder.submit(bench.request_for(pipeline, question)) for question in questions]:
                while not answer.finish_reason:
                    decoder.turn()
            seconds[name] = pipeline.ring.clock.now() - begun_at
    assert seconds["continuous"] <= 1.05 * seconds["ar"]  # 1.8 if only single requests rest, 1.2 if each tries


def test_where_rows_cost_much_every_method_is_about_as_fast_as_plain_decoding(tmp_path):
    site = replace(PROFILES["lan-1g"], row=50.0, free=0)
    save_json(tmp_path / "site.json", asdict(site))
    speeds, plain_rates = {}, {}
    with Pipeline.open("toy", time="virtual", profile=str(tmp_path / "site.json"), draft="suffix", max_new_tokens=200,
                       ignore_eos=True, temperature=1.0) as pipeline:
        for name, decoder in bench.decoders_of(pipeline, ("ar", "continuous", "streaming")).items():
            answer = decoder.complete(bench.request_for(pipeline, "What does a baker do?"))
            speeds[name] = answer.tokens_per_second
            plain_rates[name] = answer.plain_rate or answer.decode_rate
            assert (answer.plain_rate > 0) == (name != "ar")
            shown = f"Guessing rested for {answer.plain_tokens} of the {answer.new_tokens} tokens" in table([answer])
            assert shown == (answer.plain_tokens > 100) == (name != "ar")
    assert min(speeds.values()) >= 0.95 * speeds["ar"]
    assert list(plain_rates.values()) == pytest.approx([plain_rates["ar"]] * 3, rel=0.15)  # by each answer's own rounds


@pytest.mark.parametrize("lengths, row", [([0, 2, 0, 1], "mean accepted length  1.50 "), ([1, 1], "length  1.00 ")])
def test_the_mean_accepted_length_counts_verifications_that_settled_a_token(lengths, row):
    assert row in table([Answer(prompt_tokens=1, token_ids=[5] * 4, accepted_lengths=lengths)])


def test_without_a_verification_there_is_no_mean_accepted_length():
    assert "mean accepted length" not in table([Answer(prompt_tokens=1, token_ids=[5])])
