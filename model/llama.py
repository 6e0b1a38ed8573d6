"""A slice of a LLaMA: layers [a, b), which read and write a tree cache.

It knows nothing about where its input comes from: the first slice embeds tokens, the last one norms, and those
between pass hidden states on. Parameter names are those of Hugging Face checkpoints.

Shapes: T rows, D model, H heads, K key/value heads, S cache slots, E head dimension, V vocabulary.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.cache import TreeCache


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a LLaMA, as its `config.json` gives them."""

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

    @staticmethod
    def read(config: Mapping[str, Any]) -> LlamaConfig:
        """From the fields of a `config.json`; what this decoder would compute wrongly is refused by name."""
        scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        for name, got, supported in (("rope_scaling", kind, "default"), ("hidden_act", config["hidden_act"], "silu"),
                                     ("attention_bias", config.get("attention_bias", False), False),
                                     ("mlp_bias", config.get("mlp_bias", False), False)):
            if got != supported:
                raise ValueError(f"config.json says {name}={got!r}, which is not supported (only {supported!r} is)")
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        return LlamaConfig(
            hidden=hidden, layers=config["num_hidden_layers"], heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            intermediate=config["intermediate_size"], vocab=config["vocab_size"],
            context=config.get("max_position_embeddings", 2048), eps=config["rms_norm_eps"],
            theta=scaling.get("rope_theta") or config.get("rope_theta") or 10000.0)

    def cache(self, layers: int, capacity: int, like: Tensor) -> TreeCache:
        """An empty cache for so many layers, in the type and on the device of `like`."""
        return TreeCache((layers, self.kv_heads, capacity, self.head_dim), like.dtype, like.device)


def attend(q_HTE: Tensor, k_KSE: Tensor, v_KSE: Tensor, mask_TS: Tensor) -> Tensor:
    """Scaled dot-product attention; heads that share keys are folded into rows, so that nothing is repeated."""
    heads, rows, dim = q_HTE.shape
    group = heads // k_KSE.shape[0]
    q = q_HTE.reshape(k_KSE.shape[0], group * rows, dim)
    mask = mask_TS if group == 1 else mask_TS.repeat(group, 1)
    if hasattr(F, "scaled_dot_product_attention"):
        out = F.scaled_dot_product_attention(q[None], k_KSE[None], v_KSE[None], mask)[0]
    else:  # torch 1.11, the wheel of JetPack 5
        out = torch.softmax(q @ k_KSE.transpose(1, 2) * dim ** -0.5 + mask, -1) @ v_KSE
    return out.reshape(heads, rows, dim)


class Rotary(nn.Module):
    """Rotary positions in the half-rotation layout: cosines and sines `[positions, E]`, computed once in float32."""

    def __init__(self, theta: float, dim: int, positions: int) -> None:
        super().__init__()
        frequency = theta ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        angle = torch.arange(positions, dtype=torch.float32)[:, None] * torch.cat((frequency, frequency))
        self.cos, self.sin = angle.cos(), angle.sin()
        self.sin[:, :dim // 2] *= -1  # so that turning is one roll and two products

    def at(self, pos_T: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of both tables, in the type of `like`."""
        if self.cos.dtype != like.dtype or self.cos.device != like.device:
            self.cos, self.sin = self.cos.to(like), self.sin.to(like)
        return self.cos[pos_T], self.sin[pos_T]


def rotate(x_HTE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    return x_HTE * cos_TE + x_HTE.roll(x_HTE.shape[-1] // 2, -1) * sin_TE


class RMSNorm(nn.Module):
    """Root-mean-square norm; half precision is widened to float32 for the mean."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device="meta"), requires_grad=False)
        self.eps = eps

    def forward(self, x_TD: Tensor) -> Tensor:
        wide = x_TD.float() if x_TD.dtype in (torch.float16, torch.bfloat16) else x_TD
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x_TD.dtype)


def linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias, device="meta")


