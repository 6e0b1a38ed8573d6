"""The ranks of one machine around a rank 0 that somebody else is: as threads, or as processes of a person's program.

What is handed out lives inside the `with`, and ends with it.
"""
from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence, Tuple

import torch
import torch.distributed as dist

from config.run_config import RunConfig
from launch.build import build_stage
from launch.ending import show
from launch.folder import private_folder
from launch.hosts.clock import machine, tell_time
from launch.prepare import open_part
from launch.processes import await_ends, join_beside, kill, start_ranks
from launch.spec import RankSpec
from launch.trace import join_traces, open_trace
from launch.wiring import Wires, between_processes, between_threads
from pipeline.heartbeat import Heartbeat
from pipeline.loss import PeerLost, explain, guarded
from pipeline.stage import run_stage
from pipeline.trace import NoTrace
from tp.links import Placement

Lead = Tuple[RankSpec, Wires, NoTrace]  # what rank 0 is made of
Tracing = Callable[[Any, int], NoTrace]  # the trace of a rank


@contextmanager
def as_threads(config: RunConfig, folder: Path, placement: Placement, tracing: Tracing = open_trace) -> Iterator[Lead]:
    """All ranks but 0 as threads of this process: for a debugger, for tests, and where processes are not wanted."""
    torch.empty(0, device="meta")  # with the first of these torch loads modules; 2.3 hangs if threads race to do it
    traces = [tracing(config, rank) for rank in range(placement.world)]
    wires = between_threads(config, placement, traces)

    def work(rank: int) -> None:
        spec = RankSpec(config, open_part(folder, rank))
        run_stage(build_stage(spec, traces[rank], wires[rank].group), wires[rank].serving)

    def failed(name: str, error: BaseException) -> None:
        show(error, config.debug)
        wires[0].fail(error if isinstance(error, PeerLost) else PeerLost(f"{name}: {explain(error)}"))

    with _torch_as_it_was():
        threads = [guarded(f"rank {rank}", partial(work, rank), failed) for rank in range(1, placement.world)]
        yield RankSpec(config, open_part(folder, 0)), wires[0], traces[0]
        for thread in threads:
            thread.join()
        for link, trace in zip(wires, traces):
            link.close()
            trace.close()
        join_traces(config, open_part(folder, 0))


@contextmanager
def as_processes(config: RunConfig, folder: Path, placement: Placement, words: Sequence[str]) -> Iterator[Lead]:
    """All ranks but 0 as processes that read the same `words`; this process joins their process group."""
    if dist.is_initialized():
        raise ValueError("this program is in a process group of torch.distributed already: end it first, or open the "
                         "pipeline with processes=False")
    with private_folder() as place, _torch_as_it_was():
        others = start_ranks(["launch.worker", *words], place, placement.world, range(1, placement.world))
        try:
            with _member(config, folder, placement, partial(join_beside, others, place, placement.world)) as lead:
                yield lead
            await_ends(others)
        finally:
            kill(others)


@contextmanager
def _member(config: RunConfig, folder: Path, placement: Placement, join: Callable[[], Any]) -> Iterator[Lead]:
    """Be rank 0 of a process group, as long as no other rank is lost."""
    store = join()
    trace = open_trace(config, 0)
    heartbeat = Heartbeat(store, 0, placement.world, config.timeout)
    wires = between_processes(config, placement, 0, heartbeat, trace)
    heartbeat.start(lambda loss: wires.fail(PeerLost(loss)))
    part = open_part(folder, 0)
    store.set("split/0", part.split_id)
    if config.trace:
        tell_time(store, range(1, placement.world), machine())
    try:
        yield RankSpec(config, part), wires, trace
        if not heartbeat.lost:
            wires.close()
    finally:
        trace.close()
        heartbeat.stop(outlive=not heartbeat.lost)
        dist.destroy_process_group()
    join_traces(config, part)


@contextmanager
def _torch_as_it_was() -> Iterator[None]:
    """A pipeline computes no gradients and chooses its threads; the program around it gets its own settings back."""
    gradients, threads = torch.is_grad_enabled(), torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_grad_enabled(gradients)
        torch.set_num_threads(threads)
