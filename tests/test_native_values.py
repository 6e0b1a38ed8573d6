"""The native kernels compute the right values: those of some lines of numpy in float64, which are transformers' values.

Weights are drawn so that every step of a layer counts: scores of attention differ by several units, norms and biases
are far from neutral, and each sublayer adds as much as its input. Sizes are odd, so that loops over vectors have a
remainder. `tests/test_native.py` compares the bits of rows, instruction sets and texts with one another.
"""
import ctypes
import subprocess
import threading
import time
from ctypes import CFUNCTYPE, c_int64, c_void_p
from dataclasses import replace
from functools import lru_cache
from itertools import product

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from config.presets import ROOT
from config.schema.families import FAMILIES, Family, published
from model.cache import together
from model.llama import LlamaConfig, Scales, Slice
from model.native import compiler
from model.native.compiler import levels, library
from model.native.layers import NativeSlice
from model.native.linear import NativeProducts
from model.slots import HeldSlots

PLAIN = levels()[-1]  # C without special instructions, which is compiled fastest
try:
    library(PLAIN)
except ValueError as error:
    pytest.skip(f"no native kernels: {error}", allow_module_level=True)

GROUP = 32  # inputs of a row that share a scale
ROW_CODES = 32639  # the largest code of a row
CACHED_CODES = {torch.int8: 127, torch.int16: 32767}  # and of a key or value
SCALES = {  # where a block of each type has scales in float16
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,)}
BLOCK_SIZES = {name: gguf.GGML_QUANT_SIZES[GGMLQuantizationType[name]] for name in SCALES}  # weights, and bytes
TYPES_BY_BYTES = {num_bytes: GGMLQuantizationType[name] for name, (_, num_bytes) in BLOCK_SIZES.items()}
LEVELS = {level.name: level for level in reversed(levels())}
of_each_level = pytest.mark.parametrize("level", LEVELS)

# of float32, in units of a row's root mean square; a step that is left out changes 1,000 times as much
FLOAT_ERROR = 2e-5
BLOCKS_ERROR = 1e-3  # where rows are rounded to codes of 16 bits
CODE_ERRORS = {  # where a key or value may be rounded to the next code: of the worst row, and of the best tenth
    torch.int8: (0.05, FLOAT_ERROR), torch.int16: (1e-3, 2 * FLOAT_ERROR)}

SIZES = LlamaConfig(hidden=37, layers=3, heads=6, kv_heads=2, head_dim=24, intermediate=45, vocab=50, context=1024,
                    eps=0.1, theta=100.0)
EVERY_STEP = Family("Everything", qkv_bias=True, bias=True, head_norms=True, gelu=True, after=True, scaled=True,
                    norm_weight_plus_one=True)
CONFIGS = {
    "every step": replace(SIZES, family=EVERY_STEP, windows=(5, 0, 11), skips_rope=(False, False, True),
                          local_theta=10.0, scales=Scales(0.7, residual=0.6, scores=0.4, score_cap=6.0)),
    "no option": SIZES,
    "biases of queries": replace(SIZES, family=FAMILIES["qwen2"]),
    "norms of heads": replace(SIZES, family=FAMILIES["qwen3"], kv_heads=6, head_dim=72),
    "norms behind": replace(SIZES, family=FAMILIES["glm4"], rotated_share=0.75, head_dim=16),
    "windows": replace(SIZES, windows=(7, 0, 7), kv_heads=1),
    "soft cap": replace(SIZES, family=FAMILIES["gemma2"], scales=Scales(score_cap=2.0), head_dim=8),
    "local positions": replace(SIZES, local_theta=3.0, windows=(0, 9, 0), head_dim=128, heads=2),
    "residual factor": replace(SIZES, scales=Scales(residual=0.3), skips_rope=(True, False, True)),
    "sharp scores": replace(SIZES, scales=Scales(scores=2.0)),  # beyond what an exponential function can return
}


# --- the right values -------------------------------------------------------------------------------------------------

def rms_norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rotated(x_THE, position_T, theta, rotated_dim):
    """Multiply pairs of dimensions, as complex numbers, by the rotation of their position."""
    num_pairs = rotated_dim // 2
    frequencies = theta ** (-np.arange(num_pairs) / num_pairs)
    turns = np.exp(1j * position_T[:, None, None] * frequencies)
    pairs = (x_THE[..., :num_pairs] + 1j * x_THE[..., num_pairs:rotated_dim]) * turns
    return np.concatenate((pairs.real, pairs.imag, x_THE[..., rotated_dim:]), -1)


def attention(q_THE, k_THE, v_THE, is_visible_TT, scale, cap):
    """Return the attention `[T, H * E]`, and how far the scores of a row lie apart on average."""
    scores = np.einsum("the,she->hts", q_THE, k_THE) * scale
    if cap:
        scores = cap * np.tanh(scores / cap)
    seen_scores = np.where(is_visible_TT, scores, np.nan)
    spread = np.mean(np.nanmax(seen_scores, -1) - np.nanmin(seen_scores, -1))

    weights = np.where(is_visible_TT, np.exp(scores - np.nanmax(seen_scores, -1, keepdims=True)), 0)
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hts,she->the", weights, v_THE).reshape(len(q_THE), -1), spread


