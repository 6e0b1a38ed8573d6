"""Growth of trees: OPT-Tree's, EAGLE-1's and those of several drafters, compared with brute force."""
from dataclasses import replace
from itertools import cycle, product

import pytest
import torch

from config.cli import parse
from config.profiles import PROFILES
from config.trees import STATIC_SHAPE, Growth, by_policy, expanded
from launch.pipeline import Pipeline
from launch.probe import _pass_seconds
from model.drafts.mixture import Mixture
from model.drafts.network import TreeDraft
from model.sample import Sampler
from model.tree import TokenTree
from tests import test_mixture
from tests.saved import PROMPT
from tests.tiny import CONFIG, SPECULATIVE, TINY, TREE, pipeline, random_tensor, write

VOCAB = 5
PUBLISHED = ("0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001").split()


class Random(TreeDraft):
    """A drafter with a random law at each node, which depends only on the node's path and the drafter's `salt`."""

    def __init__(self, salt, vocab=VOCAB):
        self.salt, self.vocab, self.source = salt, vocab, f"ssm{salt}"
        self.number = salt
        super().__init__(CONFIG.cache(1, 4096, torch.zeros(1, dtype=torch.float64)))

    def readable(self, tree, fresh):
        return fresh

    def features(self, tree, fresh):
        return torch.zeros(len(fresh), 1, dtype=torch.float64)

    @property
    def network(self):
        return self.salt

    def read(self, token_T, feature_TD, pos_T, cache):
        return (feature_TD * 31 + token_T[:, None] + 7 * self.salt) % 1_000_003

    def logits(self, out_TD):
        seeds = out_TD[:, 0].tolist()
        return torch.stack([random_tensor(int(seed), self.vocab) * 1.5 for seed in seeds])

    def law(self, path):
        """Return the probabilities after the text and these guesses."""
        out = torch.zeros(1, 1, dtype=torch.float64)
        for token in (TEXT[-1], *path):
            out = self.read(torch.tensor([token]), out, None, None)
        return self.logits(out).softmax(-1)[0].tolist()

    def worth(self, path):
        """Return the probability of a path of guesses."""
        found = 1.0
        for i, token in enumerate(path):
            found *= self.law(path[:i])[token]
        return found


TEXT = [1]


def expansion(sizes):
    return TREE.init.shaped(expanded(sizes))


def grown(draft, growth, sampler=Sampler()):
    """Return the tree that a draft grows, without sending anything."""
    draft.begin(sampler)
    return test_mixture.grown(draft, TokenTree(TEXT, 100), growth)


def path(tree, node):
    """Return the tokens of the guesses from the tip to a node."""
    return tuple(test_mixture.path(tree, node)[len(TEXT):])


def paths(tree):
    return {path(tree, node) for node in tree.live}


# --- OPT-Tree ---------------------------------------------------------------------------------------------------------

def best(draft, size, gain, levels):
    """Return the `size` likeliest paths, with levels added until one brings at most `gain`; and the last level."""
    found, before = [], 0.0
    for depth in range(1, levels + 1):
        every = [path for length in range(1, depth + 1)
                 for path in product(range(VOCAB), repeat=length)]
        found = sorted(every, key=draft.worth, reverse=True)[:size]
        expected = sum(map(draft.worth, found))
        if expected - before <= gain:
            break
        before = expected
    return set(found), depth


@pytest.mark.parametrize("salt", range(6))
def test_opt_tree_is_the_best_tree_of_its_size_and_stops_where_a_level_brings_too_little(salt):
    draft, stopped = Random(salt), set()
    for size, gain in ((3, 0.3), (7, 0.3),
                       (7, 0.05), (12, 0.15)):
        wanted, depth = best(draft, size, gain, 4)
        tree = grown(draft, by_policy(Growth(size, 3, 1), "opt", "", gain))
        assert paths(tree) == wanted
        stopped.add(depth)
        draft.reset()
    assert len(stopped) > 1, "the threshold changed nothing"


def test_the_threshold_is_a_level_in_the_time_of_a_pass_unless_it_is_given():
    options = {"pipeline_type": "serial", "policy": "opt", "init_total_token": 12, "time": "virtual",
               "profile": "jetson-7b"}
    with Pipeline.open("toy", **options) as opened:
        init, expand = opened.decoder.cfg.init, opened.decoder.cfg.expand
        seconds = _pass_seconds(opened.ring, 13)
        profile = PROFILES["jetson-7b"]
        level = profile.level / 1e3 + profile.own_seconds(num_guesses=1)
        assert init.gain == expand.gain == pytest.approx(level / seconds) and 0 < init.gain < 1
        given = replace(opened.config, policy="opt:0.2")
        assert opened.decoder_for(given).cfg.init.gain == 0.2
    assert (init.nodes, init.width) == (12, 12)


# --- trees of a shape -------------------------------------------------------------------------------------------------

