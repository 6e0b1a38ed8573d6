"""Rank 0 of a cluster in virtual time: all layers are computed in this process, and nothing sleeps.

A profile charges the same times as in the emulation in real time (`launch/build.py`, `launch/wiring.py`).
"""
from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator, Sequence

from config.profiles import Profile
from launch.build import load_layers
from launch.prepare import Prepared
from launch.spec import RankSpec, torch_as_it_was
from launch.trace import join_traces
from launch.wiring import Rank, Wires
from sim.clock import EVEN_FROM, VirtualClock
from sim.cluster import Cluster
from sim.paths import Part, Paths
from sim.stages import Held, Work, work_of
from tp.group import Table, ThreadGroup
from tp.shares import Joined


@contextmanager
def as_virtual(prepared: Prepared) -> Iterator[Rank]:
    """Yield rank 0, linked to simulated stages."""
    profile, placement = prepared.config.cluster, prepared.placement
    clock = VirtualClock(EVEN_FROM)
    traces = [prepared.trace(rank, clock) for rank in range(placement.world)]
    groups = [[prepared.spec(rank) for rank in ranks] for ranks in placement.groups]
    spec = groups[0][0]
    assert profile is not None, "only an emulated cluster has virtual time"
    with torch_as_it_was():
        spec.prepare_torch()
        stages = groups[1:] or groups
        copy = stages[:len(stages) // spec.copies]  # the stages of one copy
        works = [_work(group, profile) for group in copy]
        first = copy[0][0]
        paths = Paths([_whole(group) for group in copy], first.part.inner, first.like)
        led = [traces[rank] for rank in placement.leaders]
        cluster = Cluster(profile, clock, [works] * spec.copies, paths, led)
        alone = ThreadGroup(Table(1), 0)
        yield Rank(spec, Wires(cluster.links, None, alone), traces[0], clock, restart=cluster.restart)
    for trace in traces:
        trace.close()
    join_traces(spec)


def _whole(group: Sequence[RankSpec]) -> Part:
    """Load the layers of a stage, joined again if its ranks share them."""
    leader = group[0]
    if len(group) == 1:
        return load_layers(leader, leader.part.weights)
    if leader.part.quant != "none":
        raise ValueError(f"{leader.part.folder.parent} holds quantized shares, which time=virtual cannot put together: "
                         "split with --quant none, or add time=real")
    parts = [spec.part for spec in group]
    return load_layers(leader, Joined([part.weights for part in parts], leader.sizes, leader.part.shares))


def _work(group: Sequence[RankSpec], profile: Profile) -> Work:
    spec = group[0]
    first, last = spec.part.layers
    kept = len(spec.part.own_inner)
    speeds = spec.part.shares
    share, largest = (last - first) / spec.sizes.layers, max(speeds) / sum(speeds)
    tiles = spec.config.comm == "galaxy"
    held = Held([member.part.rank for member in group], share, kept, largest, tiles, spec.reports)
    return work_of(profile, held)
