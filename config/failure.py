"""Errors: the loss of a peer, sentences that explain what ended a thread or a rank, and threads that report it."""
from __future__ import annotations

import errno
import resource
import threading
from typing import Callable, NamedTuple, Sequence

from config.schema.untrusted import one_line

GB = 1e9
Failure = Callable[[str, BaseException], None]  # is called with a thread's name and the error that ended it


class PeerLost(RuntimeError):
    """Another rank was lost; the message names it."""


def broken_connection(peer: int) -> PeerLost:
    """Return the error for a peer with a broken connection."""
    return PeerLost(f"rank {peer} was lost: its connection broke")


def guarded(name: str, run: Callable[[], None], on_failure: Failure) -> threading.Thread:
    """Start a thread that reports its error to `on_failure`."""
    def work() -> None:
        try:
            run()
        except BaseException as error:
            on_failure(name, error)

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


class Shortage(NamedTuple):
    """A resource that may be exhausted, with the error numbers and texts that show it, and the remedies."""

    error_numbers: Sequence[int]  # values of errno
    message_parts: Sequence[str]  # of errors
    sentence: str
    limit_kind: int  # constant of the resource module
    remedy_of_limit: str  # the remedy if that limit is set
    other_remedy: str


CUT_FILE = ("a file was cut while it was in use, or its disk failed (SIGBUS), most likely the model's weights: copy or "
            "split the model again, then start again")
MEMORY = "ulimit -v allows a process {:.2f} GB: raise it, as in ulimit -v unlimited"
SPACE = Shortage([errno.ENOMEM], ["allocate memory", "out of memory", "bad_alloc", "failed to map segment"],
                 "there is not enough memory", resource.RLIMIT_AS, MEMORY,
                 "end other programs, or give a smaller max_length")
THREADS = Shortage([errno.EAGAIN], ["Resource temporarily unavailable", "can't start new thread"],
                   "no more threads can be started", resource.RLIMIT_AS, MEMORY,
                   "raise ulimit -u, or end other programs")
FILES = Shortage([errno.EMFILE, errno.ENFILE], ["Too many open files"],
                 "no more files can be opened", resource.RLIMIT_NOFILE,
                 "ulimit -n allows a process {:.0f}: raise it, as in ulimit -n 1024", "end other programs")


def shortage(error: BaseException) -> str:
    """Return a sentence about the exhausted resource; empty for any other error."""
    text = "bad_alloc" if isinstance(error, MemoryError) else str(error)
    for entry in (SPACE, THREADS, FILES):
        has_number = isinstance(error, OSError) and error.errno in entry.error_numbers
        is_explained = entry.sentence in text  # by another rank, or further down
        if is_explained:
            return ""
        if has_number or any(part in text for part in entry.message_parts):
            first_line = one_line(text.splitlines()[0])
            return f"{entry.sentence} ({first_line}): {limit_remedy(entry) or entry.other_remedy}"
    return ""


def limit_remedy(entry: Shortage) -> str:
    """Return the remedy for a limit of this process that may be the cause; empty if there is no limit."""
    soft_limit = resource.getrlimit(entry.limit_kind)[0]
    scale = GB if entry.limit_kind == resource.RLIMIT_AS else 1
    return "" if soft_limit == resource.RLIM_INFINITY else entry.remedy_of_limit.format(soft_limit / scale)


def is_expected(error: BaseException) -> bool:
    """Return whether the error is explained by its message alone, without a traceback."""
    return isinstance(error, (PeerLost, ValueError, OSError, KeyboardInterrupt)) or bool(shortage(error))


def explain(error: BaseException) -> str:
    """Return the sentence that describes an error."""
    if isinstance(error, KeyboardInterrupt):
        return "it was stopped"
    if is_expected(error):
        return shortage(error) or one_line(str(error))
    return one_line(f"{type(error).__name__}: {error}".splitlines()[0])
