"""Connect a rank to the others: processes of one machine, boards, or threads of one process.

A rank that a context manager yields is valid inside its `with` only.
"""
from __future__ import annotations

import os
import shlex
import shutil
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from typing import Callable, ContextManager, Iterator, NoReturn, Sequence, TypeVar

import torch
import torch.distributed as dist

from cluster import processes
from cluster.board import Board, find_board
from cluster.folder import RENDEZVOUS, Folder, hold, private_folder
from cluster.heartbeat import Heartbeat, RankState
from cluster.memberships import FollowedMemberships, Meeting, Memberships, OpenedMemberships, door_of
from cluster.processes import GRACE_SECONDS, INTERFACE_VARIABLE, LAUNCHER_VARIABLE, POLL_SECONDS, Ranks, launched
from cluster.rendezvous import Coordinator
from cluster.sockets import FolderDoor
from cluster.torch_wires import torch_wires
from cluster.transport import Wire
from config.console import EXIT_INTERRUPTED, EXIT_LOST, EXIT_WRONG, die, say, show
from config.failure import PeerLost, explain, guarded
from launch.available import available
from launch.memory import GB, layer_bytes
from launch.prepare import Prepared, check_split, prepare
from launch.spec import torch_as_it_was
from launch.trace import join_traces, learn_time, machine, send_time
from launch.virtual import as_virtual
from launch.wiring import Rank, RankConnections, between_processes, between_threads
from launch.words import Resolved
from pipeline.trace import OFF, REAL, NoTrace, forget

Connected = TypeVar("Connected")
RENDEZVOUS_VARIABLES = ("RANK", "WORLD_SIZE", INTERFACE_VARIABLE)  # variables that a rendezvous sets in the environment


# --- processes of one machine; for several see cluster/rendezvous.py --------------------------------------------------

def connect(rank: int, prepared: Prepared) -> Meeting:
    """Return the meeting of all ranks of this machine, which a launcher has started."""
    launcher = int(os.environ.get(LAUNCHER_VARIABLE) or os.getppid())
    folder = os.environ[RENDEZVOUS]
    with suppress(OSError):  # the folder is gone if the launcher is
        hold(folder)
    if os.getppid() != launcher:
        _end_with(launcher, folder)
    guarded("launcher", partial(_end_with, launcher, folder), lambda thread, error: die(EXIT_LOST))
    try:
        return join(folder, rank, prepared)
    except RuntimeError as error:
        raise PeerLost(f"rank {rank} could not connect to the others: {explain(error)}") from error


def join(folder: str, rank: int, prepared: Prepared) -> Meeting:
    """Return the meeting of all ranks of this machine, in a folder; join a process group if the run needs one."""
    if prepared.needs_process_group:
        files = dist.FileStore(os.path.join(folder, "groups"), prepared.world)
        dist.init_process_group("gloo", store=files, rank=rank, world_size=prepared.world)
    return Meeting(Folder(folder), partial(FolderDoor, folder))


def join_beside(others: Ranks, folder: str, prepared: Prepared) -> Meeting:
    """Like `join`, for rank 0, which has started the `others`; raises PeerLost, with the reason, if one ends first."""
    with environment_kept(INTERFACE_VARIABLE):
        os.environ.pop(INTERFACE_VARIABLE, None)  # it may lead to other machines
        processes.keep_on_loopback(os.environ)
        return unless_lost(0, lambda: join(folder, 0, prepared), lambda: processes.lost(others, folder))


def unless_lost(rank: int, connect_ranks: Callable[[], Connected], loss: Callable[[], str]) -> Connected:
    """Return what `connect_ranks` returns; raises PeerLost if it fails, or once `loss` returns a reason.

    It runs on a thread of its own, since torch waits for a lost rank without end, and does not listen to Ctrl-C.
    """
    results: list[Connected] = []
    errors: list[BaseException] = []
    connecting = guarded("connect", lambda: results.append(connect_ranks()), lambda thread, error: errors.append(error))
    reason = ""
    while connecting.is_alive() and not reason:
        connecting.join(POLL_SECONDS)
        reason = loss()

    if results:
        return results[0]
    raise PeerLost(reason or f"rank {rank} could not connect to the others: {explain(errors[0])}")


