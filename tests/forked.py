"""Commands and ranks that are forked from a process that has torch already: a whole run starts in a second.

`ranks` starts them as cluster/processes.py does it, in a private folder of their own; `command` forks the launcher,
which then forks its ranks; `serving_ranks` lets this process do the same.
"""
from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
import time
import traceback
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import Popen
from types import SimpleNamespace
from typing import Any, Callable, ContextManager, Iterator, Mapping, NoReturn, Sequence

from cluster import processes
from cluster.board import BOARD_VARIABLE
from cluster.folder import RENDEZVOUS, Folder, private_folder
from cluster.heartbeat import LOSS_KEY
from cluster.processes import LAUNCHER_VARIABLE
from config.presets import ROOT
from launch.run import run
from scripts import generate
from tests.saved import Command, leaving_nothing, wait_until

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.preloaded"])
Prepare = Callable[[int], Any]  # what a rank does before anything else


def nothing(rank: int) -> None:
    pass


def write_into(files: Sequence[str | Path]) -> None:
    """Let standard output and standard error of this process go into these files."""
    for number, path in enumerate(files, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)


def be_rank(words: Sequence[str], environment: dict[str, str],
            files: Sequence[str], prepare: Prepare) -> None:
    write_into(files)
    os.environ.update({"TORCH_CPP_LOG_LEVEL": "ERROR", "GLOO_SOCKET_IFNAME": "lo", **environment})
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prepare(int(environment["RANK"]))
    os._exit(run(generate.GENERATE, ["recover=false", *words]))  # nobody would start a rank again


class Ranks:
    """All ranks of one run; `out` and `err` are what they have printed so far."""

    def __init__(self, folder: Path, store: str,
                 words: Sequence[str], world: int, prepare: Prepare) -> None:
        self._store = Folder(store)
        self._files = [folder / "out", folder / "err"]
        self.processes = []
        for rank in range(world):
            environment = {"RANK": str(rank), "WORLD_SIZE": str(world), RENDEZVOUS: store}
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
        return (self._store.look(LOSS_KEY) or b"").decode()


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


# --- whole commands ---------------------------------------------------------------------------------------------------

class Child:
    """A program that this process forks, with what cluster/processes.py uses of subprocess.Popen."""

    def __init__(self, words: Sequence[str],
                 env: Mapping[str, str], pass_fds: Sequence[int]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            be_program(words[3:], env)  # behind `python -c START`

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self) -> None:
        while self.poll() is None:
            time.sleep(0.01)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def be_program(words: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Be `python3 -m WORDS`, as if it had just been started."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    processes.subprocess = SimpleNamespace(Popen=Child)
    sys.argv = list(words)
    sys.modules.pop(words[0], None)  # runpy warns of a module that is there already
    code: Any = 1
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(code)


def _be_launcher(words: Sequence[str], environment: dict[str, str], files: Sequence[Path]) -> None:
    os.setsid()
    os.chdir(ROOT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    write_into(files)
    be_program(words, environment)


class Forked:
    """A process of the fork server, with what cluster/processes.py and tests use of subprocess.Popen."""

    def __init__(self, target: Callable[..., None], *words: Any) -> None:
        self._process = CONTEXT.Process(target=target, args=words)
        self._process.start()
        self.pid, self.kill = self._process.pid, self._process.kill

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    returncode = property(poll)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


class ForkedCommand(Command):
    """As `Command` of tests/saved.py."""

    def start(self, words: Sequence[str]) -> Forked:
        for path in self.files:
            path.touch()
        environment = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        return Forked(_be_launcher, words, environment, self.files)


def command(folder: Path, module: str, *words: str) -> ContextManager[ForkedCommand]:
    """A command that leaves nothing behind, however the test ends."""
    return leaving_nothing(ForkedCommand(folder, module, *words))


def _be_board(words: Sequence[str], environment: dict[str, str], log: str) -> None:
    for number in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), number)
    be_program(["scripts.generate", *words], {**environment, BOARD_VARIABLE: "1", "TORCH_CPP_LOG_LEVEL": "ERROR"})


def board(words: Sequence[str], **options: Any) -> Any:
    """In place of subprocess.Popen in eval/bench/places.py: what run_jetson.sh starts; other programs as they are."""
    if words[:2] != ["bash", str(ROOT / "run_jetson.sh")]:
        return Popen(words, **options)
    return Forked(_be_board, words[2:], options["env"], options["stdout"].name)


# --- ranks of a pipeline that this process opens ----------------------------------------------------------------------

def _be_server(words: Sequence[str], environment: dict[str, str], pipes: Sequence[Connection],
               shown: Sequence[Connection]) -> None:
    """Be what forks the ranks: `python3 -m cluster.processes SOCKET RANKS MODULE`, with this process's socket."""
    for number, file in enumerate(shown, 1):
        os.dup2(file.fileno(), number)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    module, _, *rest = words
    numbers = ",".join(str(pipe.fileno()) for pipe in pipes)
    be_program([module, numbers, *rest], {**environment, LAUNCHER_VARIABLE: str(os.getppid())})


def _lent(file: int) -> Connection:
    return Connection(os.dup(file))


def serving_ranks(words: Sequence[str], env: Mapping[str, str], pass_fds: Sequence[int]) -> Forked:
    """In place of subprocess.Popen in cluster/processes.py: its program without the seconds that its imports take."""
    return Forked(_be_server, words[3:], dict(env),
                  [*map(_lent, pass_fds)], [_lent(1), _lent(2)])


# --- the process of a pipeline that this process opens through the package flowspec -----------------------------------

class ForkedEngine(Forked):
    """In place of subprocess.Popen in flowspec/engine_process.py: its program without the seconds of its imports."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str], pass_fds: Sequence[int], **others: Any) -> None:
        super().__init__(_be_engine, words[3], dict(env), *map(_lent, pass_fds))


def _be_engine(module: str, environment: dict[str, str], pipe: Connection) -> None:
    be_program([module, str(pipe.fileno())], environment)
