"""The composition root: from the words of a command line to the exit code of the command.

This module finds out which rank the process is; what it builds receives values. A command calls `run` with the
work of rank 0. Started by hand, `run` checks the input and starts one process for each rank (or, with link=threads,
one thread). If a launcher has set RANK in the environment, the process is that rank. As a program, this module is one
of the other ranks of a pipeline that a user's program has opened: `python3 -m launch.run [PRESET] [key=value ...]`.
"""
from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from functools import partial
from typing import Callable, NoReturn, Sequence

from cluster.board import COMMAND_VARIABLE, WORKER_VARIABLE, Board, find_board
from cluster.processes import launched, note, spawn
from cluster.rendezvous import Coordinator, Participant, Rendezvous, Spare, WorkerBoard
from config.cli import CommandKeys
from config.console import EXIT_STOPPED, die, ended_by, interrupt, say
from config.failure import PeerLost, is_expected
from launch.pipeline import Pipeline
from launch.prepare import Prepared, prepare
from launch.ranks import Member, alone, connect, leave_groups
from launch.receive import received_part
from launch.trace import join_traces
from launch.wiring import Rank
from launch.words import resolve
from pipeline.trace import NoTrace

Main = Callable[[Pipeline], None]
# Read by transformers: a rank needs only its tokenizers, and its models would import torch's compiler, for seconds.
TOKENIZERS_ONLY = {"USE_TORCH": "0", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}


@dataclass(frozen=True)
class Command:
    """A command that uses a live pipeline.

    Each rank runs `module`, with its first words; rank 0 calls `main`. A command with keys of its own gives their class
    as `kind`; `main` then receives them after the pipeline. `trace` receives the keys of any command. `fill`
    adds defaults of its own to the typed words.
    """

    module: str
    main: Callable[..., None]
    kind: type[CommandKeys] | None = None
    trace: Callable[..., NoTrace] | None = None  # creates a rank's trace from keys, number and clock; None: by trace=
    fill: Callable[[Sequence[str]], Sequence[str]] | None = None


def run(command: Command, argv: Sequence[str]) -> int:
    """Run a command from start to end and return its exit code; errors are printed on stderr."""
    try:
        exit_code = _run(command, argv)
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        if not is_expected(error):
            raise
        exit_code = ended_by(error, "debug=true" in argv, note if launched() else say)

    if exit_code >= EXIT_STOPPED:
        say("stopped", "\n")
    return exit_code


def _run(command: Command, argv: Sequence[str]) -> int:
    for name in ("RANK", "WORLD_SIZE"):
        if name in os.environ and not launched():
            raise ValueError(f"{name}={os.environ[name]} in the environment was not set by FlowSpec: unset it, or "
                             "start this without torchrun, since it starts its ranks itself")
    # keys
    typed_words = command.fill(argv) if command.fill else argv
    resolved = resolve(typed_words, command.kind, os.environ.get(COMMAND_VARIABLE, "bash run_pipe.sh"))
    keys, config = resolved.keys, resolved.keys.run
    main = (lambda pipeline: command.main(pipeline, keys)) if command.kind else command.main

    # the split, and on several hosts all other boards
    board = find_board(config, os.environ)
    rendezvous = _rendezvous(board) if board else None
    prepared = rendezvous.attend(keys) if rendezvous else prepare(config)
    if command.trace:
        prepared = prepared._replace(trace=partial(command.trace, keys))
    resolved.report()

    # ranks
    if "RANK" in os.environ:
        if config.virtual:
            raise ValueError("time=virtual computes everything in one process: start it without hosts, or add "
                             "time=real")
        return _be_rank(prepared, rendezvous, main)
    if prepared.forks:
        # each rank comes back here with RANK set, so that it reads and checks the same words as this process
        rank_words = [*command.module.split(), *resolved.words]
        return spawn(rank_words, prepared.placement.world, prepared.recovers)
    with alone(prepared) as rank_0:  # ends the other threads after an error
        return _use(_opened(rank_0), main)


def _rendezvous(board: Board) -> Rendezvous[Prepared]:
    """Return this board's side of the rendezvous."""
    if board.is_spare:
        return Spare(board, prepare)
    if WORKER_VARIABLE in os.environ and board.rank:
        return WorkerBoard(board, prepare, received_part)
    return Participant(board, prepare) if board.rank else Coordinator(board, prepare)


# --- one process for each rank ----------------------------------------------------------------------------------------

def _be_rank(prepared: Prepared, rendezvous: Rendezvous[Prepared] | None, main: Main) -> NoReturn:
    """Run one rank from the rendezvous to its end. A rank that fails ends at once."""
    os.environ.update(TOKENIZERS_ONLY)
    number, several_hosts = int(os.environ["RANK"]), rendezvous is not None
    if number == 0 or not several_hosts:  # on the other boards Ctrl-C keeps its handler
        signal.signal(signal.SIGINT, signal.SIG_IGN if number else interrupt)

    member = Member(prepared, number, several_hosts)
    try:
        meeting = rendezvous.connect() if rendezvous else connect(number, prepared)
        rank = member.connect(meeting, member.lose)
        exit_code = 0
        if number:
            rank.serve()
        else:
            exit_code = _lead(rank, main)
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the work is done, and all ranks are about to end
        member.leave(outlive=number == 0)
        if number == 0:
            join_traces(rank.spec)
    except BaseException as error:
        member.give_up(error)

    leave_groups()
    if several_hosts and exit_code >= EXIT_STOPPED:  # else the launcher prints it
        say("stopped", "\n")
    die(exit_code)  # an orderly shutdown of torch would take longer than its start


def _lead(rank_0: Rank, main: Main) -> int:
    """Open the pipeline of a process and use it; return the exit code."""
    try:
        pipeline = _opened(rank_0)
    except (ValueError, KeyboardInterrupt) as error:
        return ended_by(error, rank_0.spec.config.debug)
    return _use(pipeline, main)


def _opened(rank_0: Rank) -> Pipeline:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked until here, see `start_ranks`
    return Pipeline.of_rank_0(rank_0)


def _use(pipeline: Pipeline, main: Main) -> int:
    """Run the command's `main`, then stop the ring unless a peer is lost; return the exit code."""
    exit_code = 0
    try:
        main(pipeline)
    except (SystemExit, ValueError, OSError, KeyboardInterrupt) as error:
        exit_code = ended_by(error, pipeline.config.debug)

    try:
        pipeline.stop()
    except PeerLost:
        if not exit_code:  # else a reason was printed already
            raise
    return exit_code


def _lead_nothing(pipeline: Pipeline) -> None:
    raise PeerLost("rank 0 is the program that opens the pipeline")


if __name__ == "__main__":
    sys.exit(run(Command("launch.run", _lead_nothing), sys.argv[1:]))
