"""The wire format: a message is a header of nine numbers and one body of bytes.

It knows nothing about sockets or ranks, and nothing of Python's pickle: a peer can send wrong numbers, but no code, and
numbers that cannot be are refused before memory is set aside for them.
"""
from __future__ import annotations

from typing import NamedTuple, Sequence

import torch
from torch import Tensor

from pipeline.messages import Message, Prune, Reset, Segment, Stop

HEADER = 9  # numbers, int64
SEGMENT, PRUNE, RESET, STOP = range(4)
DTYPES = (torch.int64, torch.float32, torch.float64, torch.float16, torch.bfloat16)
NUMBERS = 3  # of each row of a segment: node, parent, position
LARGEST = 1 << 31  # bytes of a body


class Header(NamedTuple):
    """The numbers before a body."""

    kind: int
    request: int
    rows: int
    first: int  # text or tip
    parent: int  # parent, or the width of `inner` and one; 0: there is none
    horizon: int
    width: int
    dtype: int
    bytes: int  # of the body

    @staticmethod
    def read(numbers: Tensor) -> Header:
        """From the wire; raises ValueError if no message begins so."""
        header = Header(*numbers.tolist())
        if not SEGMENT <= header.kind <= STOP:
            raise ValueError(f"a message of unknown kind {header.kind}")
        sizes = header.rows, header.width, header.bytes, header.parent if header.kind == SEGMENT else 0
        if not all(0 <= size <= LARGEST for size in sizes) or not 0 <= header.dtype < len(DTYPES):
            raise ValueError(f"a message of impossible size or type ({', '.join(map(str, header))})")
        if header.kind == SEGMENT and not 0 <= header.first <= header.rows:
            raise ValueError(f"a segment of {header.rows} rows of which {header.first} are text")
        if header.bytes != header.needs:
            raise ValueError(f"a message of {header.bytes} bytes where {header.needs} belong")
        return header

    @property
    def needs(self) -> int:
        """Bytes of a body that fits the other numbers."""
        if self.kind == PRUNE:
            return 8 * self.rows
        if self.kind != SEGMENT:
            return 0
        columns = (self.width or 1) + max(self.parent - 1, 0)
        return self.rows * (8 * NUMBERS + columns * torch.empty(0, dtype=DTYPES[self.dtype]).element_size())


def encode(msg: Message) -> tuple[Tensor, Tensor]:
    """The header `int64[9]` and the body `uint8[n]`, both on the CPU."""
    if isinstance(msg, Segment):
        width = msg.x.shape[1] if msg.x.dim() == 2 else 0
        inner = 0 if msg.inner is None else msg.inner.shape[1] + 1
        parts = [torch.tensor(msg.nodes + msg.parents + msg.pos), msg.x]
        if inner > 1:
            assert msg.inner is not None and msg.inner.dtype == msg.x.dtype, "one message has one type"
            parts.append(msg.inner)
        body = _gather([_bytes(part.contiguous().view(-1)) for part in parts], msg.x.device)
        dtype = DTYPES.index(msg.x.dtype)
        return _header(SEGMENT, msg.request, len(msg.nodes), msg.text, inner, 0, width, dtype, len(body)), body
    if isinstance(msg, Prune):
        body = _bytes(torch.tensor(msg.keep))
        return _header(PRUNE, msg.request, len(msg.keep), msg.tip, msg.parent, msg.horizon, 0, 0, len(body)), body
    start = (RESET, msg.request) if isinstance(msg, Reset) else (STOP, 0)
    return _header(*start, *[0] * 7), torch.empty(0, dtype=torch.uint8)


def decode(header: Header, body: Tensor) -> Message:
    """The message; its payload is a view of `body`."""
    if len(body) != header.bytes:
        raise ValueError(f"a body of {len(body)} bytes where {header.bytes} belong")
    rows, width, parent = header.rows, header.width, header.parent
    if header.kind == SEGMENT:
        border, dtype = 8 * NUMBERS * rows, DTYPES[header.dtype]
        numbers = body[:border].view(torch.int64).tolist() if rows else []
        payload = body[border:].view(dtype) if rows else torch.empty(0, dtype=dtype)
        x, inner = payload[:rows * (width or 1)], payload[rows * (width or 1):]
        return Segment(header.request, numbers[:rows], numbers[rows:2 * rows], numbers[2 * rows:], header.first,
                       x.view(rows, width) if width else x, inner.view(rows, parent - 1) if parent else None)
    if header.kind == PRUNE:
        keep = body.view(torch.int64).tolist() if rows else []
        return Prune(header.request, header.first, parent, header.horizon, keep)
    return Reset(header.request) if header.kind == RESET else Stop()


def _gather(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """One body on the host. What lies on CUDA comes through pinned memory, which is quicker, and is waited for once."""
    cuda, at, size = device.type == "cuda", 0, sum(map(len, parts))
    if size > LARGEST:
        raise ValueError(f"a segment of {size} bytes is too large to be sent: give a smaller prefill_chunk")
    body = torch.empty(size, dtype=torch.uint8, pin_memory=cuda)
    for part in parts:
        body[at:at + len(part)].copy_(part, non_blocking=True)
        at += len(part)
    if cuda:
        torch.cuda.current_stream(device).synchronize()
    return body


def _header(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.numel() else torch.empty(0, dtype=torch.uint8)
