"""Connections between the processes of one machine: sockets in a private folder, one for each direction and kind.

They carry bytes, and know nothing about messages. Each begins with a greeting, which says who sends what in which epoch
of the links. All of an epoch are made at once, and cut at once; then threads that wait at one of them go on.
"""
from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from types import TracebackType
from typing import Any, Sequence

import torch
from torch import Tensor

from pipeline.failure import PeerLost
from pipeline.transport import Peers

GREETING = struct.Struct("=8s3q")  # a mark, the epoch, the kind of the connection, and who sends over it
MARK = b"flowspec"
DATA, CONTROL = 0, 1  # kinds
LOOK = 0.02  # seconds to wait for a peer to connect
BRIEF = 2.0  # seconds for a greeting


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
            with suppress(OSError):  # it is broken already
                connection.shutdown(socket.SHUT_RDWR)

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
    """Where a rank lets its peers in, in one epoch. An open folder stands for its own name, which may be too long."""

    def __init__(self, folder: str, epoch: int) -> None:
        self.epoch, self.name = epoch, f"door-{epoch}-{os.getpid()}"
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(self._path(self.name))
        self._listening.listen()
        self._listening.settimeout(LOOK)

    def __enter__(self) -> Door:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self._listening.close()
        with suppress(OSError):  # the folder may be gone
            os.unlink(self.name, dir_fd=self._folder)
        os.close(self._folder)

    def reach(self, name: str) -> socket.socket:
        """A connection to the rank whose door has this name; raises OSError."""
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(self._path(name))
        except OSError:
            connection.close()
            raise
        return connection

    def let_in(self) -> tuple[socket.socket, int, int] | None:
        """A connection from a peer of this epoch, its kind and the peer; None if there is none after `LOOK` seconds."""
        try:
            connection, _ = self._listening.accept()
        except OSError:
            return None
        try:
            connection.settimeout(BRIEF)
            mark, epoch, kind, peer = GREETING.unpack(connection.recv(GREETING.size, socket.MSG_WAITALL))
            connection.settimeout(None)
        except (OSError, struct.error):
            mark, epoch = b"", 0
        if (mark, epoch) == (MARK, self.epoch):
            return connection, kind, peer
        connection.close()
        return None

    def _path(self, name: str) -> str:
        return f"/proc/self/fd/{self._folder}/{name}"


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
        except OSError as error:
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
