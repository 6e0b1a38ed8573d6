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

from cluster.agreement import COUNT_LIMIT, MAX_ENTRY_BYTES, MAX_RANKS, Junk, clean, owner_of, parse
from cluster.keys import Keys, encrypted, name_of
from cluster.sockets import BRIEF_TIMEOUT, BoardDoor, shut_down
from config.console import say
from config.failure import PeerLost
from config.files import fits
from config.schema.untrusted import one_line

GREETING = "flowspec"  # the first word of a connection; its rank follows
MAX_LINE_BYTES = 6 * MAX_ENTRY_BYTES + 1024  # JSON writes a byte of an entry with at most six
MAX_KEY_LENGTH = 300
MAX_STORE_BYTES = 1 << 26  # of all entries together
RESPONSE_SECONDS = 0.3  # in which the system of a board responds, whatever its programs do
WAIT_SECONDS = 30  # the most that a rank waits for an entry, whatever torch's own timeout
POLL_SECONDS = 0.01  # between two checks for an entry
GREETING_BYTES = 256
MAX_REPORTED_STRANGERS = 8
SEAT_POLL_SECONDS = 0.05  # between two checks of which ranks are connected
# an operation, a key and a value
REQUEST_FORM = str, lambda key: isinstance(key, str) and len(key) <= MAX_KEY_LENGTH, object
REPLY_FORM = str, object
# "piece", a file's name and an offset
PIECE_FORM = (lambda operation: operation == "piece", str,
              lambda offset: type(offset) is int and 0 <= offset < COUNT_LIMIT)
Ask = Callable[[str, str, Any], Any]  # from an operation, a key and a value to the reply
ReadRankPiece = Callable[[int, str, int], bytes]  # from a rank, a file's name and an offset to its next bytes


class Entries:
    """The entries of the store, and their owners."""

    def __init__(self) -> None:
        self._entries: dict[str, bytes] = {}
        self._owner_of_key: dict[str, int] = {}
        self._num_bytes = 0  # of all entries and their keys
        self._entries_lock = threading.Lock()

    def reply(self, writer: int, request: Any) -> Any:
        """Execute a rank's request and return the reply; raises Junk for an unknown or forbidden request."""
        if not fits(request, REQUEST_FORM):
            raise Junk("it is no request")

        operation, key, value = request
        with self._entries_lock:
            if operation == "look":
                entry = self._entries.get(key)
                return None if entry is None else entry.decode("latin-1")
            if operation == "set" and type(value) is str:
                try:
                    return self._put(writer, key, value.encode("latin-1"))
                except UnicodeEncodeError:
                    raise Junk(f"{one_line(key)}: it is not bytes") from None
            if operation == "add" and type(value) is int and abs(value) < COUNT_LIMIT:
                return self._add(writer, key, value)
        raise Junk(f"{one_line(key)}: the operation is unknown")

    def reply_to_root(self, *request: Any) -> Any:
        """Execute a request of rank 0, which has the store in its own process, and return the reply."""
        try:
            return self.reply(0, list(request))
        except Junk as junk:
            raise RuntimeError(f"rank 0 cannot write this: {junk}") from None

    def _add(self, writer: int, key: str, amount: int) -> int:
        """Add to a counter and return its new value; everybody may add 0, which only reads it."""
        old_entry = self._entries.get(key, b"0")
        try:
            total = int(old_entry) + amount
        except ValueError:
            raise Junk(f"{one_line(key)}: it is not a counter") from None

        if abs(total) >= COUNT_LIMIT:
            raise Junk(f"{one_line(key)}: it grows too large")
        if amount:
            self._put(writer, key, b"%d" % total, is_shared=True)
        return total

    def _put(self, writer: int, key: str, raw: bytes, is_shared: bool = False) -> None:
        """Write an entry; `is_shared`: the first writer does not own it."""
        owner = owner_of(key)
        if owner is None and not is_shared:
            owner = self._owner_of_key.get(key, writer)
        if owner not in (None, writer):
            raise Junk(f"{one_line(key)}: it belongs to rank {owner}")

        entry = clean(key, raw)
        old_entry = self._entries.get(key)
        num_more_bytes = len(entry) + (len(key) if old_entry is None else -len(old_entry))
        if self._num_bytes + num_more_bytes > MAX_STORE_BYTES:
            raise Junk("the store is full")

        self._num_bytes += num_more_bytes
        self._entries[key] = entry
        self._owner_of_key[key] = writer


