"""Links between two boards, by turns: gloo's, our sockets, and these with keys; on loopback, and over a wire.

Messages have the sizes of a 7B model's segments. A short one comes back, with which its time ends.
"""
from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, Dict, Iterator, List, NamedTuple, Sequence, Tuple

import torch
import torch.distributed as dist
from tqdm import tqdm

from config.profiles import PROFILES
from eval.bench.places import enter, make_keys, network
from eval.bench.stage import number
from eval.tables import NOT_MEASURED, in_columns
from launch.ranks import environment_kept, leave_groups
from pipeline.keys import read_keys
from pipeline.sockets import DATA, BoardDoor, Connections
from pipeline.transport import Peers, Wire

LINKS = GLOO, SOCKETS, TLS = "gloo", "sockets", "sockets, TLS"
ROWS = (16, 64)
WIDTH = 4096  # of a 7B model
HEADER = 48  # bytes
MESSAGES = 32  # of a turn
RATE = 1000  # Mbit/s of the wire
PROFILE, STAGES = "jetson-7b", 4  # the step of which a message is a part
HEADING = ("way", "link", "rows", "ms: least", "median", "processor, ms: least", "median", "of a step")


class Took(NamedTuple):
    """Milliseconds of a message and its short answer: by the clock, and of both processors together."""

    wall: float
    processor: float


Words = Sequence[str]
Times = Dict[Tuple[str, str, int], List[Took]]  # by way, link and rows


def links(argv: list[str]) -> int:
    """The command `python -m scripts.bench links`."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench links", description=__doc__)
    parser.add_argument("--repeats", type=number, default=12, metavar="N", help="turns of all links (12)")
    args = parser.parse_args(argv)
    times: Times = defaultdict(list)
    measured("loopback", args.repeats, times)
    if not measured(f"{RATE / 1000:g} Gbit/s", args.repeats, times):
        print("no network namespaces here, which need root and iproute2: loopback alone was measured", file=sys.stderr)
    print(in_columns(HEADING, rows_of(times), 2))
    return 0


def rows_of(times: Times) -> Iterator[list[str]]:
    """The lines of the table; the last cell says by how much a step with this link is longer than with gloo."""
    for (way, link, rows), took in times.items():
        least = [min(each) for each in zip(*took)]
        middle = [median(each) for each in zip(*took)]
        gloo = times.get((way, GLOO, rows), [])
        share = NOT_MEASURED
        if gloo:
            usual = median(each.wall for each in gloo)
            share = f"{100 * (middle[0] - usual) / (step(rows) + usual):+.1f} %"
        figures = [f"{value:.2f}" for pair in zip(least, middle) for value in pair]
        yield [way, link, str(rows), *figures, share]


def step(rows: int) -> float:
    """Milliseconds that a stage of a 7B model computes for so many rows, by its profile."""
    profile = PROFILES[PROFILE]
    return (profile.model + profile.row * max(0, rows - profile.free)) / STAGES


# --- two processes ----------------------------------------------------------------------------------------------------

def measured(way: str, repeats: int, times: Times) -> bool:
    """Measure all links on one way, by turns; False if it cannot be had."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ends:
        place = Path(folder)
        spaces = ends.enter_context(network(2, place, None if way == "loopback" else RATE))
        if not spaces and way != "loopback":
            return False
        names = [GLOO, SOCKETS, *([TLS] if make_keys(place) else [])]
        here, there = context.Pipe()
        own = there, place, spaces, names, repeats
        other = context.Process(target=answer, args=own, daemon=True)
        other.start()
        ends.callback(other.join)
        wires = ends.enter_context(connected(0, here, place, spaces, names))
        for _ in tqdm(range(repeats), desc=way):
            for name, wire in wires.items():
                for rows in ROWS:
                    since, worked = time.perf_counter(), time.process_time()
                    exchange(wire, 1, rows, asks=True)
                    took = time.perf_counter() - since, time.process_time() - worked + here.recv()
                    scaled = [1e3 * each / MESSAGES for each in took]
                    times[way, name, rows].append(Took(*scaled))
    return True


def answer(pipe: Connection, place: Path, spaces: Words, names: Words, repeats: int) -> None:
    """The other end: hear each message, and answer it; after each turn say what that took of the processor."""
    if spaces:
        enter(spaces[1])
    with connected(1, pipe, place, spaces, names) as wires:
        for _ in range(repeats):
            for wire in wires.values():
                for rows in ROWS:
                    worked = time.process_time()
                    exchange(wire, 0, rows, asks=False)
                    pipe.send(time.process_time() - worked)


def exchange(wire: Wire, peer: int, rows: int, asks: bool) -> None:
    """A turn's messages of so many rows in half precision, one after another, and a short one back for each."""
    message = torch.zeros(rows * WIDTH * 2, dtype=torch.uint8)
    short = torch.zeros(HEADER, dtype=torch.uint8)
    for _ in range(MESSAGES):
        if asks:
            wire.send(message, peer)
            wire.recv(short, peer)
        else:
            wire.recv(message, peer)
            wire.send(short, peer)


@contextmanager
def connected(own: int, pipe: Connection, place: Path, spaces: Words, names: Words) -> Iterator[dict[str, Wire]]:
    """The wires of one of the two ends, by the names of their links."""
    address = (place / "hosts").read_text().split()[own]
    with ExitStack() as ends, environment_kept("GLOO_SOCKET_IFNAME"):
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0" if spaces else "lo"
        store = dist.FileStore(str(place / "gloo"), 2)
        dist.init_process_group("gloo", store=store, rank=own, world_size=2)
        ends.callback(leave_groups)
        wires: dict[str, Any] = {GLOO: dist}  # it sends and receives like a wire
        for epoch, name in enumerate(names[1:], 1):
            keys = read_keys(place / "keys" / str(own)) if name == TLS else None
            door = ends.enter_context(BoardDoor(address, keys, epoch))
            made = Connections(own, [Peers(1 - own, [1 - own])])
            ends.callback(made.close)
            pipe.send(door.name)
            made.reach(door, DATA, 1 - own, pipe.recv())
            while made.missing:
                made.let_in(door)
            wires[name] = made.wires[DATA]
        yield wires
