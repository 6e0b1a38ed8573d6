"""The rules of verification give a token by the target's law: whole distributions in fractions, then whole pipelines.

Every bias that is easily made meets the same tests, which must find it.
"""
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch

from config.keys import allowed_values
from config.run_config import RunConfig
from config.trees import expanded
from model.rules import (
    LOSSY,
    RULES,
    Chance,
    Judging,
    drawing,
    drawn,
    judged,
    laws,
    mss,
    naive,
    residual,
    spread,
    with_replacement,
    without_repeats,
    without_replacement,
)
from model.sample import DRAWING, JUDGING, NOISE, Sampler, gumbel, stream
from model.tree import Proposal, TokenTree
from pipeline.answers import Request
from tests.checkpoints import refused
from tests.test_sample import ALPHA, p_value, processed_law
from tests.tiny import TREE, Tiny, pipeline, random_tensor, tokens_of

# --- all possible outcomes, with their probabilities ------------------------------------------------------------------


by_each_rule = pytest.mark.parametrize("name", RULES)


class Script:
    """Chance that follows a list of decisions, then always the first possibility; `others` are the remaining ones."""

    def __init__(self, decisions):
        self.decisions, self.made = decisions, []
        self.probability, self.others = Fraction(1), []

    def _decide(self, probabilities):
        step = len(self.made)
        possible = [i for i, probability in enumerate(probabilities) if probability > 0]
        chosen = self.decisions[step] if step < len(self.decisions) else possible[0]
        if step >= len(self.decisions):
            self.others += [(*self.made, other) for other in possible[1:]]
        self.made.append(chosen)
        self.probability *= probabilities[chosen]
        return chosen

    def happens(self, probability):
        return self._decide([probability, 1 - probability]) == 0

    def pick(self, weights):
        weights = [Fraction(int(weight)) if isinstance(weight, np.integer) else weight for weight in weights]
        return self._decide([weight / sum(weights) for weight in weights])


def distribution(experiment, size):
    """Return the probability of each token with which an experiment may end."""
    found, left = Counter(), [()]
    while left:
        chance = Script(left.pop())
        token = experiment(chance)
        found[token] += chance.probability
        left += chance.others
    assert sum(found.values()) == 1
    return [found[token] for token in range(size)]


def distance(experiment, law):
    """Return the total variation distance between the result of an experiment and a law."""
    found = distribution(experiment, len(law))
    return sum(abs(a - b) for a, b in zip(found, law)) / 2


def law(*parts):
    """Return probabilities in these proportions."""
    return np.array([Fraction(part, sum(parts)) for part in parts], dtype=object)


def proposals(drafters, draw, chance):
    """Return the proposals of each drafter; `drafters` are laws, each with the number of tokens to draw."""
    return [Proposal(f"ssm{i}", token, law_V) for i, (law_V, count) in enumerate(drafters)
            for token in draw(law_V, count, chance)]


def random_laws(seed, size, count):
    rng = np.random.default_rng(seed)
    return [law(*(int(part) for part in rng.integers(1, 12, size) ** 2))
            for _ in range(count)]


P3, Q3 = law(1, 5, 2), law(4, 1, 3)
P4, Q4, R4 = random_laws(1, 4, 3)
P5, Q5 = law(2, 0, 7, 1, 1), law(1, 4, 0, 2, 2)  # zeros in both
CASES = {  # the target's law, and the drafters
    "one of three": (P3, [(Q3, 1)]),
    "two of three": (P3, [(Q3, 2)]), "three of three": (P3, [(Q3, 3)]),
    "equal laws": (P3, [(P3, 3)]),
    "two of four": (P4, [(Q4, 2)]), "zeros": (P5, [(Q5, 2)]),
    "zeros in the draft": (P3, [(law(0, 1, 0), 2)]),
    "zeros in the target": (law(0, 1, 0), [(Q3, 2)]),
    "nothing in common": (law(1, 0, 2, 0),
                          [(law(0, 1, 0, 1), 2)]),
    "two drafters": (P3, [(Q3, 1), (law(1, 1, 1), 2)]),
    "three drafters": (P4, [(Q4, 1), (R4, 1), (P4, 1)]),
    "nobody": (P4, []),
}


