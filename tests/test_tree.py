"""The invariants of the token tree, after any sequence of operations."""
import math
import random
import sys
from itertools import count
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.tree import TokenTree, verify
from tests.checkpoints import refused
from tests.tiny import add_anywhere, judge

DEEDS = "add settle cut trim offer forget guess".split()
WORDS = st.lists(st.tuples(st.sampled_from(DEEDS),
                           st.integers(0, 10**6)), max_size=60)


def play(words):
    """Return a tree after some random operations, and all cuts in order."""
    tree, cuts = TokenTree([1, 2, 3], max_tokens=1000), []
    for word, number in words:
        rng = random.Random(number)
        if word == "add":
            add_anywhere(tree, rng, 6)
        elif word == "settle":
            tree.settle(rng.randrange(6))
        elif word == "cut":
            cuts.append(tree.cut(rng.randrange(1, 6), rng.randrange(1, 4)))
        elif word == "trim":
            tree.trim(rng.randrange(1, 12))
        elif word == "offer":
            parent = rng.choice([tree.tip, *sorted(tree.live)])
            scores = sorted((tree.nodes[parent].score - rng.random()
                             for _ in range(4)), reverse=True)
            tree.offer([(parent, token, score) for token, score in enumerate(scores)],
                       rng.randrange(1, 12), -3.0)
        elif word == "forget":
            tree.forget()
        else:
            judge(tree, rng.randrange(6))
    return tree, cuts


@given(WORDS)
def test_a_parent_is_older_than_its_child_and_one_position_before_it(words):
    tree, _ = play(words)
    for node in [*tree.trunk[1:], *tree.live]:
        assert tree.nodes[node].parent < node
        assert tree.nodes[node].pos == tree.nodes[tree.nodes[node].parent].pos + 1
        assert tree.nodes[node].score <= tree.nodes[tree.nodes[node].parent].score


@given(WORDS)
def test_cuts_send_each_node_once_and_no_node_before_its_parent(words):
    tree, cuts = play(words)
    sent = [node for cut in cuts for node in cut]
    assert len(sent) == len(set(sent))
    before = set()
    for node in sent:
        parent = tree.nodes[node].parent if node in tree.nodes else node  # a node that died since cannot be asked
        assert parent == node or parent in before
        before.add(node)


@given(WORDS)
def test_what_lives_hangs_on_the_tip_and_what_died_is_forgotten(words):
    tree, _ = play(words)
    for node in tree.live:
        while node in tree.live:
            node = tree.nodes[node].parent
        assert node == tree.tip
    assert set(tree.nodes) == set(tree.trunk) | tree.live
    assert tree.unsent_guesses <= tree.live


