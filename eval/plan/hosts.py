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

START_COMMAND = "FLOWSPEC_MODULE=launch.timing bash run_jetson.sh"
LONG_LINE_BYTES = 1 << 20  # of the line that measures the rate
NUM_TRIES = 5  # of each message; the shortest time counts
MAX_SILENCE = 60.0  # seconds without a line after which a board counts as lost; its program sends one every second
EXIT_SECONDS = 5.0  # seconds for a board's program to end by itself
ANSWER_FORMAT = {"passes": [(int, int, float)]}


def boards_of(path: str) -> list[Line]:
    """Return the boards of the ranks after rank 0."""
    return [line for line in read_hosts(path)[1:] if line.spare is None]


# --- measurement ------------------------------------------------------------------------------------------------------

class BoardTimes(NamedTuple):
    """The measurement of a board, and of the wire from here to it."""

    passes: list[Passed]
    latency: float  # ms
    mbps: float


def measured_boards(path: str, timing_request: dict[str, Any]) -> list[BoardTimes]:
    """Measure the boards after rank 0's one by one; each times the layers that `timing_request` describes.

    Raises ValueError for a board that sends no times, with its last message.
    """
    boards = ProgressBar(boards_of(path), desc="boards", leave=False)
    return [_measured(line, path, timing_request) for line in boards]


def _measured(line: Line, path: str, timing_request: dict[str, Any]) -> BoardTimes:
    """Measure one board, over one ssh connection."""
    login = f"{line.user}@{line.address}" if line.user else line.address
    ssh = shlex.split(os.environ.get("SSH", "ssh"))
    command = f"cd {shlex.quote(line.folder)} && {START_COMMAND}"

    with tempfile.TemporaryFile("w+") as errors:
        try:
            with closing(_Board([*ssh, "--", login, command], errors)) as board:
                return _times(board, timing_request)
        except TimeoutError:
            reason = f"it sent nothing for {MAX_SILENCE:g} s"
        except (OSError, ValueError):
            errors.seek(0)
            *_, last_line = "it printed nothing", *errors.read().strip().splitlines()
            reason = one_line(last_line).replace("flowspec: ", "")

    raise ValueError(f"{login} of {path} was not measured ({reason}): try {' '.join(ssh)} {login}, and copy the "
                     "program there with bash scripts/push.sh code=true")


class _Board:
    """The program of a board, which answers each line with a line. Raises TimeoutError if none comes in time."""

    def __init__(self, command: Sequence[str], errors: IO[str]) -> None:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, bufsize=0)
        assert process.stdin is not None and process.stdout is not None
        self._process, self._input, self._output = process, process.stdin, process.stdout
        os.set_blocking(self._input.fileno(), False)
        self._received_bytes = b""

    def close(self) -> None:
        """Close the program's input, so that it ends by itself, and kill it if it does not."""
        with self._process as process:
            self._input.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(EXIT_SECONDS)
            process.kill()

    def ask(self, text: str) -> bytes:
        """Send a line and return the answer's line."""
        unsent_bytes = f"{text}\n".encode()
        while unsent_bytes:
            _raise_if_silent(select.select([], [self._input], [], MAX_SILENCE))
            num_written = os.write(self._input.fileno(), unsent_bytes)
            unsent_bytes = unsent_bytes[num_written:]
        return self.line()

    def line(self) -> bytes:
        """Return the next line. Raise ValueError at the end of the output."""
        while b"\n" not in self._received_bytes:
            _raise_if_silent(select.select([self._output], [], [], MAX_SILENCE))
            chunk = os.read(self._output.fileno(), LONG_LINE_BYTES)
            if not chunk:
                raise ValueError("the board's program has ended")
            self._received_bytes += chunk

        line, _, self._received_bytes = self._received_bytes.partition(b"\n")
        return line


def _raise_if_silent(ready_files: Iterable[Any]) -> None:
    """Raise TimeoutError if `select` has returned no files that are ready."""
    if not any(ready_files):
        raise TimeoutError


def _times(board: _Board, timing_request: dict[str, Any]) -> BoardTimes:
    """Return the times of a board. Raise ValueError or OSError if it sends none."""
    line = board.ask(json.dumps(timing_request))
    while not line:  # an empty line: still at work
        line = board.line()

    answer = parse_json(line.decode(), "the answer", "")
    if not fits(answer, ANSWER_FORMAT) or not answer["passes"]:
        raise ValueError("the answer has no times")
    passes = [Passed(*figures) for figures in answer["passes"]]

    short_seconds = _round_trip(board, "")
    long_seconds = _round_trip(board, "x" * LONG_LINE_BYTES)
    rate = 8e-6 * LONG_LINE_BYTES / max(long_seconds - short_seconds, 1e-9)
    return BoardTimes(passes, 1e3 * short_seconds / 2, rate)


def _round_trip(board: _Board, text: str) -> float:
    """Return the seconds until a line is answered, the least of some tries."""
    return min(cost(board.ask, text).wall for _ in range(NUM_TRIES))


# --- only the chosen boards -------------------------------------------------------------------------------------------

def only_chosen(site: Profile, candidate: Candidate) -> Profile:
    """Return the cluster of rank 0's board and the chosen boards, which become its ranks from 1 on."""
    def of_chosen(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(values[rank - 1] for rank in candidate.others if values)

    new_ranks = {old_rank: new_rank for new_rank, old_rank in enumerate((0, *candidate.others))}
    links = tuple((new_ranks[a], new_ranks[b], latency, mbps) for a, b, latency, mbps in site.links
                  if a in new_ranks and b in new_ranks)
    return replace(site, factors=of_chosen(site.factors), memory=of_chosen(site.memory), links=links)


def write_hosts(path: str, source_path: str, candidate: Candidate) -> None:
    """Write a hosts file with the lines of rank 0 and of the chosen boards, from the file of all boards."""
    all_lines, text = read_hosts(source_path), ""
    for rank in (0, *candidate.others):
        keys = {key: value for key, value in all_lines[rank]._asdict().items() if value}
        text += f"{keys.pop('address')} {typed(keys)}\n"
    write(path, text, SPACE_REMEDY)