def _end_with(launcher: int, folder: str) -> NoReturn:
    """Wait until the launcher is gone; then remove the folder, which nobody else can do, and end this rank."""
    while os.getppid() == launcher:
        time.sleep(GRACE_SECONDS / 6)
    # A rank that is just connecting through the folder must finish that first: torch waits for a missing file, and
    # blocks all other threads meanwhile.
    time.sleep(1)
    shutil.rmtree(folder, ignore_errors=True)
    die(EXIT_LOST)


# --- processes, on one machine or several -----------------------------------------------------------------------------

class Member:
    """One rank as a process, from its start to its orderly or early end.

    A rank that fails reports the reason to the others, and keeps its trace. Each board prints the reason on its own
    terminal; a launcher prints it for its ranks.
    """

    heartbeat: Heartbeat | None = None  # set when the rank connects
    connections: RankConnections | None = None
    trace: NoTrace = OFF
    _memberships: Memberships | None = None  # in which ranks connect

    def __init__(self, prepared: Prepared, rank: int, several_hosts: bool = False) -> None:
        self._prepared, self._rank = prepared, rank
        self._prints_losses = several_hosts
        # seconds for the main thread to find a loss itself
        self._loss_patience = 2 * GRACE_SECONDS if several_hosts else GRACE_SECONDS / 3
        self._linger_seconds = 0 if rank or not several_hosts else GRACE_SECONDS  # for others to read the reason
        self._recovers = prepared.recovers  # whether all ranks connect again after a loss

    def connect(self, meeting: Meeting, lost: Callable[[str], None]) -> Rank:
        """Return the rank, once all are connected; without recovery the heartbeat calls `lost` with a loss it finds.

        Raises ValueError for a part of another split than rank 0's.
        """
        config, placement, number = self._prepared.config, self._prepared.placement, self._rank
        store = meeting.store
        self.heartbeat = Heartbeat(store, number, placement.world, config.timeout, meeting.rank_names)
        is_returning = door_of(store, number)[0] > 0
        if config.trace and not is_returning:
            forget(config.trace, number)
        self.trace = self._prepared.trace(number, REAL)

        # connections
        self.connections = between_processes(config.cluster, placement, number, self.heartbeat, self.trace)
        memberships_kind = FollowedMemberships if number else OpenedMemberships
        uses_sockets = config.link == "sockets"
        socket_peers = placement.reached(number) if uses_sockets else ()
        self._memberships = memberships_kind(meeting, number, self.heartbeat, socket_peers, self._prepared.patience)
        self.heartbeat.start(self.fail if self._recovers else lost)
        socket_wires: Sequence[Wire] = self._memberships.join(time.monotonic() + meeting.patience)
        wires = socket_wires if uses_sockets else self._torch_wires()
        self.connections.each(lambda link: link.begin(wires))

        # the same split, and rank 0's clock
        spec = self._prepared.spec(number)
        store.set(f"split/{number}", spec.part.split_id)
        check_split(spec.part, store.get("split/0").decode())
        if config.trace and number == 0:
            send_time(store, range(1, placement.world), machine())
        elif config.trace and not is_returning:  # rank 0 sends the time at its own start only
            learn_time(store, number, machine(), self.trace)

        layer_gigabytes = layer_bytes(spec) / GB
        self.heartbeat.memory = lambda: (available() / GB, layer_gigabytes)
        return Rank(spec, self.connections, self.trace, states=self.states, rejoin=self.rejoin)

    def states(self) -> dict[str, RankState | None]:
        """Return the state of each rank by its name; None for a lost one that has not come back. For rank 0."""
        assert isinstance(self._memberships, OpenedMemberships) and self.heartbeat, "rank 0 asks, once it is connected"
        states = self.heartbeat.states()
        missing_ranks = self._memberships.missing_ranks() if states else []
        missing_names = {name for rank, name in enumerate(states) if rank in missing_ranks}
        return {name: None if name in missing_names else state for name, state in states.items()}

    def _torch_wires(self) -> Sequence[Wire]:
        """Create wires of torch.distributed, together with all other ranks; raises PeerLost if one is lost before."""
        heartbeat = self.heartbeat
        assert heartbeat, "it finds a lost rank"
        placement, number = self._prepared.placement, self._rank
        num_gpus = 0 if self._prints_losses or self._prepared.config.device != "auto" else torch.cuda.device_count()
        own_gpu = torch.device("cuda", number) if num_gpus >= placement.world else None
        peers_of_ranks = list(map(placement.reached, range(placement.world)))
        return unless_lost(number, lambda: torch_wires(number, peers_of_ranks, own_gpu), lambda: heartbeat.first_loss)

    def rejoin(self, loss: PeerLost) -> None:
        """Connect all ranks again after a loss; raises PeerLost if that is impossible, or if a rank does not come."""
        number, seconds = self._rank, self._prepared.config.recovery
        if self._memberships is None or self.connections is None or not self._recovers:
            raise loss  # which may have ended an earlier attempt

        try:
            self._memberships.leave(loss)
            self.connections.each(lambda link: link.end())
            self._memberships.close()
            new_wires = self._memberships.join(time.monotonic() + seconds)
        except BaseException as error:
            reason = explain(error)
            final_loss = PeerLost(reason if reason == str(loss) else f"{loss}; {reason}")
            self._recovers = False
            self.fail(str(final_loss))  # so that no thread waits for a message
            if isinstance(error, (RuntimeError, OSError)):
                raise final_loss from error
            raise

        self.connections.each(lambda link: link.begin(new_wires))
        if number == 0:
            say(f"{loss}; all ranks are connected again, and answers continue", "\n")

    def leave(self, outlive: bool) -> None:
        """End all connections in an orderly way; with `outlive`, return once all others have done so."""
        assert self.connections and self._memberships and self.heartbeat, "this rank was not connected"
        self.connections.each(lambda link: link.close())
        self._memberships.close()
        self.trace.close()
        self.heartbeat.stop(outlive)

    def drop(self) -> None:
        """Release whatever the rank holds, in a program that continues; has no effect after `leave`."""
        self.trace.close()
        if self.connections is not None and self.heartbeat is not None:
            self.heartbeat.stop(outlive=not self.heartbeat.first_loss)
            if self._memberships is not None:
                self._memberships.cut()
                self._memberships.close()
            self.connections.each(lambda link: link.drop())

    # --- an early end -------------------------------------------------------------------------------------------------

    def fail(self, loss: str) -> None:
        """Raise PeerLost in all threads that wait for a message."""
        if self.connections is not None:
            self.connections.each(lambda link: link.fail(PeerLost(loss)))

    def lose(self, loss: str) -> None:
        """End the process after a loss that the heartbeat found; called on the heartbeat's thread."""
        try:
            self.fail(loss)
            time.sleep(self._loss_patience)
            if self._prints_losses:  # the main thread waits for other ranks inside a product
                say(loss, "\n")
        finally:
            self._end(EXIT_LOST)

    def give_up(self, error: BaseException) -> NoReturn:
        """End the process after its main thread has failed or found a loss."""
        show(error, self._prepared.config.debug)
        is_loss = isinstance(error, PeerLost)
        reason = explain(error) if is_loss else f"rank {self._rank} failed: {explain(error)}"
        if self._prints_losses:
            say(reason, "\n")
        self._prints_losses = False  # `lose` must not print another one
        if self.heartbeat is not None:
            self.heartbeat.report_at_once(reason)
        elif launched():
            processes.note(reason)

        time.sleep(self._linger_seconds)
        if isinstance(error, KeyboardInterrupt):
            self._end(EXIT_INTERRUPTED)
        self._end(EXIT_LOST if is_loss else EXIT_WRONG)

    def _end(self, code: int) -> NoReturn:
        with suppress(OSError, ValueError):
            self.trace.close()
        die(code)


