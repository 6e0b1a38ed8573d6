"""The tree cache: keys and values of some layers, each slot tagged with its node.

Recurrent layers keep their inputs in slots, too, and states that follow from these (`memory.py`).

It knows nothing about tokens or strategies, and derives positions from what a row sees. Slots [0, settled) hold text,
which every row sees, or as much of it as its window; they keep their numbers, though memory may move. After them comes
the tail, in which the matrix `sees` decides which slots a row sees. A dead node is never an ancestor of a live one, so
pruning late, or never, costs time but cannot change a result.

Shapes: T rows of a segment, S slots in use, H heads, K key/value heads, E head dimension, N numbers of an input of a
recurrent layer, W inputs that one of its steps reads, M numbers of its output.
"""
from __future__ import annotations

import sys
from functools import partial
from typing import Container, NamedTuple, Protocol, Sequence

import numpy as np
import torch
from torch import Tensor

from model.attention import PLAIN, AttentionForm, CachedRows, attend
from model.devices import upload
from model.memory import Inputs, MemoryForm, Recurrence, States
from model.precision import for_sums
from model.slots import HeldSlots, Slots, SlotShape


class Survivors(NamedTuple):
    """The nodes that a prune leaves alive: those in `keep`, and all with ids from `horizon` on."""

    horizon: int = 0
    keep: frozenset[int] = frozenset()

    @staticmethod
    def after(tip: int, keep: Sequence[int], horizon: int) -> Survivors:
        """Return the survivors when the text ends in `tip` and `keep` are the live guesses."""
        return Survivors(horizon, frozenset(keep).union((tip,)))

    def spare(self, node: int) -> bool:
        """Return whether the node survives."""
        return node >= self.horizon or node in self.keep

    def alive(self, nodes: Sequence[int]) -> list[int]:
        """Return the indices of the survivors in `nodes`."""
        return [i for i, node in enumerate(nodes) if self.spare(node)]

    def newer(self, other: Survivors) -> Survivors:
        """Return the survivors of the newer of two prunes, in whatever order they arrived."""
        return other if other.horizon >= self.horizon else self


class AdmittedRows(NamedTuple):
    """The rows that a request has just admitted, for kernels that read the slots themselves."""

    settled: int  # slots of text, which all rows see
    sees: np.ndarray  # `[T, tail]`: the slots behind them that each row sees; the rows' own ones are the last
    slots: Sequence[HeldSlots]  # of each window, in ascending order


class NativeCache(Protocol):
    """What native kernels read of a cache."""

    def admitted(self) -> list[AdmittedRows]:
        """Return the rows of each request, in the order of the segment's rows."""


class SegmentCache(CachedRows, NativeCache, Protocol):
    """The cached rows of one request, or of several that share a message."""

    @property
    def settled(self) -> int:
        """The number of slots of settled text, in total."""

    def split(self, x_T: Tensor) -> Sequence[Tensor]:
        """Split values of the segment's rows by request."""


