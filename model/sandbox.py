"""A stranger's program, run in a process of its own: bounded in time, memory and words, and without a say in ours.

It knows nothing about templates. Python code cannot be stopped from outside while it computes one huge power, so the
bound of time is a signal to another process.
"""
from __future__ import annotations

import multiprocessing
import resource
from multiprocessing.connection import Connection
from typing import Callable

MEMORY = 1 << 30  # bytes that it may take beside what this process has
LONGEST = 1 << 20  # characters of what it says
FINE, FAILED = b"+", b"-"


def isolated(work: Callable[[], str], seconds: float) -> str:
    """What `work` returns in another process.

    Raises TimeoutError after `seconds`, and ValueError, with the error in words, if it fails or says too much.
    """
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_report, args=(work, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(seconds):
            raise TimeoutError(f"no end after {seconds:g} seconds")
        said = ours.recv_bytes(4 * LONGEST + 1)
    except (EOFError, OSError) as error:
        if isinstance(error, TimeoutError):
            raise
        raise ValueError("it ended without a word, as for want of memory") from None
    finally:
        process.kill()
        process.join()
    if said[:1] == FAILED:
        raise ValueError(said[1:].decode("utf-8", "replace"))
    return said[1:].decode("utf-8")


def _report(work: Callable[[], str], theirs: Connection) -> None:
    try:
        _limit_memory()
        text = work()
        if len(text) > LONGEST:
            raise ValueError(f"it makes a text of {len(text)} characters")
        said = FINE + text.encode("utf-8")
    except BaseException as error:  # it may do whatever it likes
        told = f"{type(error).__name__}: {error}"
        said = FAILED + told[:LONGEST].encode("utf-8", "backslashreplace")
    theirs.send_bytes(said)


def _limit_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as pages:
        taken = int(pages.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, hard))
