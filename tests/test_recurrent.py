"""Recurrent layers in a tree: a row continues the state of its own path, whatever is pruned, dropped or forgotten."""
import random
from dataclasses import replace
from functools import reduce
from itertools import cycle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from config.run_config import RunConfig
from launch.build import build_stage
from launch.memory import need
from launch.pipeline import Pipeline
from launch.share import ModelShape
from launch.spec import RankSpec
from launch.split.write import Layout
from model import memory
from model.drafts.mixture import Mixture
from model.drafts.suffix import Suffix
from model.llama import Slice
from model.native import compiler
from model.native.linear import NativeProducts, load_with_products
from model.recurrent import DeltaRows
from model.sample import Sampler
from model.tree import TokenTree
from model.weights.parts import Part
from model.weights.quant import Recast
from model.weights.quant_layers import load
from model.weights.unfold import Unfolded
from pipeline import decode as prefixes
from pipeline.answers import Request
from pipeline.trace import OFF
from sim.paths import Paths
from tests.checkpoints import refused, split_quietly
from tests.same_rows import alone, in_trees
from tests.saved import PROMPT
from tests.test_exact import NEW, SAMPLERS, assert_exact, at_each_temperature
from tests.test_families import NEW as NUM_NEW
from tests.test_families import PROMPT as LONG_PROMPT
from tests.test_families import Saved
from tests.test_many import run
from tests.test_prunes import delaying, losing
from tests.test_recovery import struck
from tests.tiny import RECURRENT, SPECULATIVE, Oracle, add_anywhere, judge, pipeline, random_tensor, write

pytestmark = pytest.mark.usefixtures("small_blocks")
WINDOWS = RECURRENT.config.windows


def path_of(tree, node):
    path = [node]
    while tree.nodes[path[0]].parent != path[0]:
        path.insert(0, tree.nodes[path[0]].parent)
    return path


def features(tree, nodes, cache, text):
    """Those of these nodes, which the whole model computes."""
    cache.admit(nodes, [tree.nodes[node].parent for node in nodes], text)
    tokens, positions = zip(*((tree.nodes[node].token, tree.nodes[node].pos) for node in nodes))
    return RECURRENT.whole(torch.tensor(tokens), torch.tensor(positions), cache)


def grown(seed, loss, *caches):
    """Let a tree grow and be pruned at random, some prunes lost or late; give each segment to all caches."""
    rng, late = random.Random(seed), []
    tree = TokenTree([rng.randrange(50) for _ in range(9)], max_tokens=100)
    for _ in range(8):
        for _ in range(rng.randrange(8)):
            add_anywhere(tree, rng, 4)
        nodes = tree.cut(rng.randrange(1, 9), rng.randrange(1, 4))
        nodes = [nodes[i] for i in caches[0].alive(nodes)]
        text = sum(node not in tree.live for node in nodes)
        if nodes:
            yield tree, nodes, [features(tree, nodes, cache, text) for cache in caches]
        if tree.unsent_text:
            continue
        judge(tree, rng.randrange(4))
        message = tree.tip, tree.nodes[tree.tip].parent, sorted(tree.live), tree.horizon
        if rng.random() < loss:
            late.append(message)
            continue
        late.append(message)
        for each in late[-2:][::-1]:
            for cache in caches:
                cache.prune(*each)


@settings(max_examples=8)
@given(seed=st.integers(0, 10**6), loss=st.sampled_from([0.0, 0.5, 1.0]))
def test_every_row_is_computed_as_if_its_path_stood_alone(seed, loss):
    cache = RECURRENT.new_cache(200, windows=WINDOWS)
    for tree, nodes, [got] in grown(seed, loss, cache):
        for node, feature in zip(nodes, got):
            path = path_of(tree, node)
            alone = RECURRENT.new_cache(len(path))
            want = features(tree, path, alone, len(path))[-1]
            torch.testing.assert_close(feature, want, atol=1e-9, rtol=1e-9)


@settings(max_examples=6)
@given(seed=st.integers(0, 10**6), loss=st.sampled_from([0.0, 0.5]))
def test_room_for_one_state_gives_the_same_bits_as_room_for_all(seed, loss):
    caches = []
    for max_states in (1, 3, 100):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory, "MAX_STATES", max_states)
            caches.append(RECURRENT.new_cache(200, windows=WINDOWS))
    for _, _, (first, *others) in grown(seed, loss, *caches):
        assert all(torch.equal(first, other) for other in others)
    assert [len(cache.states[0]._after) < size for cache, size in zip(caches, (1, 3, 100))] == [True] * 3


