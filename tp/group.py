"""Groups: members that compute one slice together, as threads of one process or over torch.distributed.

They know nothing about the meaning of tensors. Members form a ring: each sends to the next member and receives from
the previous one. After the loss of a member all calls of the others raise PeerLost.
"""
from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Any, Callable, Protocol, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from config.failure import PeerLost

Wait = Callable[[], None]


class Group(Protocol):
    """The operations of a group. Tensors are contiguous; all members make the same calls in the same order."""

    size: int
    member: int

    def all_reduce(self, x: Tensor) -> None:
        """Replace `x` by the sum over all members, which is bit for bit the same on all of them."""

    def send(self, x: Tensor) -> Wait:
        """Start to send `x` to the next member; return a function that waits until `x` may change."""

    def recv(self, x: Tensor) -> Wait:
        """Start to receive `x` from the previous member; return a function that waits until `x` is filled."""


class Table:
    """The shared state of members that are threads; `fail` ends all of their calls."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.laid: list[Tensor] = [torch.empty(0)] * size
        self.mail: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(size)]
        self.failure = PeerLost("another rank has ended")

    def fail(self, failure: PeerLost) -> None:
        self.failure = failure
        self.barrier.abort()
        for box in self.mail:
            box.put(None)


class ThreadGroup:
    """A member that is a thread; all members are threads of one process."""

    def __init__(self, table: Table, member: int) -> None:
        self.size, self.member = len(table.mail), member
        self._table = table

    def all_reduce(self, x: Tensor) -> None:
        table = self._table
        try:
            table.laid[self.member] = x
            table.barrier.wait()
            total = torch.stack(table.laid).sum(0)  # in the same order on all members
            table.barrier.wait()
        except threading.BrokenBarrierError:
            raise table.failure from None
        x.copy_(total)

    def send(self, x: Tensor) -> Wait:
        after = (self.member + 1) % self.size
        self._table.mail[after].put(x.clone())
        return lambda: None

    def recv(self, x: Tensor) -> Wait:
        def wait() -> None:
            came = self._table.mail[self.member].get()
            if came is None:
                raise self._table.failure
            x.copy_(came)
        return wait


class DistGroup:
    """A member that is a process: `group` is a process group of gloo, `ranks` its ranks in order.

    If a connection breaks, `find_lost` returns a sentence that names the lost rank, or "" after a timeout. Gloo's ring
    reduces each piece of a sum on one member, so all members get the same bits. Device tensors go through host memory.
    """

    def __init__(self, group: Any, ranks: Sequence[int], member: int, find_lost: Callable[[], str]) -> None:
        self.size, self.member = len(ranks), member
        self._group, self._ranks = group, ranks
        self._find_lost = find_lost
        self._next = ranks[(member + 1) % self.size]
        self._previous = ranks[member - 1]

    def all_reduce(self, x: Tensor) -> None:
        self._watched(lambda: dist.all_reduce(x, group=self._group))

    def send(self, x: Tensor) -> Wait:
        held = x.cpu()
        work = self._start(dist.isend, held, self._next)
        return lambda: self._finish(work, held)

    def recv(self, x: Tensor) -> Wait:
        held = x if x.device.type == "cpu" else torch.empty(x.shape, dtype=x.dtype)
        work = self._start(dist.irecv, held, self._previous)

        def wait() -> None:
            self._finish(work, held)
            if held is not x:
                x.copy_(held)
        return wait

    def _start(self, transfer: Callable[..., Any], held: Tensor, peer: int) -> Any:
        """Start `dist.isend` or `dist.irecv` with a rank; an empty tensor is not transferred."""
        if not len(held):
            return None
        return self._watched(lambda: transfer(held, peer, group=self._group))

    def _finish(self, work: Any, held: Tensor) -> None:
        if work is not None:
            self._watched(work.wait)

    def _watched(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            ranks = ", ".join(map(str, self._ranks))
            unnamed = f"the connections between ranks {ranks} broke: {error}".splitlines()[0]
            raise PeerLost(self._find_lost() or unnamed) from error
