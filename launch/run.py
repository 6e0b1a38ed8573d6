"""The composition root: from what a person types to the exit code of a command.

The only place that asks which rank this is; everything below it receives values. A command calls `run` with what rank 0
shall do. Started by hand, it looks the input over and starts one process for each rank (or, with processes=false, one
thread). Where a launcher has set RANK in the environment, it is that rank. As a program it is a rank beside a rank 0
that is a person's program: `python -m launch.run [PRESET] [key=value ...]`.
"""
from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from functools import partial
from typing import Callable, NoReturn, Sequence

from config.cli import CommandKeys
from launch.console import EXIT_STOPPED, die, ended_by, interrupt, say
from launch.hosts.board import TYPED_AS, Board, find_board
from launch.hosts.rendezvous import Coordinator, Participant, Rendezvous, Spare
from launch.pipeline import Pipeline
from launch.prepare import Prepared, prepare
from launch.processes import launched, note, spawn
from launch.ranks import Member, alone, connect, leave_groups
from launch.trace import join_traces
from launch.wiring import Rank
from launch.words import resolve
from pipeline.failure import PeerLost, foreseen
from pipeline.trace import NoTrace

Main = Callable[[Pipeline], None]
# What transformers reads: a rank needs its tokenizers, and its models would import torch's compiler, for seconds.
TOKENIZERS_ONLY = {"USE_TORCH": "0", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}


@dataclass(frozen=True)
class Command:
    """What a command does with a live pipeline.

    `module`, with its first words, is what starts in each rank; `main` is what rank 0 does. A command with keys of its
    own names their `kind`, and `main` and `trace` get them: the one behind the pipeline, the other as configuration.
    """

    module: str
    main: Callable[..., None]
    kind: type[CommandKeys] | None = None
    trace: Callable[..., NoTrace] | None = None  # makes that of a rank, by keys, number and clock; None: as keys say


def run(command: Command, argv: Sequence[str]) -> int:
    """The whole life of a command. Returns its exit code; what went wrong is printed on stderr."""
    try:
        code = _run(command, argv)
    except (Exception, KeyboardInterrupt) as error:
        if not foreseen(error):
            raise
        code = ended_by(error, "debug=true" in argv, note if launched() else say)
    if code >= EXIT_STOPPED:
        say("stopped", "\n")
    return code


def _run(command: Command, argv: Sequence[str]) -> int:
    for name in ("RANK", "WORLD_SIZE"):
        if name in os.environ and not launched():
            raise ValueError(f"{name}={os.environ[name]} in the environment is no launcher's of ours: unset it, or "
                             "start this without torchrun, for it starts its ranks itself")
    resolved = resolve(argv, command.kind, os.environ.get(TYPED_AS, "bash run_pipe.sh"))
    keys, config = resolved.keys, resolved.keys.run
    main = partial(command.main, own=keys) if command.kind else command.main
    board = find_board(config, os.environ)
    rendezvous = _rendezvous(board) if board else None
    prepared = rendezvous.attend(keys) if rendezvous else prepare(config)
    if command.trace:
        prepared = prepared._replace(trace=partial(command.trace, keys))
    resolved.report()
    if "RANK" not in os.environ:
        if prepared.forks:
            # each rank comes back here with RANK set, so that it reads and checks the same words as this process
            typed = [*command.module.split(), *resolved.words]
            return spawn(typed, prepared.placement.world, prepared.recovers)
        with alone(prepared) as rank_0:
            return _lead(rank_0, main)
    if config.virtual:
        raise ValueError("time=virtual computes everything in one process: start it without hosts, or add time=real")
    return _be_rank(prepared, rendezvous, main)


def _rendezvous(board: Board) -> Rendezvous:
    """This board's side of the rendezvous."""
    if board.is_spare:
        return Spare(board)
    return Participant(board) if board.rank else Coordinator(board)


# --- one process for each rank ----------------------------------------------------------------------------------------

def _be_rank(prepared: Prepared, rendezvous: Rendezvous | None, main: Main) -> NoReturn:
    """Be one rank from the rendezvous to the last good-bye. A rank that fails dies at once."""
    os.environ.update(TOKENIZERS_ONLY)
    number, several_hosts = int(os.environ["RANK"]), rendezvous is not None
    if number == 0 or not several_hosts:  # elsewhere Ctrl-C is for this rank, or as its shell wants it
        signal.signal(signal.SIGINT, signal.SIG_IGN if number else interrupt)
    member = Member(prepared, number, several_hosts)
    try:
        meeting = rendezvous.connect() if rendezvous else connect(number, prepared.placement)
        rank = member.connect(meeting, member.lose)
        code = 0
        if number:
            rank.serve()
        else:
            code = _lead(rank, main)
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the answer is there, and all are about to end
        member.leave(outlive=number == 0)
        if number == 0:
            join_traces(rank.spec)
    except BaseException as error:
        member.give_up(error)
    leave_groups()
    if several_hosts and code >= EXIT_STOPPED:  # else the launcher says it
        say("stopped", "\n")
    die(code)  # to take torch apart in good order would last longer than to bring it up


def _lead(rank_0: Rank, main: Main) -> int:
    """Do what the command does; whatever happens but the loss of a peer, the ring is stopped then. The exit code."""
    debug = rank_0.spec.config.debug
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # held until here, see `start_ranks`
        pipeline = Pipeline.of_rank_0(rank_0)
    except (ValueError, KeyboardInterrupt) as error:
        return ended_by(error, debug)
    code = 0
    try:
        main(pipeline)
    except (SystemExit, ValueError, BrokenPipeError, KeyboardInterrupt) as error:
        code = ended_by(error, debug)
    try:
        pipeline.stop()
    except PeerLost:
        if not code:  # else a reason was printed already
            raise
    return code


def _lead_nothing(pipeline: Pipeline) -> None:
    raise PeerLost("rank 0 is the program that opens the pipeline")


if __name__ == "__main__":
    sys.exit(run(Command("launch.run", _lead_nothing), sys.argv[1:]))
