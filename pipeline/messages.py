"""The messages of the pipeline, and their format on the wire.

They know nothing about how they travel. Segments, single or in a batch, Start, Reset and Stop go round the ring in
order. Only a Prune may overtake, since node ids never change their meaning. Messages of a request carry its number,
which rises from request to request. Features go from a stage directly to rank 0.

On the wire a message is a header and a body of integers, then up to two tensors. A batch is followed by its segments.
Nothing is pickled: a peer can send wrong numbers, but no code, and impossible sizes are refused before memory is
allocated.

Shapes: T rows, D columns of hidden states.
"""
from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from typing import Any, Callable, NamedTuple, Sequence, Union

import torch
from torch import Tensor

from model.cache import Survivors

NOBODY = -1  # in place of a node id: no node
DTYPES = (torch.int64, torch.float32, torch.float64, torch.float16, torch.bfloat16)
LARGEST = 1 << 31  # maximum bytes of a body
ABSENT = -1  # in place of a number of columns: there is no tensor
NANO = 1e9  # nanoseconds per second
NO_ROWS = torch.empty(0, dtype=torch.int64)


class Visit(NamedTuple):
    """The work of one stage on one message: computed rows, and seconds."""

    rows: int
    seconds: float


@dataclass
class Segment:
    """Rows in flight through the stages; `x` is tokens `[T]` before the first stage, then hidden states `[T, D]`.

    The first `text` rows are settled text, the others guesses; a parent comes before its children. `inner` exists only
    if the draft needs inner features: it begins as `[T, 0]`, and stages append columns with inputs of their layers.
    Each stage appends a `Visit`, which counts the rows of the whole message.
    """

    request: int
    nodes: list[int]
    parents: list[int]
    pos: list[int]
    text: int
    x: Tensor
    inner: Tensor | None = None
    visits: tuple[Visit, ...] = ()

    def take(self, rows: Sequence[int]) -> Segment:
        """Return the segment with only these rows, in this order; the segment itself if no row is dropped."""
        if len(rows) == len(self.nodes):
            return self
        nodes = [self.nodes[i] for i in rows]
        parents = [self.parents[i] for i in rows]
        pos = [self.pos[i] for i in rows]
        text = sum(i < self.text for i in rows)
        x = self.x[list(rows)]
        inner = None if self.inner is None else self.inner[list(rows)]
        return Segment(self.request, nodes, parents, pos, text, x, inner, self.visits)


@dataclass
class Batch:
    """Segments of different requests that are sent and computed together."""

    segments: list[Segment]

    @property
    def nodes(self) -> list[int]:
        """The nodes of all segments."""
        return [node for segment in self.segments for node in segment.nodes]


@dataclass
class Features:
    """Inner features of rows in flight: `x` `[T, layers * D]` are the inputs of the first `layers` inner layers."""

    request: int
    layers: int
    nodes: list[int]
    x: Tensor


@dataclass
class Prune:
    """The text ends in `tip`, a child of `parent`; of the guesses older than `horizon` only `keep` are alive."""

    request: int
    tip: int
    parent: int
    horizon: int
    keep: list[int]

    @property
    def survivors(self) -> Survivors:
        """The nodes that stay alive."""
        return Survivors.after(self.tip, self.keep, self.horizon)


@dataclass
class Reset:
    """The end of a request; the message comes back to rank 0 when every stage has forgotten the request.

    If `last` is a node, stages keep the text up to that node until a `Start` or a second `Reset` names the request.
    """

    request: int
    last: int = NOBODY


@dataclass
class Start:
    """The beginning of a request with the first `length` tokens of the request `source`, which the stages hold.

    The last of these tokens is the node `last` of `source`, and the node `tip` of the new request.
    """

    request: int
    tip: int
    source: int
    last: int
    length: int


@dataclass
class Stop:
    """The end of the pipeline; a rank passes this message on, then ends."""


Message = Union[Segment, Batch, Features, Prune, Reset, Start, Stop]


def joined(segments: Sequence[Segment]) -> Segment | Batch:
    """Return segments of different requests as one message."""
    return segments[0] if len(segments) == 1 else Batch(list(segments))


