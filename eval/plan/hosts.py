"""Which boards of a hosts file answer, and how soon: the only thing of them that can be known before they run anything.

A connection to a board's ssh is opened and closed again; its handshake takes a message there and one back.
"""
from __future__ import annotations

import socket
import time
from dataclasses import replace

from config.boards import Boards
from launch.hosts.board import Line, is_here, read_hosts

PORT = 22  # ssh, by which scripts/push.sh copies
PATIENCE = 3.0  # seconds
TRIES = 3  # of which the shortest counts


def boards_of(path: str) -> list[Line]:
    """The boards of the ranks behind rank 0."""
    return read_hosts(path)[1:]


def answered(site: Boards, path: str, port: int = PORT) -> Boards:
    """The cluster with the latencies of rank 0's wires to the boards of a hosts file, where they are above the usual.

    Raises ValueError for a board that does not answer.
    """
    links = list(site.links)
    for rank, line in enumerate(boards_of(path), 1):
        latency = min(_handshake(line.address, path, port) for _ in range(TRIES)) / 2
        if not is_here(line.address) and latency > site.latency:
            links.append((0, rank, latency, site.mbps))
    return replace(site, links=tuple(links))


def _handshake(address: str, path: str, port: int) -> float:
    """Milliseconds until a board has answered."""
    since = time.perf_counter()
    try:
        socket.create_connection((address, port), PATIENCE).close()
    except OSError as error:
        raise ValueError(f"{address} of {path} does not answer at port {port} ({error}): switch it on, mend its line, "
                         "or leave it out") from None
    return 1e3 * (time.perf_counter() - since)
