"""A slice of a decoder: layers [a, b) of a LLaMA or a related model, which read and write a tree cache.

It knows nothing about the origin of its input: the first slice embeds tokens, the last one applies the final norm, and
the others pass on hidden states. Parameters have LLaMA's names; `weights/unfold.py` translates those of other families.

Shapes: T rows, D model, H heads, K key/value heads, S cache slots, E head dimension, V vocabulary.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Mapping, NamedTuple, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config.schema.families import (
    CONVOLUTION,
    DELTA_NET,
    FAMILIES,
    ROTARY,
    YARN,
    Family,
    accepted,
    recurrent,
    unturned,
    windows,
)
from model.attention import AttentionForm, CachedRows
from model.cache import TreeCache
from model.memory import MemoryForm
from model.plain_layers import LayerNorm, Product, RMSNorm, embedding, linear
from model.precision import for_sums, sigmoid
from model.recurrent import DeltaNet, DeltaSizes, ShortConvolution
from model.rotary import Rotary, Rotation, Turns, rotate

CLAMPED_GELU = 1.702  # factor in the sigmoid of GPT-OSS's gate
LEAST_WEIGHT = 1e-6  # added to the sum of the weights of a row's experts
OPT_OFFSET = 2  # rows of OPT's learned positions before the first position
MIXER_NAMES = {"": "self_attn", CONVOLUTION: "conv", DELTA_NET: "linear_attn"}  # by the kind of a layer


class Scales(NamedTuple):
    """The multipliers and soft caps of a model; a neutral one is 0, or 1 for `residual` and `logits`."""

    embedding: float = 0.0
    residual: float = 1.0  # factor of the outputs of attention and feed-forward
    scores: float = 0.0  # factor of attention scores, instead of the inverse root of the head's size
    logits: float = 1.0  # divisor
    score_cap: float = 0.0
    logit_cap: float = 0.0
    clamp: float = 0.0  # of GPT-OSS's feed-forward
    experts: float = 1.0  # factor of the weights of experts that are chosen by sigmoids

    @staticmethod
    def read(fields: Mapping[str, Any], family: Family) -> Scales:
        """Read the multipliers and caps from the fields of a `config.json`."""
        query_scalar = fields.get("query_pre_attn_scalar")
        return Scales(
            embedding=fields["hidden_size"] ** 0.5 if family.scaled else fields.get("embedding_multiplier") or 0.0,
            residual=fields.get("residual_multiplier") or 1.0,
            scores=query_scalar ** -0.5 if query_scalar else fields.get("attention_multiplier") or 0.0,
            logits=fields.get("logits_scaling") or 1.0,
            score_cap=fields.get("attn_logit_softcapping") or 0.0,
            logit_cap=fields.get("final_logit_softcapping") or 0.0,
            clamp=fields["swiglu_limit"] if family.clamped else 0.0,
            experts=fields.get("routed_scaling_factor") or 1.0)


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a model and the structure of its layers, from its `config.json`."""

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
    scaling: Mapping[str, Any] = field(default_factory=dict)  # of rotary positions
    family: Family = FAMILIES["llama"]
    tied: bool = False  # the LM head is the embedding
    rope: str = "default"  # the kind of rotary positions
    rotated_share: float = 1.0  # of a head's dimensions
    recurrent: tuple[str, ...] = ()  # the kind of each layer that is recurrent, "" for attention; empty: none is
    num_taps: int = 0  # inputs that a convolution reads
    delta: DeltaSizes = DeltaSizes()
    windows: tuple[int, ...] = ()  # positions that each layer reads, 0 for all; empty: all layers read all
    skips_rope: tuple[bool, ...] = ()  # whether each layer has no rotary positions; empty: all have them
    local_theta: float = 0.0  # of layers with a window, without scaling, if it differs
    scales: Scales = Scales()
    experts: int = 0  # experts of a layer, each `intermediate` wide; 0: a single feed-forward
    chosen: int = 0  # experts that compute a row
    renorms_experts: bool = True  # whether the weights of these experts add up to 1
    dense_layers: int = 0  # first layers without experts, of this width:
    dense_width: int = 0
    shared_expert: int = 0  # the width of an expert that computes all rows; 0: there is none

    @staticmethod
    def read(config: Mapping[str, Any]) -> LlamaConfig:
        """Read the fields of a `config.json`. Raises ValueError for a field that this decoder does not support."""
        fields = accepted(config)
        family = FAMILIES[fields["model_type"]]
        hidden, heads = fields["hidden_size"], fields["num_attention_heads"]

        # rotary positions
        context = fields.get("max_position_embeddings") or 2048
        rope, theta = fields["rope_type"], fields.get("rope_theta") or 10000.0
        scaling = {name: fields[name] for name in ROTARY[rope]}
        if rope in ("yarn", "longrope"):
            yarn_names = [name for name in YARN if fields.get(name) is not None]
            scaling.update((name, fields[name]) for name in yarn_names)
            scaling.setdefault("original_max_position_embeddings", context)
        if rope == "longrope":  # a longer text would need other factors, from its first token on
            trained_context = scaling["original_max_position_embeddings"]
            scaling["factor"], context = context / trained_context, min(context, int(trained_context))

        # layers that read few positions
        kinds = recurrent(fields)
        num_taps = fields.get("conv_L_cache") or fields.get("linear_conv_kernel_dim") or 0
        layer_windows = tuple(num_taps if kind_name else 0 for kind_name in kinds) or windows(fields, family)

        # biases
        qkv_bias = bool(fields["attention_bias"]) if "attention_bias" in family.reads else family.qkv_bias

        sizes = LlamaConfig(
            hidden=hidden, layers=fields["num_hidden_layers"], heads=heads,
            kv_heads=fields.get("num_key_value_heads") or heads, head_dim=fields.get("head_dim") or hidden // heads,
            intermediate=fields[family.experts[1] if family.experts else "intermediate_size"],
            vocab=fields["vocab_size"], context=context,
            eps=fields["rms_norm_eps"], theta=theta)
        with_positions = replace(
            sizes, rope=rope, scaling=scaling, rotated_share=fields.get("partial_rotary_factor") or 1.0,
            windows=layer_windows, skips_rope=unturned(fields),
            recurrent=kinds, num_taps=num_taps, delta=DeltaSizes.read(fields),
            local_theta=fields.get("rope_local_base_freq") or (0.0 if family.scales_windows else theta))
        return replace(
            with_positions, family=replace(family, qkv_bias=qkv_bias), scales=Scales.read(fields, family),
            tied=bool(fields.get("tie_word_embeddings", family.tied)),
            experts=fields[family.experts[0]] if family.experts else 0,
            chosen=fields.get("num_experts_per_tok") or 0, renorms_experts=fields.get("norm_topk_prob", True),
            dense_layers=fields.get("num_dense_layers") or 0, dense_width=fields.get("intermediate_size") or 0,
            shared_expert=fields.get("shared_expert_intermediate_size") or 0)

    def within(self, length: int) -> LlamaConfig:
        """Return the config for texts of `length` tokens; beyond its training length, longrope uses other factors."""
        if not self.family.rotary:
            return self
        max_context = self.context
        if self.rope == "longrope":
            max_context = round(self.scaling["factor"] * self.scaling["original_max_position_embeddings"])
        return replace(self, context=min(length, max_context))

    @property
    def turns(self) -> Turns:
        """The rotary positions of all layers without local ones."""
        return Turns(self.head_dim, self.context, self.theta,
                     self.rope, self.scaling, self.rotated_share)

    def window(self, layer: int) -> int:
        """Return the positions that a layer reads, by attention or by a convolution; 0 for all."""
        return self.windows[layer % len(self.windows)] if self.windows else 0

    def layer_kind(self, layer: int) -> str:
        """Return the kind of recurrent layer that a layer is; empty for attention."""
        return self.recurrent[layer % len(self.recurrent)] if self.recurrent else ""

    def has_experts(self, layer: int) -> bool:
        """Return whether the feed-forward of a layer is a mixture of experts."""
        return self.experts > 0 and layer >= self.dense_layers

    def memory(self, layer: int) -> MemoryForm | None:
        """Return what a recurrent layer keeps; None for attention."""
        kind_name = self.layer_kind(layer)
        return self.delta.memory_form if kind_name == DELTA_NET else MemoryForm(self.hidden) if kind_name else None

    def cache(self, layers: int, capacity: int, like: Tensor, windows: Sequence[int] = (),
              code_type: torch.dtype | None = None, first: int = 0) -> TreeCache:
        """Return an empty cache for the layers from `first` on, on the device and in the type of `like`, or in codes.

        It drops slots before `windows`.
        """
        shape = layers, self.kv_heads, capacity, self.head_dim
        memories = [self.memory(first + layer) for layer in range(layers)]
        return TreeCache(shape, like.dtype, like.device, windows, code_type, memories)


