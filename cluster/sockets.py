"""Connections between processes on one or several machines: one socket per direction and kind of wire.

They carry bytes, and know nothing about messages. Each begins with a greeting: epoch, kind and sender. All connections
of an epoch are made and cut together; a cut wakes the threads that wait for them.
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
from typing import Any, Iterable, NamedTuple, Sequence

from cluster.keys import Keys, encrypted
from cluster.transport import WIRES, Wire
from config.failure import broken_connection, guarded
from pipeline.link import Peers

GREETING = struct.Struct("=8s3q")  # mark, epoch, kind of the wire, rank of the sender
MARK = b"flowspec"
LOOK = 0.02  # seconds of one wait for a peer to connect
BRIEF = 10.0  # timeout in seconds of a greeting, and of connecting to a board
MOST_MILLISECONDS = (1 << 31) - 1  # of a timeout of the system
STRANGERS = 64  # maximum number of connections without a greeting; beyond it the oldest is closed


class Greeted(NamedTuple):
    """A connection that has received its greeting."""

    connection: socket.socket
    kind: int
    peer: int


class Door:
    """The listening socket of a rank for its peers in one epoch; peers connect to its `name`.

    A thread per connection waits for the greeting, so that silent strangers delay no peer.
    """

    name: str

    def __init__(self, epoch: int, listening: socket.socket) -> None:
        self.epoch = epoch
        self._listening = listening
        self._strangers: deque[socket.socket] = deque()  # connections without a greeting so far
        self._greeted: SimpleQueue[Greeted] = SimpleQueue()
        self._closed = False
        self._error: BaseException | None = None  # the error that ended a thread of the door
        listening.listen()
        self._thread = guarded("door", self._accept, self._failed)

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *error: object) -> None:
        self._closed = True
        shut_down(self._listening)  # this wakes its thread
        self._thread.join()
        self._listening.close()
        while (found := self.accept(0.0)) is not None:
            found.connection.close()

    def reach(self, name: str) -> socket.socket:
        """Connect to the door of this name; raises OSError."""
        raise NotImplementedError

    def accept(self, seconds: float = LOOK) -> Greeted | None:
        """Return the next peer of this epoch, or None if there is none after `seconds`."""
        if self._error:
            raise self._error
        try:
            return self._greeted.get(timeout=seconds)
        except Empty:
            return None

    def _take(self) -> socket.socket:
        """Accept the next connection; raises OSError."""
        connection, _ = self._listening.accept()
        return connection

    def _accept(self) -> None:
        while True:
            try:
                connection = self._take()
            except OSError:  # the peer has disconnected, or too many files are open
                if self._closed:
                    return
                time.sleep(LOOK)
                continue
            self._strangers.append(connection)
            if len(self._strangers) > STRANGERS:
                shut_down(self._strangers.popleft())
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
        with suppress(ValueError):  # it may have been removed as the oldest stranger
            self._strangers.remove(connection)
        if (mark, epoch) == (MARK, self.epoch):
            self._greeted.put(Greeted(connection, kind, peer))
        else:
            connection.close()


class FolderDoor(Door):
    """A door in a private folder of one machine. Paths use the folder's descriptor, as its name may be too long."""

    def __init__(self, folder: str, epoch: int) -> None:
        self.name = f"door-{epoch}-{os.getpid()}"
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(self._path(self.name))
        super().__init__(epoch, listening)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        with suppress(OSError):  # the folder may have been removed
            os.unlink(self.name, dir_fd=self._folder)
        os.close(self._folder)

    def reach(self, name: str) -> socket.socket:
        return _connected(socket.socket(socket.AF_UNIX), self._path(name))

    def _path(self, name: str) -> str:
        return f"/proc/self/fd/{self._folder}/{name}"


class BoardDoor(Door):
    """A door at one address of a board. With keys, connections are encrypted and open to the cluster's boards only.

    A connection breaks if what it sends is not acknowledged within `patience` seconds, since a dead cable between two
    boards may stop no heartbeat; 0: the system's time, about 15 minutes.
    """

    def __init__(self, address: str, keys: Keys | None, epoch: int, port: int = 0, patience: float = 0.0) -> None:
        self._keys, self._patience = keys, patience
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
        milliseconds = min(round(1000 * self._patience), MOST_MILLISECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
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
    """Read this number of bytes; fewer if the connection ends."""
    found = b""
    while len(found) < size and (more := connection.recv(size - len(found))):
        found += more
    return found


def shut_down(connection: socket.socket) -> None:
    """Shut a connection down, without ending its encryption first; this wakes waiting threads at both ends."""
    with suppress(OSError):  # it may be closed already
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _numbered(links: Iterable[Sequence[Sequence[int]]]) -> set[tuple[int, int]]:
    """Return the kind of each wire of all links, and the rank at its other end."""
    return {(kind, peer) for link in links for kind, ranks in enumerate(link) for peer in ranks}


class Connections:
    """All connections of one rank in an epoch."""

    def __init__(self, own: int, peers: Sequence[Peers]) -> None:
        self._own = own
        self._all: list[socket.socket] = []
        self.wires = [Wire() for _ in WIRES]
        self.to = _numbered(each.send_to for each in peers)
        self.missing = _numbered(each.receive_from for each in peers)

    def reach(self, door: Door, kind: int, peer: int, name: str) -> None:
        """Connect to a peer at the door of this name; raises PeerLost if that fails."""
        try:
            connection = door.reach(name)
            self._all.append(connection)
            self.wires[kind].out[peer] = connection
            connection.sendall(GREETING.pack(MARK, door.epoch, kind, self._own))
            connection.settimeout(None)
        except (OSError, ValueError) as error:
            raise broken_connection(peer) from error

    def accept(self, door: Door) -> None:
        """Accept the next missing peer, if one connects soon."""
        found = door.accept()
        if found is None:
            return
        connection, kind, peer = found
        if (kind, peer) in self.missing:
            self.missing.remove((kind, peer))
            self._all.append(connection)
            self.wires[kind].back[peer] = connection
        else:
            connection.close()

    def cut(self) -> None:
        """Shut all connections down, so that waiting threads and peers notice."""
        for connection in self._all:
            shut_down(connection)

    def close(self) -> None:
        """Close the connections; no thread may wait for them any more."""
        for connection in self._all:
            connection.close()
