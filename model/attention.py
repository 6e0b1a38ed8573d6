"""Attention of a segment's rows over cached keys and values, which may be codes: whole numbers times a scale.

Shapes: T rows of a segment, S slots in use, H heads, K key/value heads, E head dimension.
"""
from __future__ import annotations

from typing import NamedTuple, Protocol, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from model.memory import Recurrence
from model.precision import for_sums

MAX_WIDENED = 1 << 17  # numbers of keys that are converted at once, so that they stay in the CPU's cache
MIN_AMPLITUDE = 1e-20  # least value for a row's largest number, so that a row of zeros does not divide by zero


class AttentionForm(NamedTuple):
    """The differences of a layer's attention from plain attention."""

    window: int = 0  # positions that a row sees, including its own; 0: all
    cap: float = 0.0  # bound of the scores, by tanh; 0: none
    sinks: Tensor | None = None  # a score `[H]` per head that takes part in the softmax, without a value


PLAIN = AttentionForm()


class CachedRows(Protocol):
    """The interface between the layers of a slice and the cached rows: what each row keeps of a layer, and reads there
    of its path."""

    def attend(self, layer: int, q_HTE: Tensor, k_KTE: Tensor, v_KTE: Tensor,
               form: AttentionForm = PLAIN) -> Tensor:
        """Store the keys and values of the rows in one layer, and return the attention `[H, T, E]` of their queries."""

    def recur(self, layer: int, input_TN: Tensor, recurrence: Recurrence) -> Tensor:
        """Store the rows' inputs of one recurrent layer, and return its outputs `[T, M]`."""


def attend(q_HTE: Tensor, kv: Sequence[Tensor], mask_TS: Tensor, form: AttentionForm = PLAIN) -> Tensor:
    """Compute attention `[H, T, E]`, on a CPU with the same bits per row in every batch (model/precision.py).

    `kv` are keys and values `[K, S, E]`, followed by their scales `[K, S, 1]` if they are codes.
    """
    q, mask = for_sums(q_HTE), for_sums(mask_TS)
    if q.dtype == kv[0].dtype:
        return attention(q, kv[0], kv[1], mask, form)

    # a few heads at a time
    num_kv_heads, group_size = len(kv[0]), len(q_HTE) // len(kv[0])
    # all heads at once with sinks, which are not cut by head
    heads_at_once = num_kv_heads if form.sinks is not None else max(1, MAX_WIDENED // kv[0][0].numel())
    out_HTE = torch.empty_like(q_HTE)
    buffers = [torch.empty_like(x[:heads_at_once], dtype=q.dtype) for x in kv[:2]]  # since new memory is slow
    for first_head in range(0, num_kv_heads, heads_at_once):
        keys, values = from_codes([x[first_head:first_head + heads_at_once] for x in kv], buffers)
        query_heads = slice(first_head * group_size, (first_head + heads_at_once) * group_size)
        out_HTE[query_heads] = attention(q[query_heads], keys, values, mask, form)
    return out_HTE


def to_codes(x_KTE: Tensor, code_type: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize keys or values to codes; return them and the scale of each head and row."""
    wide = x_KTE.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp(min=MIN_AMPLITUDE) / torch.iinfo(code_type).max
    return (wide / scale).round().to(code_type), scale


def from_codes(kv: Sequence[Tensor], buffers: Sequence[Tensor]) -> list[Tensor]:
    """Convert keys and values to the type of the `buffers`, of at least as many heads; return the filled parts."""
    wide = [into[:len(x)].copy_(x) for into, x in zip(buffers, kv)]
    for x, scale in zip(wide, kv[2:]):
        x *= scale
    return wide


def attention(q_HTE: Tensor, k_KSE: Tensor, v_KSE: Tensor, mask_TS: Tensor,
              form: AttentionForm = PLAIN) -> Tensor:
    """Compute scaled dot-product attention `[H, T, E]`; heads that share keys become rows, so no key is repeated.

    The mask is `[T, S]`, or repeats these rows for each of the heads that share keys. It includes the window of `form`.
    """
    num_heads, num_rows, head_dim = q_HTE.shape
    group_size = num_heads // k_KSE.shape[0]
    q = q_HTE.reshape(k_KSE.shape[0], group_size * num_rows, head_dim)
    mask = mask_TS if len(mask_TS) == group_size * num_rows else mask_TS.repeat(group_size, 1)

    if form.cap or form.sinks is not None:
        scores = q @ k_KSE.transpose(1, 2) * head_dim ** -0.5
        scores = _bent(scores, form, num_rows) + _columns(mask, form)
        wide_dtype = torch.promote_types(torch.float32, q.dtype)
        weights = torch.softmax(scores, -1, wide_dtype).to(q.dtype)
        out = weights[..., :k_KSE.shape[1]] @ v_KSE
    elif hasattr(F, "scaled_dot_product_attention"):
        out = F.scaled_dot_product_attention(q[None], k_KSE[None], v_KSE[None], mask)[0]
    else:  # torch 1.11, the wheel of JetPack 5
        scores = q @ k_KSE.transpose(1, 2) * head_dim ** -0.5
        out = torch.softmax(scores + mask, -1) @ v_KSE
    return out.reshape(num_heads, num_rows, head_dim)


def _bent(scores_KNS: Tensor, form: AttentionForm, num_rows: int) -> Tensor:
    """Return capped scores, and a last column for the sinks. N are the heads of a key, with `num_rows` rows each."""
    if form.cap:
        scores_KNS = form.cap * torch.tanh(scores_KNS / form.cap)
    if form.sinks is None:
        return scores_KNS
    sinks_KN = form.sinks.view(len(scores_KNS), -1).repeat_interleave(num_rows, 1)
    sink_column = sinks_KN[..., None].to(scores_KNS.dtype)
    return torch.cat((scores_KNS, sink_column), -1)


def _columns(mask_NS: Tensor, form: AttentionForm) -> Tensor:
    """Return the mask with a last column for the sinks, which all rows see."""
    return mask_NS if form.sinks is None else F.pad(mask_NS, (0, 1))
