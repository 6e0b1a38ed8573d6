"""Caches for training, with which a head or a model reads a whole row at once, with gradients.

This module knows nothing about losses. The modules are those of model/, and a layer works as in decoding: it passes on
its keys and values, and gets the attention over the keys that its rows see.

Shapes: N tokens of a row, T pairs of them (N - 1), A pairs where later passes start, D model, K key/value heads,
S keys, E head dimension.
"""
from __future__ import annotations

from typing import Iterator, Union

import torch
from torch import Tensor

from model.attention import PLAIN, AttentionForm, attention
from model.drafts.dflash import DFlashHead
from model.drafts.heads import Eagle3Head, EagleHead

Trainable = Union[EagleHead, Eagle3Head, DFlashHead]


class Causal:
    """A cache with causal attention within one pass; it stores nothing."""

    def __init__(self, rows: int, device: torch.device) -> None:
        all_TS = torch.ones(rows, rows, dtype=torch.bool, device=device)
        self._mask = all_TS.tril()

    def attend(self, layer: int, q_HTE: Tensor, k_KTE: Tensor, v_KTE: Tensor,
               form: AttentionForm = PLAIN) -> Tensor:
        """Return the attention `[H, T, E]` of these queries."""
        mask_TS = self._mask.triu(1 - form.window) if form.window else self._mask
        bias_TS = q_HTE.new_zeros(mask_TS.shape)
        return attention(q_HTE, k_KTE, v_KTE, bias_TS.masked_fill(~mask_TS, float("-inf")), form)


class Unrolled:
    """A cache that holds the passes of a head's layers (EAGLE-3, section 3.2).

    Row i of pass s is the guess after s guesses that follow the pair `starts_A[i]`. In the first pass, which holds the
    target's features, it sees the pairs up to that one. In each later pass it sees only row i, its ancestor or itself.
    Rows beyond the end of the text are the last ones of a pass, and are omitted.
    """

    def __init__(self, starts_A: Tensor) -> None:
        self._starts = starts_A
        self._passes_by_layer: dict[int, tuple[list[Tensor], list[Tensor]]] = {}  # keys and values

    def attend(self, layer: int, q_HTE: Tensor, k_KTE: Tensor, v_KTE: Tensor,
               form: AttentionForm = PLAIN) -> Tensor:
        """Store a pass, and return the attention `[H, T, E]` of its queries."""
        keys, values = self._passes_by_layer.setdefault(layer, ([], []))
        keys.append(k_KTE)
        values.append(v_KTE)

        masks = [self._mask(keys, pass_number) for pass_number in range(len(keys))]
        keys_KSE, values_KSE = torch.cat(keys, 1), torch.cat(values, 1)
        mask_TS = torch.cat(masks, 1)
        return attention(q_HTE, keys_KSE, values_KSE, mask_TS)

    def _mask(self, keys: list[Tensor], pass_number: int) -> Tensor:
        """Return the keys of pass `pass_number` that the rows of the last pass see, as a mask `[T, S]`."""
        device, num_rows = keys[pass_number].device, keys[-1].shape[1]
        num_keys = keys[pass_number].shape[1]
        if pass_number:
            return torch.eye(num_rows, num_keys, dtype=torch.bool, device=device)
        pair_S = torch.arange(num_keys, device=device)
        last_T = pair_S if len(keys) == 1 else self._starts[:num_rows]
        return pair_S <= last_T[:, None]


def unroll(head: Trainable, token_T: Tensor, feature_TD: Tensor, num_passes: int,
           starts_A: Tensor) -> Iterator[Tensor]:
    """Yield the head's outputs in each pass: `[T, D]` in the first, at most `[A, D]` in the others.

    A later pass reads the outputs of the previous one. Pair p is token p + 1 with the target's feature of token p. Row
    i of pass s predicts the feature of token p + s + 1, hence the next token. Here p is i in the first pass, and
    `starts_A[i]` in the others. `starts_A` must be in rising order.
    """
    pos_T = torch.arange(len(token_T), device=token_T.device)
    cache = Unrolled(starts_A)

    # the target's features
    out_TD = head(token_T, feature_TD, pos_T, cache)
    yield out_TD

    # later passes
    out_TD = out_TD[starts_A]
    for pass_number in range(1, num_passes):
        pos_A = starts_A[starts_A < len(token_T) - pass_number] + pass_number
        if not len(pos_A):
            return
        out_TD = head(token_T[pos_A], out_TD[:len(pos_A)], pos_A, cache)
        yield out_TD
