"""The rank of this board and the address of the rendezvous, from keys, the environment or a hosts file.

It knows nothing about models, and connects to nothing: `rendezvous.py` does. As a program it prints the boards of a
hosts file, for scripts/push.sh.
"""
from __future__ import annotations

import fcntl
import os
import re
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import Mapping, NamedTuple, Sequence

from cluster.keys import Keys, read_keys
from config.console import run
from config.forms import GIGABYTES
from config.presets import HOME, ROOT
from config.run_config import RunConfig
from config.schema.untrusted import decoded, read_bytes

BOARD_VARIABLE = "FLOWSPEC_BOARD"  # in the environment: this process is the one rank of its board
WORKER_VARIABLE = "FLOWSPEC_WORKER"  # in the environment: this board takes the keys of a run from rank 0
COMMAND_VARIABLE = "FLOWSPEC_COMMAND"  # in the environment: the command that a user typed, for the help
DEFAULT_PORT = 29500  # the default port of the rendezvous, the same on all boards
DEFAULT_FOLDER = "flowspec"  # the default folder of the repository on a board, relative to its user's home
ADDRESS = re.compile(r"[^\W_](?:[\w.-]*[^\W_])?")
LINE_WORDS = {  # may follow the address; a value that begins with - would be an option of ssh or rsync
    "user": re.compile(r"[\w.][\w.+$-]*"),
    "folder": re.compile(r"[^-].*"),
    "interface": re.compile(r"[^-].*"),
    "memory": re.compile(GIGABYTES),
    "spare": re.compile(r"([1-9]\d{0,3}(,[1-9]\d{0,3})*)?"),
    "name": re.compile(r"[A-Za-z0-9-]+"),
    "layers": re.compile(r"[1-9]\d{0,3}"),
    "wire": re.compile(r"\d{1,9},\d{1,9}(\.\d{1,3})?"),
}
GET_ADDRESS_REQUEST = 0x8915  # SIOCGIFADDR: the IPv4 address of an interface
MAX_HOSTS_BYTES = 1 << 20  # of a hosts file
EXAMPLE_LINE = "192.168.1.11 user=nvidia folder=flowspec interface=eth0"


class Line(NamedTuple):
    """A board as a line of the hosts file names it."""

    address: str
    user: str = ""
    folder: str = DEFAULT_FOLDER
    interface: str = ""
    memory: str = ""  # GB for its part of a model
    spare: str | None = None  # of a spare, the ranks for which it may stand in, with commas; empty: all but rank 0
    name: str = ""  # in its certificate; a worker with it needs no hosts file
    layers: str = ""  # of a model, that it holds
    wire: str = ""  # from rank 0, as measured: Mbit/s, ms of a message

    def stands_in(self, world: int) -> Sequence[int]:
        """Return the ranks, of `world`, for which this spare may stand in; none for a board that is no spare."""
        if self.spare is None:
            return ()
        typed_ranks = [int(rank) for rank in self.spare.split(",") if rank]
        return typed_ranks or range(1, world)

    def __str__(self) -> str:
        """Return the line as a hosts file has it."""
        words = [f"{word}={value}" if value else word for word, value in self._asdict().items()
                 if word != "address" and value != self._field_defaults[word]]
        return " ".join([self.address, *words])


