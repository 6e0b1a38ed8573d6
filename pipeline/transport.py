"""Links: a rank's end of the wires, over threads of one process or over torch.distributed.

They know nothing about what the messages mean, except that a Prune is handed out before what waits. Receiving and
sending happen on threads of their own, beside the computing.
"""
from __future__ import annotations

import threading
import time
from collections import deque
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Callable, NamedTuple, Protocol, Sequence

import torch
import torch.distributed as dist

from pipeline.messages import Message, Prune, Stop
from pipeline.trace import OFF, NoTrace
from pipeline.wire import HEADER, decode, encode

IDLE = timedelta(days=30)  # a pipeline may wait for its next request as long as it likes; the pulse finds dead peers


class PeerLost(RuntimeError):
    """Another rank has died or fallen silent; the message names it."""


class Link(Protocol):
    """What a stage or a target may ask of the wires."""

    @property
    def ready(self) -> bool:
        """Whether `recv` would return at once."""

    def send(self, msg: Message) -> None:
        """To the next rank, in order; does not wait."""

    def recv(self) -> Message:
        """The next message, a Prune before others; raises PeerLost."""

    def urgent(self) -> Prune | None:
        """The next Prune that has come already."""

    def broadcast(self, msg: Message) -> None:
        """To all other ranks, past what is on its way; does not wait."""


class Inbox:
    """Messages that have come in: prunes first, the others in order; or all of them in order."""

    def __init__(self, trace: NoTrace = OFF, ordered: bool = False) -> None:
        self._trace, self._ordered = trace, ordered
        self._prunes: deque[Prune] = deque()
        self._others: deque[Message] = deque()
        self._news = threading.Condition()
        self._failure: PeerLost | None = None

    def put(self, msg: Message, since: float | None = None) -> None:
        """Take in a message whose first byte came at `since`, seconds of the monotonic clock."""
        self._trace.note("recv", since or time.monotonic(), kind=type(msg).__name__, nodes=getattr(msg, "nodes", []))
        with self._news:
            if isinstance(msg, Prune) and not self._ordered:
                self._prunes.append(msg)
            else:
                self._others.append(msg)
            self._news.notify()

    def fail(self, failure: PeerLost) -> None:
        """Nothing more will come: `get` raises this. The first failure is the one that is told."""
        with self._news:
            self._failure = self._failure or failure
            self._news.notify_all()

    def get(self) -> Message:
        with self._news:
            while not (self._prunes or self._others or self._failure):
                self._news.wait()
            if self._failure:
                raise self._failure
            return (self._prunes or self._others).popleft()

    def urgent(self) -> Prune | None:
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


class LocalLink:
    """One of the ranks that are threads of one process."""

    takes = 0.1e-3  # seconds from `send` until the next rank has woken up

    def __init__(self, rank: int, inboxes: Sequence[Inbox], peers: Peers) -> None:
        self._inbox, self._all = inboxes[rank], inboxes
        self._following, self._others = ([inboxes[peer] for peer in some] for some in (peers.following, peers.others))
        self.recv, self.urgent = self._inbox.get, self._inbox.urgent

    @staticmethod
    def ring(traces: Sequence[NoTrace]) -> list[LocalLink]:
        """The links of as many ranks as there are traces."""
        inboxes, world = [Inbox(trace) for trace in traces], len(traces)
        return [LocalLink(rank, inboxes, Peers(None, [(rank + 1) % world], [i for i in range(world) if i != rank]))
                for rank in range(world)]

    @property
    def ready(self) -> bool:
        return self._inbox.ready

    def send(self, msg: Message) -> None:
        for inbox in self._following:
            inbox.put(msg)

    def broadcast(self, msg: Message) -> None:
        for inbox in self._others:
            inbox.put(msg)

    def fail(self, failure: PeerLost) -> None:
        """End all ranks."""
        for inbox in self._all:
            inbox.fail(failure)

    def close(self) -> None:
        pass


def new_wires() -> tuple[Any, Any]:
    """The process groups for data and for control; all ranks make them at the same time."""
    return dist.new_group(backend="gloo", timeout=IDLE), dist.new_group(backend="gloo", timeout=IDLE)


class DistLink:
    """One of the ranks of torch.distributed's gloo backend, which boards have too; tensors travel through host memory.

    Data and control have process groups of their own, so that a prune never waits behind a segment. `on_loss` is told
    in words which peer was lost. A rank with two links gives both the same `wires`.
    """

    takes = 0.9e-3  # seconds from `send` until the next rank has woken up, in another process of this machine

    def __init__(self, peers: Peers, on_loss: Callable[[str], None], trace: NoTrace = OFF,
                 wires: tuple[Any, Any] | None = None) -> None:
        self._inbox, self._on_loss, self._trace = Inbox(trace, peers.ordered), on_loss, trace
        self._following, self._others = peers.following, peers.others
        ring, control = wires or new_wires()
        self._data: SimpleQueue[Any] = SimpleQueue()
        self._control: SimpleQueue[Any] = SimpleQueue()
        self._threads = [self._start(self._sender, self._data, ring), self._start(self._sender, self._control, control)]
        for peer, group in ((peers.previous, ring), (peers.root, control)):
            if peer is not None:
                self._threads.append(self._start(self._listener, peer, group))
        self.recv, self.urgent, self.fail = self._inbox.get, self._inbox.urgent, self._inbox.fail

    @property
    def ready(self) -> bool:
        return self._inbox.ready

    def send(self, msg: Message) -> None:
        self._data.put((msg, self._following))

    def broadcast(self, msg: Message) -> None:
        self._control.put((msg, self._others))

    def close(self) -> None:
        """After the Stop went round: send what is left and end the threads, the other ranks' listeners included."""
        self.broadcast(Stop())
        self._data.put(None)
        self._control.put(None)
        for thread in self._threads:
            thread.join()

    def _start(self, run: Callable[..., None], *args: Any) -> threading.Thread:
        thread = threading.Thread(target=run, args=args, name=run.__name__.strip("_"), daemon=True)
        thread.start()
        return thread

    def _sender(self, queue: SimpleQueue[Any], group: Any) -> None:
        """A device tensor is copied to the host here, beside the computing."""
        peer = None
        try:
            while (item := queue.get()) is not None:
                since = time.monotonic()
                header, body = encode(item[0])
                for peer in item[1]:
                    dist.send(header, peer, group=group)
                    if len(body):
                        dist.send(body, peer, group=group)
                self._trace.note("sent", since, kind=type(item[0]).__name__,
                                 bytes=len(item[1]) * (8 * HEADER + len(body)))
        except RuntimeError:
            self._on_loss(f"rank {peer} was lost: its connection broke while sending to it")

    def _listener(self, peer: int, group: Any) -> None:
        msg: Message | None = None
        header = torch.empty(HEADER, dtype=torch.int64)
        try:
            while not isinstance(msg, Stop):
                dist.recv(header, peer, group=group)
                since = time.monotonic()
                body = torch.empty(int(header[-1]), dtype=torch.uint8)
                if len(body):
                    dist.recv(body, peer, group=group)
                msg = decode(header, body)
                self._inbox.put(msg, since)
        except RuntimeError:
            self._on_loss(f"rank {peer} was lost: its connection broke")
