"""A cache after any prunes equals a cache built from scratch."""
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model import cache as caches
from model import slots as slot_memory
from model.attention import PLAIN, AttentionForm, from_int8, to_int8
from model.tree import TokenTree, verify
from tests.checkpoints import refused
from tests.tiny import TINY, add_anywhere, admit_text, judge

pytestmark = pytest.mark.usefixtures("small_blocks")


def run(cache, tree, nodes, text=None):
    """Compute these nodes with the whole model as a stage would: rows that are dead on arrival are dropped."""
    nodes = [nodes[i] for i in cache.alive(nodes)]
    if not nodes:
        return {}
    settled = sum(node not in tree.live for node in nodes) if text is None else text
    cache.admit(nodes, [tree.nodes[node].parent for node in nodes], settled)
    out = TINY.whole(torch.tensor([tree.nodes[node].token for node in nodes]),
                     torch.tensor([tree.nodes[node].pos for node in nodes]), cache)
    return dict(zip(nodes, out))


def keys_of(cache):
    """Those of the first layer, `[1, heads, slots, size]`."""
    return cache.slots[0].tensors[0]


def prune(cache, tree):
    cache.prune(tree.tip, tree.nodes[tree.tip].parent, sorted(tree.live), tree.horizon)


def reference(tree, node):
    """Return the feature of the same node, computed from its own path only."""
    path = [node]
    while tree.nodes[path[0]].parent != path[0]:
        path.insert(0, tree.nodes[path[0]].parent)
    cache = TINY.new_cache(len(path))
    cache.admit(path, [path[0], *path[:-1]], text=len(path))
    return TINY.whole(torch.tensor([tree.nodes[n].token for n in path]),
                      torch.arange(len(path)), cache)[-1]


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.5, 1.0]))
def test_every_row_is_computed_as_if_its_path_stood_alone(seed, loss):
    rng = random.Random(seed)
    tree = TokenTree([rng.randrange(50) for _ in range(5)], max_tokens=100)
    cache = TINY.new_cache(200)
    for _ in range(6):
        for _ in range(rng.randrange(8)):
            add_anywhere(tree, rng, 4)
        for node, feature in run(cache, tree,
                                 tree.cut(rng.randrange(1, 7), rng.randrange(1, 4))).items():
            torch.testing.assert_close(feature, reference(tree, node), atol=1e-9, rtol=1e-9)
        if not tree.unsent_text:  # the tip was sent, so that its answer can have come
            judge(tree, rng.randrange(4))
            if rng.random() >= loss:
                prune(cache, tree)


def test_a_pruned_cache_equals_one_built_from_scratch():
    tree = TokenTree([3, 1, 4], max_tokens=100)
    cache = TINY.new_cache()
    a = tree.add(tree.tip, 5, -0.1)
    x = tree.add(tree.tip, 9, -0.2)
    b = tree.add(a, 2, -0.3)
    y = tree.add(x, 6, -0.4)
    c = tree.add(b, 7, -0.5)
    run(cache, tree, tree.cut())
    for node, token in {tree.tip: 5, a: 2}.items():
        tree.nodes[node].target_token = token
    verify(tree)
    prune(cache, tree)
    fresh = TINY.new_cache()
    run(fresh, tree, [*tree.trunk, c], text=5)

    assert cache.settled == 5 and cache.nodes == [c] and y not in cache.nodes
    for held in zip(cache.slots[0].tensors, fresh.slots[0].tensors):
        got, want = (x[:, :, :6] for x in held)
        torch.testing.assert_close(got, want, atol=1e-10, rtol=1e-10)


def test_settled_slots_never_move():
    tree = TokenTree(list(range(20)), max_tokens=100)
    cache = TINY.new_cache()
    run(cache, tree, tree.cut())
    before = keys_of(cache)[:, :, :20].clone()
    tree.add(tree.tip, 3, -0.1), tree.add(tree.tip, 4, -0.2)
    run(cache, tree, tree.cut())
    judge(tree, 4)
    prune(cache, tree)
    assert cache.settled == 21
    assert torch.equal(keys_of(cache)[:, :, :20], before)