def ranks(draft, tokens):
    """Return the rank of the child at each step of a path, as the digits of a text."""
    steps = []
    for i, token in enumerate(tokens):
        law = draft.law(tokens[:i])
        steps.append(sorted(range(len(law)), key=lambda other: -law[other]).index(token))
    return "".join(map(str, steps))


def test_the_static_tree_has_exactly_the_shape_that_was_published():
    draft = Random(1, vocab=11)
    tree = grown(draft, TREE.init.shaped(STATIC_SHAPE))
    assert sorted(ranks(draft, path) for path in paths(tree)) == sorted(PUBLISHED)
    assert [ranks(draft, path(tree, node)) for node in sorted(tree.live)] == PUBLISHED, "level by level"
    leaves = [node for node in tree.live if not tree.nodes[node].children]
    assert (len(tree.live), len(leaves), max(map(len, PUBLISHED))) == (25, 15, 5)


def test_the_static_tree_is_that_of_the_policy_and_has_no_other_size():
    growth = parse(["policy=static", "init_total_token=7", "init_depth=1", "subseq_token=8"]).tree.init
    assert (growth.shape, growth.nodes, growth.depth, growth.segment) == (STATIC_SHAPE, 25, 4, 8)
    assert growth.deeper(TREE.idle) == growth


def test_the_usual_expansion_has_twenty_guesses_in_eight_steps_and_three_leaves():
    draft = Random(2, vocab=11)
    tree = grown(draft, parse(["pipeline_type=specinfer"]).tree.init)
    found = sorted(ranks(draft, path) for path in paths(tree))
    assert found == sorted(["0", "00",
                            *(f"00{rank}" + "0" * more for rank in range(3) for more in range(6))])
    assert expanded("2,3,1") == ((2,), (3, 3), (1,) * 6)


@pytest.mark.parametrize("rule, temperature", [("match", 0), ("match", 1),
                                               ("naive", 1), ("mss", 1), ("eagle1", 1)])
def test_a_sequence_is_in_the_merged_tree_if_and_only_if_it_is_in_the_tree_of_a_drafter(rule, temperature):
    drafts = [Random(salt, vocab=4) for salt in range(3)]
    for seed in range(10):
        sampler = Sampler(temperature, seed=seed, rule=rule)
        growth = expansion("2,2,1")
        alone = {}
        for draft in drafts:
            alone[draft.source] = grown(draft, growth, sampler)
            draft.reset()
        merged = grown(Mixture(drafts), growth, sampler)
        for draft in drafts:
            draft.reset()
        assert paths(merged) == set().union(*map(paths, alone.values()))
        for node in merged.live:
            who = {source for source, tree in alone.items() if path(merged, node) in paths(tree)}
            assert set(merged.nodes[node].proposals) == who
        drawn = [len(node.drawn) for node in merged.nodes.values() if node.drawn]
        assert bool(drawn) == (rule in ("mss", "eagle1"))
        if drawn:
            assert len(merged.nodes[merged.tip].drawn) == 6, "each of three drafters has two proposals"


def test_what_eagle1_draws_at_a_node_differs_and_what_mss_draws_may_not():
    growth = expansion("3")
    for rule, kinds in (("eagle1", {3}), ("mss", {1, 2, 3})):
        found = set()
        for seed in range(40):
            tree = grown(Random(3, vocab=4), growth, Sampler(1.0, seed=seed, rule=rule))
            tokens = [proposal.token for proposal in tree.nodes[tree.tip].drawn]
            assert len(tokens) == 3
            found.add(len(set(tokens)))
        assert found == kinds


def test_a_drafter_of_few_likely_tokens_draws_no_more_than_there_are():
    tree = grown(Random(3), expansion("4,1"),
                 Sampler(1.0, top_k=2, rule="eagle1"))
    assert len(tree.nodes[tree.tip].drawn) == 2


# --- any strategy -----------------------------------------------------------------------------------------------------

NEW = 20
POLICIES = {"static": TREE.init.shaped(STATIC_SHAPE), "expansion": expansion("2,2,1"),
            "opt": by_policy(Growth(12, 4, 4, 4), "opt", "", 0.1)}


@pytest.mark.parametrize("strategy, policy, temperature, kind", [
    *zip(SPECULATIVE, cycle(POLICIES), cycle([0.0, 1.0]), cycle(["eagle", "eagle", "twin", "twin"]))])
def test_every_strategy_writes_the_reference_text_with_trees_of_every_policy(strategy, policy, temperature, kind):
    sampler = Sampler(temperature, seed=4)
    tree = replace(TREE, init=POLICIES[policy], expand=POLICIES[policy])
    text = TINY.text(PROMPT, NEW, sampler)
    with pipeline(TINY, 2, strategy, TINY.mixture(kind), tree) as decoder:
        assert write(decoder, PROMPT, NEW, sampler) == text
