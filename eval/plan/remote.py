"""The boards of a hosts file measured over ssh: what a stage takes on each, and what the wire to it takes.

A board needs the program (`bash scripts/push.sh code=true`), and no part of the model: it times layers of random
weights. Options of ssh go into $SSH, as for scripts/push.sh.
"""
from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from typing import IO, Any, NamedTuple

from tqdm import tqdm

from config.files import fits
from config.foreign import parse_json, plain
from eval.plan.hosts import boards_of
from launch.hosts.board import Line
from launch.hosts.timing import Passed

START = "FLOWSPEC_MODULE=launch.hosts.timing bash run_jetson.sh"
LONG = 1 << 20  # bytes of a line that times the rate
TRIES = 5  # of each line, of which the shortest counts
ANSWER = {"passes": [(int, int, float)]}


class Measured(NamedTuple):
    """A board as it was measured, with the wire from here to it."""

    passes: list[Passed]
    latency: float  # ms
    mbps: float


def measured_boards(path: str, asked: dict[str, Any]) -> list[Measured]:
    """The boards behind rank 0's, each asked to time the layers that `asked` describes.

    Raises ValueError for a board that does not answer with times, with what it said.
    """
    return [_board(line, path, asked) for line in tqdm(boards_of(path), desc="boards", leave=False, file=sys.stderr)]


def _board(line: Line, path: str, asked: dict[str, Any]) -> Measured:
    """One board, over one ssh."""
    name = f"{line.user}@{line.address}" if line.user else line.address
    ssh = shlex.split(os.environ.get("SSH", "ssh"))
    with tempfile.TemporaryFile("w+") as said:
        try:
            with subprocess.Popen([*ssh, "--", name, f"cd {shlex.quote(line.folder)} && {START}"], text=True,
                                  stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said) as process:
                assert process.stdin is not None and process.stdout is not None
                return _asked(process.stdin, process.stdout, asked)
        except (OSError, ValueError):
            said.seek(0)
            reason = (said.read().strip().splitlines() or ["it said nothing"])[-1]
            told = plain(reason).replace("flowspec: ", "")
            raise ValueError(f"{name} of {path} was not measured ({told}): try {' '.join(ssh)} {name}, and copy the "
                             "program there with bash scripts/push.sh code=true") from None


def _asked(to_board: IO[str], from_board: IO[str], asked: dict[str, Any]) -> Measured:
    """What a board answers. Raises ValueError or OSError if it does not."""
    to_board.write(f"{json.dumps(asked)}\n")
    to_board.flush()
    found = parse_json(from_board.readline(), "the answer", "")
    if not fits(found, ANSWER) or not found["passes"]:
        raise ValueError("the answer has no times")
    short = min(_answered(to_board, from_board, "") for _ in range(TRIES))
    long = min(_answered(to_board, from_board, "x" * LONG) for _ in range(TRIES))
    rate = 8e-6 * LONG / max(long - short, 1e-9)
    return Measured([Passed(*one) for one in found["passes"]], 1e3 * short / 2, rate)


def _answered(to_board: IO[str], from_board: IO[str], text: str) -> float:
    """Seconds until a line is answered. Raises ValueError if it is not."""
    since = time.perf_counter()
    to_board.write(f"{text}\n")
    to_board.flush()
    if not from_board.readline():
        raise ValueError("the board has left")
    return time.perf_counter() - since
