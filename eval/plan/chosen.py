"""The boards of a choice alone: as a hosts file, and as a cluster whose ranks have no gaps."""
from __future__ import annotations

from dataclasses import replace

from config.boards import Boards
from config.files import ROOM, write
from eval.plan.candidates import Candidate
from launch.hosts.board import FOLDER, Line, read_hosts


def members(one: Candidate) -> list[int]:
    """The boards beside rank 0's, in the order of the ranks that they become."""
    return [rank for rank in one.boards if rank]


def alone(site: Boards, one: Candidate) -> Boards:
    """The cluster of rank 0's board and those of a choice, which are the ranks from 1 on in it."""
    chosen = members(one)
    ranks = {0: 0, **{old: new for new, old in enumerate(chosen, 1)}}
    links = tuple((ranks[a], ranks[b], latency, mbps) for a, b, latency, mbps in site.links
                  if a in ranks and b in ranks)
    factors = tuple(site.factors[rank - 1] for rank in chosen)
    memory = tuple(site.memory[rank - 1] for rank in chosen) if site.memory else ()
    kept = [throttle for throttle in site.throttles if throttle[0] in ranks]
    throttles = tuple((ranks[rank], since, slower) for rank, since, slower in kept)
    return replace(site, factors=factors, memory=memory, links=links, throttles=throttles)


def write_hosts(path: str, source: str, one: Candidate) -> None:
    """Write a hosts file with the lines of rank 0 and of the boards of a choice, out of that of all boards."""
    lines = read_hosts(source)
    chosen = [lines[rank] for rank in (0, *members(one))]
    write(path, "".join(f"{_text(line)}\n" for line in chosen), ROOM)


def _text(line: Line) -> str:
    """A board as a hosts file names it."""
    said = {"user": line.user, "folder": "" if line.folder == FOLDER else line.folder, "interface": line.interface}
    return " ".join([line.address, *(f"{key}={value}" for key, value in said.items() if value)])
