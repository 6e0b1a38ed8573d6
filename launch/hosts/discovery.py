"""Boards that find each other over zeroconf (mDNS), and the hosts file that people would have typed.

An announcement proves nothing: the file only names the boards, and the rendezvous judges them. Nothing listens before
`discover=true` asks for it, nor after the file is there.
"""
from __future__ import annotations

import getpass
import os
import re
import socket
import sys
import time
from contextlib import closing, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Mapping, NamedTuple, Sequence

from config.files import ROOM, write
from config.presets import ROOT
from config.run_config import RunConfig
from launch.console import say
from launch.hosts.board import BOARD, FOLDER, PORT, Board, addresses, find_board, listed, read_line
from launch.spec import RankSpec
from model.weights.parts import Part
from pipeline.failure import PeerLost

SERVICE = "_flowspec._tcp.local."
USUAL = "hosts.txt"  # the file, if no other is named
BY_HAND = "or write {} by hand (docs/jetson.md)"
LOOK = 0.2  # seconds between two looks at who is here
SETTLE = 5.0  # seconds after the last rank, for spares, and for the others to hear of this board
MOST = 1 << 10  # announcements that are kept


class Announced(NamedTuple):
    """What a board says of itself: of which split it has folders, its rank, empty for a spare, and its line."""

    split: str
    rank: str
    line: str


def board_of(config: RunConfig, environment: Mapping[str, str]) -> Board | None:
    """As `find_board`; with `discover=true` the hosts file is written before, unless it is there."""
    if config.discover:
        if not (config.hosts or environment.get(BOARD)):
            raise ValueError("discover=true looks for other boards: start bash run_jetson.sh discover=true, or name "
                             f"the file to write, as hosts={USUAL}")
        config = replace(config, hosts=config.hosts or USUAL)
        if not Path(config.hosts).exists():
            _write_hosts(config, environment)
    return find_board(config, environment)


def _write_hosts(config: RunConfig, environment: Mapping[str, str]) -> None:
    """Announce this board until all ranks have announced themselves, and write a line for each."""
    by_hand = BY_HAND.format(config.hosts)
    if find_spec("zeroconf") is None:
        raise ValueError(f"discover=true needs a package: type {sys.executable} -m pip install zeroconf, {by_hand}")
    address, interface = _network(environment.get("GLOO_SOCKET_IFNAME", ""))
    own, world = announcement(config, environment.get("NODE_RANK", ""), address, interface)
    say(f"looking for the boards of {world} ranks from {address}, for {config.wait:g} seconds (wait=)")
    with closing(Neighbours(own, address)) as neighbours:
        end, complete = time.monotonic() + config.wait, 0.0
        while not complete or time.monotonic() < complete + SETTLE:
            time.sleep(LOOK)
            ranks = {each.rank for each in neighbours.alike()}
            missing = [str(rank) for rank in range(world) if str(rank) not in ranks]
            complete = 0.0 if missing else complete or time.monotonic()
            if missing and time.monotonic() > end:
                raise PeerLost(f"rank {' and rank '.join(missing)} did not announce itself within {config.wait:g} "
                               f"seconds: start run_jetson.sh discover=true there, {by_hand}")
        text = hosts_text(neighbours.alike())
    write(config.hosts, text, ROOM)
    say(f"{config.hosts} was written, and counts from now on; edit it, or delete it to look again:\n{text.rstrip()}")


def _network(interface: str) -> tuple[str, str]:
    """The address at which other boards find this one, and the interface, if it was named."""
    here = addresses()
    outside = [address for address in here.values() if not address.startswith("127.")]
    if interface:
        outside = [address for name, address in here.items() if name == interface]
    if len(outside) != 1:
        raise ValueError(f"over which network do the other boards come? This board has {listed(here)}: name the "
                         "interface of the cable, as GLOO_SOCKET_IFNAME=eth0")
    return outside[0], interface


