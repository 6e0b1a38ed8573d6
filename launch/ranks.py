"""Rank 0 inside a person's program, and the ranks of this machine around it: as threads, or as processes.

What is handed out lives inside the `with`, and ends with it. `hosts/leading.py` has boards around it.
"""
from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple, Sequence

import torch
import torch.distributed as dist

from config.run_config import RunConfig
from launch.build import build_drafter, build_stage
from launch.folder import private_folder
from launch.hosts.clock import machine, send_time
from launch.local import join_beside
from launch.prepare import check_split, open_part
from launch.processes import await_ends, kill, start_ranks
from launch.shutdown import show
from launch.spec import RankSpec
from launch.trace import join_traces, open_trace
from launch.wiring import Wires, between_processes, between_threads
from pipeline.drafters import run_drafter
from pipeline.failure import PeerLost, explain, guarded
from pipeline.heartbeat import Heartbeat
from pipeline.interfaces import REAL, Clock
from pipeline.stage import run_stage
from pipeline.trace import NoTrace
from tp.links import Placement

Tracing = Callable[[Any, int, Clock], NoTrace]  # from a configuration, a rank's number and its clock to its trace


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

    def compare_split(self, store: Any) -> None:
        """Tell the other ranks, through the store, which split this is; raises ValueError if it is not rank 0's."""
        part = self.spec.part
        store.set(f"split/{part.rank}", part.split_id)
        check_split(part, store.get("split/0").decode())

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


# --- threads ----------------------------------------------------------------------------------------------------------

@contextmanager
def as_threads(config: RunConfig, folder: Path, placement: Placement, tracing: Tracing = open_trace) -> Iterator[Rank]:
    """Rank 0, beside the others as threads of this process: for a debugger, and where processes are not wanted."""
    torch.empty(0, device="meta")  # with the first of these torch loads modules; 2.3 hangs if threads race to do it
    traces = [tracing(config, rank, REAL) for rank in range(placement.world)]
    wires = between_threads(config, placement, traces)

    def connected(rank: int) -> Rank:
        return Rank(RankSpec(config, open_part(folder, rank, config)), wires[rank], traces[rank], busy=busy)

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
        join_traces(config, rank_0.spec.part)


# --- processes --------------------------------------------------------------------------------------------------------

@contextmanager
def as_processes(config: RunConfig, folder: Path, placement: Placement, words: Sequence[str]) -> Iterator[Rank]:
    """Rank 0, beside the others as processes that read the same `words`; this process joins their process group."""
    begin_groups()
    world = placement.world
    with private_folder() as place, torch_as_it_was():
        others = start_ranks(["launch.worker", *words], place, world, range(1, world))
        try:
            store = join_beside(others, place, world)
            with in_group(config, folder, placement, Heartbeat(store, 0, world, config.timeout)) as rank_0:
                yield rank_0
            await_ends(others)
        finally:
            kill(others)


def begin_groups() -> None:
    """Make ready to join a process group; raises ValueError if this program is in one already."""
    if dist.is_initialized():
        raise ValueError("this program is in a process group of torch.distributed already: end it first, or open the "
                         "pipeline with processes=False")
    # Groups are named by a number, which a group that could not be joined has raised. All others begin with 0.
    dist.distributed_c10d._group_count = 0


@contextmanager
def in_group(config: RunConfig, folder: Path, placement: Placement, heartbeat: Heartbeat) -> Iterator[Rank]:
    """Rank 0 of a process group that was joined, as long as no other rank is lost."""
    with ExitStack() as ends:
        ends.callback(dist.destroy_process_group)
        trace = open_trace(config, 0)
        ends.callback(trace.close)
        wires = between_processes(config, placement, 0, heartbeat, trace)
        ends.callback(wires.drop)
        heartbeat.start(lambda loss: wires.fail(PeerLost(loss)))
        ends.callback(lambda: heartbeat.stop(outlive=not heartbeat.lost))
        rank_0 = Rank(RankSpec(config, open_part(folder, 0)), wires, trace, busy=heartbeat.busy)
        rank_0.compare_split(heartbeat.store)
        if config.trace:
            send_time(heartbeat.store, range(1, placement.world), machine())
        yield rank_0
        if not heartbeat.lost:
            wires.close()
    join_traces(config, rank_0.spec.part)


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