class Board(NamedTuple):
    """One rank and its rendezvous; empty fields were not given."""

    rank: int
    master: str  # name or address of rank 0's board
    port: int
    interface: str
    wait: float  # seconds for the others to come
    lines: Sequence[Line]  # of all ranks, and then of spares, if there is a hosts file
    keys: Keys | None = None

    @property
    def world(self) -> int:
        """The number of ranks in the hosts file."""
        return sum(line.spare is None for line in self.lines)

    @property
    def is_spare(self) -> bool:
        """Whether this board waits until it may stand in for another one."""
        return bool(self.lines) and self.lines[self.rank].spare is not None

    def listed_addresses(self) -> set[str]:
        """Return the IPv4 addresses of the hosts file, without names that cannot be resolved."""
        ip_addresses = set()
        for line in self.lines:
            with suppress(OSError):
                ip_addresses.add(socket.gethostbyname(line.address))
        return ip_addresses

    def named(self, rank: int, host: str = "", address: str = "") -> str:
        """Return a rank as messages name it: with its host and address, if they are known."""
        line = self.lines[rank] if self.lines else Line("")
        host_words = dict.fromkeys(word for word in (line.name or host, address or line.address) if word)
        role = f"rank {rank}" if line.spare is None else "spare"
        return f"{role} ({', '.join(host_words)})" if host_words else role

    def meeting_point(self, name_of_root: str) -> str:
        """Return where rank 0 listens, without its address if the name before it in a sentence has it."""
        has_address = self.master in name_of_root
        return f"port {self.port}" if has_address else f"{self.master}:{self.port}"

    def listen_address(self) -> str:
        """Return the only address at which the store listens on rank 0's board.

        Raises ValueError if the address that all boards were given is not here, or does not lead other boards here.
        """
        local_addresses = listed(addresses())
        if not is_here(self.master):
            raise ValueError(f"rank 0 runs here, but {self.master} is no address of this board, which has "
                             f"{local_addresses}: give one of them as MASTER_ADDR or in the hosts file, the same on "
                             "all boards")

        master_ip = socket.gethostbyname(self.master)
        if self.master in (master_ip, "localhost") or not master_ip.startswith("127."):
            return master_ip

        # A system may resolve its own name to an address that no other machine can reach.
        if not self.interface:
            raise ValueError(f"{self.master} is {master_ip} on this board, which no other board can reach: give one "
                             f"of {local_addresses} as MASTER_ADDR or in the hosts file, or name the interface to the "
                             "others (GLOO_SOCKET_IFNAME, interface=)")
        _, interface_ip = self.network()
        return master_ip if interface_ip.startswith("127.") else interface_ip

    def network(self) -> tuple[str, str]:
        """Return the network interface of this rank and its address; raises ValueError if there is none."""
        local_addresses, source_ip = addresses(), way_to(self.master)
        for name, address in local_addresses.items():
            leads_to_master = address == source_ip or (name == "lo" and source_ip.startswith("127."))
            if name == self.interface or (leads_to_master and not self.interface):
                return name, address

        board = f"this board, which has {listed(local_addresses)}"
        problem = f"the interface {self.interface} has no IPv4 address on {board}"
        if not self.interface:
            problem = f"no interface of {board}, leads to {self.master}"
        raise ValueError(f"{problem}: name one in GLOO_SOCKET_IFNAME, or with interface= in the hosts file")


def read_hosts(path: str) -> list[Line]:
    """Read a line for each rank, rank 0 first, and then one for each spare; # begins a comment.

    Each is `[USER@]ADDRESS [user=..] [folder=..] [interface=..] [memory=GB] [spare[=RANK,RANK]] [name=..] [layers=..]
    [wire=MBPS,MS]`.
    """
    file_bytes = read_bytes(path, f"write one line for each rank in a hosts file, as {EXAMPLE_LINE}", MAX_HOSTS_BYTES)
    file_text = decoded(file_bytes, path, "save it again as plain text in UTF-8")

    lines = []
    for line_number, text in enumerate(re.split(r"\r\n|\r|\n", file_text), 1):
        words = text.partition("#")[0].split()
        if not words:
            continue
        line = read_line(words) if text.replace("\t", " ").isprintable() else None
        if line is None:
            raise ValueError(f"line {line_number} of {path} is no board: write [USER@]ADDRESS, then what is needed of "
                             f"user=, folder=, interface=, memory= (GB) and spare, as {EXAMPLE_LINE}; none of them "
                             "begins with -")
        lines.append(line)

    lines.sort(key=lambda line: line.spare is not None)
    world = sum(line.spare is None for line in lines)
    if world < 2:
        raise ValueError(f"{path} names {world} boards: write one line for each rank, rank 0 first")
    unknown_ranks = [rank for line in lines for rank in line.stands_in(world) if rank >= world]
    if unknown_ranks:
        raise ValueError(f"{path} has a spare for rank {unknown_ranks[0]}, but lines for ranks 0 to {world - 1} only")
    return lines