@by_each_rule
@pytest.mark.parametrize("case", CASES)
def test_every_rule_gives_a_token_by_the_target_s_law(name, case):
    target, drafters = CASES[case]
    judge, draw = RULES[name]

    def experiment(chance):
        return judge(target, tuple(proposals(drafters, draw or with_replacement, chance)), chance)

    assert distance(experiment, target) == 0


@by_each_rule
@pytest.mark.parametrize("pair", [(P3, Q3), (P4, Q4), (P5, Q5), (P4, P4)], ids=range(4))
def test_one_guess_is_accepted_as_often_as_laws_overlap(name, pair):
    """With the probability 1 - TV(p, q), which no rule can exceed; naive sampling meets it only by chance."""
    target, draft = pair

    def experiment(chance):
        [proposal] = proposals([(draft, 1)], RULES[name].draw or with_replacement, chance)
        return int(RULES[name].judge(target, [proposal], chance) == proposal.token)

    overlaps = {"naive": target * draft}.get(name, np.minimum(target, draft))
    assert distribution(experiment, 2)[1] == overlaps.sum()


def test_naive_gives_the_target_s_law_whatever_is_below_the_node():
    for tokens in ([], [2], [0, 1, 2]):
        below = [Proposal("eagle", token) for token in tokens]
        assert distance(lambda chance, below=below: naive(P3, below, chance), P3) == 0


# --- biases that the same test must detect ----------------------------------------------------------------------------

def in_turn(target, drawn, chance):
    """Judge the proposals one after the other, in the given order."""
    for _, token, law_V in drawn:
        if chance.happens(min(Fraction(1), target[token] / law_V[token])):
            return token
        target = residual(target, law_V)
    return chance.pick(target)


def proposed(tokens, law_V):
    return [Proposal("ssm", token, law_V) for token in tokens]


def likeliest(law_V, count):
    return sorted(range(len(law_V)), key=lambda token: -law_V[token])[:count]


def drawn_in_order(law_V, chance):
    """Three tokens that are drawn, the likeliest first."""
    return sorted(with_replacement(law_V, 3, chance), key=lambda token: -law_V[token])


def dropped(target, law_V, chance):
    drawn = dict.fromkeys(with_replacement(law_V, 3, chance))
    return mss(target, proposed(drawn, law_V), chance)


def unchanged(target, law_V, chance):
    return in_turn(target, proposed(without_repeats(law_V, 3, chance), law_V), chance)


def top(target, law_V, chance):
    return in_turn(target, proposed(likeliest(law_V, 3), law_V), chance)


def merged(target, law_V, chance):
    """Let two drafters draw a token each, and count equal tokens once."""
    drawn = {proposal.token: proposal
             for proposal in proposals([(law_V, 1), (law_V[::-1], 1)],
                                       with_replacement, chance)}
    return mss(target, list(drawn.values()), chance)


def pruned(target, law_V, chance):
    return mss(target, proposed(drawn_in_order(law_V, chance)[:2], law_V), chance)


def ranked(target, law_V, chance):
    return in_turn(target, proposed(drawn_in_order(law_V, chance), law_V), chance)


@pytest.mark.parametrize("biased, least", [
    (dropped, 0.05), (unchanged, 0.05), (top, 0.3),
    (merged, 0.03), (pruned, 0.1), (ranked, 0.1)])
def test_the_exact_test_sees_a_bias(biased, least):
    pairs = [random_laws(seed, 4, 2) for seed in range(2, 7)]
    assert max(distance(partial(biased, *pair), pair[0]) for pair in pairs) > least


def test_one_of_the_draws_may_be_left_out_by_chance_but_not_by_its_value():
    def experiment(chance):
        drawn = proposals([(Q3, 3)], with_replacement, chance)
        drawn.pop(chance.pick(np.ones(3, dtype=int)))
        return mss(P3, drawn, chance)

    assert distance(experiment, P3) == 0


# --- arithmetic with floats -------------------------------------------------------------------------------------------

class Never:
    """Chance that accepts nothing."""

    def happens(self, probability):
        return False

    def pick(self, weights):
        return Chance(stream(0, 0, JUDGING)).pick(weights)


