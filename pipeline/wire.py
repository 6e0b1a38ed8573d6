"""The wire format: a message is a header of nine numbers and one body of bytes; a batch is a header and its segments.

It knows nothing about sockets or ranks, and nothing of Python's pickle: a peer can send wrong numbers, but no code, and
numbers that cannot be are refused before memory is set aside for them.
"""
from __future__ import annotations

from typing import Callable, NamedTuple, Sequence

import torch
from torch import Tensor

from pipeline.draft_messages import Ask, Drafted, ask_of, drafted_of, words_of
from pipeline.messages import Batch, Message, Prune, Reset, Segment, Start, Stop, Visit

HEADER = 9  # numbers, int64
SEGMENT, PRUNE, RESET, STOP, BATCH, START, ASK, DRAFTED = range(8)
IN_WORDS = (PRUNE, ASK, DRAFTED)  # kinds whose bodies are whole numbers
DTYPES = (torch.int64, torch.float32, torch.float64, torch.float16, torch.bfloat16)
NUMBERS = 3  # of each row of a segment: node, parent, position
OF_VISIT = 2  # numbers of each visit of a segment: rows, nanoseconds
LARGEST = 1 << 31  # bytes of a body
NANO = 1e9  # nanoseconds of a second
VISITS = 4096  # stages that a ring may have


class Header(NamedTuple):
    """The numbers before a body."""

    kind: int
    request: int = 0
    rows: int = 0  # of a segment; nodes that a prune keeps; segments of a batch; tokens of a start; proposals' numbers
    first: int = 0  # a segment's rows of settled text; the tip of a prune or a start; the last node of a reset
    parent: int = 0  # a prune's parent; a start's last; of a segment the width of `inner` and one, 0 if it has none
    horizon: int = 0  # of a prune; the source of a start; a segment's visits
    width: int = 0  # of a segment's `x`; 0: it is tokens
    dtype: int = 0  # of a segment's tensors, an index into DTYPES
    bytes: int = 0  # of the body

    @staticmethod
    def read(numbers: Tensor) -> Header:
        """The header that `int64[9]` from the wire are; raises ValueError if no message begins so."""
        header = Header(*numbers.tolist())
        if not SEGMENT <= header.kind <= DRAFTED:
            raise ValueError(f"a message of unknown kind {header.kind}")
        counts = (header.parent, header.horizon) if header.kind == SEGMENT else ()
        sizes = header.rows, header.width, header.bytes, *counts
        possible = all(0 <= size <= LARGEST for size in sizes)
        if not possible or not 0 <= header.dtype < len(DTYPES):
            raise ValueError(f"a message of impossible size or type ({', '.join(map(str, header))})")
        if header.kind == SEGMENT and not 0 <= header.first <= header.rows:
            raise ValueError(f"a segment of {header.rows} rows of which {header.first} are text")
        if header.kind == SEGMENT and header.horizon > VISITS:
            raise ValueError(f"a segment that {header.horizon} stages have computed")
        if header.bytes != header.needs:
            raise ValueError(f"a message of {header.bytes} bytes where {header.needs} belong")
        return header

    @property
    def needs(self) -> int:
        """Bytes of a body that fits the other numbers."""
        if self.kind in IN_WORDS:
            return 8 * self.rows
        if self.kind != SEGMENT:
            return 0
        columns = (self.width or 1) + max(self.parent - 1, 0)
        element = torch.empty(0, dtype=DTYPES[self.dtype]).element_size()
        return 8 * OF_VISIT * self.horizon + self.rows * (8 * NUMBERS + columns * element)


def packets(msg: Message) -> list[tuple[Tensor, Tensor]]:
    """What goes over the wire for a message, one behind the other, each as `encode` makes it."""
    if not isinstance(msg, Batch):
        return [encode(msg)]
    count = torch.tensor(Header(BATCH, rows=len(msg.segments)))
    return [(count, torch.empty(0, dtype=torch.uint8)), *map(encode, msg.segments)]


def receive(packet: Callable[[], tuple[Header, Tensor]]) -> Message:
    """The next message, out of packets; raises ValueError for what no message is made of."""
    header, body = packet()
    if header.kind != BATCH:
        return decode(header, body)
    segments = []
    for _ in range(header.rows):
        part = decode(*packet())
        if not isinstance(part, Segment):
            raise ValueError(f"a {type(part).__name__} where a segment belongs")
        segments.append(part)
    return Batch(segments)


def encode(msg: Message) -> tuple[Tensor, Tensor]:
    """A message, but for a batch, as the wire carries it: header `int64[9]` and body `uint8[n]`, both on the CPU."""
    if isinstance(msg, Segment):
        return _encode_segment(msg)
    if isinstance(msg, Prune):
        body = _bytes(torch.tensor(msg.keep))
        header = Header(PRUNE, msg.request, rows=len(msg.keep), first=msg.tip, parent=msg.parent,
                        horizon=msg.horizon, bytes=len(body))
        return torch.tensor(header), body
    if isinstance(msg, (Ask, Drafted)):
        return _encode_proposals(msg)
    header = Header(STOP)
    if isinstance(msg, Reset):
        header = Header(RESET, msg.request, first=msg.last)
    elif isinstance(msg, Start):
        header = Header(START, msg.request, rows=msg.length, first=msg.tip, parent=msg.last, horizon=msg.source)
    return torch.tensor(header), _bytes(torch.empty(0))


