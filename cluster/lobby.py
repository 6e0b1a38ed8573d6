"""Where boards with keys of a cluster wait on rank 0, until all that are expected have come."""
from __future__ import annotations

import os
import socket
import time

from cluster.agreement import Junk
from cluster.board import Line
from cluster.discovery import plain_name
from cluster.keys import Keys, name_of
from cluster.sockets import BRIEF_TIMEOUT, BoardDoor, shut_down
from cluster.store import GREETING_BYTES, rank_of_greeting
from config.console import say

RETURN_SECONDS = 25.0  # for boards that took part before, or have just got their keys
SILENT_SECONDS = 60.0  # without a line after which a board counts as lost
POLL_SECONDS = 0.1


class LinePeer:
    """The program at the other end of a socket, which answers each line with a line."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._lines = connection, connection.makefile("rb")

    def ask(self, text: str) -> bytes:
        """Send a line and return the answer's line."""
        self._connection.sendall(text.encode() + b"\n")
        return self.line()

    def line(self) -> bytes:
        """Return the next line; raises ValueError at the end."""
        line = self._lines.readline()
        if not line:
            raise ValueError("it has gone")
        return line.strip()


class Guest(LinePeer):
    """A board with keys that has come."""

    def __init__(self, connection: socket.socket) -> None:
        """Read its greeting; raises Junk for anything else, and OSError without a key of this cluster."""
        super().__init__(connection)
        self.address = str(connection.getpeername()[0])

        connection.settimeout(BRIEF_TIMEOUT)
        if rank_of_greeting(self._lines.readline(GREETING_BYTES)):
            raise Junk("it has a rank already")
        connection.settimeout(SILENT_SECONDS)
        self.name = plain_name(name_of(connection))

    def with_layers(self, num_layers: int) -> Line:
        """Return it as a line of a hosts file, with the layers that it holds."""
        return Line(self.address, name=self.name, layers=str(num_layers))

    def close(self) -> None:
        """Let it go; it comes again for the run."""
        shut_down(self._connection)


class Lobby(BoardDoor):
    """Where boards with keys of the cluster wait until all have come."""

    def __init__(self, address: str, port: int, keys: Keys) -> None:
        self._guests: dict[str, Guest] = {}  # by name
        super().__init__(address, keys, 0, port)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for guest in self._guests.values():
            guest.close()

    def wait_for(self, names: set[str]) -> list[Guest]:
        """Return the boards that are here, once these have come, or after a while; raises ValueError without any."""
        missing_names = names - self._guests.keys()
        if missing_names:
            say(f"waiting for {', '.join(sorted(missing_names))}, up to {RETURN_SECONDS:g} seconds")

        waits_until = time.monotonic() + RETURN_SECONDS
        while names - self._guests.keys() and time.monotonic() < waits_until:
            time.sleep(POLL_SECONDS)

        if not self._guests:
            raise ValueError("no board has come: type bash run_worker.sh on another machine of this network, and here "
                             "its code; one with keys of another cluster, or in a run now, is not found")
        return [guest for _, guest in sorted(self._guests.items())]

    def _read_greeting(self, connection: socket.socket) -> None:
        try:
            guest = Guest(connection)
            self._strangers.remove(connection)
            self._guests[guest.name] = guest
        except (OSError, ValueError):  # a stranger
            connection.close()


def opened_lobby(address: str, port: int, keys: Keys) -> Lobby:
    """Return the open lobby; raises ValueError if its port is taken."""
    try:
        return Lobby(address, port, keys)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise ValueError(f"port {port} of {address} cannot be used ({reason}): end the run that uses it, or choose "
                         "another with master=:PORT") from None
