"""A process for every rank of this machine, from the start of the first to the end of the last.

It knows nothing about models: `run.py` decides what a rank does, and `ranks.py` how ranks connect. They meet in a
private folder and use its sockets, or loopback for process groups, so no other machine can reach anything.

One process, the server, forks the ranks. It imports their modules once, and they share its memory. Before that it
computes nothing, as threads of libraries do not survive a fork. A command whose process has a single thread forks the
server, too, which saves a second import of torch; else it starts this module as a program: `python -m cluster.processes
SOCKET RANKS RETURNING MODULE [WORD ...]` runs the module as each of these ranks. Over the socket it reports `forked
RANK PID` and `ended RANK CODE`. If one of the RETURNING ranks is killed, the server reports `died RANK CODE` and forks
it again; it kills such a rank if rank 0 has found it hung. An order over the socket ends all ranks.
"""
from __future__ import annotations

import gc
import importlib
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections import Counter
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any, Iterator, Mapping, MutableMapping, NoReturn, Sequence

from cluster.folder import RENDEZVOUS, Folder, private_folder
from cluster.heartbeat import report_loss, reported_loss
from config.console import EXIT_LOST, EXIT_STOPPED, EXIT_WRONG, die, interrupt, say
from config.failure import FILES, SPACE, explain, limit_remedy

HUNG = "hung/{}"  # in the store: how often rank 0 has found a rank hung; the server then kills it
CTRL_C = "ctrl_c"  # in the store: set while rank 0 handles Ctrl-C itself
LAUNCHER = "FLOWSPEC_LAUNCHER"  # in the environment of a rank: the process that it must not outlive
INTERFACE = "GLOO_SOCKET_IFNAME"  # in the environment: where gloo listens
GRACE = 3  # seconds for a rank to end by itself, before it is killed
POLL_SECONDS = 0.05  # seconds between two checks of which ranks have ended
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # signals that ask a command to end
OPEN = 64, 8  # files that a rank may hold open: its own, and for each rank of the run
LAST = b"end"  # the order to the server to kill all ranks and end
REPORT = 64  # maximum bytes of a report


# --- the launcher: start ----------------------------------------------------------------------------------------------

class Ranks:
    """The ranks that a server forks for this process, until `kill`; raises OSError if the server cannot be started.

    A rank in `returning` is started again if it is killed. With `forks`, this process may fork the server.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], numbers: Sequence[int],
                 returning: Sequence[int], forks: bool = False) -> None:
        self.numbers = numbers
        self.pids: dict[int, int] = {}  # of the ranks that have been forked
        self._ended: dict[int, int] = {}
        self.deaths: dict[int, int] = {}  # exit codes of ranks that were started again
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # keeps reports apart
        self._socket.setblocking(False)
        listed = (",".join(map(str, ranks)) for ranks in (numbers, returning))
        server_words = [f"{theirs.fileno()}", *listed, *command]
        with theirs:
            self._server = self._start_server(server_words, environment, theirs.fileno(), forks)
        started.add(self)

    def _start_server(self, words: Sequence[str], environment: Mapping[str, str],
                      inherited: int, forks: bool) -> subprocess.Popen[bytes] | ForkedServer:
        if forks and has_single_thread():
            return ForkedServer(words, environment, self._socket)
        program = [sys.executable, "-m", "cluster.processes", *words]
        return subprocess.Popen(program, env=environment, pass_fds=[inherited])

    def ended(self) -> Mapping[int, int]:
        """Return the exit codes of ended ranks, in order of time; if the server is gone, its code for all others."""
        gone = self._server.poll()
        self._read()
        if gone is not None:
            for rank in self.numbers:
                self._ended.setdefault(rank, gone)
        return self._ended

    @property
    def all_ended(self) -> bool:
        return len(self.ended()) == len(self.numbers)

    def send_signal(self, one: int, number: int) -> None:
        """Send a signal to a rank, if it has been forked and has not ended."""
        if one not in self.ended() and one in self.pids:
            os.kill(self.pids[one], number)

    def wait(self, seconds: float) -> None:
        """Give the ranks this many seconds to end by themselves."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.all_ended:
            time.sleep(POLL_SECONDS)

    def kill(self) -> None:
        """Kill the ranks that are still running, and end the server."""
        for rank in self.numbers:
            self.send_signal(rank, signal.SIGKILL)
        if len({*self.pids, *self.deaths}) < len(self.numbers):
            self._server.kill()  # else it would fork the others
        with suppress(OSError):  # the server is gone
            self._socket.send(LAST)
        self._server.wait()
        self.ended()
        self._socket.close()
        started.discard(self)

    def _read(self) -> None:
        """Read the server's reports since the last call."""
        kinds = {b"forked": self.pids, b"died": self.deaths, b"ended": self._ended}
        with suppress(OSError):  # there is no further report yet, or the socket was closed
            while report := self._socket.recv(REPORT):
                kind, rank, number = report.split()
                kinds[kind][int(rank)] = int(number)
                if kind == b"died":
                    del self.pids[int(rank)]