class PlainTree:
    """The same tree as a text and the paths of its guesses: a node is named by all tokens from the beginning to it."""

    def __init__(self, prompt, best_first):
        self.text, self.best_first = tuple(prompt), best_first
        self.unsent_text = [self.text[:end] for end in range(1, len(prompt) + 1)]
        self.scores = dict.fromkeys(self.unsent_text, 0.0)
        self.guesses, self.unsent = [], set()  # the oldest guess first
        self.accepted, self.num_misses, self.num_sent = [], -len(prompt), 0

    def add(self, parent, token, score):
        path, bounded = (*parent, token), min(score, self.scores[parent])
        if path in self.guesses:
            gain = max(0.0, bounded - self.scores[path])
            for raised in self.guesses:
                if raised[:len(path)] == path:
                    self.scores[raised] += gain
            return
        self.scores[path] = bounded
        self.guesses.append(path)
        self.unsent.add(path)

    def settle(self, token):
        parent, self.text = self.text, (*self.text, token)
        if self.text not in self.guesses:
            self.scores[self.text] = self.scores[parent]
            self.unsent_text.append(self.text)
        elif self.text in self.unsent:
            self.unsent_text.append(self.text)
        else:
            self.accepted.append(len(parent))
        self.keep(lambda path: len(path) > len(self.text) and path[:len(self.text)] == self.text)

    def keep(self, lives):
        self.guesses = [path for path in self.guesses if lives(path)]
        self.unsent &= set(self.guesses)

    def cut(self, max_rows, max_text_rows):
        chunks = -(-len(self.unsent_text) // max_text_rows) or 1
        size = -(-len(self.unsent_text) // chunks)
        rows, self.unsent_text = self.unsent_text[:size], self.unsent_text[size:]
        self.num_misses += len(rows)
        if self.unsent_text:
            return rows
        ranked = [path for path in self.guesses if path in self.unsent]
        if self.best_first:
            ranked.sort(key=lambda path: -self.scores[path])  # equal ones stay in the order of their age
        best = ranked[:max(0, max_rows - len(rows))]
        self.unsent -= set(best)
        self.num_sent += len(best)
        return rows + best

    def forget(self, least):
        weak = {path for path in self.unsent if self.scores[path] < least}
        self.keep(lambda path: not any(path[:end] in weak for end in range(1, len(path) + 1)))

    def trim(self, max_guesses, offered=()):
        scores = sorted([self.scores[path] for path in self.guesses] + list(offered))[::-1]
        if len(scores) <= max_guesses:
            return -math.inf
        self.forget(scores[max_guesses - 1])
        return scores[max_guesses - 1]

    def offer(self, guesses, max_guesses, least):
        new = [score for parent, token, score in guesses if (*parent, token) not in self.guesses]
        floor = max(self.trim(max_guesses, new), least)
        for parent, token, score in guesses:
            if score >= floor:
                self.add(parent, token, score)

    def state(self):
        scores = {path: self.scores[path] for path in self.guesses}
        return [*self.text], scores, self.unsent, self.unsent_text, self.accepted, self.num_misses, self.num_sent


def path_of(tree, node):
    """The tokens from the beginning to a node."""
    tokens = [tree.nodes[node].token]
    while tree.nodes[node].parent != node:
        node = tree.nodes[node].parent
        tokens.insert(0, tree.nodes[node].token)
    return tuple(tokens)


def state_of(tree):
    def paths(nodes):
        return [path_of(tree, node) for node in nodes]

    scores = {path_of(tree, node): tree.nodes[node].score for node in tree.live}
    return (tree.tokens, scores, set(paths(tree.unsent_guesses)), paths(tree.unsent_text), tree.accepted_positions,
            tree.num_misses, tree.num_sent_guesses)


@settings(max_examples=200)
@given(st.integers(0, 10**6), st.booleans())
def test_any_sequence_of_operations_does_what_it_does_to_a_list_of_paths(seed, best_first):
    chance = random.Random(seed)
    tree, plain = TokenTree([1, 2, 3], 40, best_first=best_first), PlainTree([1, 2, 3], best_first)
    for _ in range(chance.randrange(40)):
        deed = chance.choice(["add"] * 8 + ["settle", "cut", "cut", "trim", "forget", "offer", "offer"])
        node = chance.choice([tree.tip, *sorted(tree.live)])
        path, score, size = path_of(tree, node), -chance.randrange(1, 12) / 4, chance.randrange(1, 9)
        if deed == "add":
            token = chance.randrange(4)
            assert path_of(tree, tree.add(node, token, score)) == (*path, token)
            plain.add(path, token, score)
        elif deed == "settle":
            token = chance.randrange(4)
            tree.settle(token), plain.settle(token)
        elif deed == "cut":
            rows = [path_of(tree, each) for each in tree.cut(size, 2)]
            assert rows == plain.cut(size, 2)
        elif deed == "trim":
            assert tree.trim(size) == plain.trim(size)
        elif deed == "forget":
            tree.forget(score), plain.forget(score)
        else:
            offered = [(token, tree.nodes[node].score + score / 4 - token / 8) for token in range(4)]
            tree.offer([(node, *each) for each in offered], size, -2.0)
            plain.offer([(path, *each) for each in offered], size, -2.0)
        assert state_of(tree) == plain.state()

    assert set(tree.nodes) == {*tree.trunk, *tree.live}
    assert tree.num_unsent == len(plain.unsent) + len(plain.unsent_text)
    assert tree.room == 40 - len(plain.text)
    assert tree.horizon > max(tree.nodes)


def test_a_tree_that_begins_again_sends_its_text_again_and_counts_on():
    tree = TokenTree([1, 2], max_tokens=20)
    tree.num_verifications = 4
    for token in (5, 6, 7):
        tree.add(tree.tip, token, -0.5)
        tree.cut()
        tree.settle(token)
    tree.settle(8)
    tree.cut()
    assert (tree.accepted_positions, tree.num_misses, tree.num_sent_guesses) == ([2, 3, 4], 1, 3)

    again = tree.again(2, 4)
    assert again.tokens == [1, 2, 5, 6] and again.tip > tree.horizon and again.max_tokens == 20
    assert (again.accepted_positions, again.num_sent_guesses, again.num_verifications) == ([2, 3], 3, 4)
    assert again.cut() == again.trunk
    assert again.num_misses == 0, "both tokens behind the prompt were sent guesses"
    tree.skip(0)
    assert tree.again(2, 6).tokens == [1, 2, 5, 6, 7, 8]


def test_text_that_the_target_holds_is_not_sent():
    tree = TokenTree(range(7), max_tokens=20)
    tree.skip(5)
    assert tree.num_misses == -2 and tree.cut() == tree.trunk[5:]
    assert tree.num_misses == 0


def test_features_are_released_as_far_as_all_have_read_them_but_never_that_of_the_tip():
    tree = TokenTree(range(5), max_tokens=20)

    def features():
        return [tree.nodes[node].hidden for node in tree.trunk]

    for node in tree.trunk:
        tree.nodes[node].hidden = "feature"
    tree.release(2)
    assert features() == [None] * 2 + ["feature"] * 3
    tree.release(9)
    assert features() == [None] * 4 + ["feature"]
    tree.release(1)
    tree.settle(9)
    tree.release(9)
    assert features() == [None] * 6


def test_a_guess_that_the_law_excludes_is_not_sent_and_children_are_found_by_their_tokens():
    law = SimpleNamespace(allows=lambda tree, node, token: token != 7)
    tree = TokenTree([1], max_tokens=9, law=law)
    banned, allowed = (tree.add(tree.tip, token, -0.5) for token in (7, 8))
    assert tree.live == {banned, allowed} and tree.cut() == [tree.tip, allowed]
    assert [tree.child(tree.tip, token) for token in (7, 8, 9)] == [banned, allowed, None]
    assert tree.child(99, 7) is None


def test_verifications_are_counted_where_rows_came_back_since_the_last_one():
    tree = TokenTree([1], max_tokens=3)
    verify(tree)
    tree.has_unverified = True
    tree.nodes[tree.tip].target_token = 4
    assert verify(tree) == [4] and verify(tree) == [] and tree.num_verifications == 1
    for _ in range(2):
        tree.nodes[tree.tip].target_token = 4
        verify(tree)
    assert tree.tokens == [1, 4, 4], "there is no room for more"


def test_adding_twice_is_merging():
    tree = TokenTree([1], max_tokens=9)
    node = tree.add(tree.tip, 5, -1.0)
    assert tree.add(tree.tip, 5, -2.0) == node
    assert tree.nodes[node].score == -1.0
    assert tree.add(tree.tip, 5, -0.5) == node
    assert tree.nodes[node].score == -0.5
    assert len(tree.live) == 1


def test_an_offer_keeps_the_best_and_what_was_sent():
    tree = TokenTree([1], max_tokens=9)
    sent = tree.add(tree.tip, 2, -4.0)
    tree.cut()
    weak = tree.add(tree.tip, 3, -3.0)
    strong = tree.add(tree.tip, 4, -1.0)
    guesses = [(tree.tip, 4, -0.5), (strong, 5, -0.6),
               (strong, 6, -2.0), (strong, 7, -2.5)]
    taken = tree.offer(guesses, max_guesses=3, min_score=-9.0)

    assert [tree.nodes[node].token for node in taken] == [4, 5, 6]
    assert taken[0] == strong
    assert tree.live == {sent, *taken} and weak not in tree.nodes
    assert tree.nodes[strong].score == -0.5
    assert tree.offer([(strong, 8, -0.7)], max_guesses=9, min_score=-0.65) == []


def test_ids_go_on_from_request_to_request():
    ids = count()
    first = TokenTree([1, 2, 3], 9, ids)
    guess = first.add(first.tip, 4, -1.0)
    second = TokenTree([1, 2, 3], 9, ids)
    assert min(second.trunk) > guess


def test_verify_walks_through_hits_and_stops_at_a_miss():
    tree = TokenTree([1, 2], max_tokens=20)
    a = tree.add(tree.tip, 5, -0.1)
    b = tree.add(a, 6, -0.2)
    tree.add(a, 7, -0.3)
    tree.cut()
    for node, token in {tree.tip: 5, a: 6, b: 9}.items():
        tree.nodes[node].target_token = token
    assert verify(tree) == [5, 6, 9]
    assert tree.tokens == [1, 2, 5, 6, 9] and not tree.live
    assert list(tree.unsent_text) == [tree.tip] and tree.num_misses == 0
    assert tree.cut() == [tree.tip] and tree.num_misses == 1


def test_verify_waits_where_the_answer_is_not_known():
    tree = TokenTree([1, 2], max_tokens=20)
    a = tree.add(tree.tip, 5, -0.1)
    tree.cut()
    assert judge(tree, 5) == [5] and tree.tip == a
    assert verify(tree) == [] and not tree.unsent_text


def test_cut_sends_text_in_chunks_and_then_the_best_guesses():
    tree = TokenTree(range(7), max_tokens=20)
    assert tree.cut(2, 4) == tree.trunk[:4]
    low = tree.add(tree.tip, 1, -3.0)
    high = tree.add(tree.tip, 2, -1.0)
    deep = tree.add(high, 3, -2.0)
    assert tree.cut(5, 4) == [*tree.trunk[4:], high, deep]
    assert tree.cut(5, 4) == [low] and tree.cut(5, 4) == []


@pytest.mark.parametrize("length, rows", [(64, [64]), (65, [33, 32]),
                                          (77, [39, 38]), (130, [44, 43, 43])])
def test_text_that_needs_several_chunks_is_cut_into_nearly_equal_ones(length, rows):
    tree, chunks = TokenTree(range(length), max_tokens=200), []
    while chunk := tree.cut(1, 64):
        chunks.append(chunk)
    assert [len(chunk) for chunk in chunks] == rows and sum(chunks, []) == tree.trunk


def test_an_empty_prompt_is_refused():
    with refused("the prompt is empty"):
        TokenTree([], max_tokens=5)


def test_a_turn_costs_no_more_in_a_long_text():
    """Count executed lines of the tree's module, instead of time, for the same operations at 100 and 4,000 tokens."""
    def turn(tree):
        for rank in range(8):
            tree.add(tree.add(tree.tip, rank, -1.0 - rank), 0, -2.0 - rank)
        tree.cut(16, 64)
        judge(tree, 3)
        tree.release(len(tree.trunk))

    def lines(length):
        tree, steps = TokenTree(range(length), max_tokens=10**6), 0
        tree.cut()
        turn(tree)

        def tracer(frame, event, arg):
            nonlocal steps
            if frame.f_globals is vars(sys.modules[TokenTree.__module__]):
                steps += 1
            return tracer
        sys.settrace(tracer)
        turn(tree)
        sys.settrace(None)
        return steps

    assert lines(100) == lines(4000)


def test_a_guess_that_scores_better_raises_those_below_it_by_as_much():
    tree = TokenTree([1], max_tokens=100)
    copied = [tree.add(tree.tip, 10, -5.0, "suffix")]
    for token, score in ((11, -5.25), (12, -5.5)):
        copied.append(tree.add(copied[-1], token, score, "suffix"))
    other = tree.add(copied[0], 20, -7.0)

    assert tree.add(tree.tip, 10, -6.0, "eagle") == copied[0]
    assert [tree.nodes[node].score for node in copied] == [-5.0, -5.25, -5.5]

    assert tree.add(tree.tip, 10, -0.5, "eagle") == copied[0]
    assert [tree.nodes[node].score for node in [*copied, other]] == [-0.5, -0.75, -1.0, -2.5]
    assert tree.nodes[copied[0]].proposals == {"suffix": -5.0, "eagle": -0.5}
