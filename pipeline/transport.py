"""Links: a rank's end of the wires, over threads of one process or between processes.

They know nothing about what messages mean, except that a Prune is handed out before others. Threads of their own
receive and send, beside the computing.
"""
from __future__ import annotations

import socket
import threading
import time
from collections import deque
from functools import partial
from queue import SimpleQueue
from typing import Any, Iterable, NamedTuple, Protocol, Sequence

import torch
from torch import Tensor

from pipeline.failure import Failure, PeerLost, broken, explain, guarded
from pipeline.messages import Header, Message, Prune, Stop, facts_of, packets, receive
from pipeline.trace import OFF, Meter, NoTrace

WIRES = ("data", "control", "report")  # what they carry: messages in order, those of rank 0 to all, and those to it
DATA, CONTROL, REPORT = range(3)


class Link(Protocol):
    """The operations of a link."""

    @property
    def ready(self) -> bool:
        """Whether `recv` would return at once."""

    def send(self, msg: Message) -> None:
        """To the next rank, in order; does not wait."""

    def recv(self) -> Message:
        """The next message, a Prune before others; raises PeerLost."""

    def rest(self, until: float) -> None:
        """Wait until `recv` would return at once, or until a moment of the clock, in seconds."""

    def urgent(self) -> Prune | None:
        """The next Prune that has come already; raises PeerLost."""

    def broadcast(self, msg: Message) -> None:
        """To all other ranks, past what is on its way; does not wait."""


class StageLink(Link, Protocol):
    """The link of a stage."""

    def report(self, msg: Message) -> None:
        """To rank 0, past what is on its way; does not wait."""


def send_round(links: Sequence[Link], msg: Message) -> None:
    """Send a message over each link and wait until it has come back from all; what comes before it is dropped."""
    for link in links:
        link.send(msg)
    for link in links:
        while not isinstance(link.recv(), type(msg)):
            pass


class Inbox:
    """The received messages of a rank: prunes are handed out first, the others in order.

    With `ordered`, prunes keep their place. `meter` does not count the time in which the rank waits.
    """

    def __init__(self, trace: NoTrace = OFF, ordered: bool = False, meter: Meter | None = None) -> None:
        self._trace, self._ordered = trace, ordered
        self._meter = meter or Meter()
        self._prunes: deque[Prune] = deque()
        self._others: deque[Message] = deque()
        self._news = threading.Condition()
        self._failure: PeerLost | None = None

    def put(self, msg: Message, since: float | None = None) -> None:
        """Add a message whose first byte came at `since`, seconds of the monotonic clock."""
        since = since or time.monotonic()
        self._trace.note("recv", since, **facts_of(msg))
        with self._news:
            if isinstance(msg, Prune) and not self._ordered:
                self._prunes.append(msg)
            else:
                self._others.append(msg)
            self._news.notify()

    def fail(self, failure: PeerLost) -> None:
        """Let `get` raise this failure, or the first of several."""
        with self._news:
            self._failure = self._failure or failure
            self._news.notify_all()

    def clear(self) -> None:
        """Forget all messages and the failure."""
        with self._news:
            self._prunes.clear()
            self._others.clear()
            self._failure = None

    def get(self) -> Message:
        with self._news:
            if not self.ready:
                with self._meter.idle():
                    self._news.wait_for(lambda: self.ready)
            if self._failure:
                raise self._failure
            return (self._prunes or self._others).popleft()

    def rest(self, until: float) -> None:
        """Wait for a message or a failure, or until a moment of the monotonic clock."""
        with self._news, self._meter.idle():
            self._news.wait_for(lambda: self.ready, max(0.0, until - time.monotonic()))

    def urgent(self) -> Prune | None:
        if self._failure:
            raise self._failure
        return self._prunes.popleft() if self._prunes else None

    @property
    def ready(self) -> bool:
        return bool(self._others or self._prunes or self._failure)


class Peers(NamedTuple):
    """The ranks at the other ends of a link."""

    previous: int | None  # whose messages it receives in order
    following: Sequence[int]  # to which it sends
    others: Sequence[int] = ()  # to which it broadcasts
    root: int | None = None  # whose broadcasts it receives
    ordered: bool = False  # whether it receives prunes in order, too
    reports: bool = False  # whether it reports to the root, or receives reports of those to which it broadcasts

    @property
    def reached(self) -> list[Sequence[int]]:
        """To whom it sends, over the wires of each kind."""
        return [self.following, self.others, _named(self.root) if self.reports else ()]

    @property
    def heard(self) -> list[Sequence[int]]:
        """Whom it hears, over the wires of each kind."""
        return [_named(self.previous), _named(self.root), self.others if self.reports else ()]


def _named(peer: int | None) -> list[int]:
    return [] if peer is None else [peer]


