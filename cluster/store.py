"""The store of a run on several hosts: its entries and server in rank 0's process, and the clients of the ranks.

It replaces torch's TCPStore, which listens on every interface, lets everybody write and delete, and does not record
the writer of an entry, which cannot be found in any other way before torch 2. A request and its reply are a line of
JSON each. The module knows nothing about the meaning of entries: `agreement.py` has their forms.
"""
from __future__ import annotations

import base64
import json
import math
import socket
import ssl
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, BinaryIO, Callable, Iterable, Sequence

import torch.distributed as dist

from cluster.agreement import COUNT_LIMIT, ENTRY_BYTES, MOST_RANKS, Junk, clean, owner_of, parse
from cluster.keys import Keys, encrypted
from cluster.sockets import BRIEF_TIMEOUT, BoardDoor, shut_down
from config.console import say
from config.failure import PeerLost
from config.files import fits
from config.schema.untrusted import one_line

GREETING = "flowspec"  # the first word of a connection; its rank follows
LINE = 6 * ENTRY_BYTES + 1024  # the most bytes of a request: JSON writes a byte of an entry with at most six
KEY = 300  # the most characters of a key
ALL = 1 << 26  # the most bytes of all entries together
NEAR = 0.3  # seconds in which the system of a board responds, whatever its programs do
STAY = 30  # the most seconds that a rank waits for an entry, whatever torch's own timeout
PAUSE = 0.01  # seconds between two checks for an entry
GREETING_BYTES = 256
NAMED = 8  # the most strangers that are reported
LOOK = 0.05  # seconds between two checks of which ranks are connected
REQUEST = str, lambda key: isinstance(key, str) and len(key) <= KEY, object  # an operation, a key and a value
REPLY = str, object
PIECE = lambda word: word == "piece", str, lambda offset: type(offset) is int and 0 <= offset < COUNT_LIMIT
Ask = Callable[[str, str, Any], Any]  # from an operation, a key and a value to the reply
ReadPiece = Callable[[int, str, int], bytes]  # from a rank, a file's name and an offset to its next bytes


class Entries:
    """The entries of the store, and their owners."""

    def __init__(self) -> None:
        self._entries: dict[str, bytes] = {}
        self._owners: dict[str, int] = {}
        self._bytes = 0  # of all entries and their keys
        self._lock = threading.Lock()

    def reply(self, writer: int, request: Any) -> Any:
        """Execute a rank's request and return the reply; raises Junk for an unknown or forbidden request."""
        if not fits(request, REQUEST):
            raise Junk("it is no request")
        what, key, value = request
        with self._lock:
            if what == "look":
                found = self._entries.get(key)
                return None if found is None else found.decode("latin-1")
            if what == "set" and type(value) is str:
                try:
                    return self._put(writer, key, value.encode("latin-1"))
                except UnicodeEncodeError:
                    raise Junk(f"{one_line(key)}: it is not bytes") from None
            if what == "add" and type(value) is int and abs(value) < COUNT_LIMIT:
                return self._add(writer, key, value)
        raise Junk(f"{one_line(key)}: the operation is unknown")

    def own(self, *request: Any) -> Any:
        """Execute a request of rank 0, which has the store in its own process, and return the reply."""
        try:
            return self.reply(0, list(request))
        except Junk as junk:
            raise RuntimeError(f"rank 0 cannot write this: {junk}") from None

    def _add(self, writer: int, key: str, amount: int) -> int:
        """Add to a counter and return its new value; everybody may add 0, which only reads it."""
        held = self._entries.get(key, b"0")
        try:
            total = int(held) + amount
        except ValueError:
            raise Junk(f"{one_line(key)}: it is not a counter") from None
        if abs(total) >= COUNT_LIMIT:
            raise Junk(f"{one_line(key)}: it grows too large")
        if amount:
            self._put(writer, key, b"%d" % total, shared=True)
        return total

    def _put(self, writer: int, key: str, raw: bytes, shared: bool = False) -> None:
        """Write an entry; `shared`: the first writer does not own it."""
        owner = owner_of(key)
        if owner is None and not shared:
            owner = self._owners.get(key, writer)
        if owner not in (None, writer):
            raise Junk(f"{one_line(key)}: it belongs to rank {owner}")
        entry = clean(key, raw)
        held = self._entries.get(key)
        more = len(entry) + (len(key) if held is None else -len(held))
        if self._bytes + more > ALL:
            raise Junk("the store is full")
        self._bytes += more
        self._entries[key] = entry
        self._owners[key] = writer


# --- the server, in rank 0's process: it has a seat for each rank, and rejects all others -----------------------------

@dataclass
class Seat:
    """The connection of a rank, the address from which it came, and the time of its last request."""

    way: socket.socket
    address: str
    heard: float = field(default_factory=time.monotonic)

    def is_gone(self, patience: float) -> bool:
        """Whether the rank has disconnected, or was silent for more than `patience` seconds."""
        return self.way.fileno() < 0 or time.monotonic() - self.heard > patience


