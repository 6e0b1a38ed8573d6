"""The ranks of this machine, and the process that imports what they need and forks them.

So the packages are imported once instead of once in every rank, and their memory is shared. Nothing is computed before
the ranks are forked: threads of a library would not survive it.

As a program it is that process: `python -m launch.fork_server PIPE RANKS MODULE [WORD ...]` runs the module as each of
these ranks. On the pipe it reports `RANK PID` of each one that it forks, and `RANK PID CODE` once that has ended.
"""
from __future__ import annotations

import gc
import importlib
import os
import runpy
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Mapping, Sequence

from launch.console import WRONG, say
from pipeline.failure import explain

LAUNCHER = "FLOWSPEC_LAUNCHER"  # in the environment of a rank: the process that it shall not outlive
LOOK = 0.05  # seconds between two looks at who has ended


class Ranks:
    """The ranks that a server forks for this process, until `kill`; raises OSError if the server cannot be started."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], numbers: Sequence[int]) -> None:
        self._numbers = numbers
        self._pids: dict[int, int] = {}  # of the ranks that have been forked
        self._ended: dict[int, int] = {}
        self._unread = b""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        self._reports = os.fdopen(reading, "rb", buffering=0)
        listed = ",".join(map(str, numbers))
        words = [sys.executable, "-m", "launch.fork_server", str(writing), listed, *command]
        try:
            self._server = subprocess.Popen(words, env=environment, pass_fds=[writing])
        finally:
            os.close(writing)
        started.add(self)

    def ended(self) -> Mapping[int, int]:
        """The exit codes of the ranks that have ended, the first one first; that of the server, if it is gone."""
        gone = self._server.poll()
        self._read()
        if gone is not None:
            for rank in self._numbers:
                self._ended.setdefault(rank, gone)
        return self._ended

    @property
    def all_ended(self) -> bool:
        return len(self.ended()) == len(self._numbers)

    def send_signal(self, one: int, number: int) -> None:
        """Send a signal to a rank, if it has been forked and has not ended."""
        if one not in self.ended() and one in self._pids:
            os.kill(self._pids[one], number)

    def kill(self) -> None:
        """End the ranks that are still there, at once."""
        for rank in self._numbers:
            self.send_signal(rank, signal.SIGKILL)
        if len(self._pids) < len(self._numbers):
            self._server.kill()  # else it would fork the others
        self._server.wait()
        self.ended()
        self._reports.close()
        started.discard(self)

    def _read(self) -> None:
        """Take in what the server has reported since the last time."""
        while not self._reports.closed and (more := self._reports.read(1 << 16)):
            self._unread += more
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            rank, pid, *code = map(int, line.split())
            self._pids[rank] = pid
            if code:
                self._ended[rank] = code[0]


started: set[Ranks] = set()  # by this process, and not ended by `kill` yet


# --- the server -------------------------------------------------------------------------------------------------------

def main(argv: Sequence[str]) -> None:
    pipe, ranks, module, *words = argv
    importlib.import_module(module)
    gc.freeze()  # else the first collection in a rank would copy what it shares
    forked: dict[int, str] = {}
    with os.fdopen(int(pipe), "w", buffering=1) as reports:
        for rank in ranks.split(","):
            pid = _fork(rank)
            if not pid:
                reports.close()
                _be_rank(rank, module, words)
                return
            forked[pid] = rank
            print(rank, pid, file=reports)
        _report_ends(forked, reports)


def _fork(rank: str) -> int:
    try:
        return os.fork()
    except OSError as error:
        say(f"rank {rank} could not be started: {explain(error)}")
        sys.exit(WRONG)  # those that were forked end with this process


def _be_rank(rank: str, module: str, words: Sequence[str]) -> None:
    """Be `python -m module words` as this rank, under a name by which `top` shows it."""
    with suppress(OSError):  # where /proc may not be written
        Path("/proc/self/comm").write_text(f"flowspec-{rank}", encoding="utf-8")
    os.environ.update({LAUNCHER: str(os.getppid()), "RANK": rank, "LOCAL_RANK": rank})
    sys.argv[1:] = words
    del sys.modules[module]  # runpy warns of one that is there
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _report_ends(forked: dict[int, str], reports: IO[str]) -> None:
    """Report the exit codes of these ranks; returns early if the launcher is gone, and then they end, too."""
    launcher = int(os.environ[LAUNCHER])
    while forked and os.getppid() == launcher:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            time.sleep(LOOK)
            continue
        code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        print(forked.pop(pid), pid, code, file=reports)


if __name__ == "__main__":
    main(sys.argv[1:])
