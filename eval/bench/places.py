"""The places of accidents: processes of one machine, or boards, each of which run_jetson.sh starts separately.

Boards are processes in network namespaces with their own cables, if these are allowed, or at loopback addresses.
"""
from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import BinaryIO, Iterator, Sequence

from cluster import processes
from config.failure import guarded
from config.keys import raw_values
from config.presets import ROOT
from config.run_config import RunConfig
from launch.pipeline import Pipeline
from launch.prepare import prepare
from launch.ranks import environment_kept
from launch.split.write import split
from launch.words import resolve

PLACES = PROCESSES, NAMESPACES, LOOPBACK = "processes", "namespaces", "loopback"
KINDS = "kill", "stop"  # of accidents, everywhere
DISK_SIZE = 32 << 20  # bytes
LOOK = 0.05  # seconds between two checks for boards that have ended
REFUSED = 2  # exit code of a board that was refused
START = 60.0  # seconds for a board to start
PATIENCE = 10.0  # seconds for the boards to end with rank 0
NEW_NETWORK = 0x40000000  # CLONE_NEWNET
# Random loss, or if the kernel lacks it, a wire of 1 Mbit/s that drops all that would have to wait.
LOSSES = ("netem", "loss", "20%"), ("tbf", "rate", "1mbit", "burst", "2kb", "limit", "4kb")


