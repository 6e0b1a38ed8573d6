"""The ranks of one machine, forked from a process that has torch already: a whole run starts in a second.

They are started as launch/processes.py does it, in a private folder of their own.
"""
from __future__ import annotations

import multiprocessing
import os
import signal
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

from launch.folder import Folder, private_folder
from launch.processes import FOLDER
from launch.run import run
from pipeline.heartbeat import LOST as NOTED
from scripts import generate
from tests.saved import wait_until

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.forked"])
Prepare = Callable[[int], Any]  # what a rank does before anything else


def nothing(rank: int) -> None:
    pass


def be_rank(words: Sequence[str], environment: dict[str, str], files: Sequence[str], prepare: Prepare) -> None:
    for number, path in enumerate(files, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.update({"TORCH_CPP_LOG_LEVEL": "ERROR", "GLOO_SOCKET_IFNAME": "lo", **environment})
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prepare(int(environment["RANK"]))
    os._exit(run(generate.COMMAND, list(words)))


class Ranks:
    """All ranks of one run; `out` and `err` are what they have printed so far."""

    def __init__(self, folder: Path, store: str, words: Sequence[str], world: int, prepare: Prepare) -> None:
        self._store = Folder(store)
        self._files = [folder / "out", folder / "err"]
        self.processes = []
        for rank in range(world):
            environment = {"RANK": str(rank), "WORLD_SIZE": str(world), FOLDER: store}
            files = [str(path) + str(rank) for path in self._files]
            process = CONTEXT.Process(target=be_rank, args=(words, environment, files, prepare))
            process.start()
            self.processes.append(process)

    def text(self, rank: int, number: int = 2) -> str:
        """What a rank has printed: 1 on stdout, 2 on stderr."""
        path = Path(f"{self._files[number - 1]}{rank}")
        return path.read_text() if path.exists() else ""

    def codes(self, seconds: float = 60) -> list[int | None]:
        """The exit codes once all have ended; None of those that go on."""
        wait_until(lambda: all(process.exitcode is not None for process in self.processes), seconds)
        return [process.exitcode for process in self.processes]

    @property
    def noted(self) -> str:
        """The loss on which the ranks have agreed."""
        return (self._store.peek(NOTED) or b"").decode()


@contextmanager
def ranks(folder: Path, words: Sequence[str], world: int, prepare: Prepare = nothing) -> Iterator[Ranks]:
    """Of a run that leaves no process behind."""
    folder.mkdir(parents=True, exist_ok=True)
    with private_folder() as store:
        started = Ranks(folder, store, words, world, prepare)
        try:
            yield started
        finally:
            for process in started.processes:
                process.kill()
                process.join()
