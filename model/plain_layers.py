"""Norms, linear layers and embeddings, on the meta device until they are filled.

Shapes: T rows, D model.
"""
from __future__ import annotations

from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.precision import for_sums

Product = Callable[[Tensor], Tensor]


class RMSNorm(nn.Module):
    """Root-mean-square norm, with the mean at least in float32; in Gemma with the weight plus one."""

    def __init__(self, size: int, eps: float, norm_weight_plus_one: bool = False) -> None:
        super().__init__()
        self.norm_weight_plus_one = norm_weight_plus_one
        self.weight = nn.Parameter(torch.empty(size, device="meta"), requires_grad=False)
        self.eps = eps

    def forward(self, x_TD: Tensor) -> Tensor:
        wide_TD = for_sums(x_TD)
        if wide_TD.dtype in (torch.float16, torch.bfloat16):
            wide_TD = wide_TD.float()
        if hasattr(F, "rms_norm"):  # torch from 2.4 on: the same bits, with fewer calls
            normed_TD = F.rms_norm(wide_TD, wide_TD.shape[-1:], None, self.eps)
        else:
            normed_TD = wide_TD * torch.rsqrt(wide_TD.pow(2).mean(-1, keepdim=True) + self.eps)

        if self.norm_weight_plus_one:
            weight = 1 + self.weight.to(normed_TD.dtype)
            return (normed_TD * weight).to(x_TD.dtype)
        return self.weight * normed_TD.to(x_TD.dtype)


class LayerNorm(nn.LayerNorm):
    """OPT's norm."""

    def forward(self, x_TD: Tensor) -> Tensor:
        x, weight, bias = (for_sums(x) for x in (x_TD, self.weight, self.bias))
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps).to(x_TD.dtype)


def linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias, device="meta")


def embedding(size: int, hidden: int) -> nn.Embedding:
    """Return an embedding without memory (on the meta device)."""
    # from an existing weight, since nn.Embedding(...) would import torch's code for random initialization
    return nn.Embedding.from_pretrained(torch.empty(size, hidden, device="meta"))
