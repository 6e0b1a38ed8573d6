"""The wire format: a message is a header of nine numbers and one body of bytes.

It knows nothing about sockets or ranks, and nothing of Python's pickle: a peer can send wrong numbers, but no code.
"""
from __future__ import annotations

from typing import Sequence

import torch
from torch import Tensor

from pipeline.messages import Message, Prune, Reset, Segment, Stop

# int64: kind, request, rows, text or tip, parent or inner width + 1, horizon, width, dtype, bytes of the body
HEADER = 9
SEGMENT, PRUNE, RESET, STOP = range(4)
DTYPES = (torch.int64, torch.float32, torch.float64, torch.float16, torch.bfloat16)


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


def decode(header: Tensor, body: Tensor) -> Message:
    """The message; its payload is a view of `body`."""
    kind, request, rows, first, parent, horizon, width, dtype, _ = header.tolist()
    if kind == SEGMENT:
        numbers = body[:24 * rows].view(torch.int64).tolist() if rows else []
        payload = body[24 * rows:].view(DTYPES[dtype]) if rows else torch.empty(0, dtype=DTYPES[dtype])
        x, inner = payload[:rows * (width or 1)], payload[rows * (width or 1):]
        return Segment(request, numbers[:rows], numbers[rows:2 * rows], numbers[2 * rows:], first,
                       x.view(rows, width) if width else x, inner.view(rows, parent - 1) if parent else None)
    if kind == PRUNE:
        return Prune(request, first, parent, horizon, body.view(torch.int64).tolist() if rows else [])
    if kind in (RESET, STOP):
        return Reset(request) if kind == RESET else Stop()
    raise ValueError(f"a message of unknown kind {kind} came in: do all ranks run the same version of FlowSpec?")


def _gather(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """One body on the host. What lies on CUDA comes through pinned memory, which is quicker, and is waited for once."""
    cuda, at = device.type == "cuda", 0
    body = torch.empty(sum(map(len, parts)), dtype=torch.uint8, pin_memory=cuda)
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
