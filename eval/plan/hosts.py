"""The boards of a hosts file: measure them, and write a file of the chosen ones.

A board to measure needs the program (`bash scripts/push.sh code=true`), but no part of the model: it times layers with
random weights, over ssh. Options of ssh go into $SSH, as for scripts/push.sh.
"""
from __future__ import annotations

import json
import os
import select
import shlex
import subprocess
import tempfile
from contextlib import closing, suppress
from dataclasses import replace
from typing import IO, Any, Iterable, NamedTuple, Sequence

from cluster.board import Line, read_hosts
from config.files import SPACE_REMEDY, fits, write
from config.profiles import Profile
from config.schema.untrusted import one_line, parse_json
from eval.bench import cost
from eval.plan.candidates import Candidate, typed
from launch.progress import ProgressBar
from launch.timing import Passed

START = "FLOWSPEC_MODULE=launch.timing bash run_jetson.sh"
LONG = 1 << 20  # bytes of the line that measures the rate
TRIES = 5  # tries of each message; the shortest time counts
SILENCE = 60.0  # seconds without a line after which a board counts as lost; its program sends one every second
LEAVE = 5.0  # seconds for a board's program to end by itself
ANSWER = {"passes": [(int, int, float)]}


def boards_of(path: str) -> list[Line]:
    """Return the boards of the ranks after rank 0."""
    return [line for line in read_hosts(path)[1:] if line.spare is None]


# --- measurement ------------------------------------------------------------------------------------------------------

class BoardTimes(NamedTuple):
    """The measurement of a board, and of the wire from here to it."""

    passes: list[Passed]
    latency: float  # ms
    mbps: float


def measured_boards(path: str, asked: dict[str, Any]) -> list[BoardTimes]:
    """Measure the boards after rank 0's one by one; each times the layers that `asked` describes.

    Raises ValueError for a board that sends no times, with its last message.
    """
    boards = ProgressBar(boards_of(path), desc="boards", leave=False)
    return [_measured(line, path, asked) for line in boards]


def _measured(line: Line, path: str, asked: dict[str, Any]) -> BoardTimes:
    """Measure one board, over one ssh connection."""
    name = f"{line.user}@{line.address}" if line.user else line.address
    ssh = shlex.split(os.environ.get("SSH", "ssh"))
    command = f"cd {shlex.quote(line.folder)} && {START}"
    with tempfile.TemporaryFile("w+") as errors:
        try:
            with closing(_Board([*ssh, "--", name, command], errors)) as board:
                return _times(board, asked)
        except TimeoutError:
            reason = f"it sent nothing for {SILENCE:g} s"
        except (OSError, ValueError):
            errors.seek(0)
            *_, last = "it printed nothing", *errors.read().strip().splitlines()
            reason = one_line(last).replace("flowspec: ", "")
    raise ValueError(f"{name} of {path} was not measured ({reason}): try {' '.join(ssh)} {name}, and copy the program "
                     "there with bash scripts/push.sh code=true")


class _Board:
    """The program of a board, which answers each line with a line. Raises TimeoutError if none comes in time."""

    def __init__(self, command: Sequence[str], errors: IO[str]) -> None:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, bufsize=0)
        assert process.stdin is not None and process.stdout is not None
        self._process, self._into, self._out = process, process.stdin, process.stdout
        os.set_blocking(self._into.fileno(), False)
        self._received = b""

    def close(self) -> None:
        """Close the program's input, so that it ends by itself, and kill it if it does not."""
        with self._process as process:
            self._into.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(LEAVE)
            process.kill()

    def ask(self, text: str) -> bytes:
        """Send a line and return the answer's line."""
        left = f"{text}\n".encode()
        while left:
            _ready(select.select([], [self._into], [], SILENCE))
            left = left[os.write(self._into.fileno(), left):]
        return self.line()

    def line(self) -> bytes:
        """Return the next line. Raise ValueError at the end of the output."""
        while b"\n" not in self._received:
            _ready(select.select([self._out], [], [], SILENCE))
            chunk = os.read(self._out.fileno(), LONG)
            if not chunk:
                raise ValueError("the board's program has ended")
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        return line


def _ready(found: Iterable[Any]) -> None:
    """Raise TimeoutError if `select` has found nothing."""
    if not any(found):
        raise TimeoutError


def _times(board: _Board, asked: dict[str, Any]) -> BoardTimes:
    """Return the times of a board. Raise ValueError or OSError if it sends none."""
    line = board.ask(json.dumps(asked))
    while not line:  # an empty line: still at work
        line = board.line()
    found = parse_json(line.decode(), "the answer", "")
    if not fits(found, ANSWER) or not found["passes"]:
        raise ValueError("the answer has no times")
    short, long = (_round_trip(board, text) for text in ("", "x" * LONG))
    rate = 8e-6 * LONG / max(long - short, 1e-9)
    passes = [Passed(*one) for one in found["passes"]]
    return BoardTimes(passes, 1e3 * short / 2, rate)


def _round_trip(board: _Board, text: str) -> float:
    """Return the seconds until a line is answered, the least of some tries."""
    return min(cost(board.ask, text).wall for _ in range(TRIES))


# --- only the chosen boards -------------------------------------------------------------------------------------------

def only_chosen(site: Profile, one: Candidate) -> Profile:
    """Return the cluster of rank 0's board and the chosen boards, which become its ranks from 1 on."""
    def of_these(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(values[rank - 1] for rank in one.others if values)

    ranks = {old: new for new, old in enumerate((0, *one.others))}
    links = tuple((ranks[a], ranks[b], latency, mbps) for a, b, latency, mbps in site.links
                  if a in ranks and b in ranks)
    return replace(site, factors=of_these(site.factors), memory=of_these(site.memory), links=links)


def write_hosts(path: str, source: str, one: Candidate) -> None:
    """Write a hosts file with the lines of rank 0 and of the chosen boards, from the file of all boards."""
    lines, text = read_hosts(source), ""
    for rank in (0, *one.others):
        keys = {key: value for key, value in lines[rank]._asdict().items() if value}
        text += f"{keys.pop('address')} {typed(keys)}\n"
    write(path, text, SPACE_REMEDY)
