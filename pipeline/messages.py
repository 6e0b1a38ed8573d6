"""The messages of the pipeline, and their format on the wire.

They know nothing about how they travel. Segments, single or in a batch, Start, Reset and Stop go round the ring in
order. A Prune may overtake, since node ids never change their meaning. Messages of a request carry its number, which
rises from request to request.

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
MAX_BODY_BYTES = 1 << 31  # maximum bytes of a body
ABSENT = -1  # in place of a number of columns: there is no tensor
NANOSECONDS = 1e9  # per second
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

        nodes = [self.nodes[row] for row in rows]
        parents = [self.parents[row] for row in rows]
        pos = [self.pos[row] for row in rows]
        num_text_rows = sum(row < self.text for row in rows)

        x = self.x[list(rows)]
        inner = None if self.inner is None else self.inner[list(rows)]
        return Segment(self.request, nodes, parents, pos, num_text_rows, x, inner, self.visits)


@dataclass
class Batch:
    """Segments of different requests that are sent and computed together."""

    segments: list[Segment]

    @property
    def nodes(self) -> list[int]:
        """The nodes of all segments."""
        return [node for segment in self.segments for node in segment.nodes]


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


Message = Union[Segment, Batch, Prune, Reset, Start, Stop]


def joined(segments: Sequence[Segment]) -> Segment | Batch:
    """Return segments of different requests as one message."""
    return segments[0] if len(segments) == 1 else Batch(list(segments))


def segments_of(msg: Message) -> list[Segment]:
    """Return the segments in a message."""
    if isinstance(msg, Batch):
        return msg.segments
    return [msg] if isinstance(msg, Segment) else []


def newest_request(msg: Message) -> int:
    """Return the highest request number in a message; -1 if there is none."""
    request_numbers = [segment.request for segment in segments_of(msg)]
    return max(request_numbers, default=getattr(msg, "request", -1))


def facts_of(msg: Message) -> dict[str, Any]:
    """Return the facts that a trace span records about a message."""
    return {"kind": type(msg).__name__, "nodes": getattr(msg, "nodes", [])}


# --- on the wire ------------------------------------------------------------------------------------------------------

KINDS = (Segment, Prune, Reset, Stop, Batch, Start)  # the index is the number on the wire


class Header(NamedTuple):
    """The layout of a body: integers, then the tensors `x` and `inner`."""

    kind: int
    num_integers: int = 0
    num_rows: int = 0  # of each tensor
    x_columns: int = 0  # 0: `x` is one-dimensional
    inner_columns: int = ABSENT
    dtype: int = 0  # of both tensors, an index into DTYPES

    @staticmethod
    def read(header_tensor: Tensor) -> Header:
        """Parse a header from `int64[6]`; raises ValueError for an impossible one."""
        header = Header(*header_tensor.tolist())
        if not 0 <= header.kind < len(KINDS):
            raise ValueError(f"a message of unknown kind {header.kind}")

        sizes = header.num_integers, header.num_rows, header.x_columns, header.inner_columns - ABSENT
        has_possible_sizes = all(0 <= size <= MAX_BODY_BYTES for size in sizes)
        has_known_dtype = 0 <= header.dtype < len(DTYPES)
        if not has_possible_sizes or not has_known_dtype or header.num_bytes > MAX_BODY_BYTES:
            raise ValueError(f"a message of impossible size or type ({', '.join(map(str, header))})")
        return header

    @property
    def num_bytes(self) -> int:
        """Size of the body."""
        num_columns = max(self.x_columns, 1) + max(self.inner_columns, 0)
        element_bytes = torch.empty(0, dtype=DTYPES[self.dtype]).element_size()
        return 8 * self.num_integers + self.num_rows * num_columns * element_bytes


def packets(msg: Message) -> list[tuple[Tensor, Tensor]]:
    """Encode a message for the wire, as pairs of a header `int64[6]` and a body `uint8`."""
    single_messages: list[Message] = [msg, *msg.segments] if isinstance(msg, Batch) else [msg]
    return [_encoded(single_message) for single_message in single_messages]


def receive(packet: Callable[[], tuple[Header, Tensor]]) -> Message:
    """Decode the next message from the packets that `packet` returns; raises ValueError for malformed ones."""
    header, body = packet()
    if KINDS[header.kind] is not Batch:
        return _decoded(header, body)
    num_segments, = _leading_integers(header, body)
    return Batch([_segment_of_batch(*packet()) for _ in range(num_segments)])


def _segment_of_batch(header: Header, body: Tensor) -> Segment:
    segment = _decoded(header, body)
    if not isinstance(segment, Segment):
        raise ValueError(f"a {type(segment).__name__} in place of a segment")
    return segment


def _encoded(msg: Message) -> tuple[Tensor, Tensor]:
    integers = _integers(msg)
    x: Tensor = getattr(msg, "x", NO_ROWS)
    inner: Tensor | None = getattr(msg, "inner", None)

    # header
    kind, dtype = KINDS.index(type(msg)), DTYPES.index(x.dtype)
    x_columns = x.shape[1] if x.dim() == 2 else 0
    inner_columns = ABSENT if inner is None else inner.shape[1]
    header = Header(kind, len(integers), len(x), x_columns, inner_columns, dtype)
    if header.num_bytes > MAX_BODY_BYTES:
        raise ValueError(f"a {type(msg).__name__} of {header.num_bytes} bytes is too large to send: give a smaller "
                         "prefill_chunk")

    # body
    tensors = [torch.tensor(integers, dtype=torch.int64), x]
    if inner is not None and inner_columns:
        assert inner.dtype == x.dtype, f"a segment has one type, but holds {x.dtype} and {inner.dtype}"
        tensors.append(inner)
    return torch.tensor(header), _joined_bytes(tensors, header.num_bytes)


def _joined_bytes(tensors: Sequence[Tensor], num_bytes: int) -> Tensor:
    """Join tensors to one body on the host. CUDA tensors are copied through pinned memory, with one synchronization."""
    cuda_device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    body = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=cuda_device is not None)

    offset = 0
    for tensor in tensors:
        if tensor.numel():  # an empty tensor cannot be viewed as another type
            tensor_bytes = tensor.contiguous().view(-1).view(torch.uint8)
            body[offset:offset + len(tensor_bytes)].copy_(tensor_bytes, non_blocking=True)
            offset += len(tensor_bytes)

    if cuda_device:
        torch.cuda.current_stream(cuda_device).synchronize()
    return body


def _integers(msg: Message) -> list[int]:
    """Return the integers of a message's body."""
    if isinstance(msg, Segment):
        visits: list[int] = []
        for rows, seconds in msg.visits:
            visits += rows, round(seconds * NANOSECONDS)
        return [msg.request, msg.text, *visits, *msg.nodes, *msg.parents, *msg.pos]
    if isinstance(msg, Prune):
        return [msg.request, msg.tip, msg.parent, msg.horizon, *msg.keep]
    if isinstance(msg, Batch):
        return [len(msg.segments)]
    return list(astuple(msg))