def run(*words: object) -> bool:
    """Run a system command without its output; return whether it has succeeded."""
    with suppress(OSError):
        return subprocess.run([str(word) for word in words], capture_output=True).returncode == 0
    return False


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Make a folder a separate disk, which can be filled; yield whether that is allowed."""
    folder.mkdir()
    mounted = run("mount", "-t", "tmpfs", "-o", f"size={DISK_SIZE}", "flowspec", folder)
    try:
        yield mounted
    finally:
        if mounted:
            run("umount", "-l", folder)


class Place:
    """The ranks other than rank 0, which is this process, and the `kinds` of accidents that can happen to them."""

    def __init__(self, timeout: float, ranks: Sequence[int],
                 kinds: Sequence[str], folder: Path) -> None:
        self.timeout, self.ranks, self.kinds, self.folder = timeout, ranks, kinds, folder

    def victim(self, kind: str, chance: random.Random) -> int:
        """Return a rank to which an accident of this kind can happen; the end of rank 0 would end all."""
        first = [0] if kind in ("cut", "loss") else []
        return chance.choice([*first, *self.ranks])

    def strike(self, kind: str, rank: int, chance: random.Random) -> None:
        """Cause an accident of this kind to a rank; return when it is over, except for the recovery of others."""
        assert kind in self.kinds, (kind, self.kinds)
        getattr(self, f"_{kind}")(rank, chance)

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to the process of a rank if it is running."""
        raise NotImplementedError

    def _kill(self, rank: int, chance: random.Random) -> None:
        self.signal(rank, signal.SIGKILL)

    def _stop(self, rank: int, chance: random.Random) -> None:
        """Stop a rank for longer than the others wait for it."""
        self.signal(rank, signal.SIGSTOP)

    def _disk(self, rank: int, chance: random.Random) -> None:
        """Fill the disk of the traces for a while."""
        junk = self.folder / "disk" / "junk"
        with suppress(OSError), open(junk, "wb", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass
        time.sleep(chance.uniform(0.5, 2.0))
        junk.unlink()


class Processes(Place):
    """Ranks of one machine, which their launcher restarts."""

    def signal(self, rank: int, number: int) -> None:
        ranks, = processes.started
        ranks.send_signal(rank, number)


class Boards(Place):
    """Ranks that run_jetson.sh starts; those that end are restarted, as by a person or a service.

    `spaces` are the network namespaces of the ranks, if they have any.
    """

    @contextmanager
    def running(self, words: Sequence[str], spaces: Sequence[str]) -> Iterator[None]:
        """Start all boards with these arguments, restart those that end, and finally wait until all end with rank 0."""
        self._words, self._spaces = words, spaces
        self._running = {rank: self._start(rank) for rank in self.ranks}
        over = Event()
        keeper = guarded("keeper", lambda: self._keep(over), lambda thread, error: print(
            f"boards that end are not restarted any more: {error}", file=sys.stderr))
        try:
            yield
        finally:
            over.set()
            keeper.join()
            until = time.monotonic() + PATIENCE
            for board in self._running.values():
                with suppress(subprocess.TimeoutExpired):
                    board.wait(max(0.0, until - time.monotonic()))
                board.kill()
                board.wait()

    def signal(self, rank: int, number: int) -> None:
        board = self._running.get(rank)
        if board:
            board.send_signal(number)

    def _stop(self, rank: int, chance: random.Random) -> None:
        super()._stop(rank, chance)
        time.sleep(self.timeout + chance.uniform(1.0, 3.0))
        self.signal(rank, chance.choice([signal.SIGCONT, signal.SIGKILL]))

    def _cut(self, rank: int, chance: random.Random) -> None:
        """Disconnect a board's cable for a while."""
        switch = self._spaces[0].rpartition("-")[0] + "-switch"
        link = "ip", "-n", switch, "link", "set", f"port{rank}"
        run(*link, "down")
        time.sleep(chance.uniform(0.3, 2 * self.timeout + 1))
        run(*link, "up")

    def _loss(self, rank: int, chance: random.Random) -> None:
        """Make the wire of a board lose packets for a while."""
        tc = "tc", "-n", self._spaces[rank], "qdisc"
        lossy = any(run(*tc, "add", "dev", "eth0", "root", *loss) for loss in LOSSES)
        assert lossy, "no wire can lose packets here"
        time.sleep(chance.uniform(1.0, 2 * self.timeout))
        run(*tc, "del", "dev", "eth0", "root")

    def _split(self, rank: int, chance: random.Random) -> None:
        """End a board, and restart it with the part of another split, which must be refused; then it may restart with
        the correct one."""
        board = self._running.pop(rank)  # so it is not restarted for now
        board.kill()
        board.wait()
        wrong = self._start(rank, self.folder / "other")
        try:
            assert wrong.wait(2 * START) == REFUSED, f"rank {rank} came back with another split, and ended otherwise"
        finally:
            wrong.kill()
            self._running[rank] = wrong

    def _keep(self, over: Event) -> None:
        while not over.wait(LOOK):
            for rank, board in list(self._running.items()):
                if board.poll() is not None and self._running.get(rank) is board:
                    self._running[rank] = self._start(rank)

    def _start(self, rank: int, model: Path | None = None) -> subprocess.Popen[bytes]:
        words = [word for word in self._words if not (model and word.startswith("model_dir="))]
        words += [f"model_dir={model}"] if model else []
        keys = self.folder / "keys"
        words += [f"keys={keys / str(rank)}"] if keys.is_dir() else []
        space = ["ip", "netns", "exec", self._spaces[rank]] if self._spaces else []
        environment = {**os.environ, "NODE_RANK": str(rank), "PYTHON": sys.executable}
        with open(self.folder / f"board_{rank}.log", "ab") as log:
            command = [*space, "bash", str(ROOT / "run_jetson.sh"), *words]
            return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


# --- networks ---------------------------------------------------------------------------------------------------------

@contextmanager
def network(count: int, folder: Path, apart: bool) -> Iterator[list[str]]:
    """Yield the network namespaces of `count` boards, after this thread has entered the first; none if not allowed.

    `folder/hosts` lists their addresses. Unless they are to be `apart`, these are loopback addresses.
    """
    script = ["bash", str(ROOT / "scripts" / "netns_cluster.sh"), f"boards={count}", f"logs={folder}"]
    with subprocess.Popen(script if apart else ["true"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, text=True) as made:
        assert made.stdout is not None
        lines = [line for _, line in zip(range(count + 1), made.stdout)]
        spaces = [line.split()[2] for line in lines if line.startswith("rank ")]
        if not spaces:
            (folder / "hosts").write_text("".join(f"127.0.0.{rank + 1}\n" for rank in range(count)))
            yield []
            return
        with open("/proc/thread-self/ns/net", "rb") as home, open(f"/run/netns/{spaces[0]}", "rb") as own:
            try:
                _enter(own)
                yield spaces
            finally:
                _enter(home)
                made.terminate()


def _enter(space: BinaryIO) -> None:
    """Move this thread, and those that it starts from now on, into this network namespace."""
    if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "a network namespace cannot be entered")


def free_port() -> int:
    """Return a port that is free at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


# --- a pipeline and the place of its ranks ----------------------------------------------------------------------------

@contextmanager
def opened(name: str, words: Sequence[str],
           folder: Path) -> Iterator[tuple[Pipeline, Place]]:
    """Yield the pipeline for a command's arguments, and the place of this name; `folder` is for its files.

    Its trace is on a small disk, which accidents can fill, if this user may create one.
    """
    config = resolve(words).keys.run
    prepared = prepare(config)
    # Boards must refuse the part of another split since it differs from rank 0's, not since another one was named.
    keys = raw_values(words[1:])
    keys.update(model_dir=str(prepared.folder), stages="")
    ranks, kinds = range(1, prepared.placement.world), [*KINDS]
    with ExitStack() as ends:
        if ends.enter_context(small_disk(folder / "disk")):
            keys["trace"] = str(folder / "disk" / "trace")
            kinds.append("disk")
        if name == PROCESSES:
            pipeline = ends.enter_context(Pipeline.open(words[0], **keys))
            yield pipeline, Processes(config.timeout, ranks, kinds, folder)
            return
        spaces = ends.enter_context(network(len(ranks) + 1, folder, name == NAMESPACES))
        keys.update(hosts=str(folder / "hosts"), master=f":{free_port()}", wait=str(START))
        kinds += ["cut", "loss"] if spaces else []
        if split_otherwise(config, prepared.spec(0).part.stages, folder / "other"):
            kinds.append("split")
        own_keys = make_keys(folder)
        boards = Boards(config.timeout, ranks, kinds, folder)
        typed = [f"{key}={value}" for key, value in keys.items()]
        ends.enter_context(boards.running([words[0], *typed], spaces))
        with environment_kept("NODE_RANK"):
            os.environ["NODE_RANK"] = "0"
            pipeline = ends.enter_context(Pipeline.open(words[0], **keys, **own_keys))
        yield pipeline, boards


def split_otherwise(config: RunConfig, shares: Sequence[int], folder: Path) -> bool:
    """Create a split of the model with other shares, for boards to restart with; return False if that is impossible."""
    if config.model_dir or not config.base_dir or len(shares) < 3:
        return False
    none, first, second, *rest = shares
    others = none, first - 1, second + 1, *rest
    split(config.base_dir, folder, "+".join(map(str, others)), config.eagle_dir or None, progress=False)
    return True


def make_keys(folder: Path) -> dict[str, str]:
    """Create the keys of a cluster, if this machine can; return the `keys=` of rank 0, empty without any."""
    made = run("bash", ROOT / "scripts" / "make_keys.sh", f"hosts={folder / 'hosts'}", f"keys={folder / 'keys'}",
               "push=false")
    return {"keys": str(folder / "keys" / "0")} if made else {}
