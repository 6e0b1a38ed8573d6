"""A process for every rank of this machine, from the start of the first to the end of the last.

It knows nothing about models: `run.py` decides what a rank does, and `ranks.py` how ranks connect. They meet in a
private folder and use its sockets, or loopback for process groups, so no other machine can reach anything.

One process, the server, forks the ranks. It imports their modules once, and they share its memory. Before that it
computes nothing, as threads of libraries do not survive a fork. A command whose process has a single thread forks the
server, too, which saves a second import of torch; else it starts this module as a program: `cluster.processes
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
from config.console import EXIT_LOST, EXIT_STOPPED, EXIT_WRONG, ROOT, die, interrupt, say
from config.failure import CUT_FILE, FILES, SPACE, explain, limit_remedy

HUNG_KEY = "hung/{}"  # in the store: how often rank 0 has found a rank hung; the server then kills it
CTRL_C_KEY = "ctrl_c"  # in the store: set while rank 0 handles Ctrl-C itself
LAUNCHER_VARIABLE = "FLOWSPEC_LAUNCHER"  # in the environment of a rank: the process that it must not outlive
INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"  # in the environment: where gloo listens
GRACE_SECONDS = 3  # for a rank to end by itself, before it is killed
POLL_SECONDS = 0.05  # seconds between two checks of which ranks have ended
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # signals that ask a command to end
OPEN_FILES = 64, 8  # that a rank may hold: its own, and for each rank of the run
# Starts a module, as -m does. Python 3.10 does not know PYTHONSAFEPATH: it would search a user's own folder first.
START = (f"import runpy, sys; sys.path[:] = [{str(ROOT)!r}, *filter(None, sys.path)]; "
         "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)")
END_ORDER = b"end"  # the order to the server to kill all ranks and end
MAX_REPORT_BYTES = 64


# --- the launcher: start ----------------------------------------------------------------------------------------------

class Ranks:
    """The ranks that a server forks for this process, until `kill`; raises OSError if the server cannot be started.

    A rank in `returning` is started again if it is killed. This process forks the server if it `may_fork`.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], numbers: Sequence[int],
                 returning: Sequence[int], may_fork: bool = False) -> None:
        self.numbers = numbers
        self.pids: dict[int, int] = {}  # of the ranks that have been forked
        self.deaths: dict[int, int] = {}  # exit codes of ranks that were started again
        self._exit_codes: dict[int, int] = {}  # of ended ranks

        self._socket, server_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # keeps reports apart
        self._socket.setblocking(False)
        rank_lists = (",".join(map(str, ranks)) for ranks in (numbers, returning))
        server_words = [f"{server_socket.fileno()}", *rank_lists, *command]
        with server_socket:
            self._server = self._start_server(server_words, environment, server_socket.fileno(), may_fork)
        started.add(self)

    def _start_server(self, words: Sequence[str], environment: Mapping[str, str],
                      inherited_file: int, may_fork: bool) -> subprocess.Popen[bytes] | ForkedServer:
        if may_fork and has_single_thread():
            return ForkedServer(words, environment, self._socket)
        program = [sys.executable, "-c", START, "cluster.processes", *words]
        return subprocess.Popen(program, env=environment, pass_fds=[inherited_file])

    def ended(self) -> Mapping[int, int]:
        """Return the exit codes of ended ranks, in order of time; if the server is gone, its code for all others."""
        server_exit_code = self._server.poll()
        self._read()
        if server_exit_code is not None:
            for rank in self.numbers:
                self._exit_codes.setdefault(rank, server_exit_code)
        return self._exit_codes

    @property
    def all_ended(self) -> bool:
        return len(self.ended()) == len(self.numbers)

    def send_signal(self, rank: int, signal_number: int) -> None:
        """Send a signal to a rank, if it has been forked and has not ended."""
        exit_codes, pids = self.ended(), self.pids
        if rank not in exit_codes and rank in pids:
            os.kill(pids[rank], signal_number)

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
            self._socket.send(END_ORDER)

        self._server.wait()
        self.ended()
        self._socket.close()
        started.discard(self)

    def _read(self) -> None:
        """Read the server's reports since the last call."""
        numbers_of_kind = {b"forked": self.pids, b"died": self.deaths, b"ended": self._exit_codes}
        with suppress(OSError):  # there is no further report yet, or the socket was closed
            while report := self._socket.recv(MAX_REPORT_BYTES):
                kind, rank, number = report.split()
                numbers_of_kind[kind][int(rank)] = int(number)
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
    exit_code: Any = EXIT_WRONG
    try:
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, interrupt if number == signal.SIGINT else signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(environment)

        main(words)
        exit_code = 0
    except SystemExit as end:
        exit_code = end.code or 0
    except BaseException:
        traceback.print_exc()
    die(exit_code if isinstance(exit_code, int) else EXIT_WRONG)


