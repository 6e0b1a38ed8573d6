"""The networks of draft heads: EAGLE-1 and EAGLE-2, EAGLE-3, and a layer for multi-token prediction.

They know nothing about trees. Shapes: T rows, D model, N concatenated inner features, V vocabulary.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from config.schema.heads import HeadDialect
from model.attention import CachedRows
from model.llama import MLP, Attention, Layer, LlamaConfig
from model.plain_layers import RMSNorm, embedding, linear
from model.rotary import Rotary, Rotation


class Head(nn.Module):
    """A head over pairs of a token and a feature; if it knows fewer tokens, its i is the target's i + `shift[i]`."""

    drifts = False  # whether its guesses get worse when they are based on many of its own
    inner: tuple[int, ...] = ()  # the target's layers of which it reads the inputs, in place of the last hidden state
    logits: Any = None  # computes logits of its output, if it has an LM head of its own

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.config = c
        self.shift: Tensor | None = None
        self.embed_tokens: Any = embedding(c.vocab, c.hidden)
        self.rotary = Rotary(c.turns)

    @property
    def like(self) -> Tensor:
        """An empty tensor of the type and on the device in which the head computes."""
        stored_weight: Tensor = self.embed_tokens.weight
        return stored_weight.new_empty(0, dtype=getattr(self.embed_tokens, "dtype", stored_weight.dtype))


class EagleHead(Head):
    """`fc` over [embedding, the target's last hidden state], then a layer without input norm; the target's LM head."""

    drifts = True

    def __init__(self, c: LlamaConfig, bias: bool) -> None:
        super().__init__(c)
        self.fc = linear(2 * c.hidden, c.hidden, bias)
        self.layers = nn.ModuleList([Layer(c, input_norm=False)])

    def forward(self, token_T: Tensor, feature_TD: Tensor, pos_T: Tensor, cache: CachedRows) -> Tensor:
        """Return the predicted feature of each token, `[T, D]`."""
        x_TD = self.fc(torch.cat((self.embed_tokens(token_T), feature_TD), -1))
        return self.layers[0](x_TD, self.rotary.at(pos_T, x_TD), cache, 0)


class MidLayer(nn.Module):
    """EAGLE-3's first layer: attention reads embedding and feature, concatenated; the residual is the feature."""

    def __init__(self, c: LlamaConfig, norm_before_residual: bool) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual

        self.self_attn = Attention(c)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            wide = linear(2 * c.hidden, narrow.out_features, bias=narrow.bias is not None)
            setattr(self.self_attn, name, wide)

        self.mlp = MLP(c, c.intermediate)
        self.hidden_norm = RMSNorm(c.hidden, c.eps)
        self.input_layernorm = RMSNorm(c.hidden, c.eps)
        self.post_attention_layernorm = RMSNorm(c.hidden, c.eps)

    def forward(self, x_TD: Tensor, feature_TD: Tensor, rotation: Rotation, cache: CachedRows) -> Tensor:
        normed_TD = self.hidden_norm(feature_TD)
        pair_features = torch.cat((self.input_layernorm(x_TD), normed_TD), -1)
        residual_TD = normed_TD if self.norm_before_residual else feature_TD
        x_TD = residual_TD + self.self_attn(pair_features, rotation, cache, 0)
        return x_TD + self.mlp(self.post_attention_layernorm(x_TD))


class Eagle3Head(Head):
    """`fc` over inner features of a target of size `target_size`, `midlayer`, and an LM head of `vocab_size` tokens.

    Further layers after `midlayer` are plain ones, in `layers` under their numbers. The head does not drift, since its
    training feeds it its own outputs for about seven passes.
    """

    def __init__(self, c: LlamaConfig, target_size: int, vocab_size: int, dialect: HeadDialect) -> None:
        super().__init__(c)
        self.dialect, self.inner = dialect, dialect.inner

        # inner features
        feature_size = len(self.inner) * target_size
        self.input_norm = RMSNorm(feature_size, c.eps) if dialect.norm_before_fc else nn.Identity()
        norms = [RMSNorm(target_size, c.eps) for _ in self.inner]
        self.fc_norm = nn.ModuleList(norms if dialect.fc_norm else [])
        self.fc = linear(feature_size, c.hidden)

        # layers
        self.midlayer = MidLayer(c, dialect.norm_before_residual)
        further_layers = {str(number): Layer(c) for number in range(1, c.layers)}
        self.layers = nn.ModuleDict(further_layers)
        self.norm = RMSNorm(c.hidden, c.eps)
        self.lm_head = linear(c.hidden, vocab_size)

    def join(self, inner_TN: Tensor) -> Tensor:
        """Combine the target's concatenated inner features `[T, N]` into one feature `[T, D]`."""
        inner_TN = self.input_norm(inner_TN)
        if self.fc_norm:
            parts = inner_TN.chunk(len(self.inner), -1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts)]
            inner_TN = torch.cat(normed, -1)
        return self.fc(inner_TN)  # type: ignore[no-any-return]

    def forward(self, token_T: Tensor, feature_TD: Tensor, pos_T: Tensor, cache: CachedRows) -> Tensor:
        """Return the output for each pair, `[T, D]`; `feature_TD` are the target's inner features or the head's own."""
        if feature_TD.shape[-1] == self.fc.in_features:
            feature_TD = self.join(feature_TD)

        x_TD = self.embed_tokens(token_T)
        rotation = self.rotary.at(pos_T, x_TD)
        x_TD = self.midlayer(x_TD, feature_TD, rotation, cache)
        for number, layer in self.layers.items():
            x_TD = layer(x_TD, rotation, cache, int(number))
        return self.norm(x_TD) if self.dialect.norm_output else x_TD

    def logits(self, out_TD: Tensor) -> Tensor:
        """Return logits `[T, V]` over the head's own vocabulary."""
        return self.lm_head(out_TD if self.dialect.norm_output else self.norm(out_TD))  # type: ignore[no-any-return]


class MtpHead(Head):
    """The layer for multi-token prediction of a model trained with one: `input_proj` over [feature, embedding], each
    normed, then one layer and a norm (DeepSeek-V3, arXiv 2412.19437, section 2.2, equations 21 to 23).

    The feature is the target's last hidden state, after its norm, or the head's output for the pair before. MiMo-7B
    (arXiv 2505.07608) puts the feature first, and norms the layer's output. Its published code embeds the token at
    position 0 like any other, as is done here; vLLM does not.
    """

    drifts = True  # its training feeds it only the target's states

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__(c)
        self.token_layernorm = RMSNorm(c.hidden, c.eps)
        self.hidden_layernorm = RMSNorm(c.hidden, c.eps)
        self.input_proj = linear(2 * c.hidden, c.hidden)
        self.layers = nn.ModuleList([Layer(c)])
        self.final_layernorm = RMSNorm(c.hidden, c.eps)

    def forward(self, token_T: Tensor, feature_TD: Tensor, pos_T: Tensor, cache: CachedRows) -> Tensor:
        """Return the output for each pair, `[T, D]`."""
        token_TD = self.token_layernorm(self.embed_tokens(token_T))
        pair_features = torch.cat((self.hidden_layernorm(feature_TD), token_TD), -1)

        x_TD = self.input_proj(pair_features)
        x_TD = self.layers[0](x_TD, self.rotary.at(pos_T, x_TD), cache, 0)
        return self.final_layernorm(x_TD)  # type: ignore[no-any-return]

