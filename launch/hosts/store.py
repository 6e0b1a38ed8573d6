"""The store of a run on several hosts: what rank 0's process keeps of it, its server, and the ends that ranks use.

It takes the place of torch's TCPStore, which listens on every interface, lets everybody write and delete, and cannot
say where an entry came from; before torch 2 there is no other way to know. A request and its reply are a line of JSON
each. It knows nothing about what entries mean: `agreement.py` has their form.
"""
from __future__ import annotations

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

from config.files import fits
from config.schema.untrusted import plain
from launch.console import say
from launch.hosts.agreement import COUNT_LIMIT, ENTRY_BYTES, MOST_RANKS, Junk, clean, owner_of, parse
from pipeline.failure import PeerLost
from pipeline.keys import Keys, encrypted
from pipeline.sockets import BRIEF, BoardDoor, hang_up

GREETING = "flowspec"  # the first word of a connection; its rank follows
LINE = 6 * ENTRY_BYTES + 1024  # bytes of a request: JSON writes a byte of an entry with at most six
KEY = 300  # characters of a key
ALL = 1 << 26  # bytes of all entries together
NEAR = 0.3  # seconds in which the system of a board answers, whatever its programs do
STAY = 30  # seconds that a rank waits for an entry at most, whatever torch's own patience
PAUSE = 0.01  # seconds between two looks for an entry
GREETING_BYTES = 256
NAMED = 8  # strangers that are reported
LOOK = 0.05  # seconds between two looks at who is connected
REQUEST = str, lambda key: isinstance(key, str) and len(key) <= KEY, object  # an operation, a key and a value
REPLY = str, object
Ask = Callable[[str, str, Any], Any]  # from an operation, a key and a value to the reply


class Entries:
    """The entries of the store, and who may write which."""

    def __init__(self) -> None:
        self._entries: dict[str, bytes] = {}
        self._owners: dict[str, int] = {}
        self._bytes = 0  # of all entries and their keys
        self._lock = threading.Lock()

    def reply(self, writer: int, request: Any) -> Any:
        """What a rank gets for its request; raises Junk for one that has none of the known forms, or is forbidden."""
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
                    raise Junk(f"{plain(key)}: it is no bytes") from None
            if what == "add" and type(value) is int and abs(value) < COUNT_LIMIT:
                return self._add(writer, key, value)
        raise Junk(f"{plain(key)}: nobody can do that with an entry")

    def own(self, *request: Any) -> Any:
        """What rank 0 itself gets, in whose process the store is."""
        try:
            return self.reply(0, list(request))
        except Junk as junk:
            raise RuntimeError(f"rank 0 cannot write this: {junk}") from None

    def _add(self, writer: int, key: str, amount: int) -> int:
        """The sum of all that was added to a count; everybody may add 0, which asks for it."""
        held = self._entries.get(key, b"0")
        try:
            total = int(held) + amount
        except ValueError:
            raise Junk(f"{plain(key)}: it is no count") from None
        if abs(total) >= COUNT_LIMIT:
            raise Junk(f"{plain(key)}: it grows too large")
        if amount:
            self._put(writer, key, b"%d" % total, shared=True)
        return total

    def _put(self, writer: int, key: str, raw: bytes, shared: bool = False) -> None:
        """Write an entry; `shared`: the first writer does not own it."""
        owner = owner_of(key)
        if owner is None and not shared:
            owner = self._owners.get(key, writer)
        if owner not in (None, writer):
            raise Junk(f"{plain(key)}: it belongs to rank {owner}")
        entry = clean(key, raw)
        held = self._entries.get(key)
        more = len(entry) + (len(key) if held is None else -len(held))
        if self._bytes + more > ALL:
            raise Junk("the store is full")
        self._bytes += more
        self._entries[key] = entry
        self._owners[key] = writer


# --- the server, in rank 0's process: it has a seat for each rank, and sends all others away --------------------------

