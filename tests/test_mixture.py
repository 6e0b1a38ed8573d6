"""A mixture grows the best guesses of all its sources, anywhere in the tree."""
import heapq
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from config.run_config import Growth
from model.cache import TreeCache
from model.drafts import mixture
from model.drafts.mixture import PRIOR_SHARPNESS, Mixture
from model.drafts.network import TreeDraft, at_once
from model.drafts.suffix import Suffix
from model.sample import Sampler, gumbel
from model.tree import TokenTree, verify
from tests.tiny import digits, sharpened

VOCAB = 7
PROMPT = [3, 1, 4]
LIMIT = 64  # of a text and of the paths below
with_four_seeds = pytest.mark.parametrize("seed", range(4))


class Table(TreeDraft):
    """A network with known probabilities after every path; what it makes of a row is the path, with its length first.

    It notes which nodes it reads since it began at a tip.
    """

    def __init__(self, seed=0, source="table", capacity=4096):
        self.seed, self.source = seed, source
        super().__init__(TreeCache((1, 1, capacity, 1), torch.float64, "cpu"))

    def readable(self, tree, fresh):
        return fresh

    def features(self, tree, fresh):
        return torch.stack([packed(tree.tokens[:tree.nodes[node].pos]) for node in fresh])

    @property
    def network(self):
        return self.source

    def read(self, token_T, feature_TD, pos_T, cache):
        paths = [[*unpacked(feature), token] for feature, token in zip(feature_TD, token_T.tolist())]
        assert pos_T.tolist() == [len(path) - 1 for path in paths]
        return torch.stack([packed(path) for path in paths])

    def logits(self, out_TD):
        return torch.stack([self.after(unpacked(out)) for out in out_TD])

    def after(self, path):
        """Return the logits `[V]` after a path."""
        rng = random.Random(repr((self.seed, path)))
        return torch.tensor([3 * rng.gauss(0, 1) for _ in range(VOCAB)],
                            dtype=torch.float64)

    def restart(self):
        self.seen = []
        super().restart()

    def expand(self, tree, nodes, width):
        assert all(self.wants(tree, node) for node in nodes)
        said = yield from super().expand(tree, nodes, width)
        self.seen += nodes[:len(said)]
        return said


class Narrow(Table):
    """A network that excludes all tokens but some."""

    def __init__(self, tokens, source):
        self.only = torch.tensor(tokens)
        super().__init__(source=source)

    def after(self, path):
        return torch.full((VOCAB,), -math.inf).double().index_fill(0, self.only, 0.0)


class Overflowing(Table):
    """A network whose numbers leave their range once it has read a few of its own outputs."""

    def after(self, path):
        return super().after(path) if len(path) < len(PROMPT) + 3 else torch.full((VOCAB,), math.nan)


def packed(path):
    return torch.tensor([len(path), *path, *[0] * (LIMIT - len(path))],
                        dtype=torch.float64)


def unpacked(out):
    return [int(token) for token in out[1:int(out[0]) + 1]]


def path(tree, node):
    """Return the tokens from the root to a node."""
    above = [] if tree.nodes[node].parent == node else path(tree, tree.nodes[node].parent)
    return [*above, tree.nodes[node].token]


def paths(tree):
    return {tuple(path(tree, node)) for node in tree.live}


def grown(draft, tree, growth):
    """Return the tree after all its levels."""
    while at_once(draft.grow(tree, growth)):
        pass
    return tree


def test_a_chain_of_own_outputs_ends_where_their_numbers_leave_their_range():
    tree = grown(Mixture([Overflowing()]), TokenTree(PROMPT, max_tokens=LIMIT), Growth(40, 8, 2, 2, anywhere=True))
    assert max(map(len, paths(tree))) == len(PROMPT) + 3


def best(table, text, limit, growth):
    """Find by brute force the likeliest paths below a text, if each node has its `width` likeliest children."""
    found, open_paths = set(), [(0.0, tuple(text))]
    while open_paths and len(found) <= growth.nodes:
        loss, above = heapq.heappop(open_paths)
        found.add(above)
        if len(above) < limit:
            for token, score in sharpened(table.after(list(above)), growth.width):
                if loss - score <= -growth.least_score:
                    heapq.heappush(open_paths, (loss - score, (*above, token)))
    return found - {tuple(text)}


def anywhere(nodes, width=3):
    """A growth without levels."""
    return Growth(nodes, 99, width, anywhere=True)


def guessed_tokens(tree):
    """Those of the guesses behind the tip."""
    return {tree.nodes[node].token for node in tree.nodes[tree.tip].children.values()}


def settle_a_miss(tree):
    """Let the text go on with a token that nobody has guessed."""
    tree.settle(min({*range(VOCAB)} - guessed_tokens(tree)))


def settle_the_likeliest(tree):
    likeliest = max(tree.nodes[tree.tip].children.values(), key=lambda child: tree.nodes[child].score)
    tree.settle(tree.nodes[likeliest].token)


GROWTHS = st.builds(Growth, nodes=st.integers(1, 40),
                    depth=st.just(99), width=st.integers(1, VOCAB),
                    least_score=st.sampled_from([-math.inf, -3.0, -6.0]), anywhere=st.just(True))


