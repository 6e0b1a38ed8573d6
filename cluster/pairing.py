"""The keys of a new board, by a code that a person reads there and types on rank 0.

SPAKE2 (RFC 9382) makes a common secret of the code. A stranger who takes the place of one side can try one code for
each exchange, and learns nothing else. The lines: rank 0's message; the board's message, with the proof that it knows
the code; the keys, encrypted. Nothing is sent to a board without the proof.
"""
from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from base64 import urlsafe_b64encode
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO, Callable, Dict

from cluster.keys import KEY_FILES
from cluster.sockets import BRIEF_TIMEOUT, BoardDoor
from config.console import say
from config.files import fits, make_private, make_private_folder

MAX_TRIES, PAUSE_SECONDS = 3, 60  # of exchanges, before a pause
MAX_LINE_BYTES = 1 << 16
PROOF = b"flowspec board"
FILES_FORM = dict.fromkeys(KEY_FILES, str)
KeyFiles = Dict[str, str]  # their text, by name


def new_code() -> str:
    """Return a code: two digits that are announced, so that a list of codes can be given, and six secret ones."""
    return f"{secrets.randbelow(100):02}-{secrets.randbelow(10 ** 6):06}"


def plate_of(code: str) -> str:
    """Return the announced digits of a code."""
    return code.partition("-")[0]


def _cipher(exchange: Any, message: bytes) -> Any:
    """Return the cipher of an exchange's secret; raises ValueError for a message that is none of SPAKE2's."""
    from cryptography.fernet import Fernet

    try:
        secret = exchange.finish(bytes.fromhex(message.decode()))
    except Exception as error:  # of many types, for what a stranger may send
        raise ValueError("it is no message of SPAKE2") from error
    return Fernet(urlsafe_b64encode(secret))


def _decrypted(cipher: Any, token: bytes) -> bytes:
    """Return what a token says; raises ValueError if the other end has another secret."""
    from cryptography.fernet import InvalidToken

    try:
        return bytes(cipher.decrypt(token))
    except InvalidToken:
        raise ValueError("it has another code") from None


# --- rank 0 -----------------------------------------------------------------------------------------------------------

def give_keys(address: tuple[str, int], code: str, make_keys: Callable[[], KeyFiles]) -> None:
    """Send a board keys, which are made then; raises ValueError if it has another code, OSError if it takes none."""
    from spake2 import SPAKE2_A

    exchange = SPAKE2_A(code.encode())
    with socket.create_connection(address, BRIEF_TIMEOUT) as connection, connection.makefile("rb") as lines:
        connection.sendall(exchange.start().hex().encode() + b"\n")
        message, _, proof = lines.readline(MAX_LINE_BYTES).strip().partition(b" ")
        if not proof:
            raise ConnectionError(f"it takes no code now, as it pauses for {PAUSE_SECONDS} seconds after {MAX_TRIES} "
                                  "tries; then start this again")

        cipher = _cipher(exchange, message)
        if _decrypted(cipher, proof) != PROOF:
            raise ValueError("it has another code")
        connection.sendall(cipher.encrypt(json.dumps(make_keys()).encode()) + b"\n")


# --- a board ----------------------------------------------------------------------------------------------------------

class CodeDoor(BoardDoor):
    """Where a board without keys waits for rank 0; what comes is put into `received`."""

    def __init__(self, address: str, code: str) -> None:
        self.received: SimpleQueue[KeyFiles] = SimpleQueue()
        self._code = code
        self._num_tries, self._closed_until = 0, 0.0
        self._tries_lock = threading.Lock()
        super().__init__(address, None, 0)

    def _read_greeting(self, connection: socket.socket) -> None:
        with suppress(OSError), connection, connection.makefile("rb") as lines:
            connection.settimeout(BRIEF_TIMEOUT)
            address = connection.getpeername()[0]

            message = lines.readline(MAX_LINE_BYTES).strip()
            with suppress(ValueError):  # it may have been removed as the oldest stranger
                self._strangers.remove(connection)

            if message and self._may_try():
                try:
                    self.received.put(self._exchange(connection, lines, message))
                except (ValueError, OSError):
                    say(f"{address} tried a wrong code, and got nothing; after {MAX_TRIES} there is a pause of "
                        f"{PAUSE_SECONDS} seconds")

    def _may_try(self) -> bool:
        """Count an exchange; return False in a pause. Each counts, since its proof tells whether the code was right."""
        with self._tries_lock:
            now = time.monotonic()
            if now < self._closed_until:
                return False
            self._num_tries += 1
            if self._num_tries % MAX_TRIES == 0:
                self._closed_until = now + PAUSE_SECONDS
            return True

    def _exchange(self, connection: socket.socket, lines: BinaryIO, message: bytes) -> KeyFiles:
        from spake2 import SPAKE2_B

        exchange = SPAKE2_B(self._code.encode())
        own_message = exchange.start().hex().encode()
        cipher = _cipher(exchange, message)
        connection.sendall(own_message + b" " + cipher.encrypt(PROOF) + b"\n")

        files = json.loads(_decrypted(cipher, lines.readline(MAX_LINE_BYTES).strip()))
        if not fits(files, FILES_FORM):
            raise ValueError("these are no keys")
        return {name: files[name] for name in KEY_FILES}


def store_keys(key_folder: Path, key_files: KeyFiles) -> None:
    """Write a board's keys into a new folder that only this user may enter, all of them or none."""
    new_folder = key_folder.with_name(f"{key_folder.name}.new")
    make_private_folder(new_folder)
    for name, text in key_files.items():
        make_private(new_folder / name)
        (new_folder / name).write_text(text)
    new_folder.rename(key_folder)