def _leading_integers(header: Header, body: Tensor) -> list[int]:
    """Return the integers at the beginning of a body."""
    if len(body) != header.num_bytes:
        raise ValueError(f"a body of {len(body)} bytes instead of {header.num_bytes}")
    if not header.num_integers:
        return []
    return body[:8 * header.num_integers].view(torch.int64).tolist()  # type: ignore[no-any-return]


def _decoded(header: Header, body: Tensor) -> Message:
    """Decode a packet that is no batch; the message's tensors are views of the body."""
    integers = _leading_integers(header, body)
    num_rows, dtype = header.num_rows, DTYPES[header.dtype]

    # tensors
    elements = torch.empty(0, dtype=dtype)
    if num_rows:
        elements = body[8 * header.num_integers:].view(dtype)
    x_size = num_rows * max(header.x_columns, 1)
    x, inner_elements = elements[:x_size], elements[x_size:]
    if header.x_columns:
        x = x.view(num_rows, header.x_columns)

    # message
    kind: Any = KINDS[header.kind]
    if kind is Segment:
        has_inner = header.inner_columns != ABSENT
        return _segment(integers, x, inner_elements.view(num_rows, header.inner_columns) if has_inner else None)
    if kind is Prune and len(integers) > 3:
        request, tip, parent, horizon, *kept_nodes = integers
        return Prune(request, tip, parent, horizon, kept_nodes)
    if kind in (Reset, Start, Stop) and len(integers) == len(fields(kind)):
        return kind(*integers)  # type: ignore[no-any-return]
    raise ValueError(f"a {kind.__name__} of {len(integers)} numbers")


def _segment(integers: list[int], x: Tensor, inner: Tensor | None) -> Segment:
    num_rows = len(x)
    num_leading = len(integers) - 3 * num_rows  # request, text and visits, before nodes, parents and positions
    if num_leading < 2 or num_leading % 2 or not 0 <= integers[1] <= num_rows:
        raise ValueError(f"a segment of {num_rows} rows with {len(integers)} contradictory numbers")

    request, num_text_rows, *visit_integers = integers[:num_leading]
    visit_pairs = zip(visit_integers[::2], visit_integers[1::2])
    visits = tuple(Visit(visit_rows, nanoseconds / NANOSECONDS) for visit_rows, nanoseconds in visit_pairs)
    if any(visit.rows < 1 or visit.seconds < 0 for visit in visits):
        raise ValueError(f"a segment of {num_rows} rows with an impossible visit of a stage")

    of_rows = integers[num_leading:]
    nodes, parents, pos = of_rows[:num_rows], of_rows[num_rows:2 * num_rows], of_rows[2 * num_rows:]
    return Segment(request, nodes, parents, pos, num_text_rows, x, inner, visits)
