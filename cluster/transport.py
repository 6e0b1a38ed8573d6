"""Links: a rank's ends of the wires to other ranks, which are threads of one process or processes.

Of the meaning of messages they know that a Prune is handed out before others, and that nothing follows a Stop. They
send and receive in threads of their own, during the computation.
"""
from __future__ import annotations

import socket
import threading
import time
from collections import deque
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Iterable, Protocol, Sequence

import torch
from torch import Tensor

from config.failure import Failure, PeerLost, broken_connection, explain, guarded
from pipeline.link import Peers
from pipeline.messages import Header, Message, Prune, Stop, facts_of, packets, receive
from pipeline.trace import OFF, Meter, NoTrace

WIRES = ("data", "control")  # for messages in order, and of rank 0 to all ranks
DATA, CONTROL = range(2)
TCP_CLOSE = 7  # the state of a connection that was given up, as in TCP_INFO
CHECK_SECONDS = 0.5  # between two looks at the connections while nothing is sent


class Inbox:
    """The received messages of a rank: it hands out prunes first, the others in order.

    With `ordered`, prunes keep their place. `meter` does not count the time in which the rank waits for messages.
    """

    def __init__(self, trace: NoTrace = OFF, ordered: bool = False, meter: Meter | None = None) -> None:
        self._rank_trace, self._is_ordered = trace, ordered
        self._work_meter = meter or Meter()
        self._prune_messages: deque[Prune] = deque()
        self._other_messages: deque[Message] = deque()
        self._has_news = threading.Condition()
        self._first_failure: PeerLost | None = None

    def put(self, msg: Message, arrived_at: float | None = None) -> None:
        """Add a message; its first byte `arrived_at` this time of the monotonic clock, in seconds."""
        self._rank_trace.note("recv", arrived_at or time.monotonic(), **facts_of(msg))
        with self._has_news:
            if isinstance(msg, Prune) and not self._is_ordered:
                self._prune_messages.append(msg)
            else:
                self._other_messages.append(msg)
            self._has_news.notify()

    def fail(self, failure: PeerLost) -> None:
        """Make `get` raise this failure, or the first one if there are several."""
        with self._has_news:
            self._first_failure = self._first_failure or failure
            self._has_news.notify_all()

    def clear(self) -> None:
        """Drop all messages and the failure."""
        with self._has_news:
            self._prune_messages.clear()
            self._other_messages.clear()
            self._first_failure = None

    def get(self) -> Message:
        with self._has_news:
            if not self.ready:
                with self._work_meter.idle():
                    self._has_news.wait_for(lambda: self.ready)
            if self._first_failure:
                raise self._first_failure
            return (self._prune_messages or self._other_messages).popleft()

    def wait_until(self, until: float) -> None:
        """Wait for a message or a failure, at most until this time on the monotonic clock."""
        with self._has_news, self._work_meter.idle():
            self._has_news.wait_for(lambda: self.ready, max(0.0, until - time.monotonic()))

    def urgent(self) -> Prune | None:
        if self._first_failure:
            raise self._first_failure
        return self._prune_messages.popleft() if self._prune_messages else None

    @property
    def ready(self) -> bool:
        return bool(self._other_messages or self._prune_messages or self._first_failure)