def _encode_proposals(msg: Ask | Drafted) -> tuple[Tensor, Tensor]:
    words = words_of(msg)
    body = _bytes(words)
    if len(body) > LARGEST:
        raise ValueError(f"the laws of a tree of {len(body)} bytes are too large to be sent: give a smaller expansion")
    kind = ASK if isinstance(msg, Ask) else DRAFTED
    return torch.tensor(Header(kind, rows=len(words), bytes=len(body))), body


def _encode_segment(segment: Segment) -> tuple[Tensor, Tensor]:
    """Visits, nodes, parents and positions as int64, then `x` and `inner`, one behind the other."""
    x, inner = segment.x, segment.inner
    visits: list[int] = []
    for rows, seconds in segment.visits:
        visits += rows, round(seconds * NANO)
    numbers = torch.tensor(visits + segment.nodes + segment.parents + segment.pos)
    parts = [numbers, x]
    if inner is not None and inner.shape[1]:
        assert inner.dtype == x.dtype, f"a segment has one type, but holds {x.dtype} and {inner.dtype}"
        parts.append(inner)
    flat = [_bytes(part.contiguous().view(-1)) for part in parts]
    body = _gather(flat, x.device)
    width = x.shape[1] if x.dim() == 2 else 0
    columns = 0 if inner is None else inner.shape[1] + 1
    header = Header(SEGMENT, segment.request, rows=len(segment.nodes), first=segment.text, parent=columns,
                    horizon=len(segment.visits), width=width, dtype=DTYPES.index(x.dtype), bytes=len(body))
    return torch.tensor(header), body


def decode(header: Header, body: Tensor) -> Message:
    """The message, but for a batch, that a header and a body carry; its tensors are views of the body."""
    if len(body) != header.bytes:
        raise ValueError(f"a body of {len(body)} bytes where {header.bytes} belong")
    if header.kind == SEGMENT:
        return _decode_segment(header, body)
    if header.kind == PRUNE:
        keep = body.view(torch.int64).tolist() if header.rows else []
        return Prune(header.request, header.first, header.parent, header.horizon, keep)
    if header.kind in (ASK, DRAFTED):
        words = body.view(torch.int64) if header.rows else torch.empty(0, dtype=torch.int64)
        return ask_of(words) if header.kind == ASK else drafted_of(words)
    if header.kind == RESET:
        return Reset(header.request, header.first)
    if header.kind == START:
        return Start(header.request, header.first, header.horizon, header.parent, header.rows)
    return Stop()


def _decode_segment(header: Header, body: Tensor) -> Segment:
    rows, width, visited = header.rows, header.width, OF_VISIT * header.horizon
    border, dtype = 8 * (visited + NUMBERS * rows), DTYPES[header.dtype]
    # a tensor of no bytes cannot be seen as another type
    numbers = body[:border].view(torch.int64).tolist() if border else []
    payload = body[border:].view(dtype) if rows else torch.empty(0, dtype=dtype)
    counts, times = numbers[:visited:2], numbers[1:visited:2]
    visits = tuple(Visit(count, took / NANO) for count, took in zip(counts, times))
    if any(visit.rows < 1 or visit.seconds < 0 for visit in visits):
        raise ValueError(f"a segment whose stages computed {visits}")
    del numbers[:visited]
    nodes, parents, pos = numbers[:rows], numbers[rows:2 * rows], numbers[2 * rows:]
    end = rows * (width or 1)
    x = payload[:end].view(rows, width) if width else payload[:end]
    inner = payload[end:].view(rows, header.parent - 1) if header.parent else None
    return Segment(header.request, nodes, parents, pos, header.first, x, inner, visits)


def _gather(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """One body on the host. What lies on CUDA comes through pinned memory, which is quicker, and is waited for once."""
    cuda, size = device.type == "cuda", sum(map(len, parts))
    if size > LARGEST:
        raise ValueError(f"a segment of {size} bytes is too large to be sent: give a smaller prefill_chunk")
    body = torch.empty(size, dtype=torch.uint8, pin_memory=cuda)
    at = 0
    for part in parts:
        body[at:at + len(part)].copy_(part, non_blocking=True)
        at += len(part)
    if cuda:
        torch.cuda.current_stream(device).synchronize()
    return body


def _bytes(x: Tensor) -> Tensor:
    """The bytes of a flat tensor, as a view where it has any."""
    if x.numel():
        return x.view(torch.uint8)
    return torch.empty(0, dtype=torch.uint8)