class StoreServer(BoardDoor):
    """Rank 0's end of the store: the first connection that names a rank gets its seat, others are rejected.

    With `patience`, a rank that has disconnected, or was silent for this many seconds, may come again, even as another
    board. If the addresses of the boards are `known`, no others are accepted.
    """

    def __init__(self, address: tuple[str, int], entries: Entries, keys: Keys | None = None) -> None:
        self.entries = entries
        self.seats: dict[int, Seat] = {}  # by rank
        self.patience: float | None = None
        self.known: set[str] = set()  # addresses of boards; empty: any
        self.read_piece: ReadPiece | None = None  # of a rank's part of the model; None: no parts are sent
        self._named: set[str] = set()  # addresses of strangers that were reported
        self._lock = threading.Lock()
        super().__init__(address[0], keys, 0, address[1])

    def close(self, patience: float, awaited: Iterable[int] = ()) -> None:
        """End the store once the `awaited` ranks have come and all have disconnected, or after `patience` seconds."""
        with self:
            end = time.monotonic() + patience
            while time.monotonic() < end and self.seats.keys() | awaited != {*self.gone()}:
                time.sleep(LOOK)
        seated = [seat.way for seat in self.seats.values()]
        for way in [*self._strangers, *seated]:
            shut_down(way)

    def gone(self, patience: float = math.inf) -> list[int]:
        """Return the ranks that have disconnected, or were silent for more than `patience` seconds."""
        return sorted(rank for rank, seat in list(self.seats.items()) if seat.is_gone(patience))

    def report(self, address: str, what: str) -> None:
        """Report what a stranger wrote: once for each address, and for at most `NAMED` addresses."""
        with self._lock:
            if address in self._named or len(self._named) >= NAMED:
                return
            self._named.add(address)
        say(f"{address} sent data to port {self.port} that is not part of this run ({what}); it is ignored", "\n")

    def _read_greeting(self, connection: socket.socket) -> None:
        with suppress(OSError), connection, connection.makefile("rb") as lines:  # it may disconnect, or send nothing
            try:
                address = str(connection.getpeername()[0])
                connection.settimeout(BRIEF_TIMEOUT)
                self._serve(connection, lines, address)
            except Junk as junk:
                self.report(address, str(junk))
            finally:
                self._remove_stranger(connection)

    def _remove_stranger(self, connection: socket.socket) -> bool:
        """Remove a connection from the strangers; return whether it was one."""
        with suppress(ValueError):
            self._strangers.remove(connection)
            return True
        return False

    def _serve(self, connection: socket.socket, lines: BinaryIO, address: str) -> None:
        """Give a connection the seat of the rank that it names, if that is free, and reply until it disconnects.

        Raises Junk for a greeting that names no rank, or for an unknown address.
        """
        try:
            greeting = lines.readline(GREETING_BYTES)
        except ssl.SSLError:
            raise Junk("it has no key of this cluster") from None
        if not greeting:
            return
        rank = rank_of_greeting(greeting)
        if self.known and address not in self.known:
            raise Junk("without keys only boards of the hosts file and of the start are accepted")
        if not self._remove_stranger(connection):
            return  # it was disconnected just now, and will come again
        seat = Seat(connection, address)
        holder = self._take_seat(rank, seat)
        _send(connection, "taken" if holder else "welcome", holder)
        if holder:
            return
        connection.settimeout(None)
        while line := lines.readline(LINE):
            seat.heard = time.monotonic()
            try:
                _send(connection, "ok", self._reply(rank, parse(line)))
            except Junk as junk:
                self.report(address, f"as rank {rank}: {junk}")
                _send(connection, "junk", str(junk))
            if not line.endswith(b"\n"):
                return

    def _reply(self, rank: int, request: Any) -> Any:
        """Execute a rank's request, and return the reply; raises Junk."""
        if self.read_piece is None or not fits(request, PIECE):
            return self.entries.reply(rank, request)
        _, file_name, offset = request
        return base64.b64encode(self.read_piece(rank, file_name, offset)).decode()

    def _take_seat(self, rank: int, seat: Seat) -> str:
        """Give a rank this seat if it has none, or a lost one; else return the address of the present holder."""
        with self._lock:
            before = self.seats.get(rank)
            if before is not None:
                if self.patience is None or not before.is_gone(self.patience):
                    return before.address
                shut_down(before.way)
            self.seats[rank] = seat
            return ""


def _send(connection: socket.socket, word: str, value: Any) -> None:
    connection.sendall(json.dumps([word, value]).encode() + b"\n")


def rank_of_greeting(line: bytes) -> int:
    """Return the rank that a greeting names; raises Junk."""
    said = parse(line)
    if not fits(said, (str, int)) or said[0] != GREETING:
        raise Junk("it is no rank's greeting")
    number = int(said[1])
    if not 0 < number < MOST_RANKS:
        raise Junk(f"there is no rank {number}")
    return number


