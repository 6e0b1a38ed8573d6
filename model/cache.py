"""The tree cache: keys and values of some layers, each slot tagged with its node.

It knows nothing about tokens, positions or strategies. Slots [0, settled) hold text, which every row sees, and never
move. After them comes the tail, in which the matrix `sees` decides which slots a row sees. A dead node is never an
ancestor of a live one, so pruning late, or never, costs time but cannot change a result.

Shapes: T rows of a segment, S slots in use, H heads, K key/value heads, E head dimension.
"""
from __future__ import annotations

import sys
from typing import Container, NamedTuple, Protocol, Sequence, Tuple, Union

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from model.precision import for_sums


def upload(x: Tensor, device: torch.device | str) -> Tensor:
    """Return `x` on a device; from host to CUDA it is copied asynchronously, through pinned memory."""
    if torch.device(device).type == "cuda" and not x.is_cuda and x.numel():
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


BLOCK = 256  # initial slots of a cache
WIDENED = 1 << 17  # numbers of keys that are converted at once, so that they stay in the CPU's cache
LEVELS = 127  # the largest signed number of 8 bits
SMALLEST = 1e-20  # least value for a row's largest number, so that a row of zeros does not divide by zero


class AttentionForm(NamedTuple):
    """The differences of a layer's attention from plain attention."""

    window: int = 0  # positions that a row sees, including its own; 0: all
    cap: float = 0.0  # bound of the scores, by tanh; 0: none
    sinks: Tensor | None = None  # a score `[H]` per head that takes part in the softmax, without a value


PLAIN = AttentionForm()