def stages_for(lines: Sequence[Line], path: str) -> str:
    """Return the split for the boards of a hosts file, by layers or memory if the lines specify it; rank 0 holds none.

    Raises ValueError if only some of them specify it.
    """
    boards = [line for line in lines[1:] if line.spare is None]
    for word in ("layers", "memory"):
        num_specified = sum(bool(getattr(line, word)) for line in boards)
        if 0 < num_specified < len(boards):
            without_word = next(line for line in boards if not getattr(line, word))
            raise ValueError(f"{path} gives {word}= for {num_specified} of {len(boards)} boards after rank 0's, but "
                             f"not for {without_word.address}: give it for all of them, or for none")

    layer_counts = [line.layers for line in boards if line.layers]
    if layer_counts:
        return "+".join(["0", *layer_counts])
    memory_sizes = [line.memory for line in boards if line.memory]
    return f"auto:{','.join(memory_sizes)}" if len(memory_sizes) > 1 else f"auto:{len(boards)}"


def read_line(words: Sequence[str]) -> Line | None:
    """Parse a board from the words of a line; None if they are invalid."""
    user, at, address = words[0].rpartition("@")
    pairs = [word.partition("=")[::2] for word in words[1:]]
    if at:
        pairs.append(("user", user))

    value_by_word = dict(pairs)
    has_repeated_word = len(value_by_word) < len(pairs)
    if has_repeated_word or not is_address(address):
        return None
    if not all(word in LINE_WORDS and LINE_WORDS[word].fullmatch(value) for word, value in pairs):
        return None

    folder = value_by_word.get("folder", "")
    if folder.startswith("~/"):
        value_by_word["folder"] = folder[2:].lstrip("/") or "."  # it is relative to the home anyway
    return Line(address, **value_by_word)


def is_address(text: str) -> bool:
    """Whether a text has the form of a machine's name or address."""
    try:
        return bool(ADDRESS.fullmatch(text) and text.encode("idna"))
    except UnicodeError:
        return False


def is_one_rank(hosts: str) -> bool:
    """Whether this process is one rank of several: RANK is set, or it is a board of a run over several hosts."""
    return "RANK" in os.environ or bool(hosts or os.environ.get(BOARD_VARIABLE))


def find_board(config: RunConfig, environment: Mapping[str, str]) -> Board | None:
    """Return this board; None if all ranks are on this machine, or a launcher has set RANK.

    Keys take precedence over the environment, and the environment over the hosts file.
    """
    if "RANK" in environment:
        return None
    if not (config.hosts or environment.get(BOARD_VARIABLE)):
        for key in ("keys", "master"):
            if value := getattr(config, key):
                raise ValueError(f"{key}={value} is for several hosts, and all ranks are here: add hosts=FILE, or "
                                 "leave it out")
        return None

    # rank
    lines = read_hosts(config.hosts) if config.hosts else []
    rank = _rank(environment.get("NODE_RANK", ""), lines, config.hosts)

    # rank 0's address
    master, port = config.master_address
    master = master or environment.get("MASTER_ADDR", "") or (lines[0].address if lines else "")
    if not master:
        raise ValueError("where is rank 0? Give the address of its board in MASTER_ADDR, on all boards, or hosts=FILE")
    if not is_address(master):
        raise ValueError(f"{master!a} is no name or address of a board: give that of rank 0's in MASTER_ADDR, as "
                         "192.168.1.11")
    typed_port = environment.get("MASTER_PORT") or str(DEFAULT_PORT)
    port = port or _number("MASTER_PORT", typed_port, 1 << 16)

    # this board's interface and keys
    interface = typed_interface(environment)
    if lines and not interface:
        interface = lines[rank].interface
    key_folder = key_folder_of(config)
    keys = read_keys(key_folder) if config.keys or key_folder.exists() else None
    if keys is not None and config.link == "torch":
        raise ValueError(f"link=torch cannot encrypt, and {key_folder} has keys: leave link out, or move that folder "
                         "away")

    return Board(rank, master, port or DEFAULT_PORT, interface, config.wait, lines, keys)


