"""The boards of a hosts file: whether they answer, what they take, and a file of the chosen ones alone.

A board that is to be measured needs the program (`bash scripts/push.sh code=true`), and no part of the model: it times
layers of random weights, over ssh. Options of ssh go into $SSH, as for scripts/push.sh.
"""
from __future__ import annotations

import json
import os
import select
import shlex
import socket
import subprocess
import tempfile
import time
from contextlib import closing, suppress
from dataclasses import replace
from typing import IO, Any, Iterable, NamedTuple, Sequence

from tqdm import tqdm

from config.files import ROOM, fits, write
from config.profiles import Profile
from config.schema.untrusted import parse_json, plain
from eval.bench import cost
from eval.plan.candidates import Candidate, typed
from launch.hosts.board import Line, is_here, read_hosts
from launch.hosts.timing import Passed

PORT = 22  # ssh
PATIENCE = 3.0  # seconds for a handshake
START = "FLOWSPEC_MODULE=launch.hosts.timing bash run_jetson.sh"
LONG = 1 << 20  # bytes of a line that times the rate
TRIES = 5  # of each message, of which the shortest counts
SILENCE = 60.0  # seconds after which a board is given up; its program beats every second once it runs
LEAVE = 5.0  # seconds for a board to end by itself
ANSWER = {"passes": [(int, int, float)]}


def boards_of(path: str) -> list[Line]:
    """The boards of the ranks behind rank 0."""
    return [line for line in read_hosts(path)[1:] if line.spare is None]


# --- whether they answer ----------------------------------------------------------------------------------------------

def answered(site: Profile, path: str, port: int = PORT) -> Profile:
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
    """Milliseconds of a message to a board's ssh and of one back."""
    since = time.perf_counter()
    try:
        socket.create_connection((address, port), PATIENCE).close()
    except OSError as error:
        raise ValueError(f"{address} of {path} does not answer at port {port} ({error}): switch it on, mend its line, "
                         "or leave it out") from None
    return 1e3 * (time.perf_counter() - since)


# --- what they take ---------------------------------------------------------------------------------------------------

class BoardTimes(NamedTuple):
    """A board as it was measured, with the wire from here to it."""

    passes: list[Passed]
    latency: float  # ms
    mbps: float


def measured_boards(path: str, asked: dict[str, Any]) -> list[BoardTimes]:
    """The boards behind rank 0's, each asked to time the layers that `asked` describes, one after the other.

    Raises ValueError for a board that does not answer with times, with what it said.
    """
    boards = tqdm(boards_of(path), desc="boards", leave=False)
    return [_measured(line, path, asked) for line in boards]


def _measured(line: Line, path: str, asked: dict[str, Any]) -> BoardTimes:
    """One board, over one ssh."""
    name = f"{line.user}@{line.address}" if line.user else line.address
    ssh = shlex.split(os.environ.get("SSH", "ssh"))
    command = f"cd {shlex.quote(line.folder)} && {START}"
    with tempfile.TemporaryFile("w+") as said:
        try:
            with closing(_Board([*ssh, "--", name, command], said)) as board:
                return _times(board, asked)
        except TimeoutError:
            reason = f"it said nothing for {SILENCE:g} s"
        except (OSError, ValueError):
            said.seek(0)
            *_, last = "it said nothing", *said.read().strip().splitlines()
            reason = plain(last).replace("flowspec: ", "")
    raise ValueError(f"{name} of {path} was not measured ({reason}): try {' '.join(ssh)} {name}, and copy the program "
                     "there with bash scripts/push.sh code=true")


class _Board:
    """The program of a board, which answers each line by one; raises TimeoutError if it is silent for too long."""

    def __init__(self, command: Sequence[str], said: IO[str]) -> None:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, bufsize=0)
        assert process.stdin is not None and process.stdout is not None
        self._process, self._into, self._out = process, process.stdin, process.stdout
        os.set_blocking(self._into.fileno(), False)
        self._heard = b""

    def close(self) -> None:
        """It has nothing more to read, and so ends by itself; one that stays is ended."""
        with self._process as process:
            self._into.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(LEAVE)
            process.kill()

    def ask(self, text: str) -> bytes:
        """The line with which it answers one."""
        left = f"{text}\n".encode()
        while left:
            _ready(select.select([], [self._into], [], SILENCE))
            left = left[os.write(self._into.fileno(), left):]
        return self.line()

    def line(self) -> bytes:
        """The next line. Raises ValueError if there is none."""
        while b"\n" not in self._heard:
            _ready(select.select([self._out], [], [], SILENCE))
            chunk = os.read(self._out.fileno(), LONG)
            if not chunk:
                raise ValueError("the board has left")
            self._heard += chunk
        line, _, self._heard = self._heard.partition(b"\n")
        return line


def _ready(found: Iterable[Any]) -> None:
    """Raise TimeoutError if `select` has found nothing."""
    if not any(found):
        raise TimeoutError


def _times(board: _Board, asked: dict[str, Any]) -> BoardTimes:
    """What a board answers. Raises ValueError or OSError if that is nothing."""
    line = board.ask(json.dumps(asked))
    while not line:  # it lives, and is at work
        line = board.line()
    found = parse_json(line.decode(), "the answer", "")
    if not fits(found, ANSWER) or not found["passes"]:
        raise ValueError("the answer has no times")
    short, long = (_there_and_back(board, text) for text in ("", "x" * LONG))
    rate = 8e-6 * LONG / max(long - short, 1e-9)
    passes = [Passed(*one) for one in found["passes"]]
    return BoardTimes(passes, 1e3 * short / 2, rate)


def _there_and_back(board: _Board, text: str) -> float:
    """Seconds until a line is answered, the least of some tries."""
    return min(cost(board.ask, text).wall for _ in range(TRIES))


# --- the chosen ones alone --------------------------------------------------------------------------------------------

def alone(site: Profile, one: Candidate) -> Profile:
    """The cluster of rank 0's board and those of a choice, which are the ranks from 1 on in it."""
    def of_these(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(values[rank - 1] for rank in one.others if values)

    ranks = {old: new for new, old in enumerate((0, *one.others))}
    links = tuple((ranks[a], ranks[b], latency, mbps) for a, b, latency, mbps in site.links
                  if a in ranks and b in ranks)
    throttles = tuple((ranks[rank], since, slower) for rank, since, slower in site.throttles if rank in ranks)
    return replace(site, factors=of_these(site.factors), memory=of_these(site.memory),
                   links=links, throttles=throttles)


def write_hosts(path: str, source: str, one: Candidate) -> None:
    """Write a hosts file with the lines of rank 0 and of the boards of a choice, out of that of all boards."""
    lines, text = read_hosts(source), ""
    for rank in (0, *one.others):
        keys = {key: value for key, value in lines[rank]._asdict().items() if value}
        text += f"{keys.pop('address')} {typed(keys)}\n"
    write(path, text, ROOM)
