"""A slice of a decoder: layers [a, b) of a LLaMA or a relative, which read and write a tree cache.

It knows nothing about where its input comes from: the first slice embeds tokens, the last one norms, and those
between pass hidden states on. Parameter names are those of LLaMA's checkpoints; `weights/parts.py` translates OPT's.

Shapes: T rows, D model, H heads, K key/value heads, S cache slots, E head dimension, V vocabulary.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Mapping, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config.schema.families import FAMILIES, ROTARY, Family, accepted
from model.cache import Rows, TreeCache

OPT_OFFSET = 2  # rows of OPT's learned positions that come before the first position
Rotation = Tuple[Tensor, Tensor]  # the cosines and the sines `[T, E]` of rotary positions


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a model and what its layers are made of, as its `config.json` gives them."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context: int
    eps: float
    theta: float
    scaling: Mapping[str, float] = field(default_factory=dict)  # of rotary positions
    family: Family = FAMILIES["llama"]
    tied: bool = False  # the LM head is the embedding

    @staticmethod
    def read(config: Mapping[str, Any]) -> LlamaConfig:
        """The sizes in the fields of a `config.json`; what this decoder would compute wrongly is refused by name."""
        given = accepted(config)
        family = FAMILIES[given["model_type"]]
        hidden, heads = given["hidden_size"], given["num_attention_heads"]
        context = given.get("max_position_embeddings") or 2048
        # within one window, sliding attention is plain attention
        window = given.get("sliding_window") if given.get("use_sliding_window", True) else None
        kv_heads = given.get("num_key_value_heads") or heads
        head_dim = given.get("head_dim") or hidden // heads
        theta = given.get("rope_theta") or 10000.0
        scaling = {name: given[name] for name in ROTARY[given["rope_type"]]}
        qkv_bias = given.get("qkv_bias", family.qkv_bias)  # EAGLE's heads of Qwen2 say it
        return LlamaConfig(
            hidden=hidden, layers=given["num_hidden_layers"], heads=heads, kv_heads=kv_heads, head_dim=head_dim,
            intermediate=given["intermediate_size"], vocab=given["vocab_size"],
            context=min(context, window or context), eps=given["rms_norm_eps"], theta=theta, scaling=scaling,
            family=replace(family, qkv_bias=qkv_bias), tied=bool(given.get("tie_word_embeddings", family.tied)))

    def cache(self, layers: int, capacity: int, like: Tensor) -> TreeCache:
        """An empty cache for so many layers, in the type and on the device of `like`."""
        return TreeCache((layers, self.kv_heads, capacity, self.head_dim), like.dtype, like.device)


class Rotary(nn.Module):
    """Rotary positions in the half-rotation layout: cosines and sines `[positions, E]`, computed once in float32."""

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.config = c
        self.cos = self.sin = torch.empty(0, device="meta")  # until they are needed

    def frequency(self) -> Tensor:
        """Radians per position of each pair of dimensions `[E / 2]`, scaled as the config says: all by one factor, or
        only those of long waves (Llama 3)."""
        dim, scaling = self.config.head_dim, self.config.scaling
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        plain = 1.0 / self.config.theta ** exponents
        if "low_freq_factor" not in scaling:
            return plain / scaling.get("factor", 1.0)
        trained = scaling["original_max_position_embeddings"]
        cycles = trained / (2 * math.pi) * plain  # full rotations within the context of its training
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        kept = ((cycles - low) / (high - low)).clamp(0, 1)
        return plain * (kept + (1 - kept) / scaling["factor"])

    def at(self, pos_T: Tensor, like: Tensor) -> Rotation:
        """The rows of both tables at these positions, in the type and on the device of `like`."""
        if self.cos.dtype != like.dtype or self.cos.device != like.device:
            frequency = self.frequency()
            position = torch.arange(self.config.context, dtype=torch.float32)[:, None]
            angle = position * torch.cat((frequency, frequency))
            sin = angle.sin()
            sin[:, :len(frequency)] *= -1  # so that `rotate` is one roll and two products
            self.cos, self.sin = angle.cos().to(like), sin.to(like)
        return self.cos[pos_T], self.sin[pos_T]


def rotate(x_HTE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Queries or keys at their rotary positions; the sign of the swapped halves is in `sin_TE`."""
    return x_HTE * cos_TE + x_HTE.roll(x_HTE.shape[-1] // 2, -1) * sin_TE


class RMSNorm(nn.Module):
    """Root-mean-square norm; half precision is widened to float32 for the mean."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device="meta"), requires_grad=False)
        self.eps = eps

    def forward(self, x_TD: Tensor) -> Tensor:
        wide = x_TD.float() if x_TD.dtype in (torch.float16, torch.bfloat16) else x_TD
        mean_T1 = wide.pow(2).mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(mean_T1 + self.eps)
        return self.weight * wide.to(x_TD.dtype)


def norm(c: LlamaConfig) -> nn.Module:
    """The norm of a whole row, of the kind that the family has."""
    if c.family.rms:
        return RMSNorm(c.hidden, c.eps)
    return nn.LayerNorm(c.hidden, c.eps, device="meta")


def linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias, device="meta")


def embedding(size: int, hidden: int) -> nn.Embedding:
    """An embedding without memory yet."""
    # from a weight that is given, since nn.Embedding(...) would first load torch's tools for drawing one
    return nn.Embedding.from_pretrained(torch.empty(size, hidden, device="meta"))


class Attention(nn.Module):
    """Attention of a segment's rows to the cache, with shared key/value heads (GQA) where the sizes say so."""

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.q_proj = linear(c.hidden, c.heads * c.head_dim, c.family.qkv_bias)
        self.k_proj = linear(c.hidden, c.kv_heads * c.head_dim, c.family.qkv_bias)
        self.v_proj = linear(c.hidden, c.kv_heads * c.head_dim, c.family.qkv_bias)
        self.o_proj = linear(c.heads * c.head_dim, c.hidden, c.family.bias)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if c.family.head_norms:
            self.q_norm = RMSNorm(c.head_dim, c.eps)
            self.k_norm = RMSNorm(c.head_dim, c.eps)

    def forward(self, x_TD: Tensor, rotation: Rotation | None, cache: Rows, layer: int) -> Tensor:
        q = self.q_norm(self._heads(self.q_proj(x_TD)))
        k = self.k_norm(self._heads(self.k_proj(x_TD)))
        v = self._heads(self.v_proj(x_TD))
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        out_HTE = cache.attend(layer, q, k, v)
        return self.o_proj(out_HTE.transpose(0, 1).flatten(1))

    def _heads(self, x_TN: Tensor) -> Tensor:
        """Rows `[T, heads * E]` as heads `[heads, T, E]`."""
        return x_TN.view(len(x_TN), -1, self.head_dim).transpose(0, 1)


class MLP(nn.Module):
    """The feed-forward block: gated by SiLU (LLaMA and most relatives), or with ReLU and no gate (OPT)."""

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = linear(c.hidden, c.intermediate) if c.family.gated else None
        self.up_proj = linear(c.hidden, c.intermediate, c.family.bias)
        self.down_proj = linear(c.intermediate, c.hidden, c.family.bias)

    def forward(self, x_TD: Tensor) -> Tensor:
        up = self.up_proj(x_TD)
        if self.gate_proj is None:
            return self.down_proj(F.relu(up))
        return self.down_proj(F.silu(self.gate_proj(x_TD)) * up)


class Layer(nn.Module):
    """One decoder layer; `layer` is its place in the cache. EAGLE's head has no norm before the attention."""

    def __init__(self, c: LlamaConfig, input_norm: bool = True) -> None:
        super().__init__()
        self.input_layernorm = norm(c) if input_norm else nn.Identity()
        self.self_attn = Attention(c)
        self.post_attention_layernorm = norm(c)
        self.mlp = MLP(c)

    def forward(self, x_TD: Tensor, rotation: Rotation | None, cache: Rows, layer: int) -> Tensor:
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), rotation, cache, layer)
        return x_TD + self.mlp(self.post_attention_layernorm(x_TD))