class TreeCache:
    """The slots of some layers, and the visibility of rows in the tail.

    `windows` are the windows of the layers in positions, 0 for none; slots before a window are dropped. Without windows
    nothing is dropped, and another text may reuse the beginning. `memories` are the forms of recurrent layers, and None
    for the others; empty: there are none. `code_type` is that of `Slots`.
    """

    def __init__(self, shape: SlotShape, dtype: torch.dtype, device: torch.device | str, windows: Sequence[int] = (),
                 code_type: torch.dtype | None = None, memories: Sequence[MemoryForm | None] = ()) -> None:
        num_layers, num_kv_heads, self.capacity, head_dim = self.shape = shape
        self.like = torch.empty(0, dtype=dtype, device=device)
        self.windows, self.code_type = tuple(windows) or (0,) * num_layers, code_type
        self.memories = tuple(memories) or (None,) * num_layers

        self.slots: list[Slots] = []
        self._slots_of_layer: dict[int, tuple[Slots, int]] = {}  # and the layer's index there
        self.states: dict[int, States] = {}  # of recurrent layers that have some
        wide = self.like.to(torch.promote_types(torch.float32, dtype))
        memory_windows = list(zip(self.memories, self.windows))
        for memory, window in sorted(set(memory_windows), key=_slots_order):
            layers = [layer for layer, each in enumerate(memory_windows) if each == (memory, window)]
            num_layers = len(layers)

            if memory is None:
                slot_shape = num_layers, num_kv_heads, self.capacity, head_dim
                slots = Slots(slot_shape, window, self.like, code_type)
            else:
                slot_shape = num_layers, 1, self.capacity, memory.input_width
                slots = Slots(slot_shape, window, self.like, num_tensors=1)

            self.slots.append(slots)
            self._slots_of_layer.update((layer, (slots, index)) for index, layer in enumerate(layers))

            if memory and memory.state_shape:
                self.states.update((layer, States(memory, wide)) for layer in layers)

        self._sees = np.zeros((64, 64), dtype=bool)
        self._num_rows = 0  # of the segment that was admitted last
        self._num_leading = 0  # rows at the front of the tail that are text, and settle at the next step
        self.clear()

    def another(self) -> TreeCache:
        """Return an empty cache of the same shape, on the same device and of the same type."""
        dtype, device = self.like.dtype, self.like.device
        return TreeCache(self.shape, dtype, device, self.windows, self.code_type, self.memories)

    def clear(self) -> None:
        """Forget the request, and free the memory of all slots but the first block."""
        for slots in self.slots:
            slots.clear()
        for states in self.states.values():
            states.clear()

        self.settled = 0
        self._survivors = Survivors()
        self._set_tail([])

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens of the text, with which another request begins."""
        self.drop()
        self._check_beginning(length)
        for states in self.states.values():
            states.truncate(length)
        self.settled = length
        self._survivors = Survivors()

    def copy(self, source: TreeCache, length: int) -> None:
        """Replace the content by the first `length` tokens of another cache."""
        source._settle_leading()
        source._check_beginning(length)
        self.drop()
        self.settled = 0
        for mine, theirs in zip(self.slots, source.slots):
            mine.copy(theirs, length)
        for layer, states in self.states.items():
            states.copy(source.states[layer], length)
        self.settled = length

    def _check_beginning(self, length: int) -> None:
        assert length <= self.settled, f"{self.settled} slots are settled, fewer than {length}"
        assert not any(slots.first for slots in self.slots), "the beginning of the text is dropped"

    def end(self, last: int) -> None:
        """End the text in the node `last`, with no live guesses below it."""
        self.prune(last, last, (), sys.maxsize)

    def drop(self) -> None:
        """Forget the tail, after the text at its front has settled."""
        self._settle_leading()
        self._set_tail([])

    def retain(self, nodes: Container[int]) -> None:
        """Settle the text at the front of the tail; forget its other rows that are not among `nodes`."""
        self._settle_leading()
        self._compact([i for i, node in enumerate(self._tail) if node in nodes])

    @property
    def bytes(self) -> int:
        """The memory of slots and states in bytes."""
        tensors = [x for slots in self.slots for x in slots.tensors]
        slot_bytes = sum(x.numel() * x.element_size() for x in tensors)
        return slot_bytes + sum(states.bytes for states in self.states.values())

    @property
    def room(self) -> int:
        """The number of rows that can still be admitted."""
        return self.capacity - self.settled - len(self._tail)

    @property
    def nodes(self) -> list[int]:
        """The nodes of the tail, in the order of their slots."""
        return list(self._tail)

    def alive(self, nodes: Sequence[int]) -> list[int]:
        """Return the indices in `nodes` of those that no prune has declared dead."""
        return self._survivors.alive(nodes)

    def admit(self, nodes: Sequence[int], parents: Sequence[int], text: int,
              mutual: bool = False) -> None:
        """Assign the next slots to `nodes`, of which the first `text` are settled; parents come before children.

        If `mutual`, all others see each other, as in a block that is guessed at once.

        Raises ValueError if the cache has too few slots.
        """
        assert 0 <= text <= len(nodes) == len(parents), f"{text} of {len(nodes)} rows are text"
        self._settle_leading()
        start = len(self._tail)
        tail_end = start + len(nodes)
        end = self.settled + tail_end
        if end > self.capacity:
            raise ValueError(f"the KV cache has {self.capacity} slots and needs {end}: "
                             "raise max_length or draft fewer tokens")
        self._grow(tail_end)
        self._reserve(end)

        # which slots of the tail each row sees
        for index, (node, parent) in enumerate(zip(nodes, parents), start):
            parent_index = self._index_of_node.get(parent)  # a parent that is not in the tail is settled: all see it
            self._sees[index] = False if parent_index is None else self._sees[parent_index]
            self._sees[index, index] = True
            self._index_of_node[node] = index
            self._tail.append(node)
        if mutual:
            self._sees[start + text:tail_end, start + text:tail_end] = True
        if start == 0:
            # These rows continue the settled text. They settle at the next step, since a row of text does not see the
            # later ones of its own segment.
            self._num_leading = text

        self._num_rows = len(nodes)
        self._masks: dict[tuple[int, int], Tensor] = {}  # shared by all layers with this window and size of head groups
        self._last_slots_by_number: dict[int, np.ndarray] = {}

    def admitted(self) -> list[AdmittedRows]:
        """Return the admitted rows, as the only request's."""
        end = len(self._tail)
        slots = [HeldSlots(each.tensors, each.first) for each in self.slots]
        return [AdmittedRows(self.settled, self._sees[end - self._num_rows:end, :end], slots)]

    def attend(self, layer: int, q_HTE: Tensor, k_KTE: Tensor, v_KTE: Tensor,
               form: AttentionForm = PLAIN) -> Tensor:
        """Store the admitted rows' keys and values in one layer; return the attention `[H, T, E]` of their queries."""
        slots, layer_index = self._slots_of_layer[layer]
        end = self.settled + len(self._tail)
        slots.write(layer_index, end - self._num_rows, k_KTE, v_KTE)

        group_size = len(q_HTE) // len(k_KTE)
        mask_kind = form.window, group_size
        if mask_kind not in self._masks:
            mask = self._mask(slots.first)
            window_mask = self._within(form.window, mask) if form.window else mask
            self._masks[mask_kind] = window_mask.repeat(group_size, 1)
        return attend(q_HTE, slots.read(layer_index, end), self._masks[mask_kind], form)

    def _mask(self, first_slot: int) -> Tensor:
        """Return the additive mask of the admitted rows for the slots from `first_slot` on."""
        tail_size = len(self._tail)
        hidden = torch.from_numpy(~self._sees[tail_size - self._num_rows:tail_size, :tail_size])
        mask_TS = for_sums(self.like.new_zeros(self._num_rows, self.settled + tail_size - first_slot))
        mask_TS[:, -tail_size:].masked_fill_(upload(hidden, mask_TS.device), float("-inf"))
        return mask_TS

    def _within(self, window: int, mask_TS: Tensor) -> Tensor:
        """Return the mask of the rows for a window. A row's position is the number of slots that it sees, less one."""
        tail_size = len(self._tail)
        tail_positions = self.settled + self._sees[:tail_size, :tail_size].sum(1) - 1
        position_S = np.concatenate((np.arange(self.settled), tail_positions))
        position_S = position_S[-mask_TS.shape[1]:]
        is_too_far = position_S[-self._num_rows:, None] - position_S >= window
        hidden = upload(torch.from_numpy(is_too_far), mask_TS.device)
        return mask_TS.masked_fill(hidden, float("-inf"))

    def recur(self, layer: int, input_TN: Tensor, recurrence: Recurrence) -> Tensor:
        """Store the admitted rows' inputs of a recurrent layer; return the outputs `[T, M]` after their paths."""
        slots, layer_index = self._slots_of_layer[layer]
        end = self.settled + len(self._tail)
        slots.write(layer_index, end - self._num_rows, input_TN[None])
        inputs = Inputs(slots.read(layer_index, end)[0][0], slots.first, recurrence)
        steps = inputs.steps(self._last_slots(recurrence.num_taps))
        if layer not in self.states:
            return steps[0]

        # text at the front of the tail continues the state of the text
        states, num_leading = self.states[layer], self._num_leading
        if states.length < self.settled:
            unread_slots = self._path_slots((), states.length + 1 - recurrence.num_taps)
            inputs.follow(unread_slots, states.text)
            states.length = self.settled
        outs = [recurrence.advance([x[:num_leading] for x in steps], states.text)]
        states.length += num_leading

        # each guess has a state of its own
        first_row = len(self._tail) - self._num_rows
        for row_index in range(num_leading, self._num_rows):
            row = first_row + row_index
            ancestor_rows = np.flatnonzero(self._sees[row, :row])
            ancestors = [self._tail[ancestor_row] for ancestor_row in ancestor_rows]
            state = states.before(ancestors, self.settled, partial(self._path_slots, ancestor_rows), inputs)
            row_steps = [x[row_index:row_index + 1] for x in steps]
            outs.append(recurrence.advance(row_steps, state))
            states.keep(self._tail[row], state)
        return torch.cat(outs)

    def _last_slots(self, num_taps: int) -> np.ndarray:
        """Return the slots `[T, W]` of the last nodes on the path of each admitted row."""
        if num_taps not in self._last_slots_by_number:
            rows = range(len(self._tail) - self._num_rows, len(self._tail))
            paths = [np.flatnonzero(self._sees[row, :row + 1]) for row in rows]
            last_slots = [self._path_slots(path, self.settled + len(path) - num_taps) for path in paths]
            self._last_slots_by_number[num_taps] = np.stack(last_slots)
        return self._last_slots_by_number[num_taps]

    def _path_slots(self, tail_rows: Sequence[int] | np.ndarray, begin: int) -> np.ndarray:
        """Return the slots of a path of the text and these rows, from the position `begin` on; -1 before the text."""
        text_slots = np.maximum(np.arange(begin, self.settled), -1)
        later_rows = tail_rows[max(0, begin - self.settled):]
        tail_slots = self.settled + np.asarray(later_rows, dtype=np.int64)
        return np.concatenate((text_slots, tail_slots))

    def split(self, x_T: Tensor) -> Sequence[Tensor]:
        """Return `x_T` whole, since all rows belong to one request."""
        return [x_T]

    def prune(self, tip: int, parent: int, keep: Sequence[int], horizon: int) -> None:
        """End the text in `tip` below `parent`; of the nodes older than `horizon`, only the text and `keep` survive.

        This needs no earlier prune: `parent` and its ancestors are settled, and every stage has received them, since
        `tip` is the answer for `parent`.
        """
        self._survivors = self._survivors.newer(Survivors.after(tip, keep, horizon))
        self._settle_leading()

        # indices in the tail: of rows that become text, and of live guesses
        text_rows: list[int] = []
        last_row = self._index_of_node.get(tip, self._index_of_node.get(parent))
        if last_row is not None:
            path = self._sees[last_row, :len(self._tail)]
            text_rows = np.flatnonzero(path).tolist()
        kept_nodes = set(keep).difference(self._tail[row] for row in text_rows)
        live_rows = [row for row, node in enumerate(self._tail) if node in kept_nodes or node >= horizon]

        self._compact(text_rows + live_rows)
        self._num_leading = len(text_rows)
        self._settle_leading()

    def _compact(self, rows: list[int]) -> None:
        """Move these rows to the front of the tail, and drop the others; rows already in place are not copied."""
        moved_rows = (index for index, row in enumerate(rows) if index != row)
        first_moved = next(moved_rows, len(rows))
        if first_moved < len(rows):
            source_S = upload(torch.tensor(rows[first_moved:]) + self.settled, self.like.device)
            for slots in self.slots:
                slots.move(source_S, self.settled + first_moved)

        kept_sees = self._sees[np.ix_(rows, rows)]
        self._sees[:len(rows), :len(rows)] = kept_sees
        self._set_tail([self._tail[row] for row in rows])

    def _settle_leading(self) -> None:
        """Move the border `settled` behind the settled rows at the front of the tail."""
        num_settled, self._num_leading = self._num_leading, 0
        if num_settled:
            self.settled += num_settled
            for states in self.states.values():
                states.settle(self._tail[num_settled - 1], self.settled)
            end = len(self._tail)
            rest = self._sees[num_settled:end, num_settled:end].copy()
            self._sees[:len(rest), :len(rest)] = rest
            self._set_tail(self._tail[num_settled:])

    def _set_tail(self, tail: list[int]) -> None:
        self._tail = tail
        self._index_of_node = {node: index for index, node in enumerate(tail)}
        for states in self.states.values():
            states.retain(self._index_of_node)
        self._num_leading = 0

    def _grow(self, size: int) -> None:
        """Make room in `sees` for a tail of `size` rows."""
        old_size = len(self._sees)
        if size > old_size:
            old_sees = self._sees
            self._sees = np.zeros((2 * size, 2 * size), dtype=bool)
            self._sees[:old_size, :old_size] = old_sees

    def _reserve(self, end: int) -> None:
        """Allocate memory for the slots up to `end`."""
        lengths = [states.length for states in self.states.values()]
        text_length = min([self.settled, *lengths])
        for slots in self.slots:
            slots.reserve(text_length, end)