# --- rank 0 inside a user's program -----------------------------------------------------------------------------------

def rank_0(resolved: Resolved) -> ContextManager[Rank]:
    """Return rank 0; the others are boards, processes, threads or simulated. Raises ValueError for invalid input."""
    board = find_board(resolved.keys.run, os.environ)
    if board is not None:
        return _beside_boards(resolved, board)
    prepared = prepare(resolved.keys.run)
    return _beside_processes(prepared, resolved.words) if prepared.forks else alone(prepared)


@contextmanager
def _beside_processes(prepared: Prepared, words: Sequence[str]) -> Iterator[Rank]:
    """Yield rank 0; the others are processes that read the same `words`."""
    if prepared.needs_process_group:
        _begin_groups()

    world = prepared.placement.world
    with private_folder() as folder:
        ranks = range(1, world)
        returning = ranks if prepared.recovers else ()
        others = processes.start_ranks(["launch.run", *words], folder, world, ranks, returning)
        try:
            meeting = join_beside(others, folder, prepared)
            meeting = meeting._replace(reason_against=partial(processes.lost, others, folder))
            with _in_group(Member(prepared, 0), meeting) as rank:
                yield rank
            others.wait(GRACE_SECONDS)
        finally:
            others.kill()


def command_elsewhere(words: Sequence[str]) -> str:
    """Return what a user types on the other boards; each has keys of its own, and only rank 0 needs a template."""
    shared_words = [word for word in words if not word.startswith(("keys=", "template="))]
    has_keys = any(word.startswith("keys=") for word in words)
    key_advice = ", with keys=FOLDER if its own keys are not in keys/" if has_keys else ""
    return f"bash run_jetson.sh {shlex.join(shared_words)}{key_advice}"


