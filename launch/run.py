"""The composition root: from what a person types to the exit code of a command.

The only place that asks which rank this is; everything below it receives values. A command calls `run` with what rank 0
shall do. Started by hand, it looks the input over and starts one process for each rank (or, with processes=false, one
thread). Where the environment names a rank, as torchrun does too, it is that rank. As a program it is a rank beside a
rank 0 that is a person's program: `python -m launch.run [PRESET] [key=value ...]`.
"""
from __future__ import annotations

import os
import re
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Callable, NoReturn, Sequence

import torch.distributed as dist

from config.cli import CommandKeys
from launch.console import INTERRUPTED, LOST, STOPPED, WRONG, die, ended_by, interrupt, say, show
from launch.hosts.board import COMMAND, find_board
from launch.hosts.rendezvous import Coordinator, Participant, Rendezvous
from launch.open_rank0 import alone
from launch.pipeline import Pipeline
from launch.prepare import Prepared, prepare
from launch.processes import GRACE, launched, note, spawn
from launch.ranks import Member, Rank, connect
from launch.trace import join_traces
from launch.words import settle
from pipeline.failure import PeerLost, explain, foreseen
from pipeline.trace import NoTrace

Main = Callable[[Pipeline], None]


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
    if code >= STOPPED:
        say("stopped", "\n")
    return code


def _run(command: Command, argv: Sequence[str]) -> int:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        value = os.environ.get(name, "0")
        if not re.fullmatch("[0-9]{1,6}", value):
            raise ValueError(f"{name}={value} in the environment is no number of ranks: unset it")
    asked = settle(argv, command.kind, os.environ.get(COMMAND, "bash run_pipe.sh"))
    keys, config = asked.keys, asked.keys.run
    main = partial(command.main, own=keys) if command.kind else command.main
    board = find_board(config, os.environ)
    rendezvous = None
    if board is None:
        prepared = prepare(config)
    else:
        rendezvous = Participant(board) if board.rank else Coordinator(board)
        prepared = rendezvous.attend(keys)
    if command.trace:
        prepared = prepared._replace(trace=partial(command.trace, keys))
    asked.report()
    if "RANK" not in os.environ:
        if config.processes and not config.virtual:
            return spawn([*command.module.split(), *asked.words], prepared.placement.world)
        with alone(prepared) as rank_0:
            return _lead(rank_0, main)
    if config.virtual:
        raise ValueError("time=virtual computes everything in one process: start it without torchrun, or add time=real")
    return _be_rank(prepared, rendezvous, main)


# --- one process for each rank ----------------------------------------------------------------------------------------

def _be_rank(prepared: Prepared, rendezvous: Rendezvous | None, main: Main) -> NoReturn:
    """Be one rank from the rendezvous to the last good-bye. A rank that fails dies at once."""
    number, several_hosts = int(os.environ["RANK"]), rendezvous is not None
    if number == 0 or not several_hosts:  # elsewhere Ctrl-C is for this rank, or as its shell wants it
        signal.signal(signal.SIGINT, signal.SIG_IGN if number else interrupt)
    ending = Ending(number, several_hosts, prepared.config.debug)
    try:
        store = rendezvous.connect() if rendezvous else connect(number, prepared.placement.world)
        names = rendezvous.names if rendezvous else ()
        ending.member = Member(prepared, number, store, names)
        rank = ending.member.connect(ending.lose)
        code = 0
        if number:
            rank.serve()
        else:
            code = _lead(rank, main)
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the answer is there, and all are about to end
        ending.member.leave(outlive=number == 0)
        if number == 0:
            join_traces(rank.spec)
    except BaseException as error:
        ending.give_up(error)
    dist.destroy_process_group()
    if several_hosts and code >= STOPPED:  # else the launcher says it
        say("stopped", "\n")
    die(code)  # to take torch apart in good order would last longer than to bring it up


class Ending:
    """The end of a rank before its time: it says why, lets the others hear of it, and keeps its trace.

    Rank 0 has the user's ear, but each board its own terminal; a launcher of ours speaks for its ranks. A person's
    torchrun ends all ranks with the first, so the others let rank 0 speak before they end.
    """

    member: Member | None = None  # since the ranks have met

    def __init__(self, rank: int, several_hosts: bool, debug: bool) -> None:
        self._rank, self._debug = rank, debug
        self._speaks = several_hosts or (rank == 0 and not launched())
        self._patience: float = GRACE  # seconds for the main thread to find a loss by itself
        if several_hosts:
            self._patience = 2.0 * GRACE
        elif self._speaks or launched():
            self._patience = GRACE / 3
        read_elsewhere = launched() or (several_hosts and rank)  # the store in which the others read why
        self._linger = 0 if read_elsewhere else GRACE  # seconds for the others to read it

    def lose(self, loss: str) -> None:
        """End the rank, since the heartbeat has heard of a loss; called on the heartbeat's thread."""
        try:
            if self.member is not None:
                self.member.fail(loss)
            time.sleep(self._patience)
            if self._speaks:  # its main thread waits for other ranks in the midst of a product
                say(loss, "\n")
        finally:
            self._end(LOST)

    def give_up(self, error: BaseException) -> NoReturn:
        """End the rank, since its main thread has failed or found a loss."""
        show(error, self._debug)
        lost = isinstance(error, PeerLost)
        reason = explain(error) if lost else f"rank {self._rank} failed: {explain(error)}"
        own_error_unheard = not lost and not launched()
        if self._speaks or own_error_unheard:
            say(reason, "\n")
        self._speaks = False  # once is enough
        if self.member is not None:
            self.member.heartbeat.note(reason)
        elif launched():
            note(reason)
        time.sleep(self._linger)
        if isinstance(error, KeyboardInterrupt):
            self._end(INTERRUPTED)
        self._end(LOST if lost else WRONG)

    def _end(self, code: int) -> NoReturn:
        if self.member is not None:
            with suppress(OSError, ValueError):
                self.member.trace.close()
        die(code)


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