def norm(c: LlamaConfig) -> nn.Module:
    """Return a norm of a whole row, of the family's kind."""
    if c.family.rms:
        return RMSNorm(c.hidden, c.eps, c.family.norm_weight_plus_one)
    return LayerNorm(c.hidden, c.eps, device="meta")


class Logits(nn.Module):
    """An LM head: logits `[T, V]` of normed rows, with the model's divisor and soft cap."""

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.product = linear(c.hidden, c.vocab)
        self.divisor, self.cap = c.scales.logits, c.scales.logit_cap

    def forward(self, x_TD: Tensor) -> Tensor:
        logits: Tensor = self.product(x_TD)
        if self.divisor != 1:
            logits = logits / self.divisor
        return self.cap * torch.tanh(logits / self.cap) if self.cap else logits


class Attention(nn.Module):
    """Attention of a segment's rows to the cache, with grouped key/value heads (GQA) if there are fewer of them;
    `number` is the layer's number in the whole model.

    `fused_product` is a single product for the linear layers in `fusible`, concatenated, if loading has fused them.
    """

    fusible = ("q_proj", "k_proj", "v_proj")

    def __init__(self, c: LlamaConfig, number: int = 0) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.head_split = [c.heads, c.kv_heads]  # queries and keys
        self.form = AttentionForm(c.window(number), c.scales.score_cap)
        self.query_scale = c.scales.scores * math.sqrt(c.head_dim)
        sinks = torch.empty(c.heads, device="meta")
        self.sinks = nn.Parameter(sinks, requires_grad=False) if c.family.sinks else None

        # products
        self.fused_product: Product | None = None
        self.has_gate = c.family.output_gate
        query_width = c.heads * c.head_dim * (2 if self.has_gate else 1)
        self.q_proj = linear(c.hidden, query_width, c.family.qkv_bias)
        self.k_proj = linear(c.hidden, c.kv_heads * c.head_dim, c.family.qkv_bias)
        self.v_proj = linear(c.hidden, c.kv_heads * c.head_dim, c.family.qkv_bias)
        self.o_proj = linear(c.heads * c.head_dim, c.hidden, c.family.bias)

        # norms of queries and keys
        self.wide_norms = c.family.wide_norms
        self.has_norms = c.family.head_norms or self.wide_norms
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if self.has_norms:
            heads_normed_together = (c.heads, c.kv_heads) if self.wide_norms else (1, 1)
            self.q_norm, self.k_norm = (RMSNorm(num_heads * c.head_dim, c.eps, c.family.norm_weight_plus_one)
                                        for num_heads in heads_normed_together)

    def forward(self, x_TD: Tensor, rotation: Rotation | None, cache: CachedRows, layer: int) -> Tensor:
        # queries, keys and values
        if self.fused_product is None:
            qkv_TN = torch.cat((self.q_proj(x_TD), self.k_proj(x_TD), self.v_proj(x_TD)), -1)
        else:
            qkv_TN = self.fused_product(x_TD)
        qkv_THE = qkv_TN.view(len(qkv_TN), -1, self.head_dim)
        num_heads, num_kv_heads = self.head_split
        if self.has_gate:  # each query is followed by its gate
            query_gate_THE, kv_THE = qkv_THE.split((2 * num_heads, 2 * num_kv_heads), 1)
            gate_THE = query_gate_THE[:, 1::2]
            qkv_THE = torch.cat((query_gate_THE[:, ::2], kv_THE), 1)
        qk_THE, v_TKE = qkv_THE.split((num_heads + num_kv_heads, num_kv_heads), 1)

        # norms, positions and scale
        if self.has_norms:
            q_THE, k_TKE = qk_THE.split(self.head_split, 1)
            qk_THE = torch.cat((self._normed(q_THE, self.q_norm), self._normed(k_TKE, self.k_norm)), 1)
        if rotation is not None:
            qk_THE = rotate(qk_THE, *rotation)
        q_HTE, k_KTE = qk_THE.transpose(0, 1).split(self.head_split)
        if self.query_scale:
            q_HTE = q_HTE * self.query_scale

        # attention
        form = self.form if self.sinks is None else self.form._replace(sinks=self.sinks)
        out_HTE = cache.attend(layer, q_HTE, k_KTE, v_TKE.transpose(0, 1), form)
        out_THE = out_HTE.transpose(0, 1)
        if self.has_gate:
            out_THE = out_THE * sigmoid(gate_THE)
        return self.o_proj(out_THE.flatten(1))

    def _normed(self, x_THE: Tensor, norm: nn.Module) -> Tensor:
        """Norm queries or keys, each head separately or all heads together."""
        normed: Tensor = norm(x_THE.flatten(1)).view_as(x_THE) if self.wide_norms else norm(x_THE)
        return normed


