"""Connections between processes on one or several machines: one socket per direction and kind of wire.

They carry bytes, and know nothing about messages. Each begins with a greeting: membership, kind and sender. All
connections of a membership are made and cut together; a cut wakes the threads that wait for them.
"""
from __future__ import annotations

import os
import socket
import struct
import time
from collections import deque
from contextlib import suppress
from functools import partial
from queue import Empty, Queue
from typing import Any, Iterable, NamedTuple, Sequence, TypeVar

from cluster.keys import Keys, encrypted
from cluster.transport import WIRES, SocketWire
from config.failure import broken_connection, guarded
from pipeline.link import Peers

GREETING = struct.Struct("=8s3q")  # mark, number of the membership, kind of the wire, rank of the sender
MARK = b"flowspec"
POLL_SECONDS = 0.02  # of one wait for a peer to connect
BRIEF_TIMEOUT = 10.0  # seconds for a greeting, and for connecting to a board
MOST_MILLISECONDS = (1 << 31) - 1  # of a timeout of the system
MAX_STRANGERS = 64  # maximum number of connections without a greeting; beyond it the oldest is closed
DoorType = TypeVar("DoorType", bound="Door")


class Greeted(NamedTuple):
    """A connection that has received its greeting."""

    connection: socket.socket
    wire_kind: int
    peer: int


