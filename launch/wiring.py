"""The wires of a rank: its link and, where stages are groups, its group; between processes or between threads.

It knows nothing about what travels, and compares no ranks: who talks to whom is told by `Placement`.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Sequence

import torch.distributed as dist

from config.run_config import RunConfig
from pipeline.heartbeat import Heartbeat
from pipeline.trace import NoTrace
from pipeline.transport import IDLE, DistLink, Inbox, LocalLink, PeerLost, new_wires
from sim.devices import SlowLink
from sim.pace import Pace
from tp.group import DistGroup, Group, Table, ThreadGroup
from tp.links import Leading, Placement


@dataclass(frozen=True)
class Wires:
    """`link` leads into the ring, or to a group's member from its leader; `fan` from a leader to its members."""

    link: Any
    fan: Any
    group: Group

    @property
    def serving(self) -> Any:
        """The link for a rank that serves: what a leader hears goes on to its members."""
        return self.link if self.fan is None else Leading(self.link, self.fan)

    def fail(self, failure: PeerLost) -> None:
        """Nothing more will come."""
        self.link.fail(failure)

    def close(self) -> None:
        for link in (self.link, self.fan):
            if link is not None:
                link.close()


def between_processes(config: RunConfig, placement: Placement, rank: int, heartbeat: Heartbeat, trace: NoTrace
                      ) -> Wires:
    """Of one rank of torch.distributed. All ranks make the same process groups in the same order."""
    wires, mine = new_wires(), placement.group(rank)
    groups = {ranks: dist.new_group(list(ranks), backend="gloo", timeout=IDLE)
              for ranks in placement.groups if len(ranks) > 1}
    link, fan = (peers and _emulated(config, DistLink(peers, heartbeat.failed, trace, wires), trace)
                 for peers in (placement.peers(rank), placement.fan(rank)))
    return Wires(link, fan, DistGroup(groups.get(mine), mine, mine.index(rank), heartbeat.loss))


def between_threads(config: RunConfig, placement: Placement, traces: Sequence[NoTrace]) -> list[Wires]:
    """Of all ranks of one process."""
    inboxes = [Inbox(trace, placement.peers(rank).ordered) for rank, trace in enumerate(traces)]
    tables = {ranks: Table(len(ranks)) for ranks in placement.groups}
    found = []
    for rank, trace in enumerate(traces):
        mine = placement.group(rank)
        link, fan = (peers and _emulated(config, LocalLink(rank, inboxes, peers, tables.values()), trace)
                     for peers in (placement.peers(rank), placement.fan(rank)))
        found.append(Wires(link, fan, ThreadGroup(tables[mine], mine.index(rank))))
    return found


def _emulated(config: RunConfig, link: Any, trace: NoTrace) -> Any:
    """The link itself, or with the wires of the cluster that is emulated."""
    cluster = config.cluster
    return SlowLink(link, Pace(cluster, trace=trace)) if cluster else link
