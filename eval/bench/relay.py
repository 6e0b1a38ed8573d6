"""A wire of a cluster in front of a server at loopback, for programs that are not ours and know no emulated wires."""
from __future__ import annotations

import socket
import time
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from threading import Thread
from typing import Iterator, Tuple

from config.profiles import Profile
from sim.wires import Wire

HERE = "127.0.0.1"
PIECE = 1 << 16  # bytes that are read at once
Parcel = Tuple[float, bytes]  # when it arrives, and what it holds


@contextmanager
def wire(port: int, profile: Profile) -> Iterator[int]:
    """A port that leads to this one over a wire of the profile: its rate each way, and its latency."""
    with socket.create_server((HERE, 0)) as door:
        Thread(target=_let_in, args=(door, port, profile), daemon=True).start()
        try:
            yield int(door.getsockname()[1])
        finally:
            door.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits at it


def _let_in(door: socket.socket, port: int, profile: Profile) -> None:
    """Carry what each caller and the server send each other, until nobody is let in any more."""
    with suppress(OSError):
        while True:
            caller, _ = door.accept()
            Thread(target=_carry, args=(caller, port, profile), daemon=True).start()


def _carry(caller: socket.socket, port: int, profile: Profile) -> None:
    """Carry what a caller and the server send each other, until both have ended."""
    with caller, socket.create_connection((HERE, port)) as server:
        threads = []
        for source, target in ((caller, server), (server, caller)):
            target.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            under_way: SimpleQueue[Parcel] = SimpleQueue()
            threads.append(Thread(target=_leave, args=(source, under_way, Wire(profile)), daemon=True))
            threads.append(Thread(target=_arrive, args=(under_way, target), daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _leave(source: socket.socket, under_way: SimpleQueue[Parcel], way: Wire) -> None:
    """Read what one end sends, and note when it arrives at the other; the last parcel is empty."""
    data = b"?"
    while data:
        data = b""
        with suppress(OSError):
            data = source.recv(PIECE)
        under_way.put((way.carried(len(data), time.monotonic()), data))


def _arrive(under_way: SimpleQueue[Parcel], target: socket.socket) -> None:
    """Hand over each parcel when its time has come."""
    data = b"?"
    while data:
        due, data = under_way.get()
        time.sleep(max(0.0, due - time.monotonic()))
        with suppress(OSError):
            if data:
                target.sendall(data)
            else:
                target.shutdown(socket.SHUT_WR)
