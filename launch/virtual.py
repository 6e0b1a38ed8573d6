"""Rank 0 of a cluster whose time is only counted: all layers are computed in this process, nothing sleeps.

What a profile charges is the same as in the emulation in real time (`launch/build.py`, `launch/wiring.py`).
"""
from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Iterator, Sequence

from config.profiles import Profile
from config.run_config import RunConfig
from launch.build import load_layers
from launch.prepare import open_part
from launch.ranks import Rank, Tracing, torch_as_it_was
from launch.spec import RankSpec
from launch.trace import join_traces, open_trace
from launch.wiring import Wires
from model.eagle import inner_layers
from model.llama import Slice
from pipeline.trace import NoTrace
from sim.clock import VirtualClock
from sim.cluster import NOTHING, Cluster, Own
from sim.groups import Times
from sim.paths import Paths
from sim.stages import Work
from tp.comm import TILE
from tp.group import Table, ThreadGroup
from tp.links import Placement
from tp.shares import Joined


@contextmanager
def as_virtual(config: RunConfig, folder: Path, placement: Placement, tracing: Tracing = open_trace,
               own: Own = NOTHING) -> Iterator[Rank]:
    """Rank 0, whose link leads to simulated stages; `own` is what Python takes beside what the profile charges."""
    clock = VirtualClock()
    traces = [tracing(config, rank, clock) for rank in range(placement.world)]
    groups = [[RankSpec(config, open_part(folder, rank)) for rank in ranks] for ranks in placement.groups]
    spec = groups[0][0]
    with torch_as_it_was():
        cluster = _cluster(groups, clock, [traces[rank] for rank in placement.leaders], own)
        alone = ThreadGroup(Table(1), 0)
        yield Rank(spec, Wires(cluster.links, None, alone), traces[0], clock)
    for trace in traces:
        trace.close()
    join_traces(config, spec.part)


def _cluster(groups: Sequence[Sequence[RankSpec]], clock: VirtualClock, traces: Sequence[NoTrace], own: Own) -> Cluster:
    """The simulated stages of the groups, with the whole model behind them."""
    spec = groups[0][0]
    profile = spec.cluster
    assert profile is not None, "only an emulated cluster has virtual time"
    spec.prepare_torch()
    stages = groups[1:] or groups
    depth = len(stages) // spec.copies
    slices = [_whole(group) for group in stages[:depth]]
    works = [_work(group, profile, own) for group in stages[:depth]]
    paths = Paths(slices, inner_layers(spec.sizes.layers), spec.like)
    return Cluster(profile, clock, [works] * spec.copies, paths, traces, own)


def _whole(group: Sequence[RankSpec]) -> Slice:
    """The layers of a stage, put together again if its ranks share them."""
    leader = group[0]
    if len(group) == 1:
        return load_layers(leader, leader.part.weights)
    if leader.part.quant != "none":
        raise ValueError(f"{leader.part.folder.parent} holds quantized shares, which time=virtual cannot put together: "
                         "split with --quant none, or add time=real")
    parts = [spec.part for spec in group]
    return load_layers(leader, Joined([part.weights for part in parts], leader.sizes, leader.part.shares))


def _work(group: Sequence[RankSpec], profile: Profile, own: Own) -> Work:
    """How long the emulated ranks of a stage compute, and hand on what they hear to each other."""
    spec = group[0]
    first, last = spec.part.layers
    kept = sum(first <= layer < last for layer in inner_layers(spec.sizes.layers))
    share = (last - first) / spec.sizes.layers
    layers = share * profile.layers
    if len(group) == 1:
        def alone(rows: int, text: int) -> float:
            return own.segment + profile.stage(share, rows, text)

        return Work(alone, max(1, round(layers)), kept)
    speeds = spec.part.shares
    times = Times(profile, max(speeds) / sum(speeds), len(group))
    tiles = spec.config.tensor_parallel.comm == "galaxy"

    def seconds(rows: int, text: int) -> float:
        tiled = tiles and rows >= TILE * len(group)
        heard = profile.latency / 1e3 + profile.transfer(rows * profile.row_bytes)
        return own.segment + heard + layers * times.layer(tiled, rows, text)

    return Work(seconds, 1, kept)
