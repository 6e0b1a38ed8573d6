"""Rank 0's side of hosts=auto: find boards, give new ones their keys, measure them, and write a hosts file.

What follows is a run with that file. Boards that have keys come by themselves (`launch/join.py`), to the port at which
the run will have its rendezvous. Nothing that is announced decides more than whom to ask.
"""
from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Sequence

import torch

from cluster.agreement import Junk, code_version
from cluster.board import DEFAULT_PORT, Line, key_folder_of, read_hosts, typed_interface
from cluster.discovery import BOARD, ROOT, Announced, Neighbours, own_address, plain_name
from cluster.keys import KEY_FILES, Keys, name_of, read_keys
from cluster.pairing import MAX_TRIES, give_keys, plate_of, store_keys
from cluster.sockets import BRIEF_TIMEOUT, BoardDoor, shut_down
from cluster.store import GREETING_BYTES, rank_of_greeting
from config import presets
from config.console import say
from config.files import SPACE_REMEDY, write
from config.run_config import RunConfig
from config.values import listed
from launch.measure import MAX_SILENCE, BoardTimes, profile_of, request_for, times_of
from launch.memory import loaded
from launch.prepare import open_part
from launch.spec import device_named, number_type
from launch.splits import Split, best_splits
from model.llama import LlamaConfig
from model.weights.blocks import block_type
from model.weights.parts import check_model, plan_stages, read_sizes
from model.weights.quant import BLOCKS, kind_on
from model.weights.unfold import Unfolded

LOOK_SECONDS = 5.0  # in which boards are looked for
RETURN_SECONDS = 25.0  # more, for boards that took part before, or have just got their keys
TIMING_SECONDS = 3.0  # for the passes of a layer
FREE_SHARE = 0.8  # of a board's free memory, for layers with their keys and values
HOSTS_NAME, CLUSTER_NAME = "boards.txt", "cluster_keys"  # beside the folder of this machine's keys
COLUMNS = "board", "address", "layers", "GB free", "ms a layer", "ms there", "Mbit/s"


class Guest:
    """A board with keys that has come, before a run: it answers lines with lines."""

    def __init__(self, connection: socket.socket) -> None:
        self.address = str(connection.getpeername()[0])
        self._connection, self._lines = connection, connection.makefile("rb")
        self.name = ""

    def greet(self) -> None:
        """Read its greeting; raises Junk for anything else, and OSError without a key of this cluster."""
        self._connection.settimeout(BRIEF_TIMEOUT)
        if rank_of_greeting(self._lines.readline(GREETING_BYTES)):
            raise Junk("it comes too early")
        self.name = name_of(self._connection)
        self._connection.settimeout(MAX_SILENCE)

    def ask(self, text: str) -> bytes:
        """Send a line and return the answer's line."""
        self._connection.sendall(text.encode() + b"\n")
        return self.line()

    def line(self) -> bytes:
        """Return the next line; raises ValueError at the end."""
        line = self._lines.readline()
        if not line:
            raise ValueError("it has gone")
        return line.strip()

    def close(self) -> None:
        """Let it go; it comes again for the run."""
        shut_down(self._connection)


class Lobby(BoardDoor):
    """Where boards with keys of the cluster wait until all have come."""

    def __init__(self, address: str, port: int, keys: Keys) -> None:
        self.guests: Dict[str, Guest] = {}
        super().__init__(address, keys, 0, port)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for guest in self.guests.values():
            guest.close()

    def _read_greeting(self, connection: socket.socket) -> None:
        try:
            guest = Guest(connection)
            guest.greet()
            self._strangers.remove(connection)
            self.guests[guest.name] = guest
        except (OSError, ValueError):  # a stranger
            connection.close()


class Shape(NamedTuple):
    """What sharing out a model needs to know of it."""

    config: Dict[str, object]
    sizes: LlamaConfig
    like: torch.Tensor  # in its number type
    quant: str
    layer_gigabytes: float  # of weights, keys and values


