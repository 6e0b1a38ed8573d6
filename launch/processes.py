"""A process for every rank of this machine, from the start of the first to the end of the last, in one sentence.

It knows nothing about models; what a rank does is told in launch/run.py. Ranks meet in a private folder and talk
over loopback, so that nothing listens where others could reach it.
"""
from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial
from typing import Any, Iterator, MutableMapping, NoReturn, Sequence

import torch.distributed as dist

from config.foreign import plain
from launch.folder import Folder, private_folder
from pipeline.heartbeat import LOST as NOTED
from pipeline.heartbeat import first_loss
from pipeline.loss import FILES, SPACE, PeerLost, explain, guarded, limited

WRONG, LOST, STOPPED = 2, 75, 128  # exit codes: bad input, a peer is gone, ended by a signal (whose number is added)
INTERRUPTED = STOPPED + signal.SIGINT
LAUNCHER = "FLOWSPEC_LAUNCHER"  # in the environment of a rank: the process that it shall not outlive
FOLDER = "FLOWSPEC_FOLDER"  # and the folder in which the ranks meet
GRACE = 3  # seconds for a rank to end in good order, before it is killed
LOOK = 0.05  # seconds between two looks at who has ended
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # what asks a command to end
OPEN = 64, 8  # files that a rank may hold open: by itself, and for each other rank

Ranks = Sequence["subprocess.Popen[bytes]"]


def spawn(command: Sequence[str], world: int) -> int:
    """Run `python -m command` once for each rank; the exit code, once all have ended."""
    allow_files(world)
    with private_folder() as folder, _noting_stops() as stops:
        ended = _await(start_ranks(command, folder, world, range(world)), stops)
        noted = Folder(folder).peek(NOTED) or b""
    return STOPPED + stops[0] if stops else _verdict(ended, plain(noted.decode(errors="replace")))


def allow_files(world: int) -> None:
    """Let this process, and those that it starts, open as many files as a rank needs; refuses where that is forbidden.
    """
    alone, each = OPEN
    needed, (soft, hard) = alone + each * world, resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ValueError(f"a rank of {world} may need {needed} open files, but {limited(FILES)}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _environment(folder: str, world: int) -> dict[str, str]:
    """What every rank of this machine finds there."""
    found = {**os.environ, LAUNCHER: str(os.getpid()), FOLDER: folder, "WORLD_SIZE": str(world),
             "LOCAL_WORLD_SIZE": str(world)}
    found.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a broken connection is told in our words
    found.pop("GLOO_SOCKET_IFNAME", None)  # the way to other machines
    _stay_here(found)
    return found


def _stay_here(environment: MutableMapping[str, str]) -> None:
    """Let gloo listen on loopback, where nothing else was asked for; else it takes what the host's name leads to."""
    if any(name == "lo" for _, name in socket.if_nameindex()):
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")


@contextmanager
def _noting_stops() -> Iterator[list[int]]:
    """The signals that ask this process to end, as they come. After one of them Ctrl-C has nothing more to say."""
    stops: list[int] = []
    before = {number: signal.getsignal(number) for number in STOPS}
    for number, handler in before.items():
        if number != signal.SIGHUP or handler != signal.SIG_IGN:  # else as nohup wants it
            signal.signal(number, lambda number, frame: stops.append(number))
    try:
        yield stops
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if stops and number == signal.SIGINT else handler)


