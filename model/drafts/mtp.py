"""The layer for multi-token prediction that a model was trained with, as a draft head: DeepSeek-V3's, as MiMo has it.

After DeepSeek-V3 (arXiv 2412.19437, section 2.2, equations 21 to 23): the target's last hidden state of a token and the
embedding of the next one are normed, projected together and go through one layer; the target's LM head makes logits of
what it says, which is the state of the next step, too. MiMo-7B (arXiv 2505.07608) puts the state in front, and norms
what the layer says. Its published code embeds the token at position 0 like any other, as is done here; vLLM does not.

Shapes: T rows, D model.
"""
from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from model.cache import Rows
from model.drafts.head import Head
from model.llama import Layer, LlamaConfig, RMSNorm, linear

OF_LAYER = re.compile(r"^(self_attn|mlp|input_layernorm|post_attention_layernorm)\.")


class MtpHead(Head):
    """`input_proj` over [feature, embedding], each normed, then one layer and a norm.

    The feature is the target's last hidden state, after its norm, or what the head made of the pair before.
    """

    drifts = True  # its training feeds it the target's states alone

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__(c)
        self.token_layernorm = RMSNorm(c.hidden, c.eps)
        self.hidden_layernorm = RMSNorm(c.hidden, c.eps)
        self.input_proj = linear(2 * c.hidden, c.hidden)
        self.layers = nn.ModuleList([Layer(c)])
        self.final_layernorm = RMSNorm(c.hidden, c.eps)

    def forward(self, token_T: Tensor, feature_TD: Tensor, pos_T: Tensor, cache: Rows) -> Tensor:
        """What the head makes of each pair, `[T, D]`."""
        token_TD = self.token_layernorm(self.embed_tokens(token_T))
        both = torch.cat((self.hidden_layernorm(feature_TD), token_TD), -1)
        x_TD = self.input_proj(both)
        x_TD = self.layers[0](x_TD, self.rotary.at(pos_T, x_TD), cache, 0)
        return self.final_layernorm(x_TD)  # type: ignore[no-any-return]


def own_name(name: str) -> str:
    """The name in an `MtpHead` of a tensor of the first of a model's layers for multi-token prediction."""
    return OF_LAYER.sub(r"layers.0.\1.", name)
