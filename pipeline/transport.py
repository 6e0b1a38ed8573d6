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

    def urgent(self) -> Message | None:
        """The next Prune that has come already."""

    def broadcast(self, msg: Message) -> None:
        """To all other ranks, past what is on its way; does not wait."""


class Inbox:
    """Messages that have come in: prunes first, the others in order."""

    def __init__(self, trace: NoTrace = OFF) -> None:
        self._trace = trace
        self._prunes: deque[Message] = deque()
        self._others: deque[Message] = deque()
        self._news = threading.Condition()
        self._failure: PeerLost | None = None

    def put(self, msg: Message, since: float | None = None) -> None:
        """Take in a message whose first byte came at `since`, seconds of the monotonic clock."""
        self._trace.note("recv", since or time.monotonic(), kind=type(msg).__name__, nodes=getattr(msg, "nodes", []))
        with self._news:
            (self._prunes if isinstance(msg, Prune) else self._others).append(msg)
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

    def urgent(self) -> Message | None:
        return self._prunes.popleft() if self._prunes else None

    @property
    def ready(self) -> bool:
        return bool(self._others or self._prunes or self._failure)


class LocalLink:
    """One of the ranks that are threads of one process."""

    def __init__(self, rank: int, inboxes: Sequence[Inbox]) -> None:
        self._inbox, self._next = inboxes[rank], inboxes[(rank + 1) % len(inboxes)]
        self._others = [inbox for inbox in inboxes if inbox is not self._inbox]
        self.send, self.recv, self.urgent = self._next.put, self._inbox.get, self._inbox.urgent

    @staticmethod
    def ring(traces: Sequence[NoTrace]) -> list[LocalLink]:
        """The links of as many ranks as there are traces."""
        inboxes = [Inbox(trace) for trace in traces]
        return [LocalLink(rank, inboxes) for rank in range(len(inboxes))]

    @property
    def ready(self) -> bool:
        return self._inbox.ready

    def broadcast(self, msg: Message) -> None:
        for inbox in self._others:
            inbox.put(msg)

    def fail(self, failure: PeerLost) -> None:
        """End all ranks."""
        for inbox in [self._inbox, *self._others]:
            inbox.fail(failure)

    def close(self) -> None:
        pass


class Peers(NamedTuple):
    """The ranks that one rank talks to."""

    previous: int
    following: int
    others: Sequence[int]  # to whom it may broadcast
    root: int | None  # whose broadcasts it hears


class DistLink:
    """One of the ranks of torch.distributed's gloo backend, which boards have too; tensors travel through host memory.

    Data and control have process groups of their own, so that a prune never waits behind a segment. `on_loss` is told
    in words which peer was lost.
    """

    def __init__(self, peers: Peers, on_loss: Callable[[str], None], trace: NoTrace = OFF) -> None:
        self._inbox, self._on_loss = Inbox(trace), on_loss
        self._following, self._others = [peers.following], peers.others
        ring, control = (dist.new_group(backend="gloo", timeout=IDLE) for _ in range(2))
        self._data: SimpleQueue[Any] = SimpleQueue()
        self._control: SimpleQueue[Any] = SimpleQueue()
        self._threads = [self._start(self._sender, self._data, ring), self._start(self._sender, self._control, control),
                         self._start(self._listener, peers.previous, ring)]
        if peers.root is not None:
            self._threads.append(self._start(self._listener, peers.root, control))
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
                header, body = encode(item[0])
                for peer in item[1]:
                    dist.send(header, peer, group=group)
                    if len(body):
                        dist.send(body, peer, group=group)
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
