"""The guesses of several sources become one distribution, and accurate sources gain weight."""
import math
import random

import pytest

from model.drafts.mixture import (
    PRIOR_SHARPNESS,
    WEIGHTS,
    WINDOW,
    Blend,
    Outcomes,
    Sharpness,
    confidence,
    starting_weights,
)

NEURAL = {"model": [(1, .6), (2, .3), (3, .1)]}
BOTH = {**NEURAL, "suffix": [(2, .9), (4, .1)]}
MANY = 6 * WINDOW


def draws(weights, count, seed=0):
    """Yield guesses of sources with random distributions, and a token of their mixture."""
    rng = random.Random(seed)
    for _ in range(count):
        given = {}
        for source in weights:
            parts = [rng.random() ** 3 for _ in range(6)]
            given[source] = [(token, part / sum(parts)) for token, part in enumerate(parts)]
        source, = rng.choices(list(weights), list(weights.values()))
        tokens, chances = zip(*given[source])
        token, = rng.choices(tokens, chances)
        yield given, token


def taught(lessons, length=0, blend=None):
    blend = blend or Blend()
    for given, token in lessons:
        blend.learn(given, length, token)
    return blend


@pytest.mark.parametrize("length, weight", [(1, .03),
                                                (2, .15), (7, .6), (8, .8), (100, .8)])
def test_a_suffix_begins_with_a_weight_by_the_length_of_its_match(length, weight):
    mixed = dict(Blend().mix(BOTH, length))
    assert mixed == pytest.approx({1: (1 - weight) * .6,
                                   2: (1 - weight) * .3 + weight * .9,
                                   3: (1 - weight) * .1, 4: weight * .1})


def test_other_sources_begin_with_equal_weights():
    assert starting_weights(["eagle", "model"], 0) == {"eagle": .5, "model": .5}
    assert starting_weights(["eagle", "model", "suffix"], 5) == {"eagle": .3, "model": .3, "suffix": .4}
    assert starting_weights(["suffix"], 3) == {"suffix": 1}


@pytest.mark.parametrize("given",
                         [NEURAL, {**NEURAL, "suffix": []}], ids=["alone", "beside an empty one"])
def test_what_one_source_guesses_is_taken_as_it_is(given):
    assert Blend().mix(given, 0) == NEURAL["model"]


def test_guesses_are_ordered_by_probability_and_then_by_token_whatever_the_order_of_the_sources():
    tied = {"a": [(5, .4), (3, .2)],
            "b": [(3, .2), (4, .4)]}
    assert [token for token, _ in Blend().mix(tied, 0)] == [3, 4, 5]
    assert Blend().mix(dict(reversed(list(tied.items()))), 0) == Blend().mix(tied, 0)


@pytest.mark.parametrize("true", [{"eagle": .2, "model": .8},
                                  {"eagle": .5, "model": .5},
                                  {"eagle": .1, "model": .3, "suffix": .6}], ids=["two", "halves", "three"])
def test_the_weights_of_a_mixture_are_found_again(true):
    found = taught(draws(true, MANY), length=4).weights(list(true), 4)
    assert sum(found.values()) == pytest.approx(1)
    assert found == pytest.approx(true, abs=.1)


def test_sources_and_lengths_of_match_are_learnt_apart():
    blend = taught([(BOTH, 4)] * WINDOW, length=3)
    assert blend.weights(["model", "suffix"], 3)["suffix"] > .9
    for length in (2, 4):
        assert blend.weights(["model", "suffix"], length) == starting_weights(["model", "suffix"], length)
    assert blend.weights(["eagle", "suffix"], 3) == starting_weights(["eagle", "suffix"], 3)


def test_a_source_that_is_always_wrong_loses_its_weight_and_can_come_back():
    def weight():
        return blend.weights(["eagle", "model"], 0)["eagle"]

    wrong, right = ({"eagle": [(token, .9)],
                     "model": [(1, .5), (2, .5)]}
                    for token in (3, 1))
    blend = taught([(wrong, 1)] * MANY)
    assert 0 < weight() < .05
    taught([(right, 1)] * 3 * MANY, blend=blend)
    assert weight() > .9