def test_states_are_freed_with_what_no_longer_lives_and_inputs_are_dropped():
    cache = RECURRENT.new_cache(400, windows=WINDOWS)
    tree = TokenTree([node % 50 for node in range(100)], max_tokens=300)
    while tree.unsent_text:
        nodes = tree.cut(0, 7)
        features(tree, nodes, cache, len(nodes))
    cache.drop()
    attention, inputs, *_ = cache.slots
    assert attention.first == 0 and inputs.first > 80
    state_bytes = cache.states[0].bytes

    guesses = [tree.add(tree.tip, token, -0.1 * token) for token in range(1, 5)]
    features(tree, tree.cut(), cache, 0)
    assert cache.states[0].bytes == 5 * state_bytes
    judge(tree, 2)
    cache.prune(tree.tip, tree.nodes[tree.tip].parent, [], tree.horizon)
    assert tree.tip == guesses[1] and cache.states[0].bytes == state_bytes
    assert cache.states[0].length == cache.settled == 101


def test_the_state_that_was_used_least_recently_makes_room(monkeypatch):
    monkeypatch.setattr(memory, "MAX_STATES", 3)
    states = memory.States(memory.MemoryForm(1, (1,)), torch.empty(0))
    for node in (1, 2):
        states.keep(node, torch.full((1,), float(node)))
    assert states.after(7) is None and states.after(1) == 1
    states.keep(3, torch.zeros(1))
    assert [states.after(node) is None for node in (1, 2, 3)] == [False, True, False]


def test_rows_in_bfloat16_change_a_state_by_steps_in_float32():
    delta_net = RECURRENT.whole.layers["0"].linear_attn
    inputs = random_tensor(3, 5, delta_net.num_taps, delta_net.sizes.memory_form.input_width).bfloat16()
    assert all(map(torch.equal, delta_net.steps(inputs), delta_net.steps(inputs.float())))