def activation(gate, is_gelu):
    if is_gelu:
        return gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate ** 3)))
    return gate / (1 + np.exp(-gate))


def exactly(x):
    return x


def in_codes(x, size=GROUP, max_code=ROW_CODES):
    """Round successive elements to codes with one scale; numbers are in float32, where halves may differ."""
    groups = x.astype(np.float32).reshape(-1, size)
    largest = np.abs(groups).max(-1, keepdims=True)
    codes = np.rint(groups * (np.float32(max_code) / np.where(largest == 0, 1, largest)))
    return (codes.astype(float) * (largest / np.float32(max_code))).reshape(x.shape)


def from_blocks(blocks):
    """Return a weight `[N, I]` from its blocks `[N, B, bytes]`, as llama.cpp reads them."""
    weight = gguf.dequantize(blocks.flatten(1).numpy(), TYPES_BY_BYTES[blocks.shape[2]])
    return weight.astype(float)


class RightLayers:
    """Layers in float64, of all rows of a text with guesses at once; `rounds_cached` is applied to keys and values."""

    def __init__(self, c, tensors, rounds_cached=exactly):
        self.config, self.rounds_cached = c, rounds_cached
        self.tensors = {name: from_blocks(x) if x.dim() == 3 else x.double().numpy() for name, x in tensors.items()}
        self.spreads = []  # of the scores of each layer

    def norm(self, name, x):
        weight = self.tensors[f"{name}.weight"]
        return rms_norm(x, weight + self.config.family.norm_weight_plus_one, self.config.eps)

    def product(self, name, x, has_bias):
        products = x @ self.tensors[f"{name}.weight"].T
        return products + self.tensors[f"{name}.bias"] if has_bias else products

    def whole(self, tokens, path_TT):
        """Return the results of all layers of a model for these tokens."""
        return self.norm("norm", self.inputs(self.embed(tokens), path_TT)[-1])

    def embed(self, tokens):
        return self.tensors["embed_tokens.weight"][tokens] * (self.config.scales.embedding or 1)

    def layer(self, number, x_TD, path_TT):
        """Compute a layer; `path_TT` says which rows are on the path of each row."""
        c, name = self.config, f"layers.{number}"
        x_TD = x_TD + self.sublayer_output(
            f"{name}.after_attention", self.attend(number, self.norm(f"{name}.input_layernorm", x_TD), path_TT))

        normed = self.norm(f"{name}.post_attention_layernorm", x_TD)
        gate, up = (self.product(f"{name}.mlp.{branch}_proj", normed, c.family.bias) for branch in ("gate", "up"))
        gated = activation(gate, c.family.gelu) * up
        return x_TD + self.sublayer_output(
            f"{name}.after_mlp", self.product(f"{name}.mlp.down_proj", gated, c.family.bias))

    def sublayer_output(self, norm_name, x_TD):
        return (self.norm(norm_name, x_TD) if self.config.family.after else x_TD) * self.config.scales.residual

    def attend(self, number, normed_TD, path_TT):
        c, name = self.config, f"layers.{number}.self_attn"
        window = c.windows[number] if c.windows else 0
        q, k, v = (self.product(f"{name}.{letter}_proj", normed_TD, c.family.qkv_bias)
                   .reshape(len(normed_TD), -1, c.head_dim) for letter in "qkv")
        if c.family.head_norms:
            q, k = self.norm(f"{name}.q_norm", q), self.norm(f"{name}.k_norm", k)
        if not (c.skips_rope and c.skips_rope[number]):
            theta = c.local_theta if c.local_theta and window else c.theta
            q, k = (rotated(x, path_TT.sum(1) - 1, theta, int(c.head_dim * c.rotated_share)) for x in (q, k))

        is_visible = path_TT
        if window:
            number_on_path = path_TT.cumsum(1)
            is_visible = path_TT & (number_on_path > number_on_path[:, -1:] - window)
        k, v = (self.rounds_cached(x).repeat(c.heads // c.kv_heads, 1) for x in (k, v))
        attended, spread = attention(q, k, v, is_visible, c.scales.scores or c.head_dim ** -0.5, c.scales.score_cap)
        self.spreads.append(spread)
        return self.product(f"{name}.o_proj", attended, c.family.bias)

    def inputs(self, x_TD, path_TT, first=0, last=None):
        """Return the input of each layer from `first` to before `last`, then the output of the last one."""
        rows = [x_TD]
        for number in range(first, self.config.layers if last is None else last):
            rows.append(self.layer(number, rows[-1], path_TT))
        return rows


def errors_of(rows, right_rows):
    """Return the largest error of each row, in units of its root mean square."""
    right_rows = np.asarray(right_rows)
    assert rows.shape == right_rows.shape
    return np.abs(rows.numpy() - right_rows).max(-1) / np.sqrt((right_rows ** 2).mean(-1))


def assert_close(rows, right_rows, most=FLOAT_ERROR):
    errors = errors_of(rows, right_rows)
    assert errors.max() < most, errors


def assert_close_in_codes(rows, right_rows, code_type):
    """A number that is nearly halfway between two codes may become either, which shows in the rows that read it. Some
    rows read no such number."""
    errors, (most, usual) = errors_of(rows, right_rows), CODE_ERRORS[code_type]
    assert errors.max() < most and np.quantile(errors, 0.1) < usual, errors


# --- what is computed -------------------------------------------------------------------------------------------------

@lru_cache(maxsize=None)
def tensors_of(config_name):
    return drawn_tensors(CONFIGS[config_name])


def drawn_tensors(c):
    """Random weights by name: queries and keys so large that scores differ by several units."""
    noise = np.random.default_rng(5)
    tensors = {}
    for name, parameter in Slice(c, 0, c.layers).named_parameters():
        shape = tuple(parameter.shape)
        if "norm.weight" in name or "after_" in name:
            numbers = noise.uniform(0.6, 2.4, shape)
        elif name.endswith("bias") or name.startswith("embed"):
            numbers = noise.normal(0, 1, shape)
        else:
            gain = 1.5 if "q_proj" in name or "k_proj" in name else 0.8
            numbers = noise.normal(0, gain, shape) / np.sqrt(shape[1])
        tensors[name] = torch.tensor(numbers, dtype=torch.float32)
    return tensors


# A text of 21 rows, read in three segments, then guesses below it in three: by segment, the parent of each row.
TEXT_SEGMENTS = (-1,), range(11), range(11, 20)
GUESSED_SEGMENTS = (20, 20, 20, 21, 21, 22, 24, 24, 27, 23, 26), (29,), (20, 21, 30, 33, 34, 35, 33, 32, 38, 38, 40)
PARENTS = [parent for parents in TEXT_SEGMENTS + GUESSED_SEGMENTS for parent in parents]
NUM_TEXT_ROWS = sum(map(len, TEXT_SEGMENTS))
TOKENS = np.random.default_rng(2).integers(0, SIZES.vocab, len(PARENTS))


def paths(parents):
    """Return which rows `[T, T]` are on the path of each row, from the parents of the rows; -1 for none."""
    path_TT = np.eye(len(parents), dtype=bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            path_TT[row] |= path_TT[parent]
    return path_TT


PATHS = paths(PARENTS)


class NativeRows:
    """Native layers, which read the rows of a text by their numbers, and a cache."""

    def __init__(self, c, tensors, level=PLAIN, num_threads=1, code_type=None, layers=None):
        layers = layers or range(c.layers)
        whole_slice, windows = Slice(c, layers[0], layers[-1] + 1), [c.window(number) for number in layers]
        slice_tensors = {name: tensors[name] for name, _ in whole_slice.named_parameters()}
        self.layers = NativeSlice(whole_slice, slice_tensors, num_threads, windows, level)
        self.cache = c.cache(len(layers), 1024, torch.empty(0), windows, code_type)

    def read(self, x, parents, first_row=0, num_text_rows=0, **others):
        """Read the rows that follow `first_row`, of which the first ones are text."""
        rows = range(first_row, first_row + len(x))
        self.cache.admit(rows, [parents[row] for row in rows], num_text_rows)
        return self.layers(x, self.positions(rows, parents), self.cache, **others)

    @staticmethod
    def positions(rows, parents):
        return torch.tensor(paths(parents)[rows].sum(1) - 1)

    def read_all(self, x):
        """Read text and guesses in their segments."""
        results, row = [], 0
        for segment in TEXT_SEGMENTS + GUESSED_SEGMENTS:
            end = row + len(segment)
            results.append(self.read(x[row:end], PARENTS, row, min(len(segment), max(0, NUM_TEXT_ROWS - row))))
            row = end
        return torch.cat(results)


@lru_cache(maxsize=None)
def right_rows(config_name):
    """Return the right results for all rows, and how far scores lie apart."""
    layers = RightLayers(CONFIGS[config_name], tensors_of(config_name))
    rows = layers.whole(TOKENS, PATHS)
    return rows, layers.spreads


@of_each_level
@pytest.mark.parametrize("config_name", CONFIGS)
def test_the_layers_compute_the_right_values(config_name, level):
    wanted_rows, spreads = right_rows(config_name)
    assert min(spreads) > 2, "the scores of a row are too much alike to show an error"
    most = FLOAT_ERROR if max(spreads) < 40 else 20 * FLOAT_ERROR  # far apart, scores lose more digits
    rows = NativeRows(CONFIGS[config_name], tensors_of(config_name), LEVELS[level]).read_all(torch.from_numpy(TOKENS))
    assert_close(rows, wanted_rows, most)


@of_each_level
@pytest.mark.parametrize("is_gelu", [False, True])
def test_gates_and_scores_beyond_what_an_exponential_function_can_return(is_gelu, level):
    c = replace(SIZES, family=replace(FAMILIES["llama"], gelu=is_gelu), scales=Scales(scores=20.0, score_cap=1.5))
    tensors = {name: 80 * x if "gate_proj" in name else x for name, x in drawn_tensors(c).items()}
    rows = NativeRows(c, tensors, LEVELS[level]).read_all(torch.from_numpy(TOKENS))
    assert_close(rows, RightLayers(c, tensors).whole(TOKENS, PATHS), 10 * FLOAT_ERROR)


LEFT_OUT = {
    "no windows": {"windows": ()}, "other windows": {"windows": (6, 0, 11)}, "one more window": {"windows": (5, 9, 11)},
    "all rotate": {"skips_rope": ()}, "one more does not rotate": {"skips_rope": (False, True, True)},
    "no local positions": {"local_theta": 0.0}, "half a head rotates": {"rotated_share": 0.5}, "no epsilon": {"eps": 0},
    **{f"{name} without effect": {"scales": CONFIGS["every step"].scales._replace(**{name: value})}
       for name, value in (("embedding", 0), ("residual", 1), ("scores", 0), ("score_cap", 0))},
    **{f"no {name}": {"family": replace(EVERY_STEP, **{name: False})}
       for name in ("qkv_bias", "bias", "head_norms", "gelu", "after", "norm_weight_plus_one")},
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_without_a_step_no_bound_is_kept(name):
    """The right values change far more than the bounds if a step is left out, with these weights."""
    c = CONFIGS["every step"]
    layers = RightLayers(replace(c, **LEFT_OUT[name]), tensors_of("every step"))
    changed_rows = layers.whole(TOKENS, PATHS)
    with pytest.raises(AssertionError):
        assert_close(torch.from_numpy(changed_rows), right_rows("every step")[0], 0.2)


# --- segments ---------------------------------------------------------------------------------------------------------

def test_layers_in_the_middle_of_a_model_compute_the_right_values():
    """They have their own windows, no embedding and no norm; the inputs of layers are copied where they are wanted."""
    c, first, last = replace(CONFIGS["every step"], layers=4, windows=(0, 11, 0, 5)), 1, 3
    c = replace(c, skips_rope=(True, False, True, False))
    tensors = drawn_tensors(c)
    x_TD = np.random.default_rng(4).normal(0, 1, (len(PARENTS), c.hidden)).astype(np.float32)
    right_inputs = RightLayers(c, tensors).inputs(x_TD.astype(float), PATHS, first, last)

    native = NativeRows(c, tensors, layers=range(first, last))
    wanted = {number: torch.empty(0) for number in (0, 2, 3, 4)}
    rows = native.read(torch.from_numpy(x_TD), PARENTS, inner=wanted)
    assert_close(rows, right_inputs[2])
    assert_close(wanted[2], right_inputs[1])
    assert [len(wanted[number]) for number in (0, 3, 4)] == [0, 0, 0], "other slices compute these inputs"


def test_the_output_of_the_last_layer_is_copied_before_the_norm():
    c, name = CONFIGS["no option"], "no option"
    layers = RightLayers(c, tensors_of(name))
    right_inputs = layers.inputs(layers.embed(TOKENS), PATHS)
    copies = {number: torch.empty(0) for number in (0, 1, 2, 3)}
    NativeRows(c, tensors_of(name)).read(torch.from_numpy(TOKENS), PARENTS, inner=copies)
    for number, right_input in enumerate(right_inputs):
        assert_close(copies[number], right_input)


@pytest.mark.parametrize("num_rows, layers_between_questions", [(92, 1), (91, 2), (46, 2), (45, 3)])
def test_a_segment_is_given_up_between_layers(num_rows, layers_between_questions):
    """It is asked for before the first layer, and before one that follows 2 ** 25 products of weights and rows."""
    c = replace(SIZES, layers=6, hidden=160, intermediate=640)
    native = NativeRows(c, drawn_tensors(c))
    num_weights = (10 + 6) * 24 * 160 + 3 * 160 * 640
    assert -(-2 ** 25 // (num_weights * num_rows)) == layers_between_questions

    tokens, parents = torch.zeros(num_rows, dtype=torch.int64), [*range(-1, num_rows - 1)]
    answers = [True, False]
    assert native.read(tokens, parents, still_needed=lambda: answers.pop(0)) is None and not answers

    native.cache.clear()
    answers = [True] * 6
    assert native.read(tokens, parents, still_needed=lambda: answers.pop()) is not None
    assert len(answers) == 6 - 6 // layers_between_questions


@of_each_level
def test_requests_that_share_a_segment_have_their_own_paths(level):
    name, num_other_rows = "windows", 5
    native = NativeRows(CONFIGS[name], tensors_of(name), LEVELS[level], num_threads=2)
    other, num_rows = native.cache.another(), len(PARENTS)
    native.cache.admit(range(num_rows), PARENTS, 0)
    other.admit(range(num_other_rows), PARENTS[:num_other_rows], 0)
    positions = native.positions(range(num_rows), PARENTS)

    tokens, cache = torch.from_numpy(TOKENS), together([other, native.cache], [num_other_rows, num_rows])
    rows = native.layers(torch.cat((tokens[:num_other_rows], tokens)),
                       torch.cat((positions[:num_other_rows], positions)), cache)
    right = right_rows(name)[0]
    assert_close(rows, np.concatenate((right[:num_other_rows], right)))


@pytest.mark.parametrize("code_type", [None, torch.int8, torch.int16])
def test_slots_before_the_windows_are_dropped(code_type):
    """A text of which a cache keeps the end for some layers and all for another, then guesses."""
    c = replace(CONFIGS["windows"], hidden=16, heads=2, layers=2)
    num_text_rows, num_rows = 460, 470
    parents = [row - 1 for row in range(num_text_rows + 1)] + [num_text_rows] * (num_rows - num_text_rows - 1)
    tokens = np.random.default_rng(3).integers(0, c.vocab, num_rows)
    layers = RightLayers(c, drawn_tensors(c), rounding_to(code_type) if code_type else exactly)
    wanted_rows = layers.whole(tokens, paths(parents))

    native = NativeRows(c, drawn_tensors(c), code_type=code_type)
    results = [native.read(torch.from_numpy(tokens[row:end]), parents, row, min(end, num_text_rows) - row)
               for row, end in ((0, 300), (300, 460), (460, 470))]
    assert [slots.first > 0 for slots in native.cache.slots] == [False, True]
    if code_type:
        assert_close_in_codes(torch.cat(results), wanted_rows, code_type)
    else:
        assert_close(torch.cat(results), wanted_rows, 10 * FLOAT_ERROR)  # of the angles of far positions


# --- numbers in codes -------------------------------------------------------------------------------------------------

def rounding_to(code_type):
    """Return a function that rounds keys or values to codes, with a scale for each head and row."""
    return lambda x_TKE: in_codes(x_TKE, x_TKE.shape[-1], CACHED_CODES[code_type])


@of_each_level
@pytest.mark.parametrize("code_type", CACHED_CODES, ids=str)
@pytest.mark.parametrize("config_name", ["every step", "norms of heads", "local positions"])
def test_layers_with_a_cache_of_codes_compute_the_right_values(config_name, code_type, level):
    c, tensors = replace(CONFIGS[config_name], layers=2), tensors_of(config_name)
    layers = RightLayers(c, tensors, rounding_to(code_type))
    wanted_rows = layers.whole(TOKENS, PATHS)
    rows = NativeRows(c, tensors, LEVELS[level], code_type=code_type).read_all(torch.from_numpy(TOKENS))
    assert_close_in_codes(rows, wanted_rows, code_type)


@pytest.mark.parametrize("code_type", CACHED_CODES, ids=str)
def test_keys_and_values_of_zeros_have_codes_too(code_type):
    c, tensors = CONFIGS["no option"], dict(tensors_of("no option"))
    tensors.update({name: 0 * x for name, x in tensors.items() if "k_proj" in name or "v_proj" in name})
    layers = RightLayers(c, tensors)
    wanted_rows = layers.whole(TOKENS, PATHS)
    assert_close(NativeRows(c, tensors, code_type=code_type).read_all(torch.from_numpy(TOKENS)), wanted_rows)


BLOCK_LAYERS = {  # the types of blocks of a layer's weights; the others are in float32
    "Q8_0": {"q": "Q8_0", "k": "Q8_0", "v": "Q8_0", "o": "Q8_0", "gate": "Q8_0", "up": "Q8_0", "down": "Q8_0"},
    "mixed": {"q": "Q8_0", "k": "Q4_1", "v": "Q5_0", "gate": "Q4_0", "up": "Q4_1", "down": "Q5_1"},
    "some in float32": {"q": "Q8_0", "o": "Q4_1", "up": "Q8_0"},
}


@of_each_level
@pytest.mark.parametrize("block_types", BLOCK_LAYERS.values(), ids=BLOCK_LAYERS)
def test_layers_of_blocks_compute_the_right_values(block_types, level):
    c = replace(CONFIGS["every step"], hidden=64, heads=4, intermediate=96)
    tensors = drawn_tensors(c)
    for name, x in tensors.items():
        block_type = next((block_types[key] for key in block_types if name.endswith(f".{key}_proj.weight")), None)
        if block_type:
            stored = gguf.quantize(x.numpy(), GGMLQuantizationType[block_type])
            tensors[name] = torch.from_numpy(stored.reshape(len(x), -1, BLOCK_SIZES[block_type][1]))

    rows = NativeRows(c, tensors, LEVELS[level], num_threads=2).read_all(torch.from_numpy(TOKENS))
    assert_close(rows, RightLayers(c, tensors).whole(TOKENS, PATHS), BLOCKS_ERROR)


# --- products ---------------------------------------------------------------------------------------------------------

NUM_OUTPUTS, NUM_INPUTS, MOST_ROWS = 71, 512, 19
PRODUCT_ERROR = 2e-6  # of sums in float32


def drawn_blocks(type_name):
    """Return blocks `[N, B, bytes]` of random bytes, which have all codes, with random scales of both signs."""
    noise, (num_weights, num_bytes) = np.random.default_rng(6), BLOCK_SIZES[type_name]
    blocks = noise.integers(0, 256, (NUM_OUTPUTS, NUM_INPUTS // num_weights, num_bytes), dtype=np.uint8)
    for begin in SCALES[type_name]:
        scales = noise.uniform(0.5, 2, blocks.shape[:2]) * noise.choice((-1, 1), blocks.shape[:2])
        blocks[..., begin:begin + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
    return torch.from_numpy(blocks)


def drawn_rows():
    """Return random rows, and others that have the largest codes only, a single one, or none."""
    rows = np.random.default_rng(7).normal(0, 1, (MOST_ROWS, NUM_INPUTS)).astype(np.float32)
    rows[1], rows[2], rows[3], rows[4], rows[4, 45] = 1, -1, 0, 0, 3
    rows[5, ::2], rows[5, 1::2] = 2, -2
    return rows


def assert_products(products, rows, weight, bias):
    """Errors are compared with the sum of the magnitudes of what is added."""
    right_products, sizes = rows @ weight.T + bias, np.abs(rows) @ np.abs(weight).T + np.abs(bias)
    for num_rows in (*range(1, 9), MOST_ROWS):
        errors = np.abs(products(num_rows).numpy() - right_products[:num_rows])
        assert (errors <= PRODUCT_ERROR * sizes[:num_rows]).all(), errors


@pytest.mark.parametrize("type_name, level", [
    *product(("float32", "bfloat16", "Q8_0", "Q6_K", "Q4_1"), LEVELS),  # each form
    *product(("Q4_0", "Q5_0", "Q5_1", "Q4_K", "Q5_K"), [PLAIN.name])])
def test_products_have_the_right_values(type_name, level):
    """Beside any number of rows, by one thread and by several, with a bias and without."""
    rows, noise = drawn_rows(), np.random.default_rng(8)
    bias = noise.normal(0, 100, NUM_OUTPUTS).astype(np.float32)
    if type_name in SCALES:
        stored = drawn_blocks(type_name)
        weight, right_inputs = from_blocks(stored), in_codes(rows)
    else:
        stored = torch.from_numpy(noise.normal(0, 1, (NUM_OUTPUTS, NUM_INPUTS)).astype(np.float32))
        stored = stored.to(getattr(torch, type_name)).float()
        weight, right_inputs = stored.double().numpy(), rows.astype(float)

    for num_threads, used_bias in ((1, None), (3, bias)):
        products = NativeProducts(num_threads, LEVELS[level])
        linear = products.linear(stored, None if used_bias is None else torch.from_numpy(used_bias))
        assert_products(lambda num_rows, linear=linear: linear(torch.from_numpy(rows[:num_rows])),
                        right_inputs, weight, 0 if used_bias is None else used_bias)


@of_each_level
@pytest.mark.parametrize("type_name", ["Q8_0", "Q5_1", "Q4_1"])
def test_the_last_group_may_have_fewer_inputs(type_name, level):
    """In C; weights in blocks have whole groups."""
    blocks, num_inputs = drawn_blocks(type_name)[:, :3], 85
    linear = NativeProducts(1, LEVELS[level]).linear(blocks)
    linear.in_features = linear._weight.num_inputs = num_inputs

    rows = np.ascontiguousarray(drawn_rows()[:, :num_inputs])
    right_inputs = in_codes(np.pad(rows, ((0, 0), (0, 3 * GROUP - num_inputs))))
    assert_products(lambda num_rows: linear(torch.from_numpy(rows[:num_rows])), right_inputs, from_blocks(blocks), 0)


@of_each_level
@pytest.mark.parametrize("type_name", ["Q8_0", "Q6_K", "Q4_1"])
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_row_that_is_not_finite_spoils_only_its_own_products(number, type_name, level):
    blocks, rows = drawn_blocks(type_name), drawn_rows()
    rows[6, 40] = number
    products = NativeProducts(1, LEVELS[level]).linear(blocks)(torch.from_numpy(rows))
    assert not products[6].isfinite().any()
    right_products = in_codes(np.delete(rows, 6, 0)) @ from_blocks(blocks).T
    assert_close(torch.cat((products[:6], products[7:]))[[0, 1, 2, *range(5, MOST_ROWS - 1)]],
                 np.delete(right_products, (3, 4), 0))


# --- what is refused --------------------------------------------------------------------------------------------------

def rows_of(c, change):
    """Return three rows behind five of text, computed after a change of what their cache has admitted."""
    native = NativeRows(c, tensors_of("no option"))
    native.read(torch.from_numpy(TOKENS[:5]), PARENTS, 0, 5)
    native.cache.admit(range(5, 8), PARENTS[5:8], 0)
    admitted = change(native.cache.admitted()[0])
    native.cache.admitted = lambda: admitted
    return native.layers(torch.from_numpy(TOKENS[5:8]), torch.arange(5, 8), native.cache)


def sees(shape, strides):
    return lambda rows: [rows._replace(sees=np.lib.stride_tricks.as_strided(np.ones(100, bool), shape, strides))]


def slots(first=0, num_slots=8, num_layers=3):
    """Return a change of the sizes of slots, of which only a few have memory."""
    shape = num_layers, SIZES.kv_heads, num_slots, SIZES.head_dim
    tensors = [torch.zeros(1, 1, 1, 1).expand(shape)] * 2
    return lambda rows: [rows._replace(slots=[HeldSlots(tensors, first)])]


MANY = 1 << 31
REFUSED_ROWS = {
    "fewer rows than the segment": lambda rows: [rows._replace(sees=rows.sees[:2])],
    "more rows than the segment": lambda rows: [rows, rows],
    "no request": lambda rows: [],
    "a request without rows": lambda rows: [rows, rows._replace(sees=rows.sees[:0])],
    "a tail that is shorter than the rows": sees((3, 2), (2, 1)),
    "a mask whose rows overlap": sees((3, 3), (2, 1)),
    "a tail that is too long": lambda rows: sees((3, MANY), (MANY, 1))(*slots(num_slots=MANY + 9)(rows)),
    "fewer settled slots than none": lambda rows: [rows._replace(settled=-1)],
    "so many settled slots that their sum overflows": lambda rows: [rows._replace(settled=(1 << 63) - 1)],
    "too many settled slots": lambda rows: [slots(MANY, 9)(rows)[0]._replace(settled=MANY)],
    "no slots": lambda rows: [rows._replace(slots=[])],
    "slots of fewer layers": slots(num_layers=2),
    "too few slots": slots(num_slots=7),
    "slots that begin before the text": slots(-1, 9),
    "slots that begin behind the first row": slots(6, 9),
    "a row that does not see itself": lambda rows: [rows._replace(sees=np.eye(3, dtype=bool)[::-1].copy())],
}


@pytest.mark.parametrize("change", REFUSED_ROWS.values(), ids=REFUSED_ROWS)
def test_rows_that_do_not_fit_their_cache_are_refused(change):
    with pytest.raises(IndexError, match="the rows do not fit their caches"):
        rows_of(CONFIGS["no option"], change)


@pytest.mark.parametrize("change", [lambda rows: [rows], sees((3, 3), (3, 1)), lambda rows: [
    rows._replace(slots=[HeldSlots([x[:, :, :8].contiguous() for x in rows.slots[0].tensors])])]], ids=range(3))
def test_rows_that_just_fit_their_cache_are_computed(change):
    assert rows_of(CONFIGS["no option"], change).isfinite().all()


def test_layers_with_local_positions_need_their_tables():
    native = NativeRows(CONFIGS["every step"], tensors_of("every step"))
    native.layers.body.local_rotary = None
    with pytest.raises(IndexError, match="the rows do not fit their caches"):
        native.read(torch.from_numpy(TOKENS), PARENTS)


# --- threads and memory -----------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """The kernels on a system that counts and refuses; see native_counted.c."""
    folder, source = tmp_path_factory.mktemp("counted"), ROOT / "tests" / "native_counted.c"
    flags = [flag for flag in compiler.STRICT_FLAGS if flag not in ("-O3", "-fvisibility=hidden")]
    subprocess.run(["cc", *flags, "-O1", f"-I{compiler.SOURCE_FOLDER}", str(source), "-o", str(folder / "counted.so"),
                    "-lm"], check=True)
    counted_library = ctypes.CDLL(str(folder / "counted.so"))
    counted_library.pool_new.restype, counted_library.pool_size.restype = c_void_p, c_int64
    return counted_library


def count(counted, name):
    return ctypes.c_int.in_dll(counted, name)


def assert_all_given_back(counted):
    assert (count(counted, "num_held").value, count(counted, "num_misuses").value) == (0, 0)


def run_items(counted, pool, num_items, work):
    """Call `work(item, thread)` for items in a pool; in a thread, since Python cannot interrupt C."""
    c_work = CFUNCTYPE(None, c_void_p, c_int64, c_int64)(lambda job, item, thread: work(item, thread))
    calling = threading.Thread(target=counted.pool_run, args=(c_void_p(pool), c_work, None, c_int64(num_items)),
                               daemon=True)
    calling.start()
    calling.join()


@pytest.fixture
def pool(counted):
    pool = counted.pool_new(c_int64(3))
    yield pool
    counted.pool_free(c_void_p(pool))
    assert_all_given_back(counted)


def test_each_item_is_computed_once_by_a_thread_of_the_pool(counted, pool):
    assert counted.pool_size(c_void_p(pool)) == 3
    for num_items in (0, 1, 2, 3, 500, 1, 0, 5):
        calls = []
        run_items(counted, pool, num_items, lambda *call, calls=calls: calls.append(call))
        assert sorted(item for item, _ in calls) == list(range(num_items))
        assert {thread for _, thread in calls} <= ({0} if num_items == 1 else {0, 1, 2})


def test_a_pool_of_one_thread_computes_all_items(counted):
    pool, calls = counted.pool_new(c_int64(1)), []
    run_items(counted, pool, 4, lambda *call: calls.append(call))
    counted.pool_free(c_void_p(pool))
    assert calls == [(item, 0) for item in range(4)]
    assert_all_given_back(counted)


def wait_until_asleep(counted, num_threads):
    while count(counted, "num_waiting").value < num_threads:
        time.sleep(0.001)


def test_threads_without_work_sleep_and_wake_up_for_a_job(counted, pool):
    """Each item waits for those of the two other threads."""
    for _ in range(4):
        wait_until_asleep(counted, 2)
        assert counted.num_believed_asleep(c_void_p(pool)) == 2
        meeting, threads = threading.Barrier(3), []
        run_items(counted, pool, 3, lambda item, thread, meeting=meeting, threads=threads:
                  (meeting.wait(), threads.append(thread)))
        assert sorted(threads) == [0, 1, 2]


def test_a_caller_sleeps_until_the_slowest_thread_has_ended(counted, pool):
    for _ in range(4):
        meeting, ended = threading.Barrier(3), []

        def work(item, thread, meeting=meeting, ended=ended):
            meeting.wait()
            if thread:
                wait_until_asleep(counted, 1)
            ended.append(item)

        run_items(counted, pool, 3, work)
        assert sorted(ended) == [0, 1, 2]


@pytest.mark.parametrize("function_name, lowest, highest", [("exp", -86, 88), ("tanh", -12, 12), ("tanh", -0.7, 0.7)])
def test_functions_are_right_to_some_units_in_the_last_place(counted, function_name, lowest, highest):
    x = np.linspace(lowest, highest, 8000, dtype=np.float32)
    results, right_results = np.empty_like(x), getattr(np, function_name)(x.astype(float))
    x_address, results_address = (c_void_p(array.ctypes.data) for array in (x, results))
    getattr(counted, f"{function_name}_of_each")(x_address, c_int64(len(x)), results_address)
    errors = np.abs(results - right_results) / np.abs(right_results)
    assert errors.max() < 5 * 2 ** -24, errors.max() * 2 ** 24


def test_layers_give_back_their_memory_threads_and_locks(counted, monkeypatch):
    monkeypatch.setattr("model.native.layers.library", lambda level: counted)
    native = NativeRows(CONFIGS["every step"], tensors_of("every step"), num_threads=3)
    assert_close(native.read_all(torch.from_numpy(TOKENS)), right_rows("every step")[0])
    assert count(counted, "num_held").value == 9, "a slice, its memory, a pool, its list of threads, threads, locks"
    del native
    assert_all_given_back(counted)


def test_what_the_system_refuses_is_an_error_that_leaves_nothing_behind(counted, monkeypatch):
    monkeypatch.setattr("model.native.linear.library", lambda level: counted)
    requests_left = count(counted, "requests_left")
    for number in range(5):  # a slice, a pool, its list of threads, two threads
        requests_left.value = number
        with pytest.raises(MemoryError, match="3 threads cannot be started: give threads_per_rank a smaller value"):
            NativeProducts(3)
        assert requests_left.value == -1, "nothing is requested after a refusal"
        assert_all_given_back(counted)

    products, blocks, rows = NativeProducts(3), drawn_blocks("Q8_0"), drawn_rows()
    linear = products.linear(blocks)
    requests_left.value = 0
    with pytest.raises(MemoryError, match="the native kernels got no memory: give max_length or prefill_chunk"):
        linear(torch.from_numpy(rows[:1]))
    assert_products(lambda num_rows, linear=linear: linear(torch.from_numpy(rows[:num_rows])),
                    in_codes(rows), from_blocks(blocks), 0)

    requests_left.value = 0
    linear(torch.from_numpy(rows[:4]))
    assert requests_left.value == 0, "memory is kept"
    requests_left.value = -1
    del products, linear
    assert_all_given_back(counted)


# --- the right values themselves --------------------------------------------------------------------------------------

LIBRARY_MODELS = {  # which have every step between them
    "Qwen2": {}, "Qwen3": {"head_dim": 24},
    "Gemma2": {"head_dim": 24, "query_pre_attn_scalar": 6, "sliding_window": 5, "attn_logit_softcapping": 2.0},
    "Gemma3Text": {"head_dim": 24, "query_pre_attn_scalar": 6, "sliding_window": 5, "rope_theta": 100.0,
                   "rope_local_base_freq": 5.0, "layer_types": ["sliding_attention", "full_attention"]},
    "Granite": {"attention_multiplier": 0.4, "residual_multiplier": 0.6, "embedding_multiplier": 3.0},
    "SmolLM3": {"no_rope_layers": [1, 0], "pad_token_id": 0},
}


@pytest.mark.parametrize("library_name", LIBRARY_MODELS)
def test_the_right_values_are_those_of_transformers(library_name):
    import transformers

    library_config = getattr(transformers, f"{library_name}Config")(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=45,
        vocab_size=50, rms_norm_eps=0.1, **LIBRARY_MODELS[library_name])
    library_config._attn_implementation = "eager"  # the only one with soft caps
    library_model = getattr(transformers, f"{library_name}Model")(library_config).double().eval()

    c = LlamaConfig.read({**library_config.to_dict(), "model_type": library_config.model_type})
    tensors = drawn_tensors(c)
    published_tensors = {published(f"model.{name}", c.family)[len("model."):]: x for name, x in tensors.items()}
    library_model.load_state_dict(published_tensors)
    rows = library_model(torch.from_numpy(TOKENS)[None]).last_hidden_state[0]
    assert_close(rows, RightLayers(c, tensors).whole(TOKENS, np.tri(len(TOKENS), dtype=bool)))