def gathered(config: RunConfig, has_stages: bool) -> str:
    """Return the hosts file of the boards that came, which is written if it does not fit them and the model.

    `has_stages`: the user has given the key `stages`.

    Raises ValueError, with the fix, if there are none, or the model does not fit.
    """
    key_folder = key_folder_of(config)
    hosts_file = key_folder.with_name(HOSTS_NAME)
    address, port = own_address(typed_interface(os.environ)), config.master_address[1] or DEFAULT_PORT
    authority = Authority(key_folder)
    keys = authority.own_keys()
    known_lines = read_hosts(str(hosts_file)) if hosts_file.exists() else []
    known_names = {line.name for line in known_lines[1:]}

    with Neighbours(address) as neighbours, opened_lobby(address, port, keys) as lobby:
        neighbours.announce(plain_name(socket.gethostname()), port, ROOT)
        say(f"looking for boards at {address} for {LOOK_SECONDS:g} seconds: type bash run_worker.sh there")
        time.sleep(LOOK_SECONDS)
        new_names = {authority.pair(board, listed(config.codes)) for board in neighbours.with_role(BOARD)} - {""}
        wait_for(lobby, known_names | new_names)

        guests = sorted(lobby.guests.values(), key=lambda guest: guest.name)
        if not guests:
            raise ValueError("no board has come: type bash run_worker.sh on another machine of this network; one that "
                             "has keys of another cluster, or takes part in a run now, is not found")
        stages = typed_stages(config, has_stages)
        shape = None if stages else shape_of(config)
        if shape and fits_known(known_lines, guests, shape.sizes.layers):
            say(f"{', '.join(sorted(lobby.guests))}: shared out as in {hosts_file}")
            return str(hosts_file)
        lines = proposal(config, shape, guests) if shape else with_layers(guests, stages)

    write(hosts_file, "".join(f"{line}\n" for line in (Line(address, name=authority.own_name), *lines)), SPACE_REMEDY)
    say(f"{hosts_file} has these boards; a change there holds from the next start on, with hosts={hosts_file.name}")
    return str(hosts_file)


def opened_lobby(address: str, port: int, keys: Keys) -> Lobby:
    """Return the open lobby; raises ValueError if its port is taken."""
    try:
        return Lobby(address, port, keys)
    except OSError as error:
        raise ValueError(f"port {port} of {address} cannot be used ({error.strerror}): another run uses it; end it, or "
                         "choose another with master=:PORT") from None


def wait_for(lobby: Lobby, names: set[str]) -> None:
    """Wait until these boards have come, or for a while."""
    deadline = time.monotonic() + RETURN_SECONDS
    missing = names - lobby.guests.keys()
    if missing:
        say(f"waiting for {', '.join(sorted(missing))}, up to {RETURN_SECONDS:g} seconds")
    while names - lobby.guests.keys() and time.monotonic() < deadline:
        time.sleep(0.1)


def fits_known(lines: Sequence[Line], guests: Sequence[Guest], num_layers: int) -> bool:
    """Whether lines, rank 0's first, have all boards that came and no others, and share out this many layers."""
    boards = [line for line in lines[1:] if line.spare is None]
    present = {(guest.name, guest.address) for guest in guests}
    names_here = {(line.name, line.address) for line in lines[1:]}
    return names_here == present and sum(int(line.layers or 0) for line in boards) == num_layers


# --- keys -------------------------------------------------------------------------------------------------------------

