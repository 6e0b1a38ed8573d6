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
        self.summands: list[Tensor] = [torch.empty(0)] * size  # of the present all-reduce, by member
        self.inboxes: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(size)]
        self.failure = PeerLost("another rank has ended")

    def fail(self, failure: PeerLost) -> None:
        self.failure = failure
        self.barrier.abort()
        for inbox in self.inboxes:
            inbox.put(None)


class ThreadGroup:
    """A member that is a thread; all members are threads of one process."""

    def __init__(self, table: Table, member: int) -> None:
        self.size, self.member = len(table.inboxes), member
        self._table = table

    def all_reduce(self, x: Tensor) -> None:
        table = self._table
        try:
            table.summands[self.member] = x
            table.barrier.wait()
            total = torch.stack(table.summands).sum(0)  # in the same order on all members
            table.barrier.wait()
        except threading.BrokenBarrierError:
            raise table.failure from None
        x.copy_(total)

    def send(self, x: Tensor) -> Wait:
        next_member = (self.member + 1) % self.size
        self._table.inboxes[next_member].put(x.clone())
        return lambda: None

    def recv(self, x: Tensor) -> Wait:
        def wait_until_filled() -> None:
            received = self._table.inboxes[self.member].get()
            if received is None:
                raise self._table.failure
            x.copy_(received)

        return wait_until_filled


class DistGroup:
    """A member that is a process: `process_group` is one of gloo, `ranks` its ranks in order.

    If a connection breaks, `find_lost` returns a sentence that names the lost rank, or "" after a timeout. Gloo's ring
    reduces each piece of a sum on one member, so all members get the same bits. Device tensors go through host memory.
    """

    def __init__(self, process_group: Any, ranks: Sequence[int],
                 member: int, find_lost: Callable[[], str]) -> None:
        self.size, self.member = len(ranks), member
        self._process_group, self._ranks = process_group, ranks
        self._find_lost = find_lost
        self._next_rank = ranks[(member + 1) % self.size]
        self._previous_rank = ranks[member - 1]

    def all_reduce(self, x: Tensor) -> None:
        self._checked(lambda: dist.all_reduce(x, group=self._process_group))

    def send(self, x: Tensor) -> Wait:
        host_x = x.cpu()
        work = self._start(dist.isend, host_x, self._next_rank)
        return lambda: self._finish(work, host_x)

    def recv(self, x: Tensor) -> Wait:
        host_x = x if x.device.type == "cpu" else torch.empty(x.shape, dtype=x.dtype)
        work = self._start(dist.irecv, host_x, self._previous_rank)

        def wait_until_filled() -> None:
            self._finish(work, host_x)
            if host_x is not x:
                x.copy_(host_x)

        return wait_until_filled

    def _start(self, transfer: Callable[..., Any], host_x: Tensor, peer_rank: int) -> Any:
        """Start `dist.isend` or `dist.irecv` with a rank; an empty tensor is not transferred."""
        if not len(host_x):
            return None
        return self._checked(lambda: transfer(host_x, peer_rank, group=self._process_group))

    def _finish(self, work: Any, host_x: Tensor) -> None:
        """Wait for the end of a transfer; `host_x` is an argument so that it lives until then."""
        if work is not None:
            self._checked(work.wait)

    def _checked(self, call: Callable[[], Any]) -> Any:
        """Return the result of a call; raise PeerLost if a connection breaks."""
        try:
            return call()
        except RuntimeError as error:
            ranks = ", ".join(map(str, self._ranks))
            broken_ring = f"the connections between ranks {ranks} broke: {error}".splitlines()[0]
            raise PeerLost(self._find_lost() or broken_ring) from error