def test_a_cache_that_copies_a_beginning_forgets_its_own_state():
    def read(cache, tokens, first=0):
        nodes = range(first, first + len(tokens))
        cache.admit(nodes, [max(0, node - 1) for node in nodes], len(tokens))
        return RECURRENT.whole(torch.tensor(tokens), torch.tensor(nodes), cache)

    cache, source = RECURRENT.new_cache(), RECURRENT.new_cache()
    read(cache, [1, 2, 3, 4])
    read(source, [9, 8, 7, 6, 5])
    cache.copy(source, 3)
    expected = read(RECURRENT.new_cache(), [9, 8, 7, 2])[-1:]
    torch.testing.assert_close(read(cache, [2], 3), expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("strategy, stages, room, temperature", at_each_temperature(
    *zip(["autoregressive", *SPECULATIVE[::2]], cycle([3, 1, 2]), cycle([1, 16, 2, 3]))))
def test_every_strategy_writes_the_reference_text(monkeypatch, strategy, stages, room, temperature):
    monkeypatch.setattr(memory, "MAX_STATES", room)
    assert_exact(RECURRENT, stages, strategy, RECURRENT.eagle(), temperature)


@pytest.mark.parametrize("strategy, spoil, temperature", at_each_temperature(
    *zip(SPECULATIVE, cycle([losing(0.7, seed=5), delaying(8, seed=6), losing(1.0, seed=7)]))))
def test_prunes_may_be_lost_or_late(strategy, spoil, temperature):
    sampler = SAMPLERS[temperature]
    text = RECURRENT.text(PROMPT, NEW, sampler)
    with pipeline(RECURRENT, 3, strategy, Oracle(PROMPT + text), wrap=spoil) as decoder:
        assert write(decoder, PROMPT, NEW, sampler) == text


def test_a_recurrent_model_drafts_in_trees():
    assert_exact(RECURRENT, 2, "streaming", RECURRENT.mixture("twin+suffix"), 1.0, PROMPT, PROMPT[:5])


@pytest.mark.parametrize("strategy, spoil", [
    ("streaming", delaying(6, seed=9)), ("continuous", losing(0.5, seed=8)), ("autoregressive", lambda link: link)])
def test_requests_side_by_side_that_share_beginnings_write_what_each_writes_alone(strategy, spoil, monkeypatch):
    monkeypatch.setattr(prefixes, "MIN_SHARED_TOKENS", 1)
    monkeypatch.setattr(RECURRENT, "drops", False)
    common, turns = [5, 17, 40, 3, 28, 11, 9, 9, 21, 4], []
    for number, (temperature, given_up) in enumerate([(0.0, None), (1.0, None), (0.7, 2), (0.0, None), (1.0, None)]):
        turns.append(((*common[:4 + number], number, 33), 10, temperature, 3, 1.0, given_up))
    first_text = RECURRENT.text(list(turns[0][0]), 10, Sampler())
    turns.append(((*turns[0][0], *first_text, 7, 8), 10, 1.0, 5, 1.0, None))

    with pipeline(RECURRENT, 3, strategy, Mixture([], Suffix()), wrap=spoil) as decoder:
        decoder.max_running, decoder.reuses_texts = 4, True
        answers = run(decoder, turns, 4)
        for number, (answer, given_up) in answers.items():
            prompt, new, temperature, seed, *_ = turns[number]
            text = RECURRENT.text(list(prompt), new, Sampler(temperature, seed=seed))
            assert answer.token_ids == (text[:answer.new_tokens] if given_up else text)
        for end in (0, 10, 6):  # behind a prompt, behind an answer, and in the middle of one
            text = [*turns[0][0], *first_text[:end], end]
            again = decoder.complete(Request(text, Sampler(), 10))
            assert again.token_ids == RECURRENT.text(text, 10, Sampler()) and again.reused_tokens > 4


# --- models in folders -----------------------------------------------------------------------------------------------

@pytest.fixture(scope="module", params=["lfm2", "qwen3 next"])
def saved(request, tmp_path_factory):
    return Saved(request.param, tmp_path_factory.mktemp("recurrent"))


@pytest.mark.parametrize("saved", ["qwen3 next"], indirect=True)
def test_a_rank_that_is_lost_in_the_middle_reads_the_text_again(saved):
    words = {"dtype": "float32", "threads_per_rank": 1, "max_length": 150, "draft": "suffix", "prompt_ids": "5",
             "ignore_eos": True, "max_new_tokens": NUM_NEW}
    with Pipeline.open(model_dir=str(saved.parts), **words) as opened:
        assert struck(opened.stream(LONG_PROMPT), 4, (2,)) == saved.text
        assert opened.generate(LONG_PROMPT).answer.token_ids == saved.text


def filled_bytes(cache):
    """What a full cache takes, with all states, and one that is being computed."""
    kept_bytes = sum(memory.MAX_STATES * states.bytes for states in cache.states.values())
    for begin in range(0, cache.capacity, 50):
        nodes = range(begin, min(begin + 50, cache.capacity))
        cache.admit(nodes, [max(0, node - 1) for node in nodes], len(nodes))
        for states in cache.states.values():
            states.length = cache.settled
    return cache.bytes + kept_bytes


def test_states_and_inputs_are_counted_before_loading(saved):
    for reuse in (False, True):
        config = RunConfig(dtype="float32", max_length=150, device="cpu", reuse=reuse, base_dir=str(saved.base),
                           max_requests=2)
        spec = RankSpec(config, Part(saved.parts / "stage_3"))
        cache_bytes = filled_bytes(build_stage(spec, OFF).cache(0))
        stated_bytes = need(spec).cache / 2
        assert stated_bytes == cache_bytes if reuse else stated_bytes >= cache_bytes

        # a whole model, before it is shared out
        shape, source = ModelShape.of(config), Unfolded(saved.base)
        weight_bytes = sum(source.form(name).bytes for name in source.names() if ".layers." in name)
        whole_cache = shape.sizes.cache(shape.sizes.layers, 150, torch.empty(0), [] if reuse else shape.sizes.windows)
        stated_bytes, whole_bytes = shape.layer_bytes * shape.sizes.layers - weight_bytes, 2 * filled_bytes(whole_cache)
        assert stated_bytes == whole_bytes if reuse else stated_bytes >= whole_bytes


@pytest.mark.parametrize("room", [1, 16])
def test_paths_in_virtual_time_are_computed_as_by_stages(monkeypatch, room):
    monkeypatch.setattr(memory, "MAX_STATES", room)
    paths = Paths([RECURRENT.slice(0, 1), RECURRENT.slice(1, 4)], [2], RECURRENT.lm_head.weight)
    for tokens in (PROMPT, [*PROMPT[:4], 9], [*PROMPT, 8, 9], [*PROMPT, 8, 7, 7]):
        path = reduce(paths.after, tokens, paths.root)
        hidden_TD, _ = paths.outputs([paths.after(path, 3), path])
        logits = RECURRENT.logits([*tokens, 3])[[-1, -2]]
        torch.testing.assert_close(RECURRENT.lm_head(hidden_TD), logits, atol=1e-9, rtol=1e-9)


def test_ranks_do_not_share_recurrent_layers(saved, tmp_path):
    with refused("which has recurrent layers: give each rank layers of its own"):
        split_quietly(saved.base, tmp_path / "shared", "0+4", layout=Layout(shares=(1, 1)))


# --- native kernels ---------------------------------------------------------------------------------------------------

def delta_rows(num_rows, num_heads, key_dim, value_dim, dtype=torch.float32):
    """Rows of a path with queries and keys of length 1."""
    shapes = [(num_rows, num_heads, size) for size in (key_dim, key_dim, value_dim)] + [(num_rows, num_heads)] * 2
    query, key, value, decay, rate = (random_tensor(seed, *shape) for seed, shape in enumerate(shapes))
    unit = (x / x.norm(dim=-1, keepdim=True) for x in (query, key))
    return DeltaRows(*(x.to(dtype) for x in (*unit, value, torch.sigmoid(decay), torch.sigmoid(rate))))


@pytest.mark.parametrize("level", compiler.levels(), ids=lambda level: level.name)
@pytest.mark.parametrize("sizes", [(3, 16, 8), (2, 5, 64), (4, 24, 72)], ids=str)
def test_a_state_in_c_is_that_of_numpy_with_the_same_bits_row_by_row_and_on_every_level(level, sizes):
    rows, state = delta_rows(7, *sizes), random_tensor(9, *sizes).float()
    whole_state, single_state, wide_state = state.clone(), state.clone(), state.double().numpy()
    got = NativeProducts(2, level).continue_state(rows, whole_state)

    for row in range(7):
        query, key, value, decay, rate = (x[row].double().numpy() for x in rows)
        wide_state = wide_state * decay[:, None, None]
        difference = (value - np.einsum("hkv,hk->hv", wide_state, key)) * rate[:, None]
        wide_state = wide_state + np.einsum("hk,hv->hkv", key, difference)
        np.testing.assert_allclose(got[row], np.einsum("hkv,hk->hv", wide_state, query), atol=1e-5)
    np.testing.assert_allclose(whole_state, wide_state, atol=1e-5)

    one_by_one = [DeltaRows(*(x[row:row + 1] for x in rows)) for row in range(7)]
    products = NativeProducts(1, compiler.LEVELS[-1])
    assert torch.equal(torch.cat([products.continue_state(row, single_state) for row in one_by_one]), got)
    assert torch.equal(single_state, whole_state)


@pytest.mark.parametrize("saved", ["lfm2", "qwen3 next", "gpt-oss"], indirect=True)
@pytest.mark.parametrize("quant", ["none", "int4"])
def test_native_products_give_a_row_the_same_bits_in_a_tree_and_weights_stay_in_blocks(saved, tmp_path, quant):
    source, sizes = Unfolded(saved.base), replace(saved.sizes, context=150)
    names = {name[len("model."):]: name for name in source.names() if name != "lm_head.weight"}
    block_type = {"int4": "Q4_1"}.get(quant, quant)
    models = []
    for in_c in (True, False):
        layers = Slice(sizes, 0, sizes.layers)
        tensors = Recast(source, names, block_type, keeps_blocks=in_c)
        if in_c:
            load_with_products(layers, tensors, NativeProducts(2))
        else:
            load(layers, "none", tensors, torch.float32, "cpu")
        models.append(ReadModel(layers, sizes.cache(sizes.layers, 150, torch.empty(0), sizes.windows)))
    native, plain = models
    text = LONG_PROMPT[:60]
    in_c = in_trees(native, text, random.Random(1), 61)
    assert torch.equal(in_c, alone(native, text))
    torch.testing.assert_close(in_c, alone(plain, text), atol=0.02 if quant == "none" else 0.1, rtol=0.05)


class ReadModel:
    """Layers and their cache; `read` gives the hidden states of rows."""

    def __init__(self, layers, cache):
        self.layers, self.cache = layers, cache

    def read(self, rows, text):
        nodes, parents, positions, tokens = zip(*rows)
        self.cache.admit(nodes, parents, text)
        return self.layers(torch.tensor(tokens), torch.tensor(positions), self.cache)
