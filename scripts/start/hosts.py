"""Several hosts: which rank this board is and where all ranks meet, by keys, the environment or a hosts file.

It knows nothing about models, and talks to nobody; how ranks meet is told in meeting.py. As a program it prints the
boards of a hosts file, for scripts/push.sh.
"""
from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
from pathlib import Path
from typing import Mapping, NamedTuple, Sequence

from config.run_config import RunConfig

BOARD = "FLOWSPEC_BOARD"  # in the environment: this process is the one rank of its board
COMMAND = "FLOWSPEC_COMMAND"  # in the environment: what a person typed, for the help
PORT = 29500  # where ranks of several hosts meet, if nothing else is said: all boards must know it
FOLDER = "flowspec"  # the repository on a board, from the home of its user
WORDS = ("user", "folder", "interface")
ADDRESS_OF = 0x8915  # SIOCGIFADDR: the IPv4 address of an interface
EXAMPLE = "192.168.1.11 user=nvidia folder=flowspec interface=eth0"


class Line(NamedTuple):
    """A board as the hosts file names it."""

    address: str
    user: str = ""
    folder: str = FOLDER
    interface: str = ""


class Board(NamedTuple):
    """One rank, and where it meets the others; what is empty was not said."""

    rank: int
    master: str  # name or address of rank 0's board
    port: int
    interface: str
    wait: float  # seconds for the others to come
    lines: Sequence[Line]  # of all ranks, if there is a hosts file

    def named(self, rank: int, host: str = "", address: str = "") -> str:
        """A rank as messages name it: with its host and address, as far as they are known."""
        known = self.lines[rank].address if self.lines else ""
        where = ", ".join(dict.fromkeys(word for word in (host, address or known) if word))
        return f"rank {rank} ({where})" if where else f"rank {rank}"

    @property
    def environment(self) -> dict[str, str]:
        """What a rank finds in its environment, as from torchrun."""
        world = {"WORLD_SIZE": str(len(self.lines))} if self.lines else {}
        return {"RANK": str(self.rank), **world}

    def ground(self) -> tuple[str, str]:
        """The interface through which this rank talks, and its address; refuses one that is not here."""
        here = addresses()
        there = ", ".join(f"{name} {address}" for name, address in here.items())
        remedy = "name one in GLOO_SOCKET_IFNAME, or behind interface= in the hosts file"
        if self.interface:
            if self.interface not in here:
                raise ValueError(f"the interface {self.interface} has no IPv4 address on this board, which has {there}:"
                                 f" {remedy}")
            return self.interface, here[self.interface]
        own = way_to(self.master)
        for name, address in here.items():
            if address == own or (name == "lo" and own.startswith("127.")):
                return name, address
        raise ValueError(f"no interface of this board, which has {there}, leads to {self.master}: {remedy}")


def read_hosts(path: str) -> list[Line]:
    """A line for each rank, rank 0 first: `[USER@]ADDRESS [user=..] [folder=..] [interface=..]`; # begins a remark."""
    if not Path(path).is_file():
        raise ValueError(f"there is no hosts file {path}: write one line for each rank, as {EXAMPLE}")
    found = []
    for number, text in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        words = text.partition("#")[0].split()
        if not words:
            continue
        user, _, address = words[0].rpartition("@")
        given = dict(word.partition("=")[::2] for word in words[1:])
        if "=" in address or not address or not all(given.get(key) for key in given) or set(given) - set(WORDS):
            raise ValueError(f"line {number} of {path} is no board: write [USER@]ADDRESS, then what is needed of "
                             f"user=, folder= and interface=, as {EXAMPLE}")
        given.setdefault("user", user)
        found.append(Line(address, **given))
    if len(found) < 2:
        raise ValueError(f"{path} names {len(found)} boards: write one line for each rank, rank 0 first")
    return found


def find_board(config: RunConfig, environment: Mapping[str, str]) -> Board | None:
    """This board's rank; None where all ranks are on this machine, or torchrun has told the rank."""
    if "RANK" in environment or not (config.hosts or environment.get(BOARD)):
        return None
    lines = read_hosts(config.hosts) if config.hosts else []
    rank = _rank(environment.get("NODE_RANK", ""), lines, config.hosts)
    master = config.master_addr if config.master_addr != RunConfig().master_addr else environment.get("MASTER_ADDR", "")
    if not master and not lines:
        raise ValueError("where is rank 0? Give its board's address in MASTER_ADDR, on all boards alike, or hosts=FILE")
    port = config.master_port or _number("MASTER_PORT", environment.get("MASTER_PORT") or str(PORT), 1 << 16)
    interface = environment.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    return Board(rank, master or lines[0].address, port or PORT,
                 interface or (lines[rank].interface if lines else ""), config.wait, lines)


def _rank(told: str, lines: Sequence[Line], path: str) -> int:
    if told:
        return _number("NODE_RANK", told, len(lines) or 1 << 16)
    if not lines:
        raise ValueError("which rank is this board? Give NODE_RANK, as in NODE_RANK=3 MASTER_ADDR=192.168.1.11 bash "
                         "run_jetson.sh, or hosts=FILE with one line for each rank")
    own = [rank for rank, line in enumerate(lines) if is_here(line.address)]
    if not own:
        there = ", ".join(f"{name} {address}" for name, address in addresses().items())
        raise ValueError(f"no line of {path} is this board, which has {there}: write its address there, or give "
                         "NODE_RANK")
    if len(own) > 1:
        raise ValueError(f"the lines of ranks {', '.join(map(str, own))} in {path} are all this machine: say which is "
                         "meant, as NODE_RANK=1")
    return own[0]


def _number(name: str, text: str, end: int) -> int:
    if not text.isdecimal() or int(text) >= end:
        raise ValueError(f"{name}={text} is not possible: give a number from 0 to {end - 1}")
    return int(text)


def addresses() -> dict[str, str]:
    """Every network interface of this machine that has an IPv4 address."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, ADDRESS_OF, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
            except OSError:
                continue  # it has none
    return found


def is_here(address: str) -> bool:
    """Whether a name or address is this machine's: only these can be bound."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return address != "0.0.0.0"


def usable_port(address: str, port: int) -> int:
    """The port itself, or a free one if it is 0."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
            return int(probe.getsockname()[1])
        except OSError as error:
            raise ValueError(f"port {port} of {address} cannot be used ({error.strerror}): choose another master_port, "
                             "or 0 for any free one") from error


def way_to(address: str) -> str:
    """The own address that packets to another one would carry; empty if no way leads there. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, PORT))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def main(argv: Sequence[str]) -> int:
    """Print `RANK [USER@]ADDRESS FOLDER` for each line of a hosts file."""
    try:
        for rank, line in enumerate(read_hosts(os.path.expanduser(argv[0]))):
            print(rank, f"{line.user}@{line.address}" if line.user else line.address, line.folder)
    except ValueError as error:
        print(f"flowspec: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
