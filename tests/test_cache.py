"""A cache after any prunes equals a cache built from scratch."""
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model import attention
from model import cache as caches
from model import slots as slot_memory
from model.attention import PLAIN, AttentionForm, from_codes, to_codes
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


@settings(max_examples=30)
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


of_each_code_type = pytest.mark.parametrize("code_type", [None, torch.int8, torch.int16])


class PlainRows:
    """The keys and values of all rows that a cache was given, by node, and attention over a node's path in numpy."""

    def __init__(self, windows=(), code_type=None, capacity=200):
        shape = max(1, len(windows)), KV_HEADS, capacity, HEAD_DIM
        self.cache = caches.TreeCache(shape, torch.float64, "cpu", windows, code_type)
        self.noise, self.parents, self.stored = torch.Generator().manual_seed(1), {}, {}
        self.forms = [AttentionForm(window) for window in windows] or [PLAIN]

    def path(self, node):
        """The nodes from the root to this one."""
        path = [node]
        while self.parents[path[0]] != path[0]:
            path.insert(0, self.parents[path[0]])
        return path

    def admit(self, nodes, parents, text=0, mutual=False):
        """Give a segment slots; return random queries, keys and values of each layer."""
        self.cache.admit(nodes, parents, text, mutual)
        self.parents.update(zip(nodes, parents))
        layers = []
        for layer in range(len(self.forms)):
            q, k, v = (torch.randn(heads, len(nodes), HEAD_DIM, dtype=torch.float64, generator=self.noise)
                       for heads in (HEADS, KV_HEADS, KV_HEADS))
            layers.append((2 * q, k, v))  # scores have a standard deviation of 2
            rounded = [self.rounded(x) for x in (k, v)]
            self.stored.update(((layer, node), [x[:, row] for x in rounded]) for row, node in enumerate(nodes))
        return layers

    def rounded(self, x_KTE):
        """The numbers after rounding to the cache's bits."""
        if not self.cache.code_type:
            return x_KTE.numpy()
        wide = x_KTE.numpy().astype(np.float32)
        max_code = {torch.int8: 127, torch.int16: 32767}[self.cache.code_type]
        scale = np.abs(wide).max(-1, keepdims=True) / np.float32(max_code)
        return np.round(wide / scale).astype(float) * scale

    def attended(self, layer, q_HE, nodes):
        """Attention `[H, E]` of one row over these nodes."""
        layer_form = self.forms[layer]
        keys, values = (np.stack([self.stored[layer, node][i] for node in nodes], 1) for i in (0, 1))
        out = []
        for head, q_E in enumerate(q_HE.numpy()):
            scores = keys[head * KV_HEADS // HEADS] @ q_E / HEAD_DIM ** 0.5
            if layer_form.cap:
                scores = layer_form.cap * np.tanh(scores / layer_form.cap)
            weights = np.exp(scores)
            sink = 0 if layer_form.sinks is None else np.exp(layer_form.sinks[head].item())
            out.append(weights @ values[head * KV_HEADS // HEADS] / (weights.sum() + sink))
        return np.stack(out)

    def expected(self, nodes, layers, mutual=()):
        """Attention `[H, T, E]` in each layer, over the path of each row, as far as a window reaches."""
        for layer, (q, _, _) in enumerate(layers):
            rows = []
            for row, node in enumerate(nodes):
                seen = self.path(node)[-self.forms[layer].window:]
                seen += [other for other in mutual if other not in seen] if node in mutual else []
                rows.append(self.attended(layer, q[:, row], seen))
            yield np.stack(rows, 1)

    def read(self, nodes, parents, text=0, mutual=False):
        """Check what a segment reads in every layer, and what native kernels are given of it."""
        layers = self.admit(nodes, parents, text, mutual)
        block = nodes[text:] if mutual else ()
        for layer, wanted in enumerate(self.expected(nodes, layers, block)):
            got = self.cache.attend(layer, *layers[layer], self.forms[layer])
            np.testing.assert_allclose(got, wanted, rtol=1e-6 if self.cache.code_type else 1e-11, atol=1e-9)
        [rows] = self.cache.admitted()
        sees = [[each in self.path(node) or node in block and each in block for each in self.cache.nodes]
                for node in nodes]
        assert rows.settled == self.cache.settled and rows.sees.tolist() == sees

    def assert_holds(self, text, tail):
        """Check the keys and values of the slots that are not dropped, in their order."""
        assert self.cache.settled == len(text) and self.cache.nodes == tail
        for layer in range(len(self.forms)):
            slots, index = self.cache._slots_of_layer[layer]
            read = slots.read(index, len(text) + len(tail))
            if self.cache.code_type:
                read = from_codes(read, [torch.empty_like(x, dtype=torch.float64) for x in read[:2]])
            for which, x_KSE in enumerate(read):
                wanted = [self.stored[layer, node][which] for node in [*text, *tail][slots.first:]]
                np.testing.assert_allclose(x_KSE, np.stack(wanted, 1), rtol=1e-6)


KV_HEADS, HEADS, HEAD_DIM = 2, 6, 4
SINKS = torch.linspace(-2, 2, HEADS)


@pytest.mark.parametrize("windows", [(), (6, 0), (3, 9, 3)], ids=str)
@of_each_code_type
@settings(max_examples=12)
@given(seed=st.integers(0, 10**6), loss=st.sampled_from([0.0, 0.5]))
def test_rows_read_what_numpy_computes_over_their_paths_and_survivors_stay_in_order(windows, code_type, seed, loss):
    """Prunes may be lost, or come late and in another order, where text behind a window is dropped, too."""
    rng, tree, plain = random.Random(seed), TokenTree(list(range(30)), max_tokens=100), PlainRows(windows, code_type)
    cache, late = plain.cache, []

    def send(*limits):
        nodes = tree.cut(*limits)
        nodes = [nodes[i] for i in cache.alive(nodes)]
        if nodes:
            plain.read(nodes, [tree.nodes[node].parent for node in nodes], sum(node not in tree.live for node in nodes))

    while tree.unsent_text:
        send(0, 5)
    for _ in range(6):
        for _ in range(1 + rng.randrange(6)):
            add_anywhere(tree, rng, 4)
        for _ in range(rng.randrange(3)):
            send(rng.randrange(1, 7), rng.randrange(1, 4))
        if tree.unsent_text:
            continue
        before = cache.nodes
        judge(tree, rng.randrange(4))
        message = tree.tip, tree.nodes[tree.tip].parent, sorted(tree.live), tree.horizon
        if rng.random() < loss:
            late.append(message)
            continue
        cache.prune(*message)
        sent_text = [node for node in tree.trunk if node not in tree.unsent_text]
        plain.assert_holds(sent_text, [node for node in before if node in tree.live])
        if late and rng.random() < 0.5:
            cache.prune(*late.pop())
            plain.assert_holds(sent_text, [node for node in before if node in tree.live])

    assert {slots.window for slots in cache.slots if slots.first} == {window for window in windows if window}


def chain(first, last):
    """The nodes of a text and their parents."""
    nodes = [*range(first, last)]
    return nodes, [max(0, node - 1) for node in nodes]


def test_text_that_has_just_been_read_is_kept_by_whatever_comes_next():
    plain = PlainRows()
    plain.read(*chain(0, 5), text=5)
    other = PlainRows()
    other.cache.copy(plain.cache, 5)
    assert other.cache.settled == 5
    plain.read([5, 20], [4, 5], text=1)
    plain.cache.retain({20})
    plain.assert_holds([*range(6)], [20])
    plain.cache.drop()
    plain.read([6], [5], text=1)
    plain.cache.prune(3, 2, [], 4)  # late
    plain.assert_holds([*range(7)], [])
    plain.read([7], [6], text=1)
    plain.cache.drop()
    plain.assert_holds([*range(8)], [])
    for length in (9, 60):
        with pytest.raises(AssertionError, match="8 slots are settled, fewer than"):
            plain.cache.truncate(length)


def test_a_tail_may_have_any_size():
    rng, plain = random.Random(2), PlainRows(capacity=400)
    plain.read(*chain(0, 10), text=10)
    nodes = [9, *range(100, 300)]
    parents = [rng.choice(nodes[max(0, i - 6):i]) for i in range(1, 201)]
    for begin, end in ((0, 50), (50, 110), (110, 200)):
        plain.read(nodes[begin + 1:end + 1], parents[begin:end])
    text = plain.path(250)
    assert len(text) > 30
    kept = [node for node in nodes if text[20] in plain.path(node) and node not in text[:21]]
    plain.cache.prune(text[20], text[19], kept, 300)
    plain.assert_holds(text[:21], kept)
    plain.read([300, 301], [kept[-1], kept[-1]])


@of_each_code_type
def test_texts_are_continued_cut_and_copied(code_type):
    plain = PlainRows(code_type=code_type)
    cache = plain.cache
    plain.read(*chain(0, 9), text=9)
    plain.read([9, 20, 21, 22], [8, 9, 20, 9], text=1)
    assert cache.settled == 9 and cache.room == 200 - 13, "a row of text settles at the next step"
    plain.read([23, 24], [21, 9])
    cache.retain({20, 21, 24})
    plain.assert_holds([*range(10)], [20, 21, 24])
    plain.read([25], [21])

    other = PlainRows(code_type=code_type)
    other.read([50, *range(51, 65)], [50, 50, *range(50, 63)], text=2)
    other.cache.copy(cache, 7)
    other.stored, other.parents = dict(plain.stored), dict(plain.parents)
    other.assert_holds([*range(7)], [])
    other.read([30, 31, 32], [6, 30, 30], text=1)
    other.read([33], [32])

    cache.end(21)
    plain.assert_holds([*range(10), 20, 21], [])
    assert cache.alive([21, 24, 40]) == [0]
    cache.drop()
    plain.read([40, 41], [21, 40])
    cache.truncate(11)
    plain.assert_holds([*range(10), 20], [])
    plain.read([42, 43, 44], [20, 42, 42], text=1)
    assert cache.alive([21, 40, 44]) == [0, 1, 2]
    cache.drop()
    plain.assert_holds([*range(10), 20, 42], [])
    cache.clear()
    plain.parents.clear()
    plain.read([60, 61], [60, 60], text=2)
    plain.read([62], [61], text=1)
    plain.assert_holds([60, 61], [62])


def test_a_block_that_is_guessed_at_once_sees_itself_whole_and_no_text_sees_it():
    plain = PlainRows()
    plain.read(*chain(0, 6), text=6)
    plain.read([6, 20, 21, 22], [5, 6, 6, 6], text=1, mutual=True)
    plain.cache.drop()
    plain.read([7, 30, 31], [6, 7, 7], text=1, mutual=True)


@pytest.mark.parametrize("first_form", [
    AttentionForm(cap=1.5), AttentionForm(sinks=SINKS), AttentionForm(5, 1.5, SINKS)], ids=["cap", "sinks", "all"])
@of_each_code_type
def test_soft_caps_and_sinks_are_those_of_numpy(first_form, code_type):
    plain = PlainRows((first_form.window, 0), code_type)
    plain.forms = [first_form, PLAIN]
    plain.read(*chain(0, 9), text=9)
    plain.read([9, 20, 21, 22], [8, 8, 20, 8])


@pytest.mark.parametrize("first_form", [PLAIN, AttentionForm(sinks=SINKS)], ids=["plain", "sinks"])
def test_heads_that_are_widened_one_by_one_read_the_same(monkeypatch, first_form):
    monkeypatch.setattr(attention, "MAX_WIDENED", 1)
    plain = PlainRows(code_type=torch.int8)
    plain.forms = [first_form]
    plain.read(*chain(0, 9), text=9)
    plain.read([9, 20], [8, 8])


@pytest.mark.parametrize("windows", [(), (4, 0)], ids=str)
def test_requests_that_share_a_segment_read_what_each_reads_alone(windows):
    requests = [PlainRows(windows) for _ in range(3)]
    segments = [(chain(0, 5), 5), (([0, 10, 11, 12], [0, 0, 0, 10]), 1), (chain(0, 1), 1)]
    for number, plain in enumerate(requests):
        plain.read(*chain(0, 1 + number), text=1 + number)
        plain.cache.truncate(0)
    layers = [plain.admit(*rows, text) for plain, (rows, text) in zip(requests, segments)]
    joined = caches.together([plain.cache for plain in requests], [5, 4, 1])
    wanted = [plain.expected(rows[0], layer) for plain, (rows, _), layer in zip(requests, segments, layers)]
    for layer, parts in enumerate(zip(*wanted)):
        together = [torch.cat(each, 1) for each in zip(*(request[layer] for request in layers))]
        got = joined.attend(layer, *together, requests[0].forms[layer])
        np.testing.assert_allclose(got, np.concatenate(parts, 1), rtol=1e-11)

    assert [len(rows.sees) for rows in joined.admitted()] == [5, 4, 1]
    assert [len(x) for x in joined.split(torch.zeros(10, 3))] == [5, 4, 1]
    requests[0].cache.drop()
    assert joined.settled == 5
    alone = caches.together([requests[1].cache], [4])
    assert alone is requests[1].cache and alone.split("rows") == ["rows"]


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


@pytest.mark.parametrize("code_type, max_code, num_bytes", [(torch.int8, 127, 68), (torch.int16, 32767, 132)])
def test_keys_and_values_in_codes_are_within_half_a_step_and_take_less_memory(code_type, max_code, num_bytes):
    x_KTE = torch.randn(2, 5, 64)
    x_KTE[1, 3] = 0
    codes, scale = to_codes(x_KTE, code_type)
    room = [torch.empty(2, 5, 64, dtype=torch.float64) for _ in range(2)]
    found, _ = from_codes((codes, codes, scale, scale), room)
    assert bool(((found - x_KTE).abs() <= 0.503 * scale).all())
    assert scale.squeeze(-1).tolist() == (x_KTE.abs().amax(-1).clamp(min=1e-20) / max_code).tolist()
    plain, small = (caches.TreeCache((3, 2, 50, 64),
                                     torch.float32, "cpu", (), each)
                    for each in (None, code_type))
    assert small.bytes * 256 == plain.bytes * num_bytes, "of 64 numbers the codes and a scale of 4 bytes, not 256"
    assert small.another().bytes == small.bytes


def flags_of_memory(address):
    """Return the flags of the mapping of this process that holds an address."""
    begin = end = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if "-" in name:
            begin, end = (int(number, 16) for number in name.split("-"))
        elif name == "VmFlags:" and begin <= address < end:
            return values
    return []


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this system has no large pages")
def test_a_context_that_has_grown_long_asks_for_large_pages():
    slots = slot_memory.Slots((2, 2, 1 << 16, 64), 0, torch.empty(0))
    slots.clear()
    for num_slots, is_long in ((1_000, False), (8_192, True)):
        slots.reserve(0, num_slots)
        for tensor in slots.tensors:
            num_bytes = tensor.numel() * tensor.element_size()
            assert (num_bytes >= 4 << 20) == is_long
            assert ("hg" in flags_of_memory(tensor.data_ptr() + num_bytes // 2)) == is_long