def rows_agree(cut, whole, tree, nodes, noise):
    """Check that random queries of these nodes read the same from both caches, with and without a window."""
    text = sum(node not in tree.live for node in nodes)
    shape = 3, 1, len(nodes), 4
    q, k, v = torch.randn(shape, dtype=torch.float64, generator=noise)
    for cache in (whole, cut):
        cache.admit(nodes, [tree.nodes[node].parent for node in nodes], text)
    for layer, form in enumerate((AttentionForm(window=6), PLAIN)):
        made = [cache.attend(layer, q, k, v, form) for cache in (cut, whole)]
        torch.testing.assert_close(*made, atol=1e-12, rtol=0)


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.5]))
def test_rows_read_the_same_where_text_behind_a_window_is_dropped(seed, loss):
    rng, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    tree = TokenTree(list(range(30)), max_tokens=100)
    shape = 2, 1, 200, 4
    whole = caches.TreeCache(shape, torch.float64, "cpu")
    cut = caches.TreeCache(shape, torch.float64, "cpu", (6, 0))
    while tree.unsent_text:
        rows_agree(cut, whole, tree, tree.cut(max_text_rows=5), noise)
    for _ in range(6):
        for _ in range(1 + rng.randrange(6)):
            add_anywhere(tree, rng, 4)
        while nodes := tree.cut(rng.randrange(1, 7), rng.randrange(1, 4)):
            rows_agree(cut, whole, tree, nodes, noise)
        judge(tree, rng.randrange(4))
        for cache in (whole, cut) if rng.random() >= loss else ():
            prune(cache, tree)
    full, near = cut.slots

    assert whole.slots[0].first == full.first == 0 < near.first


def test_a_cache_of_a_window_grows_no_further_than_that_and_begins_again_when_it_is_cleared():
    shape = 1, 1, 1000, 4
    cache = caches.TreeCache(shape, torch.float32, "cpu", (16,))
    for node in range(900):
        cache.admit([node], [max(0, node - 1)], 1)
    [slots] = cache.slots
    assert slots.first > 850
    assert slots.tensors[0].shape[2] <= 1.5 * (16 + slot_memory.BLOCK_SLOTS)
    assert cache.bytes == 2 * slots.tensors[0].numel() * 4
    with pytest.raises(AssertionError, match="is dropped"):
        cache.another().copy(cache, 20)
    cache.clear()

    assert slots.first == 0 and slots.tensors[0].shape[2] == slot_memory.BLOCK_SLOTS


def test_rows_that_a_prune_declared_dead_are_dead_on_arrival():
    cache = TINY.new_cache(layers=1)
    cache.prune(tip=7, parent=3, keep=[9, 11], horizon=12)
    nodes = [6, 7, 9, 10, 11, 12]
    assert [nodes[i] for i in cache.alive(nodes)] == [7, 9, 11, 12]


def test_an_older_prune_that_comes_late_revives_and_kills_nothing():
    cache = TINY.new_cache(layers=1)
    cache.prune(tip=7, parent=3, keep=[9], horizon=12)
    cache.prune(tip=4, parent=3, keep=[5, 7, 9], horizon=10)
    assert cache.alive([5, 7, 9, 11]) == [1, 2]


def test_a_cache_grows_with_its_text_and_gives_the_memory_back():
    cache = TINY.new_cache(20, layers=1)
    sizes = []
    for node in range(20):
        cache.admit([node], [max(0, node - 1)], 1)
        sizes.append(keys_of(cache).shape[2])
    assert sizes == [4] * 4 + [7] * 3 + [12] * 5 + [19] * 7 + [20]
    assert cache.slots[0].tensors[1].shape == keys_of(cache).shape
    keys_of(cache).uniform_()  # else it holds what was in memory, perhaps NaN
    another = TINY.new_cache(20, layers=1)
    another.copy(cache, 8)
    got, want = (keys_of(each)[:, :, :8]
                 for each in (another, cache))
    assert torch.equal(got, want)
    cache.clear()

    assert keys_of(cache).shape[2] == 4


def test_a_full_cache_says_what_to_do():
    cache = TINY.new_cache(4, layers=1)
    with refused("raise max_length"):
        admit_text(cache, 5)


def test_keys_and_values_in_8_bits_are_within_half_a_step_and_take_a_quarter_of_the_memory():
    x_KTE = torch.randn(2, 5, 64)
    x_KTE[1, 3] = 0
    codes, scale = to_int8(x_KTE)
    room = [torch.empty(2, 5, 64, dtype=torch.float64) for _ in range(2)]
    found, _ = from_int8((codes, codes, scale, scale), room)
    assert bool(((found - x_KTE).abs() <= 0.5001 * scale).all())
    plain, small = (caches.TreeCache((3, 2, 50, 64),
                                     torch.float32, "cpu", (), eight)
                    for eight in (False, True))
    assert small.bytes * 256 == plain.bytes * 68, "of 64 numbers 64 bytes and a scale of 4, not 256"
    assert small.another().bytes == small.bytes
