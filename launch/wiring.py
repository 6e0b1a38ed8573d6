"""The wires of a rank: its link and, where stages are groups, its group; between processes or between threads.

It knows nothing about what travels, and compares no ranks: who talks to whom is told by `Seats`.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Sequence

import torch.distributed as dist

from config.run_config import RunConfig
from pipeline.heartbeat import Pulse
from pipeline.trace import NoTrace
from pipeline.transport import IDLE, DistLink, Inbox, LocalLink, PeerLost, new_wires
from sim.devices import SlowLink
from tp.group import DistGroup, Group, Table, ThreadGroup
from tp.links import Leading, Seats


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


def between_processes(config: RunConfig, seats: Seats, seat: int, pulse: Pulse, trace: NoTrace) -> Wires:
    """Of one rank of torch.distributed. All ranks make the same process groups in the same order."""
    wires, mine = new_wires(), seats.group(seat)
    groups = {ranks: dist.new_group(list(ranks), backend="gloo", timeout=IDLE)
              for ranks in seats.groups if len(ranks) > 1}
    link, fan = (peers and _emulated(config, DistLink(peers, pulse.failed, trace, wires), trace)
                 for peers in (seats.peers(seat), seats.fan(seat)))
    return Wires(link, fan, DistGroup(groups.get(mine), mine, mine.index(seat), pulse.verdict))


def between_threads(config: RunConfig, seats: Seats, traces: Sequence[NoTrace]) -> list[Wires]:
    """Of all ranks of one process."""
    inboxes = [Inbox(trace, seats.peers(seat).ordered) for seat, trace in enumerate(traces)]
    tables = {ranks: Table(len(ranks)) for ranks in seats.groups}
    found = []
    for seat, trace in enumerate(traces):
        mine = seats.group(seat)
        link, fan = (peers and _emulated(config, LocalLink(seat, inboxes, peers, tables.values()), trace)
                     for peers in (seats.peers(seat), seats.fan(seat)))
        found.append(Wires(link, fan, ThreadGroup(tables[mine], mine.index(seat))))
    return found


def _emulated(config: RunConfig, link: Any, trace: NoTrace) -> Any:
    """The link itself, or with the wires of the cluster that is emulated."""
    cluster = config.cluster
    return SlowLink(link, cluster, trace) if cluster else link
