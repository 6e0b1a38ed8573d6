"""Losses: what ends a rank before its time, in words, and threads whose death is one.

It knows nothing about messages or stores.
"""
from __future__ import annotations

import errno
import resource
import threading
from typing import Callable, NamedTuple, Sequence

from config.schema.untrusted import plain

GB = 1e9
Failure = Callable[[str, BaseException], None]  # is given a thread's name, and what it died of


class PeerLost(RuntimeError):
    """Another rank has died or fallen silent; the message names it."""


def guarded(name: str, run: Callable[[], None], on_failure: Failure) -> threading.Thread:
    """Start a thread. Whatever it dies of is reported, for nobody waits for its end."""
    def work() -> None:
        try:
            run()
        except BaseException as error:
            on_failure(name, error)

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


class Shortage(NamedTuple):
    """Something of which a machine may have too little: how that shows in an error, and what a person can do."""

    numbers: Sequence[int]  # of system errors
    words: Sequence[str]
    message: str
    limit: int  # of the resource module
    limited: str  # the remedy where this limit is set
    remedy: str  # and where it is not


MEMORY = "ulimit -v allows a process {:.2f} GB: raise it, as in ulimit -v unlimited"
SPACE = Shortage([errno.ENOMEM], ["allocate memory", "out of memory", "bad_alloc", "failed to map segment"],
             "there is not enough memory", resource.RLIMIT_AS, MEMORY,
             "end other programs, or give a smaller max_length")
THREADS = Shortage([errno.EAGAIN], ["Resource temporarily unavailable", "can't start new thread"],
               "no more threads can be started", resource.RLIMIT_AS, MEMORY, "raise ulimit -u, or end other programs")
FILES = Shortage([errno.EMFILE, errno.ENFILE], ["Too many open files"],
             "no more files can be opened", resource.RLIMIT_NOFILE,
             "ulimit -n allows a process {:.0f}: raise it, as in ulimit -n 1024", "end other programs")


def shortage(error: BaseException) -> str:
    """A sentence about what the machine has too little of, by an error; empty if the error is none of that kind."""
    text = "bad_alloc" if isinstance(error, MemoryError) else str(error)
    for entry in (SPACE, THREADS, FILES):
        numbered = isinstance(error, OSError) and error.errno in entry.numbers
        if numbered or any(word in text for word in entry.words):
            return f"{entry.message} ({plain(text.splitlines()[0])}): {limited(entry) or entry.remedy}"
    return ""


def limited(entry: Shortage) -> str:
    """The remedy, if this process has a limit that may be the reason."""
    most = resource.getrlimit(entry.limit)[0]
    scale = GB if entry.limit == resource.RLIMIT_AS else 1
    return "" if most == resource.RLIM_INFINITY else entry.limited.format(most / scale)


def foreseen(error: BaseException) -> bool:
    """Whether a sentence says it all; else a person needs to see where it happened."""
    return isinstance(error, (PeerLost, ValueError, OSError, KeyboardInterrupt)) or bool(shortage(error))


def explain(error: BaseException) -> str:
    """An error as a sentence for a person, without a traceback."""
    if isinstance(error, KeyboardInterrupt):
        return "it was stopped"
    shown = str(error)
    if not foreseen(error):
        shown = f"{type(error).__name__}: {shown}".splitlines()[0]
    return shortage(error) or plain(shown)
