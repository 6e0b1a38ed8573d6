"""The target's outputs after each path of tokens, computed once.

A row of the target depends only on the tokens from the root to its node. So the same path gets the same bits in every
segment, method and request. This module knows nothing about time.

Shapes: T requested rows, P rows that they attend to, D model, K key/value heads, E head dimension.
"""
from __future__ import annotations

from typing import Sequence, Union

import numpy as np
import torch
from torch import Tensor

from model.attention import PLAIN, AttentionForm, attend
from model.cache import AdmittedRows, HeldSlots
from model.llama import LlamaConfig, Slice
from model.native.layers import NativeSlice

FIRST = 1024  # rows of memory at first; memory grows by doubling
MOST_BYTES = 1 << 29  # limit of memory; above it all paths are forgotten before the next request


Part = Union[Slice, NativeSlice]


class Paths:
    """A model, as `slices` from the first layer to the last, over a tree of all paths, which are numbered.

    The inputs of the layers `inner` are stored in addition to the last hidden states.
    """

    root = -1  # the path without tokens

    def __init__(self, slices: Sequence[Part], inner: Sequence[int], like: Tensor) -> None:
        self._slices, self._inner = slices, inner
        self._like = like
        self.clear()

    def clear(self) -> None:
        """Forget all paths."""
        config = self._slices[0].config
        self._stores = [PathCache(config, len(part.layers), self._like) for part in self._slices]
        width = config.hidden * (1 + len(self._inner))
        self._outputs = self._like.new_empty(FIRST, width)  # columns: last hidden states, then inner ones
        self._numbers: dict[tuple[int, int], int] = {}  # parent path, token -> path
        self._tokens: list[int] = []  # last token of each path
        self._ways: list[np.ndarray] = []  # the prefixes of each path, itself included
        self._computed: list[bool] = []

    @property
    def full(self) -> bool:
        """Whether `clear` is due before the next request."""
        stored = sum(store.bytes for store in self._stores)
        return stored + self._outputs.numel() * self._outputs.element_size() > MOST_BYTES

    def after(self, path: int, token: int) -> int:
        """Return the number of the path with one more token."""
        found = self._numbers.get((path, token))
        if found is not None:
            return found
        number = self._numbers[path, token] = len(self._tokens)
        before = self._ways[path] if path != self.root else np.empty(0, np.int64)
        self._tokens.append(token)
        self._ways.append(np.append(before, number))
        self._computed.append(False)
        return number

    def outputs(self, paths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the last hidden states `[T, D]` at the end of each path, and the inner ones `[T, D * inner]`."""
        missing = [path for path in self._union(paths) if not self._computed[path]]
        if missing:
            self._compute(missing)
        found = self._outputs[list(paths)]
        width = self._slices[0].config.hidden
        return found[:, :width], found[:, width:]

    def _union(self, paths: Sequence[int]) -> list[int]:
        """Return all prefixes of these paths, in the order of their numbers: parents first."""
        ways = [self._ways[path] for path in paths]
        return np.unique(np.concatenate(ways)).tolist()  # type: ignore[no-any-return]

    def _positions(self, rows: Sequence[int]) -> Tensor:
        positions = [len(self._ways[row]) - 1 for row in rows]
        return torch.tensor(positions, device=self._like.device)

    def _compute(self, rows: list[int]) -> None:
        """Run the layers for these rows, which are in the order of their numbers."""
        self._make_room(rows[-1] + 1)
        seen = self._union(rows)
        shape = len(rows), len(seen)
        mask_TP = torch.full(shape, float("-inf"), dtype=self._like.dtype)
        for place, row in enumerate(rows):
            mask_TP[place, torch.from_numpy(np.searchsorted(seen, self._ways[row]))] = 0
        device = self._like.device
        tokens = torch.tensor([self._tokens[row] for row in rows], device=device)
        pos_T = self._positions(rows)
        back_TP = pos_T[:, None] - self._positions(seen)
        rows_T = torch.tensor(rows, device=device)
        view = rows_T, torch.tensor(seen, device=device), mask_TP.to(device), back_TP
        inner = dict.fromkeys(self._inner, self._like)
        x: Tensor | None = tokens
        for part, store in zip(self._slices, self._stores):
            store.view = view
            assert x is not None, "nothing is given up"
            x = part(x, pos_T, store, inner)
            store.keep()
        assert x is not None, "nothing is given up"
        self._outputs[rows_T] = torch.cat([x, *inner.values()], -1)
        for row in rows:
            self._computed[row] = True

    def _make_room(self, rows: int) -> None:
        self._outputs = _grown(self._outputs, 0, rows)
        for store in self._stores:
            store.make_room(rows)


def _grown(x: Tensor, dim: int, rows: int) -> Tensor:
    """Return a tensor with space for `rows` rows in a dimension; if it must grow, it at least doubles."""
    shape = list(x.shape)
    size = shape[dim]
    if rows <= size:
        return x
    shape[dim] = max(rows, 2 * size) - size
    return torch.cat([x, x.new_empty(shape)], dim)


class PathCache:
    """Keys and values `[layers, K, rows, E]` of the layers of a slice, which uses the store like a tree cache.

    `view` is the rows `[T]` to compute, the rows `[P]` that they may attend to, the additive mask `[T, P]`, and the
    distances `[T, P]` between both in positions.
    """

    def __init__(self, config: LlamaConfig, layers: int, like: Tensor) -> None:
        self.view = (like, like, like, like)
        self._keys = like.new_empty(layers, config.kv_heads, FIRST, config.head_dim)
        self._values = torch.empty_like(self._keys)
        self._copied: tuple[Tensor, list[Tensor]] | None = None

    @property
    def bytes(self) -> int:
        return 2 * self._keys.numel() * self._keys.element_size()

    def make_room(self, rows: int) -> None:
        """Allocate memory for this number of rows."""
        self._keys = _grown(self._keys, 2, rows)
        self._values = _grown(self._values, 2, rows)

    def admitted(self) -> list[AdmittedRows]:
        """Return the rows to compute, over a copy of the slots that they see, until `keep`."""
        rows, seen, mask_TP, _ = self.view
        is_new = torch.isin(seen, rows)
        order = torch.cat((torch.nonzero(~is_new), torch.nonzero(is_new)))[:, 0]
        slots = seen[order]
        self._copied = rows, [x[:, :, slots] for x in (self._keys, self._values)]
        sees = mask_TP[:, order] == 0
        return [AdmittedRows(0, sees.numpy(), [HeldSlots(self._copied[1])])]

    def keep(self) -> None:
        """Store the keys and values that were written to the copy."""
        if self._copied is not None:
            rows, copies = self._copied
            for store, copy in zip((self._keys, self._values), copies):
                store[:, :, rows] = copy[:, :, -len(rows):]
        self._copied = None

    def store(self, layer: int, k_KTE: Tensor, v_KTE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Store keys and values of the rows in a layer; return those `[K, P, E]` of all seen rows, and the mask."""
        rows, seen, mask_TP, _ = self.view
        keys, values = self._keys[layer], self._values[layer]
        keys[:, rows] = k_KTE
        values[:, rows] = v_KTE
        return keys[:, seen], values[:, seen], mask_TP

    def attend(self, layer: int, q_HTE: Tensor, k_KTE: Tensor, v_KTE: Tensor,
               form: AttentionForm = PLAIN) -> Tensor:
        """Store keys and values of the rows in a layer; return the attention `[H, T, E]` of their queries."""
        keys, values, mask_TP = self.store(layer, k_KTE, v_KTE)
        if form.window:
            mask_TP = mask_TP.masked_fill(self.view[3] >= form.window, float("-inf"))
        return attend(q_HTE, (keys, values), mask_TP, form)
