"""A rank that is connected to the others: its links and, where several ranks share a stage, its group.

The others are processes or threads. It knows nothing about messages, and compares no ranks: `Placement` defines which
ranks are linked.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Callable, NamedTuple, Sequence

import torch.distributed as dist

from cluster.heartbeat import Heartbeat, RankState
from cluster.transport import Inbox, LocalLink, ProcessLink
from config.failure import PeerLost
from config.profiles import Profile
from launch.build import build_stage
from launch.spec import RankSpec
from pipeline.link import Peers
from pipeline.requests import no_recovery
from pipeline.stage import run_stage
from pipeline.trace import REAL, Clock, Meter, NoTrace
from sim.clock import Pace
from sim.devices import SlowLink
from tp.group import DistGroup, Group, Table, ThreadGroup
from tp.links import ForwardingLink, Placement

# A pipeline may wait for its next request without limit; the heartbeat finds dead peers.
GROUP_TIMEOUT = timedelta(days=30)
MakeLink = Callable[[Peers], Any]  # creates the link to peers


@dataclass(frozen=True)
class RankConnections:
    """What connects a rank to the others."""

    links: Sequence[Any]  # of a leader, into each of its rings; of another member of a group, to its leader
    fan: Any  # from a leader to the other members of its group; None if there are none
    group: Group
    meter: Meter = field(default_factory=Meter)  # measures the rank's work, without waiting for messages

    @property
    def link(self) -> Any:
        """The first link, which receives the messages of all of them."""
        return self.links[0]

    def each(self, on_link: Callable[[Any], object]) -> None:
        """Call `on_link` with each link."""
        fan_links = [] if self.fan is None else [self.fan]
        for link in (*self.links, *fan_links):
            on_link(link)


def unknown_states() -> dict[str, RankState | None]:
    """Return no state of any rank: nobody measures them."""
    return {}


class Rank(NamedTuple):
    """A rank that is connected to the others."""

    spec: RankSpec
    connections: RankConnections
    trace: NoTrace
    clock: Clock = REAL
    states: Callable[[], dict[str, RankState | None]] = unknown_states  # of each rank, by name; None: it is lost
    restart: Callable[[bool], object] = lambda same_question: None  # restarts virtual time for the next one
    rejoin: Callable[[PeerLost], None] = no_recovery  # returns when all are connected again after a loss, or raises

    def serve(self) -> None:
        """Compute this rank's layers for the ring until it is stopped."""
        stage = build_stage(self.spec, self.trace, self.connections.group)
        link, fan = self.connections.link, self.connections.fan
        stage_link: Any = link if fan is None else ForwardingLink(link, fan)  # a leader forwards to its members

        while True:
            try:
                with self.connections.meter:
                    return run_stage(stage, stage_link)
            except PeerLost as loss:
                self.rejoin(loss)
                stage.forget()


def between_processes(cluster: Profile | None, placement: Placement, rank: int, heartbeat: Heartbeat, trace: NoTrace
                      ) -> RankConnections:
    """Create the connections of one rank in a process of its own, not yet connected.

    Ranks that share a stage are in a process group; all ranks create the same groups in the same order.
    """
    # the group
    process_groups = {ranks: dist.new_group(list(ranks), backend="gloo", timeout=GROUP_TIMEOUT)
                      for ranks in placement.groups if len(ranks) > 1}
    group_ranks = placement.group(rank)
    process_group = process_groups.get(group_ranks)
    group = DistGroup(process_group, group_ranks, group_ranks.index(rank), heartbeat.wait_for_loss)

    # the links
    meter = heartbeat.meter
    inbox = Inbox(trace, placement.peers(rank)[0].in_order, meter)

    def make_link(peers: Peers) -> Any:
        return ProcessLink(peers, heartbeat.report_failure, trace, inbox)

    return _connections(rank, placement, make_link, (cluster, trace), group, meter)


def between_threads(cluster: Profile | None, placement: Placement, traces: Sequence[NoTrace]) -> list[RankConnections]:
    """Create the connections of all ranks, in one process."""
    assert len(traces) == placement.world, (len(traces), placement.world)
    ranks = range(placement.world)
    meters = [Meter() for _ in traces]
    receives_in_order = [placement.peers(rank)[0].in_order for rank in ranks]
    inboxes = list(map(Inbox, traces, receives_in_order, meters))
    group_tables = {group: Table(len(group)) for group in map(placement.group, ranks)}
    all_ends = [*inboxes, *group_tables.values()]

    def connections_of(rank: int) -> RankConnections:
        def make_link(peers: Peers) -> Any:
            return LocalLink(rank, inboxes, peers, all_ends)

        group_ranks = placement.group(rank)
        group = ThreadGroup(group_tables[group_ranks], group_ranks.index(rank))
        return _connections(rank, placement, make_link, (cluster, traces[rank]), group, meters[rank])

    return list(map(connections_of, ranks))


def _connections(rank: int, placement: Placement, make_link: MakeLink, emulation: tuple[Profile | None, NoTrace],
                 group: Group, meter: Meter) -> RankConnections:
    """Connect a rank; an emulated cluster delays each link by the wire to the first rank to which it sends."""
    cluster, trace = emulation

    def link_to(peers: Peers) -> Any:
        real_link = make_link(peers)
        if cluster is None:
            return real_link
        wire_profile = cluster.link(rank, peers.next_ranks[0]) if peers.next_ranks else cluster
        return SlowLink(real_link, Pace(wire_profile, trace=trace), rank)

    links = [link_to(peers) for peers in placement.peers(rank)]
    member_peers = placement.fan(rank)
    fan = link_to(member_peers) if member_peers else None

    return RankConnections(links, fan, group, meter)
