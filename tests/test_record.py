"""The record of a plan as a file for other programs: its documented form, its reader and accepted lengths from it."""
from __future__ import annotations

import json
import re

import pytest

from config.presets import ROOT
from config.run_config import Growth
from eval.plan.record import NetworkTraits, ReplayedBlock, Written, _table, accept_lengths, read_record
from eval.recorded import save
from eval.self_feeding import read_text, unrolled
from model.drafts.mixture import Mixture
from model.drafts.network import at_once
from model.sample import Sampler
from model.tree import TokenTree
from tests.tiny import DEEP, TINY, pipeline

TEXT = [7, 8, 9, 7, 8, 9]
PROMPT = [5, 17, 40, 3, 28]


def listed(token):
    """One place at one depth: the likeliest token and another, with log-probabilities."""
    return [[token, 3], [-0.1, -2.5]]


def by_depth(*right):
    """For each place whether the guess is right at depth 0, and at all deeper ones."""
    return [[listed(token if shallow else 1), listed(token if deep else 1)]
            for token, (shallow, deep) in zip(TEXT, right)]


BOTH, SHALLOW, NEITHER = (True, True), (True, False), (False, False)
TABLE = by_depth(BOTH, BOTH, BOTH, SHALLOW, BOTH, NEITHER)


def test_a_record_is_read_as_it_was_written_and_not_if_it_was_changed(tmp_path):
    path = tmp_path / "record.json"
    content = {"answers": [{"prompt": [1, 2], "text": TEXT, "guesses": {"eagle": TABLE}}],
               "networks": {"eagle": ["eagle", 1, True]}, "vocab": 10, "ends": [2], "layers": 8}
    save(str(path), {"sets": "qa"}, content)
    book = read_record(str(path))
    assert book.answers == [Written([1, 2], TEXT, {"eagle": TABLE})]
    assert book.networks["eagle"] == ("eagle", 1, True, 0)
    assert (book.vocab, book.ends, book.layers) == (10, [2], 8)
    shown = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
    assert set(json.loads(path.read_text())) == set(re.findall(r"^ +- `(\w+)`:", shown, re.M))
    path.write_text(path.read_text().replace("10", "11"))
    for name in (path, tmp_path / "none.json"):
        with pytest.raises(ValueError, match="traces="):
            read_record(str(name))


@pytest.mark.parametrize("guesses, lengths", [(0, [1] * 5),
                                              (1, [2, 2, 1]),
                                              (2, [3, 2]), (9, [3, 2])])
def test_accepted_lengths_are_those_of_a_chain_verified_whole(guesses, lengths):
    """Behind the prefill's token two guesses are right, and the third, on two of its own, is wrong."""
    assert accept_lengths(Written([1, 2], TEXT, {"eagle": TABLE}), "eagle", guesses) == lengths


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_block_is_recorded_and_replayed_as_it_guesses(temperature):
    sampler, prompt = Sampler(temperature, seed=4), [5, 17, 40, 3]
    text = DEEP.text(prompt, 14, sampler)
    with pipeline(DEEP, 2, "serial", Mixture([DEEP.block()])) as decoder:
        table = _table(decoder, DEEP.block(), prompt, text, sampler)
        tree = read_text(decoder, [*prompt, *text])
        features = [tree.nodes[node].hidden for node in tree.trunk]
    assert [len(depths) for depths in table] == [1, 2, 3, 4, *[5] * 10]
    replayed = ReplayedBlock(NetworkTraits("dflash", 0, False, 6), 64)
    replayed.open(len(prompt), table)
    for known in (0, 1, 6):
        said = []
        for draft in (DEEP.block(), replayed):
            tree = TokenTree([*prompt, *text[:known]], 99)
            for node, feature in zip(tree.trunk[:-1], features):
                tree.nodes[node].hidden = feature
            draft.reset()
            draft.begin(sampler)
            [guesses] = at_once(draft.expand(tree, [tree.tip], 3))
            node, found = tree.tip, [guesses]
            for token in text[known:known + 4]:
                node = tree.add(node, token, -1.0)
                found.append(draft.unrequested(tree, node, 3))
            said.append(found)
        for ours, theirs in zip(*said):
            assert [token for token, _ in ours] == [token for token, _ in theirs]
            assert [chance for _, chance in ours] == pytest.approx([chance for _, chance in theirs])


def test_a_draft_that_is_the_target_is_always_right_at_every_depth():
    text, counted = PROMPT + TINY.text(PROMPT, 45, Sampler()), [0] * 33
    with pipeline(TINY, 2, "serial", TINY.twin()) as decoder:
        draft, tree = decoder.draft, read_text(decoder, text)
        for depth, places, out_TD in unrolled(draft, tree, len(PROMPT), 32):
            _, guess_TW = draft.guess(draft.logits(out_TD), 1)
            assert guess_TW[:, 0].tolist() == [tree.tokens[place + 1] for place in places]
            counted[depth] += len(places)
    assert counted == [46 - depth for depth in range(33)]


@pytest.mark.parametrize("kind", ["eagle", "twin"])
def test_without_guesses_of_its_own_a_draft_guesses_as_it_grows_the_first_level_of_a_tree(kind):
    text = TINY.text(PROMPT, 12, Sampler())
    draft = TINY.eagle() if kind == "eagle" else TINY.twin(noise=0.1)
    with pipeline(TINY, 2, "serial", draft) as decoder:
        table = _table(decoder, draft, PROMPT, text, Sampler())
        for place, depths in enumerate(table[1:], 1):
            tree = read_text(decoder, [*PROMPT, *text[:place - 1]])
            assert tree.tokens == [*PROMPT, *text[:place]]
            assert at_once(draft.grow(tree, Growth(4, 0, 4)))
            grown = {tree.nodes[node].token for node in tree.nodes[tree.tip].children.values()}
            assert grown == set(depths[0][0][:4])
            draft.reset()
