"""Rank 0's side of hosts=auto: find boards, give new ones their keys, and write a hosts file for those that came.

What follows is a run with that file. Boards with keys come by themselves (`launch/join.py`), to the port at which the
run will have its rendezvous. What is announced only says where a code may be used.
"""
from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Iterator, Sequence

from cluster.board import DEFAULT_PORT, Line, key_folder_of, read_hosts, typed_interface
from cluster.discovery import BOARD, ROOT, Announced, Neighbours, own_address, plain_name
from cluster.keys import KEY_FILES, Keys, read_keys
from cluster.lobby import Guest, opened_lobby
from cluster.pairing import MAX_TRIES, KeyFiles, give_keys, plate_of, store_keys
from config import presets
from config.console import say
from config.files import SPACE_REMEDY, write
from config.run_config import RunConfig
from config.values import listed
from launch.share import ModelShape, fixed_stages, proposal

LOOK_SECONDS = 5.0  # in which boards are looked for
HOSTS_NAME, CLUSTER_NAME = "boards.txt", "cluster_keys"  # beside the folder of this machine's keys


def gathered(config: RunConfig, has_stages: bool) -> str:
    """Return the path of a hosts file with the boards that came; it is written if that of the last time does not fit.

    `has_stages`: the user has given the key `stages`. Raises ValueError, with the fix, if no board came, or the model
    does not fit into those that did.
    """
    stages = fixed_stages(config, has_stages)
    key_folder = key_folder_of(config)
    hosts_file = key_folder.with_name(HOSTS_NAME)
    authority = Authority(key_folder)
    keys = authority.own_keys()
    address, port = own_address(typed_interface(os.environ)), config.master_address[1] or DEFAULT_PORT
    old_boards = read_hosts(str(hosts_file))[1:] if hosts_file.exists() else []

    # the boards
    with Neighbours(address) as neighbours, opened_lobby(address, port, keys) as lobby:
        neighbours.announce(authority.own_name, port, ROOT)
        say(f"looking for boards at {address} for {LOOK_SECONDS:g} seconds: bash run_worker.sh makes a machine one")
        time.sleep(LOOK_SECONDS)

        new_names = {authority.pair(board, listed(config.codes)) for board in neighbours.with_role(BOARD)}
        guests = lobby.wait_for({line.name for line in old_boards} | new_names - {""})
        say(f"here are {', '.join(f'{guest.name} ({guest.address})' for guest in guests)}")

        if stages:
            boards = with_layers(guests, stages)
        else:
            shape = ModelShape.of(config)
            if fits(old_boards, guests, shape.sizes.layers):
                return str(hosts_file)
            boards = proposal(config, shape, guests)

    # their hosts file
    lines = Line(address, name=authority.own_name), *boards
    write(hosts_file, "".join(f"{line}\n" for line in lines), SPACE_REMEDY)
    say(f"{hosts_file} has this split: after a change there, give hosts={hosts_file}")
    return str(hosts_file)


def fits(boards: Sequence[Line], guests: Sequence[Guest], num_layers: int) -> bool:
    """Whether lines of a hosts file share out this many layers among the boards that came, and no others."""
    written_boards = {(line.name, line.address) for line in boards}
    present_boards = {(guest.name, guest.address) for guest in guests}
    return written_boards == present_boards and sum(int(line.layers or 0) for line in boards) == num_layers


def with_layers(guests: Sequence[Guest], stages: Sequence[int]) -> list[Line]:
    """Return the first boards with the layers of a given split; raises ValueError if there are too few."""
    _, *layer_counts = stages
    if len(guests) < len(layer_counts):
        raise ValueError(f"the split is for {len(layer_counts)} boards, and {len(guests)} came: start more of them, or "
                         "leave stages and model_dir out, so that those are used")
    return [guest.with_layers(num_layers) for guest, num_layers in zip(guests, layer_counts)]


# --- boards that have none --------------------------------------------------------------------------------------------

class Authority:
    """The authority of the cluster, as scripts/make_keys.sh keeps it on rank 0's machine."""

    def __init__(self, key_folder: Path) -> None:
        self._key_folder, self._folder = key_folder, key_folder.with_name(CLUSTER_NAME)
        self.own_name = plain_name(socket.gethostname())

    def own_keys(self) -> Keys:
        """Return this machine's keys, which are made if there are none."""
        if not self._key_folder.exists():
            store_keys(self._key_folder, self._made(self.own_name))
        elif not (self._folder / "cluster.key").exists():
            raise ValueError(f"{self._key_folder} has keys of a cluster whose authority is not in {self._folder}: "
                             "start hosts=auto on the machine that has it, or move the first folder away")
        return read_keys(self._key_folder)

    def pair(self, board: Announced, codes: Sequence[str]) -> str:
        """Give a new board its keys if its code is among `codes`, or is typed; return its name, empty without keys."""
        if board.other_code:
            say(f"{board.other_code}; nothing is sent to it")
            return ""

        name = self._free_name(board.name)
        for code in codes_for(board, codes):
            try:
                give_keys((board.address, board.port), code, partial(self._made, name))
                return name
            except (ValueError, OSError) as problem:
                say(f"{board} got no keys: {problem}")
        return ""

    def _free_name(self, name: str) -> str:
        """Return this name for a new board, with a suffix if another one has it."""
        names = [name, *(f"{name}-{number}" for number in range(2, 1000))]
        return next(free_name for free_name in names if not (self._folder / free_name).exists())

    def _made(self, name: str) -> KeyFiles:
        """Make keys for a board of this name; raises ValueError if that is not possible."""
        script = str(presets.ROOT / "scripts" / "make_keys.sh")
        words = ["bash", script, f"names={name}", f"keys={self._folder}"]
        ended_script = subprocess.run(words, capture_output=True, text=True)
        if ended_script.returncode:
            raise ValueError(f"no keys can be made: {ended_script.stderr.strip().replace('flowspec: ', '')}")
        return {file_name: (self._folder / name / file_name).read_text() for file_name in KEY_FILES}


def codes_for(board: Announced, codes: Sequence[str]) -> Iterator[str]:
    """Yield the codes to try: those given that begin as the board announces; without any, at most three typed ones."""
    plate = board.texts.get("plate", "")
    if codes or not sys.stdin.isatty():
        fitting_codes = [code for code in codes if plate_of(code) == plate]
        if not fitting_codes:
            say(f"{board} is left out: its code was not given, as codes={plate}-...")
        yield from fitting_codes[:MAX_TRIES]
        return

    # those that a person types
    about = ", ".join(board.texts.get(name, "") for name in ("cores", "memory"))
    for _ in range(MAX_TRIES):
        print(f"pairing code of {board}, {about} (empty: leave it out): ", end="", file=sys.stderr, flush=True)
        code = sys.stdin.readline().strip()

        if not code:
            return
        if plate_of(code) == plate:
            yield code
        else:
            say(f"the code of {board.name} begins with {plate}-")
