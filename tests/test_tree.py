"""The invariants of the token tree, after any sequence of operations."""
import random
import sys
from itertools import count

import pytest
from hypothesis import given
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
