"""How often a draft is right by the depth of its own guesses, and the picture of a tree."""
from __future__ import annotations

import pytest
import torch

from config.run_config import Growth
from eval.bench.draft import BEST, DEPTHS, draw, hits, table, text_art
from eval.self_feeding import read_text
from model.drafts.network import TreeDraft, at_once
from model.sample import Sampler
from model.tree import TokenTree
from scripts import bench
from tests.saved import models
from tests.tiny import CONFIG, TINY, pipeline

PROMPT = [5, 17, 40, 3, 28]


class Failing(TreeDraft):
    """A draft that expects every token to be one more than the last; behind two guesses of its own only in its third
    place, and behind four not at all."""

    def __init__(self):
        super().__init__(CONFIG.cache(1, 400, torch.empty(0)))

    network = "one"

    def features(self, tree, fresh):
        return torch.zeros(len(fresh), 2)

    def logits(self, out_TD):
        return out_TD

    def read(self, token_T, feature_TD, pos_T, cache):
        return torch.stack((feature_TD[:, 0] + 1, token_T.float()), -1)  # rows read since the target's features, token

    def guess(self, out_TD, width):
        guesses = []
        for rows, token in out_TD.tolist():
            own, after = rows - 1, token + 1
            guesses.append([after, 90, 91] if own < 2 else [90, 91, after] if own < 4 else [90, 91, 92])
        return torch.zeros(len(guesses), 3), torch.tensor(guesses)


def test_hits_are_counted_by_the_guesses_of_its_own_that_a_draft_has_read():
    tree = TokenTree(range(10, 50), limit=60)
    found = hits(Failing(), tree, prompt=4)
    tries, *right = found.T
    assert tries.tolist() == [36 - depth for depth in DEPTHS], "from the prompt's last token to the text's last"
    assert [(count == tries).tolist() for count in right] == [
        [True, True, False, False, False, False, False], *[[True, True, True, False, False, False, False]] * 2]
    assert right[0].tolist() == [36, 35, 0, 0, 0, 0, 0] and found[3:, 1:].sum() == 0
    got = table({"failing": found, "nothing": torch.zeros_like(found)})
    assert "failing, best 3                    100.0   100.0   100.0     0.0     0.0     0.0     0.0" in got
    assert "nothing, best 1                        -" in got


def test_a_draft_that_is_the_target_is_always_right_at_every_depth():
    text = PROMPT + TINY.text(PROMPT, 45, Sampler())
    with pipeline(TINY, 2, "serial", TINY.twin()) as decoder:
        found = hits(decoder.draft, read_text(decoder, text), len(PROMPT))
    assert found[:, 0].tolist() == [46 - depth for depth in DEPTHS]
    assert all(torch.equal(found[:, column], found[:, 0]) for column in range(1, 1 + len(BEST)))


@pytest.mark.parametrize("kind", ["eagle", "twin"])
def test_without_guesses_of_its_own_a_draft_guesses_as_it_grows_the_first_level_of_a_tree(kind):
    text = PROMPT + TINY.text(PROMPT, 12, Sampler())
    right = dict.fromkeys(BEST, 0)
    draft = TINY.eagle() if kind == "eagle" else TINY.twin(noise=0.1)
    with pipeline(TINY, 2, "serial", draft) as decoder:
        found = hits(decoder.draft, read_text(decoder, text), len(PROMPT))
        for length in range(len(PROMPT), len(text)):
            for best in BEST:
                tree = read_text(decoder, text[:length - 1])
                assert tree.tip == tree.trunk[length - 1] and at_once(draft.grow(tree, Growth(best, 0, best)))
                right[best] += text[length] in tree.nodes[tree.tip].children
                draft.reset()
    assert found[0, 0] == 13 and right[10] > 0
    last = hits_of_the_last(draft, text)
    assert [right[best] for best in BEST] == [total - one for total, one in zip(found[0, 1:].tolist(), last)]


def hits_of_the_last(draft, text):
    """The hits on the token behind the text alone."""
    with pipeline(TINY, 2, "serial", draft) as decoder:
        return hits(draft, read_text(decoder, text), len(text))[0, 1:].tolist()


def test_a_tree_is_drawn_with_the_probabilities_of_its_paths(tmp_path):
    tree = TokenTree([7], limit=9)
    half = tree.add(tree.tip, 1, -0.6931472)
    tree.add(tree.tip, 2, -1.3862944)
    tree.add(half, 3, -1.3862944)
    words = {7: "a", 1: "b", 2: "$c", 3: "d"}.get
    assert text_art(tree, words) == (
        " 1.000       7  'a'\n+-  0.500       1  'b'\n|  +-  0.250       3  'd'\n+-  0.250       2  '$c'")
    for name, begin in (("tree.png", b"\x89PNG"), ("tree.svg", b"<?xml")):
        draw(tree, words, "a tree $", str(tmp_path / name))
        assert (tmp_path / name).read_bytes().startswith(begin)


def test_the_command_prints_a_table_and_draws_a_tree(tmp_path, capsys):
    saved = models(tmp_path / "saved")
    (tmp_path / "qa.jsonl").write_text('{"question_id": 1, "turns": ["who are you?"]}')
    assert bench.main(["draft", f"model_dir={saved / '0+2+2'}", f"drafts=eagle,model:{saved / 'base'}", "sets=qa",
                       f"data={tmp_path}", "question_end=1", "template=none", "processes=false", "dtype=float64",
                       "max_new_tokens=6", f"picture={tmp_path / 'tree.svg'}"]) == 0
    printed = capsys.readouterr().out
    assert f"model:{saved / 'base'}, best 1" in printed.replace("\n", "") and "eagle, best 10" in printed
    assert "a tree of eagle: " in printed and (tmp_path / "tree.svg").is_file()


@pytest.mark.parametrize(("words", "sentence"), [
    (["picture=tree.pdf"], "picture=tree.pdf is no picture: name a file that ends in .png or .svg"),
    (["draft=none"], "the draft none has no guesses of its own"), (["profile=wifi"], "leave profile and trace out"),
    (["temperature=1"], "leave temperature and prompt_ids out"), (["sets=moon"], "there is no data set moon")])
def test_what_cannot_be_measured_is_reported_in_one_sentence(words, sentence, capfd):
    assert bench.main(["draft", "processes=false", *words]) == 2
    printed = capfd.readouterr().err.splitlines()
    assert sum(line.startswith("flowspec: ") and sentence in line for line in printed) == 1
