"""The heads of EAGLE-1/2 and EAGLE-3, and the tree of both, equal what the original implementation computed."""
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from config.run_config import Growth
from config.schema.heads import read_dialect
from model.drafts.eagle import Eagle
from model.drafts.heads import Eagle3Head, EagleHead
from model.llama import LlamaConfig, fill
from model.tree import TokenTree, verify
from tests.test_mixture import grown
from tests.tiny import admit_text

GOLDEN = Path(__file__).parent / "golden"
FACTS = ("draft_tokens", "tree_mask", "tree_position_ids", "retrieve_indices")
both = pytest.mark.parametrize("kind", ["eagle", "eagle3"])


def _trees(kind):
    """The head, the LM head, how trees are grown, and the cases: by name, what the original was given and computed."""
    with safe_open(GOLDEN / f"{kind}.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        notes = file.metadata()
    head = {name[5:]: x for name, x in tensors.items() if name.startswith("head.")}
    growth = Growth(int(notes["total_tokens"]) - 1,
                    int(notes["depth"]), int(notes["top_k"]))
    cases = {}
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
    third = lm_head is None
    head = Eagle3Head(sizes, 64, 97, read_dialect({}, 8)) if third else EagleHead(sizes, bias="fc.bias" in tensors)
    fill(head, tensors, torch.float32, "cpu")
    return Eagle(head, head.logits if third else _linear(lm_head), capacity=512)


def _level_order(tree):
    """The original's order of nodes: level by level, inside a level by the parent's rank, then by score."""
    order = level = [tree.tip]
    while level:
        ranked = sorted(level, key=lambda node: -tree.nodes[node].score)
        level = [child for node in ranked
                 for child in sorted(tree.nodes[node].children.values(),
                                     key=lambda child: -tree.nodes[child].score)]
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
            path.insert(0, place[tree.nodes[order[path[0]]].parent])
        paths.append(path)
    mask = torch.zeros(len(order), len(order), dtype=torch.uint8)
    for i, path in enumerate(paths):
        mask[i, path] = 1
    leaves = [path for i, path in enumerate(paths) if not tree.nodes[order[i]].children]
    return [tree.nodes[node].token for node in order], mask, [len(path) - 1 for path in paths], leaves


def _same(tree, want):
    tokens, mask, depths, leaves = _facts(tree)
    assert tokens == want["draft_tokens"][0].tolist()
    assert torch.equal(mask, want["tree_mask"][0, 0])
    assert depths == want["tree_position_ids"].tolist()
    paths = [[n for n in row if n >= 0] for row in want["retrieve_indices"].tolist()]
    assert leaves == [path for path in paths if path]


@both
def test_dynamic_trees_equal_the_original(kind):
    eagle, growth, cases = _trees(kind)
    for case in cases:
        eagle.reset()
        tree = TokenTree([*case["input_ids"][0].tolist(),
                          int(case["root_token"])], max_tokens=512)
        for node, hidden in zip(tree.trunk, case["hidden_states"][0]):
            tree.nodes[node].hidden = hidden
        grown(eagle, tree, growth)
        _same(tree, case)
        score = torch.tensor([tree.nodes[node].score for node in _level_order(tree)])
        torch.testing.assert_close(score, case["node_logprob"], atol=1e-4, rtol=0)


@both
def test_the_head_equals_the_original(kind):
    eagle, _, cases = _trees(kind)
    for case in cases:
        eagle.reset()
        ids = case["head_input_ids"][0]
        out = eagle.network(ids, case["hidden_states"][0], admit_text(eagle.cache, len(ids)), eagle.cache)
        torch.testing.assert_close(out, case["head_output"][0], atol=1e-5, rtol=1e-5)
        keys = eagle.cache.slots[0].tensors[0][0, :, :len(ids)]
        torch.testing.assert_close(keys, case["keys"][0], atol=1e-5, rtol=1e-5)
        if kind == "eagle3":
            logits = eagle.lm_head(out[-1:])
            torch.testing.assert_close(logits, case["draft_logits_last"], atol=1e-5, rtol=1e-5)


@both
def test_the_greedy_loop_grows_the_trees_and_accepts_the_guesses_of_the_original(kind):
    """The features of the text come from the file, in the place of the target, which computed them."""
    eagle, growth, _ = _trees(kind)
    loop = load_file(GOLDEN / f"{kind}_loop.safetensors")
    tokens, asked = loop["tokens"].tolist(), int(loop["prompt_tokens"])
    tree = TokenTree(tokens[:asked], max_tokens=512)
    _answer(tree, tokens, loop["features"])
    verify(tree)
    for step, accepted in enumerate(loop["accept_length"].tolist()):
        grown(eagle, tree, growth)
        _same(tree, {name: loop[name][step] for name in FACTS})
        _answer(tree, tokens, loop["features"])
        assert len(verify(tree)) == accepted + 1

    assert tree.tokens == tokens


def _answer(tree, tokens, features):
    """What the target tells of pending nodes that stand in the text: its features, and which token follows."""
    for node in tree.cut():
        place = tree.nodes[node].pos
        if _path(tree, node) == tokens[:place + 1]:
            tree.nodes[node].hidden = features[place]
            if place + 1 >= len(tree.tokens):
                tree.nodes[node].target_token = tokens[place + 1]


def _path(tree, node):
    """The tokens from the beginning of the text to a node."""
    if node in tree.trunk:
        return tree.tokens[:tree.nodes[node].pos + 1]
    return [*_path(tree, tree.nodes[node].parent), tree.nodes[node].token]
