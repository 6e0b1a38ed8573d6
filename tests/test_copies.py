"""Where the text is surely copied only the suffix is asked, and networks are read as soon as it is not."""
import math
import random

import pytest

from config.run_config import Growth
from model.drafts.mixture import PRIOR_SHARPNESS, Blend, Mixture, confidence, starting_weights
from model.drafts.network import at_once
from model.drafts.suffix import Suffix
from model.tree import TokenTree
from tests.test_mixture import LIMIT, VOCAB, Table, anywhere, grown, paths, settle_a_miss
from tests.tiny import digits

SOURCE = [1, 5, 0, 2, 2, 6, 4, 0, 3, 1, 1, 4, 6, 5, 5, 3, 2, 0, 0, 6, 1, 3]  # no three tokens of it occur twice


def copying(length, limit=LIMIT, source=SOURCE):
    """A tree whose text ends with a match of so many tokens."""
    return TokenTree([*source, 4, *source[:length]], limit)


def long_source():
    """A text of 160 random tokens."""
    return random.Random(0).choices(range(VOCAB), k=160)


def chain(tree):
    """Return how many of the right copies follow the tip."""
    node, num_copies = tree.tip, 0
    while (node := tree.child(node, [*SOURCE, 4][(tree.nodes[node].pos + 1) % 23])) is not None:
        num_copies += 1
    return num_copies


@pytest.mark.parametrize("length, expected", [(1, .03), (4, .35), (7, .6), (8, .8), (9, 9 / 11), (60, 60 / 62)])
def test_a_match_goes_on_by_its_length(length, expected):
    assert confidence(length) == expected


def test_copies_share_what_a_match_of_their_length_is_worth():
    assert Blend().copies([(5, .9)], 60) == [(5, 60 / 62)]
    assert dict(Blend().copies([(5, .6), (6, .3)], 4)) == pytest.approx({5: .35 * 2 / 3, 6: .35 / 3})


@pytest.mark.parametrize("hits, misses", [(40, 0), (0, 40), (20, 20)])
def test_hits_and_misses_of_a_length_change_the_copies_of_that_length_alone(hits, misses):
    blend = Blend()
    for token in [5] * hits + [6] * misses:
        blend.learn_copies([(5, .9)], 3, token)
    [(_, probability)] = blend.copies([(5, .9)], 3)
    if not misses:
        assert probability > .75
    elif not hits:
        assert probability < .1
    assert blend.copies([(5, .9)], 4) == [(5, .35)]


# By hand, with `confidence` alone: a chain of sure copies ends where the product of its probabilities is below .2.
# After a match of 7 it is .6 * .8 * 9/11 * 10/12 * 11/13 * 12/14 * 13/15 = .206 for 7 copies, so a level adds 1/8.
# After one of 8 it is 8 * 9 / (18 * 19) = .21 for 10 copies: 1/11. So networks are read after 7, and not after 8.
@pytest.mark.parametrize("length, copies, is_read", [(4, 1, True), (7, 7, True), (8, 10, False), (9, 11, False)])
def test_networks_are_read_where_a_level_adds_a_tenth_of_a_token(unlearning, length, copies, is_read):
    table, tree = Table(), copying(length)
    draft = Mixture([table], Suffix())
    sure = Mixture([Table()], Suffix())
    assert sure.offer_sure(resting := copying(length), Growth(80, 6, 3)) and chain(resting) == copies
    assert at_once(draft.grow(tree, anywhere(60)))
    assert table.seen == ([tree.tip] if is_read else [])
    assert chain(tree) >= copies


def test_a_match_of_sixty_tokens_is_one_chain_of_more(unlearning):
    tree = copying(60, 999, long_source())
    assert Mixture([Table()], Suffix()).offer_sure(tree, Growth(200, 6, 3))
    assert len(tree.live) == 74  # 60 * 61 / (134 * 135) is .202, and with one more copy .199


def test_copies_up_to_the_end_of_the_text_need_no_network(unlearning):
    for length, is_read in ((7, True), (18, False)):  # by hand: (1 - .6) / 2 = .2, (1 - .9) / 2 = .05
        table, tree = Table(), copying(length, limit=23 + length + 1)
        at_once(Mixture([table], Suffix()).grow(tree, anywhere(60)))
        assert bool(table.seen) == is_read and len(tree.nodes[tree.tip].children) >= 1


def test_a_text_that_is_copied_no_longer_brings_the_networks_back_at_the_next_miss():
    table, tree = Table(), copying(9)
    draft, growth = Mixture([table], Suffix()), anywhere(60)
    for token in SOURCE[9:15]:
        at_once(draft.grow(tree, growth))
        assert table.seen == [] and tree.child(tree.tip, token) is not None
        tree.settle(token)

    settle_a_miss(tree)
    assert at_once(draft.grow(tree, growth)) and table.seen == [tree.tip]


