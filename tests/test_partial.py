"""Partial features (SPD): the reports of stages on rows under way, and the draft that reads them."""
from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from model.drafts.head_files import fit_head
from model.drafts.network import at_once
from model.drafts.partial import PartialDraft, way_to
from model.sample import Sampler
from model.tree import TokenTree
from model.weights.checkpoint import Checkpoint
from pipeline.answers import Request
from pipeline.link import Peers
from pipeline.messages import Features, Prune, Segment
from pipeline.requests import RequestTarget
from pipeline.stage import Stage
from pipeline.trace import read
from tests.checkpoints import refused
from tests.saved import FORM, here, save_model
from tests.tiny import CONFIG, DEEP, pipeline, weights
from train.eagle.partial import partial_features, stage_ends

IDS = [5, 17, 40, 3, 28, 11]
WIDE = 4 * CONFIG.hidden  # of the features of all layers that the head of DEEP reads
BASE = {**FORM, "num_hidden_layers": 8}
SAID = {**FORM, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "fc_norm": True,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 5, 7], "aux_layer_ids_are": "inputs", "partial_features": True}


def publish(folder, **more):
    """Write a head to a folder as the training does."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**SAID, **more}))
    held = weights(DEEP.partial().network, seed=7)
    del held["embed_tokens.weight"]
    save_file(held, folder / "model.safetensors")


def a_tree(*reported):
    """Return a tree with features of its text, and a chain below it, of which stages have reported these numbers of
    layers, from the tip on; and the chain."""
    tree = TokenTree(IDS, 99)
    tree.unsent_text.clear()
    torch.manual_seed(5)
    for node in tree.trunk[:-1]:
        tree.nodes[node].hidden = torch.randn(WIDE, dtype=torch.float64)
    node, chain = tree.tip, []
    for place, layers in enumerate(reported):
        if layers:
            tree.nodes[node].partial = torch.randn(layers * CONFIG.hidden, dtype=torch.float64)
        node = tree.add(node, 7 + place, -1.0 - place)
        chain.append(node)
    return tree, chain


def plainly(tree, chain):
    """Return the logits `[T, V]` after text and chain from one causal pass over pairs; unreported layers are 0."""
    head = DEEP.partial().network
    nodes = [*tree.trunk[1:], *chain]
    before = [tree.nodes[tree.nodes[node].parent] for node in nodes]
    feature_TN = torch.zeros(len(nodes), WIDE, dtype=torch.float64)
    for row, node in enumerate(before):
        found = node.partial if node.hidden is None else node.hidden
        if found is not None:
            feature_TN[row, :len(found)] = found
    cache = CONFIG.cache(1, len(nodes), DEEP.lm_head.weight)
    cache.admit(list(range(len(nodes))), [0, *range(len(nodes) - 1)], text=len(nodes))
    token_T = torch.tensor([tree.nodes[node].token for node in nodes])
    return head.logits(head(token_T, feature_TN, torch.arange(len(nodes)), cache))


def best(logits_V):
    probability, token = logits_V.softmax(-1).max(-1)
    return int(token), pytest.approx(float(probability), abs=1e-9)


@pytest.mark.parametrize("reported", [(0,), (3,), (3, 2, 1, 0), (4, 0, 2)])
def test_a_guess_is_read_with_what_stages_have_reported_of_the_token_before(reported):
    tree, chain = a_tree(*reported)
    draft, want = DEEP.partial(), plainly(tree, chain)
    found = at_once(draft.expand(tree, [tree.tip], 1))
    for node in chain:
        assert draft.wants(tree, node)
        found += at_once(draft.expand(tree, [node], 1))
        assert not draft.wants(tree, node)
    assert [guesses[0] for guesses in found] == [best(logits_V) for logits_V in want[len(IDS) - 2:]]


def test_a_way_is_read_again_once_stages_have_reported_more():
    tree, chain = a_tree(1, 0)
    draft = DEEP.partial()
    at_once(draft.expand(tree, [tree.tip, chain[0]], 1))
    tree.nodes[tree.tip].partial = torch.randn(3 * CONFIG.hidden, dtype=torch.float64)
    tree.nodes[chain[0]].partial = torch.randn(2 * CONFIG.hidden, dtype=torch.float64)
    (guess,), = at_once(draft.expand(tree, [chain[1]], 1))
    assert guess == best(plainly(tree, chain)[-1])


def test_after_a_hit_the_text_is_read_with_the_targets_features():
    tree, chain = a_tree(2, 1, 0)
    draft = DEEP.partial()
    at_once(draft.expand(tree, [tree.tip, *chain[:2]], 1))
    tree.nodes[tree.tip].hidden = torch.randn(WIDE, dtype=torch.float64)
    tree.settle(7)
    draft.settle(tree)
    assert not draft.wants(tree, tree.tip)
    (guess,), = at_once(draft.expand(tree, [chain[2]], 1))
    assert guess == best(plainly(tree, chain[1:])[-1])
    assert draft.consumed == len(IDS)


def test_a_way_holds_as_many_nodes_as_there_is_room_for():
    tree, chain = a_tree(0, 0, 0)
    other = tree.add(chain[0], 40, -1.5)
    assert way_to(tree, [other, chain[2]], 4) == sorted([*chain, other])
    assert way_to(tree, [other, chain[2]], 3) == [chain[0], other]
    assert way_to(tree, [tree.tip], 3) == []


def test_a_stage_reports_what_it_and_those_before_have_made_of_live_rows():
    segment = Segment(3, [0, 1, 2], [0, 0, 1], [0, 1, 2], 2, torch.tensor([5, 17, 40]), torch.empty(3, 0))
    for reports in (True, False):
        made = Stage(DEEP.slice(0, 4), lambda: CONFIG.cache(4, 64, DEEP.lm_head.weight), inner_layers=[1, 3],
                     reports_features=reports)
        done = made.apply(segment)
        assert len(made.reports_of(done)) == reports
    assert done.inner.shape == (3, 2 * CONFIG.hidden)
    made.reports_features = True
    said, = made.reports_of(done)
    assert (said.request, said.layers, said.nodes) == (3, 2, [1, 2]), "text before the tip is read once it is back"
    assert torch.equal(said.x, done.inner[1:])
    assert made.reports_of(Prune(3, 1, 0, 2, [])) == []


def test_of_reports_of_one_row_that_of_the_latest_stage_counts_in_any_order():
    tree, _ = a_tree(0)
    target = SimpleNamespace(tree=tree, ring=SimpleNamespace(device="cpu"))
    for layers in (1, 3, 2):
        RequestTarget.learn(target, Features(0, layers, [tree.tip], torch.full((1, layers), float(layers))))
    assert tree.nodes[tree.tip].partial.tolist() == [3.0] * 3


def test_reports_go_to_the_root_alone():
    stage = Peers(1, [3], root_rank=0, with_reports=True)
    assert stage.send_to == [[3], (), [0]] and stage.receive_from == [[1], [0], ()]
    root = Peers(3, [1], [1, 2, 3], with_reports=True)
    assert root.send_to == [[1], [1, 2, 3], []] and root.receive_from == [[3], [], [1, 2, 3]]
    assert Peers(1, [3], root_rank=0).send_to == [[3], (), ()]


@pytest.mark.parametrize("strategy", ["spd", "streaming"])
def test_reports_reach_the_draft_while_rows_are_under_way(strategy, monkeypatch):
    read_as = []
    plain = PartialDraft.features

    def noted(draft, tree, fresh):
        before = [tree.nodes[tree.nodes[node].parent] for node in fresh]
        read_as.extend(len(node.partial) for node in before if node.hidden is None and node.partial is not None)
        return plain(draft, tree, fresh)

    monkeypatch.setattr(PartialDraft, "features", noted)
    with pipeline(DEEP, 4, strategy, DEEP.mixture("partial")) as decoder:
        answer = decoder.complete(Request(IDS, Sampler(), 24))
    assert answer.token_ids == DEEP.text(IDS, 24, Sampler())
    assert read_as and set(read_as) <= {layers * CONFIG.hidden for layers in (1, 2, 3)}


def test_a_layer_counts_in_training_once_its_stage_was_passed():
    assert stage_ends("4", 30) == [6, 13, 21, 29] and stage_ends("0+5+3", 8) == [4, 7]
    feature_AD = torch.ones(3, 6)
    assert partial_features(feature_AD, torch.tensor([0, 2, 3]), 3).tolist() == [[0] * 6, [1] * 4 + [0] * 2, [1] * 6]


@pytest.mark.parametrize("more, said", [
    ({"fc_norm": False}, "says fc_norm=False, which is not supported (only true, with partial_features)"),
    ({"partial_features": 1}, "says partial_features=1, which is not supported (only true or false)"),
])
def test_a_head_whose_missing_features_would_count_is_refused(tmp_path, more, said):
    publish(tmp_path / "head", **more)
    with refused(said):
        fit_head(Checkpoint(tmp_path / "head"), BASE)


def test_a_head_for_partial_features_drafts_for_a_split_model(tmp_path, capsys):
    save_model(tmp_path / "base", DEEP)
    publish(tmp_path / "head")
    asked = [f"base_dir={tmp_path / 'base'}", f"eagle_dir={tmp_path / 'head'}", "stages=0+1+3+4", "max_new_tokens=16",
             "prompt=what is it?"]
    texts = []
    for words in (["pipeline_type=ar"], ["draft=spd", "pipeline_type=spd"], ["draft=spd+suffix", "pipeline_type=dsi"],
                  ["draft=spd", "pipeline_type=spd", "profile=lan-1g", "time=virtual", f"trace={tmp_path / 'trace'}"]):
        assert here(*asked, *words) == 0, capsys.readouterr().err
        texts.append(capsys.readouterr().out.splitlines()[0])
    assert len(set(texts)) == 1
    wires = [span for span in read(tmp_path / "trace") if span["name"] == "wire" and span["kind"] == "Features"]
    assert {span["rank"] for span in wires} == {2}, "the first stage adds nothing, the last one nothing earlier"
    for draft, maker in (("dflash", "DFlash"), ("eagle", "EAGLE, DFlash or DSpark")):
        assert here(*asked, f"draft={draft}") == 2
        said = capsys.readouterr().err
        assert f"needs a head of {maker}, and this model has another kind: take draft=spd, or add eagle_dir=DIR" in said
