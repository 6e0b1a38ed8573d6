"""Links: a rank's end of the wires, over threads of one process or between processes.

They know nothing about what the messages mean, except that a Prune is handed out before what waits. Receiving and
sending happen on threads of their own, beside the computing.
"""
from __future__ import annotations

import threading
import time
from collections import deque
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, Callable, Iterable, NamedTuple, Protocol, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.failure import Failure, PeerLost, explain, guarded
from pipeline.messages import Header, Message, Prune, Stop, packets, receive
from pipeline.trace import OFF, Meter, NoTrace

# A pipeline may wait for its next request as long as it likes; the heartbeat finds dead peers.
IDLE = timedelta(days=30)


class Link(Protocol):
    """What a stage or a target may ask of the wires."""

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


class Inbox:
    """The messages that have come in for a rank: prunes are handed out first, and the others in order.

    With `ordered`, prunes wait their turn, too. While its rank waits, `meter` stands still.
    """

    def __init__(self, trace: NoTrace = OFF, ordered: bool = False, meter: Meter | None = None) -> None:
        self._trace, self._ordered = trace, ordered
        self._meter = meter or Meter()
        self._prunes: deque[Prune] = deque()
        self._others: deque[Message] = deque()
        self._news = threading.Condition()
        self._failure: PeerLost | None = None

    def put(self, msg: Message, since: float | None = None) -> None:
        """Take in a message whose first byte came at `since`, seconds of the monotonic clock."""
        since = since or time.monotonic()
        nodes = getattr(msg, "nodes", [])
        self._trace.note("recv", since, kind=type(msg).__name__, nodes=nodes)
        with self._news:
            if isinstance(msg, Prune) and not self._ordered:
                self._prunes.append(msg)
            else:
                self._others.append(msg)
            self._news.notify()

    def fail(self, failure: PeerLost) -> None:
        """Nothing more will come: `get` raises this. The first failure is the one that is reported."""
        with self._news:
            self._failure = self._failure or failure
            self._news.notify_all()

    def clear(self) -> None:
        """Forget what has come, and that nothing more would."""
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
        """Wait until there is something to get, or until a moment of the monotonic clock."""
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
    """The ranks that one rank talks to."""

    previous: int | None  # whom it hears in order
    following: Sequence[int]  # to whom it sends
    others: Sequence[int] = ()  # to whom it may broadcast
    root: int | None = None  # whose broadcasts it hears
    ordered: bool = False  # whether nothing may overtake on the way to it


class Hearing:
    """The end of a link at which messages come in."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self.recv, self.rest, self.urgent = inbox.get, inbox.rest, inbox.urgent

    @property
    def ready(self) -> bool:
        return self._inbox.ready


class LocalLink(Hearing):
    """One of the ranks that are threads of one process; `tables` are where else they wait for each other."""

    takes = 0.1e-3  # seconds from `send` until the next rank has woken up

    def __init__(self, rank: int, inboxes: Sequence[Inbox], peers: Peers, tables: Iterable[Any] = ()) -> None:
        super().__init__(inboxes[rank])
        self._rank = rank
        self._ends = [*inboxes, *tables]
        self._following = [inboxes[peer] for peer in peers.following]
        self._others = [inboxes[peer] for peer in peers.others]

    @staticmethod
    def ring(traces: Sequence[NoTrace]) -> list[LocalLink]:
        """The links of as many ranks as there are traces."""
        inboxes, world = [Inbox(trace) for trace in traces], len(traces)
        links = []
        for rank in range(world):
            others = [peer for peer in range(world) if peer != rank]
            peers = Peers(None, [(rank + 1) % world], others)
            links.append(LocalLink(rank, inboxes, peers))
        return links

    def send(self, msg: Message) -> None:
        for inbox in self._following:
            inbox.put(msg)

    def broadcast(self, msg: Message) -> None:
        for inbox in self._others:
            inbox.put(msg)

    def fail(self, failure: PeerLost) -> None:
        """End all ranks."""
        for end in self._ends:
            end.fail(failure)

    def failed(self, thread: str, error: BaseException) -> None:
        """A thread of this rank has died."""
        self.fail(PeerLost(f"rank {self._rank} failed: {explain(error)} (in its thread {thread})"))

    def close(self) -> None:
        pass

    def drop(self) -> None:
        pass


class Wire(Protocol):
    """What carries tensors between processes; a connection that breaks is PeerLost."""

    def send(self, x: Tensor, peer: int) -> None:
        """Send a tensor to a peer, behind those that were sent before."""

    def recv(self, x: Tensor, peer: int) -> None:
        """Fill a tensor with the next one of this size that comes from a peer."""


class GroupWire:
    """A wire over a process group of torch.distributed's gloo backend."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def send(self, x: Tensor, peer: int) -> None:
        over(dist.send, x, peer, self._group)

    def recv(self, x: Tensor, peer: int) -> None:
        over(dist.recv, x, peer, self._group)


