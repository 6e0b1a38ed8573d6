"""The heads of EAGLE-1/2 and EAGLE-3, and the tree of both, equal what the original implementation computed."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from config.run_config import Growth
from launch.split.write import split
from model.checkpoint import Checkpoint
from model.eagle import Eagle, Eagle3Head, EagleHead, inner_layers, load_head
from model.llama import LlamaConfig, Slice, fill
from model.sample import Sampler
from model.tree import TokenTree, verify
from tests.saved import here

TREES = Path(__file__).parent / "golden"
LOOP = Path(__file__).parents[2] / "shared" / "golden"
both = pytest.mark.parametrize("kind", ["eagle", "eagle3"])


def _trees(kind):
    """The head, the LM head, how trees are grown, and the cases: by name, what the original was given and computed."""
    from safetensors import safe_open

    with safe_open(TREES / f"{kind}.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        notes = file.metadata()
    head = {name[5:]: x for name, x in tensors.items() if name.startswith("head.")}
    growth = Growth(int(notes["total_tokens"]) - 1, int(notes["depth"]), int(notes["top_k"]))
    cases: dict[str, dict[str, torch.Tensor]] = {}
    for name, x in tensors.items():
        if name.startswith("case."):
            _, number, fact = name.split(".")
            cases.setdefault(number, {})[fact] = x
    eagle = _eagle(LlamaConfig.read(json.loads(notes["config"])), head, tensors.get("lm_head"))
    return eagle, growth, list(cases.values())


def _linear(weight):
    lm_head = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    lm_head.weight = torch.nn.Parameter(weight, False)
    return lm_head


def _eagle(sizes, tensors, lm_head):
    """A head of EAGLE-3 has an LM head of its own."""
    head = EagleHead(sizes, bias="fc.bias" in tensors) if lm_head is not None else Eagle3Head(sizes, 64, 97)
    fill(head, tensors, torch.float32, "cpu")
    return Eagle(head, head.logits if lm_head is None else _linear(lm_head), capacity=512)


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


@both
def test_dynamic_trees_equal_the_original(kind):
    eagle, growth, cases = _trees(kind)
    for case in cases:
        eagle.reset()
        tree = TokenTree([*case["input_ids"][0].tolist(), int(case["root_token"])], limit=512)
        tree.hidden = dict(zip(tree.trunk, case["hidden_states"][0]))
        _grow(tree, eagle, growth)
        _same(tree, case)
        score = torch.tensor([tree.score[node] for node in _level_order(tree)])
        torch.testing.assert_close(score, case["node_logprob"], atol=1e-4, rtol=0)


@both
def test_the_head_equals_the_original(kind):
    eagle, _, cases = _trees(kind)
    for case in cases:
        eagle.reset()
        ids = case["head_input_ids"][0]
        nodes = list(range(len(ids)))
        eagle.cache.admit(nodes, [0, *nodes[:-1]], text=len(nodes))
        out = eagle.head(ids, case["hidden_states"][0], torch.arange(len(ids)), eagle.cache)
        torch.testing.assert_close(out, case["head_output"][0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(eagle.cache.keys[0, :, :len(ids)], case["keys"][0], atol=1e-5, rtol=1e-5)
        if kind == "eagle3":
            logits = eagle.lm_head(out[-1:])
            torch.testing.assert_close(logits, case["draft_logits_last"], atol=1e-5, rtol=1e-5)


@both
@pytest.mark.skipif(not LOOP.exists(), reason="the whole reference model lies outside the repository")
def test_the_greedy_loop_equals_the_original(kind):
    source = Checkpoint(LOOP / kind / "base")
    sizes, tensors = LlamaConfig.read(source.config), source.tensors()
    base = Slice(sizes, 0, sizes.layers)
    fill(base, {name[6:]: x for name, x in tensors.items() if name.startswith("model.")}, torch.float32, "cpu")
    lm_head, (_, growth, _) = _linear(tensors["lm_head.weight"]), _trees(kind)
    head = load_head(Checkpoint(LOOP / kind / "head"), source.config, lambda: tensors["model.embed_tokens.weight"],
                     torch.float32, "cpu")
    for case in torch.load(LOOP / kind / "loop_greedy.pt", weights_only=True):
        tree = TokenTree(case["prompt"], limit=512)
        eagle = Eagle(head, getattr(head, "logits", lm_head), capacity=512)
        cache = sizes.cache(sizes.layers, 512, lm_head.weight)
        _run(base, lm_head, cache, tree, kind)
        verify(tree)
        assert tree.token[tree.tip] == case["first_token"]
        for step in case["steps"]:
            _grow(tree, eagle, growth)
            _same(tree, step)
            _run(base, lm_head, cache, tree, kind)
            new = verify(tree)
            assert len(new) - 1 == step["accept_length"] and new[-1] == step["next_root"]
            cache.prune(tree.tip, tree.parent[tree.tip], [], tree.horizon)
        assert tree.tokens[:len(case["output"])] == case["output"]


@both
@pytest.mark.skipif(not LOOP.exists(), reason="the whole reference model lies outside the repository")
def test_a_pipeline_with_the_original_head_writes_the_original_text_in_as_many_passes(kind, tmp_path):
    layers = Checkpoint(LOOP / kind / "base").config["num_hidden_layers"]
    stages = "+".join(["0", *["1"] * (layers // 2), str(layers - layers // 2)])
    split(LOOP / kind / "base", tmp_path / "split", stages, LOOP / kind / "head", progress=False)
    growth = _trees(kind)[1]
    for case in torch.load(LOOP / kind / "loop_greedy.pt", weights_only=True)[:2]:
        answer = case["output"][len(case["prompt"]):]
        assert here(f"model_dir={tmp_path / 'split'}", "pipeline_type=serial", f"init_total_token={growth.nodes}",
                    f"init_topk={growth.width}", f"init_depth={growth.depth}", "ignore_eos=true",
                    f"prompt_ids={','.join(map(str, case['prompt']))}", f"max_new_tokens={len(answer) + 1}",
                    f"output={tmp_path / 'out'}") == 0
        got = json.loads((tmp_path / "out").read_text())
        assert got["token_ids"] == [*answer, case["steps"][-1]["next_root"]]
        assert got["target_passes"] == case["n_steps"]


def _run(base, lm_head, cache, tree, kind):
    """The whole target on all that is pending."""
    nodes = tree.cut()
    cache.admit(nodes, [tree.parent[n] for n in nodes], sum(n not in tree.live for n in nodes))
    inner = dict.fromkeys(inner_layers(base.config.layers)) if kind == "eagle3" else {}
    x = base(torch.tensor([tree.token[n] for n in nodes]), torch.tensor([tree.pos[n] for n in nodes]), cache, inner)
    tree.hidden.update(zip(nodes, torch.cat(list(inner.values()), -1) if inner else x))
    tree.target_token.update(zip(nodes, Sampler()(lm_head(x), [])))
    for node in nodes:
        if node in tree.trunk[:-1]:
            del tree.target_token[node]
