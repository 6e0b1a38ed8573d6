"""Scaled dot-product attention of some rows to keys and values that are there already.

Shapes: T rows, H heads, K key/value heads, S slots, E head dimension.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(q_HTE: Tensor, k_KSE: Tensor, v_KSE: Tensor, mask_TS: Tensor) -> Tensor:
    """Scaled dot-product attention `[H, T, E]`; heads that share keys are folded into rows, so nothing is repeated."""
    heads, rows, dim = q_HTE.shape
    group = heads // k_KSE.shape[0]
    q = q_HTE.reshape(k_KSE.shape[0], group * rows, dim)
    mask = mask_TS if group == 1 else mask_TS.repeat(group, 1)
    if hasattr(F, "scaled_dot_product_attention"):
        fused = F.scaled_dot_product_attention
        out = fused(q[None], k_KSE[None], v_KSE[None], mask)[0]
    else:  # torch 1.11, the wheel of JetPack 5
        scores = q @ k_KSE.transpose(1, 2) * dim ** -0.5
        out = torch.softmax(scores + mask, -1) @ v_KSE
    return out.reshape(heads, rows, dim)
