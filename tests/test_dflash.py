"""DFlash heads: read as published, compared with a plain implementation, and grown into trees."""
import heapq
import math
from contextlib import suppress
from itertools import product

import pytest
import torch

from config.run_config import Growth
from config.schema.fields import CONFIG as CONFIG_FIELDS
from config.schema.heads import READ, usual_layers
from model.drafts.dflash import BlockDraft, DFlashHead
from model.drafts.head_files import fit_head, load_head
from model.drafts.mixture import Mixture
from model.drafts.network import at_once
from model.sample import Sampler
from model.tree import TokenTree
from model.weights.checkpoint import Checkpoint
from pipeline.answers import Request
from tests.checkpoints import refused, save_checkpoint
from tests.json_files import load_json, save_json
from tests.saved import FORM, PROMPT, save_model
from tests.test_heads import rms
from tests.tiny import CONFIG, DEEP, pipeline, sharpened, weights

IDS = PROMPT[:10]
HEADS, SHARED, SIZE = CONFIG.heads, CONFIG.kv_heads, CONFIG.head_dim
BASE = {**FORM, "num_hidden_layers": 8}


def publish(folder, change=lambda tensors: None, **more):
    """Write a head to a folder in the published form, and return its tensors."""
    ids = [layer - 1 for layer in usual_layers(8)]
    said = {**FORM, "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 2,
            "num_target_layers": 8, "block_size": 6, "layer_types": ["full_attention"] * 2, "sliding_window": None,
            "use_sliding_window": False, "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            "dflash_config": {"mask_token_id": 52, "target_layer_ids": ids}, **more}
    held = weights(DEEP.block().network, seed=6)
    held.pop("embed_tokens.weight")
    change(held)
    save_checkpoint(folder, said, held, "model.safetensors")
    return held


# Computation


def turned(x_THE, positions):
    """Apply rotary positions as Qwen3 does."""
    pairs = torch.arange(0, SIZE, 2, dtype=torch.float64) / SIZE
    angle = torch.tensor(positions, dtype=torch.float64)[:, None] / CONFIG.theta ** pairs
    cos, sin = (part.repeat(1, 2)[:, None]
                for part in (angle.cos(), angle.sin()))
    first, second = x_THE.chunk(2, -1)
    return x_THE * cos + torch.cat((-second, first), -1) * sin


def plainly(held, embedding, context, block, begin, is_causal=False):
    """The rows of a block by the definition: in every layer they see keys of the context's features, and each other.

    If `is_causal`, as in JetSpec, they see no later rows of the block.

    `context` are the target's features of the text, position by position from 0; the block begins at `begin`.
    """
    features = rms(context @ held["fc.weight"].T, held["hidden_norm.weight"])
    x = embedding[torch.tensor(block)]
    places = [*range(len(context)), *range(begin, begin + len(block))]
    for number in range(2):
        own = {name[len(f"layers.{number}."):]: tensor for name, tensor in held.items()
               if name.startswith(f"layers.{number}.")}
        row = rms(x, own["input_layernorm.weight"])
        seen = torch.cat((features, row))
        q = rms((row @ own["self_attn.q_proj.weight"].T).view(len(row), HEADS, SIZE),
                   own["self_attn.q_norm.weight"])
        k = rms((seen @ own["self_attn.k_proj.weight"].T).view(len(seen), SHARED, SIZE),
                   own["self_attn.k_norm.weight"])
        v = (seen @ own["self_attn.v_proj.weight"].T).view(len(seen), SHARED, SIZE)
        q, k = turned(q, places[len(context):]), turned(k, places)
        k, v = (each.repeat_interleave(HEADS // SHARED, 1) for each in (k, v))
        score = torch.einsum("the,she->hts", q, k) / math.sqrt(SIZE)
        if is_causal:
            later = torch.ones(score.shape[1:], dtype=torch.bool).triu(len(context) + 1)
            score = score.masked_fill(later, -math.inf)
        out = torch.einsum("hts,she->the", score.softmax(-1), v).reshape(len(row), -1)
        x = x + out @ own["self_attn.o_proj.weight"].T
        row = rms(x, own["post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(row @ own["mlp.gate_proj.weight"].T) * (row @ own["mlp.up_proj.weight"].T)
        x = x + gate @ own["mlp.down_proj.weight"].T
    return rms(x, held["norm.weight"])


def text_features():
    """Random features of the target for all of IDS but the tip."""
    return torch.randn(len(IDS) - 1, 3 * CONFIG.hidden, dtype=torch.float64)


def grown_tree(draft, features, ids=IDS, limit=99):
    """Return a tree with the target's features of all text but the tip, after the draft has read it."""
    tree = TokenTree(ids, limit)
    tree.unsent_text.clear()
    for node, feature in zip(tree.trunk[:-1], features):
        tree.nodes[node].hidden = feature
    at_once(draft.expand(tree, [tree.tip], 3))
    return tree


@pytest.mark.parametrize("causal_key", ["", "causal_head", "causal"])
@pytest.mark.parametrize("begins", [0, 4])
def test_a_published_head_says_what_its_definition_says(tmp_path, begins, causal_key):
    dflash_config = {"mask_token_id": 52, "target_layer_ids": [layer - 1 for layer in usual_layers(8)]}
    if causal_key:
        dflash_config[causal_key] = True
    held = publish(tmp_path / "head", dflash_config=dflash_config)
    embedding = torch.randn(CONFIG.vocab, CONFIG.hidden, dtype=torch.float64)
    head = load_head(Checkpoint(tmp_path / "head"), BASE, lambda: embedding, torch.float64, "cpu")

    assert isinstance(head, DFlashHead) and head.inner == (2, 4, 5)
    assert head.form.size == 6
    features = text_features()
    draft = BlockDraft(head, DEEP.lm_head, 64)
    if begins:  # a part of the text was read before
        grown_tree(draft, features, IDS[:begins])
    grown_tree(draft, features)
    block = [IDS[-1], *[52] * 5]
    want = DEEP.lm_head(plainly(held, embedding, features, block, len(IDS) - 1, bool(causal_key)))[1:]
    torch.testing.assert_close(draft._logits, want, atol=1e-5, rtol=1e-5)  # tables of rotary positions are float32


def test_a_text_is_read_to_its_end_once_its_request_is_over():
    features = text_features()
    plain, kept = DEEP.block(), DEEP.block()
    tree = grown_tree(plain, features)
    at_once(kept.catch_up(tree))
    assert kept.consumed == len(IDS) - 1
    at_once(kept.expand(tree, [tree.tip], 3))
    torch.testing.assert_close(kept._logits, plain._logits)


def test_a_block_ends_where_the_text_may():
    features = text_features()
    draft = DEEP.block()
    grown_tree(draft, features, limit=len(IDS) + 2)
    assert len(draft._logits) == 2


# The tree


@pytest.mark.parametrize("nodes, width", [(12, 3), (40, 5)])
def test_the_tree_has_the_likeliest_paths_of_the_marginals(unlearning, nodes, width):
    features = text_features()
    draft = DEEP.block()
    tree = TokenTree(IDS, 99)
    tree.unsent_text.clear()
    for node, feature in zip(tree.trunk, features):
        tree.nodes[node].hidden = feature
    assert at_once(Mixture([draft]).grow(tree, Growth(nodes, 6, width)))
    heap, best = [(0.0, ())], []
    while len(best) <= nodes:  # DDTree's heap, of paths instead of ranks
        loss, path = heapq.heappop(heap)
        best.append(path)
        if len(path) < len(draft._logits):
            for token, gain in sharpened(draft._logits[len(path)], width):
                heapq.heappush(heap, (loss - gain, (*path, token)))
    found = {}
    for node in sorted(tree.live):
        found[node] = (*found.get(tree.nodes[node].parent, ()),
                       tree.nodes[node].token)

    assert set(found.values()) == set(best[1:])


def test_one_pass_is_read_for_each_tip_and_after_a_hit_deeper_guesses_have_marginals():
    draft = DEEP.block()
    with pipeline(DEEP, 2, "serial", Mixture([draft])) as decoder:
        answer = decoder.complete(Request(IDS, Sampler(), 16))
    assert answer.token_ids == DEEP.text(IDS, 16, Sampler())
    features = text_features()
    tree = grown_tree(draft := DEEP.block(), features)
    first = tree.add(tree.tip, 7, -1.0)
    second = tree.add(first, 8, -2.0)
    tree.settle(7)
    draft.settle(tree)

    assert draft.unrequested(tree, second, 3)
    assert not draft.unrequested(tree, second, 3) and draft.wants(tree, tree.tip)


# Errors


@pytest.mark.parametrize("more, said", [
    ({"block_size": 1}, "says block_size=1, which is not supported (only 2 to 64)"),
    ({"dflash_config": {"mask_token_id": 53, "target_layer_ids": [1, 3]}}, "says mask_token_id=53"),
    ({"dflash_config": {"mask_token_id": 5, "target_layer_ids": [3, 1]}}, "(only layers in rising order, from 0 to 6)"),
    ({"dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 7]}}, "(only layers in rising order, from 0 to 6)"),
    ({"dflash_config": {"mask_token_id": 5, "target_layer_ids": [1], "causal": 1}},
     "says causal=1, which is not supported (only true or false)"),
    ({"selector_rank": 3}, "has the unknown key 'selector_rank'"),
    ({"dflash_config": 5}, "says dflash_config=5, which should be an object"),
    ({"dflash_config": [1]}, "says dflash_config=[1], which should be an object"),
    ({"dflash_config": {"layer_types": 5}}, "says layer_types=5, which is not supported (only a list"),
    ({"dflash_config": {"eagle_config": 5}}, "says eagle_config=5, which is not supported (only an object)"),
    ({"speculators_config": {"verifier": {"architectures": 5}}}, "speculators_config in"),
    ({"sliding_window": 64, "use_sliding_window": True}, "says sliding_window=64"),
    ({"hidden_size": 64}, "has hidden_size 64, but the model has 32"),
])
def test_a_head_that_computes_otherwise_is_refused_by_name(tmp_path, more, said):
    publish(tmp_path / "head", **more)
    with refused(said):
        fit_head(Checkpoint(tmp_path / "head"), BASE)


ODD_VALUES = (5, "x", [1], {"a": 1}, 10 ** 30)


@pytest.mark.parametrize("outer_key", ["", "dflash_config", "eagle_config", "rope_scaling"])
def test_no_value_of_a_config_ends_in_anything_but_a_sentence(tmp_path, outer_key):
    publish(tmp_path / "head")
    path = tmp_path / "head" / "config.json"
    config = load_json(path)
    for key, value in product(sorted({*READ, *CONFIG_FIELDS, "block_size", "architectures"}), ODD_VALUES):
        outer_value = {**config.get(outer_key, {}), key: value} if outer_key else value
        save_json(path, {**config, (outer_key or key): outer_value})
        with suppress(ValueError):
            fit_head(Checkpoint(tmp_path / "head"), BASE)


def test_a_head_that_lacks_a_tensor_is_refused(tmp_path):
    publish(tmp_path / "head", lambda held: held.pop("hidden_norm.weight"))
    with refused("lacks hidden_norm.weight"):
        fit_head(Checkpoint(tmp_path / "head"), BASE)


def test_a_published_head_drafts_for_a_split_model(tmp_path, answer_to):
    save_model(tmp_path / "base", DEEP)
    publish(tmp_path / "head")
    asked = f"base_dir={tmp_path / 'base'}", f"eagle_dir={tmp_path / 'head'}", "stages=0+4+4", "max_new_tokens=16"
    texts = {answer_to(*asked, "prompt=what is it?", *words.split()) for words in (
        "pipeline_type=ar", "draft=dflash", "draft=dflash+suffix pipeline_type=streaming",
        "draft=eagle temperature=0 pipeline_type=pipedec")}
    assert len(texts) == 1