def embedding(size: int, hidden: int) -> nn.Embedding:
    """Without memory; from a given weight, since the usual way would first load torch's tools for drawing one."""
    return nn.Embedding.from_pretrained(torch.empty(size, hidden, device="meta"))


class Attention(nn.Module):
    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.q_proj = linear(c.hidden, c.heads * c.head_dim)
        self.k_proj = linear(c.hidden, c.kv_heads * c.head_dim)
        self.v_proj = linear(c.hidden, c.kv_heads * c.head_dim)
        self.o_proj = linear(c.heads * c.head_dim, c.hidden)

    def forward(self, x_TD: Tensor, turn: tuple[Tensor, Tensor], cache: TreeCache, layer: int) -> Tensor:
        q, k, v = (project(x_TD).view(len(x_TD), -1, self.head_dim).transpose(0, 1)
                   for project in (self.q_proj, self.k_proj, self.v_proj))
        out_HTE = attend(rotate(q, *turn), *cache.store(layer, rotate(k, *turn), v))
        return self.o_proj(out_HTE.transpose(0, 1).reshape(len(x_TD), -1))


class MLP(nn.Module):
    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = linear(c.hidden, c.intermediate)
        self.up_proj = linear(c.hidden, c.intermediate)
        self.down_proj = linear(c.intermediate, c.hidden)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_TD)) * self.up_proj(x_TD))


class Layer(nn.Module):
    """One decoder layer; `layer` is its place in the cache. EAGLE's head has no norm before the attention."""

    def __init__(self, c: LlamaConfig, input_norm: bool = True) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden, c.eps) if input_norm else nn.Identity()
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden, c.eps)
        self.mlp = MLP(c)

    def forward(self, x_TD: Tensor, turn: tuple[Tensor, Tensor], cache: TreeCache, layer: int) -> Tensor:
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), turn, cache, layer)
        return x_TD + self.mlp(self.post_attention_layernorm(x_TD))


class Slice(nn.Module):
    """Layers [first, last) of a LLaMA, keyed by their numbers in the whole model."""

    def __init__(self, c: LlamaConfig, first: int, last: int) -> None:
        super().__init__()
        self.config = c
        self.embed_tokens = embedding(c.vocab, c.hidden) if first == 0 else nn.Identity()
        self.layers = nn.ModuleDict({str(i): Layer(c) for i in range(first, last)})
        self.norm = RMSNorm(c.hidden, c.eps) if last == c.layers else nn.Identity()
        self.rotary = Rotary(c.theta, c.head_dim, c.context)

    def forward(self, x: Tensor, pos_T: Tensor, cache: TreeCache) -> Tensor:
        """`x`: tokens `[T]` for the first slice, else hidden states `[T, D]`; the rows were admitted to `cache`."""
        x_TD = self.embed_tokens(x)
        turn = self.rotary.at(pos_T, x_TD)
        for place, layer in enumerate(self.layers.values()):
            x_TD = layer(x_TD, turn, cache, place)
        return self.norm(x_TD)


def fill(module: nn.Module, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device | str) -> None:
    """Give a module that was built without memory its weights: all of them, and nothing else."""
    wanted = dict(module.named_parameters())
    missing, extra = sorted(set(wanted) - set(tensors)), sorted(set(tensors) - set(wanted))
    if missing or extra:
        raise ValueError(f"the weights do not fit the model: missing {missing[:3]}, unexpected {extra[:3]}")
    for name, parameter in wanted.items():
        if parameter.shape != tensors[name].shape:
            raise ValueError(f"{name} has shape {tuple(tensors[name].shape)}; config.json asks for "
                             f"{tuple(parameter.shape)}")
        owner = module.get_submodule(name.rpartition(".")[0])
        weight = nn.Parameter(tensors[name].to(device=device, dtype=dtype), requires_grad=False)
        setattr(owner, name.rpartition(".")[2], weight)