def typed_interface(environment: Mapping[str, str]) -> str:
    """Return the interface to the other boards that the environment names; empty if it names none."""
    return environment.get("GLOO_SOCKET_IFNAME", "").split(",")[0]


def key_folder_of(config: RunConfig) -> Path:
    """Return the folder of this board's keys: the one given, or where make_keys.sh puts them."""
    return Path(config.keys) if config.keys else HOME / "keys"


def _rank(node_rank: str, lines: Sequence[Line], path: str) -> int:
    """Return this board's rank: `node_rank`, or that of the line in the hosts file with an address of this machine."""
    if node_rank:
        return _number("NODE_RANK", node_rank, len(lines) or 1 << 16)
    if not lines:
        raise ValueError("which rank is this board? Give NODE_RANK, as in NODE_RANK=3 MASTER_ADDR=192.168.1.11 bash "
                         "run_jetson.sh, or hosts=FILE with one line for each rank")

    ranks_here = [rank for rank, line in enumerate(lines) if is_here(line.address)]
    if not ranks_here:
        raise ValueError(f"no line of {path} is this board, which has {listed(addresses())}: write its address there, "
                         "or give NODE_RANK")
    if len(ranks_here) > 1:
        ranks = ", ".join(map(str, ranks_here))
        raise ValueError(f"the lines of ranks {ranks} in {path} are all this machine: choose one, as "
                         "in NODE_RANK=1 bash run_jetson.sh")
    return ranks_here[0]


def _number(variable: str, text: str, end: int) -> int:
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) >= end:
        raise ValueError(f"{variable}={text} is not possible: give a number from 0 to {end - 1}")
    return int(text)


def addresses() -> dict[str, str]:
    """Return the IPv4 address of every network interface of this machine that has one."""
    ip_by_interface = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                reply = fcntl.ioctl(probe, GET_ADDRESS_REQUEST, request)
                ip_by_interface[name] = socket.inet_ntoa(reply[20:24])
            except OSError:
                continue  # it has none
    return ip_by_interface


def listed(ip_by_interface: Mapping[str, str]) -> str:
    """Return interfaces and their addresses as messages name them."""
    return ", ".join(f"{name} {address}" for name, address in ip_by_interface.items())


def is_here(address: str) -> bool:
    """Whether a name or address is this machine's own: only own ones can be bound."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return address != "0.0.0.0"


def way_to(address: str) -> str:
    """Return the source address of packets to an address; empty if it cannot be reached. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, DEFAULT_PORT))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def main(argv: Sequence[str]) -> int:
    """Print `NUMBER RANKS [USER@]ADDRESS FOLDER` for each line of a hosts file: a spare has the folders of RANKS.

    For this machine the address is a dot, and the folder absolute: this repository, unless the line names another.
    """
    lines = read_hosts(os.path.expanduser(argv[0]))
    world = sum(line.spare is None for line in lines)
    for number, line in enumerate(lines):
        board, folder = f"{line.user}@{line.address}" if line.user else line.address, line.folder
        if line.user in ("", os.environ.get("USER")) and is_here(line.address):
            board, folder = ".", str(ROOT if folder == DEFAULT_FOLDER else Path.home() / folder)
        ranks = line.stands_in(world) or [number]
        print(number, ",".join(map(str, ranks)), board, folder)
    return 0


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
