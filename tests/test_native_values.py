"""The native kernels compute the right values: those of some lines of numpy in float64.

Weights are drawn so that every step of a layer counts: scores of attention differ by several units, norms and biases
are far from neutral, and each sublayer adds as much as its input. Sizes are odd, so that loops over vectors have a
remainder. `tests/test_native.py` compares the bits of rows, instruction sets and texts with one another.
"""
import ctypes
import subprocess
import threading
import time
from ctypes import CFUNCTYPE, byref, c_int64, c_void_p
from dataclasses import replace
from functools import lru_cache

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from config.schema.families import FAMILIES, Family
from model.cache import AdmittedRows, together
from model.llama import LlamaConfig, Scales, Slice
from model.native import compiler
from model.native.compiler import levels, library
from model.native.layers import NativeSlice
from model.native.linear import NativeProducts
from model.slots import HeldSlots
from model.weights.blocks import TYPES_BY_NAME

try:
    library()
except ValueError as error:
    pytest.skip(f"no native kernels: {error}", allow_module_level=True)

GROUP = 32  # inputs of a row that share a scale
CODES = 127  # the largest code of 8 bits
LEVELS = {level.name: level for level in reversed(levels())}  # plain C first, which is compiled fastest
of_each_level = pytest.mark.parametrize("level", LEVELS)

# of float32, in units of a row's root mean square; a step that is left out changes 1,000 times as much
FLOAT_ERROR = 2e-5
CODE_ERROR = 0.02  # where an activation or a cached number may round to the next code of 8 bits

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
    "sharp scores": replace(SIZES, scales=Scales(scores=5.0)),
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


def in_codes(x, size=GROUP):
    """Round successive elements to codes of 8 bits with one scale; numbers are in float32, where halves may differ."""
    groups = x.astype(np.float32).reshape(-1, size)
    largest = np.abs(groups).max(-1, keepdims=True)
    codes = np.rint(groups * (np.float32(CODES) / np.where(largest == 0, 1, largest)))
    return (codes.astype(float) * (largest / np.float32(CODES))).reshape(x.shape)


class RightLayers:
    """Layers in float64, of all rows of a text with guesses at once; `rounds` are applied to activations before a
    product, and to keys and values."""

    def __init__(self, c, tensors, rounds=exactly, rounds_cached=exactly):
        self.config, self.tensors = c, {name: x.double().numpy() for name, x in tensors.items()}
        self.rounds, self.rounds_cached = rounds, rounds_cached
        self.spreads = []  # of the scores of each layer

    def norm(self, name, x):
        weight = self.tensors[f"{name}.weight"]
        return rms_norm(x, weight + self.config.family.norm_weight_plus_one, self.config.eps)

    def product(self, name, x, has_bias):
        products = self.rounds(x) @ self.tensors[f"{name}.weight"].T
        return products + self.tensors[f"{name}.bias"] if has_bias else products

    def embed(self, tokens):
        return self.tensors["embed_tokens.weight"][tokens] * (self.config.scales.embedding or 1)

    def layer(self, number, x_TD, path_TT):
        """Compute a layer; `path_TT` says which rows are on the path of each row."""
        c, name = self.config, f"layers.{number}"
        x_TD = x_TD + self.sublayer_output(
            f"{name}.after_attention", self.attend(number, self.norm(f"{name}.input_layernorm", x_TD), path_TT))

        normed = self.norm(f"{name}.post_attention_layernorm", x_TD)
        gate, up = (self.product(f"{name}.mlp.{part}_proj", normed, c.family.bias) for part in ("gate", "up"))
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


def assert_close(rows, right_rows, most=FLOAT_ERROR):
    """The largest error of a row, in units of its root mean square, is below `most`."""
    right_rows = np.asarray(right_rows)
    errors = np.abs(rows.numpy() - right_rows).max(-1) / np.sqrt((right_rows ** 2).mean(-1))
    assert rows.shape == right_rows.shape and errors.max() < most, errors.max()


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

    def __init__(self, c, tensors, level=None, num_threads=1, in_8_bits=False, first=0, last=None):
        self.config, self.last = c, c.layers if last is None else last
        body, layers = Slice(c, first, self.last), range(first, self.last)
        needed_names = {name for name, _ in body.named_parameters()}
        windows = [c.windows[number] if c.windows else 0 for number in layers]
        self.body = NativeSlice(body, {name: tensors[name] for name in needed_names}, num_threads, windows, level)
        self.cache = c.cache(len(layers), 1024, torch.empty(0), windows, in_8_bits)

    def read(self, x, parents, first_row=0, num_text_rows=0, **others):
        """Read the rows that follow `first_row`, of which the first ones are text."""
        rows = range(first_row, first_row + len(x))
        self.cache.admit(rows, [parents[row] for row in rows], num_text_rows)
        return self.body(x, self.positions(rows, parents), self.cache, **others)

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
    rows = layers.norm("norm", layers.inputs(layers.embed(TOKENS), PATHS)[-1])
    return rows, layers.spreads


@of_each_level
@pytest.mark.parametrize("config_name", CONFIGS)
def test_the_layers_compute_the_right_values(config_name, level):
    wanted_rows, spreads = right_rows(config_name)
    assert min(spreads) > 2, "the scores of a row are too much alike to show an error"
    most = FLOAT_ERROR if max(spreads) < 40 else 20 * FLOAT_ERROR  # far apart, scores lose more digits
    rows = NativeRows(CONFIGS[config_name], tensors_of(config_name), LEVELS[level]).read_all(torch.from_numpy(TOKENS))
    assert_close(rows, wanted_rows, most)


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
def test_each_step_counts(name):
    """The right values change far more than the bound if a step is left out, with these weights."""
    c = CONFIGS["every step"]
    layers = RightLayers(replace(c, **LEFT_OUT[name]), tensors_of("every step"))
    changed_rows = layers.norm("norm", layers.inputs(layers.embed(TOKENS), PATHS)[-1])
    with pytest.raises(AssertionError):
        assert_close(torch.from_numpy(changed_rows), right_rows("every step")[0], 1000 * FLOAT_ERROR)