class Door:
    """The listening socket of a rank for its peers in one membership; peers connect to its `name`.

    A thread per connection waits for the greeting, so that silent strangers delay no peer.
    """

    name: str

    def __init__(self, membership: int, listening_socket: socket.socket) -> None:
        self.membership = membership
        self._listening_socket = listening_socket
        self._strangers: deque[socket.socket] = deque()  # connections without a greeting so far
        self._greeted_peers: Queue[Greeted] = Queue()  # a SimpleQueue of Python 3.8 may wait for ever
        self._is_closed = False
        self._thread_error: BaseException | None = None  # that ended a thread of the door

        listening_socket.listen()
        self._thread = guarded("door", self._accept_all, self._thread_failed)

    def __enter__(self: DoorType) -> DoorType:
        return self

    def __exit__(self, *error: object) -> None:
        self._is_closed = True
        shut_down(self._listening_socket)  # this wakes its thread
        self._thread.join()
        self._listening_socket.close()

        while (greeted := self.accept(0.0)) is not None:
            greeted.connection.close()

    def reach(self, name: str) -> socket.socket:
        """Connect to the door of this name; raises OSError."""
        raise NotImplementedError

    def accept(self, seconds: float = POLL_SECONDS) -> Greeted | None:
        """Return the next peer of this membership, or None if there is none after `seconds`."""
        if self._thread_error:
            raise self._thread_error
        try:
            return self._greeted_peers.get(timeout=seconds)
        except Empty:
            return None

    def _accept_next(self) -> socket.socket:
        """Accept the next connection; raises OSError."""
        connection, _ = self._listening_socket.accept()
        return connection

    def _accept_all(self) -> None:
        while True:
            try:
                connection = self._accept_next()
            except OSError:  # the peer has disconnected, or too many files are open
                if self._is_closed:
                    return
                time.sleep(POLL_SECONDS)
                continue

            self._strangers.append(connection)
            if len(self._strangers) > MAX_STRANGERS:
                shut_down(self._strangers.popleft())
            guarded("greeting", partial(self._read_greeting, connection), self._thread_failed)

    def _thread_failed(self, thread_name: str, error: BaseException) -> None:
        self._thread_error = error

    def _read_greeting(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(BRIEF_TIMEOUT)
            mark, membership, wire_kind, peer = GREETING.unpack(_read_bytes(connection, GREETING.size))
            connection.settimeout(None)
        except (OSError, struct.error):
            mark, membership = b"", 0

        with suppress(ValueError):  # it may have been removed as the oldest stranger
            self._strangers.remove(connection)

        if (mark, membership) == (MARK, self.membership):
            self._greeted_peers.put(Greeted(connection, wire_kind, peer))
        else:
            connection.close()


class FolderDoor(Door):
    """A door in a private folder of one machine. Paths use the folder's descriptor, as its name may be too long."""

    def __init__(self, folder: str, membership: int) -> None:
        self.name = f"door-{membership}-{os.getpid()}"
        self._folder_descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        listening_socket = socket.socket(socket.AF_UNIX)
        listening_socket.bind(self._path_of(self.name))
        super().__init__(membership, listening_socket)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        with suppress(OSError):  # the folder may have been removed
            os.unlink(self.name, dir_fd=self._folder_descriptor)
        os.close(self._folder_descriptor)

    def reach(self, name: str) -> socket.socket:
        return _connected_to(socket.socket(socket.AF_UNIX), self._path_of(name))

    def _path_of(self, name: str) -> str:
        return f"/proc/self/fd/{self._folder_descriptor}/{name}"


class BoardDoor(Door):
    """A door at one address of a board. With keys, connections are encrypted and open to the cluster's boards only.

    A connection breaks if what it sends is not acknowledged within `patience` seconds, since a dead cable between two
    boards may stop no heartbeat; 0: the system's time, about 15 minutes.
    """

    def __init__(self, address: str, keys: Keys | None, membership: int, port: int = 0, patience: float = 0.0
                 ) -> None:
        self._keys, self._patience = keys, patience
        listening_socket = socket.create_server((address, port))
        self.port = listening_socket.getsockname()[1]
        self.name = f"{address}:{self.port}"
        super().__init__(membership, listening_socket)

    def reach(self, name: str) -> socket.socket:
        address, _, port = name.rpartition(":")
        connection = socket.socket()
        connection.settimeout(BRIEF_TIMEOUT)
        connection = _connected_to(connection, (address, int(port)))

        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        milliseconds = min(round(1000 * self._patience), MOST_MILLISECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)

        if self._keys:
            connection = encrypted(connection, self._keys.client, server=False)
        return connection

    def _accept_next(self) -> socket.socket:
        connection = super()._accept_next()
        return encrypted(connection, self._keys.server, server=True) if self._keys else connection


def _connected_to(connection: socket.socket, socket_address: Any) -> socket.socket:
    try:
        connection.connect(socket_address)
    except OSError:
        connection.close()
        raise
    return connection


def _read_bytes(connection: socket.socket, num_bytes: int) -> bytes:
    """Read this number of bytes; fewer if the connection ends."""
    data = b""
    while len(data) < num_bytes and (next_bytes := connection.recv(num_bytes - len(data))):
        data += next_bytes
    return data


def shut_down(connection: socket.socket) -> None:
    """Shut a connection down, without ending its encryption first; this wakes waiting threads at both ends."""
    with suppress(OSError):  # it may be closed already
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _wire_ends(links: Iterable[Sequence[Sequence[int]]]) -> set[tuple[int, int]]:
    """Return the kind of each wire of all links, and the rank at its other end."""
    return {(wire_kind, peer) for link in links for wire_kind, ranks in enumerate(link) for peer in ranks}


class Connections:
    """All connections of one rank in a membership."""

    def __init__(self, rank: int, peers: Sequence[Peers]) -> None:
        self._rank = rank
        self._open_sockets: list[socket.socket] = []
        self.wires = [SocketWire() for _ in WIRES]
        self.outgoing = _wire_ends(each.send_to for each in peers)
        self.missing = _wire_ends(each.receive_from for each in peers)

    def reach(self, door: Door, wire_kind: int, peer: int, door_name: str) -> None:
        """Connect to a peer at the door of this name; raises PeerLost if that fails."""
        try:
            connection = door.reach(door_name)
            self._open_sockets.append(connection)
            self.wires[wire_kind].outgoing[peer] = connection

            connection.sendall(GREETING.pack(MARK, door.membership, wire_kind, self._rank))
            connection.settimeout(None)
        except (OSError, ValueError) as error:
            raise broken_connection(peer) from error

    def accept(self, door: Door) -> None:
        """Accept the next missing peer, if one connects soon."""
        greeted = door.accept()
        if greeted is None:
            return

        connection, wire_kind, peer = greeted
        if (wire_kind, peer) in self.missing:
            self.missing.remove((wire_kind, peer))
            self._open_sockets.append(connection)
            self.wires[wire_kind].incoming[peer] = connection
        else:
            connection.close()

    def cut(self) -> None:
        """Shut all connections down, so that waiting threads and peers notice."""
        for connection in self._open_sockets:
            shut_down(connection)

    def close(self) -> None:
        """Close the connections; no thread may wait for them any more."""
        for connection in self._open_sockets:
            connection.close()
