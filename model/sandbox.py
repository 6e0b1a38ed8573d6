"""Run untrusted code, or read untrusted input, in a process of its own, with bounded time, memory and output.

It knows nothing about templates. Python code cannot be interrupted while it computes one huge power, so the code runs
in another process, which is killed when the time is over.
"""
from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import signal
from contextlib import suppress
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any, Callable
from weakref import finalize

EXTRA_BYTES = 1 << 30  # that it may allocate in addition to this process's memory
MAX_OUTPUT = 1 << 20  # characters of its output, unless its user allows another number
START_SECONDS = 5.0  # to fork a large process
BUSY_FACTOR = 12.0  # elapsed over processor time, at most, on a busy machine
SUCCESS, FAILURE = b"+", b"-"


class Sandbox:
    """A function that runs in a process of its own, one call after another.

    The process is forked at the first call. It ends with the sandbox, with this process, or with a failed call, and
    the next call starts another one. Threads may share a sandbox: their calls wait for each other.
    """

    def __init__(self, function: Callable[..., str], extra_bytes: int = EXTRA_BYTES, max_output: int = MAX_OUTPUT
                 ) -> None:
        self._function, self._extra_bytes, self._max_output, self._lock = function, extra_bytes, max_output, Lock()
        self._close: Callable[[], Any] = lambda: None  # ends the process, if there is one
        self._process: Any = None

    def call(self, seconds: float, *arguments: Any) -> str:
        """Call the function with picklable arguments, for some seconds of processor time at most.

        Raises TimeoutError, or ValueError with the text of its error.
        """
        with self._lock:
            if self._process is None or not self._process.is_alive():
                self._start()

            try:
                self._link.send((seconds, arguments))
                reply = _receive(self._link, self._process, seconds, self._max_output)
                status, text_bytes = reply[:1], reply[1:]
                if status == FAILURE:
                    raise ValueError(text_bytes.decode("utf-8", "replace"))
            except BaseException:  # also for Ctrl-C, since the next call must not receive a late answer
                self.end()
                raise
            return text_bytes.decode("utf-8")

    def _start(self) -> None:
        self.end()
        self._link, process_link = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        serve_arguments = (self._function, process_link, self._extra_bytes, self._max_output)
        self._process = context.Process(target=_serve, args=serve_arguments, daemon=True)
        self._process.start()
        self._close = finalize(self, _stop, self._process, self._link)
        process_link.close()

        try:
            _receive(self._link, self._process, START_SECONDS, MAX_OUTPUT)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """End the process, which holds a copy of all memory that this one has changed since the fork."""
        self._close()
        self._process = None


def _stop(process: Any, link: Connection) -> None:
    link.close()
    process.kill()
    process.join()


def _receive(link: Connection, process: Any, seconds: float, max_output: int) -> bytes:
    """Return the next message of a process, which may use some seconds of processor time.

    Raises TimeoutError if it takes longer, ValueError if the process has ended for another reason.
    """
    try:
        if link.poll(BUSY_FACTOR * seconds):
            return link.recv_bytes(4 * max_output + 1)
    except (EOFError, OSError):
        process.join()
        if process.exitcode != -signal.SIGXCPU:
            raise ValueError("it ended without an error message, perhaps for lack of memory") from None
    raise TimeoutError(f"not finished after {seconds:g} seconds")


def _serve(function: Callable[..., str], link: Connection, extra_bytes: int, max_output: int) -> None:
    """Answer calls until the other end of the link is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _close_others(link.fileno())
    _silence()
    gc.freeze()  # a garbage collection would write to the shared pages, and so copy them
    _limit_memory(extra_bytes)

    link.send_bytes(SUCCESS)
    with suppress(EOFError, OSError):
        while True:
            seconds, arguments = link.recv()
            _limit_processor_time(seconds)
            link.send_bytes(_reply(function, arguments, max_output))


def _reply(function: Callable[..., str], arguments: Any, max_output: int) -> bytes:
    """Call the function; return its text after SUCCESS, or the text of its error after FAILURE."""
    try:
        text = function(*arguments)
        if len(text) > max_output:
            raise ValueError(f"it returns a text of {len(text)} characters")
        return SUCCESS + text.encode("utf-8")
    except BaseException as error:  # untrusted code may raise anything
        message = f"{type(error).__name__}: {error}"
        return FAILURE + message[:max_output].encode("utf-8", "backslashreplace")


def _close_others(link_number: int) -> None:
    """Close every file but the link and the standard ones, since a copy of a socket would keep it open."""
    for name in os.listdir("/proc/self/fd"):
        file_number = int(name)
        if file_number > 2 and file_number != link_number:
            with suppress(OSError):
                os.close(file_number)


def _silence() -> None:
    """Leave nothing at the terminal or in a core file when native code ends the process for lack of memory."""
    with open(os.devnull, "w", encoding="ascii") as null_file:
        os.dup2(null_file.fileno(), 1)
        os.dup2(null_file.fileno(), 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_processor_time(seconds: float) -> None:
    """Let a call end this process soon after its time, even if the process that waits for it has been killed."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    max_seconds = int(usage.ru_utime + usage.ru_stime + seconds) + 2
    _, hard_limit = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (max_seconds, hard_limit))


def _limit_memory(extra_bytes: int) -> None:
    """Let this process allocate this much in addition to what it has."""
    with open("/proc/self/statm", encoding="ascii") as statistics:
        num_pages = int(statistics.read().split()[0])
    max_bytes = num_pages * resource.getpagesize() + extra_bytes
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, hard_limit))
