"""What a message costs over each link: sockets of one machine, sockets over TCP, and torch.distributed.

Two processes of this machine send a segment back and forth, over each link in turn. A message's time is half of a round
trip; processor time is that of both processes. Shapes: T rows, D columns.
"""
from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
import time
from contextlib import suppress
from typing import Callable, Dict, Iterable, List, NamedTuple, Sequence, Tuple

import numpy as np
import torch
import torch.distributed as dist

from cluster.torch_wires import torch_wires
from cluster.transport import WIRES, ProcessLink, SocketWire, Wire
from config.dialect import OptionParser
from config.failure import PeerLost
from eval.bench import number
from eval.tables import in_columns
from launch.progress import ProgressBar
from pipeline.link import Peers
from pipeline.messages import Segment, Stop

COLUMNS = ("link", "rows", "bytes", "us a message", "of processor time")
ROWS, HIDDEN = (1, 16, 64), 4096  # of a 7B model
PEERS = (Peers(1, [1]), Peers(0, [0]))  # of the two ranks
Connect = Callable[[int], Sequence[Wire]]  # creates the wires of a rank


class MessageCost(NamedTuple):
    """Medians of one message: seconds from `send` until it is received, and seconds of processor time."""

    seconds: float
    processor_seconds: float


Costs = Dict[Tuple[str, int], List[MessageCost]]  # by link and rows


def links(argv: Sequence[str]) -> int:
    """Execute `python3 -m scripts.bench links`."""
    parser = OptionParser(prog="python3 -m scripts.bench links")
    parser.add_argument("--messages", type=number, default=500, metavar="N", help="messages per round (500)")
    parser.add_argument("--rounds", type=number, default=5, metavar="N", help="rounds over all links (5)")
    typed_args = parser.parse_args(list(argv))

    costs: Costs = {}
    timed_turns = [(name, num_rows) for _ in range(typed_args.rounds) for name in CONNECTIONS for num_rows in ROWS]
    for name, num_rows in ProgressBar(timed_turns, leave=False):
        costs.setdefault((name, num_rows), []).append(measured(name, num_rows, typed_args.messages))

    rounds = f"{typed_args.rounds} rounds of {typed_args.messages} messages"
    print(f"float16, {HIDDEN} columns; medians of {rounds}, both ways")
    print(in_columns(COLUMNS, _table(costs), names=1))
    return 0


def _table(costs: Costs) -> Iterable[Sequence[str]]:
    for (name, num_rows), rounds in costs.items():
        seconds, processor_seconds = np.median(rounds, axis=0)
        num_bytes = num_rows * HIDDEN * 2
        yield name, str(num_rows), f"{num_bytes:,}", f"{1e6 * seconds:.0f}", f"{1e6 * processor_seconds:.0f}"


def measured(name: str, num_rows: int, num_messages: int) -> MessageCost:
    """Return the cost of a message of some rows over the link of this name."""
    with tempfile.TemporaryDirectory() as folder:
        connect = CONNECTIONS[name](folder)
        echo_process = multiprocessing.get_context("fork").Process(target=_echo, args=[connect])
        echo_process.start()
        try:
            return _ping(connect, num_rows, num_messages)
        finally:
            echo_process.join()


def _ping(connect: Connect, num_rows: int, num_messages: int) -> MessageCost:
    link = _begun(connect, 0)
    nodes = list(range(num_rows))
    segment = Segment(0, nodes, nodes, nodes, 0, torch.zeros(num_rows, HIDDEN, dtype=torch.float16))
    _round_trip(link, segment)

    begun_at, used_before = time.monotonic(), _used_seconds(link, segment)
    for _ in range(num_messages):
        _round_trip(link, segment)
    seconds = time.monotonic() - begun_at
    used_seconds = _used_seconds(link, segment) - used_before

    link.send(Stop())
    link.recv()
    link.close()
    _leave_groups()
    return MessageCost(seconds / (2 * num_messages), used_seconds / (2 * num_messages))


def _round_trip(link: ProcessLink, segment: Segment) -> Segment:
    link.send(segment)
    answer = link.recv()
    assert isinstance(answer, Segment), answer
    return answer


def _used_seconds(link: ProcessLink, segment: Segment) -> float:
    """Return the processor time of both processes so far; the other one writes its own into the answer's tokens."""
    other_seconds = torch.zeros(1, 1, dtype=torch.float64)
    question = Segment(1, [0], [0], [0], 0, other_seconds)
    return time.process_time() + float(_round_trip(link, question).x)


def _echo(connect: Connect) -> None:
    torch.set_num_threads(1)
    link = _begun(connect, 1)
    with suppress(PeerLost):
        while isinstance(msg := link.recv(), Segment):
            if msg.request == 1:
                msg.x.fill_(time.process_time())
            link.send(msg)
    link.send(Stop())
    link.close()
    _leave_groups()


def _begun(connect: Connect, rank: int) -> ProcessLink:
    link: ProcessLink

    def failed(name: str, error: BaseException) -> None:
        link.fail(error if isinstance(error, PeerLost) else PeerLost(str(error)))

    link = ProcessLink(PEERS[rank], failed)
    link.begin(connect(rank))
    return link


# --- the links --------------------------------------------------------------------------------------------------------

def _by_sockets(socket_pairs: Sequence[tuple[socket.socket, socket.socket]]) -> Connect:
    """Connect over two socket_pairs of sockets, one for each direction."""

    def connect(rank: int) -> Sequence[Wire]:
        wires = [SocketWire() for _ in WIRES]
        wires[0].outgoing[1 - rank] = socket_pairs[rank][0]
        wires[0].incoming[1 - rank] = socket_pairs[1 - rank][1]
        return wires

    return connect


def _unix(folder: str) -> Connect:
    return _by_sockets([socket.socketpair(socket.AF_UNIX), socket.socketpair(socket.AF_UNIX)])


def _tcp(folder: str) -> Connect:
    socket_pairs = []
    with socket.create_server(("127.0.0.1", 0)) as listening_socket:
        for _ in PEERS:
            sending_socket = socket.create_connection(listening_socket.getsockname())
            sending_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            socket_pairs.append((sending_socket, listening_socket.accept()[0]))
    return _by_sockets(socket_pairs)


def _torch(folder: str) -> Connect:
    def connect(rank: int) -> Sequence[Wire]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.FileStore(os.path.join(folder, "store"), len(PEERS))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=len(PEERS))
        return torch_wires(rank, [[peers] for peers in PEERS])

    return connect


def _leave_groups() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


CONNECTIONS = {"sockets": _unix, "sockets, TCP": _tcp, "torch, gloo": _torch}
