"""The target's outputs after each path of tokens, computed once.

A row of the target depends only on the tokens from the root to its node. So the same path gets the same bits in every
segment, method and request. This module knows nothing about time.

Shapes: T requested rows, P rows that they attend to, D model, K key/value heads, E head dimension.
"""
from __future__ import annotations

from functools import partial
from typing import Iterable, Sequence, Union

import numpy as np
import torch
from torch import Tensor

from model.attention import PLAIN, AttentionForm, attend
from model.cache import AdmittedRows
from model.llama import LlamaConfig, Slice
from model.memory import Inputs, Recurrence, States
from model.native.layers import NativeSlice
from model.slots import HeldSlots, as_stored, new_slots

FIRST_ROWS = 1024  # of memory; it grows by doubling
MAX_BYTES = 1 << 29  # of memory; above this all paths are forgotten before the next request

AnySlice = Union[Slice, NativeSlice]


class Paths:
    """A model, as `slices` from the first layer to the last, over a tree of all paths, which are numbered.

    The inputs of the layers `inner` are stored in addition to the last hidden states, and keys and values in the type
    of `like`, or in codes.
    """

    root = -1  # the path without tokens

    def __init__(self, slices: Sequence[AnySlice], inner: Sequence[int], like: Tensor,
                 code_type: torch.dtype | None = None) -> None:
        self._slices, self._inner = slices, inner
        self.repeats_bits = all(isinstance(layers, NativeSlice) for layers in slices)
        self._like, self._code_type = like, code_type
        self.clear()

    def clear(self) -> None:
        """Forget all paths."""
        config = self._slices[0].config
        self._caches = [PathCache(config, part.layers, self._like, self._code_type) for part in self._slices]
        output_width = config.hidden * (1 + len(self._inner))
        self._outputs = self._like.new_empty(FIRST_ROWS, output_width)  # columns: last hidden states, then inner ones

        # by path
        self._child_paths: dict[tuple[int, int], int] = {}  # parent path, token -> path
        self._last_tokens: list[int] = []
        self._prefixes: list[np.ndarray] = []  # the prefixes of each path, itself included
        self._is_computed: list[bool] = []

    @property
    def full(self) -> bool:
        """Whether `clear` is due before the next request."""
        cache_bytes = sum(cache.bytes for cache in self._caches)
        output_bytes = self._outputs.numel() * self._outputs.element_size()
        return cache_bytes + output_bytes > MAX_BYTES

    def after(self, path: int, token: int) -> int:
        """Return the number of the path with one more token."""
        child_path = self._child_paths.get((path, token))
        if child_path is not None:
            return child_path

        new_path = self._child_paths[path, token] = len(self._last_tokens)
        parent_prefixes = self._prefixes[path] if path != self.root else np.empty(0, np.int64)
        self._last_tokens.append(token)
        self._prefixes.append(np.append(parent_prefixes, new_path))
        self._is_computed.append(False)
        return new_path

    def outputs(self, paths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the last hidden states `[T, D]` at the end of each path, and the inner ones `[T, D * inner]`."""
        missing = [path for path in self._all_prefixes(paths) if not self._is_computed[path]]
        if missing:
            self._compute(missing)

        outputs = self._outputs[list(paths)]
        hidden_width = self._slices[0].config.hidden
        return outputs[:, :hidden_width], outputs[:, hidden_width:]

    def _all_prefixes(self, paths: Sequence[int]) -> list[int]:
        """Return all prefixes of these paths, in the order of their numbers: parents first."""
        prefixes = [self._prefixes[path] for path in paths]
        return np.unique(np.concatenate(prefixes)).tolist()  # type: ignore[no-any-return]

    def _positions(self, paths: Sequence[int]) -> Tensor:
        positions = [len(self._prefixes[path]) - 1 for path in paths]
        return torch.tensor(positions, device=self._like.device)

    def _compute(self, paths: list[int]) -> None:
        """Run the layers for the last tokens of these paths, which are in the order of their numbers."""
        self._make_room(paths[-1] + 1)
        seen_paths = self._all_prefixes(paths)

        # what each row sees
        mask_TP = torch.full((len(paths), len(seen_paths)), float("-inf"), dtype=self._like.dtype)
        for row, path in enumerate(paths):
            seen_columns = np.searchsorted(seen_paths, self._prefixes[path])
            mask_TP[row, torch.from_numpy(seen_columns)] = 0

        device = self._like.device
        pos_T = self._positions(paths)
        distance_TP = pos_T[:, None] - self._positions(seen_paths)
        path_T = torch.tensor(paths, device=device)
        view = path_T, torch.tensor(seen_paths, device=device), mask_TP.to(device), distance_TP

        # all layers
        inner_inputs = dict.fromkeys(self._inner, self._like)
        x: Tensor | None = torch.tensor([self._last_tokens[path] for path in paths], device=device)
        for part, cache in zip(self._slices, self._caches):
            cache.view = view
            assert x is not None, "nothing is given up"
            x = part(x, pos_T, cache, inner_inputs)
            cache.keep()

        assert x is not None, "nothing is given up"
        self._outputs[path_T] = torch.cat([x, *inner_inputs.values()], -1)
        for path in paths:
            self._is_computed[path] = True

    def _make_room(self, num_rows: int) -> None:
        self._outputs = _grown(self._outputs, 0, num_rows)
        for cache in self._caches:
            cache.make_room(num_rows)


def _grown(x: Tensor, dim: int, num_rows: int) -> Tensor:
    """Return a tensor with space for `num_rows` rows in a dimension; if it must grow, it at least doubles."""
    size = x.shape[dim]
    if num_rows <= size:
        return x

    added_shape = list(x.shape)
    added_shape[dim] = max(num_rows, 2 * size) - size
    return torch.cat([x, x.new_empty(added_shape)], dim)


class PathCache:
    """Keys and values `[layers, K, rows, E]` of the layers of a slice, or codes and their scales, and inputs and states
    of recurrent layers; the slice uses this cache like a tree cache.

    `view` is the rows `[T]` to compute, the rows `[P]` that they may attend to, the additive mask `[T, P]`, and the
    distances `[T, P]` between both in positions.
    """

    def __init__(self, config: LlamaConfig, layer_numbers: Iterable[str | int], like: Tensor,
                 code_type: torch.dtype | None) -> None:
        self.view = (like, like, like, like)
        self._code_type = code_type
        memories = [config.memory(int(number)) for number in layer_numbers]
        slots_shape = len(memories), config.kv_heads, FIRST_ROWS, config.head_dim
        self._tensors = new_slots(slots_shape, like, code_type)
        self._copied: tuple[Tensor, list[Tensor]] | None = None

        # of recurrent layers
        wide = like.to(torch.promote_types(torch.float32, like.dtype))
        recurrent = {layer: memory for layer, memory in enumerate(memories) if memory}
        self._inputs = {layer: like.new_empty(FIRST_ROWS, memory.input_width) for layer, memory in recurrent.items()}
        self._states = {layer: States(memory, wide) for layer, memory in recurrent.items() if memory.state_shape}

    @property
    def bytes(self) -> int:
        tensors = *self._tensors, *self._inputs.values()
        return sum(x.numel() * x.element_size() for x in tensors)

    def make_room(self, num_rows: int) -> None:
        """Allocate memory for this number of rows."""
        self._tensors = [_grown(x, 2, num_rows) for x in self._tensors]
        self._inputs = {layer: _grown(x, 0, num_rows) for layer, x in self._inputs.items()}

    def admitted(self) -> list[AdmittedRows]:
        """Return the rows to compute, over a copy of the slots that they see, until `keep`."""
        row_T, seen_P, mask_TP, _ = self.view
        is_new_P = torch.isin(seen_P, row_T)
        old_first_P = torch.cat((torch.nonzero(~is_new_P), torch.nonzero(is_new_P)))[:, 0]
        slot_P = seen_P[old_first_P]
        copies = [x[:, :, slot_P] for x in self._tensors]
        self._copied = row_T, copies

        sees_TP = mask_TP[:, old_first_P] == 0
        return [AdmittedRows(0, sees_TP.numpy(), [HeldSlots(copies)])]

    def keep(self) -> None:
        """Store what was written to the copy."""
        if self._copied is not None:
            row_T, copies = self._copied
            for store, copy in zip(self._tensors, copies):
                store[:, :, row_T] = copy[:, :, -len(row_T):]
        self._copied = None

    def attend(self, layer: int, q_HTE: Tensor, k_KTE: Tensor, v_KTE: Tensor,
               form: AttentionForm = PLAIN) -> Tensor:
        """Store keys and values of the rows in a layer; return the attention `[H, T, E]` of their queries."""
        row_T, seen_P, mask_TP, distance_TP = self.view
        for tensor, new in zip(self._tensors, as_stored((k_KTE, v_KTE), self._code_type)):
            tensor[layer, :, row_T] = new
        if form.window:
            mask_TP = mask_TP.masked_fill(distance_TP >= form.window, float("-inf"))
        return attend(q_HTE, [x[layer][:, seen_P] for x in self._tensors], mask_TP, form)

    def recur(self, layer: int, input_TN: Tensor, recurrence: Recurrence) -> Tensor:
        """Store the rows' inputs of a recurrent layer; return the outputs `[T, M]` after their paths."""
        row_T, seen_P, mask_TP, _ = self.view
        self._inputs[layer][row_T] = input_TN
        inputs = Inputs(self._inputs[layer], 0, recurrence)

        prefixes = [seen_P[mask_P == 0].numpy() for mask_P in mask_TP]
        num_taps = recurrence.num_taps
        tap_slots = [_slots_from(prefix, len(prefix) - num_taps) for prefix in prefixes]
        steps = inputs.steps(np.stack(tap_slots))
        if layer not in self._states:
            return steps[0]

        states, outs = self._states[layer], []
        for row, (*ancestors, path) in enumerate(prefixes):
            state = states.before(ancestors, 0, partial(_slots_from, ancestors), inputs)
            row_steps = [x[row:row + 1] for x in steps]
            outs.append(recurrence.advance(row_steps, state))
            states.keep(path, state)
        return torch.cat(outs)


def _slots_from(prefix: Sequence[int] | np.ndarray, begin: int) -> np.ndarray:
    """Return the slots of a path's prefixes from a position on; -1 before the first."""
    before_first = np.full(max(0, -begin), -1)
    slots = np.asarray(prefix[max(0, begin):], np.int64)
    return np.append(before_first, slots)
