"""Wires of torch.distributed, for link=torch: a process group for each kind of wire and direction between two ranks.

Prunes overtake, since their wires have groups of their own. gloo carries all kinds on CPUs. Where each rank has a GPU
of its own, nccl carries messages in order; a group per direction keeps a waiting receive from delaying a send. Groups
can neither lose and regain a rank, nor encrypt, so `recover` and `keys` are refused with them.
"""
from __future__ import annotations

from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Iterator, NamedTuple, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from cluster.transport import DATA, WIRES
from config.failure import broken_connection
from pipeline.link import Peers

# A pipeline may wait for its next request without limit; the heartbeat finds silent peers.
WAIT_TIMEOUT = timedelta(days=30)
HOST = torch.device("cpu")
NO_TAG = 0


class Direction(NamedTuple):
    """One direction of a wire between two ranks."""

    wire_kind: int
    sender: int
    receiver: int

    @property
    def members(self) -> list[int]:
        """Both ranks, in the order in which a process group numbers them."""
        return sorted((self.sender, self.receiver))


class Channel(NamedTuple):
    """A direction as one of its ranks sees it: the process group, and the number of the other rank in it."""

    process_group: Any
    peer_number: int


class TorchWire:
    """The channels to and from each peer; a lost peer raises PeerLost."""

    def __init__(self, device: torch.device = HOST) -> None:
        self._device = device
        self.outgoing: dict[int, Channel] = {}  # by peer
        self.incoming: dict[int, Channel] = {}

    def send(self, tensors: Sequence[Tensor], peer: int) -> None:
        process_group, peer_number = self.outgoing[peer]
        sent_tensors = [tensor.to(self._device) for tensor in tensors]  # must exist until they are sent
        with _transfers_with(peer):
            transfers = [process_group.send([tensor], peer_number, NO_TAG) for tensor in sent_tensors]
            for transfer in transfers:
                transfer.wait()

    def recv(self, x: Tensor, peer: int) -> None:
        """Fill a tensor of the host with the next bytes from a peer."""
        process_group, peer_number = self.incoming[peer]
        received_tensor = torch.empty_like(x, device=self._device)
        with _transfers_with(peer):
            process_group.recv([received_tensor], peer_number, NO_TAG).wait()
        x.copy_(received_tensor)  # waits for the GPU, if there is one

    def check(self, peer: int) -> None:
        """Do nothing: the group raises an error in each transfer with a lost peer."""


@contextmanager
def _transfers_with(peer: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise broken_connection(peer) from error


def torch_wires(rank: int, peers_of_ranks: Sequence[Sequence[Peers]], gpu: torch.device | None = None
                ) -> list[TorchWire]:
    """Create the wires of a rank, one of each kind; all ranks call this together, with the same peers of every rank.

    `gpu` is the rank's own GPU, if each rank has one.
    """
    devices = [gpu if gpu is not None and kind == DATA else HOST for kind, _ in enumerate(WIRES)]
    wires = list(map(TorchWire, devices))

    for direction in _directions(peers_of_ranks):
        wire, members = wires[direction.wire_kind], direction.members
        backend = "gloo" if devices[direction.wire_kind] == HOST else "nccl"
        process_group = dist.new_group(members, backend=backend, timeout=WAIT_TIMEOUT)

        sender, receiver = direction.sender, direction.receiver
        if rank == sender:
            wire.outgoing[receiver] = Channel(process_group, members.index(receiver))
        elif rank == receiver:
            wire.incoming[sender] = Channel(process_group, members.index(sender))

    return wires


def _directions(peers_of_ranks: Sequence[Sequence[Peers]]) -> Iterator[Direction]:
    """Yield every direction of every wire, in an order that is the same on all ranks."""
    for sender, links in enumerate(peers_of_ranks):
        for peers in links:
            for wire_kind, receivers in enumerate(peers.send_to):
                for receiver in receivers:
                    yield Direction(wire_kind, sender, receiver)