class MLP(nn.Module):
    """The feed-forward block: gated by SiLU or GELU, or with ReLU and no gate (OPT).

    `fused_product` is as in `Attention`.
    """

    fusible = ("gate_proj", "up_proj")

    def __init__(self, c: LlamaConfig, width: int) -> None:
        super().__init__()
        self.fused_product: Product | None = None
        self.gelu, self.clamp = c.family.gelu, c.scales.clamp
        gate = linear(c.hidden, width, c.family.bias)
        self.gate_proj = gate if c.family.gated else None
        self.up_proj = linear(c.hidden, width, c.family.bias)
        self.down_proj = linear(width, c.hidden, c.family.bias)

    def forward(self, x_TD: Tensor) -> Tensor:
        if self.fused_product is not None:
            gate, up = self.fused_product(x_TD).chunk(2, -1)
        elif self.gate_proj is None:
            return self.down_proj(F.relu(self.up_proj(x_TD)))
        else:
            gate, up = self.gate_proj(x_TD), self.up_proj(x_TD)

        if self.clamp:
            gate = gate.clamp(max=self.clamp)
            up = up.clamp(-self.clamp, self.clamp)
            return self.down_proj(gate * sigmoid(CLAMPED_GELU * gate) * (up + 1))
        gate = F.gelu(gate, approximate="tanh") if self.gelu else F.silu(gate)
        return self.down_proj(gate * up)