@contextmanager
def _beside_boards(resolved: Resolved, board: Board) -> Iterator[Rank]:
    """Yield rank 0 on this board, once the others have come; there a user runs `run_jetson.sh` with the same words.

    Raises ValueError for invalid input, or on another board than rank 0's, and PeerLost if a board does not come.
    """
    if board.rank:
        raise ValueError(f"this board is rank {board.rank}, but requests come from rank 0: start this on the board of "
                         f"{board.named(0)}, and bash run_jetson.sh here")

    _begin_groups()
    say(f"on each of the other boards, where run_worker.sh does not run: {command_elsewhere(resolved.words)}")
    with ExitStack() as exit_stack:
        with environment_kept(*RENDEZVOUS_VARIABLES):
            coordinator = exit_stack.enter_context(closing(Coordinator(board, prepare)))
            member = Member(coordinator.attend(resolved.keys), 0)
            rank = exit_stack.enter_context(_in_group(member, coordinator.connect()))
        yield rank


@contextmanager
def _in_group(member: Member, meeting: Meeting) -> Iterator[Rank]:
    """Yield rank 0 in this process, connected to the others."""
    with torch_as_it_was(), ExitStack() as exit_stack:
        exit_stack.callback(leave_groups)
        exit_stack.callback(member.drop)
        rank = member.connect(meeting, member.fail)
        yield rank
        if not (member.heartbeat and member.heartbeat.first_loss):
            member.leave(outlive=True)
    join_traces(rank.spec)


def _begin_groups() -> None:
    """Prepare to join a process group; raises ValueError if this program is in one already."""
    if dist.is_initialized():
        raise ValueError("this program is in a process group of torch.distributed already: end it first, or open the "
                         "pipeline with link='threads'")
    # torch names groups by a counter, which a failed attempt to join has raised. All other ranks count from 0.
    dist.distributed_c10d._group_count = 0


def leave_groups() -> None:
    """Leave the process group, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def environment_kept(*names: str) -> Iterator[None]:
    """Restore these environment variables at the end."""
    earlier_values = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in earlier_values.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


# --- all ranks in one process -----------------------------------------------------------------------------------------

def alone(prepared: Prepared) -> ContextManager[Rank]:
    """Return rank 0 of a pipeline with all ranks in this process."""
    return as_virtual(prepared) if prepared.config.virtual else as_threads(prepared)


@contextmanager
def as_threads(prepared: Prepared) -> Iterator[Rank]:
    """Yield rank 0; the others are threads of this process, for a debugger or where processes are not wanted."""
    torch.empty(0, device="meta")  # the first meta tensor loads modules of torch; 2.3 hangs if threads race to do it
    config, placement = prepared.config, prepared.placement
    traces = [prepared.trace(rank, REAL) for rank in range(placement.world)]
    all_connections = between_threads(config.cluster, placement, traces)

    def states() -> dict[str, RankState | None]:
        return {f"rank {rank}": RankState(connections.meter.share(), free=available() / GB)
                for rank, connections in enumerate(all_connections)}

    def on_failure(thread_name: str, error: BaseException) -> None:
        show(error, config.debug)
        loss = error if isinstance(error, PeerLost) else PeerLost(f"{thread_name}: {explain(error)}")
        all_connections[0].each(lambda link: link.fail(loss))

    specs = map(prepared.spec, range(placement.world))
    parts_of_ranks = zip(specs, all_connections, traces)
    rank_0, *others = (Rank(*parts, states=states) for parts in parts_of_ranks)
    with torch_as_it_was():
        threads = [guarded(f"rank {rank.spec.part.rank}", rank.serve, on_failure) for rank in others]
        try:
            yield rank_0
        except BaseException:  # the others wait for messages that do not come
            all_connections[0].each(lambda link: link.fail(PeerLost("rank 0 has ended early")))
            raise

        for thread in threads:
            thread.join()
        for connections, trace in zip(all_connections, traces):
            connections.each(lambda link: link.close())
            trace.close()
        join_traces(rank_0.spec)
