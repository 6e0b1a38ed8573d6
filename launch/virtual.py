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
from launch.wiring import Rank, RankConnections
from sim.clock import EVEN_FROM, VirtualClock
from sim.cluster import Cluster
from sim.paths import AnySlice, Paths
from sim.stages import StageShare, Work, work_of
from tp.group import Table, ThreadGroup
from tp.shares import Joined


@contextmanager
def as_virtual(prepared: Prepared) -> Iterator[Rank]:
    """Yield rank 0, linked to simulated stages."""
    profile, placement = prepared.config.cluster, prepared.placement
    assert profile is not None, "only an emulated cluster has virtual time"
    clock = VirtualClock(EVEN_FROM)
    traces = [prepared.trace(rank, clock) for rank in range(placement.world)]
    group_specs = [[prepared.spec(rank) for rank in ranks] for ranks in placement.groups]
    root_spec = group_specs[0][0]

    with torch_as_it_was():
        root_spec.prepare_torch()

        # one copy of the model
        stage_groups = group_specs[1:] or group_specs
        groups_of_copy = stage_groups[:len(stage_groups) // root_spec.copies]
        stage_works = [_work(group, profile) for group in groups_of_copy]
        first_spec = groups_of_copy[0][0]
        paths = Paths([_whole(group) for group in groups_of_copy], first_spec.part.inner, first_spec.like,
                      first_spec.code_type)

        # the cluster, and rank 0
        leader_traces = [traces[rank] for rank in placement.leaders]
        cluster = Cluster(profile, clock, [stage_works] * root_spec.copies, paths, leader_traces)
        group_of_one = ThreadGroup(Table(1), 0)
        connections = RankConnections(cluster.links, None, group_of_one)
        yield Rank(root_spec, connections, traces[0], clock, restart=cluster.restart)

    for trace in traces:
        trace.close()
    join_traces(root_spec)


def _whole(group: Sequence[RankSpec]) -> AnySlice:
    """Load the layers of a stage, joined again if its ranks share them."""
    leader = group[0]
    if len(group) == 1:
        return load_layers(leader, leader.part.weights)
    if leader.part.quant != "none":
        raise ValueError(f"{leader.part.folder.parent} holds quantized shares, which time=virtual cannot put together: "
                         "split with --quant none, or add time=real")

    all_weights = [spec.part.weights for spec in group]
    return load_layers(leader, Joined(all_weights, leader.sizes, leader.part.shares))


def _work(group: Sequence[RankSpec], profile: Profile) -> Work:
    """Return the times of a stage, from its share of the layers and the largest share of one of its ranks."""
    leader = group[0]
    first_layer, end_layer = leader.part.layers
    layer_share = (end_layer - first_layer) / leader.sizes.layers
    num_kept_features = len(leader.part.own_inner)

    speeds = leader.part.shares
    largest_share = max(speeds) / sum(speeds)
    is_tiled = leader.config.comm == "galaxy"
    ranks = [member.part.rank for member in group]
    return work_of(profile, StageShare(ranks, layer_share, num_kept_features, largest_share, is_tiled))