class Experts(nn.Module):
    """A mixture of experts: each row goes through the few feed-forwards to which the router gives the largest weights,
    and perhaps through one for all rows, with a gate.

    Rows are grouped by expert, and only chosen experts are computed. Their outputs for a row are summed in the order of
    the experts' numbers, whatever other rows are in the batch.
    """

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.chosen, self.renorms_experts, self.scale = c.chosen, c.renorms_experts, c.scales.experts
        self.router = linear(c.hidden, c.experts, c.family.bias)
        bias = torch.empty(c.experts, device="meta")
        self.expert_bias = nn.Parameter(bias, requires_grad=False) if c.family.sigmoid_router else None
        experts = [MLP(c, c.intermediate) for _ in range(c.experts)]
        self.experts = nn.ModuleList(experts)
        self.shared_expert = MLP(c, c.shared_expert) if c.shared_expert else None
        self.shared_expert_gate = linear(c.hidden, 1) if c.shared_expert else None

    def forward(self, x_TD: Tensor) -> Tensor:
        weight_TC, expert_TC = self.route(x_TD)
        out_TD = torch.zeros_like(x_TD)
        for number in expert_TC.unique().tolist():
            rows, choices = (expert_TC == number).nonzero(as_tuple=True)
            weighted_TD = self.experts[number](x_TD[rows]) * weight_TC[rows, choices, None]
            out_TD.index_add_(0, rows, weighted_TD)

        if self.shared_expert is not None and self.shared_expert_gate is not None:
            gate_T1 = sigmoid(for_sums(self.shared_expert_gate(x_TD))).to(x_TD.dtype)
            out_TD = out_TD + gate_T1 * self.shared_expert(x_TD)
        return out_TD

    def route(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and the numbers of the experts of each row, `[T, chosen]`."""
        logit_TX = self.router(x_TD)
        logit_TX = logit_TX.to(torch.promote_types(torch.float32, logit_TX.dtype))
        if self.expert_bias is not None:
            all_weights_TX = sigmoid(for_sums(logit_TX)).to(logit_TX.dtype)
            expert_TC = (all_weights_TX + self.expert_bias).topk(self.chosen, -1)[1]
            weight_TC = all_weights_TX.gather(-1, expert_TC)
            if self.renorms_experts:
                weight_TC = weight_TC / (weight_TC.sum(-1, keepdim=True) + LEAST_WEIGHT)
            return (weight_TC * self.scale).to(x_TD.dtype), expert_TC

        if not self.renorms_experts:
            logit_TX = torch.log_softmax(logit_TX, -1)

        best_TC, expert_TC = logit_TX.topk(self.chosen, -1)
        weight_TC = torch.softmax(best_TC, -1) if self.renorms_experts else best_TC.exp()
        return weight_TC.to(x_TD.dtype), expert_TC


class Layer(nn.Module):
    """One decoder layer with this `number` in the model; `layer` is its index in the cache. The norms depend on the
    family; an EAGLE head has none before the attention."""

    def __init__(self, c: LlamaConfig, input_norm: bool = True, number: int = 0) -> None:
        super().__init__()
        norms_before, norms_after = c.family.before, c.family.after
        self.residual = c.scales.residual
        self.input_layernorm = norm(c) if input_norm and norms_before else nn.Identity()

        kind_name = c.layer_kind(number)
        self.mixer_name = MIXER_NAMES[kind_name]
        if kind_name == CONVOLUTION:
            self.conv = ShortConvolution(c.hidden, c.num_taps)
        elif kind_name == DELTA_NET:
            self.linear_attn = DeltaNet(c.hidden, c.num_taps, c.delta, c.eps)
        else:
            self.self_attn = Attention(c, number)

        self.after_attention = norm(c) if norms_after else nn.Identity()
        self.post_attention_layernorm = norm(c) if norms_before else nn.Identity()
        dense_width = c.dense_width if c.experts else c.intermediate
        self.mlp = Experts(c) if c.has_experts(number) else MLP(c, dense_width)
        self.after_mlp = norm(c) if norms_after else nn.Identity()

    def forward(self, x_TD: Tensor, rotation: Rotation | None, cache: CachedRows, layer: int) -> Tensor:
        mixer = getattr(self, self.mixer_name)
        mixed_TD = mixer(self.input_layernorm(x_TD), rotation, cache, layer)
        x_TD = self.add(x_TD, self.after_attention(mixed_TD))
        return self.add(x_TD, self.after_mlp(self.mlp(self.post_attention_layernorm(x_TD))))

    def add(self, x_TD: Tensor, out_TD: Tensor) -> Tensor:
        """Return the rows plus the scaled output of a block."""
        return x_TD + out_TD if self.residual == 1 else x_TD + out_TD * self.residual


class Slice(nn.Module):
    """Layers [first, last), keyed by their numbers in the whole model."""

    def __init__(self, c: LlamaConfig, first: int, last: int) -> None:
        super().__init__()
        self.config = c
        self.embed_tokens = embedding(c.vocab, c.hidden) if first == 0 else nn.Identity()
        layers = {str(number): Layer(c, number=number) for number in range(first, last)}
        self.layers = nn.ModuleDict(layers)
        self.norm = norm(c) if last == c.layers else nn.Identity()

        # positions
        self.rotary = Rotary(c.turns) if c.family.rotary else None
        local_turns = Turns(c.head_dim, c.context, c.local_theta)
        self.local_rotary = Rotary(local_turns) if c.local_theta else None
        learns_positions = first == 0 and not c.family.rotary
        self.embed_positions = embedding(c.context + OPT_OFFSET, c.hidden) if learns_positions else None

    def forward(self, x: Tensor, pos_T: Tensor, cache: CachedRows,
                inner: dict[int, Tensor] | None = None,
                still_needed: Callable[[], bool] = lambda: True) -> Tensor | None:
        """Return the hidden states `[T, D]` after the last layer, normed if that is the model's last one.

        `x` are tokens `[T]` for the first slice, else hidden states `[T, D]`; the rows were admitted to `cache`.
        `inner` is filled with the inputs of the layers that are its keys; the number of layers is the key of the last
        one's output. `still_needed` is called before each layer; the result is None as soon as it returns False.
        """
        x_TD = self.embed(x, pos_T)
        tables = self.rotary, self.local_rotary
        main_rotation, local_rotation = (table.at(pos_T, x_TD) if table else None for table in tables)

        for cache_index, (name, layer) in enumerate(self.layers.items()):
            if not still_needed():
                return None
            number = int(name)
            if inner and number in inner:
                inner[number] = x_TD
            rotation = local_rotation if local_rotation and self.config.window(number) else main_rotation
            if self.config.skips_rope and self.config.skips_rope[number]:
                rotation = None
            x_TD = layer(x_TD, rotation, cache, cache_index)

        if inner and self.config.layers in inner:
            inner[self.config.layers] = x_TD
        return self.norm(x_TD)

    def embed(self, x: Tensor, pos_T: Tensor) -> Tensor:
        """Return the input `[T, D]` of the first layer of this slice."""
        x_TD = self.embed_tokens(x)
        if not isinstance(self.embed_tokens, nn.Identity) and self.config.scales.embedding:
            x_TD = x_TD * torch.tensor(self.config.scales.embedding, dtype=x_TD.dtype)
        if self.embed_positions is not None:
            x_TD = x_TD + self.embed_positions(pos_T + OPT_OFFSET)
        return x_TD  # type: ignore[no-any-return]


def fill(module: nn.Module, tensors: Mapping[str, Tensor], dtype: torch.dtype,
         device: torch.device | str) -> None:
    """Fill a module on the meta device with exactly its weights; each entry of `tensors` is read once.

    The weights are converted to `dtype`, except those that their module lists as `exact`. Raises ValueError if names or
    shapes do not match.
    """
    parameters = dict(module.named_parameters())
    missing_names = sorted(set(parameters) - set(tensors))
    extra_names = sorted(set(tensors) - set(parameters))
    if missing_names or extra_names:
        raise ValueError(f"the weights do not fit the model: missing {missing_names[:3]}, unexpected {extra_names[:3]}")

    for name, parameter in parameters.items():
        owner_path, _, attribute = name.rpartition(".")
        owner, tensor = module.get_submodule(owner_path), tensors[name]
        if parameter.shape != tensor.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; config.json gives {tuple(parameter.shape)}")
        keeps_dtype = attribute in getattr(owner, "exact", ())
        tensor = tensor.to(device=device, dtype=tensor.dtype if keeps_dtype else dtype)
        setattr(owner, attribute, nn.Parameter(tensor, requires_grad=False))