class Slice(nn.Module):
    """Layers [first, last), keyed by their numbers in the whole model."""

    def __init__(self, c: LlamaConfig, first: int, last: int) -> None:
        super().__init__()
        self.config = c
        self.embed_tokens = embedding(c.vocab, c.hidden) if first == 0 else nn.Identity()
        layers = {str(number): Layer(c) for number in range(first, last)}
        self.layers = nn.ModuleDict(layers)
        self.norm = norm(c) if last == c.layers else nn.Identity()
        self.rotary = Rotary(c) if c.family.rotary else None
        learned = first == 0 and not c.family.rotary
        self.embed_positions = embedding(c.context + OPT_OFFSET, c.hidden) if learned else None

    def forward(self, x: Tensor, pos_T: Tensor, cache: Rows,
                inner: dict[int, Tensor] | None = None,
                go_on: Callable[[], bool] = lambda: True) -> Tensor | None:
        """The hidden states `[T, D]` behind the last layer, normed if that is the model's last one.

        `x` are tokens `[T]` for the first slice, else hidden states `[T, D]`; the rows were admitted to `cache`. The
        inputs of the layers that are keys of `inner` are put there; the number of layers is the key of the last one's
        output. The result is None if `go_on`, which is asked
        before each layer, says that nobody wants the rows any more.
        """
        x_TD = self.embed_tokens(x)
        if self.embed_positions is not None:
            x_TD = x_TD + self.embed_positions(pos_T + OPT_OFFSET)
        rotation = self.rotary.at(pos_T, x_TD) if self.rotary else None
        for place, (number, layer) in enumerate(self.layers.items()):
            if not go_on():
                return None
            if inner and int(number) in inner:
                inner[int(number)] = x_TD
            x_TD = layer(x_TD, rotation, cache, place)
        if inner and self.config.layers in inner:
            inner[self.config.layers] = x_TD
        return self.norm(x_TD)


def fill(module: nn.Module, tensors: Mapping[str, Tensor], dtype: torch.dtype,
         device: torch.device | str) -> None:
    """Give a module that was built without memory its weights: all of them, and nothing else; each is asked for once.

    They get the type `dtype`, but those that their module calls `exact` keep their own. ValueError if names or shapes
    do not fit.
    """
    wanted = dict(module.named_parameters())
    missing = sorted(set(wanted) - set(tensors))
    extra = sorted(set(tensors) - set(wanted))
    if missing or extra:
        raise ValueError(f"the weights do not fit the model: missing {missing[:3]}, unexpected {extra[:3]}")
    for name, parameter in wanted.items():
        path, _, own = name.rpartition(".")
        owner, tensor = module.get_submodule(path), tensors[name]
        if parameter.shape != tensor.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; config.json asks for {tuple(parameter.shape)}")
        kept = own in getattr(owner, "exact", ())
        tensor = tensor.to(device=device, dtype=tensor.dtype if kept else dtype)
        setattr(owner, own, nn.Parameter(tensor, requires_grad=False))