def announcement(config: RunConfig, given: str, address: str, interface: str) -> tuple[Announced, int]:
    """What this board announces, by the folders that it holds or the rank that it was `given`; and how many ranks
    there are. Raises ValueError if that leaves open what it is."""
    names = [path.name for path in Path(config.model_dir or os.devnull).glob("stage_*")]
    held = sorted(int(name[6:]) for name in names if re.fullmatch(r"stage_\d{1,4}", name))
    if not held:
        raise ValueError("a board announces the folders that it holds: give model_dir=FOLDER, with stage_RANK in it")
    part = Part(Path(config.model_dir) / f"stage_{held[0]}")
    world = RankSpec(config, part).placement.world
    if not given and len(held) > 1 and held[0] == 0:
        raise ValueError(f"{config.model_dir} has the folders of ranks {', '.join(map(str, held))}: say which of them "
                         "this board is, as NODE_RANK=0")
    own = given or (str(held[0]) if len(held) == 1 else "")
    if own not in ("", *map(str, range(world))):
        raise ValueError(f"NODE_RANK={own} is not possible: give a number from 0 to {world - 1}")
    folder = str(ROOT)
    with suppress(ValueError, RuntimeError):
        folder = ROOT.relative_to(Path.home()).as_posix()
    words = {"user": getpass.getuser(), "folder": "" if folder == FOLDER else folder, "interface": interface,
             "spare": "" if own else ",".join(map(str, held))}
    typed = [f"{key}={value}" for key, value in words.items() if value]
    line = " ".join([address, *typed])
    if read_line(line.split()) is None:
        raise ValueError(f"{line!a} would be no line of a hosts file: {BY_HAND.format(USUAL)[3:]}")
    return Announced(part.split_id, own, line), world


def hosts_text(found: Sequence[Announced]) -> str:
    """The hosts file of these boards; raises ValueError if two of them are one rank."""
    ranks = [each for each in found if each.rank]
    ranks.sort(key=lambda each: int(each.rank))
    for one, other in zip(ranks, ranks[1:]):
        if one.rank == other.rank:
            raise ValueError(f"two boards say that they are rank {one.rank}: {one.line} and {other.line}; give one of "
                             "them another NODE_RANK, or end it")
    spares = sorted(each.line for each in found if not each.rank)
    return "".join(f"{line}\n" for line in [*(each.line for each in ranks), *spares])


class Neighbours:
    """This board's announcement, and those that it hears, until it is closed."""

    def __init__(self, own: Announced, address: str) -> None:
        import zeroconf

        self._own, self._heard = own, {"": own}
        self._zeroconf: Any = zeroconf.Zeroconf(interfaces=[address])
        name = f"{socket.gethostname()[:40]}-{os.getpid()}.{SERVICE}"
        self._name = name
        said = {"split": own.split, "rank": own.rank, "line": own.line}
        self._zeroconf.register_service(zeroconf.ServiceInfo(
            SERVICE, name, PORT, addresses=[socket.inet_aton(address)], properties=said))
        zeroconf.ServiceBrowser(self._zeroconf, SERVICE, listener=self)

    def alike(self) -> list[Announced]:
        """The boards of the same split."""
        heard = list(self._heard.values())
        return [each for each in heard if each.split == self._own.split]

    def add_service(self, found: Any, kind: str, name: str) -> None:
        """Called by zeroconf, on a thread of its own, for each announcement."""
        info = found.get_service_info(kind, name) if name != self._name else None
        heard = read_announcement(info.parsed_addresses(), info.properties) if info else None
        if heard and len(self._heard) < MOST:
            self._heard[name] = heard

    update_service = add_service

    def remove_service(self, found: Any, kind: str, name: str) -> None:
        """A board that has its file leaves, and stays in those of the others."""

    def close(self) -> None:
        self._zeroconf.close()


def read_announcement(places: Sequence[str], said: Mapping[bytes, bytes | None]) -> Announced | None:
    """What a board has announced from its address; None for what anybody else made up."""
    found = [said.get(key) or b"" for key in (b"split", b"rank", b"line")]
    announced = Announced(*(raw.decode(errors="replace") for raw in found))
    words = announced.line.split()
    line = read_line(words) if words and announced.line.isprintable() else None
    if line is None or line.address not in places or not re.fullmatch(r"\d{0,4}", announced.rank):
        return None
    return announced if bool(announced.rank) == (line.spare is None) else None
