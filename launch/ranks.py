"""A rank that is connected to the others: as a process of a group, or as a thread of one process.

What is handed out lives inside the `with`, and ends with it.
"""
from __future__ import annotations

import os
import shutil
import time
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Callable, Iterator, NamedTuple, NoReturn, Sequence

import torch
import torch.distributed as dist

from launch.build import build_drafter, build_stage
from launch.console import LOST, die, show
from launch.folder import Folder, hold
from launch.fork_server import LAUNCHER
from launch.prepare import Prepared, check_split
from launch.processes import FOLDER, GRACE, keep_on_loopback, launched
from launch.spec import RankSpec
from launch.trace import join_traces, learn_time, machine, send_time
from launch.wiring import Wires, between_processes, between_threads
from pipeline.drafters import run_drafter
from pipeline.failure import Heartbeat, PeerLost, explain, guarded
from pipeline.stage import run_stage
from pipeline.trace import OFF, REAL, Clock, NoTrace


class Rank(NamedTuple):
    """A rank that is connected to the others: what it is built from, its wires, its trace and its clock.

    `busy` says for what share of its last seconds each rank was at work, where that is known. `restart` lets modelled
    time begin again, where it is only counted.
    """

    spec: RankSpec
    wires: Wires
    trace: NoTrace
    clock: Clock = REAL
    busy: Callable[[], list[float]] = list
    restart: Callable[[], object] = int

    def serve(self) -> None:
        """Compute this rank's layers for the ring, or draft with its small model for rank 0, until it is stopped."""
        if self.spec.drafter is not None:
            drafter = build_drafter(self.spec, self.trace, self.clock)
            with self.wires.meter:
                run_drafter(drafter, self.wires.link)
            return
        stage = build_stage(self.spec, self.trace, self.wires.group)
        with self.wires.meter:
            run_stage(stage, self.wires.serving)


# --- processes of one machine; for several see hosts/rendezvous.py ----------------------------------------------------

def connect(rank: int, world: int) -> Any:
    """Join the process group of all ranks, whether `spawn` has started them or a person's own torchrun.

    Returns the store in which they write their heartbeats.
    """
    launcher = int(os.environ.get(LAUNCHER) or os.getppid())
    if launched():
        with suppress(OSError):  # gone, if the launcher is
            hold(os.environ[FOLDER])
    if os.getppid() != launcher:
        _end_with(launcher)
    guarded("launcher", partial(_end_with, launcher), lambda thread, error: die(LOST))
    try:
        if launched():
            return join(os.environ[FOLDER], rank, world)
        if os.environ.get("LOCAL_WORLD_SIZE") == str(world):
            keep_on_loopback(os.environ)
        dist.init_process_group("gloo")
    except RuntimeError as error:
        raise PeerLost(f"rank {rank} could not connect to the others: {explain(error)}") from error
    return dist.distributed_c10d._get_default_store()


def join(folder: str, rank: int, world: int) -> Folder:
    """Join the process group of all ranks of this machine. Returns the store in which they write their heartbeats."""
    files = dist.FileStore(os.path.join(folder, "groups"), world)
    dist.init_process_group("gloo", store=files, rank=rank, world_size=world)
    return Folder(folder)


def _end_with(launcher: int) -> NoReturn:
    """If the launcher is killed, so is this rank, even before there is a heartbeat that would notice.

    With it goes the folder, which nobody else can remove then.
    """
    while os.getppid() == launcher:
        time.sleep(GRACE / 6)
    if launched():
        # Who has just begun to connect in the folder must be done with that: torch waits for a file that is gone, and
        # lets no other thread run meanwhile.
        time.sleep(1)
        shutil.rmtree(os.environ[FOLDER], ignore_errors=True)
    die(LOST)


# --- processes, on one machine or several -----------------------------------------------------------------------------

