"""A process for every rank of this machine, from the start of the first to the end of the last.

It knows nothing about models: `run.py` decides what a rank does, and `ranks.py` how ranks find each other. Their
rendezvous is a private folder, and they talk over loopback, so nothing listens where other machines could reach it.
"""
from __future__ import annotations

import os
import resource
import signal
import socket
import time
from contextlib import contextmanager
from typing import Iterator, Mapping, MutableMapping, Sequence

from config.schema.untrusted import plain
from launch.console import LOST, STOPPED, WRONG, say
from launch.folder import Folder, private_folder
from launch.fork_server import LAUNCHER, LOOK, Ranks, started
from pipeline.failure import FILES, SPACE, explain, first_loss, limited
from pipeline.failure import LOST as NOTED

FOLDER = "FLOWSPEC_FOLDER"  # in the environment of a rank: the folder that is the ranks' rendezvous
GRACE = 3  # seconds for a rank to end in good order, before it is killed
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # what asks a command to end
OPEN = 64, 8  # files that a rank may hold open: by itself, and for each other rank


# --- the launcher: start ----------------------------------------------------------------------------------------------

def spawn(command: Sequence[str], world: int) -> int:
    """Run `python -m command` once for each rank. Returns the exit code of the run, once all ranks have ended."""
    allow_files(world)
    with private_folder() as folder, _noting_stops() as stops:
        ranks = start_ranks(command, folder, world, range(world))
        ended = _await(ranks, stops)
        loss = noted_in(folder)
    if stops:
        return STOPPED + stops[0]
    return _exit_code(ended, loss)


def noted_in(folder: str) -> str:
    """What the ranks whose rendezvous is this folder have noted of a lost peer."""
    return plain((Folder(folder).look(NOTED) or b"").decode(errors="replace"))


def allow_files(world: int) -> None:
    """Let this process and the ranks open as many files as a rank needs; raises ValueError where that is forbidden."""
    alone, each = OPEN
    needed = alone + each * world
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ValueError(f"a rank of {world} may need {needed} open files, but {limited(FILES)}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def start_ranks(command: Sequence[str], folder: str, world: int, numbers: Sequence[int]) -> Ranks:
    """Run `python -m command` for each of these ranks, whose rendezvous is a private folder.

    Ctrl-C waits in the ranks, which inherit the mask, until rank 0 can obey it: one that still imports its modules
    would answer with a traceback.
    """
    assert set(numbers) <= set(range(world)), (list(numbers), world)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return Ranks(command, _environment(folder, world), numbers)
    except OSError as error:
        raise ValueError(f"the ranks could not be started: {explain(error)}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _environment(folder: str, world: int) -> dict[str, str]:
    found = dict(os.environ)
    found[LAUNCHER] = str(os.getpid())
    found[FOLDER] = folder
    found["WORLD_SIZE"] = found["LOCAL_WORLD_SIZE"] = str(world)
    found.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a broken connection is reported in our words
    found.pop("GLOO_SOCKET_IFNAME", None)  # the way to other machines
    keep_on_loopback(found)
    return found


@contextmanager
def environment_kept(*names: str) -> Iterator[None]:
    """The program around a pipeline gets these variables of its environment back as they were."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def keep_on_loopback(environment: MutableMapping[str, str]) -> None:
    """Let gloo listen on loopback, where nothing else was asked for; else it takes what the host's name leads to."""
    if any(name == "lo" for _, name in socket.if_nameindex()):
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")


# --- the launcher: end ------------------------------------------------------------------------------------------------

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
            deaf = bool(stops) and number == signal.SIGINT
            signal.signal(number, signal.SIG_IGN if deaf else handler)


def _await(ranks: Ranks, stops: Sequence[int]) -> dict[int, int]:
    """The exit codes of the ranks that end by themselves, the first one first; after `GRACE` seconds the others are
    killed.

    Others may take their time as long as rank 0 is at work and no rank has failed.
    """
    deadline = 0.0
    while not ranks.all_ended:
        ended = ranks.ended()
        if not deadline and (stops or 0 in ended or any(ended.values())):
            deadline = time.monotonic() + GRACE
            if stops:
                ranks.send_signal(0, signal.SIGINT)  # it lets all end in good order
        if deadline and time.monotonic() > deadline:
            break
        time.sleep(LOOK)
    by_themselves = dict(ranks.ended())
    ranks.kill()
    return by_themselves


def await_ends(ranks: Ranks) -> None:
    """Give ranks `GRACE` seconds to end in good order."""
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline and not ranks.all_ended:
        time.sleep(LOOK)


def kill_all() -> None:
    """End all ranks that this process has started, at once, whichever thread waits for them."""
    for ranks in list(started):
        ranks.kill()


def _exit_code(ended: dict[int, int], loss: str) -> int:
    """The exit code of a run, by those of its ranks. `loss` is what the ranks have noted of a lost peer.

    It reports what no rank could: who was killed, or has ended without a word.
    """
    first = ended.get(0, 0)
    if first > 0 and first not in (WRONG, LOST):
        return first  # the command's own
    bad = {rank: code for rank, code in ended.items() if code}
    if not bad:
        return 0
    if WRONG in bad.values():
        code, message = WRONG, loss  # if nothing is noted, rank 0 has printed it
    else:
        code, message = LOST, reason_of(bad, loss)
    if message:
        say(message, "\n")
    return code


def reason_of(bad: Mapping[int, int], loss: str) -> str:
    """Why a run is lost, by exit codes of ranks: who was killed, which no rank could say; else what ranks noted."""
    killed = [_death(rank, -code) for rank, code in bad.items() if code < 0]
    if killed or loss:
        return "; ".join(killed) or loss
    rank, code = next(iter(bad.items()))
    return f"rank {rank} ended too early, with exit code {code}"


def _death(rank: int, number: int) -> str:
    message = f"rank {rank} was killed ({signal.Signals(number).name})"
    if number == signal.SIGKILL:
        return f"{message}: by hand, or by the system if memory ran short, as dmesg would show"
    reason = limited(SPACE) if number != signal.SIGTERM else ""
    return f"{message}: {reason}" if reason else message


# --- what a rank knows of its launcher --------------------------------------------------------------------------------

def launched() -> bool:
    """Whether `spawn` has started this rank; then the launcher reports what its ranks have lost."""
    return FOLDER in os.environ


def note(loss: str) -> None:
    """Leave a loss to the launcher: of all that its ranks note, it reports what came first."""
    first_loss(Folder(os.environ[FOLDER]), loss)
