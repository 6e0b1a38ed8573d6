"""Links: a rank's ends of the wires to other ranks, which are threads of one process or processes.

They know nothing about the meaning of messages, except that a Prune is handed out before others. They send and receive
in threads of their own, during the computation.
"""
from __future__ import annotations

import socket
import threading
import time
from collections import deque
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Iterable, Sequence

import torch
from torch import Tensor

from config.failure import Failure, PeerLost, broken_connection, explain, guarded
from pipeline.link import Peers
from pipeline.messages import Header, Message, Prune, Stop, facts_of, packets, receive
from pipeline.trace import OFF, Meter, NoTrace

WIRES = ("data", "control", "report")  # for messages in order, of rank 0 to all ranks, and of stages to rank 0
DATA, CONTROL, REPORT = range(3)
TCP_CLOSE = 7  # the state of a connection that was given up, as in TCP_INFO
CHECK_SECONDS = 0.5  # between two looks at the connections while nothing is sent


class Inbox:
    """The received messages of a rank: it hands out prunes first, the others in order.

    With `ordered`, prunes keep their place. `meter` does not count the time in which the rank waits for messages.
    """

    def __init__(self, trace: NoTrace = OFF, ordered: bool = False, meter: Meter | None = None) -> None:
        self._trace, self._ordered = trace, ordered
        self._meter = meter or Meter()
        self._prunes: deque[Prune] = deque()
        self._others: deque[Message] = deque()
        self._news = threading.Condition()
        self._failure: PeerLost | None = None

    def put(self, msg: Message, since: float | None = None) -> None:
        """Add a message; `since` is the arrival of its first byte, in seconds of the monotonic clock."""
        since = since or time.monotonic()
        self._trace.note("recv", since, **facts_of(msg))
        with self._news:
            if isinstance(msg, Prune) and not self._ordered:
                self._prunes.append(msg)
            else:
                self._others.append(msg)
            self._news.notify()

    def fail(self, failure: PeerLost) -> None:
        """Make `get` raise this failure, or the first one if there are several."""
        with self._news:
            self._failure = self._failure or failure
            self._news.notify_all()

    def clear(self) -> None:
        """Drop all messages and the failure."""
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
        """Wait for a message or a failure, at most until this time on the monotonic clock."""
        with self._news, self._meter.idle():
            self._news.wait_for(lambda: self.ready, max(0.0, until - time.monotonic()))

    def urgent(self) -> Prune | None:
        if self._failure:
            raise self._failure
        return self._prunes.popleft() if self._prunes else None

    @property
    def ready(self) -> bool:
        return bool(self._others or self._prunes or self._failure)


