"""Measure the boards of a hosts file: the seconds of a model's layers, the round trip and the rate of the wire.

A board needs the program (`bash scripts/push.sh code=true`), but no model: over ssh it times layers with random weights
(`launch/timing.py`). Options of ssh go into $SSH, as for scripts/push.sh.
"""
from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import tempfile
import time
from contextlib import closing, suppress
from itertools import combinations
from operator import itemgetter
from statistics import median
from typing import IO, Any, NamedTuple, Sequence, Tuple

import numpy as np

from cluster.board import Line, read_hosts
from cluster.lobby import LinePeer
from cluster.sockets import shut_down
from config.files import fits
from config.profiles import Profile, touched
from config.schema.untrusted import one_line, parse_json
from launch.prepare import Prepared
from launch.progress import ProgressBar
from launch.timing import Passed

START_COMMAND = "FLOWSPEC_MODULE=launch.timing bash run_jetson.sh"
LONG_LINE_BYTES = 1 << 20  # of the line that measures the rate
NUM_TRIES = 5  # of each message; the shortest time counts
ENOUGH_SECONDS = 1.0  # of tries, after which there is no further one
MAX_SILENCE = 60.0  # seconds without a line after which a board counts as lost; its program sends one every second
EXIT_SECONDS = 5.0  # seconds for a board's program to end by itself
ANSWER_FORMAT = {"passes": [(int, int, float)], "free": float, "code": str}
MIN_RATE, MAX_RATE = 10.0, 100_000.0  # Mbit/s, of a plausible rate
EQUAL_WITHIN = 0.1  # relative difference below which times count as equal
STEP_EXTRA = 1.4  # ms of a step of a collective in addition to a message
FREE_ROWS = (0, 16, 32, 64)  # numbers of rows without a cost of their own, to try
COLUMN_SETS = [[0, *others] for count in range(4)
               for others in combinations((1, 2, 3), count)]  # sets of columns of `fit` that may take time
MAX_SECONDS = 1e6  # for all passes
FittedTimes = Tuple[float, float, int, float, float]  # as `fit` returns them


class LayerTimes(NamedTuple):
    """What a board says of its layers and itself."""

    passes: Sequence[Passed]
    free_gigabytes: float  # of its memory
    code: str  # its version


class BoardTimes(NamedTuple):
    """The measurement of a board, and of the wire from here to it."""

    passes: Sequence[Passed]
    latency: float  # ms of a message
    mbps: float


def boards_of(path: str) -> list[Line]:
    """Return the boards of the ranks after rank 0, without spares."""
    return [line for line in read_hosts(path)[1:] if line.spare is None]


