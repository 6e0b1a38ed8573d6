"""The protocol of a link: a rank's way to the ranks around it.

`cluster/transport.py` implements it, for groups `tp/links.py`, for virtual time `sim/`; `launch/` chooses.
"""
from __future__ import annotations

from typing import NamedTuple, Protocol, Sequence

from pipeline.messages import Message, Prune


class Link(Protocol):
    """The operations of a link."""

    @property
    def ready(self) -> bool:
        """Whether `recv` would return at once."""

    def send(self, msg: Message) -> None:
        """Send a message to the next rank, in order, without waiting."""

    def recv(self) -> Message:
        """Return the next message, a Prune before others; raises PeerLost."""

    def wait_until(self, until: float) -> None:
        """Wait until `recv` would return at once, or until this time on the clock, in seconds."""

    def urgent(self) -> Prune | None:
        """Return the next Prune that has arrived, or None; raises PeerLost."""

    def broadcast(self, msg: Message) -> None:
        """Send a message to the leaders of all other stages without waiting; it may overtake messages in flight."""


class Peers(NamedTuple):
    """The ranks at the other ends of a link."""

    previous_rank: int | None  # rank from which it receives messages in order
    next_ranks: Sequence[int]  # ranks to which it sends messages in order
    other_ranks: Sequence[int] = ()  # ranks to which it broadcasts
    root_rank: int | None = None  # rank from which it receives broadcasts
    in_order: bool = False  # whether prunes are handed out in order, too

    @property
    def send_to(self) -> list[Sequence[int]]:
        """The ranks to which it sends, for each kind of wire."""
        return [self.next_ranks, self.other_ranks]

    @property
    def receive_from(self) -> list[Sequence[int]]:
        """The ranks from which it receives, for each kind of wire."""
        return [_as_list(self.previous_rank), _as_list(self.root_rank)]


def _as_list(peer: int | None) -> list[int]:
    return [] if peer is None else [peer]


def send_round(links: Sequence[Link], msg: Message) -> None:
    """Send a message over each link, and wait until all have come back; drop other messages that come before."""
    for link in links:
        link.send(msg)
    for link in links:
        while not isinstance(link.recv(), type(msg)):
            pass