class Member:
    """One rank of a process group that it has joined, from its first heartbeat to its good-bye.

    `store` is where all ranks write. What ends a rank early finds here what there is to end so far.
    """

    trace: NoTrace = OFF
    wires: Wires | None = None

    def __init__(self, prepared: Prepared, rank: int, store: Any, names: Sequence[str] = ()) -> None:
        self._prepared, self._rank = prepared, rank
        self.heartbeat = Heartbeat(store, rank, prepared.placement.world, prepared.config.timeout, names)

    def connect(self, lost: Callable[[str], None]) -> Rank:
        """The rank, once all are connected; `lost` is called with a loss that the heartbeat hears of.

        Raises ValueError for a part of another split than rank 0's.
        """
        config, placement = self._prepared.config, self._prepared.placement
        number, store = self._rank, self.heartbeat.store
        self.trace = self._prepared.trace(number, REAL)
        self.wires = between_processes(config, placement, number, self.heartbeat, self.trace)
        self.heartbeat.start(lost)
        spec = self._prepared.spec(number)
        store.set(f"split/{number}", spec.part.split_id)
        check_split(spec.part, store.get("split/0").decode())
        if config.trace and number == 0:
            send_time(store, range(1, placement.world), machine())
        elif config.trace:
            learn_time(store, number, machine(), self.trace)
        return Rank(spec, self.wires, self.trace, busy=self.heartbeat.busy)

    def fail(self, loss: str) -> None:
        """Let those who wait for a message hear of a loss instead."""
        if self.wires is not None:
            self.wires.fail(PeerLost(loss))

    def leave(self, outlive: bool) -> None:
        """Say good-bye in good order; `outlive`: return when all others have done so."""
        assert self.wires is not None, "a rank leaves that was not connected"
        self.wires.close()
        self.trace.close()
        self.heartbeat.stop(outlive)

    def drop(self) -> None:
        """End what there is so far; nothing happens if that was done in good order."""
        self.trace.close()
        if self.wires is not None:
            self.heartbeat.stop(outlive=not self.heartbeat.lost)
            self.wires.drop()


@contextmanager
def in_group(member: Member) -> Iterator[Rank]:
    """Rank 0, inside a program that stays, of a process group that was joined."""
    with torch_as_it_was(), ExitStack() as ends:
        ends.callback(dist.destroy_process_group)
        ends.callback(member.drop)
        rank_0 = member.connect(member.fail)
        yield rank_0
        if not member.heartbeat.lost:
            member.leave(outlive=True)
    join_traces(rank_0.spec)


# --- threads ----------------------------------------------------------------------------------------------------------

@contextmanager
def as_threads(prepared: Prepared) -> Iterator[Rank]:
    """Rank 0, beside the others as threads of this process: for a debugger, and where processes are not wanted."""
    torch.empty(0, device="meta")  # with the first of these torch loads modules; 2.3 hangs if threads race to do it
    config, placement = prepared.config, prepared.placement
    traces = [prepared.trace(rank, REAL) for rank in range(placement.world)]
    wires = between_threads(config, placement, traces)

    def connected(rank: int) -> Rank:
        return Rank(prepared.spec(rank), wires[rank], traces[rank], busy=busy)

    def busy() -> list[float]:
        return [each.meter.share() for each in wires]

    def serve(rank: int) -> None:
        connected(rank).serve()

    def failed(name: str, error: BaseException) -> None:
        show(error, config.debug)
        wires[0].fail(error if isinstance(error, PeerLost) else PeerLost(f"{name}: {explain(error)}"))

    with torch_as_it_was():
        served = range(1, placement.world)
        threads = [guarded(f"rank {rank}", partial(serve, rank), failed) for rank in served]
        rank_0 = connected(0)
        yield rank_0
        for thread in threads:
            thread.join()
        for own, trace in zip(wires, traces):
            own.close()
            trace.close()
        join_traces(rank_0.spec)


@contextmanager
def torch_as_it_was() -> Iterator[None]:
    """A pipeline computes no gradients and chooses its threads; the program around it gets its own settings back."""
    gradients = torch.is_grad_enabled()
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_grad_enabled(gradients)
        torch.set_num_threads(threads)