class ForkedServer:
    """A fork of this process that runs as the server, with the methods of a `Popen`."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], launcher_socket: socket.socket) -> None:
        self._exit_code: int | None = None
        with suppress(OSError, ValueError):  # a stream may be closed
            sys.stdout.flush()
            sys.stderr.flush()
        self._pid = os.fork()
        if not self._pid:
            launcher_socket.close()
            _serve(words, environment)

    def poll(self) -> int | None:
        if self._exit_code is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self._exit_code = exit_code_of(status) if pid else None
        return self._exit_code

    def wait(self) -> None:
        while self.poll() is None:
            time.sleep(POLL_SECONDS)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self._pid, signal.SIGKILL)


def has_single_thread() -> bool:
    """Whether this process has no threads that would be missing in a fork, those of libraries included."""
    with suppress(OSError):
        return len(os.listdir("/proc/self/task")) == 1
    return False


def _serve(words: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Be the server in a fork of the launcher; nothing of what the launcher has begun is ended here."""
    code: Any = EXIT_WRONG
    try:
        for number in STOPS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, interrupt if number == signal.SIGINT else signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(environment)
        main(words)
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    die(code if isinstance(code, int) else EXIT_WRONG)


def exit_code_of(status: int) -> int:
    """Return the exit code in what `os.waitpid` returned; of a killed process, the signal's number, negated."""
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


started: set[Ranks] = set()  # by this process, and not yet ended by `kill`