@pytest.mark.parametrize("given", [
    {"eagle": [(1, 0.0)], "suffix": [(2, 0.0)]},
    {"eagle": [], "suffix": []}, {},
    {"eagle": [(1, 1.0)], "suffix": [(2, 1.0)]},
], ids=["all give 0", "empty", "no source", "all are sure"])
@pytest.mark.parametrize("token", [1, 9])
def test_there_are_probabilities_whatever_was_given(given, token):
    blend = taught([(given, token)] * 3 * WINDOW, length=8)
    for length in (8, 1):
        assert all(0 <= probability <= 1 for _, probability in blend.mix(given, length))
        assert sum(dict(blend.mix(given, length)).values()) <= 1 + 1e-9
        sources = ["eagle", "suffix"]
        assert sum(blend.weights(sources, length).values()) == pytest.approx(1)


def test_a_token_that_nobody_guessed_changes_no_weight():
    blend = taught([(BOTH, 9)] * WINDOW, length=4)
    assert blend.weights(["model", "suffix"], 4) == pytest.approx({"model": 1 - WEIGHTS[3], "suffix": WEIGHTS[3]})


# --- sharpness --------------------------------------------------------------------------------------------------------

def outcomes(logprobs, noise=None):
    """Return outcomes with these log-probabilities, of tokens 0, 1, ... and any other."""
    return Outcomes(range(len(logprobs) - 1), logprobs, noise or [0.0] * len(logprobs))


def hedged(sharpness, noise_scale, count, seed):
    """Yield outcomes of a draft whose target is this much sharper, with noise of this scale, and the target's token."""
    rng = random.Random(seed)
    for _ in range(count):
        shares = [rng.random() ** 3 + .001 for _ in range(5)]
        logprobs = [math.log(share / sum(shares)) for share in shares]
        noise = [noise_scale * -math.log(-math.log(rng.random())) for _ in shares]
        scores = [sharpness * logprob + gumbel for logprob, gumbel in zip(logprobs, noise)]
        weights = [math.exp(score) for score in scores]
        token, = rng.choices([0, 1, 2, 3, 9], weights)
        yield outcomes(logprobs, noise), token


@pytest.mark.parametrize("noise_scale", [0, 1], ids=["T=0", "noise"])
@pytest.mark.parametrize("true", [.5, 1, 2])
def test_how_much_sharper_the_target_is_gets_learnt(true, noise_scale):
    sharpness = Sharpness()
    for lesson in hedged(true, noise_scale, MANY, seed=0):
        sharpness.learn(*lesson)
    assert sharpness.value == pytest.approx(true, abs=.35)


def test_a_sharpness_begins_with_its_prior_and_keeps_the_order_of_guesses():
    sharpness, hedged_outcomes = Sharpness(), outcomes([math.log(share) for share in (.6, .3, .1)])
    assert sharpness.value == PRIOR_SHARPNESS
    for _ in range(MANY):
        sharpness.learn(hedged_outcomes, 1)
    first, second, _ = hedged_outcomes.probabilities(sharpness.value)
    assert .3 < second < first < .6


def test_probabilities_are_powers_times_noise():
    logprobs = [math.log(share) for share in (.6, .3, .1)]
    assert outcomes(logprobs).probabilities(1) == pytest.approx([.6, .3, .1])
    assert outcomes(logprobs).probabilities(2) == pytest.approx([.36 / .46, .09 / .46, .01 / .46])
    noisy = outcomes(logprobs, [0, math.log(4), 0])
    assert noisy.probabilities(1) == pytest.approx([.6 / 1.9, 1.2 / 1.9, .1 / 1.9])


def test_a_sharpness_returns_to_its_prior_where_nothing_is_learnt():
    sharpness, alike = Sharpness(), outcomes([math.log(.5)] * 2)
    sharpness.value = 3.0
    for _ in range(MANY):
        sharpness.learn(alike, 0)
    assert sharpness.value == pytest.approx(PRIOR_SHARPNESS, abs=.01)


def test_a_token_that_nobody_guessed_makes_the_draft_less_sharp():
    sharpness = Sharpness()
    for _ in range(WINDOW):
        sharpness.learn(outcomes([math.log(share) for share in (.9, .05, .05)]), 7)
    assert sharpness.value < .5


# --- copies -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("right, wrong", [(9, 1), (1, 9), (0, 10)])
def test_copies_are_believed_as_often_as_they_were_right(right, wrong):
    blend = Blend()
    for _ in range(WINDOW):
        for token in [5] * right + [6] * wrong:
            blend.learn_copies([(5, .9)], 3, token)
    [(token, probability)] = blend.copies([(5, .9)], 3)
    assert token == 5 and probability == pytest.approx(right / 10, abs=.05)
    assert dict(blend.copies([(5, .9)], 4))[5] == confidence(4)
