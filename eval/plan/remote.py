"""The boards of a hosts file measured over ssh: what a stage takes on each, and what the wire to it takes.

A board needs the program (`bash scripts/push.sh code=true`), and no part of the model: it times layers of random
weights. Options of ssh go into $SSH, as for scripts/push.sh.
"""
from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process, SubprocessStreamProtocol
from contextlib import asynccontextmanager, suppress
from typing import IO, Any, AsyncIterator, Awaitable, NamedTuple, Sequence, TypeVar

from tqdm import tqdm

from config.files import fits
from config.schema.untrusted import parse_json, plain
from eval.plan.hosts import boards_of
from launch.hosts.board import Line
from launch.hosts.timing import Passed

START = "FLOWSPEC_MODULE=launch.hosts.timing bash run_jetson.sh"
LONG = 1 << 20  # bytes of a line that times the rate
TRIES = 5  # of each line, of which the shortest counts
SILENCE = 60.0  # seconds after which a board is given up; its program beats every second once it runs
LEAVE = 5.0  # seconds for a board to end by itself
ANSWER = {"passes": [(int, int, float)]}

Result = TypeVar("Result")


class Measured(NamedTuple):
    """A board as it was measured, with the wire from here to it."""

    passes: list[Passed]
    latency: float  # ms
    mbps: float


def measured_boards(path: str, asked: dict[str, Any]) -> list[Measured]:
    """The boards behind rank 0's, each asked to time the layers that `asked` describes, one after the other.

    Raises ValueError for a board that does not answer with times, with what it said.
    """
    with tqdm(boards_of(path), desc="boards", leave=False, file=sys.stderr) as boards:
        return [asyncio.run(_board(line, path, asked)) for line in boards]


async def _board(line: Line, path: str, asked: dict[str, Any]) -> Measured:
    """One board, over one ssh."""
    name = f"{line.user}@{line.address}" if line.user else line.address
    ssh = shlex.split(os.environ.get("SSH", "ssh"))
    command = f"cd {shlex.quote(line.folder)} && {START}"
    with tempfile.TemporaryFile("w+") as said:
        try:
            async with _started([*ssh, "--", name, command], said) as board:
                return await _asked(board, asked)
        except asyncio.TimeoutError:
            reason = f"it said nothing for {SILENCE:g} s"
        except (OSError, ValueError):
            reason = _last_line(said)
        raise ValueError(f"{name} of {path} was not measured ({reason}): try {' '.join(ssh)} {name}, and copy the "
                         "program there with bash scripts/push.sh code=true")


def _last_line(said: IO[str]) -> str:
    """What a board said last."""
    said.seek(0)
    last = (said.read().strip().splitlines() or ["it said nothing"])[-1]
    return plain(last).replace("flowspec: ", "")


@asynccontextmanager
async def _started(command: Sequence[str], said: IO[str]) -> AsyncIterator[Process]:
    """A process that has nothing more to read at the end, and so ends by itself; one that stays is ended.

    Its pipes are closed, too, which a program that it has started may hold.
    """
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.subprocess_exec(
        lambda: SubprocessStreamProtocol(limit=LONG, loop=loop), *command, stdin=PIPE, stdout=PIPE, stderr=said)
    process = Process(transport, protocol, loop)
    assert process.stdin is not None
    try:
        yield process
    finally:
        process.stdin.close()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(process.wait(), LEAVE)
        transport.close()
        await process.wait()


async def _asked(board: Process, asked: dict[str, Any]) -> Measured:
    """What a board answers. Raises ValueError or OSError if it does not, TimeoutError if it is silent."""
    line = await _answered(board, json.dumps(asked))
    while line == b"\n":  # it lives, and is at work
        line = await _heard(board)
    found = parse_json(line.decode(), "the answer", "")
    if not fits(found, ANSWER) or not found["passes"]:
        raise ValueError("the answer has no times")
    short = min([await _there_and_back(board, "") for _ in range(TRIES)])
    long = min([await _there_and_back(board, "x" * LONG) for _ in range(TRIES)])
    rate = 8e-6 * LONG / max(long - short, 1e-9)
    return Measured([Passed(*one) for one in found["passes"]], 1e3 * short / 2, rate)


async def _there_and_back(board: Process, text: str) -> float:
    """Seconds until a line is answered."""
    since = time.perf_counter()
    await _answered(board, text)
    return time.perf_counter() - since


async def _answered(board: Process, text: str) -> bytes:
    """The line with which a board answers one."""
    assert board.stdin is not None
    board.stdin.write(f"{text}\n".encode())
    await _patiently(board.stdin.drain())
    return await _heard(board)


async def _heard(board: Process) -> bytes:
    """The next line of a board. Raises ValueError if there is none."""
    assert board.stdout is not None
    line = await _patiently(board.stdout.readline())
    if not line:
        raise ValueError("the board has left")
    return line


async def _patiently(coming: Awaitable[Result]) -> Result:
    return await asyncio.wait_for(coming, SILENCE)