def start_ranks(command: Sequence[str], folder: str, world: int, numbers: Sequence[int],
                returning: Sequence[int] = (), forks: bool = False) -> Ranks:
    """Run `python3 -m command` for each of these ranks, which meet in a private folder.

    The ranks inherit a mask that blocks Ctrl-C until rank 0 can handle it without a traceback.
    """
    assert set(numbers) <= set(range(world)), (list(numbers), world)
    environment = {**os.environ, LAUNCHER: str(os.getpid()), RENDEZVOUS: folder}
    environment["WORLD_SIZE"] = str(world)
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # FlowSpec itself reports a broken connection
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait leave their core to another rank …
    environment.setdefault("GOMP_SPINCOUNT", "10000")  # … but not between two products: to wake them takes longer
    environment.pop(INTERFACE, None)  # it may lead to other machines
    keep_on_loopback(environment)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return Ranks(command, environment, numbers, returning, forks)
    except OSError as error:
        raise ValueError(f"the ranks could not be started: {explain(error)}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def keep_on_loopback(environment: MutableMapping[str, str]) -> None:
    """Make gloo listen on loopback unless an interface is set; by default it uses the address of the host's name."""
    if any(name == "lo" for _, name in socket.if_nameindex()):
        environment.setdefault(INTERFACE, "lo")


def allow_files(world: int) -> None:
    """Allow this process and the ranks as many open files as a rank needs; raises ValueError if that is forbidden."""
    alone, each = OPEN
    needed = alone + each * world
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ValueError(f"a rank of {world} may need {needed} open files, but {limit_remedy(FILES)}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


# --- the launcher: end ------------------------------------------------------------------------------------------------

def spawn(command: Sequence[str], world: int, recovers: bool = False) -> int:
    """Run `python3 -m command` once for each rank. Returns the exit code of the run, once all ranks have ended.

    If the run `recovers`, any rank but 0 is started again when it is killed.
    """
    allow_files(world)
    with private_folder() as folder, _noting_stops(folder) as stops:
        returning = range(1, world) if recovers else ()
        ranks = start_ranks(command, folder, world, range(world), returning, forks=True)
        ended = _await(ranks, stops)
        loss = reported_loss(Folder(folder))
    if stops:
        return EXIT_STOPPED + stops[0]
    if ended.get(0) == EXIT_LOST:
        ended = {**ranks.deaths, **ended}
    return _exit_code(ended, loss)


@contextmanager
def _noting_stops(folder: str) -> Iterator[list[int]]:
    """Yield a list to which signals that ask this process to end are added. After one of them Ctrl-C is ignored."""
    stops: list[int] = []
    before = {number: signal.getsignal(number) for number in STOPS}

    def note_stop(number: int, frame: object) -> None:
        if number != signal.SIGINT or not Folder(folder).add(CTRL_C, 0):
            stops.append(number)

    for number, handler in before.items():
        if number != signal.SIGHUP or handler != signal.SIG_IGN:  # under nohup SIGHUP stays ignored
            signal.signal(number, note_stop)
    try:
        yield stops
    finally:
        for number, handler in before.items():
            ignored = bool(stops) and number == signal.SIGINT
            signal.signal(number, signal.SIG_IGN if ignored else handler)


def _await(ranks: Ranks, stops: Sequence[int]) -> dict[int, int]:
    """Wait for the ranks, and return the exit codes of those that end by themselves, in order.

    Once rank 0 has ended or a rank has failed, the others have `GRACE` seconds; then they are killed.
    """
    while not ranks.all_ended:
        ended = ranks.ended()
        if stops or 0 in ended or any(ended.values()):
            if stops:
                ranks.send_signal(0, signal.SIGINT)  # rank 0 then ends all ranks in an orderly way
            ranks.wait(GRACE)
            break
        time.sleep(POLL_SECONDS)
    by_themselves = dict(ranks.ended())
    ranks.kill()
    return by_themselves


def lost(ranks: Ranks, folder: str) -> str:
    """Return why a run is lost, if a rank has ended that is not started again, else an empty string."""
    ended = ranks.ended()
    return reason_of(ended, reported_loss(Folder(folder))) if ended else ""


def kill_all() -> None:
    """Kill all ranks that this process has started, even if other threads wait for them."""
    for ranks in list(started):
        ranks.kill()


def _exit_code(ended: dict[int, int], loss: str) -> int:
    """Return the exit code of a run from those of its ranks. `loss` is what the ranks have reported of a lost peer.

    Print what no rank could: which rank was killed, or has ended without a message.
    """
    first = ended.get(0, 0)
    bad = {rank: code for rank, code in ended.items() if code}
    if not bad or (first > 0 and first not in (EXIT_WRONG, EXIT_LOST)):
        return first  # 0, or the command's own
    is_wrong = EXIT_WRONG in bad.values()
    if message := loss if is_wrong else reason_of(bad, loss):  # if nothing is reported, rank 0 has printed it
        say(message, "\n")
    return EXIT_WRONG if is_wrong else EXIT_LOST


def reason_of(bad: Mapping[int, int], loss: str) -> str:
    """Return why a run is lost: ranks that were killed, else the reported `loss`, else the first early end, if any."""
    killed = [_death(rank, -code) for rank, code in bad.items() if code < 0]
    early = [f"rank {rank} ended too early, with exit code {code}" for rank, code in bad.items()]
    return "; ".join(killed) or loss or "".join(early[:1])


def _death(rank: int, number: int) -> str:
    message = f"rank {rank} was killed ({signal.Signals(number).name})"
    if number == signal.SIGKILL:
        return f"{message}: by hand, or by the system if memory ran short, as dmesg would show"
    reason = limit_remedy(SPACE) if number != signal.SIGTERM else ""
    return f"{message}: {reason}" if reason else message


# --- what a rank knows of its launcher --------------------------------------------------------------------------------

def launched() -> bool:
    """Whether `start_ranks` has started this rank; then the launcher reports the losses of its ranks."""
    return RENDEZVOUS in os.environ


def keep_ctrl_c() -> None:
    """Let this rank alone, without its launcher, handle Ctrl-C from now on."""
    if launched():
        Folder(os.environ[RENDEZVOUS]).add(CTRL_C, 1)


def note(loss: str) -> None:
    """Note a loss for the launcher, which reports the first one of all its ranks."""
    report_loss(Folder(os.environ[RENDEZVOUS]), loss)


# --- the process that forks the ranks ---------------------------------------------------------------------------------

def main(argv: Sequence[str]) -> None:
    file, ranks, returning, module, *words = argv
    importlib.import_module(module)
    gc.freeze()  # else the first garbage collection in a rank would copy the memory that it shares
    forked: dict[int, str] = {}
    launcher = socket.socket(fileno=int(file))
    for rank in chain(ranks.split(","), _returned(launcher, forked, returning.split(","))):
        try:
            pid = os.fork()
        except OSError as error:
            say(f"rank {rank} could not be started: {explain(error)}")
            sys.exit(EXIT_WRONG)  # the ranks that were forked end with this process
        if not pid:
            launcher.close()
            _be_rank(rank, module, words)
            return
        forked[pid] = rank
        _report(launcher, "forked", rank, pid)


def _be_rank(rank: str, module: str, words: Sequence[str]) -> None:
    """Run `python3 -m module words` as this rank, under a name that `top` shows."""
    with suppress(OSError):  # if /proc is read-only
        Path("/proc/self/comm").write_text(f"flowspec-{rank}", encoding="utf-8")
    os.environ.update({LAUNCHER: str(os.getppid()), "RANK": rank})
    sys.argv[1:] = words
    del sys.modules[module]  # runpy warns of a module that is already imported
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _returned(launcher: socket.socket, forked: dict[int, str], returning: Sequence[str]) -> Iterator[str]:
    """Yield the ranks in `returning` that must be forked again; meanwhile report the ranks that have ended.

    After the order `LAST` it ends with the last rank. If the launcher is gone it ends at once, as do the ranks.
    """
    parent, store, last = int(os.environ[LAUNCHER]), Folder(os.environ[RENDEZVOUS]), False
    found: Counter[str] = Counter()  # how often each rank was found hung
    while os.getppid() == parent and (forked or not last):
        with suppress(OSError):  # there is no order yet, or the launcher is gone
            last = last or launcher.recv(REPORT, socket.MSG_DONTWAIT) == LAST
        for pid, rank in forked.items():
            times = store.add(HUNG.format(rank), 0) if rank in returning and not last else 0
            if last or times > found[rank]:
                os.kill(pid, signal.SIGKILL)
            found[rank] = times
        pid, status = os.waitpid(-1, os.WNOHANG) if forked else (0, 0)
        if not pid:
            time.sleep(POLL_SECONDS)
            continue
        rank, code = forked.pop(pid), exit_code_of(status)
        returns = rank in returning and not last and code < 0
        _report(launcher, "died" if returns else "ended", rank, code)
        if returns:
            yield rank


def _report(launcher: socket.socket, *facts: object) -> None:
    """Report an event to the launcher: its kind, the rank, and the rank's process id or exit code."""
    with suppress(OSError):  # the launcher is gone
        launcher.send(" ".join(map(str, facts)).encode())


if __name__ == "__main__":
    main(sys.argv[1:])
