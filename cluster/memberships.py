"""Connections of ranks, in epochs: a new one after each loss, each with connections of its own.

Rank 0 opens an epoch. All ranks come to it, restarted ones included, and connect once all are there. The module knows
nothing about messages. What a rank writes about an epoch carries the epoch's number, so that it cannot be mistaken.
"""
from __future__ import annotations

import math
import time
from typing import Any, Callable, NamedTuple, Sequence

from cluster.heartbeat import Heartbeat, report_loss, reported_loss
from cluster.processes import HUNG
from cluster.sockets import Connections, Door
from cluster.transport import Wire
from config.failure import PeerLost
from pipeline.link import Peers

LOOK = 0.02  # seconds between two checks of which ranks have come
EPOCH, OPEN = "epoch", "open"  # keys in the store: the newest epoch; the newest to which all ranks have come


def ignore_meeting() -> None:
    """Do nothing when all ranks have met."""


def expect_all() -> str:
    """Return no reason why a rank will not come."""
    return ""


class Meeting(NamedTuple):
    """How a rank meets the others."""

    store: Any  # shared by all ranks
    door: Callable[[int], Door]  # opens the rank's own door in an epoch
    names: Sequence[str] = ()  # of all ranks, if they are on several hosts
    met: Callable[[], None] = ignore_meeting  # called once all ranks have come to an epoch
    attend: Callable[[], str] = expect_all  # while rank 0 waits: returns why a rank will not come, or an empty string
    patience: float = math.inf  # seconds within which all must come to the first epoch


class Epochs:
    """The epochs as one rank sees them; there is only one, unless rank 0 may be silent for `patience` seconds.

    A restarted rank ends the epoch to which its earlier process had come.
    """

    def __init__(self, meeting: Meeting, own: int, heartbeat: Heartbeat, peers: Sequence[Peers], patience: float
                 ) -> None:
        self._meeting, self._store = meeting, meeting.store
        self._own, self._heartbeat, self._peers = own, heartbeat, peers
        self._patience, self._recovers = patience, patience > 0
        self._made = Connections(own, ())
        self.number = door_of(self._store, own)[0]
        if self.number:
            report_loss(self._store, f"rank {own} was lost: its process ended", self._suffix)

    def join(self, until: float = math.inf) -> list[Wire]:
        """Return the wires of the next epoch in which this rank connects to all its peers; raises PeerLost.

        Rank 0 waits for the others `until` a time of the monotonic clock.
        """
        while True:
            self.number = self._next()
            with self._meeting.door(self.number) as door:
                self._store.set(f"door/{self._own}", f"{self.number} {door.name}")
                if not self._all_come(until):
                    continue
                self._meeting.met()
                self._heartbeat.begin(self._suffix)
                self._made = made = Connections(self._own, self._peers)
                try:
                    self._connect(made, door)
                    return made.wires
                except PeerLost as loss:
                    self.leave(loss)
                    self.close()
                    if not self._recovers:
                        raise

    def leave(self, loss: PeerLost) -> None:
        """Note a loss, and cut the connections of this epoch."""
        self._heartbeat.end_epoch(str(loss))
        self.cut()

    def cut(self) -> None:
        """Cut the connections, which wakes the threads that wait at them."""
        self._made.cut()

    def close(self) -> None:
        """Close the connections, at which no thread waits any more."""
        self._made.close()

    def _connect(self, made: Connections, door: Door) -> None:
        for kind, peer in sorted(made.to):
            made.reach(door, kind, peer, door_of(self._store, peer)[1])
        while made.missing:
            made.accept(door)
            if self._heartbeat.first_loss or self._over:
                raise PeerLost(self._heartbeat.first_loss or "the epoch is over")

    def _next(self) -> int:
        """Return the next epoch, once it is open."""
        raise NotImplementedError

    def _all_come(self, until: float) -> bool:
        """Wait until all ranks have come to this epoch; return False if there is a newer one."""
        raise NotImplementedError

    @property
    def _over(self) -> bool:
        """Whether rank 0 has opened a newer epoch."""
        return int(self._store.add(EPOCH, 0)) > self.number

    @property
    def _suffix(self) -> str:
        return f"/{self.number}" if self._recovers else ""


def door_of(store: Any, rank: int) -> tuple[int, str]:
    """Return the latest epoch to which a rank has come, 0 for none, and its door there."""
    entry = store.look(f"door/{rank}") or b"0"
    number, _, name = entry.decode().partition(" ")
    return int(number), name


class Coming(Epochs):
    """The side of every rank but 0 (`root`): it waits, unless rank 0 ends or is silent for more than `patience`."""

    root = 0

    def _next(self) -> int:
        while not self._over:
            self._wait()
        return int(self._store.add(EPOCH, 0))

    def _all_come(self, until: float) -> bool:
        while self._store.add(OPEN, 0) < self.number and not self._over:
            self._wait()
        return not self._over

    def _wait(self) -> None:
        time.sleep(LOOK)
        if loss := reported_loss(self._store) or self._heartbeat.loss_of(self.root, self._patience):
            raise PeerLost(loss)


class Opening(Epochs):
    """Rank 0's side: it waits for all others, and notes those that hang."""

    def _next(self) -> int:
        return int(self._store.add(EPOCH, 1))

    def _all_come(self, until: float) -> bool:
        first = self.number == 1  # at the first start a rank may take its time to import modules
        found: set[int] = set()
        others = self._heartbeat.others
        while missing := [rank for rank in others if door_of(self._store, rank)[0] < self.number]:
            hung = set(missing).intersection(self._heartbeat.silent_peers())
            for peer in () if first else hung - found:
                found.add(peer)
                self._store.add(HUNG.format(peer), 1)
            reason = self._meeting.attend()
            if not reason and time.monotonic() > until:
                when = "" if first else f" back within recover={self._patience:g} seconds"
                reason = f"rank {' and rank '.join(map(str, missing))} did not come{when}"
            if reason:
                raise PeerLost(reason)
            time.sleep(LOOK)
        self._store.set(OPEN, str(self.number))
        return True