class Receiver:
    """The receiving end of a link."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self.recv, self.wait_until, self.urgent = inbox.get, inbox.wait_until, inbox.urgent

    @property
    def ready(self) -> bool:
        return self._inbox.ready


class LocalLink(Receiver):
    """A link of a rank that is a thread; `fail` also wakes threads that wait for a sum at `tables` (tp/group.py)."""

    takes = 0.1e-3  # seconds from `send` until the next rank wakes up

    def __init__(self, rank: int, inboxes: Sequence[Inbox],
                 peers: Peers, tables: Iterable[Any] = ()) -> None:
        super().__init__(inboxes[rank])
        self._rank = rank
        self._thread_ends = [*inboxes, *tables]
        self._next_inboxes = [[inboxes[peer] for peer in ranks] for ranks in peers.send_to]

    def send(self, msg: Message) -> None:
        self._put(DATA, msg)

    def broadcast(self, msg: Message) -> None:
        self._put(CONTROL, msg)

    def _put(self, wire_kind: int, msg: Message) -> None:
        for inbox in self._next_inboxes[wire_kind]:
            inbox.put(msg)

    def fail(self, failure: PeerLost) -> None:
        """End all ranks."""
        for thread_end in self._thread_ends:
            thread_end.fail(failure)

    def failed(self, thread_name: str, error: BaseException) -> None:
        """End all ranks because of an error that ended a thread of this rank."""
        self.fail(PeerLost(f"rank {self._rank} failed: {explain(error)} (in its thread {thread_name})"))

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    drop = close


class Wire(Protocol):
    """What carries tensors of one kind of message between processes; a lost peer raises PeerLost."""

    def send(self, tensors: Sequence[Tensor], peer: int) -> None:
        """Send the tensors of a message to a peer."""

    def recv(self, x: Tensor, peer: int) -> None:
        """Fill a tensor with the next bytes from a peer."""

    def check(self, peer: int) -> None:
        """Raise PeerLost if what was sent to a peer cannot arrive any more."""


class SocketWire:
    """The connections to and from each peer."""

    def __init__(self) -> None:
        self.outgoing: dict[int, socket.socket] = {}  # by peer
        self.incoming: dict[int, socket.socket] = {}

    def send(self, tensors: Sequence[Tensor], peer: int) -> None:
        try:
            for tensor in tensors:
                self.outgoing[peer].sendall(_bytes_of(tensor))
        except OSError as error:
            raise broken_connection(peer) from error

    def check(self, peer: int) -> None:
        """Raise PeerLost if the system has given up the connection to a peer, as over a dead cable.

        SO_ERROR would also report a cable that is unplugged for a moment, which the connection survives.
        """
        connection = self.outgoing[peer]
        if connection.family == socket.AF_UNIX:
            return
        if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_CLOSE:
            raise broken_connection(peer)

    def recv(self, x: Tensor, peer: int) -> None:
        """Fill a tensor with the next bytes from a peer."""
        missing_bytes, connection = _bytes_of(x), self.incoming[peer]
        try:
            while missing_bytes:
                num_bytes = connection.recv_into(missing_bytes)
                if not num_bytes:
                    raise broken_connection(peer)
                missing_bytes = missing_bytes[num_bytes:]
        except OSError as error:
            raise broken_connection(peer) from error


def _bytes_of(x: Tensor) -> memoryview:
    byte_array: Any = x.view(torch.uint8).numpy()
    return memoryview(byte_array)


def _new_queues() -> list[SimpleQueue[Any]]:
    """Return an empty queue of outgoing messages for each kind of wire."""
    return [SimpleQueue() for _ in WIRES]


def _next_message(message_queue: SimpleQueue[Any], wire: Wire, peers: Sequence[int]) -> Message | None:
    """Return the next message of a queue, or None at its end. Meanwhile, check what was sent before it."""
    while True:
        try:
            return message_queue.get(timeout=CHECK_SECONDS)
        except Empty:
            for peer in peers:
                wire.check(peer)


class ProcessLink(Receiver):
    """A link of a rank that is a process, on this machine or a board; tensors go through host memory.

    Data and control have separate wires, so neither delays the other. `failed` is called with the error that ends
    a thread, PeerLost for a broken connection. Links of a rank may share an `inbox`. Nothing is sent before `begin`.
    """

    takes = 0.3e-3  # minimum seconds from `send` until the next rank on this machine wakes up

    def __init__(self, peers: Peers, failed: Failure, trace: NoTrace = OFF,
                 inbox: Inbox | None = None) -> None:
        super().__init__(inbox or Inbox(trace, peers.in_order))
        self.failed, self._rank_trace, self._peers = failed, trace, peers
        self._message_queues = _new_queues()
        self._link_threads: list[threading.Thread] = []
        self.fail = self._inbox.fail

    def begin(self, wires: Sequence[Wire]) -> None:
        """Start the threads that send and receive over these wires, one of each kind."""
        receivers, senders = self._peers.send_to, self._peers.receive_from
        thread_jobs = []
        for number, (kind, wire) in enumerate(zip(WIRES, wires)):
            if receivers[number]:
                send_all = partial(self._send_all, self._message_queues[number], wire, receivers[number])
                thread_jobs.append((f"{kind} sender", send_all))
            thread_jobs += [(f"{kind} listener", partial(self._receive_all, wire, peer)) for peer in senders[number]]

        self._link_threads = [guarded(name, run, self.failed) for name, run in thread_jobs]

    def end(self) -> None:
        """Drop all messages after the wires were cut, so that the link can `begin` with other wires."""
        self._join()
        self._message_queues = _new_queues()
        self._inbox.clear()

    def send(self, msg: Message) -> None:
        self._message_queues[DATA].put(msg)

    def broadcast(self, msg: Message) -> None:
        self._message_queues[CONTROL].put(msg)

    def close(self) -> None:
        """Send the remaining messages after the Stop went round; end the threads and the other ranks' listeners."""
        self.broadcast(Stop())
        self._join()

    def _join(self) -> None:
        self.drop()
        for thread in self._link_threads:
            thread.join()

    def drop(self) -> None:
        """End the senders after a loss; broken connections end the listeners."""
        for message_queue in self._message_queues:
            message_queue.put(None)

    def _send_all(self, message_queue: SimpleQueue[Any], wire: Wire, peers: Sequence[int]) -> None:
        """Encode and send messages; this thread copies device tensors to the host, during the computation."""
        while (msg := _next_message(message_queue, wire, peers)) is not None:
            started_at = time.monotonic()
            tensors = [tensor for packet in packets(msg) for tensor in packet if len(tensor)]
            for peer in peers:
                wire.send(tensors, peer)

            num_bytes = len(peers) * sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            self._rank_trace.note("sent", started_at, kind=type(msg).__name__, bytes=num_bytes)

    def _receive_all(self, wire: Wire, peer: int) -> None:
        msg: Message | None = None
        arrived_at: float | None = None  # the message's first byte

        def next_packet() -> tuple[Header, Tensor]:
            nonlocal arrived_at
            header_numbers = torch.empty(len(Header._fields), dtype=torch.int64)
            wire.recv(header_numbers, peer)
            arrived_at = arrived_at or time.monotonic()

            header = Header.read(header_numbers)
            body = torch.empty(header.num_bytes, dtype=torch.uint8)
            if len(body):
                wire.recv(body, peer)
            return header, body

        while not isinstance(msg, Stop):
            arrived_at = None
            try:
                msg = receive(next_packet)
            except ValueError as error:
                raise PeerLost(f"rank {peer} was lost: it sent {error}; run the same version of FlowSpec on all ranks"
                               ) from error
            self._inbox.put(msg, arrived_at)