class Receiver:
    """The receiving end of a link."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self.recv, self.rest, self.urgent = inbox.get, inbox.rest, inbox.urgent

    @property
    def ready(self) -> bool:
        return self._inbox.ready


class LocalLink(Receiver):
    """A link of a rank that is a thread; `fail` also wakes threads that wait for a sum at `tables` (tp/group.py)."""

    takes = 0.1e-3  # seconds from `send` until the next rank wakes up

    def __init__(self, rank: int, inboxes: Sequence[Inbox], peers: Peers, tables: Iterable[Any] = ()) -> None:
        super().__init__(inboxes[rank])
        self._rank = rank
        self._ends = [*inboxes, *tables]
        self._reached = [[inboxes[peer] for peer in reached] for reached in peers.send_to]

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
        """End all ranks because of an error that ended a thread of this rank."""
        self.fail(PeerLost(f"rank {self._rank} failed: {explain(error)} (in its thread {thread})"))

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    drop = close


class Wire:
    """The connections to and from each peer, which carry tensors between processes; a broken one raises PeerLost."""

    def __init__(self) -> None:
        self.out: dict[int, socket.socket] = {}  # by peer
        self.back: dict[int, socket.socket] = {}

    def send(self, x: Tensor, peer: int) -> None:
        try:
            self.out[peer].sendall(_bytes(x))
        except OSError as error:
            raise broken_connection(peer) from error

    def check(self, peer: int) -> None:
        """Raise PeerLost if the system has given up the connection to a peer, as over a dead cable.

        SO_ERROR would also report a cable that is unplugged for a moment, which the connection survives.
        """
        connection = self.out[peer]
        if connection.family == socket.AF_UNIX:
            return
        if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_CLOSE:
            raise broken_connection(peer)

    def recv(self, x: Tensor, peer: int) -> None:
        """Fill a tensor with the next bytes from a peer."""
        left, connection = _bytes(x), self.back[peer]
        try:
            while left:
                count = connection.recv_into(left)
                if not count:
                    raise broken_connection(peer)
                left = left[count:]
        except OSError as error:
            raise broken_connection(peer) from error


def _bytes(x: Tensor) -> memoryview:
    data: Any = x.view(torch.uint8).numpy()
    return memoryview(data)


def _queues() -> list[SimpleQueue[Any]]:
    """Return an empty queue of outgoing messages for each kind of wire."""
    return [SimpleQueue() for _ in WIRES]


def _next_message(queue: SimpleQueue[Any], wire: Wire, reached: Sequence[int]) -> Message | None:
    """Return the next message of a queue, or None at its end. Meanwhile, check what was sent before it."""
    while True:
        try:
            return queue.get(timeout=CHECK_SECONDS)
        except Empty:
            for peer in reached:
                wire.check(peer)


class ProcessLink(Receiver):
    """A link of a rank that is a process, on this machine or a board; tensors go through host memory.

    Data, control and reports have separate wires, so none delays another. `failed` is called with the error that ends
    a thread, PeerLost for a broken connection. Links of a rank may share an `inbox`. Nothing is sent before `begin`.
    """

    takes = 0.3e-3  # minimum seconds from `send` until the next rank on this machine wakes up

    def __init__(self, peers: Peers, failed: Failure, trace: NoTrace = OFF, inbox: Inbox | None = None) -> None:
        super().__init__(inbox or Inbox(trace, peers.in_order))
        self.failed, self._trace, self._peers = failed, trace, peers
        self._queues = _queues()
        self._threads: list[threading.Thread] = []
        self.fail = self._inbox.fail

    def begin(self, wires: Sequence[Wire]) -> None:
        """Start the threads that send and receive over these wires, one of each kind."""
        peers, work = self._peers, []
        for kind, queue, wire, reached, heard in zip(WIRES, self._queues, wires, peers.send_to, peers.receive_from):
            if reached:
                work.append((f"{kind} sender", partial(self._send_all, queue, wire, reached)))
            work += [(f"{kind} listener", partial(self._receive_all, wire, peer)) for peer in heard]
        self._threads = [guarded(name, run, self.failed) for name, run in work]

    def end(self) -> None:
        """Drop all messages after the wires were cut, so that the link can `begin` with other wires."""
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
        """Send the remaining messages after the Stop went round; end the threads and the other ranks' listeners."""
        self.broadcast(Stop())
        self.report(Stop())
        self._join()

    def _join(self) -> None:
        self.drop()
        for thread in self._threads:
            thread.join()

    def drop(self) -> None:
        """End the senders after a loss; broken connections end the listeners."""
        for queue in self._queues:
            queue.put(None)

    def _send_all(self, queue: SimpleQueue[Any], wire: Wire, reached: Sequence[int]) -> None:
        """Encode and send messages; this thread copies device tensors to the host, during the computation."""
        while (msg := _next_message(queue, wire, reached)) is not None:
            since = time.monotonic()
            parts = [part for packet in packets(msg) for part in packet if len(part)]
            for peer in reached:
                for part in parts:
                    wire.send(part, peer)
            size = len(reached) * sum(part.numel() * part.element_size() for part in parts)
            self._trace.note("sent", since, kind=type(msg).__name__, bytes=size)

    def _receive_all(self, wire: Wire, peer: int) -> None:
        msg: Message | None = None
        since: float | None = None  # arrival of the message's first byte

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
                raise PeerLost(f"rank {peer} was lost: it sent {error}; run the same version of FlowSpec on all ranks"
                               ) from error
            self._inbox.put(msg, since)