def test_a_prompt_that_repeats_itself_teaches_what_shorter_matches_are_worth():
    prompt = [token for separator in (4, 6, 2, 3, 0, 5) for token in (*SOURCE, separator, separator)]
    tree = TokenTree([*prompt, 4, *SOURCE[:7]], 999)
    draft = Mixture([Table()], Suffix())
    assert draft.offer_sure(tree, Growth(200, 6, 3)) and len(tree.live) > 10  # 7 without the lessons
    likeliest = max(tree.nodes[child].score for child in tree.nodes[tree.tip].children.values())
    assert likeliest > math.log(.65)


@pytest.mark.parametrize("networks, length, probability", [([], 3, .6), ([], 4, .65), ([Table()], 4, .35)])
def test_a_copy_begins_with_more_confidence_where_no_network_guesses(unlearning, networks, length, probability):
    tree = copying(length)
    assert Mixture(networks, Suffix()).offer_sure(tree, Growth(80, 6, 3))
    [copy] = tree.nodes[tree.tip].children.values()
    assert tree.nodes[copy].score == pytest.approx(math.log(probability))


def test_a_copy_that_is_rather_wrong_than_right_is_not_worth_a_row_of_a_rest(unlearning):
    assert not Mixture([], Suffix()).offer_sure(copying(1), Growth(80, 6, 3))  # .3 of a match of one token


def test_a_copy_alone_scores_what_its_match_is_worth(unlearning):
    tree = copying(7)
    Mixture([Table()], Suffix()).offer_sure(tree, Growth(80, 6, 3))
    [copy] = tree.nodes[tree.tip].children.values()
    assert tree.nodes[copy].score == pytest.approx(math.log(.6))


def test_copies_that_fail_again_and_again_are_trusted_no_longer():
    reads = []
    for failures in range(0, 40, 8):
        table, tree = Table(), copying(9)
        draft = Mixture([table], Suffix())
        for _ in range(failures):
            draft._blend.learn_copies([(1, .9)], 9, 2)
        at_once(draft.grow(tree, anywhere(60)))
        reads.append(bool(table.seen))
    assert not reads[0] and reads[-1] and reads == sorted(reads)


def test_networks_that_were_not_read_keep_their_weights():
    draft, tree = Mixture([Table()], Suffix()), copying(9)
    for token in SOURCE[9:20]:
        at_once(draft.grow(tree, anywhere(60)))
        tree.settle(token)
    at_once(draft.grow(tree, anywhere(60)))
    assert draft._blend.weights(["suffix", "table"], 8) == starting_weights(["suffix", "table"], 8)
    assert draft._blend.sharpness.value == PRIOR_SHARPNESS


def test_copies_are_offered_at_once_where_a_level_is_not_worth_its_time(unlearning):
    table, tree = Table(), copying(7, 999, long_source())
    draft = Mixture([table], Suffix())
    assert at_once(draft.grow(tree, anywhere(200), lambda expected_tokens: False)) and table.seen == []
    # 58 copies, as .6 * .8 * 9 * 10 / (65 * 66) is .0101, and with one more .0098. The suffix reads the last one, a
    # match of 65, after which 80 are sure: 65 * 66 / (145 * 146) is .203, and with one more .1999.
    assert len(tree.live) == 58 + 80


class Unready(Table):
    """A network that cannot read the tip yet."""

    def expand(self, tree, nodes, width):
        yield from ()


@pytest.mark.parametrize("network, is_worth", [(Unready, True), (Table, False)])
@pytest.mark.parametrize("seed", range(4))
def test_where_networks_are_not_read_a_tree_is_that_of_the_suffix_alone(seed, network, is_worth):
    text = random.Random(seed).choices(range(VOCAB), k=40)
    tree, draft = TokenTree(text, LIMIT), Mixture([network()], Suffix())
    while at_once(draft.grow(tree, anywhere(30), lambda expected_tokens: is_worth)):
        pass
    tree_of_suffix = grown(Mixture([], Suffix()), TokenTree(text, LIMIT), anywhere(30))
    assert paths(tree) == paths(tree_of_suffix) and len({tree.nodes[node].parent for node in tree.live}) > 5


def test_every_token_of_a_text_teaches_what_a_match_before_it_was_worth():
    lessons, suffix = [], Suffix()
    suffix.settle(TokenTree(digits("121231"), 9), lambda *lesson: lessons.append(lesson))
    assert lessons == [([(2, .9)], 1, 2), ([(1, .9)], 2, 3)]
