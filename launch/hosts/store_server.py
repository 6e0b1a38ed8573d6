"""The server of the store, in rank 0's process: it has a seat for each rank, and sends all others away.

It knows nothing about what ranks write: `store.py` keeps it, and has the ends at which they do.
"""
from __future__ import annotations

import json
import socket
import socketserver
import sys
import threading
import time
from typing import Any

from launch.console import say
from launch.hosts.entries import RANKS, Junk, parse
from launch.hosts.store import GREETING, LINE, Entries

GREETING_BYTES = 256
WHILE = 5  # seconds for a stranger to say who it is
STRANGERS = 64  # that may be connected at once; the oldest goes first
NAMED = 8  # strangers that are reported
LOOK = 0.05  # seconds between two looks at who is connected


class StoreServer(socketserver.ThreadingTCPServer):
    """Rank 0's end of the store: the first to name a rank has its seat, the others are sent away."""

    allow_reuse_address = daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], entries: Entries) -> None:
        self.entries = entries
        self.seats: dict[int, str] = {}  # of each rank the address from which it came
        self._connected: set[Any] = set()  # all connections
        self._strangers: dict[Any, None] = {}  # those that have not said who they are, the oldest first
        self._named: set[str] = set()  # addresses of strangers that were reported
        self._lock = threading.Lock()
        super().__init__(address, StoreConnection)
        threading.Thread(target=self.serve_forever, name="store", daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._connected.add(request)
            self._strangers[request] = None
            oldest = next(iter(self._strangers)) if len(self._strangers) > STRANGERS else None
        if oldest is not None and self.forget(oldest):
            hang_up(oldest)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connected.discard(request)
        super().shutdown_request(request)

    def close(self, patience: float) -> None:
        """End the store and leave its port, once all ranks have hung up; after `patience` seconds they are made to."""
        end = time.monotonic() + patience
        while self._ranks() and time.monotonic() < end:
            time.sleep(LOOK)
        self.shutdown()
        self.server_close()
        with self._lock:
            left = list(self._connected)
        for request in left:
            hang_up(request)

    def _ranks(self) -> int:
        with self._lock:
            return len(self._connected - self._strangers.keys())

    def forget(self, request: Any) -> bool:
        """Take a connection off the strangers; whether it was one until now."""
        with self._lock:
            return self._strangers.pop(request, self) is None

    def seat(self, rank: int, address: str) -> str:
        """The address that has a rank's seat already; empty if it is this one's from now on."""
        with self._lock:
            holder = self.seats.get(rank, "")
            self.seats.setdefault(rank, address)
        return holder

    def report(self, address: str, what: str) -> None:
        """Report that a stranger wrote something: once for each address, and of `NAMED` addresses at most."""
        with self._lock:
            if address in self._named or len(self._named) >= NAMED:
                return
            self._named.add(address)
        say(f"{address} wrote to port {self.server_address[1]} what is not of this run ({what}); it is ignored", "\n")

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # it hung up, or said nothing for too long
            super().handle_error(request, client_address)


class StoreConnection(socketserver.StreamRequestHandler):
    """One connection to the store, on a thread of its own."""

    server: StoreServer
    timeout = WHILE
    disable_nagle_algorithm = True

    def handle(self) -> None:
        address = str(self.client_address[0])
        try:
            greeting = self.rfile.readline(GREETING_BYTES)
            if not greeting:
                return
            rank = greeted(greeting)
            if not self.server.forget(self.request):
                return  # it was sent away just now, and will come again
            holder = self.server.seat(rank, address)
            self._say("taken" if holder else "welcome", holder)
            if not holder:
                self.request.settimeout(None)
                self._serve(rank, address)
        except Junk as junk:
            self.server.report(address, str(junk))

    def finish(self) -> None:
        self.server.forget(self.request)
        super().finish()

    def _serve(self, rank: int, address: str) -> None:
        while line := self.rfile.readline(LINE):
            try:
                self._say("ok", self.server.entries.reply(rank, parse(line)))
            except Junk as junk:
                self.server.report(address, f"as rank {rank}: {junk}")
                self._say("junk", str(junk))
            if not line.endswith(b"\n"):
                return

    def _say(self, word: str, value: Any) -> None:
        self.wfile.write(json.dumps([word, value]).encode() + b"\n")


def greeted(line: bytes) -> int:
    """The rank that a greeting names; raises Junk."""
    said = parse(line)
    if type(said) is not list or len(said) != 2:
        raise Junk("it is no rank's greeting")
    word, number = said
    if word != GREETING or type(number) is not int:
        raise Junk("it is no rank's greeting")
    if not 0 < number < RANKS:
        raise Junk(f"there is no rank {number}")
    return int(number)


def hang_up(way: socket.socket) -> None:
    try:
        way.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it is gone already