@pytest.mark.parametrize("judge", [mss, without_replacement])
def test_a_residual_that_rounding_has_emptied_falls_back_to_the_law(judge):
    law_V = np.array([0.25, 0.0, 0.75])
    assert judge(law_V, proposed([0, 2], law_V), Never()) in (0, 2)
    assert residual(law_V, law_V) is law_V


def test_a_token_without_probability_is_never_picked():
    weights = np.array([0.0, 1e-300, 0.0, 0.5, 0.0])
    picked = {Chance(stream(seed, 3, JUDGING)).pick(weights) for seed in range(2000)}
    assert picked == {3}
    assert {Chance(stream(seed, 3, JUDGING)).pick(np.array([0.0, 1e-300, 0.0]))
            for seed in range(200)} == {1}


def test_streams_follow_weights_and_no_two_purposes_share_one():
    weights = np.array([1, 4, 0, 3, 2])
    picked = [Chance(stream(7, position, DRAWING, 1)).pick(weights) for position in range(20_000)]
    assert p_value(picked, weights / 10) > ALPHA
    streams = [(NOISE, 0), (JUDGING, 0), (DRAWING, 0), (DRAWING, 1)]
    numbers = [stream(5, 9, purpose, who).random(4).tolist() for purpose, who in streams]
    assert len(set(map(tuple, numbers))) == len(streams)
    assert stream(5, 9, JUDGING).random() == stream(5, 9, JUDGING).random()
    again = -np.log(stream(5, 9, NOISE).standard_exponential(3))
    assert gumbel(5, 9, 3).tolist() == again.tolist()


# --- nodes of a tree --------------------------------------------------------------------------------------------------

def test_a_node_keeps_every_proposal_though_equal_tokens_are_one_child():
    tree = TokenTree([3], 20)
    first = tree.propose(tree.tip, Proposal("ssm1", 7, "q"), -1.0)
    assert tree.propose(tree.tip, Proposal("ssm2", 7, "r"), -0.5) == first
    assert tree.propose(tree.tip, Proposal("ssm2", 7, "r"), -0.5) == first
    tree.propose(first, Proposal("ssm1", 9), -2.0)
    assert [(p.source, p.law) for p in tree.nodes[tree.tip].drawn] == [("ssm1", "q"), ("ssm2", "r"), ("ssm2", "r")]
    assert tree.nodes[first].proposals == {"ssm1": -1.0, "ssm2": -0.5}
    assert not tree.nodes[first].drawn
    tree.propose(first, Proposal("ssm1", 4, "q"), -2.0)
    tree.settle(8)
    assert not any(node.drawn for node in tree.nodes.values())


def test_the_names_of_the_rules_are_those_that_a_person_may_give():
    assert allowed_values(RunConfig)["verify"].names == ("match", *RULES, *LOSSY)


@by_each_rule
def test_without_proposals_a_rule_follows_the_warped_law(name):
    logits = random_tensor(3, 9)
    tree = TokenTree(range(20_001), 1 << 20)
    sampler = Sampler(0.8, 0.9, 6, seed=2, rule=name)
    said = judged(sampler, tree, tree.trunk, logits.expand(len(tree.trunk), -1))
    assert p_value(said, processed_law(logits, 0.8, 6, 0.9)) > ALPHA
    assert judged(sampler, tree, [5, 6], logits.expand(2, -1)) == said[5:7], "a position has one number"


DRAFTS = {"ssm0": (0, [0, 1, 2, 4, 5]), "ssm1": (1, range(7))}  # each drafter's number, and the tokens that it knows


