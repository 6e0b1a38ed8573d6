"""A cascade of small models: the larger one verifies the smaller one's chain in one pass, and only its scores count."""
from __future__ import annotations

import pytest

from config.cli import parse
from config.run_config import Growth
from model.drafts.cascade import AHEAD, Cascade
from model.drafts.mixture import Mixture
from model.drafts.network import read_all
from model.sample import Sampler
from model.tree import TokenTree
from tests.checkpoints import refused
from tests.saved import here, save_model
from tests.test_mixture import grown
from tests.tiny import CONFIG, TINY

pytestmark = pytest.mark.usefixtures("unlearning")
GROWTH = Growth(60, 99, 3, anywhere=True)


def a_level(draft, tree, growth):
    """Grow one level, and return the source and the number of rows of each reading."""
    steps, said, readers = draft.grow(tree, growth), None, []
    while True:
        try:
            reading = steps.send(said)
        except StopIteration:
            return readers
        readers.append((reading.draft.source, len(reading.token_T)))
        said, = read_all([reading])


def tree_of(prompt, limit=200):
    tree = TokenTree(prompt, limit)
    tree.unsent.clear()
    return tree


def scores(tree):
    """Return the score of each guess, by its path."""
    found = {}
    for node in sorted(tree.live):
        above = found.get(tree.nodes[node].parent, ((), 0))[0]
        found[node] = (*above, tree.nodes[node].token), tree.nodes[node].score
    return dict(found.values())


def test_a_right_chain_is_verified_in_one_pass_of_the_larger_model():
    small, large = TINY.twin(), TINY.twin()
    small.source = "small"
    tree, sharp = tree_of([5, 17, 40, 3]), TINY.lm_head
    small.lm_head = large.lm_head = lambda out: 30 * sharp(out)  # both are sure, and of the same
    readers = a_level(Mixture([Cascade(large, small)]),
                      tree, Growth(80, 99, 1, anywhere=True))
    assert [name for name, _ in readers].count("model") == 1
    assert readers[-1] == ("model", 4 + AHEAD)
    assert len(tree.live) == AHEAD + 1, "every level that the larger model has read is a guess"
    text = TINY.text([5, 17, 40, 3], AHEAD + 1, Sampler())
    assert next(path for path in scores(tree) if len(path) == AHEAD + 1) == tuple(text)


def test_what_the_larger_model_does_not_guess_is_dropped_with_all_behind_it():
    small, large = TINY.twin(), TINY.twin()
    small.lm_head = lambda out: -30 * TINY.lm_head(out)  # sure, and wrong
    tree = tree_of([5, 17, 40, 3])
    a_level(Mixture([Cascade(large, small)]), tree, GROWTH)
    alone = tree_of([5, 17, 40, 3])
    a_level(Mixture([TINY.twin()]), alone, GROWTH)
    assert scores(tree) == pytest.approx(scores(alone)), "the tree is that of the larger model alone"


@pytest.mark.parametrize("noise", [0.02, 0.3])
def test_every_score_is_the_larger_model_s(noise):
    row = tree_of(list(range(5, 20)))
    alone = tree_of(list(range(5, 20)))
    small = TINY.twin(noise)
    small.lm_head = lambda out: 3 * TINY.lm_head(out)
    grown(Mixture([Cascade(TINY.twin(), small)]),
          row, Growth(20, 3, 3, anywhere=True))
    grown(Mixture([TINY.twin()]), alone, Growth(400, 30, 3, anywhere=True))
    known = scores(alone)
    assert scores(row).keys() & known.keys() and all(
        score == pytest.approx(known[path], abs=1e-9)
        for path, score in scores(row).items() if path in known)
    assert min(scores(row).values()) > -40, "a guess was left that nobody verified"


def test_what_a_request_has_of_a_row_is_its_own_and_is_forgotten():
    draft = Mixture([TINY.cascade(0.05, 0.02)])
    one = tree_of([5, 17, 40, 3])
    two = tree_of([5, 17, 40, 3])
    again = tree_of([5, 17, 40, 3])
    twin = draft.another()
    assert a_level(draft, one, GROWTH) == a_level(twin, two, GROWTH)
    draft.reset()
    assert a_level(draft, again, GROWTH)
    assert scores(again) == scores(one) == scores(two)


# Commands


def test_folders_may_stand_in_the_name_of_the_draft():
    typed = parse(["draft=cascade:a,b+suffix"])
    assert (typed.draft, typed.ssm) == ("cascade+suffix", parse(["draft=ssm", "ssm=a,b"]).ssm)
    assert parse(["draft=model:small"]) == parse(["draft=model", "draft_dir=small"])
    assert parse(["draft=eagle:head+suffix"]) == parse(["draft=eagle+suffix", "eagle_dir=head"])
    assert parse(["draft=ssm:a,b"]) == parse(["draft=ssm", "ssm=a,b"])
    with refused("cascade:a,b and ssm=c both name folders: give one of them"):
        parse(["draft=cascade:a,b", "ssm=c"])


@pytest.mark.parametrize("words, said", [
    (["draft=cascade"], "draft=cascade needs several small models, the smallest first: add ssm=DIR,DIR"),
    (["draft=cascade", "ssm=a"], "needs several small models"),
    (["draft=cascade:a,b", "ssm_ranks=true"], "but those of draft=cascade take turns: leave it out"),
])
def test_what_a_row_of_models_cannot_do_is_refused(words, said):
    with refused(said):
        parse([f"base_dir={CONFIG.vocab}", *words])


def test_a_row_writes_the_text_of_ar(tmp_path, capsys):
    save_model(tmp_path / "base")
    row = f"draft=cascade:{tmp_path / 'base'},{tmp_path / 'base'}"
    texts = []
    for words in (["pipeline_type=ar"], [row], [f"{row}+suffix", "pipeline_type=streaming"]):
        assert here(f"base_dir={tmp_path / 'base'}", "stages=0+2+2", "prompt=what is it?",
                    "max_new_tokens=12", *words) == 0
        texts.append(capsys.readouterr().out.strip().splitlines()[0])
    assert texts[0] and len(set(texts)) == 1


@pytest.mark.parametrize("policy", ["static", "opt", "expansion"])
def test_a_row_grows_no_tree_level_by_level(tmp_path, capsys, policy):
    save_model(tmp_path / "base")
    row = f"draft=cascade:{tmp_path / 'base'},{tmp_path / 'base'}"
    assert here(f"base_dir={tmp_path / 'base'}", "stages=1", "prompt=what is it?", row, "pipeline_type=serial",
                f"policy={policy}") == 2
    assert f"policy={policy} grows trees level by level" in capsys.readouterr().err
