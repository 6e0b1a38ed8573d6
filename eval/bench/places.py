"""The places of accidents: processes of one machine, or boards, each of which run_jetson.sh starts separately.

Boards are processes in network namespaces with their own cables, if these are allowed, or at loopback addresses.
"""
from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from threading import Event, Thread
from typing import BinaryIO, Iterator, Mapping, Sequence

from cluster import processes
from config.presets import ROOT
from config.run_config import RunConfig
from launch.pipeline import Pipeline
from launch.prepare import prepare
from launch.ranks import environment_kept
from launch.split.write import split
from launch.words import resolve

PROCESSES, NAMESPACES = "processes", "namespaces"
PLACES = PROCESSES, NAMESPACES, "loopback"
KINDS = "kill", "stop"  # of accidents, everywhere
DISK_SIZE = 32 << 20  # bytes
CHECK_SECONDS = 0.05  # between two checks for boards that have ended
REFUSED_EXIT_CODE = 2  # of a board with another split
START_SECONDS = 60.0  # for a board to start
END_SECONDS = 10.0  # for the boards to end with rank 0
NEW_NETWORK = 0x40000000  # CLONE_NEWNET
# Random loss, or if the kernel lacks it, a wire of 1 Mbit/s that drops all that would have to wait.
LOSSY_WIRES = ("netem", "loss", "20%"), ("tbf", "rate", "1mbit", "burst", "2kb", "limit", "4kb")


