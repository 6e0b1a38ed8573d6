"""Connections between processes, of one machine or several: sockets, one for each direction and kind.

They carry bytes, and know nothing about messages. Each begins with a greeting, which says who sends what in which epoch
of the links. All of an epoch are made at once, and cut at once; then threads that wait at one of them go on.
"""
from __future__ import annotations

import os
import socket
import struct
import time
from collections import deque
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple, Sequence

import torch
from torch import Tensor

from pipeline.failure import PeerLost, guarded
from pipeline.keys import Keys, encrypted
from pipeline.transport import Peers

GREETING = struct.Struct("=8s3q")  # a mark, the epoch, the kind of the connection, and who sends over it
MARK = b"flowspec"
DATA, CONTROL = 0, 1  # kinds
LOOK = 0.02  # seconds to wait for a peer to connect
BRIEF = 10.0  # seconds for a greeting, and to reach a board
STRANGERS = 64  # that may be asked for their greeting at once; the oldest goes first


class Greeted(NamedTuple):
    """A connection from a peer that has said who it is, and of which kind the connection shall be."""

    connection: socket.socket
    kind: int
    peer: int


class SocketWire:
    """What carries tensors to peers, and from others, over a connection each."""

    def __init__(self) -> None:
        self.out: dict[int, socket.socket] = {}  # by peer
        self.back: dict[int, socket.socket] = {}

    def send(self, x: Tensor, peer: int) -> None:
        """Send a tensor; raises PeerLost if the connection is broken."""
        try:
            self.out[peer].sendall(_bytes(x))
        except OSError as error:
            raise broken(peer) from error

    def recv(self, x: Tensor, peer: int) -> None:
        """Fill a tensor with what comes; raises PeerLost if the connection is broken."""
        left, connection = _bytes(x), self.back[peer]
        while left:
            try:
                count = connection.recv_into(left)
            except OSError as error:
                raise broken(peer) from error
            if not count:
                raise broken(peer)
            left = left[count:]

    def cut(self) -> None:
        """Let threads that wait at a connection find it broken; peers do, too."""
        for connection in [*self.out.values(), *self.back.values()]:
            hang_up(connection)

    def close(self) -> None:
        """Close the connections, at which nobody waits any more."""
        for connection in [*self.out.values(), *self.back.values()]:
            connection.close()


def broken(peer: int) -> PeerLost:
    """The loss of a peer whose connection broke."""
    return PeerLost(f"rank {peer} was lost: its connection broke")


def _bytes(x: Tensor) -> memoryview:
    data: Any = x.view(torch.uint8).numpy()
    return memoryview(data)