def start_ranks(command: Sequence[str], folder: str, world: int, numbers: Sequence[int]) -> Ranks:
    """Run `python -m command` for each of these ranks, which meet in a private folder.

    Ctrl-C waits in the ranks, which inherit the mask, until rank 0 can obey it: one that still imports its modules
    would answer with a traceback.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    environment = _environment(folder, world)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for rank in numbers:
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen([sys.executable, "-m", *command], env={**environment, **own}))
    except OSError as error:
        kill(ranks)
        raise ValueError(f"rank {numbers[len(ranks)]} could not be started: {explain(error)}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return ranks


def _await(ranks: Ranks, stops: Sequence[int]) -> dict[int, int]:
    """The exit codes of those that end by themselves, the first one first. Then the others have `GRACE` seconds.

    Others may take their time as long as rank 0 is at work and no rank has failed.
    """
    ended: dict[int, int] = {}
    deadline = 0.0
    while len(ended) < len(ranks):
        for rank, process in enumerate(ranks):
            if rank not in ended and process.poll() is not None:
                ended[rank] = process.returncode
        if not deadline and (stops or any(ended.values()) or ranks[0].returncode is not None):
            deadline = time.monotonic() + GRACE
            if stops and ranks[0].returncode is None:
                ranks[0].send_signal(signal.SIGINT)  # it lets all end in good order
        if deadline and time.monotonic() > deadline:
            break
        time.sleep(LOOK)
    kill(ranks)
    return ended


def await_ends(ranks: Ranks) -> None:
    """Give ranks the time to end in good order."""
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline and any(process.poll() is None for process in ranks):
        time.sleep(LOOK)


def kill(ranks: Ranks) -> None:
    for process in ranks:
        if process.poll() is None:
            process.kill()
            process.wait()


def _verdict(ended: dict[int, int], noted: str) -> int:
    """The exit code of a run; tells what no rank could tell. `noted` is a loss that the ranks have agreed on."""
    killed = {rank: -code for rank, code in ended.items() if code < 0}
    bad = {rank: code for rank, code in ended.items() if code}
    code = next((code for code in bad.values() if code == WRONG), LOST if bad else 0)
    if ended.get(0, 0) > 0 and ended[0] not in (WRONG, LOST):
        return ended[0]  # the command's own verdict
    if killed and code == LOST:
        told = "; ".join(_death(rank, number) for rank, number in killed.items())
    elif noted or code != LOST:
        told = noted  # else rank 0 has told
    else:
        rank, number = next(iter(bad.items()))
        told = f"rank {rank} ended too early, with exit code {number}"
    if told and code:
        print(f"\nflowspec: {told}", file=sys.stderr)
    return code


def _death(rank: int, number: int) -> str:
    """What killed a rank, and why that may be."""
    reason = limited(SPACE) if number != signal.SIGTERM else ""
    if number == signal.SIGKILL:
        reason = "by hand, or by the system if memory ran short, as dmesg would tell"
    return f"rank {rank} was killed ({signal.Signals(number).name})" + (f": {reason}" if reason else "")


def die(code: int) -> NoReturn:
    """End this process at once, without waiting for threads that wait for peers."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def launched() -> bool:
    """Whether this is a rank that `spawn` has started, which tells what its ranks have lost."""
    return FOLDER in os.environ


def note(loss: str) -> None:
    """Leave it to the launcher to tell: of all that its ranks note, it tells what came first."""
    first_loss(Folder(os.environ[FOLDER]), loss)


class Agent:
    """The rendezvous of ranks that were started together on a machine, by `spawn` or by a person's own torchrun."""

    apart = False  # they share a machine and a terminal
    names: Sequence[str] = ()

    def connect(self) -> Any:
        """Join the process group of all ranks; the store in which they tell each other that they live."""
        launcher = int(os.environ.get(LAUNCHER) or os.getppid())
        if os.getppid() != launcher:
            _end_as_orphan()
        guarded("launcher", partial(_outlive_nobody, launcher), lambda thread, error: die(LOST))
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        try:
            if launched():
                return join(os.environ[FOLDER], rank, world)
            if os.environ.get("LOCAL_WORLD_SIZE") == str(world):
                _stay_here(os.environ)
            dist.init_process_group("gloo")
        except RuntimeError as error:
            raise PeerLost(f"rank {rank} could not connect to the others: {explain(error)}") from error
        return dist.distributed_c10d._get_default_store()


def join(folder: str, rank: int, world: int) -> Folder:
    """Join the process group of all ranks of this machine; the store in which they tell each other that they live."""
    files = dist.FileStore(os.path.join(folder, "groups"), world)
    dist.init_process_group("gloo", store=files, rank=rank, world_size=world)
    return Folder(folder)


def join_beside(others: Ranks, folder: str, world: int) -> Folder:
    """`join` as rank 0, beside ranks that may fail to come, which is told."""
    joined: list[Folder] = []
    failed: list[BaseException] = []
    with _here_only():
        waiting = guarded("join", lambda: joined.append(join(folder, 0, world)), lambda _, error: failed.append(error))
        while waiting.is_alive() and all(process.poll() is None for process in others):
            waiting.join(LOOK)
    if joined:
        return joined[0]
    noted = plain((Folder(folder).peek(NOTED) or b"").decode(errors="replace"))
    own = explain(failed[0]) if failed else "they ended while they started"
    raise PeerLost(noted or f"rank 0 could not connect to the others: {own}")


@contextmanager
def _here_only() -> Iterator[None]:
    """Let gloo listen on loopback while it connects, and leave the program's environment as it was."""
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    _stay_here(os.environ)
    try:
        yield
    finally:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        if before is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = before


def _outlive_nobody(launcher: int) -> None:
    """If the launcher is killed, so is this rank, even before there is a heartbeat that would notice."""
    while os.getppid() == launcher:
        time.sleep(GRACE / 6)
    _end_as_orphan()


def _end_as_orphan() -> NoReturn:
    """Nobody else can remove the folder; but first whoever has just begun to connect in it must be done with that,
    since torch waits for a file that is gone and lets no other thread run meanwhile."""
    if launched():
        time.sleep(1)
        shutil.rmtree(os.environ[FOLDER], ignore_errors=True)
    die(LOST)