@dataclass
class Seat:
    """Who is a rank: a connection, the address from which it came, and when it was heard last."""

    way: socket.socket
    address: str
    heard: float = field(default_factory=time.monotonic)

    def is_gone(self, patience: float) -> bool:
        """Whether it has hung up, or was silent for so many seconds."""
        return self.way.fileno() < 0 or time.monotonic() - self.heard > patience


class StoreServer(BoardDoor):
    """Rank 0's end of the store: the first to name a rank has its seat, the others are sent away.

    With `patience` a rank that has hung up, or was silent for so many seconds, may come again, also as another board.
    If it is known from which addresses boards come, no others are let in any more.
    """

    def __init__(self, address: tuple[str, int], entries: Entries, keys: Keys | None = None) -> None:
        self.entries = entries
        self.seats: dict[int, Seat] = {}  # by rank
        self.patience: float | None = None
        self.known: set[str] = set()  # addresses of boards; empty: any
        self._named: set[str] = set()  # addresses of strangers that were reported
        self._lock = threading.Lock()
        super().__init__(address[0], keys, 0, address[1])

    def close(self, patience: float, awaited: Iterable[int] = ()) -> None:
        """End the store once the `awaited` ranks have come and all have hung up, or after `patience` seconds."""
        with self:
            end = time.monotonic() + patience
            while time.monotonic() < end and self.seats.keys() | awaited != {*self.gone()}:
                time.sleep(LOOK)
        seated = [seat.way for seat in self.seats.values()]
        for way in [*self._strangers, *seated]:
            hang_up(way)

    def gone(self, patience: float = math.inf) -> list[int]:
        """The ranks that have hung up, or were silent for so many seconds."""
        return sorted(rank for rank, seat in list(self.seats.items()) if seat.is_gone(patience))

    def report(self, address: str, what: str) -> None:
        """Report that a stranger wrote something: once for each address, and of `NAMED` addresses at most."""
        with self._lock:
            if address in self._named or len(self._named) >= NAMED:
                return
            self._named.add(address)
        say(f"{address} wrote to port {self.port} what is not of this run ({what}); it is ignored", "\n")

    def _greet(self, connection: socket.socket) -> None:
        with suppress(OSError), connection, connection.makefile("rb") as lines:  # it may hang up, or say nothing
            try:
                address = str(connection.getpeername()[0])
                connection.settimeout(BRIEF)
                self._serve(connection, lines, address)
            except Junk as junk:
                self.report(address, str(junk))
            finally:
                self._is_stranger(connection)

    def _is_stranger(self, connection: socket.socket) -> bool:
        """Whether a connection was among the strangers, of whom it is none any more."""
        with suppress(ValueError):
            self._strangers.remove(connection)
            return True
        return False

    def _serve(self, connection: socket.socket, lines: BinaryIO, address: str) -> None:
        """Give a connection the seat of the rank that it names, if that is free, and reply until it hangs up.

        Raises Junk for what names no rank, or has an address that is not known.
        """
        try:
            greeting = lines.readline(GREETING_BYTES)
        except ssl.SSLError:
            raise Junk("it has no key of this cluster") from None
        if not greeting:
            return
        rank = greeted(greeting)
        if self.known and address not in self.known:
            raise Junk("without keys only boards of the hosts file and of the start are let in")
        if not self._is_stranger(connection):
            return  # it was sent away just now, and will come again
        seat = Seat(connection, address)
        holder = self._take_seat(rank, seat)
        _say(connection, "taken" if holder else "welcome", holder)
        if holder:
            return
        connection.settimeout(None)
        while line := lines.readline(LINE):
            seat.heard = time.monotonic()
            try:
                _say(connection, "ok", self.entries.reply(rank, parse(line)))
            except Junk as junk:
                self.report(address, f"as rank {rank}: {junk}")
                _say(connection, "junk", str(junk))
            if not line.endswith(b"\n"):
                return

    def _take_seat(self, rank: int, seat: Seat) -> str:
        """Let a rank have this seat, if it has none, or one that is lost; else the address from which it came."""
        with self._lock:
            before = self.seats.get(rank)
            if before is not None:
                if self.patience is None or not before.is_gone(self.patience):
                    return before.address
                hang_up(before.way)
            self.seats[rank] = seat
            return ""