def run(*words: object) -> bool:
    """Run a system command without its output; return whether it has succeeded."""
    with suppress(OSError):
        return subprocess.run([str(word) for word in words], capture_output=True).returncode == 0
    return False


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Make a folder a separate disk, which can be filled; yield whether that is allowed."""
    folder.mkdir()
    is_mounted = run("mount", "-t", "tmpfs", "-o", f"size={DISK_SIZE}", "flowspec", folder)
    try:
        yield is_mounted
    finally:
        if is_mounted:
            run("umount", "-l", folder)


@dataclass
class Place:
    """The ranks other than rank 0, which is this process, and the `kinds` of accidents that can happen to them."""

    timeout: float  # seconds after which a silent rank is lost
    ranks: Sequence[int]
    kinds: Sequence[str]
    folder: Path  # for files of the ranks
    random_source: Random

    def victim(self, kind: str) -> int:
        """Return a rank to which an accident of this kind can happen; the end of rank 0 would end all."""
        rank_0 = [0] if kind in ("cut", "loss") else []
        return self.random_source.choice([*rank_0, *self.ranks])

    def strike(self, kind: str, rank: int) -> None:
        """Cause an accident of this kind to a rank; return when it is over, except for the recovery of others."""
        getattr(self, f"_{kind}")(rank)

    def signal(self, rank: int, signal_number: int) -> None:
        """Send a signal to the process of a rank if it is running."""
        raise NotImplementedError

    def _kill(self, rank: int) -> None:
        self.signal(rank, signal.SIGKILL)

    def _stop(self, rank: int) -> None:
        """Stop a rank for longer than the others wait for it."""
        self.signal(rank, signal.SIGSTOP)

    def _disk(self, rank: int) -> None:
        """Fill the disk of the traces for a while."""
        junk_path = self.folder / "disk" / "junk"
        with suppress(OSError), open(junk_path, "wb", buffering=0) as junk_file:
            while junk_file.write(bytes(1 << 16)):
                pass

        time.sleep(self.random_source.uniform(0.5, 2.0))
        junk_path.unlink()


class Processes(Place):
    """Ranks of one machine, which their launcher restarts."""

    def signal(self, rank: int, signal_number: int) -> None:
        all_ranks, = processes.started
        all_ranks.send_signal(rank, signal_number)


@dataclass
class Boards(Place):
    """Ranks that run_jetson.sh starts; those that end are restarted, as by a person or a service."""

    preset: str
    keys: Mapping[str, str]
    spaces: Sequence[str]  # network namespaces of the ranks, if they have any
    is_keyed: bool  # whether each rank has keys of its own in `folder/keys`

    def keys_of(self, rank: int) -> dict[str, str]:
        """Return the configuration of a rank."""
        rank_keys = {"keys": str(self.folder / "keys" / str(rank))} if self.is_keyed else {}
        return {**self.keys, **rank_keys}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Start all boards, restart those that end, and finally wait until all end with rank 0."""
        self._running = {rank: self._start(rank) for rank in self.ranks}
        is_over = Event()
        restarts = Thread(target=self._keep_running, args=(is_over,), daemon=True)
        restarts.start()

        try:
            yield
        finally:
            is_over.set()
            restarts.join()
            waits_until = time.monotonic() + END_SECONDS
            for board in self._running.values():
                with suppress(subprocess.TimeoutExpired):
                    board.wait(max(0.0, waits_until - time.monotonic()))
                board.kill()
                board.wait()

    def signal(self, rank: int, signal_number: int) -> None:
        board = self._running.get(rank)
        if board:
            board.send_signal(signal_number)

    def _stop(self, rank: int) -> None:
        super()._stop(rank)
        time.sleep(self.timeout + self.random_source.uniform(1.0, 3.0))
        self.signal(rank, self.random_source.choice([signal.SIGCONT, signal.SIGKILL]))

    def _cut(self, rank: int) -> None:
        """Disconnect a board's cable for a while."""
        switch = self.spaces[0].rpartition("-")[0] + "-switch"
        set_link = "ip", "-n", switch, "link", "set", f"port{rank}"
        run(*set_link, "down")
        time.sleep(self.random_source.uniform(0.3, 2 * self.timeout + 1))
        run(*set_link, "up")

    def _loss(self, rank: int) -> None:
        """Make the wire of a board lose packets for a while."""
        tc = "tc", "-n", self.spaces[rank], "qdisc"
        is_lossy = any(run(*tc, "add", "dev", "eth0", "root", *discipline) for discipline in LOSSY_WIRES)
        assert is_lossy, "no wire can lose packets here"
        time.sleep(self.random_source.uniform(1.0, 2 * self.timeout))
        run(*tc, "del", "dev", "eth0", "root")

    def _split(self, rank: int) -> None:
        """End a board, and restart it with the part of another split, which must be refused; then it may restart with
        the correct one."""
        board = self._running.pop(rank)  # so that it is not restarted for now
        board.kill()
        board.wait()

        wrong_board = self._start(rank, model_dir=str(self.folder / "other"))
        try:
            exit_code = wrong_board.wait(2 * START_SECONDS)
            assert exit_code == REFUSED_EXIT_CODE, f"rank {rank} came back with another split, and ended otherwise"
        finally:
            wrong_board.kill()
            self._running[rank] = wrong_board

    def _keep_running(self, is_over: Event) -> None:
        while not is_over.wait(CHECK_SECONDS):
            for rank, board in list(self._running.items()):
                has_ended = board.poll() is not None
                if has_ended and self._running.get(rank) is board:
                    self._running[rank] = self._start(rank)

    def _start(self, rank: int, **other_keys: str) -> subprocess.Popen[bytes]:
        words = words_of(self.preset, {**self.keys_of(rank), **other_keys})
        enter_space = ["ip", "netns", "exec", self.spaces[rank]] if self.spaces else []
        command = [*enter_space, "bash", str(ROOT / "run_jetson.sh"), *words]
        environment = {**os.environ, "NODE_RANK": str(rank), "PYTHON": sys.executable}
        with open(self.folder / f"board_{rank}.log", "ab") as log_file:
            return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log_file,
                                    stderr=log_file)


# --- networks ---------------------------------------------------------------------------------------------------------