class Hearing:
    """The receiving end of a link."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self.recv, self.rest, self.urgent = inbox.get, inbox.rest, inbox.urgent

    @property
    def ready(self) -> bool:
        return self._inbox.ready


class LocalLink(Hearing):
    """A link of a rank that is a thread; `tables` are where else the threads wait for each other."""

    takes = 0.1e-3  # seconds from `send` until the next rank has woken up

    def __init__(self, rank: int, inboxes: Sequence[Inbox], peers: Peers, tables: Iterable[Any] = ()) -> None:
        super().__init__(inboxes[rank])
        self._rank = rank
        self._ends = [*inboxes, *tables]
        self._reached = [[inboxes[peer] for peer in reached] for reached in peers.reached]

    def send(self, msg: Message) -> None:
        self._put(DATA, msg)

    def broadcast(self, msg: Message) -> None:
        self._put(CONTROL, msg)

    def report(self, msg: Message) -> None:
        self._put(REPORT, msg)

    def _put(self, kind: int, msg: Message) -> None:
        for inbox in self._reached[kind]:
            inbox.put(msg)

    def fail(self, failure: PeerLost) -> None:
        """End all ranks."""
        for end in self._ends:
            end.fail(failure)

    def failed(self, thread: str, error: BaseException) -> None:
        """Report the error that ended a thread of this rank."""
        self.fail(PeerLost(f"rank {self._rank} failed: {explain(error)} (in its thread {thread})"))

    def close(self) -> None:
        """There is nothing to close."""

    drop = close


class Wire:
    """Carries tensors between processes, over a connection to or from each peer; a broken one raises PeerLost."""

    def __init__(self) -> None:
        self.out: dict[int, socket.socket] = {}  # by peer
        self.back: dict[int, socket.socket] = {}

    def send(self, x: Tensor, peer: int) -> None:
        try:
            self.out[peer].sendall(_bytes(x))
        except OSError as error:
            raise broken(peer) from error

    def recv(self, x: Tensor, peer: int) -> None:
        """Fill a tensor with the next bytes from a peer."""
        left, connection = _bytes(x), self.back[peer]
        try:
            while left:
                count = connection.recv_into(left)
                if not count:
                    raise broken(peer)
                left = left[count:]
        except OSError as error:
            raise broken(peer) from error


def _bytes(x: Tensor) -> memoryview:
    data: Any = x.view(torch.uint8).numpy()
    return memoryview(data)


def _queues() -> list[SimpleQueue[Any]]:
    """What waits to be sent over the wires of each kind."""
    return [SimpleQueue() for _ in WIRES]


class ProcessLink(Hearing):
    """A link of a rank that is a process, on this machine or a board; tensors travel through host memory.

    Data, control and reports have separate wires, so none waits behind another. `failed` is given the error that ends a
    thread, PeerLost for a connection. Links of a rank may share an `inbox`. Nothing travels before `begin`.
    """

    takes = 0.3e-3  # seconds from `send` until the next rank on this machine has woken up, at least

    def __init__(self, peers: Peers, failed: Failure, trace: NoTrace = OFF, inbox: Inbox | None = None) -> None:
        super().__init__(inbox or Inbox(trace, peers.ordered))
        self.failed, self._trace, self._peers = failed, trace, peers
        self._queues = _queues()
        self._threads: list[threading.Thread] = []
        self.fail = self._inbox.fail

    def begin(self, wires: Sequence[Wire]) -> None:
        """Use these wires, one of each kind."""
        peers, work = self._peers, []
        for kind, queue, wire, reached, heard in zip(WIRES, self._queues, wires, peers.reached, peers.heard):
            if reached:
                work.append((f"{kind} sender", partial(self._send_all, queue, wire, reached)))
            work += [(f"{kind} listener", partial(self._hear_all, wire, peer)) for peer in heard]
        self._threads = [guarded(name, run, self.failed) for name, run in work]

    def end(self) -> None:
        """Forget all messages on wires that were cut, so that the link can `begin` with others."""
        self._join()
        self._queues = _queues()
        self._inbox.clear()

    def send(self, msg: Message) -> None:
        self._queues[DATA].put(msg)

    def broadcast(self, msg: Message) -> None:
        self._queues[CONTROL].put(msg)

    def report(self, msg: Message) -> None:
        self._queues[REPORT].put(msg)

    def close(self) -> None:
        """After the Stop went round: send what is left, and end the threads and the other ranks' listeners."""
        self.broadcast(Stop())
        self.report(Stop())
        self._join()

    def _join(self) -> None:
        self.drop()
        for thread in self._threads:
            thread.join()

    def drop(self) -> None:
        """After a loss: end the senders; broken connections end the listeners."""
        for queue in self._queues:
            queue.put(None)

    def _send_all(self, queue: SimpleQueue[Any], wire: Wire, reached: Sequence[int]) -> None:
        """Encode and send messages; device tensors are copied to the host here, beside the computing."""
        while (msg := queue.get()) is not None:
            since = time.monotonic()
            parts = [part for packet in packets(msg) for part in packet if len(part)]
            for peer in reached:
                for part in parts:
                    wire.send(part, peer)
            size = len(reached) * sum(part.numel() * part.element_size() for part in parts)
            self._trace.note("sent", since, kind=type(msg).__name__, bytes=size)

    def _hear_all(self, wire: Wire, peer: int) -> None:
        msg: Message | None = None
        since: float | None = None  # moment of the message's first byte

        def packet() -> tuple[Header, Tensor]:
            nonlocal since
            numbers = torch.empty(len(Header._fields), dtype=torch.int64)
            wire.recv(numbers, peer)
            since = since or time.monotonic()
            header = Header.read(numbers)
            body = torch.empty(header.bytes, dtype=torch.uint8)
            if len(body):
                wire.recv(body, peer)
            return header, body

        while not isinstance(msg, Stop):
            since = None
            try:
                msg = receive(packet)
            except ValueError as error:
                raise PeerLost(f"rank {peer} was lost: it sent {error}; do all ranks run the same version of FlowSpec?"
                               ) from error
            self._inbox.put(msg, since)