def measured_profile(path: str, prepared: Prepared, level: float, verdict: float) -> Profile:
    """Measure the boards of a hosts file for a prepared model; return their profile.

    `level` and `verdict` are the milliseconds of rank 0, which drafts. Raises ValueError for a board that sends no
    times, with its last message.
    """
    lines = boards_of(path)
    specs = [prepared.spec(rank) for rank in range(1, prepared.placement.world)]
    spec, sizes, config = specs[0], specs[0].sizes, specs[0].config
    num_layers = max(1, sizes.layers // len(lines))
    request = {"config": spec.part.config, "layers": num_layers, "dtype": config.dtype,
               "device": config.device, "quant": spec.quant, "threads": config.threads_per_rank,
               "context": spec.context, "kernel": config.kernel, "seconds": MAX_SECONDS}

    boards = [measured_board(line, path, request) for line in ProgressBar(lines, desc="boards", leave=False)]

    # the fastest board, and the others in relation to it
    fastest = min((board.passes for board in boards), key=lambda passes: sum(passed.took for passed in passes))
    pass_ms, row_ms, free_rows, token_ms, expert_ms = fit(fastest, sizes.experts, sizes.chosen)

    # its wires, and the bytes of the model
    latency = median(board.latency for board in boards)
    links = tuple((0, rank, board.latency, board.mbps) for rank, board in enumerate(boards, 1))
    all_weights = [each.part.weights for each in specs]
    stored_bytes = [weights.form(name).bytes for weights in all_weights for name in weights.names()]

    return Profile(
        f"boards of {path}, measured over ssh", sizes.layers, sizes.hidden * spec.like.element_size(),
        model=pass_ms, row=row_ms, free=free_rows, token=token_ms, level=level, verdict=verdict,
        latency=latency, mbps=median(board.mbps for board in boards), step=latency + STEP_EXTRA,
        expert=expert_ms, experts=sizes.experts, chosen=sizes.chosen, weights=sum(stored_bytes) / 1e9,
        factors=tuple(times_as_long(board.passes, fastest) for board in boards), links=links)


# --- the times of layers ----------------------------------------------------------------------------------------------

def fit(passes: Sequence[Passed], num_experts: int = 0, num_chosen: int = 0) -> FittedTimes:
    """Return the milliseconds of a pass, those per row beyond the free ones, the number of free rows, and the
    milliseconds per token of context and per further expert.

    These figures of a profile have the least squared relative error over all passes, and none is negative.
    """
    num_rows, context, took = np.array(passes).T
    ones = np.ones_like(took)
    further_experts = np.zeros_like(took)
    if num_experts:
        further_experts = np.array([touched(num_experts, num_chosen, rows) for rows in num_rows]) - num_chosen

    fits = []
    for free_rows in FREE_ROWS:
        paid_rows = np.maximum(0, num_rows - free_rows)
        columns = np.stack([ones, paid_rows, context, further_experts], -1)
        columns /= took[:, None]  # so that errors are relative

        for column_set in COLUMN_SETS:
            times = np.zeros(4)
            times[column_set], *_ = np.linalg.lstsq(columns[:, column_set], ones, rcond=None)

            squared_error = float(np.square(columns @ times - 1).sum())
            if times.min() >= 0:
                pass_ms, row_ms, token_ms, expert_ms = times.tolist()
                fits.append((squared_error, (max(pass_ms, 1e-3), row_ms, free_rows, token_ms, expert_ms)))

    assert fits, "no pass was measured"
    _, best_figures = min(fits, key=itemgetter(0))
    return best_figures


def times_as_long(passes: Sequence[Passed], other_passes: Sequence[Passed]) -> float:
    """Return the ratio of a board's time per layer to that of another one, the median over the same passes.

    It is 1 if the difference is within that of two measurements of one board.
    """
    ratio = median(timed.took / other.took for timed, other in zip(passes, other_passes))
    return 1.0 if abs(ratio - 1) <= EQUAL_WITHIN else round(ratio, 3)


# --- a board over ssh -------------------------------------------------------------------------------------------------

def measured_board(line: Line, path: str, timing_request: dict[str, Any]) -> BoardTimes:
    """Measure a board of a hosts file over one ssh connection; it times the layers that `timing_request` describes.

    Raises ValueError if it sends no times, with its last message.
    """
    login = f"{line.user}@{line.address}" if line.user else line.address
    ssh = shlex.split(os.environ.get("SSH", "ssh"))
    command = f"cd {shlex.quote(line.folder)} && {START_COMMAND}"

    with tempfile.TemporaryFile("w+") as errors:
        try:
            with closing(_Board([*ssh, "--", login, command], errors)) as board:
                return BoardTimes(layer_times(board, timing_request).passes, *wire_times(board))
        except socket.timeout:
            reason = f"it sent nothing for {MAX_SILENCE:g} s"
        except (OSError, ValueError):
            errors.seek(0)
            *_, last_line = "it printed nothing", *errors.read().strip().splitlines()
            reason = one_line(last_line).replace("flowspec: ", "")

    raise ValueError(f"{login} of {path} was not measured ({reason}): try {' '.join(ssh)} {login}, and copy the "
                     "program there with bash scripts/push.sh code=true")


class _Board(LinePeer):
    """The program of a board, over ssh. Raises socket.timeout if it does not answer in time."""

    def __init__(self, command: Sequence[str], errors: IO[str]) -> None:
        own_end, program_end = socket.socketpair()
        super().__init__(own_end)
        own_end.settimeout(MAX_SILENCE)
        with program_end:
            program_file = program_end.fileno()
            self._process = subprocess.Popen(command, stdin=program_file, stdout=program_file, stderr=errors)

    def close(self) -> None:
        """Close the program's input, so that it ends by itself, and kill it if it does not."""
        with self._connection, self._process as process:
            shut_down(self._connection)
            with suppress(subprocess.TimeoutExpired):
                process.wait(EXIT_SECONDS)
            process.kill()


def layer_times(board: LinePeer, timing_request: dict[str, Any]) -> LayerTimes:
    """Return the times of layers on a board. Raise ValueError or OSError if it sends none."""
    line = board.ask(json.dumps(timing_request))
    while not line:  # an empty line: still at work
        line = board.line()

    answer = parse_json(line.decode(), "the answer", "")
    if not fits(answer, ANSWER_FORMAT) or not answer["passes"]:
        raise ValueError("the answer has no times")
    passes = [Passed(*figures) for figures in answer["passes"]]
    return LayerTimes(passes, answer["free"], one_line(answer["code"]))


def wire_times(board: LinePeer) -> tuple[float, float]:
    """Return the milliseconds of a message to a board, and the Mbit/s of the wire."""
    short_seconds = _round_trip(board, "")
    long_seconds = _round_trip(board, "x" * LONG_LINE_BYTES)
    rate = 8e-6 * LONG_LINE_BYTES / max(long_seconds - short_seconds, 1e-9)
    return 1e3 * short_seconds / 2, min(max(rate, MIN_RATE), MAX_RATE)


def _round_trip(board: LinePeer, text: str) -> float:
    """Return the seconds until a line is answered, the least of some tries."""
    seconds_of_tries = []
    for _ in range(NUM_TRIES):
        begun_at = time.perf_counter()
        board.ask(text)
        seconds_of_tries.append(time.perf_counter() - begun_at)
        if sum(seconds_of_tries) > ENOUGH_SECONDS:
            break

    return min(seconds_of_tries)
