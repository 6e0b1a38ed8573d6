"""Run untrusted code in a process of its own, with bounded time, memory and output.

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

MEMORY = 1 << 30  # bytes that it may allocate in addition to this process's memory
LONGEST = 1 << 20  # characters of its output
START = 60.0  # seconds to fork a large process on a busy machine
FINE, FAILED = b"+", b"-"


class Sandbox:
    """A function that runs in a process of its own, one call after another.

    The process is forked at the first call. It ends with the sandbox, with this process, or with a failed call, and
    the next call starts another one. Threads may share a sandbox: their calls wait for each other.
    """

    def __init__(self, work: Callable[..., str], memory: int = MEMORY) -> None:
        self._work, self._memory, self._lock = work, memory, Lock()
        self._close: Callable[[], Any] = lambda: None  # ends the process, if there is one
        self._process: Any = None

    def call(self, seconds: float, *given: Any) -> str:
        """Call the function with picklable arguments. Raises TimeoutError, or ValueError with the text of its error."""
        with self._lock:
            if self._process is None or not self._process.is_alive():
                self._start()
            try:
                self._link.send((seconds, given))
                said = _receive(self._link, seconds)
                if said[:1] == FAILED:
                    raise ValueError(said[1:].decode("utf-8", "replace"))
            except BaseException:  # also for Ctrl-C, since the next call must not receive a late answer
                self._end()
                raise
            return said[1:].decode("utf-8")

    def _start(self) -> None:
        self._end()
        self._link, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=_serve, args=(self._work, theirs, self._memory), daemon=True)
        self._process.start()
        self._close = finalize(self, _stop, self._process, self._link)
        theirs.close()
        try:
            _receive(self._link, START)
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        self._close()
        self._process = None


def _stop(process: Any, link: Connection) -> None:
    link.close()
    process.kill()
    process.join()


def _receive(link: Connection, seconds: float) -> bytes:
    """Return the next message. Raises TimeoutError if none comes for `seconds`, ValueError if the process has ended."""
    try:
        if link.poll(seconds):
            return link.recv_bytes(4 * LONGEST + 1)
    except (EOFError, OSError):
        raise ValueError("it ended without an error message, perhaps for lack of memory") from None
    raise TimeoutError(f"not finished after {seconds:g} seconds")


def _serve(work: Callable[..., str], link: Connection, memory: int) -> None:
    """Answer calls until the other end of the link is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _close_others(link.fileno())
    _silence()
    gc.freeze()  # a garbage collection would write to the shared pages, and so copy them
    _limit_memory(memory)

    link.send_bytes(FINE)
    with suppress(EOFError, OSError):
        while True:
            seconds, given = link.recv()
            _limit_processor_time(seconds)
            link.send_bytes(_result(work, given))


def _result(work: Callable[..., str], given: Any) -> bytes:
    try:
        text = work(*given)
        if len(text) > LONGEST:
            raise ValueError(f"it returns a text of {len(text)} characters")
        return FINE + text.encode("utf-8")
    except BaseException as error:  # untrusted code may raise anything
        words = f"{type(error).__name__}: {error}"
        return FAILED + words[:LONGEST].encode("utf-8", "backslashreplace")


def _close_others(kept: int) -> None:
    """Close every file but `kept` and the standard ones: a copy of a socket would keep it open when ours is closed."""
    for name in os.listdir("/proc/self/fd"):
        file = int(name)
        if file > 2 and file != kept:
            with suppress(OSError):
                os.close(file)


def _silence() -> None:
    """Leave nothing at the terminal or in a core file when native code ends the process for lack of memory."""
    with open(os.devnull, "w", encoding="ascii") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_processor_time(seconds: float) -> None:
    """Let a call end this process soon after its time, even if the process that waits for it has been killed."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + seconds) + 2, hard))


def _limit_memory(memory: int) -> None:
    with open("/proc/self/statm", encoding="ascii") as pages:
        taken = int(pages.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + memory, hard))