def _say(connection: socket.socket, word: str, value: Any) -> None:
    connection.sendall(json.dumps([word, value]).encode() + b"\n")


def greeted(line: bytes) -> int:
    """The rank that a greeting names; raises Junk."""
    said = parse(line)
    if not fits(said, (str, int)) or said[0] != GREETING:
        raise Junk("it is no rank's greeting")
    number = int(said[1])
    if not 0 < number < MOST_RANKS:
        raise Junk(f"there is no rank {number}")
    return number


# --- the ends ---------------------------------------------------------------------------------------------------------

class StoreClient:
    """The end of the store on every rank but 0. Whatever breaks it is reported as the loss of rank 0, in a sentence."""

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
        """Take the seat of a rank. Returns the address that has it already, if any; OSError is worth another try."""
        try:
            word, holder = self._swap([GREETING, rank])
        except socket.timeout:
            raise PeerLost(self._silence()) from None
        return plain(str(holder)) if word == "taken" else ""

    def ask(self, what: str, key: str, value: Any) -> Any:
        """The reply to a request; raises RuntimeError if it is refused, and PeerLost if the store is gone."""
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
            raise RuntimeError(f"{self.names[0]} does not take this rank's entry: {plain(str(found))}")
        return found

    def close(self) -> None:
        """Leave the seat."""
        hang_up(self._way)

    def _swap(self, request: Sequence[Any]) -> Sequence[Any]:
        self._way.settimeout(self.patience)
        self._way.sendall(json.dumps(request).encode() + b"\n")
        line = self._replies.readline(LINE)
        if not line:
            raise ConnectionError("it hung up, as one with keys does to one without")
        with suppress(Junk):
            reply: Sequence[Any] = parse(line)
            if fits(reply, REPLY):
                return reply
        where = ":".join(map(str, self._address))
        self._lost = (f"what answers at {where} is not the store of {self.names[0]}: give all boards another port, as "
                      "MASTER_PORT=29501")
        raise PeerLost(self._lost)

    def _silence(self) -> str:
        """A board whose program stands still opens a connection nevertheless; one behind a cut wire does not."""
        try:
            socket.create_connection(self._address, timeout=NEAR).close()
        except OSError:
            return (f"{self.names[1]} could not reach the machine of {self.names[0]} for {self.patience:g} seconds: "
                    "look at the network of both")
        return (f"{self.names[0]} was lost: its board answers, but its program does not: it hangs, or was stopped "
                "there (SIGSTOP)")


class Store(dist.Store):
    """The store as torch.distributed, the heartbeat and the rendezvous use it.

    An entry that has not the form of its kind does not leave it.
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
            raise PeerLost(f"the store does not count: {plain(str(total))}")
        return total

    def look(self, key: str) -> bytes | None:
        """An entry, or None if it is not there."""
        found = self._ask("look", key, None)
        try:
            return None if found is None else clean(key, str(found).encode("latin-1"))
        except ValueError as error:
            raise PeerLost(f"the store holds junk: {plain(str(error))}") from None

    def get(self, key: str) -> bytes:
        """An entry, once it is there."""
        self.wait([key])
        return self.look(key) or b""

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._ask("look", key, None) is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        end = time.monotonic() + STAY
        while not self.check(keys):
            if time.monotonic() > end:
                raise PeerLost(f"{plain(keys[0])} has not come within {STAY} seconds: a board was lost in the "
                               "rendezvous, or has another version of torch")
            time.sleep(PAUSE)
