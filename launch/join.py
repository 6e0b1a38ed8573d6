"""A worker's side of hosts=auto: it gets its keys by a code, once, and then comes to every run of its rank 0.

It listens only while it has no keys, at a port that it announces. With keys it knocks at the addresses that rank 0
announces, and at the last one; without keys of its cluster nobody is answered there.
"""
from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Iterator, Tuple

from cluster.agreement import parse
from cluster.board import key_folder_of, typed_interface
from cluster.discovery import BOARD, ROOT, Neighbours, own_address, plain_name
from cluster.keys import Keys, encrypted, read_keys
from cluster.pairing import CodeDoor, new_code, plate_of, store_keys
from cluster.store import GREETING
from config.console import say
from config.files import fits
from config.run_config import RunConfig
from config.schema.untrusted import one_line
from launch import timing
from launch.available import available
from model.native.compiler import levels

KNOCK_SECONDS = 1.0  # between two rounds, and for a machine to answer
LOBBY_SECONDS = 120.0  # in which rank 0 has found all boards and measured this one
ROOT_FILE = "root"  # in the folder of keys: the address of the last rank 0
RANK_FORM = (lambda word: word == "rank"), int
Address = Tuple[str, int]


def joined(config: RunConfig) -> None:
    """Wait until rank 0 of this board's cluster has a run with this board; then the environment names both.

    Raises ValueError if the network is unknown.
    """
    address, key_folder = own_address(typed_interface(os.environ)), key_folder_of(config)
    name = plain_name(socket.gethostname())

    cores, memory = f"{os.cpu_count()} cores, {levels()[0].name}", f"{available() / 1e9:.1f} GB free"
    say(f"this board is {name} ({address}): {cores}, {memory}")

    # keys and a run
    with Neighbours(address) as neighbours:
        if not key_folder.exists():
            wait_for_keys(neighbours, address, key_folder, name=name, cores=cores, memory=memory)
        say(f"waiting for a run of the cluster whose keys are in {key_folder}; without them it could join another one")
        master, rank = next(calls(neighbours, read_keys(key_folder), key_folder / ROOT_FILE))

    say(f"rank 0 is at {master[0]}, and this board is rank {rank}")
    os.environ.update(NODE_RANK=str(rank), MASTER_ADDR=master[0], MASTER_PORT=str(master[1]))


def wait_for_keys(neighbours: Neighbours, address: str, key_folder: Path, name: str, **texts: str) -> None:
    """Announce this board and show its code, until rank 0 has sent its keys; then nothing listens any more."""
    code = new_code()
    reported: set[str] = set()
    with CodeDoor(address, code) as door:
        neighbours.announce(name, door.port, BOARD, plate=plate_of(code), **texts)
        say("type bash run_pipe.sh hosts=auto on the machine where you ask, and there this code:")
        print(f"pairing code: {code}", flush=True)

        while door.received.empty():
            report_versions(neighbours, reported)
            time.sleep(KNOCK_SECONDS / 10)
        store_keys(key_folder, door.received.get())
    neighbours.withdraw()


def calls(neighbours: Neighbours, keys: Keys, root_file: Path) -> Iterator[tuple[Address, int]]:
    """Yield the address of rank 0, and the rank of this board in its run."""
    reported: set[str] = set()
    while True:
        report_versions(neighbours, reported)

        masters = [(root.address, root.port) for root in neighbours.with_role(ROOT)]
        for master in dict.fromkeys([*last_master(root_file), *masters]):
            try:
                rank = knock(master, keys)
            except (OSError, ValueError) as error:
                if master in masters and master[0] not in reported:
                    reported.add(master[0])
                    say(f"rank 0 at {master[0]} did not take this board ({one_line(str(error))})")
                continue

            root_file.write_text(f"{master[0]}:{master[1]}")  # it has keys of this cluster
            if rank:
                yield master, rank
        time.sleep(KNOCK_SECONDS)


def report_versions(neighbours: Neighbours, reported: set[str]) -> None:
    """Print which rank 0 has other code than this board, once for each."""
    for root in neighbours.with_role(ROOT):
        if root.other_code and root.address not in reported:
            reported.add(root.address)
            say(f"rank 0 at {root.other_code}")


def last_master(root_file: Path) -> Iterator[Address]:
    """Yield the address of the last rank 0, if there was one."""
    with suppress(OSError, ValueError):
        host, _, port = root_file.read_text().partition(":")
        yield host, int(port)


def knock(master: Address, keys: Keys) -> int:
    """Ask rank 0 for the rank of this board; 0 if it has none so far. Before, rank 0 may measure the board."""
    with socket.create_connection(master, KNOCK_SECONDS) as plain_socket:
        with encrypted(plain_socket, keys.client, server=False) as connection:
            connection.sendall(json.dumps([GREETING, 0]).encode() + b"\n")
            connection.settimeout(LOBBY_SECONDS)

            lines = connection.makefile("r", encoding="ascii", newline="\n")
            first_line = next(lines, "")
            if not first_line:
                return 0

            reply = parse(first_line.encode())
            if fits(reply, RANK_FORM):
                return int(reply[1])
            timing.answer(chain([first_line], lines), lambda line: connection.sendall(line.encode() + b"\n"))
            return 0