def attend(q_HTE: Tensor, held: Sequence[Tensor], mask_TS: Tensor, form: AttentionForm = PLAIN) -> Tensor:
    """Compute attention `[H, T, E]`, with the same bits per row in every batch (model/precision.py).

    `held` are keys and values `[K, S, E]`, followed by their scales `[K, S, 1]` if they are held in 8 bits.
    """
    q, mask = for_sums(q_HTE), for_sums(mask_TS)
    if q.dtype == held[0].dtype:
        return attention(q, held[0], held[1], mask, form)
    heads, group = len(held[0]), len(q_HTE) // len(held[0])
    at_once = heads if form.sinks is not None else max(1, WIDENED // held[0][0].numel())
    made = torch.empty_like(q_HTE)
    room = [torch.empty_like(x[:at_once], dtype=q.dtype) for x in held[:2]]  # reused, since new memory is slow
    for first in range(0, heads, at_once):
        keys, values = from_int8([x[first:first + at_once] for x in held], room)
        asked = slice(first * group, (first + at_once) * group)
        made[asked] = attention(q[asked], keys, values, mask, form)
    return made


def to_int8(x_KTE: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize keys or values to 8 bits; return them and the scale of each head and row."""
    wide = x_KTE.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp(min=SMALLEST) / LEVELS
    return (wide / scale).round().to(torch.int8), scale


def from_int8(held: Sequence[Tensor], room: Sequence[Tensor]) -> list[Tensor]:
    """Convert keys and values to the type of `room`, buffers of at least as many heads; return the filled parts."""
    wide = [into[:len(x)].copy_(x) for into, x in zip(room, held)]
    for x, scale in zip(wide, held[2:]):
        x *= scale
    return wide


def attention(q_HTE: Tensor, k_KSE: Tensor, v_KSE: Tensor, mask_TS: Tensor,
              form: AttentionForm = PLAIN) -> Tensor:
    """Compute scaled dot-product attention `[H, T, E]`; heads that share keys become rows, so no key is repeated.

    The mask is `[T, S]`, or repeats these rows for each of the heads that share keys. It includes the window of `form`.
    """
    heads, rows, dim = q_HTE.shape
    group = heads // k_KSE.shape[0]
    q = q_HTE.reshape(k_KSE.shape[0], group * rows, dim)
    mask = mask_TS if len(mask_TS) == group * rows else mask_TS.repeat(group, 1)
    if form.cap or form.sinks is not None:
        scores = q @ k_KSE.transpose(1, 2) * dim ** -0.5
        scores = _bent(scores, form, rows) + _columns(mask, form)
        wide = torch.promote_types(torch.float32, q.dtype)
        weights = torch.softmax(scores, -1, wide).to(q.dtype)
        out = weights[..., :k_KSE.shape[1]] @ v_KSE
    elif hasattr(F, "scaled_dot_product_attention"):
        out = F.scaled_dot_product_attention(q[None], k_KSE[None], v_KSE[None], mask)[0]
    else:  # torch 1.11, the wheel of JetPack 5
        scores = q @ k_KSE.transpose(1, 2) * dim ** -0.5
        out = torch.softmax(scores + mask, -1) @ v_KSE
    return out.reshape(heads, rows, dim)


def _bent(scores_KNS: Tensor, form: AttentionForm, rows: int) -> Tensor:
    """Return capped scores, and a last column for the sinks. N are the heads of a key, with `rows` rows each."""
    if form.cap:
        scores_KNS = form.cap * torch.tanh(scores_KNS / form.cap)
    if form.sinks is None:
        return scores_KNS
    sinks_KN = form.sinks.view(len(scores_KNS), -1).repeat_interleave(rows, 1)
    column = sinks_KN[..., None].to(scores_KNS.dtype)
    return torch.cat((scores_KNS, column), -1)


def _columns(mask_NS: Tensor, form: AttentionForm) -> Tensor:
    """Return the mask with a last column for the sinks, which all rows see."""
    return mask_NS if form.sinks is None else F.pad(mask_NS, (0, 1))


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


class Rows(Protocol):
    """The interface between a slice's attention and the cached rows."""

    def attend(self, layer: int, q_HTE: Tensor, k_KTE: Tensor, v_KTE: Tensor,
               form: AttentionForm = PLAIN) -> Tensor:
        """Store the keys and values of the rows in one layer, and return the attention `[H, T, E]` of their queries."""


Shape = Tuple[int, int, int, int]  # layers, K, slots, E


class Slots:
    """Keys and values `[layers, K, slots, E]` of the layers that have the same window, from the slot `first` on.

    If `small`, they are held in 8 bits, with scales `[layers, K, slots, 1]`.
    Memory is allocated for a block of slots, then for half more than needed, up to the capacity.
    """

    def __init__(self, shape: Shape, window: int, like: Tensor, small: bool = False) -> None:
        self.shape, self.window = shape, window
        self.like, self.small = like, small
        self.held: list[Tensor] = []
        self.clear()

    def clear(self) -> None:
        """Free all memory but the first block."""
        layers, heads, capacity, dim = self.shape
        size = min(BLOCK, capacity)
        number = torch.int8 if self.small else self.like.dtype
        forms = [(dim, number)] * 2 + [(1, torch.float32)] * (2 if self.small else 0)
        self.held = [self.like.new_empty(layers, heads, size, wide, dtype=dtype) for wide, dtype in forms]
        self.first = 0

    def write(self, place: int, start: int, k_KTE: Tensor, v_KTE: Tensor) -> None:
        """Store rows of a layer from the slot `start` on."""
        rows = [k_KTE, v_KTE]
        if self.small:
            codes, scales = zip(*map(to_int8, rows))
            rows = [*codes, *scales]
        first, last = start - self.first, start - self.first + k_KTE.shape[1]
        for held, new in zip(self.held, rows):
            held[place, :, first:last] = new

    def read(self, place: int, end: int) -> list[Tensor]:
        """Return the tensors `[K, S, *]` of a layer up to the slot `end`."""
        return [x[place, :, :end - self.first] for x in self.held]

    def copy(self, source: Slots, length: int) -> None:
        """Copy the first `length` slots of `source`."""
        self.first = 0
        self.reserve(0, length)
        for mine, theirs in zip(self.held, source.held):
            mine[:, :, :length] = theirs[:, :, :length]

    def move(self, source_S: Tensor, start: int) -> None:
        """Copy these slots to the slots from `start` on."""
        source_S, start = source_S - self.first, start - self.first
        for held in self.held:
            held[:, :, start:start + len(source_S)] = held.index_select(2, source_S)

    def reserve(self, settled: int, end: int) -> None:
        """Allocate memory for the slots up to `end`; first drop a block of settled slots that no later row sees.

        The tensors grow one after the other, so that little memory is held twice.
        """
        room = self.held[0].shape[2]
        passed = settled + 1 - self.window - self.first
        if self.window and passed >= BLOCK and end - self.first > room:
            for old_KSE in (layer for held in self.held for layer in held):
                old_KSE[:, :room - passed] = old_KSE[:, passed:].clone()
            self.first += passed
        needed = end - self.first
        if needed > room:
            size = min(self.shape[2], needed + needed // 2)
            for number, held in enumerate(self.held):
                self.held[number] = _longer(held, size)


class HeldSlots(NamedTuple):
    """Keys and values `[layers, K, S, E]`, then their scales if they have 8 bits; from the slot `first` on."""

    held: Sequence[Tensor]
    first: int = 0


class AdmittedRows(NamedTuple):
    """The rows that a request has just admitted, for kernels that read the slots themselves."""

    settled: int  # slots of text, which all rows see
    sees: np.ndarray  # `[T, tail]`: the slots behind them that each row sees; the rows' own ones are the last
    slots: Sequence[HeldSlots]  # of each window, in ascending order


class AdmittingRows(Protocol):
    """What native kernels need of a cache."""

    def admitted(self) -> list[AdmittedRows]:
        """Return the rows of each request, in the order of the segment's rows."""


class TreeCache:
    """The slots of some layers, and the visibility of rows in the tail.

    `windows` are the attention windows of the layers in positions, 0 for none; slots before a window are dropped.
    Without windows nothing is dropped, and another text may reuse the beginning. A `small` cache holds 8 bits.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device | str,
                 windows: Sequence[int] = (), small: bool = False) -> None:
        layers, heads, self.capacity, dim = self.shape = shape
        self.like = torch.empty(0, dtype=dtype, device=device)
        self.windows, self.small = tuple(windows) or (0,) * layers, small
        self.slots: list[Slots] = []
        self._layers: dict[int, tuple[Slots, int]] = {}  # the slots of each layer, and its index there
        for window in sorted(set(self.windows)):
            alike = [layer for layer, own in enumerate(self.windows) if own == window]
            slots = Slots((len(alike), heads, self.capacity, dim), window, self.like, small)
            self.slots.append(slots)
            self._layers.update((layer, (slots, place)) for place, layer in enumerate(alike))
        self._sees = np.zeros((64, 64), dtype=bool)
        self.clear()

    def another(self) -> TreeCache:
        """Return an empty cache of the same shape, on the same device and of the same type."""
        return TreeCache(self.shape, self.like.dtype, self.like.device, self.windows, self.small)

    def clear(self) -> None:
        """Forget the request, and free all memory but the first block."""
        for slots in self.slots:
            slots.clear()
        # The additive mask. Left of `settled` it stays zero, so a step writes only the columns of the tail.
        columns = min(BLOCK, self.capacity)
        self._mask = for_sums(self.like.new_zeros(len(self._sees), columns))
        self.settled = 0
        self._survivors = Survivors()
        self._hold([])

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens of the text, with which another request begins."""
        self.drop()
        self._check_beginning(length)
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
        self._reserve(length)
        self._mask.zero_()
        self.settled = length

    def _check_beginning(self, length: int) -> None:
        assert length <= self.settled, f"{self.settled} slots are settled, fewer than {length}"
        assert not any(slots.first for slots in self.slots), "the beginning of the text is dropped"

    def end(self, last: int) -> None:
        """End the text in the node `last`, with no live guesses below it."""
        self.prune(last, last, (), sys.maxsize)

    def drop(self) -> None:
        """Forget the tail."""
        self._settle_leading()
        self._hold([])

    def retain(self, nodes: Container[int]) -> None:
        """Forget the rows of the tail that are not among `nodes`, without settling any."""
        self._settle_leading()
        self._compact([i for i, node in enumerate(self._tail) if node in nodes])

    @property
    def bytes(self) -> int:
        """The memory of keys and values in bytes."""
        tensors = [x for slots in self.slots for x in slots.held]
        return sum(x.numel() * x.element_size() for x in tensors)

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
        start, rows = len(self._tail), len(nodes)
        end = self.settled + start + rows
        if end > self.capacity:
            raise ValueError(f"the KV cache has {self.capacity} slots and needs {end}: "
                             "raise max_length or draft fewer tokens")
        self._grow(start + rows)
        self._reserve(end)
        for i, (node, parent) in enumerate(zip(nodes, parents), start):
            above = self._place.get(parent)  # a parent that is not in the tail is settled: all see it
            self._sees[i] = False if above is None else self._sees[above]
            self._sees[i, i] = True
            self._place[node] = i
            self._tail.append(node)
        if mutual:
            self._sees[start + text:start + rows, start + text:start + rows] = True
        if start == 0:
            self._leading = text
        hidden = ~self._sees[start:start + rows, :start + rows]
        blind = upload(torch.from_numpy(hidden), self._mask.device)
        self._rows = rows
        self._masks: dict[tuple[int, int], Tensor] = {}  # shared by all layers with this window and size of head groups
        tail = self._mask[:rows, self.settled:end]
        tail.zero_()
        tail.masked_fill_(blind, float("-inf"))

    def admitted(self) -> list[AdmittedRows]:
        """Return the admitted rows, as the only request's."""
        end = len(self._tail)
        slots = [HeldSlots(each.held, each.first) for each in self.slots]
        return [AdmittedRows(self.settled, self._sees[end - self._rows:end, :end], slots)]

    def attend(self, layer: int, q_HTE: Tensor, k_KTE: Tensor, v_KTE: Tensor,
               form: AttentionForm = PLAIN) -> Tensor:
        """Store the admitted rows' keys and values in one layer; return the attention `[H, T, E]` of their queries."""
        slots, place = self._layers[layer]
        end = self.settled + len(self._tail)
        slots.write(place, end - self._rows, k_KTE, v_KTE)
        group = len(q_HTE) // len(k_KTE)
        kind = form.window, group
        if kind not in self._masks:
            mask = self._mask[:self._rows, slots.first:end]
            seen = self._within(form.window, mask) if form.window else mask
            self._masks[kind] = for_sums(seen if group == 1 else seen.repeat(group, 1))
        return attend(q_HTE, slots.read(place, end), self._masks[kind], form)

    def _within(self, window: int, mask_TS: Tensor) -> Tensor:
        """Return the mask of the rows for a window. A row's position is the number of slots that it sees, less one."""
        size = len(self._tail)
        tail = self.settled + self._sees[:size, :size].sum(1) - 1
        position_S = np.concatenate((np.arange(self.settled), tail))
        position_S = position_S[-mask_TS.shape[1]:]
        far = position_S[-self._rows:, None] - position_S >= window
        hidden = upload(torch.from_numpy(far), mask_TS.device)
        return mask_TS.masked_fill(hidden, float("-inf"))

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
        text: list[int] = []  # indices in the tail of rows that become settled
        last = self._place.get(tip, self._place.get(parent))
        if last is not None:
            path = self._sees[last, :len(self._tail)]
            text = np.flatnonzero(path).tolist()
        wanted = set(keep).difference(self._tail[i] for i in text)
        live = [i for i, node in enumerate(self._tail) if node in wanted or node >= horizon]
        self._compact(text + live)
        self._leading = len(text)
        self._settle_leading()

    def _compact(self, order: list[int]) -> None:
        """Move the rows `order` to the front of the tail, and drop the others; rows already in place are not copied."""
        moved = (i for i, old in enumerate(order) if i != old)
        first = next(moved, len(order))
        if first < len(order):
            source = upload(torch.tensor(order[first:]) + self.settled, self.like.device)
            for slots in self.slots:
                slots.move(source, self.settled + first)
        sees = self._sees[np.ix_(order, order)]
        self._sees[:len(order), :len(order)] = sees
        self._hold([self._tail[i] for i in order])

    def _settle_leading(self) -> None:
        """Move the border `settled` behind the settled rows at the front of the tail."""
        count, self._leading = self._leading, 0
        if count:
            self._mask[:, self.settled:self.settled + count] = 0
            self.settled += count
            end = len(self._tail)
            rest = self._sees[count:end, count:end].copy()
            self._sees[:len(rest), :len(rest)] = rest
            self._hold(self._tail[count:])

    def _hold(self, tail: list[int]) -> None:
        self._tail = tail
        self._place = {node: i for i, node in enumerate(tail)}
        self._leading = 0

    def _grow(self, size: int) -> None:
        """Make room in `sees` and in the mask for a tail, and thus a segment, of `size` rows."""
        if size > len(self._sees):
            old, new = len(self._sees), 2 * size
            sees = np.zeros((new, new), dtype=bool)
            sees[:old, :old] = self._sees
            self._sees = sees
            self._mask = self._mask.new_zeros(new, self._mask.shape[1])

    def _reserve(self, end: int) -> None:
        """Allocate memory for the slots up to `end`, and for their columns of the mask."""
        for slots in self.slots:
            slots.reserve(self.settled, end)
        if end > self._mask.shape[1]:
            size = min(self.capacity, end + end // 2)
            self._mask = self._mask.new_zeros(len(self._mask), size)


def _longer(old_LKSE: Tensor, slots: int) -> Tensor:
    """Return a copy with `slots` slots, of which the additional ones are uninitialized."""
    layers, heads, held, dim = old_LKSE.shape
    new = old_LKSE.new_empty(layers, heads, slots, dim)
    new[:, :, :held] = old_LKSE
    return new


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
        parts = (x.split(self._counts, 1) for x in (q_HTE, k_KTE, v_KTE))
        rows = zip(self._caches, *parts)
        made = [cache.attend(layer, *own, form) for cache, *own in rows]
        return torch.cat(made, 1)


Admitted = Union[TreeCache, JoinedCaches]


def together(caches: Sequence[TreeCache], counts: Sequence[int]) -> Admitted:
    """Return the admitted rows of one or several requests; `counts` are the rows that each has just admitted."""
    return caches[0] if len(caches) == 1 else JoinedCaches(caches, counts)
