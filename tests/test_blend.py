"""The guesses of several sources become one distribution, and accurate sources gain weight."""
import math
import random

import pytest

from model.drafts.mixture import WEIGHTS, WINDOW, Blend, PlattScaling, starting_weights

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
    for length, depth in ((8, 0), (1, 20)):
        assert all(0 <= probability <= 1 for _, probability in blend.mix(given, length, depth))
        assert sum(dict(blend.mix(given, length, depth)).values()) <= 1 + 1e-9
        sources = ["eagle", "suffix"]
        assert sum(blend.weights(sources, length).values()) == pytest.approx(1)


def test_a_token_that_nobody_guessed_changes_no_weight():
    blend = taught([(BOTH, 9)] * WINDOW, length=4)
    assert blend.weights(["model", "suffix"], 4) == pytest.approx({"model": 1 - WEIGHTS[3], "suffix": WEIGHTS[3]})


# --- calibration ------------------------------------------------------------------------------------------------------

def claims(truth, count, seed):
    """Yield guesses that claim random probabilities, and are correct with probability `truth(claimed)`."""
    rng = random.Random(seed)
    for _ in range(count):
        claimed = .05 + .9 * rng.random()
        token = 1 if rng.random() < truth(claimed) else 3
        yield [(1, claimed)], token


def modest(claimed):
    return 1 / (1 + ((1 - claimed) / claimed) ** 1.7 * .3)


def rash(claimed):
    return .6 * claimed


def loss(worth, guesses, token):
    """Return the log loss of a claimed probability, given whether the guess was correct."""
    _, claimed = guesses[0]
    chance = worth.of(claimed)
    return -math.log(chance if token == guesses[0][0] else 1 - chance)


@pytest.mark.parametrize("truth", [modest, rash], ids=["underconfident", "overconfident"])
def test_what_a_claim_is_worth_is_learnt(truth):
    worth = PlattScaling()
    for guesses, token in claims(truth, 4 * WINDOW, seed=0):
        worth.learn(guesses, token)
    assert [worth.of(claimed) for claimed in (.28, .5, .71)] == pytest.approx(
        [truth(claimed) for claimed in (.28, .5, .71)], abs=.07)
    fresh = list(claims(truth, MANY, seed=1))
    assert sum(loss(worth, *lesson) for lesson in fresh) < .97 * sum(loss(PlattScaling(), *lesson) for lesson in fresh)


@pytest.mark.parametrize("right", [0, 1, 2, 9])
def test_worth_keeps_the_order_of_guesses(right):
    worth = PlattScaling()
    for _ in range(MANY):
        worth.learn([(0, .9), (1, 1e-9), (2, .1)], right)
    worths = [worth.of(claimed) for claimed in (0, .001, .01, .1, .5, .9, .99)]
    assert worths == sorted(set(worths))
    assert worths[0] == 0 and worths[-1] <= 1


def test_probabilities_add_up_to_no_more_than_1_however_modest_their_source_was():
    blend = taught([({"model": [(1, .4)]}, 1)] * MANY)
    assert dict(blend.mix({"model": [(1, .4)]}, 0))[1] > .9
    assert dict(blend.mix({"model": [(1, .4), (2, .4)]}, 0)) == pytest.approx({1: .5, 2: .5})


def witnesses(count, seed):
    """Yield guesses of two calibrated sources with different evidence for one token."""
    rng = random.Random(seed)
    for _ in range(count):
        token, given = rng.randrange(2), {}
        for source in ("eagle", "model"):
            claimed = .5 + rng.random() / 2
            best = token if rng.random() < claimed else 1 - token
            given[source] = [(best, claimed), (1 - best, 1 - claimed)]
        yield given, token


def test_sources_that_agree_are_believed_more_than_each_of_them_claims():
    blend, start = taught(witnesses(MANY, seed=0)), Blend()
    agreed = {"eagle": [(1, .8), (0, .2)],
              "model": [(1, .8), (0, .2)]}
    assert dict(start.mix(agreed, 0))[1] == pytest.approx(.8)
    assert dict(blend.mix(agreed, 0))[1] > .87  # .94 by Bayes' rule
    fresh = list(witnesses(MANY, seed=1))
    after, before = (sum(-math.log(dict(one.mix(given, 0))[token])
                         for given, token in fresh)
                     for one in (blend, start))
    assert after < .95 * before


def test_depths_are_learnt_apart():
    blend = Blend()
    for _ in range(4 * WINDOW):
        blend.learn({"suffix": [(1, .9)]}, 8, 2, depth=12)
    (_, deep), = blend.mix({"suffix": [(1, .9)]}, 8, 12)
    (_, shallow), = blend.mix({"suffix": [(1, .9)]}, 8, 2)
    assert deep < .2 and shallow == .9