class ProcessLink(Hearing):
    """One of the ranks in processes of their own, which boards have too; tensors travel through host memory.

    Data and control have wires of their own, so that a prune never waits behind a segment. `failed` hears what a thread
    has died of, PeerLost if that is a connection. Links of a rank that share an `inbox` are heard together. Nothing
    travels before `begin`.
    """

    takes = 0.3e-3  # seconds from `send` until the next rank has woken up, at least, in another process of this machine

    def __init__(self, peers: Peers, failed: Failure, trace: NoTrace = OFF, inbox: Inbox | None = None) -> None:
        super().__init__(inbox or Inbox(trace, peers.ordered))
        self.failed, self._trace, self._peers = failed, trace, peers
        self._following, self._others = peers.following, peers.others
        self._data: SimpleQueue[Any] = SimpleQueue()
        self._control: SimpleQueue[Any] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self.fail = self._inbox.fail

    def begin(self, wires: tuple[Wire, Wire]) -> None:
        """Send and hear over these wires, for data and for control."""
        (ring, control), peers = wires, self._peers
        work = {"data sender": partial(self._send_all, self._data, ring),
                "control sender": partial(self._send_all, self._control, control)}
        if peers.previous is not None:
            work["data listener"] = partial(self._hear_all, peers.previous, ring)
        if peers.root is not None:
            work["control listener"] = partial(self._hear_all, peers.root, control)
        self._threads = [guarded(name, run, self.failed) for name, run in work.items()]

    def end(self) -> None:
        """Forget all that is under way, over wires that were cut, so that the link can `begin` over others."""
        self.drop()
        for thread in self._threads:
            thread.join()
        self._data, self._control = SimpleQueue(), SimpleQueue()
        self._inbox.clear()

    def send(self, msg: Message) -> None:
        self._data.put((msg, self._following))

    def broadcast(self, msg: Message) -> None:
        self._control.put((msg, self._others))

    def close(self) -> None:
        """After the Stop went round: send what is left and end the threads, the other ranks' listeners included."""
        self.broadcast(Stop())
        self.drop()
        for thread in self._threads:
            thread.join()

    def drop(self) -> None:
        """After a loss: let the senders end, which would wait for ever; the listeners' connections break."""
        self._data.put(None)
        self._control.put(None)

    def _send_all(self, queue: SimpleQueue[Any], wire: Wire) -> None:
        """A device tensor is copied to the host here, beside the computing."""
        while (item := queue.get()) is not None:
            msg, following = item
            since = time.monotonic()
            parts = [part for packet in packets(msg) for part in packet if len(part)]
            for peer in following:
                for part in parts:
                    wire.send(part, peer)
            size = len(following) * sum(part.numel() * part.element_size() for part in parts)
            self._trace.note("sent", since, kind=type(msg).__name__, bytes=size)

    def _hear_all(self, peer: int, wire: Wire) -> None:
        msg: Message | None = None
        since: float | None = None  # when the first byte of the message had come

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


def over(transfer: Callable[..., Any], x: Tensor, peer: int, group: Any) -> None:
    """Send or receive a tensor; a broken connection is the loss of the peer."""
    try:
        transfer(x, peer, group=group)
    except RuntimeError as error:
        raise PeerLost(f"rank {peer} was lost: its connection broke") from error
