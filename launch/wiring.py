"""The wires of a rank: its links and, where several ranks share a stage, its group; between processes or threads.

It knows nothing about what travels, and compares no ranks: `Placement` says who talks to whom.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Sequence

import torch.distributed as dist

from config.run_config import RunConfig
from pipeline.failure import Heartbeat
from pipeline.trace import Meter, NoTrace
from pipeline.transport import IDLE, DistLink, Inbox, LocalLink, PeerLost, Peers, new_wires
from sim.clock import Pace
from sim.devices import SlowLink
from tp.group import DistGroup, Group, Table, ThreadGroup
from tp.links import Leading, Placement


@dataclass(frozen=True)
class Wires:
    """What connects a rank to the others."""

    links: Sequence[Any]  # of a leader, into each of its rings; of another member of a group, to its leader
    fan: Any  # from a leader to the other members of its group; None if there are none
    group: Group
    drafters: Sequence[Any] = ()  # from rank 0 to each rank that holds a small model
    meter: Meter = field(default_factory=Meter)  # of the rank's work, which stands still while it waits for messages

    @property
    def link(self) -> Any:
        """The first link, which hears what all of them bring."""
        return self.links[0]

    @property
    def serving(self) -> Any:
        """The link for a rank that serves: what a leader hears goes on to the other members."""
        return self.link if self.fan is None else Leading(self.link, self.fan)

    def fail(self, failure: PeerLost) -> None:
        """Let those who wait for a message get this failure instead."""
        for link in (self.link, *self.drafters):
            link.fail(failure)

    def close(self) -> None:
        for link in self._all:
            link.close()

    def drop(self) -> None:
        """After a loss: end what would hold a rank that nobody needs any more."""
        for link in self._all:
            link.drop()

    @property
    def _all(self) -> Sequence[Any]:
        fan = [] if self.fan is None else [self.fan]
        return [*self.links, *self.drafters, *fan]


def between_processes(config: RunConfig, placement: Placement, rank: int, heartbeat: Heartbeat, trace: NoTrace
                      ) -> Wires:
    """The wires of one rank of torch.distributed. All ranks make the same process groups in the same order."""
    wires = new_wires()
    mine = placement.group(rank)
    groups = {ranks: dist.new_group(list(ranks), backend="gloo", timeout=IDLE)
              for ranks in placement.groups if len(ranks) > 1}

    def connect(peers: Peers, inbox: Inbox) -> Any:
        link = DistLink(peers, heartbeat.failed, trace, wires, inbox)
        return _emulated(config, link, trace, (rank, peers))

    peers = placement.peers(rank)
    meter = heartbeat.meter
    inbox = Inbox(trace, peers[0].ordered, meter)
    links = [connect(each, inbox) for each in peers]
    members = placement.fan(rank)
    fan = connect(members, Inbox(trace)) if members else None
    group = DistGroup(groups.get(mine), mine, mine.index(rank), heartbeat.loss)
    drafters = [connect(each, Inbox(trace, meter=meter)) for each in placement.asked(rank)]
    return Wires(links, fan, group, drafters, meter)


def between_threads(config: RunConfig, placement: Placement, traces: Sequence[NoTrace]) -> list[Wires]:
    """The wires of every rank, all in one process."""
    assert len(traces) == placement.world, (len(traces), placement.world)
    ordered = [placement.peers(rank)[0].ordered for rank in range(len(traces))]
    meters = [Meter() for _ in traces]
    inboxes = [Inbox(trace, in_order, meter) for trace, in_order, meter in zip(traces, ordered, meters)]
    tables = {ranks: Table(len(ranks)) for ranks in map(placement.group, range(placement.world))}
    root = placement.root
    answers = {drafter: Inbox(traces[root], meter=meters[root])
               for drafter in placement.drafters}  # where rank 0 hears each small model
    ends = [*inboxes, *tables.values(), *answers.values()]

    def connect(rank: int, peers: Peers, drafter: int = root) -> Any:
        """The link of a rank; on the way between rank 0 and a small model, of `drafter`, with an inbox of its own."""
        own = [*inboxes]
        own[root] = answers.get(drafter, own[root])
        link = LocalLink(rank, own, peers, ends)
        return _emulated(config, link, traces[rank], (rank, peers))

    found = []
    for rank in range(len(traces)):
        mine = placement.group(rank)
        links = [connect(rank, peers, rank) for peers in placement.peers(rank)]
        members = placement.fan(rank)
        fan = connect(rank, members) if members else None
        group = ThreadGroup(tables[mine], mine.index(rank))
        drafters = [connect(rank, peers, *peers.following) for peers in placement.asked(rank)]
        found.append(Wires(links, fan, group, drafters, meters[rank]))
    return found


def _emulated(config: RunConfig, link: Any, trace: NoTrace, ends: tuple[int, Peers]) -> Any:
    """The link itself, or in an emulated cluster one that takes the time of the wire from a rank to its peers."""
    cluster, (rank, peers) = config.cluster, ends
    if cluster is None:
        return link
    wire = cluster.link(rank, peers.following[0]) if peers.following else cluster
    return SlowLink(link, Pace(wire, trace=trace))