def _slots_order(memory_window: tuple[MemoryForm | None, int]) -> tuple[bool, int]:
    """Return the place of slots among those of a cache: keys and values first, in the order of their windows."""
    memory, window = memory_window
    return memory is not None, window


class JoinedCaches:
    """The caches of several requests with concatenated rows; each row sees only its own request.

    `counts` are the numbers of rows that the requests have just admitted. Everything but attention is computed for all
    rows at once, so that weights are read once.
    """

    def __init__(self, caches: Sequence[TreeCache], counts: Sequence[int]) -> None:
        self._caches, self._counts = caches, list(counts)

    @property
    def settled(self) -> int:
        """The number of slots of settled text, in total."""
        return sum(cache.settled for cache in self._caches)

    def split(self, x_T: Tensor) -> Sequence[Tensor]:
        """Split values of the rows by request."""
        return x_T.split(self._counts)

    def admitted(self) -> list[AdmittedRows]:
        """Return the admitted rows of each request, in the order of the rows."""
        return [rows for cache in self._caches for rows in cache.admitted()]

    def attend(self, layer: int, q_HTE: Tensor, k_KTE: Tensor, v_KTE: Tensor,
               form: AttentionForm = PLAIN) -> Tensor:
        rows_by_request = (x.split(self._counts, 1) for x in (q_HTE, k_KTE, v_KTE))
        attended = [cache.attend(layer, *rows, form) for cache, *rows in zip(self._caches, *rows_by_request)]
        return torch.cat(attended, 1)

    def recur(self, layer: int, input_TN: Tensor, recurrence: Recurrence) -> Tensor:
        inputs_by_request = zip(self._caches, input_TN.split(self._counts))
        return torch.cat([cache.recur(layer, rows_TN, recurrence) for cache, rows_TN in inputs_by_request])


def together(caches: Sequence[TreeCache], counts: Sequence[int]) -> SegmentCache:
    """Return the cache of a segment of one or several requests; `counts` are the rows that each has just admitted."""
    return caches[0] if len(caches) == 1 else JoinedCaches(caches, counts)
