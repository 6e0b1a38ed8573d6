"""A pipeline in a process of its own, and the messages to and from it: lines of JSON over a private pair of sockets.

A request is `[number, action, argument, ...]`, an event `[number, kind, value]`; `launch/piped.py` is the other side.
"""
from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
from contextlib import suppress
from itertools import count
from queue import SimpleQueue
from typing import Any, Callable, Tuple

from flowspec.programs import command_of, environment

BEGUN, PIECE, RESULT, ERROR = "begun", "piece", "result", "error"  # kinds of events
LAST_KINDS = (RESULT, ERROR)  # those of the last event of a request
END_SECONDS = 30  # for the ranks to end in an orderly way
CLOSED_REASON = "the pipeline is closed: send requests inside its with"
Event = Tuple[str, Any]  # its kind and value


class PeerLost(RuntimeError):
    """A rank was lost, or the process of the pipeline; the message names it."""


KNOWN_ERRORS = (PeerLost, ValueError, OSError, MemoryError, TypeError, RuntimeError)
ERRORS_BY_NAME = {error_class.__name__: error_class for error_class in KNOWN_ERRORS}


def error_of(class_names: list[str], error_text: str) -> BaseException:
    """Return an error of the pipeline's process: of the first of its classes, the most special first, that is known."""
    known_names = [name for name in class_names if name in ERRORS_BY_NAME]
    if not known_names:
        return RuntimeError(f"{class_names[0]}: {error_text}")
    return ERRORS_BY_NAME[known_names[0]](error_text)


def encoded(*message: Any) -> bytes:
    """Return a message as a line of JSON. Raises ValueError for what is no plain data, and no path."""
    def plain_text(value: Any) -> str:
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        raise ValueError(f"{value!r} is of type {type(value).__name__}: give texts, numbers and lists of these")

    return json.dumps(message, default=plain_text).encode() + b"\n"


class Mailbox:
    """The events of one request that were not read yet; `state` is the value of its result, as soon as it has come."""

    state: Any = None

    def __init__(self, on_event: Callable[[], object] | None = None) -> None:
        self.events: SimpleQueue[Event] = SimpleQueue()
        self._on_event = on_event  # is called after each event, on the reader's thread

    def put(self, event_kind: str, value: Any) -> None:
        """Add an event; called on the reader's thread."""
        if event_kind == RESULT:
            self.state = value
        self.events.put((event_kind, value))
        if self._on_event is not None:
            self._on_event()


class EngineProcess:
    """The process of one pipeline. It ends with `hang_up`, or when this process ends, however that happens.

    Each request ends with an event. After the end of the process all requests end with the error PeerLost, or with
    RuntimeError if it was asked to end.
    """

    def __init__(self) -> None:
        self._socket, engine_socket = socket.socketpair()
        with engine_socket:
            number = engine_socket.fileno()
            # in a session of its own, Ctrl-C reaches this process only
            self._process = subprocess.Popen([*command_of("launch.piped"), f"{number}"], env=environment(),
                                             stdin=subprocess.DEVNULL, pass_fds=[number], start_new_session=True)

        self._owner_pid = os.getpid()
        self._request_numbers = count(1)
        self._mailboxes: dict[int, Mailbox] = {}  # of requests that have not ended
        self._end_lock, self._send_lock = threading.Lock(), threading.Lock()
        self.end: BaseException | None = None  # why no further request is accepted
        self._reader_thread = threading.Thread(target=self._read, name="flowspec", daemon=True)
        self._reader_thread.start()

    def request(self, mailbox: Mailbox, action: str, *arguments: Any) -> int:
        """Send a request, and return its number. Raises the error that ended the process."""
        number = next(self._request_numbers)
        message_line = encoded(number, action, *arguments)
        if os.getpid() != self._owner_pid:
            raise RuntimeError("this pipeline belongs to the process that opened it: open another one in this process")
        with self._end_lock:
            if self.end is not None:
                raise self.end
            self._mailboxes[number] = mailbox
        self._send(message_line)
        return number

    def call(self, action: str, *arguments: Any) -> Any:
        """Send a request, and return its result; raises its error."""
        mailbox = Mailbox()
        self.request(mailbox, action, *arguments)
        event_kind, value = mailbox.events.get()
        if event_kind == ERROR:
            raise value
        return value

    def cancel(self, number: int) -> None:
        """Let a request end early."""
        self._send(encoded(number, "cancel"))

    def _send(self, message_line: bytes) -> None:
        with self._send_lock, suppress(OSError):  # the reader reports the end of the process
            try:
                self._socket.sendall(message_line)
            except KeyboardInterrupt:
                self.hang_up()  # half a message would spoil the next one
                raise

    def forget(self, number: int) -> None:
        """Drop a request of which nobody reads the events; may be called by the garbage collector."""
        self._mailboxes.pop(number, None)

    def hang_up(self) -> None:
        """Ask the process to end, without waiting for it; may be called by the garbage collector."""
        if os.getpid() == self._owner_pid:  # not in a fork of this process
            self.end = self.end or RuntimeError(CLOSED_REASON)
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Ask the process to end, and return once it has ended; it is killed if that takes too long."""
        self.hang_up()
        self._reader_thread.join(END_SECONDS)
        self._process.kill()
        self._reader_thread.join()

    # --- the reader's thread ------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Put all events into the mailboxes of their requests, until the process ends."""
        with suppress(OSError), self._socket.makefile("rb") as message_lines:
            for line in message_lines:
                if line.endswith(b"\n"):  # else the process ended within it
                    self._deliver(*json.loads(line))

        exit_code = self._process.wait()
        ending_name = signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"
        with self._end_lock:
            self.end = self.end or PeerLost(f"rank 0 was lost: its process ended with {ending_name}")
            open_mailboxes, self._mailboxes = self._mailboxes, {}
        for mailbox in open_mailboxes.values():
            mailbox.put(ERROR, self.end)

    def _deliver(self, number: int, event_kind: str, value: Any) -> None:
        mailbox = self._mailboxes.get(number)
        if event_kind in LAST_KINDS:
            self.forget(number)
        if mailbox is not None:
            mailbox.put(event_kind, error_of(*value) if event_kind == ERROR else value)
        elif event_kind == PIECE:  # nobody reads this answer any more
            self.cancel(number)
