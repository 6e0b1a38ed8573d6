"""The wires of a rank: its links and, where several ranks share a stage, its group; between processes or threads.

It knows nothing about what travels, and compares no ranks: `Placement` tells who talks to whom.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Sequence

import torch.distributed as dist

from config.run_config import RunConfig
from pipeline.heartbeat import Heartbeat
from pipeline.trace import NoTrace
from pipeline.transport import IDLE, DistLink, Inbox, LocalLink, PeerLost, Peers, new_wires
from sim.devices import SlowLink
from sim.pace import Pace
from tp.group import DistGroup, Group, Table, ThreadGroup
from tp.links import Leading, Placement


@dataclass(frozen=True)
class Wires:
    """What connects a rank to the others."""

    link: Any  # of a leader, into the ring; of another member of a group, to its leader
    fan: Any  # from a leader to the other members of its group; None if there are none
    group: Group

    @property
    def serving(self) -> Any:
        """The link for a rank that serves: what a leader hears goes on to the other members."""
        return self.link if self.fan is None else Leading(self.link, self.fan)

    def fail(self, failure: PeerLost) -> None:
        """Let whoever waits for a message get this failure instead."""
        self.link.fail(failure)

    def close(self) -> None:
        for link in (self.link, self.fan):
            if link is not None:
                link.close()


def between_processes(config: RunConfig, placement: Placement, rank: int, heartbeat: Heartbeat, trace: NoTrace
                      ) -> Wires:
    """The wires of one rank of torch.distributed. All ranks make the same process groups in the same order."""
    wires = new_wires()
    mine = placement.group(rank)
    groups = {ranks: dist.new_group(list(ranks), backend="gloo", timeout=IDLE)
              for ranks in placement.groups if len(ranks) > 1}

    def connect(peers: Peers | None) -> Any:
        if peers is None:
            return None
        link = DistLink(peers, heartbeat.failed, trace, wires)
        return _emulated(config, link, trace)

    link = connect(placement.peers(rank))
    fan = connect(placement.fan(rank))
    group = DistGroup(groups.get(mine), mine, mine.index(rank), heartbeat.loss)
    return Wires(link, fan, group)


def between_threads(config: RunConfig, placement: Placement, traces: Sequence[NoTrace]) -> list[Wires]:
    """The wires of every rank, all in one process."""
    assert len(traces) == placement.world, (len(traces), placement.world)
    ordered = [placement.peers(rank).ordered for rank in range(len(traces))]
    inboxes = [Inbox(trace, in_order) for trace, in_order in zip(traces, ordered)]
    tables = {ranks: Table(len(ranks)) for ranks in placement.groups}

    def connect(rank: int, peers: Peers | None) -> Any:
        if peers is None:
            return None
        link = LocalLink(rank, inboxes, peers, tables.values())
        return _emulated(config, link, traces[rank])

    found = []
    for rank in range(len(traces)):
        mine = placement.group(rank)
        link = connect(rank, placement.peers(rank))
        fan = connect(rank, placement.fan(rank))
        group = ThreadGroup(tables[mine], mine.index(rank))
        found.append(Wires(link, fan, group))
    return found


def _emulated(config: RunConfig, link: Any, trace: NoTrace) -> Any:
    """The link itself, or in an emulated cluster one that takes the time of its wires."""
    cluster = config.cluster
    return SlowLink(link, Pace(cluster, trace=trace)) if cluster else link