def exit_code_of(status: int) -> int:
    """Return the exit code in what `os.waitpid` returned; of a killed process, the signal's number, negated."""
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


started: set[Ranks] = set()  # by this process, and not yet ended by `kill`


def start_ranks(command: Sequence[str], folder: str, world: int, numbers: Sequence[int],
                returning: Sequence[int] = (), may_fork: bool = False) -> Ranks:
    """Run `python3 -m command` for each of these ranks, which meet in a private folder.

    The ranks inherit a mask that blocks Ctrl-C until rank 0 can handle it without a traceback.
    """
    assert set(numbers) <= set(range(world)), (list(numbers), world)

    environment = {**os.environ, LAUNCHER_VARIABLE: str(os.getpid()), RENDEZVOUS: folder}
    environment["WORLD_SIZE"] = str(world)
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # FlowSpec itself reports a broken connection
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait leave their core to another rank …
    environment.setdefault("GOMP_SPINCOUNT", "10000")  # … but not between two products: to wake them takes longer
    environment.pop(INTERFACE_VARIABLE, None)  # it may lead to other machines
    keep_on_loopback(environment)

    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return Ranks(command, environment, numbers, returning, may_fork)
    except OSError as error:
        raise ValueError(f"the ranks could not be started: {explain(error)}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def keep_on_loopback(environment: MutableMapping[str, str]) -> None:
    """Make gloo listen on loopback unless an interface is set; by default it uses the address of the host's name."""
    if any(name == "lo" for _, name in socket.if_nameindex()):
        environment.setdefault(INTERFACE_VARIABLE, "lo")


def allow_files(world: int) -> None:
    """Allow this process and the ranks as many open files as a rank needs; raises ValueError if that is forbidden."""
    own_files, files_per_rank = OPEN_FILES
    num_files = own_files + files_per_rank * world
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft_limit == resource.RLIM_INFINITY or soft_limit >= num_files:
        return

    if hard_limit != resource.RLIM_INFINITY and hard_limit < num_files:
        raise ValueError(f"a rank of {world} may need {num_files} open files, but {limit_remedy(FILES)}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, hard_limit))


# --- the launcher: end ------------------------------------------------------------------------------------------------

def spawn(command: Sequence[str], world: int, recovers: bool = False) -> int:
    """Run `python3 -m command` once for each rank. Returns the exit code of the run, once all ranks have ended.

    If the run `recovers`, any rank but 0 is started again when it is killed.
    """
    allow_files(world)
    with private_folder() as folder, _noting_stops(folder) as stops:
        returning = range(1, world) if recovers else ()
        ranks = start_ranks(command, folder, world, range(world), returning, may_fork=True)
        exit_codes = _await(ranks, stops)
        loss = reported_loss(Folder(folder))

    if stops:
        return EXIT_STOPPED + stops[0]
    if exit_codes.get(0) == EXIT_LOST:
        exit_codes = {**ranks.deaths, **exit_codes}
    return _exit_code(exit_codes, loss)


@contextmanager
def _noting_stops(folder: str) -> Iterator[list[int]]:
    """Yield a list to which signals that ask this process to end are added. After one of them Ctrl-C is ignored."""
    stops: list[int] = []
    earlier_handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}

    def note_stop(number: int, frame: object) -> None:
        if number != signal.SIGINT or not Folder(folder).add(CTRL_C_KEY, 0):
            stops.append(number)

    for number, handler in earlier_handlers.items():
        if number != signal.SIGHUP or handler != signal.SIG_IGN:  # under nohup SIGHUP stays ignored
            signal.signal(number, note_stop)
    try:
        yield stops
    finally:
        for number, handler in earlier_handlers.items():
            is_ignored = bool(stops) and number == signal.SIGINT
            signal.signal(number, signal.SIG_IGN if is_ignored else handler)


def _await(ranks: Ranks, stops: Sequence[int]) -> dict[int, int]:
    """Wait for the ranks, and return the exit codes of those that end by themselves, in order.

    Once rank 0 has ended or a rank has failed, the others have `GRACE_SECONDS` seconds; then they are killed.
    """
    while not ranks.all_ended:
        ended = ranks.ended()
        if stops or 0 in ended or any(ended.values()):
            if stops:
                ranks.send_signal(0, signal.SIGINT)  # rank 0 then ends all ranks in an orderly way
            ranks.wait(GRACE_SECONDS)
            break
        time.sleep(POLL_SECONDS)

    codes_before_kill = dict(ranks.ended())
    ranks.kill()
    return codes_before_kill


def lost(ranks: Ranks, folder: str) -> str:
    """Return why a run is lost, if a rank has ended that is not started again, else an empty string."""
    ended = ranks.ended()
    return reason_of(ended, reported_loss(Folder(folder))) if ended else ""


def kill_all() -> None:
    """Kill all ranks that this process has started, even if other threads wait for them."""
    for ranks in list(started):
        ranks.kill()


def _exit_code(exit_codes: dict[int, int], loss: str) -> int:
    """Return the exit code of a run from those of its ranks. `loss` is what the ranks have reported of a lost peer.

    Print what no rank could: which rank was killed, or has ended without a message.
    """
    root_code = exit_codes.get(0, 0)
    failed_codes = {rank: code for rank, code in exit_codes.items() if code}
    if not failed_codes or (root_code > 0 and root_code not in (EXIT_WRONG, EXIT_LOST)):
        return root_code  # 0, or the command's own

    is_wrong = EXIT_WRONG in failed_codes.values()
    if message := loss if is_wrong else reason_of(failed_codes, loss):  # if nothing is reported, rank 0 has printed it
        say(message, "\n")
    return EXIT_WRONG if is_wrong else EXIT_LOST


def reason_of(failed_codes: Mapping[int, int], loss: str) -> str:
    """Return why a run is lost: ranks that were killed, else the reported `loss`, else the first early end, if any."""
    deaths = [_death(rank, -code) for rank, code in failed_codes.items() if code < 0]
    early_ends = [f"rank {rank} ended too early, with exit code {code}" for rank, code in failed_codes.items()]
    return "; ".join(deaths) or loss or "".join(early_ends[:1])


def _death(rank: int, signal_number: int) -> str:
    message = f"rank {rank} was killed ({signal.Signals(signal_number).name})"
    if signal_number == signal.SIGKILL:
        return f"{message}: by hand, or by the system if memory ran short, as dmesg would show"
    if signal_number == signal.SIGBUS:
        return f"{message}: {CUT_FILE}"
    reason = limit_remedy(SPACE) if signal_number != signal.SIGTERM else ""
    return f"{message}: {reason}" if reason else message


# --- what a rank knows of its launcher --------------------------------------------------------------------------------

def launched() -> bool:
    """Whether `start_ranks` has started this rank; then the launcher reports the losses of its ranks."""
    return RENDEZVOUS in os.environ


def keep_ctrl_c() -> None:
    """Let this rank alone, without its launcher, handle Ctrl-C from now on."""
    if launched():
        Folder(os.environ[RENDEZVOUS]).add(CTRL_C_KEY, 1)


def note(loss: str) -> None:
    """Note a loss for the launcher, which reports the first one of all its ranks."""
    report_loss(Folder(os.environ[RENDEZVOUS]), loss)


# --- the process that forks the ranks ---------------------------------------------------------------------------------

def main(argv: Sequence[str]) -> None:
    socket_file, ranks, returning, module, *words = argv
    importlib.import_module(module)
    gc.freeze()  # else the first garbage collection in a rank would copy the memory that it shares

    rank_of_pid: dict[int, str] = {}
    launcher_socket = socket.socket(fileno=int(socket_file))
    for rank in chain(ranks.split(","), _returned(launcher_socket, rank_of_pid, returning.split(","))):
        try:
            pid = os.fork()
        except OSError as error:
            say(f"rank {rank} could not be started: {explain(error)}")
            sys.exit(EXIT_WRONG)  # the ranks that were forked end with this process
        if not pid:
            launcher_socket.close()
            _be_rank(rank, module, words)
            return
        rank_of_pid[pid] = rank
        _report(launcher_socket, "forked", rank, pid)


def _be_rank(rank: str, module: str, words: Sequence[str]) -> None:
    """Run `python3 -m module words` as this rank, under a name that `top` shows."""
    with suppress(OSError):  # if /proc is read-only
        Path("/proc/self/comm").write_text(f"flowspec-{rank}", encoding="utf-8")
    os.environ.update({LAUNCHER_VARIABLE: str(os.getppid()), "RANK": rank})
    sys.argv[1:] = words
    del sys.modules[module]  # runpy warns of a module that is already imported
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _returned(launcher_socket: socket.socket, rank_of_pid: dict[int, str], returning: Sequence[str]) -> Iterator[str]:
    """Yield the ranks in `returning` that must be forked again; meanwhile report the ranks that have ended.

    After the order `END_ORDER` it ends with the last rank. If the launcher is gone it ends at once, as do the ranks.
    """
    launcher_pid, store = int(os.environ[LAUNCHER_VARIABLE]), Folder(os.environ[RENDEZVOUS])
    num_hung: Counter[str] = Counter()  # how often rank 0 has found each rank hung
    must_end = False

    while os.getppid() == launcher_pid and (rank_of_pid or not must_end):
        with suppress(OSError):  # there is no order yet, or the launcher is gone
            must_end = must_end or launcher_socket.recv(MAX_REPORT_BYTES, socket.MSG_DONTWAIT) == END_ORDER

        for pid, rank in rank_of_pid.items():
            num_hung_now = store.add(HUNG_KEY.format(rank), 0) if rank in returning and not must_end else 0
            if must_end or num_hung_now > num_hung[rank]:
                os.kill(pid, signal.SIGKILL)
            num_hung[rank] = num_hung_now

        pid, status = os.waitpid(-1, os.WNOHANG) if rank_of_pid else (0, 0)
        if not pid:
            time.sleep(POLL_SECONDS)
            continue

        rank, exit_code = rank_of_pid.pop(pid), exit_code_of(status)
        is_returning = rank in returning and not must_end and exit_code < 0
        _report(launcher_socket, "died" if is_returning else "ended", rank, exit_code)
        if is_returning:
            yield rank


def _report(launcher_socket: socket.socket, *facts: object) -> None:
    """Report an event to the launcher: its kind, the rank, and the rank's process id or exit code."""
    with suppress(OSError):  # the launcher is gone
        launcher_socket.send(" ".join(map(str, facts)).encode())


if __name__ == "__main__":
    main(sys.argv[1:])