@settings(max_examples=60)
@given(st.integers(0, 999), GROWTHS, st.integers(4, 12))
def test_the_tree_is_that_of_a_brute_force_and_ends_at_the_limit_of_the_text_and_at_worth(seed, growth, limit):
    table, tree = Table(seed), TokenTree(PROMPT, limit)
    grown(Mixture([table]), tree, growth)
    assert paths(tree) == best(table, PROMPT, limit, growth)
    assert all(tree.nodes[node].pos < limit
               and tree.nodes[node].score >= growth.least_score for node in tree.live)


@with_four_seeds
def test_every_level_reads_the_likeliest_nodes_that_were_not_read_wherever_they_stand(seed):
    table = Table(seed)
    tree = TokenTree(PROMPT, LIMIT)
    growth = anywhere(60)
    draft, depths = Mixture([table]), []
    assert at_once(draft.grow(tree, growth)) and table.seen == [tree.tip]
    while True:
        unread = tree.live.difference(table.seen)
        wanted = sorted(unread, key=lambda node: -tree.nodes[node].score)[:growth.width]
        before = len(table.seen)
        if not at_once(draft.grow(tree, growth)):
            break
        assert table.seen[before:] == wanted
        depths.append({tree.nodes[node].pos for node in wanted if node in tree.nodes})

    assert max(map(len, depths)) > 1, "no level had nodes of several depths"


@pytest.mark.parametrize("seed, growth", [*enumerate(2 * [anywhere(12), anywhere(30, 4)])])
def test_guesses_that_were_trimmed_come_back_when_the_tip_moves(unlearning, seed, growth):
    table, tree = Table(seed), TokenTree(PROMPT, LIMIT)
    draft = Mixture([table])
    back = 0
    for _ in range(8):
        grown(draft, tree, growth)
        dropped = best(table, tree.tokens, LIMIT,
                       Growth(1000, 99, growth.width, least_score=-7)) - paths(tree)
        settle_the_likeliest(tree)
        grown(draft, tree, growth)
        assert paths(tree) == best(table, tree.tokens, LIMIT, growth)
        back += len(dropped & paths(tree))

    assert back and len(tree.trunk) == len(PROMPT) + 8


def written(draft, table, tree, growth, sampler=Sampler()):
    """Decode with the table as the target, and yield after each growth."""
    draft.begin(sampler)
    while tree.room > 0:
        grown(draft, tree, growth)
        yield tree
        for node in tree.cut():
            logits = table.after(path(tree, node))
            tree.nodes[node].target_token, = sampler(logits[None],
                                                     [tree.nodes[node].pos + 1])
        verify(tree)


@with_four_seeds
def test_nothing_is_read_twice_unless_a_network_restarts(seed):
    table, sampler = Table(seed), Sampler(1.0, seed=seed)
    draft, restarts, last = Mixture([table]), 0, table.seen
    for _ in written(draft, Table(seed + 1), TokenTree(PROMPT, 30), anywhere(20), sampler):
        assert len(table.seen) == len(set(table.seen))
        restarts += table.seen is not last
        last = table.seen
    assert 0 < restarts < 27, "either no guess was right, or none was wrong"


@pytest.mark.parametrize("drifts", [False, True])
def test_a_network_that_drifts_begins_at_every_tip_and_another_one_only_after_a_miss(drifts):
    table, tree = Table(), TokenTree(PROMPT, LIMIT)
    draft, growth = Mixture([table]), anywhere(20)
    table.drifts = drifts
    grown(draft, tree, growth)
    settle_the_likeliest(tree)
    draft.refresh()
    at_once(draft.grow(tree, growth))
    assert (table.seen == [tree.tip]) == drifts


def test_a_miss_begins_at_the_tip():
    table, tree = Table(), TokenTree(PROMPT, LIMIT)
    draft = Mixture([table], Suffix())
    growth = anywhere(9)
    grown(draft, tree, growth)
    settle_a_miss(tree)
    assert not tree.live
    assert at_once(draft.grow(tree, growth)) and table.seen == [tree.tip]
    likeliest = table.after(tree.tokens).topk(3).indices.tolist()
    assert [tree.nodes[node].token for node in sorted(tree.live)] == likeliest
    assert {tree.nodes[node].parent for node in tree.live} == {tree.tip}


@pytest.mark.parametrize("capacity", range(4, 12))
def test_a_full_cache_ends_growth_and_begins_again_after_a_miss(capacity):
    table, tree = Table(capacity=capacity), TokenTree(PROMPT, LIMIT)
    draft, growth = Mixture([table]), anywhere(30)
    grown(draft, tree, growth)
    assert len(table.seen) == capacity - len(PROMPT) + 1 and table.cache.room == 0
    while len(tree.trunk) < capacity:
        settle_a_miss(tree)
        grown(draft, tree, growth)
        assert table.seen[0] == tree.tip
        assert len(table.seen) == capacity - len(tree.trunk) + 1