class Authority:
    """The authority of the cluster, on rank 0's machine, as scripts/make_keys.sh keeps it."""

    def __init__(self, key_folder: Path) -> None:
        self._key_folder, self._folder = key_folder, key_folder.with_name(CLUSTER_NAME)
        self.own_name = plain_name(socket.gethostname())

    def own_keys(self) -> Keys:
        """Return this machine's keys, which are made if there are none."""
        if not self._key_folder.exists():
            store_keys(self._key_folder, self._made(self.own_name))
        elif not (self._folder / "cluster.key").exists():
            raise ValueError(f"{self._key_folder} has keys of a cluster whose authority, {self._folder}, is not here: "
                             "start hosts=auto on the machine that has it, or move that folder away")
        return read_keys(self._key_folder)

    def pair(self, board: Announced, codes: Sequence[str]) -> str:
        """Give a new board its keys if its code is in `codes` or is typed; return its name, empty without keys."""
        if board.other_code:
            say(f"{board.other_code}; nothing is sent to it")
            return ""

        name = self._free_name(board.name)
        for code in typed_codes(board, codes):
            try:
                give_keys((board.address, board.port), code, self._made(name))
                return name
            except ValueError as problem:
                say(f"{board} got no keys: {problem}")
            except OSError as error:
                say(f"{board} got no keys: {error.strerror or error}")
                break
        return ""

    def _free_name(self, name: str) -> str:
        """Return a name for a new board; one that another board has gets a suffix."""
        names = (f"{name}-{number}" if number > 1 else name for number in range(1, 10_000))
        return next(free for free in names if not (self._folder / free).exists())

    def _made(self, name: str) -> dict[str, str]:
        """Return new keys for a board of this name."""
        script = presets.ROOT / "scripts" / "make_keys.sh"
        made = subprocess.run(["bash", str(script), f"names={name}", f"keys={self._folder}"], stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True)
        if made.returncode:
            raise ValueError(f"no keys can be made: {made.stderr.strip().replace('flowspec: ', '')}")
        return {file_name: (self._folder / name / file_name).read_text() for file_name in KEY_FILES}


def typed_codes(board: Announced, codes: Sequence[str]) -> Iterator[str]:
    """Yield the codes to try: those given for the board's announced digits, or at most three that a person types."""
    plate = board.texts.get("plate", "")
    given_codes = [code for code in codes if plate_of(code) == plate]
    if codes or not sys.stdin.isatty():
        if not given_codes:
            say(f"{board} is left out, since no code for it was given: add codes={plate}-..., as it shows it")
        yield from given_codes[:MAX_TRIES]
        return

    about = ", ".join(filter(None, (board.texts.get("cores"), board.texts.get("memory"))))
    for _ in range(MAX_TRIES):
        print(f"pairing code of {board}, {about} (empty: leave it out): ", end="", file=sys.stderr, flush=True)
        code = sys.stdin.readline().strip()
        if not code:
            return
        if plate_of(code) == plate:
            yield code
        else:
            say(f"the code of {board} begins with {plate}-")


# --- the split --------------------------------------------------------------------------------------------------------

def typed_stages(config: RunConfig, has_stages: bool) -> List[int]:
    """Return the layers of each rank if they are given; empty if the boards decide.

    Raises ValueError for runs that share out something else than layers.
    """
    if config.unpiped or config.replicated or config.tp != "0":
        raise ValueError("hosts=auto shares out layers: leave tp and replicas out, and choose a method with a pipeline, "
                         "or write a hosts file")
    if config.model_dir:
        return list(open_part(Path(config.model_dir), 0).stages)
    if not config.base_dir:
        raise ValueError("there is no model to share out: give model=NAME, or a preset")
    return plan_stages(config.stages, Unfolded(config.base_dir)) if has_stages else []


def with_layers(guests: Sequence[Guest], stages: Sequence[int]) -> List[Line]:
    """Return lines for the first boards, with these layers; raises ValueError if there are too few."""
    layer_counts = stages[1:]
    if len(guests) < len(layer_counts):
        raise ValueError(f"the model is split for {len(layer_counts)} boards, and {len(guests)} came: start more, or "
                         "name the model instead of its split")
    return [Line(guest.address, name=guest.name, layers=str(count)) for guest, count in zip(guests, layer_counts)]


