"""Memberships: the ranks that are connected at one time. After each loss there is a new one, with its own connections.

Rank 0 opens a membership. All ranks come to it, restarted ones included, and connect once all are there. The module
knows nothing about messages. What a rank writes about a membership carries its number, so that it cannot be mistaken.
"""
from __future__ import annotations

import math
import time
from typing import Any, Callable, NamedTuple, Sequence

from cluster.heartbeat import Heartbeat, report_loss, reported_loss
from cluster.processes import HUNG_KEY
from cluster.sockets import Connections, Door
from cluster.transport import SocketWire
from config.failure import PeerLost
from pipeline.link import Peers

POLL_SECONDS = 0.02  # between two checks of which ranks have come
NEWEST, COMPLETE = "membership", "complete"  # keys in the store: the newest membership; the newest that has all ranks


def ignore_meeting() -> None:
    """Do nothing when all ranks have met."""


def expect_all() -> str:
    """Return no reason why a rank will not come."""
    return ""


class Meeting(NamedTuple):
    """How a rank meets the others."""

    store: Any  # shared by all ranks
    open_door: Callable[[int], Door]  # opens the rank's own door in a membership
    rank_names: Sequence[str] = ()  # if the ranks are on several hosts
    on_complete: Callable[[], None] = ignore_meeting  # called once all ranks have come to a membership
    reason_against: Callable[[], str] = expect_all  # while rank 0 waits: why a rank will not come, or empty
    patience: float = math.inf  # seconds within which all must come to the first membership


class Memberships:
    """The memberships as one rank sees them; without recovery (`patience` is 0) there is one.

    A restarted rank ends the membership to which its earlier process had come.
    """

    def __init__(self, meeting: Meeting, rank: int, heartbeat: Heartbeat, peers: Sequence[Peers], patience: float
                 ) -> None:
        self._meeting, self._store = meeting, meeting.store
        self._rank, self._heartbeat, self._peers = rank, heartbeat, peers
        self._patience, self._recovers = patience, patience > 0
        self._connections = Connections(rank, ())

        self.number, _ = door_of(self._store, rank)
        is_restarted = self.number > 0
        if is_restarted:
            report_loss(self._store, f"rank {rank} was lost: its process ended", self._key_suffix)

    def join(self, waits_until: float = math.inf) -> list[SocketWire]:
        """Return the wires of the next membership in which this rank connects to all its peers; raises PeerLost.

        Rank 0 waits for the others until this time of the monotonic clock.
        """
        while True:
            self.number = self._next_number()
            with self._meeting.open_door(self.number) as door:
                self._store.set(f"door/{self._rank}", f"{self.number} {door.name}")
                if not self._all_come(waits_until):
                    continue

                self._meeting.on_complete()
                self._heartbeat.begin(self._key_suffix)
                self._connections = Connections(self._rank, self._peers)
                try:
                    self._connect(door)
                    return self._connections.wires
                except PeerLost as loss:
                    self.leave(loss)
                    self.close()
                    if not self._recovers:
                        raise

    def leave(self, loss: PeerLost) -> None:
        """Report a loss, and cut the connections of this membership."""
        self._heartbeat.end_membership(str(loss))
        self.cut()

    def cut(self) -> None:
        """Cut the connections, which wakes the threads that wait at them."""
        self._connections.cut()

    def close(self) -> None:
        """Close the connections, at which no thread waits any more."""
        self._connections.close()

    def _connect(self, door: Door) -> None:
        connections = self._connections
        for kind, peer in sorted(connections.outgoing):
            _, door_name = door_of(self._store, peer)
            connections.reach(door, kind, peer, door_name)

        while connections.missing:
            connections.accept(door)
            if self._heartbeat.first_loss or self._is_over:
                raise PeerLost(self._heartbeat.first_loss or "the membership is over")

    def _next_number(self) -> int:
        """Return the number of the next membership, once it is open."""
        raise NotImplementedError

    def _all_come(self, waits_until: float) -> bool:
        """Wait until all ranks have come to this membership; return False if there is a newer one."""
        raise NotImplementedError

    @property
    def _newest_number(self) -> int:
        return int(self._store.add(NEWEST, 0))

    @property
    def _is_over(self) -> bool:
        """Whether rank 0 has opened a newer membership."""
        return self._newest_number > self.number

    @property
    def _key_suffix(self) -> str:
        return f"/{self.number}" if self._recovers else ""


def door_of(store: Any, rank: int) -> tuple[int, str]:
    """Return the latest membership to which a rank has come, 0 for none, and its door there."""
    entry = store.look(f"door/{rank}") or b"0"
    number, _, door_name = entry.decode().partition(" ")
    return int(number), door_name


class FollowedMemberships(Memberships):
    """The side of every rank but 0 (`root_rank`): it waits, unless rank 0 ends or is silent for over `patience`."""

    root_rank = 0

    def _next_number(self) -> int:
        while not self._is_over:
            self._wait()
        return self._newest_number

    def _all_come(self, waits_until: float) -> bool:
        while self._store.add(COMPLETE, 0) < self.number and not self._is_over:
            self._wait()
        return not self._is_over

    def _wait(self) -> None:
        time.sleep(POLL_SECONDS)
        loss = reported_loss(self._store) or self._heartbeat.loss_of(self.root_rank, self._patience)
        if loss:
            raise PeerLost(loss)


class OpenedMemberships(Memberships):
    """Rank 0's side: it waits for all others, and reports those that hang."""

    def _next_number(self) -> int:
        return int(self._store.add(NEWEST, 1))

    def _all_come(self, waits_until: float) -> bool:
        starts_the_run = self.number == 1  # at the first start a rank may take its time to import modules
        hung_before: set[int] = set()
        while missing := self.missing_ranks():

            # ranks that hang
            hung_now = set() if starts_the_run else set(missing).intersection(self._heartbeat.silent_peers())
            for peer in hung_now - hung_before:
                self._store.add(HUNG_KEY.format(peer), 1)
            hung_before |= hung_now

            # the end of the wait
            reason = self._meeting.reason_against()
            if not reason and time.monotonic() > waits_until:
                time_limit = "" if starts_the_run else f" back within recover={self._patience:g} seconds"
                reason = f"rank {' and rank '.join(map(str, missing))} did not come{time_limit}"
            if reason:
                raise PeerLost(reason)

            time.sleep(POLL_SECONDS)

        self._store.set(COMPLETE, str(self.number))
        return True

    def missing_ranks(self) -> list[int]:
        """Return the ranks that have not come to this membership."""
        return [peer for peer in self._heartbeat.others if door_of(self._store, peer)[0] < self.number]