SAMPLERS = [Sampler(1.0, seed=1), Sampler(0.7, top_p=0.9, seed=2),
            Sampler(1.3, top_k=4, seed=3)]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_likeliest_child_is_the_one_that_the_sampler_takes_if_draft_and_target_are_one(
        monkeypatch, unlearning, sampler):
    monkeypatch.setattr(mixture, "PRIOR_SHARPNESS", 1.0)
    table, tree = Table(), TokenTree(PROMPT, 24)
    read = 0
    for _ in written(Mixture([table]), table, tree, anywhere(20), sampler):
        for node in tree.nodes:
            children = tree.nodes[node].children
            if children and (node in tree.live or node == tree.tip):
                wanted = sampler(table.after(path(tree, node))[None],
                                 [tree.nodes[node].pos + 1])
                likeliest = max(children.values(), key=lambda child: tree.nodes[child].score)
                assert [tree.nodes[likeliest].token] == wanted
                read += 1

    assert read > 20


@pytest.mark.parametrize("sampler", [Sampler(), *SAMPLERS])
def test_who_proposed_a_guess_are_the_sources_that_guessed_its_token(sampler):
    left, right = Narrow([1, 2], "left"), Narrow([2, 5], "right")
    tree = TokenTree([1, 2, 6, 1], 9)  # the suffix 1 was followed by 2
    draft = Mixture([left, right], Suffix())
    draft.begin(sampler)
    at_once(draft.grow(tree, anywhere(9, VOCAB)))
    proposers = {tree.nodes[node].token: set(tree.nodes[node].proposals)
                 for node in tree.live}
    known = {1: {"left"}, 2: {"left", "right", "suffix"}, 5: {"right"}}
    assert proposers == known


def test_a_suffix_alone_guesses_what_followed_and_nothing_without_a_match():
    draft = Mixture([], Suffix())
    growth = anywhere(30, 2)
    assert not grown(draft, TokenTree([1, 2, 3], 99), growth).live
    draft.reset()
    tree = grown(draft, TokenTree(digits("9123123"), 20), growth)
    assert tuple(digits("9123123123123")) in paths(tree)
    assert {tuple(tree.nodes[node].proposals) for node in tree.live} == {("suffix",)}
    assert max(tree.nodes[node].pos for node in tree.live) == 19, "a certain path ends at the limit alone"


def test_a_request_that_is_over_leaves_no_guess():
    sampler, growth = Sampler(1.0, seed=5), anywhere(20)
    again, other = digits("12345123"), [6, 2, 3]  # 2 3 of the second text occurs only in the first
    used = Mixture([Table()], Suffix())
    fresh = Mixture([Table()], Suffix())
    used.begin(sampler)
    grown(used, TokenTree(again, LIMIT), growth)
    used.reset()
    trees = [grown(draft, TokenTree(other, LIMIT), growth) for draft in (used, fresh)]
    scores = [{tuple(path(tree, node)): tree.nodes[node].score
               for node in tree.live} for tree in trees]

    assert scores[0] == scores[1]
    assert not any("suffix" in tree.nodes[node].proposals
                   for tree in trees for node in tree.nodes[tree.tip].children.values())


@pytest.mark.parametrize("sources", ["table", "suffix", "both"])
def test_no_guess_stands_beyond_the_limit_and_none_is_made_of_a_text_that_is_full(sources):
    draft = Mixture([] if sources == "suffix" else [Table()], None if sources == "table" else Suffix())
    growth = anywhere(40)
    text = [2, 5] * 12
    for limit in range(len(text), len(text) + 4):
        tree = grown(draft, TokenTree(text, limit), growth)
        assert bool(tree.live) == (limit > len(text))
        assert all(tree.nodes[node].pos < limit for node in tree.live)
        draft.reset()


def test_no_guess_is_made_where_none_are_wished():
    draft = Mixture([Table()], Suffix())
    tree = TokenTree([2, 5] * 12, LIMIT)
    assert not at_once(draft.grow(tree, anywhere(0)))
    assert not tree.live


def test_what_nobody_names_may_win_by_the_mean_noise_of_a_token():
    draft = Mixture([], Suffix())
    draft.begin(Sampler(1.0, seed=4))
    outcomes = draft._outcomes([(3, 0.2), (5, 0.1)], 7)
    noise = gumbel(4, 7, 9)[[3, 5]].tolist()
    weights = [0.2 * math.exp(noise[0]), 0.1 * math.exp(noise[1]), 0.7 * math.exp(0.5772)]
    assert outcomes.probabilities(1.0) == pytest.approx([weight / sum(weights) for weight in weights])


def test_rules_that_draw_without_the_noise_of_a_position_are_guessed_without_it():
    draft = Mixture([], Suffix())
    draft.begin(Sampler(1.0, seed=4, rule="mss"))
    assert draft._outcomes([(3, 0.2)], 7).noise == [0.0, 0.0]


def test_settled_tokens_teach_how_sharp_the_target_is():
    table = Table()
    draft = Mixture([table])
    for _ in written(draft, table, TokenTree(PROMPT, 30), anywhere(20)):
        pass
    assert draft._blend.sharpness.value > PRIOR_SHARPNESS, "at temperature 0 the likeliest token is the right one"