def shape_of(config: RunConfig) -> Shape:
    """Read what a plan needs from the model's folder; raises ValueError for a model that is not supported."""
    source = Unfolded(config.base_dir)
    check_model(source)
    sizes = read_sizes(source).within(config.max_length)
    device = device_named(config.device)
    like = torch.empty(0, dtype=number_type(config.dtype, device))

    forms = {name: source.form(name) for name in source.names() if ".layers." in name}
    has_blocks = any(block_type(form.shape) for form in forms.values())
    cache_bytes = 2 * sizes.kv_heads * sizes.head_dim * like.element_size() * sizes.context * config.max_requests
    layer_gigabytes = (loaded(forms, like) / sizes.layers + cache_bytes) / 1e9
    keeps_blocks = has_blocks and config.kernel != "torch" and config.quant == "auto"
    quant = BLOCKS if keeps_blocks else kind_on(device, "none" if config.quant == "auto" else config.quant)
    return Shape(source.config, sizes, like, quant, layer_gigabytes)


def proposal(config: RunConfig, shape: Shape, guests: Sequence[Guest]) -> List[Line]:
    """Measure boards and return a line for each that shall hold layers; print them. Raises ValueError if none can."""
    boards = measured(config, shape, guests)
    times = list(boards.values())
    sizes, num_layers = shape.sizes, shape.sizes.layers
    profile = profile_of("", sizes, shape.like.element_size(), times)
    max_layers = [min(num_layers, int(FREE_SHARE * board.free_gigabytes / shape.layer_gigabytes)) for board in times]

    splits = best_splits(profile, max_layers, num_layers, 1)
    if not splits:
        rooms = ", ".join(f"{guest.name} {count}" for guest, count in zip(boards, max_layers))
        raise ValueError(f"the model has {num_layers} layers of {shape.layer_gigabytes:.2g} GB, and the boards have room "
                         f"for fewer ({rooms}): add boards, free memory, or give a smaller max_length or quant=int4")
    best = min(splits, key=lambda split: split.round_time + split.slowest_time)
    print("\n".join(table(best, list(boards), times, num_layers)), file=sys.stderr)

    chosen = [list(boards)[number - 1] for number in best.boards]
    return [Line(guest.address, name=guest.name, layers=str(count)) for guest, count in zip(chosen, best.layers)]


def measured(config: RunConfig, shape: Shape, guests: Sequence[Guest]) -> Dict[Guest, BoardTimes]:
    """Return the times of the boards that can be measured and have this code; the others are named and left out."""
    say(f"measuring {', '.join(guest.name for guest in guests)}: a layer, memory and wires")
    request = request_for(config, shape.config, 1, shape.quant, shape.sizes.context, TIMING_SECONDS)
    with ThreadPoolExecutor(len(guests)) as pool:
        pending = {guest: pool.submit(partial(times_of, guest, request)) for guest in guests}

    boards = {}
    for guest, times in pending.items():
        try:
            boards[guest] = times.result()
        except (ValueError, OSError) as error:
            say(f"{guest.name} ({guest.address}) was not measured, and is left out ({error}): see what it says there")
            continue
        if boards[guest].code != code_version():
            say(f"{guest.name} ({guest.address}) has other code than this machine ({boards.pop(guest).code}, not "
                f"{code_version()}), and is left out: bring one version to all boards")
    if not boards:
        raise ValueError("no board is left that can hold layers, for the reasons above")
    return boards


def table(split: Split, guests: Sequence[Guest], times: Sequence[BoardTimes], num_layers: int) -> Iterator[str]:
    """Yield the lines about a split: each board with its layers and measurements, and the expected speed."""
    layers_of = dict(zip(split.boards, split.layers))
    rows = [COLUMNS]
    for number, (guest, board) in enumerate(zip(guests, times), 1):
        layer_ms = board.passes[:2][-1].took / num_layers
        rows.append((guest.name, guest.address, str(layers_of.get(number, "none")), f"{board.free_gigabytes:.1f}",
                     f"{layer_ms:.2f}", f"{board.latency:.1f}", f"{board.mbps:.0f}"))

    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
    plain_speed, best_speed = 1e9 / split.round_time, 2e9 / (split.round_time + split.slowest_time)
    yield (f"expected: {plain_speed:.1f} tokens/s without guesses, {best_speed:.1f} if every second guess is right "
           "(an estimate, without rank 0's own work)")
