"""What the target says after each path of tokens, computed once and remembered.

A row of the target depends on the tokens from the root to its node and on nothing else. So one that asks for the same
path again, in another segment, method or request, gets the same bits. It knows nothing about time.

Shapes: T rows asked for, P rows that they see, D model, K key/value heads, E head dimension.
"""
from __future__ import annotations

from typing import Sequence

import numpy as np
import torch
from torch import Tensor

from model.cache import PLAIN, Look, attend
from model.llama import LlamaConfig, Slice

FIRST = 1024  # rows for which there is memory at first; it doubles
MOST_BYTES = 1 << 29  # bytes of memory at which everything is forgotten before the next request


class Paths:
    """A model in `slices`, from the first layer to the last, over a tree of all paths that were asked for.

    A path is known by a number. `inner` are the layers whose inputs are remembered beside the last hidden states.
    """

    root = -1  # the path without tokens

    def __init__(self, slices: Sequence[Slice], inner: Sequence[int], like: Tensor) -> None:
        self._slices, self._inner = slices, inner
        self._like = like
        self.clear()

    def clear(self) -> None:
        """Forget all paths."""
        config = self._slices[0].config
        self._stores = [Store(config, len(part.layers), self._like) for part in self._slices]
        width = config.hidden * (1 + len(self._inner))
        self._said = self._like.new_empty(FIRST, width)  # last hidden states, and inner ones behind them
        self._numbers: dict[tuple[int, int], int] = {}  # path before, token -> path
        self._tokens: list[int] = []
        self._ways: list[np.ndarray] = []  # the paths that lead to each, itself included
        self._computed: list[bool] = []

    @property
    def full(self) -> bool:
        """Whether it is time to forget, once nobody holds a path any more."""
        stored = sum(store.bytes for store in self._stores)
        return stored + self._said.numel() * self._said.element_size() > MOST_BYTES

    def after(self, path: int, token: int) -> int:
        """The number of a path with one more token."""
        found = self._numbers.get((path, token))
        if found is not None:
            return found
        number = self._numbers[path, token] = len(self._tokens)
        before = self._ways[path] if path != self.root else np.empty(0, np.int64)
        self._tokens.append(token)
        self._ways.append(np.append(before, number))
        self._computed.append(False)
        return number

    def said(self, paths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The last hidden states `[T, D]` at the end of each path, and the inner ones `[T, D * inner]`."""
        ways = np.unique(np.concatenate([self._ways[path] for path in paths]))
        missing = [path for path in ways.tolist() if not self._computed[path]]
        if missing:
            self._compute(missing)
        found = self._said[list(paths)]
        width = self._slices[0].config.hidden
        return found[:, :width], found[:, width:]

    def _compute(self, rows: list[int]) -> None:
        """Run the layers for these rows, the parents first, which is the order of their numbers."""
        self._make_room(rows[-1] + 1)
        seen = np.unique(np.concatenate([self._ways[row] for row in rows]))
        shape = len(rows), len(seen)
        mask_TP = torch.full(shape, float("-inf"), dtype=self._like.dtype)
        for place, row in enumerate(rows):
            mask_TP[place, torch.from_numpy(np.searchsorted(seen, self._ways[row]))] = 0
        device = self._like.device
        tokens = torch.tensor([self._tokens[row] for row in rows], device=device)
        pos_T = torch.tensor([len(self._ways[row]) - 1 for row in rows], device=device)
        seen_P = torch.from_numpy(seen).to(device)
        places = [len(self._ways[row]) - 1 for row in seen]
        back_TP = pos_T[:, None] - torch.tensor(places, device=device)
        view = torch.tensor(rows, device=device), seen_P, mask_TP.to(device), back_TP
        inner = dict.fromkeys(self._inner, self._like)
        x = tokens
        for part, store in zip(self._slices, self._stores):
            store.view = view
            x = part(x, pos_T, store, inner)
        self._said[view[0]] = torch.cat([x, *inner.values()], -1)
        for row in rows:
            self._computed[row] = True

    def _make_room(self, rows: int) -> None:
        size = len(self._said)
        if rows > size:
            larger = max(rows, 2 * size)
            more = self._said.new_empty(larger - size, self._said.shape[1])
            self._said = torch.cat([self._said, more])
        for store in self._stores:
            store.make_room(rows)


class Store:
    """Keys and values `[layers, K, rows, E]` of the layers of a slice, which uses it as it would a tree cache.

    `view` are the rows `[T]` that are computed, those `[P]` that they may see, the additive mask `[T, P]`, and how far
    back each lies `[T, P]`.
    """

    def __init__(self, config: LlamaConfig, layers: int, like: Tensor) -> None:
        self.view = (like, like, like, like)
        self._keys = like.new_empty(layers, config.kv_heads, FIRST, config.head_dim)
        self._values = torch.empty_like(self._keys)

    @property
    def bytes(self) -> int:
        return 2 * self._keys.numel() * self._keys.element_size()

    def make_room(self, rows: int) -> None:
        """Memory for so many rows."""
        size = self._keys.shape[2]
        if rows > size:
            shape = list(self._keys.shape)
            shape[2] = max(rows, 2 * size) - size
            more = self._keys.new_empty(shape)
            self._keys = torch.cat([self._keys, more], 2)
            self._values = torch.cat([self._values, more], 2)

    def store(self, layer: int, k_KTE: Tensor, v_KTE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keep the keys and values of the rows in one layer; those `[K, P, E]` of all that they see, and the mask."""
        rows, seen, mask_TP, _ = self.view
        keys, values = self._keys[layer], self._values[layer]
        keys[:, rows] = k_KTE
        values[:, rows] = v_KTE
        return keys[:, seen], values[:, seen], mask_TP

    def attend(self, layer: int, q_HTE: Tensor, k_KTE: Tensor, v_KTE: Tensor,
               look: Look = PLAIN) -> Tensor:
        """Keep the keys and values of the rows in one layer; the attention `[H, T, E]` of their queries."""
        keys, values, mask_TP = self.store(layer, k_KTE, v_KTE)
        if look.window:
            mask_TP = mask_TP.masked_fill(self.view[3] >= look.window, float("-inf"))
        return attend(q_HTE, (keys, values), mask_TP, look)