# --- the server, in rank 0's process: it has a seat for each rank, and rejects all others -----------------------------

@dataclass
class Seat:
    """The connection of a rank, the address from which it came, and the time of its last request."""

    connection: socket.socket
    address: str
    last_heard: float = field(default_factory=time.monotonic)

    def is_gone(self, patience: float) -> bool:
        """Whether the rank has disconnected, or was silent for more than `patience` seconds."""
        return self.connection.fileno() < 0 or time.monotonic() - self.last_heard > patience


class StoreServer(BoardDoor):
    """Rank 0's end of the store: the first connection that names a rank gets its seat, others are rejected.

    With `patience`, a rank that has disconnected, or was silent for this many seconds, may come again, even as another
    board. If there are `board_addresses`, no others are accepted.
    """

    def __init__(self, address: tuple[str, int], entries: Entries, keys: Keys | None = None) -> None:
        self.entries = entries
        self.seats: dict[int, Seat] = {}  # by rank
        self.patience: float | None = None
        self.board_addresses: set[str] = set()  # empty: any
        self.rank_of_name: dict[str, int] = {}  # of boards that ask for their ranks, by the names of their certificates
        self.read_piece: ReadRankPiece | None = None  # of a rank's part of the model; None: no parts are sent
        self._reported_addresses: set[str] = set()  # of strangers
        self._seats_lock = threading.Lock()
        super().__init__(address[0], keys, 0, address[1])

    def close(self, patience: float, awaited: Iterable[int] = ()) -> None:
        """End the store once the `awaited` ranks have come and all have disconnected, or after `patience` seconds."""
        with self:
            deadline = time.monotonic() + patience
            while time.monotonic() < deadline and self.seats.keys() | awaited != {*self.gone_ranks()}:
                time.sleep(SEAT_POLL_SECONDS)

        seated = [seat.connection for seat in self.seats.values()]
        for connection in [*self._strangers, *seated]:
            shut_down(connection)

    def gone_ranks(self, patience: float = math.inf) -> list[int]:
        """Return the ranks that have disconnected, or were silent for more than `patience` seconds."""
        return sorted(rank for rank, seat in list(self.seats.items()) if seat.is_gone(patience))

    def report(self, address: str, reason: str) -> None:
        """Report why a stranger's data is junk: once for each of at most `MAX_REPORTED_STRANGERS` addresses."""
        with self._seats_lock:
            if address in self._reported_addresses or len(self._reported_addresses) >= MAX_REPORTED_STRANGERS:
                return
            self._reported_addresses.add(address)
        say(f"{address} sent data to port {self.port} that is not part of this run ({reason}); it is ignored", "\n")

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
        if not rank:
            if self._keys is None:
                raise Junk("there is no rank 0")
            _send(connection, "rank", self.rank_of_name.get(name_of(connection), 0))
            return
        if self.board_addresses and address not in self.board_addresses:
            raise Junk("without keys only boards of the hosts file and of the start are accepted")
        if not self._remove_stranger(connection):
            return  # it was disconnected just now, and will come again

        seat = Seat(connection, address)
        holder_address = self._take_seat(rank, seat)
        _send(connection, "taken" if holder_address else "welcome", holder_address)
        if holder_address:
            return

        connection.settimeout(None)
        while line := lines.readline(MAX_LINE_BYTES):
            seat.last_heard = time.monotonic()
            try:
                _send(connection, "ok", self._reply(rank, parse(line)))
            except Junk as junk:
                self.report(address, f"as rank {rank}: {junk}")
                _send(connection, "junk", str(junk))
            if not line.endswith(b"\n"):
                return

    def _reply(self, rank: int, request: Any) -> Any:
        """Execute a rank's request, and return the reply; raises Junk."""
        if self.read_piece is None or not fits(request, PIECE_FORM):
            return self.entries.reply(rank, request)
        _, file_name, offset = request
        return base64.b64encode(self.read_piece(rank, file_name, offset)).decode()

    def _take_seat(self, rank: int, seat: Seat) -> str:
        """Give a rank this seat if it has none, or a lost one; else return the address of the present holder."""
        with self._seats_lock:
            holder = self.seats.get(rank)
            if holder is not None:
                if self.patience is None or not holder.is_gone(self.patience):
                    return holder.address
                shut_down(holder.connection)
            self.seats[rank] = seat
            return ""


