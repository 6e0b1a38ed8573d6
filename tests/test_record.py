"""The record of a plan as a file for other programs: its documented form, its reader and accepted lengths from it."""
from __future__ import annotations

import json
import re

import pytest

from config.presets import ROOT
from eval.plan.record import Written, accept_lengths, read_record
from eval.recorded import keep

TEXT = [7, 8, 9, 7, 8, 9]


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
    keep(str(path), {"sets": "qa"}, content)
    book = read_record(str(path))
    assert book.answers == [Written([1, 2], TEXT, {"eagle": TABLE})]
    assert book.networks["eagle"] == ("eagle", 1, True) and (book.vocab, book.ends, book.layers) == (10, [2], 8)
    shown = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
    assert set(json.loads(path.read_text())) == set(re.findall(r"^ +- `(\w+)`:", shown, re.M))
    path.write_text(path.read_text().replace("10", "11"))
    for name in (path, tmp_path / "none.json"):
        with pytest.raises(ValueError, match="traces="):
            read_record(str(name))


@pytest.mark.parametrize("guesses, lengths", [(0, [1] * 5), (1, [2, 2, 1]), (2, [3, 2]), (9, [3, 2])])
def test_accepted_lengths_are_those_of_a_chain_verified_whole(guesses, lengths):
    """Behind the prefill's token two guesses are right, and the third, on two of its own, is wrong."""
    assert accept_lengths(Written([1, 2], TEXT, {"eagle": TABLE}), "eagle", guesses) == lengths