def segments_of(msg: Message) -> list[Segment]:
    """Return the segments in a message."""
    if isinstance(msg, Batch):
        return msg.segments
    return [msg] if isinstance(msg, Segment) else []


def reports_of(msg: Message) -> list[Features]:
    """Return the features that rank 0 may receive at once: of a message's guesses, and of the newest row of its text.
    A draft reads the features of earlier text once the segment has come back."""
    found = []
    for segment in segments_of(msg):
        rows = segment.take(range(max(0, segment.text - 1), len(segment.nodes)))
        if rows.nodes and rows.inner is not None:
            layers = rows.inner.shape[1] // rows.x.shape[1]
            found.append(Features(rows.request, layers, rows.nodes, rows.inner))
    return found


def newest(msg: Message) -> int:
    """Return the highest request number in a message; -1 if there is none."""
    requests = [segment.request for segment in segments_of(msg)]
    return max(requests, default=getattr(msg, "request", -1))


def facts_of(msg: Message) -> dict[str, Any]:
    """Return the facts that a trace span records about a message."""
    return {"kind": type(msg).__name__, "nodes": getattr(msg, "nodes", [])}


# --- on the wire ------------------------------------------------------------------------------------------------------

KINDS = (Segment, Prune, Reset, Stop, Batch, Start, Features)  # the index is the number on the wire


class Header(NamedTuple):
    """The layout of a body: integers, then the tensors `x` and `inner`."""

    kind: int
    numbers: int = 0
    rows: int = 0  # of each tensor
    width: int = 0  # columns of `x`; 0: one-dimensional
    inner: int = ABSENT  # columns of `inner`
    dtype: int = 0  # of both, an index into DTYPES

    @staticmethod
    def read(given: Tensor) -> Header:
        """Parse a header from `int64[6]`; raises ValueError for an impossible one."""
        header = Header(*given.tolist())
        if not 0 <= header.kind < len(KINDS):
            raise ValueError(f"a message of unknown kind {header.kind}")
        sizes = header.numbers, header.rows, header.width, header.inner - ABSENT
        possible = all(0 <= size <= LARGEST for size in sizes)
        if not possible or not 0 <= header.dtype < len(DTYPES) or header.bytes > LARGEST:
            raise ValueError(f"a message of impossible size or type ({', '.join(map(str, header))})")
        return header

    @property
    def bytes(self) -> int:
        """Size of the body in bytes."""
        columns = max(self.width, 1) + max(self.inner, 0)
        element = torch.empty(0, dtype=DTYPES[self.dtype]).element_size()
        return 8 * self.numbers + self.rows * columns * element


def packets(msg: Message) -> list[tuple[Tensor, Tensor]]:
    """Encode a message for the wire, as pairs of a header `int64[6]` and a body `uint8`."""
    parts: list[Message] = [msg, *msg.segments] if isinstance(msg, Batch) else [msg]
    return [_encoded(part) for part in parts]


def receive(packet: Callable[[], tuple[Header, Tensor]]) -> Message:
    """Decode the next message from the packets that `packet` returns; raises ValueError for malformed ones."""
    header, body = packet()
    if KINDS[header.kind] is not Batch:
        return _decoded(header, body)
    count, = _leading_numbers(header, body)
    return Batch([_part(*packet()) for _ in range(count)])


def _part(header: Header, body: Tensor) -> Segment:
    part = _decoded(header, body)
    if not isinstance(part, Segment):
        raise ValueError(f"a {type(part).__name__} in place of a segment")
    return part


def _encoded(msg: Message) -> tuple[Tensor, Tensor]:
    numbers = _numbers(msg)
    x: Tensor = getattr(msg, "x", NO_ROWS)
    inner: Tensor | None = getattr(msg, "inner", None)
    width = x.shape[1] if x.dim() == 2 else 0
    columns = ABSENT if inner is None else inner.shape[1]
    kind, dtype = KINDS.index(type(msg)), DTYPES.index(x.dtype)
    header = Header(kind, len(numbers), len(x), width, columns, dtype)
    if header.bytes > LARGEST:
        raise ValueError(f"a {type(msg).__name__} of {header.bytes} bytes is too large to send: give a smaller "
                         "prefill_chunk")
    parts = [torch.tensor(numbers, dtype=torch.int64), x]
    if inner is not None and columns:
        assert inner.dtype == x.dtype, f"a segment has one type, but holds {x.dtype} and {inner.dtype}"
        parts.append(inner)
    return torch.tensor(header), _gathered(parts, header.bytes)


