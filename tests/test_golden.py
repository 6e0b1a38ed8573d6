"""The EAGLE head and EAGLE-2's tree equal what the original implementation computed."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from config.run_config import Growth
from model.eagle import Eagle, EagleHead
from model.llama import LlamaConfig, Slice, fill
from model.sample import Sampler
from model.tree import TokenTree, verify

TREES = Path(__file__).parent / "golden" / "eagle.safetensors"
LOOP = Path(__file__).parents[2] / "shared" / "golden" / "eagle"


def _trees():
    """The head, the LM head, how trees are grown, and the cases: by name, what the original was given and computed."""
    from safetensors import safe_open

    with safe_open(TREES, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        notes = file.metadata()
    head = {name[5:]: x for name, x in tensors.items() if name.startswith("head.")}
    growth = Growth(int(notes["total_tokens"]) - 1, int(notes["depth"]), int(notes["top_k"]))
    cases: dict[str, dict[str, torch.Tensor]] = {}
    for name, x in tensors.items():
        if name.startswith("case."):
            _, number, fact = name.split(".")
            cases.setdefault(number, {})[fact] = x
    return json.loads(notes["config"]), head, _linear(tensors["lm_head"]), growth, list(cases.values())


def _linear(weight):
    lm_head = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    lm_head.weight = torch.nn.Parameter(weight, False)
    return lm_head


def _eagle(config, tensors, lm_head):
    head = EagleHead(LlamaConfig.read(config), bias="fc.bias" in tensors)
    fill(head, tensors, torch.float32, "cpu")
    return Eagle(head, lm_head, capacity=512)


def _level_order(tree):
    """The original's order of nodes: level by level, inside a level by the parent's rank, then by score."""
    order = level = [tree.tip]
    while level:
        ranked = sorted(level, key=lambda node: -tree.score[node])
        level = [child for node in ranked
                 for child in sorted(tree.children.get(node, {}).values(), key=lambda child: -tree.score[child])]
        order = order + level
    return order


def _facts(tree):
    """tokens [N], mask [N, N], depths [N] and root-to-leaf paths of the guesses below the tip."""
    order = _level_order(tree)
    place = {node: i for i, node in enumerate(order)}
    paths = []
    for node in order:
        path = [place[node]]
        while path[0]:
            path.insert(0, place[tree.parent[order[path[0]]]])
        paths.append(path)
    mask = torch.zeros(len(order), len(order), dtype=torch.uint8)
    for i, path in enumerate(paths):
        mask[i, path] = 1
    leaves = [path for i, path in enumerate(paths) if not tree.children.get(order[i])]
    return [tree.token[node] for node in order], mask, [len(path) - 1 for path in paths], leaves


def _grow(tree, eagle, growth):
    while eagle.grow(tree, growth):
        pass


def _same(tree, want):
    tokens, mask, depths, leaves = _facts(tree)
    assert tokens == want["draft_tokens"][0].tolist()
    assert torch.equal(mask, want["tree_mask"][0, 0])
    assert depths == want["tree_position_ids"].tolist()
    assert leaves == [[n for n in row if n >= 0] for row in want["retrieve_indices"].tolist()]


def test_dynamic_trees_equal_the_original():
    config, head, lm_head, growth, cases = _trees()
    for case in cases:
        tree = TokenTree([*case["input_ids"][0].tolist(), int(case["root_token"])], limit=512)
        tree.hidden = dict(zip(tree.trunk, case["hidden_states"][0]))
        _grow(tree, _eagle(config, head, lm_head), growth)
        _same(tree, case)
        score = torch.tensor([tree.score[node] for node in _level_order(tree)])
        torch.testing.assert_close(score, case["node_logprob"], atol=1e-4, rtol=0)


def test_the_head_equals_the_original():
    config, head, lm_head, _, cases = _trees()
    for case in cases:
        eagle, ids = _eagle(config, head, lm_head), case["head_input_ids"][0]
        nodes = list(range(len(ids)))
        eagle.cache.admit(nodes, [0, *nodes[:-1]], text=len(nodes))
        out = eagle.head(ids, case["hidden_states"][0], torch.arange(len(ids)), eagle.cache)
        torch.testing.assert_close(out, case["head_output"][0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(eagle.cache.keys[0, :, :len(ids)], case["keys"][0], atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not LOOP.exists(), reason="the whole reference model lies outside the repository")
def test_the_greedy_loop_equals_the_original():
    from safetensors.torch import load_file

    tensors = load_file(LOOP / "base" / "model.safetensors")
    sizes = LlamaConfig.read(json.loads((LOOP / "base" / "config.json").read_text()))
    base = Slice(sizes, 0, sizes.layers)
    fill(base, {name[6:]: x for name, x in tensors.items() if name.startswith("model.")}, torch.float32, "cpu")
    config, head, lm_head, growth, _ = _trees()
    for case in torch.load(LOOP / "loop_greedy.pt", weights_only=True):
        tree, eagle = TokenTree(case["prompt"], limit=512), _eagle(config, head, lm_head)
        cache = sizes.cache(sizes.layers, 512, lm_head.weight)
        _run(base, lm_head, cache, tree)
        verify(tree)
        assert tree.token[tree.tip] == case["first_token"]
        for step in case["steps"]:
            _grow(tree, eagle, growth)
            _same(tree, step)
            _run(base, lm_head, cache, tree)
            new = verify(tree)
            assert len(new) - 1 == step["accept_length"] and new[-1] == step["next_root"]
            cache.prune(tree.tip, tree.parent[tree.tip], [], tree.horizon)
        assert tree.tokens[:len(case["output"])] == case["output"]


def _run(base, lm_head, cache, tree):
    """The whole target on all that is pending."""
    nodes = tree.cut()
    cache.admit(nodes, [tree.parent[n] for n in nodes], sum(n not in tree.live for n in nodes))
    x = base(torch.tensor([tree.token[n] for n in nodes]), torch.tensor([tree.pos[n] for n in nodes]), cache)
    tree.hidden.update(zip(nodes, x))
    tree.answer.update(zip(nodes, Sampler()(lm_head(x), [])))
    for node in nodes:
        if node in tree.trunk[:-1]:
            del tree.answer[node]