# --- the clients ------------------------------------------------------------------------------------------------------

class StoreClient:
    """The client of the store on every rank but 0. Any failure of it is reported as the loss of rank 0."""

    def __init__(self, address: tuple[str, int], names: tuple[str, str], patience: float, keys: Keys | None = None
                 ) -> None:
        self.names = names  # of rank 0 and of this rank, for messages
        self.patience = patience  # seconds for a reply
        self._address = address
        self.ended = False  # whether rank 0's program has ended
        self._lost = ""  # why the store is lost, if it is
        self._lock = threading.Lock()
        self._way = socket.create_connection(address, timeout=patience)
        self._way.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if keys:
            self._way = encrypted(self._way, keys.client, server=False)
        self._replies = self._way.makefile("rb")

    def greet(self, rank: int) -> str:
        """Take the seat of a rank. Returns the address that has it already, if any. OSError may be temporary."""
        try:
            word, holder = self._swap([GREETING, rank])
        except socket.timeout:
            raise PeerLost(self._silence()) from None
        return one_line(str(holder)) if word == "taken" else ""

    def ask(self, what: str, key: str, value: Any) -> Any:
        """Return the reply to a request; raises RuntimeError if it is refused, and PeerLost if the store is gone."""
        with self._lock:
            if not self._lost:
                try:
                    word, found = self._swap([what, key, value])
                except socket.timeout:
                    self._lost = self._silence()
                except OSError:
                    self.ended = True
                    self._lost = f"{self.names[0]} was lost: its program has ended, and says why on its board"
            if self._lost:
                raise PeerLost(self._lost)
        if word != "ok":
            raise RuntimeError(f"{self.names[0]} refuses this rank's entry: {one_line(str(found))}")
        return found

    def piece(self, file_name: str, offset: int) -> bytes:
        """Return the next bytes of a file of this rank's part of the model, which rank 0 has; none at its end."""
        piece = self.ask("piece", file_name, offset)
        try:
            return base64.b64decode(str(piece), validate=True)
        except ValueError:
            raise PeerLost(f"{self.names[0]} sent something else than a piece of a file") from None

    def close(self) -> None:
        """Leave the seat."""
        shut_down(self._way)

    def _swap(self, request: Sequence[Any]) -> Sequence[Any]:
        self._way.settimeout(self.patience)
        self._way.sendall(json.dumps(request).encode() + b"\n")
        line = self._replies.readline(LINE)
        if not line:
            raise ConnectionError("it disconnected, as a board with keys does from one without")
        with suppress(Junk):
            reply: Sequence[Any] = parse(line)
            if fits(reply, REPLY):
                return reply
        where = ":".join(map(str, self._address))
        self._lost = (f"what answers at {where} is not the store of {self.names[0]}: give all boards another port, as "
                      "MASTER_PORT=29501")
        raise PeerLost(self._lost)

    def _silence(self) -> str:
        """Return why no reply came: a board accepts connections even if its program hangs, but not over a cut wire."""
        try:
            socket.create_connection(self._address, timeout=NEAR).close()
        except OSError:
            return (f"{self.names[1]} could not reach the machine of {self.names[0]} for {self.patience:g} seconds: "
                    "look at the network of both")
        return (f"{self.names[0]} was lost: its board answers, but its program does not: it hangs, or was stopped "
                "there (SIGSTOP)")


class Store(dist.Store):
    """The store as torch.distributed, the heartbeat and the rendezvous use it.

    It returns no entry that lacks the form of its kind.
    """

    def __init__(self, ask: Ask) -> None:
        super().__init__()
        self._ask = ask

    def set(self, key: str, value: Any) -> None:
        raw = value.encode() if isinstance(value, str) else bytes(value)
        self._ask("set", key, raw.decode("latin-1"))

    def add(self, key: str, amount: int) -> int:
        total = self._ask("add", key, amount)
        if type(total) is not int:
            raise PeerLost(f"the store returned no count: {one_line(str(total))}")
        return total

    def look(self, key: str) -> bytes | None:
        """Return an entry, or None if it is missing."""
        found = self._ask("look", key, None)
        try:
            return None if found is None else clean(key, str(found).encode("latin-1"))
        except ValueError as error:
            raise PeerLost(f"the store holds junk: {one_line(str(error))}") from None

    def get(self, key: str) -> bytes:
        """Wait for an entry, and return it."""
        self.wait([key])
        return self.look(key) or b""

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._ask("look", key, None) is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        end = time.monotonic() + STAY
        while not self.check(keys):
            if time.monotonic() > end:
                raise PeerLost(f"{one_line(keys[0])} has not come within {STAY} seconds: a board was lost in the "
                               "rendezvous, or has another version of torch")
            time.sleep(PAUSE)