@pytest.mark.parametrize("name", ["mss", "eagle1"])
def test_guesses_that_are_drawn_and_judged_give_a_token_by_the_law_of_transformers(name):
    """Two drafters, which know other tokens than the target, guess two tokens each below every node."""
    logits, sampler = random_tensor(4, 9) * 1.5, Sampler(0.8, 0.95, 7, seed=6, rule=name)
    tree = TokenTree(range(4_000), 1 << 20)
    drafts = []
    for source, (number, columns) in DRAFTS.items():
        draft_law = (random_tensor(number, len(columns)) * 1.5).softmax(-1).numpy()
        law_TV = spread(draft_law[None], torch.tensor([*columns]))
        assert law_TV[0, columns].tolist() == draft_law.tolist()
        assert set(np.flatnonzero(law_TV)) == set(columns)
        drafts.append((Proposal(source, -1, law_TV[0]), number))

    first_drawn = []
    for node in tree.trunk:
        for like, number in drafts:
            for proposal, score in drawn(sampler, like, tree.nodes[node].pos + 1, number, 2):
                assert proposal.law is like.law and score == np.log(like.law[proposal.token])
                tree.propose(node, proposal, score)
        first_drawn.append([proposal.token for proposal in tree.nodes[node].drawn])
    assert p_value([tokens[0] for tokens in first_drawn], drafts[0][0].law) > ALPHA
    assert p_value([tokens[2] for tokens in first_drawn], drafts[1][0].law) > ALPHA

    tokens = judged(sampler, tree, tree.trunk, logits.expand(len(tree.trunk), -1))
    assert p_value(tokens, processed_law(logits, 0.8, 7, 0.95)) > ALPHA


def test_only_rules_of_drawn_guesses_draw_them_and_only_above_temperature_0():
    functions = {rule: drawing(Sampler(1.0, rule=rule)) for rule in ("match", *RULES, *LOSSY)}
    assert functions == {"match": None, "naive": None, "mss": with_replacement, "eagle1": without_repeats,
                         "typical": None}
    assert drawing(Sampler(0.0, rule="mss")) is None


def test_laws_are_in_float64_and_on_the_host():
    [law_V] = laws(Sampler(0.8, 0.9, 6), random_tensor(3, 1, 9).bfloat16())
    assert law_V.dtype == np.float64
    expected = processed_law(random_tensor(3, 9).bfloat16().double(), 0.8, 6, 0.9)
    np.testing.assert_allclose(law_V, expected, rtol=1e-12)


@by_each_rule
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_reported(name, bad):
    logits = torch.zeros(2, 9)
    logits[1, 4] = bad
    tree = TokenTree([1, 2], 9)
    with refused("the model's logits are not finite (NaN or infinity); its weights or its config.json are damaged"):
        judged(Sampler(1.0, rule=name), tree, tree.trunk, logits)


# --- whole pipelines --------------------------------------------------------------------------------------------------

TINY = Tiny(layers=1)
START, RUNS = [9], 500


def texts(rule, runs=RUNS):
    """Return the first two tokens for many seeds, both guessed by two drafters that are often wrong."""
    tree = replace(TREE, init=TREE.init.shaped(expanded("2,1")))
    with pipeline(TINY, 1, "serial", TINY.drafters(0.1, 0.2), tree) as decoder:
        samplers = [Sampler(0.7, top_k=5, seed=seed, rule=rule) for seed in range(runs)]
        asked = [decoder.submit(Request(START, sampler, 2)) for sampler in samplers]
        return [tokens_of(stream) for _, stream in asked]


def p_values(found):
    """Yield the p-values of the first token, and of the second token after the likeliest first one."""
    def law_behind(tokens):
        return processed_law(TINY.logits(tokens)[-1], 0.7, 5)

    likeliest = int(law_behind(START).argmax())
    yield p_value([text[0] for text in found], law_behind(START))
    yield p_value([text[1] for text in found if text[0] == likeliest], law_behind([*START, likeliest]))


@pytest.mark.parametrize("rule", RULES)
def test_whole_pipelines_sample_the_models_distribution(rule):
    assert min(p_values(texts(rule))) > ALPHA


@pytest.mark.parametrize("rule, biased", [
    ("mss", Judging(lambda law_V, drawn, chance: in_turn(
        law_V, sorted(drawn, key=lambda proposal: -proposal.law[proposal.token]), chance), with_replacement)),
    ("eagle1", Judging(in_turn, without_repeats))])
def test_the_same_test_sees_biased_pipelines(monkeypatch, rule, biased):
    monkeypatch.setitem(RULES, rule, biased)
    assert min(p_values(texts(rule))) < ALPHA