class Door:
    """Where a rank lets its peers in, in one epoch, by the `name` under which they find it.

    Who comes is asked for its greeting on a thread of its own, so that nobody is held up by one who says nothing.
    """

    name: str

    def __init__(self, epoch: int, listening: socket.socket) -> None:
        self.epoch = epoch
        self._listening = listening
        self._strangers: deque[socket.socket] = deque()  # that have not said who they are
        self._greeted: SimpleQueue[Greeted] = SimpleQueue()
        self._closed = False
        self._error: BaseException | None = None  # what a thread of the door died of
        listening.listen()
        self._thread = guarded("door", self._accept, self._failed)

    def __enter__(self) -> Door:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self._closed = True
        hang_up(self._listening)  # closing it alone would leave it open for as long as its thread waits
        self._thread.join()
        self._listening.close()
        while (found := self.let_in(0.0)) is not None:
            found.connection.close()

    def reach(self, name: str) -> socket.socket:
        """A connection to the rank whose door has this name; raises OSError."""
        raise NotImplementedError

    def let_in(self, seconds: float = LOOK) -> Greeted | None:
        """The next peer of this epoch that has said who it is; None if there is none after so many seconds."""
        if self._error:
            raise self._error
        try:
            return self._greeted.get(timeout=seconds)
        except Empty:
            return None

    def _take(self) -> socket.socket:
        """The next one who comes; raises OSError."""
        connection, _ = self._listening.accept()
        return connection

    def _accept(self) -> None:
        while True:
            try:
                connection = self._take()
            except OSError:  # somebody came and went, or too many files are open
                if self._closed:
                    return
                time.sleep(LOOK)
                continue
            self._strangers.append(connection)
            if len(self._strangers) > STRANGERS:
                hang_up(self._strangers.popleft())
            guarded("greeting", partial(self._greet, connection), self._failed)

    def _failed(self, thread: str, error: BaseException) -> None:
        self._error = error

    def _greet(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(BRIEF)
            mark, epoch, kind, peer = GREETING.unpack(_read(connection, GREETING.size))
            connection.settimeout(None)
        except (OSError, struct.error):
            mark, epoch = b"", 0
        with suppress(ValueError):  # it was hung up on
            self._strangers.remove(connection)
        if (mark, epoch) == (MARK, self.epoch):
            self._greeted.put(Greeted(connection, kind, peer))
        else:
            connection.close()


class FolderDoor(Door):
    """A door in a private folder of one machine. An open folder stands for its own name, which may be too long."""

    def __init__(self, folder: str, epoch: int) -> None:
        self.name = f"door-{epoch}-{os.getpid()}"
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(self._path(self.name))
        super().__init__(epoch, listening)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        super().__exit__(kind, error, traceback)
        with suppress(OSError):  # the folder may be gone
            os.unlink(self.name, dir_fd=self._folder)
        os.close(self._folder)

    def reach(self, name: str) -> socket.socket:
        return _connected(socket.socket(socket.AF_UNIX), self._path(name))

    def _path(self, name: str) -> str:
        return f"/proc/self/fd/{self._folder}/{name}"


class BoardDoor(Door):
    """A door at one address of a board. With keys, only boards of the same cluster come in, and nobody reads along."""

    def __init__(self, address: str, keys: Keys | None, epoch: int, port: int = 0) -> None:
        self._keys = keys
        listening = socket.create_server((address, port))
        self.port = listening.getsockname()[1]
        self.name = f"{address}:{self.port}"
        super().__init__(epoch, listening)

    def reach(self, name: str) -> socket.socket:
        address, _, port = name.rpartition(":")
        connection = socket.socket()
        connection.settimeout(BRIEF)
        connection = _connected(connection, (address, int(port)))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._keys:
            connection = encrypted(connection, self._keys.client, server=False)
        return connection

    def _take(self) -> socket.socket:
        connection = super()._take()
        return encrypted(connection, self._keys.server, server=True) if self._keys else connection


def _connected(connection: socket.socket, place: Any) -> socket.socket:
    try:
        connection.connect(place)
    except OSError:
        connection.close()
        raise
    return connection


def _read(connection: socket.socket, size: int) -> bytes:
    """So many bytes; fewer if the connection ends before."""
    found = b""
    while len(found) < size and (more := connection.recv(size - len(found))):
        found += more
    return found


def hang_up(connection: socket.socket) -> None:
    """Let all who wait at a connection go on, here and at its other end; what was encrypted stays so."""
    with suppress(OSError):  # it is gone already
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


class Connections:
    """The connections of one rank in an epoch: those to the peers that it sends to, and from those that it hears."""

    def __init__(self, own: int, peers: Sequence[Peers]) -> None:
        self._own = own
        self.wires = SocketWire(), SocketWire()  # by kind
        self.to = {(DATA, peer) for each in peers for peer in each.following}
        self.to |= {(CONTROL, peer) for each in peers for peer in each.others}
        self.missing = {(DATA, each.previous) for each in peers if each.previous is not None}
        self.missing |= {(CONTROL, each.root) for each in peers if each.root is not None}

    def reach(self, door: Door, kind: int, peer: int, name: str) -> None:
        """Connect to a peer at the door of this name; raises PeerLost."""
        try:
            connection = door.reach(name)
            self.wires[kind].out[peer] = connection
            connection.sendall(GREETING.pack(MARK, door.epoch, kind, self._own))
            connection.settimeout(None)
        except (OSError, ValueError) as error:
            raise broken(peer) from error

    def let_in(self, door: Door) -> None:
        """Take in the next peer that is missing, if one comes soon."""
        found = door.let_in()
        if found is None:
            return
        connection, kind, peer = found
        if (kind, peer) in self.missing:
            self.missing.remove((kind, peer))
            self.wires[kind].back[peer] = connection
        else:
            connection.close()

    def cut(self) -> None:
        for wire in self.wires:
            wire.cut()

    def close(self) -> None:
        for wire in self.wires:
            wire.close()