@contextmanager
def network(num_boards: int, folder: Path, has_namespaces: bool) -> Iterator[list[str]]:
    """Yield the network namespaces of some boards, after this thread has entered the first; none if not allowed.

    `folder/hosts` lists their addresses. Without namespaces, these are loopback addresses.
    """
    script = ["bash", str(ROOT / "scripts" / "netns_cluster.sh"), f"boards={num_boards}", f"logs={folder}"]
    with subprocess.Popen(script if has_namespaces else ["true"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        lines = islice(process.stdout, num_boards + 1)
        spaces = [line.split()[2] for line in lines if line.startswith("rank ")]
        if not spaces:
            (folder / "hosts").write_text("".join(f"127.0.0.{rank + 1}\n" for rank in range(num_boards)))
            yield []
            return

        with open("/proc/thread-self/ns/net", "rb") as home_space, \
                open(f"/run/netns/{spaces[0]}", "rb") as first_space:
            try:
                _enter(first_space)
                yield spaces
            finally:
                _enter(home_space)
                process.terminate()


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
def opened(place_name: str, preset: str, typed_keys: Mapping[str, str], folder: Path,
           random_source: Random) -> Iterator[tuple[Pipeline, Place]]:
    """Yield the pipeline of a preset with these keys, and the place of this name; `folder` is for its files.

    Its trace is on a small disk, which accidents can fill, if this user may create one.
    """
    run_config = resolve(words_of(preset, typed_keys)).keys.run
    prepared = prepare(run_config)
    # Boards must refuse the part of another split since it differs from rank 0's, not since another one was named.
    keys = {**typed_keys, "model_dir": str(prepared.folder), "stages": ""}
    ranks, kinds = range(1, prepared.placement.world), [*KINDS]

    with ExitStack() as opened_contexts:
        if opened_contexts.enter_context(small_disk(folder / "disk")):
            keys["trace"] = str(folder / "disk" / "trace")
            kinds.append("disk")

        if place_name == PROCESSES:
            pipeline = opened_contexts.enter_context(Pipeline.open(preset, **keys))
            yield pipeline, Processes(run_config.timeout, ranks, kinds, folder, random_source)
            return

        # boards
        spaces = opened_contexts.enter_context(network(len(ranks) + 1, folder, place_name == NAMESPACES))
        keys.update(hosts=str(folder / "hosts"), master=f":{free_port()}", wait=str(START_SECONDS))
        if spaces:
            kinds += ["cut", "loss"]
        if split_otherwise(run_config, prepared.spec(0).part.stages, folder / "other"):
            kinds.append("split")

        boards = Boards(run_config.timeout, ranks, kinds, folder, random_source, preset, keys, spaces,
                        make_keys(folder))
        opened_contexts.enter_context(boards.running())

        # rank 0
        with environment_kept("NODE_RANK"):
            os.environ["NODE_RANK"] = "0"
            pipeline = opened_contexts.enter_context(Pipeline.open(preset, **boards.keys_of(0)))
        yield pipeline, boards


def words_of(preset: str, keys: Mapping[str, str]) -> list[str]:
    """Return the arguments of a command."""
    return [preset, *(f"{key}={value}" for key, value in keys.items())]


def split_otherwise(run_config: RunConfig, stages: Sequence[int], folder: Path) -> bool:
    """Create a split of the model with other stages, for boards to restart with; return False if that is impossible."""
    if run_config.model_dir or not run_config.base_dir or len(stages) < 3:
        return False

    rank_0_layers, first_layers, second_layers, *other_layers = stages
    new_stages = rank_0_layers, first_layers - 1, second_layers + 1, *other_layers
    split(run_config.base_dir, folder, "+".join(map(str, new_stages)), run_config.eagle_dir or None, progress=False)
    return True


def make_keys(folder: Path) -> bool:
    """Create the keys of a cluster with `folder/hosts` in `folder/keys`; return whether this machine can."""
    return run("bash", ROOT / "scripts" / "make_keys.sh", f"hosts={folder / 'hosts'}", f"keys={folder / 'keys'}",
               "push=false")