def _send(connection: socket.socket, reply_kind: str, value: Any) -> None:
    connection.sendall(json.dumps([reply_kind, value]).encode() + b"\n")


def rank_of_greeting(line: bytes) -> int:
    """Return the rank that a greeting names, 0 if it asks for one; raises Junk."""
    greeting = parse(line)
    if not fits(greeting, (str, int)) or greeting[0] != GREETING:
        raise Junk("it is no rank's greeting")
    number = int(greeting[1])
    if not 0 <= number < MAX_RANKS:
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
        self._loss_reason = ""  # if the store is lost
        self._exchange_lock = threading.Lock()
        self._connection = socket.create_connection(address, timeout=patience)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if keys:
            self._connection = encrypted(self._connection, keys.client, server=False)
        self._replies = self._connection.makefile("rb")

    def greet(self, rank: int) -> str:
        """Take the seat of a rank. Returns the address that has it already, if any. OSError may be temporary."""
        try:
            reply_kind, holder_address = self._exchange([GREETING, rank])
        except socket.timeout:
            raise PeerLost(self._reason_of_silence()) from None
        return one_line(str(holder_address)) if reply_kind == "taken" else ""

    def ask(self, operation: str, key: str, value: Any) -> Any:
        """Return the reply to a request; raises RuntimeError if it is refused, and PeerLost if the store is gone."""
        with self._exchange_lock:
            if not self._loss_reason:
                try:
                    reply_kind, reply = self._exchange([operation, key, value])
                except socket.timeout:
                    self._loss_reason = self._reason_of_silence()
                except OSError:
                    self.ended = True
                    self._loss_reason = f"{self.names[0]} was lost: its program has ended, and says why on its board"
            if self._loss_reason:
                raise PeerLost(self._loss_reason)

        if reply_kind != "ok":
            raise RuntimeError(f"{self.names[0]} refuses this rank's entry: {one_line(str(reply))}")
        return reply

    def piece(self, file_name: str, offset: int) -> bytes:
        """Return the next bytes of a file of this rank's part of the model, which rank 0 has; none at its end."""
        piece = self.ask("piece", file_name, offset)
        try:
            return base64.b64decode(str(piece), validate=True)
        except ValueError:
            raise PeerLost(f"{self.names[0]} sent something else than a piece of a file") from None

    def close(self) -> None:
        """Leave the seat."""
        shut_down(self._connection)

    def _exchange(self, request: Sequence[Any]) -> Sequence[Any]:
        self._connection.settimeout(self.patience)
        self._connection.sendall(json.dumps(request).encode() + b"\n")
        line = self._replies.readline(MAX_LINE_BYTES)
        if not line:
            raise ConnectionError("it disconnected, as a board with keys does from one without")

        with suppress(Junk):
            reply: Sequence[Any] = parse(line)
            if fits(reply, REPLY_FORM):
                return reply

        address = ":".join(map(str, self._address))
        self._loss_reason = (f"what answers at {address} is not the store of {self.names[0]}: give all boards another "
                             "port, as MASTER_PORT=29501")
        raise PeerLost(self._loss_reason)

    def _reason_of_silence(self) -> str:
        """Return why no reply came: a board accepts connections even if its program hangs, but not over a cut wire."""
        try:
            socket.create_connection(self._address, timeout=RESPONSE_SECONDS).close()
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
        entry = self._ask("look", key, None)
        try:
            return None if entry is None else clean(key, str(entry).encode("latin-1"))
        except ValueError as error:
            raise PeerLost(f"the store holds junk: {one_line(str(error))}") from None

    def get(self, key: str) -> bytes:
        """Wait for an entry, and return it."""
        self.wait([key])
        return self.look(key) or b""

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._ask("look", key, None) is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise PeerLost(f"{one_line(keys[0])} has not come within {WAIT_SECONDS} seconds: a board was lost in "
                               "the rendezvous, or has another version of torch")
            time.sleep(POLL_SECONDS)