def _gathered(parts: Sequence[Tensor], size: int) -> Tensor:
    """Join tensors to one body on the host. CUDA tensors are copied through pinned memory, with one synchronization."""
    cuda = next((part.device for part in parts if part.is_cuda), None)
    body = torch.empty(size, dtype=torch.uint8, pin_memory=cuda is not None)
    at = 0
    for part in parts:
        if part.numel():  # an empty tensor cannot be viewed as another type
            flat = part.contiguous().view(-1).view(torch.uint8)
            body[at:at + len(flat)].copy_(flat, non_blocking=True)
            at += len(flat)
    if cuda:
        torch.cuda.current_stream(cuda).synchronize()
    return body


def _numbers(msg: Message) -> list[int]:
    """Return the integers of a message's body."""
    if isinstance(msg, Segment):
        visits: list[int] = []
        for rows, seconds in msg.visits:
            visits += rows, round(seconds * NANO)
        return [msg.request, msg.text, *visits, *msg.nodes, *msg.parents, *msg.pos]
    if isinstance(msg, Features):
        return [msg.request, msg.layers, *msg.nodes]
    if isinstance(msg, Prune):
        return [msg.request, msg.tip, msg.parent, msg.horizon, *msg.keep]
    if isinstance(msg, Batch):
        return [len(msg.segments)]
    return list(astuple(msg))


def _leading_numbers(header: Header, body: Tensor) -> list[int]:
    """Return the integers at the beginning of a body."""
    if len(body) != header.bytes:
        raise ValueError(f"a body of {len(body)} bytes instead of {header.bytes}")
    if not header.numbers:
        return []
    return body[:8 * header.numbers].view(torch.int64).tolist()  # type: ignore[no-any-return]


def _decoded(header: Header, body: Tensor) -> Message:
    """Decode a packet that is no batch; the message's tensors are views of the body."""
    numbers = _leading_numbers(header, body)
    kind: Any = KINDS[header.kind]
    rows, dtype = header.rows, DTYPES[header.dtype]
    payload = torch.empty(0, dtype=dtype)
    if rows:
        payload = body[8 * header.numbers:].view(dtype)
    end = rows * max(header.width, 1)
    x, rest = payload[:end], payload[end:]
    if header.width:
        x = x.view(rows, header.width)
    if kind is Segment:
        inner = None if header.inner == ABSENT else rest.view(rows, header.inner)
        return _segment(numbers, x, inner)
    if kind is Features and len(numbers) == rows + 2 and numbers[1] > 0 and header.width % numbers[1] == 0:
        return Features(numbers[0], numbers[1], numbers[2:], x)
    if kind is Prune and len(numbers) > 3:
        request, tip, parent, horizon = numbers[:4]
        return Prune(request, tip, parent, horizon, numbers[4:])
    if kind in (Reset, Start, Stop) and len(numbers) == len(fields(kind)):
        return kind(*numbers)  # type: ignore[no-any-return]
    raise ValueError(f"a {kind.__name__} of {len(numbers)} numbers")


def _segment(numbers: list[int], x: Tensor, inner: Tensor | None) -> Segment:
    rows = len(x)
    begin = len(numbers) - 3 * rows  # where the nodes begin, after request, text and visits
    if begin < 2 or begin % 2 or not 0 <= numbers[1] <= rows:
        raise ValueError(f"a segment of {rows} rows with {len(numbers)} contradictory numbers")
    request, text, *visited = numbers[:begin]
    counted = zip(visited[::2], visited[1::2])
    visits = tuple(Visit(count, took / NANO) for count, took in counted)
    if any(visit.rows < 1 or visit.seconds < 0 for visit in visits):
        raise ValueError(f"a segment of {rows} rows with an impossible visit of a stage")
    nodes, others = numbers[begin:begin + rows], numbers[begin + rows:]
    return Segment(request, nodes, others[:rows], others[rows:], text, x, inner, visits)
