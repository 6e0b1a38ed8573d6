"""The composition root: from what a person types to the exit code of a command.

The only place that asks which rank this is; everything below it receives values. A command calls `run` with what rank 0
shall do. Started by hand, it looks the input over and starts one process for each rank (or, with processes=false, one
thread). Where the environment names a rank, as torchrun does too, it is that rank.
"""
from __future__ import annotations

import os
import re
import signal
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Callable, NamedTuple, NoReturn, Sequence

import torch.distributed as dist

from config.cli import parse
from config.command import CommandKeys
from config.run_config import RunConfig
from launch.auto import report_left_open, settled
from launch.hosts.board import COMMAND, find_board
from launch.hosts.clock import learn_time, machine, send_time
from launch.hosts.rendezvous import Coordinator, Participant, Rendezvous
from launch.interrupt import interrupt
from launch.local import LocalRendezvous
from launch.pipeline import Pipeline
from launch.prepare import open_part, prepare
from launch.processes import GRACE, INTERRUPTED, LOST, STOPPED, WRONG, die, launched, note, spawn
from launch.ranks import Rank, Tracing, as_threads
from launch.shutdown import Ending, show
from launch.spec import RankSpec
from launch.trace import join_traces, open_trace
from launch.virtual import as_virtual
from launch.wiring import between_processes
from pipeline.failure import PeerLost, explain, foreseen
from pipeline.heartbeat import Heartbeat
from pipeline.interfaces import REAL
from tp.links import Placement

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
    trace: Tracing | None = None  # makes the trace of a rank; None: as the keys of the run say


class Start(NamedTuple):
    """What is known before the first rank starts."""

    keys: RunConfig | CommandKeys
    folder: Path  # of the split model
    placement: Placement
    rendezvous: LocalRendezvous | Rendezvous

    @property
    def config(self) -> RunConfig:
        """The keys of the run."""
        return self.keys.run


def run(command: Command, argv: Sequence[str]) -> int:
    """The whole life of a command. Returns its exit code; what went wrong is printed on stderr."""
    try:
        code = _run(command, argv)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as error:
        if not foreseen(error):
            raise
        _report(error, "debug=true" in argv)
        return LOST if isinstance(error, PeerLost) else WRONG
    if code >= STOPPED:
        with suppress(OSError):  # the terminal may be gone
            print("\nflowspec: stopped", file=sys.stderr)
    return code


def _run(command: Command, argv: Sequence[str]) -> int:
    """Be one rank, or start all of them and wait for their end."""
    typed = os.environ.get(COMMAND, "bash run_pipe.sh")
    _check_environment()
    words = settled(argv, command.kind)
    start = _prepare(parse(words, typed, kind=command.kind))
    main, trace = _bound(command, start.keys)
    report_left_open(argv)
    if "RANK" in os.environ:
        if start.config.virtual:
            raise ValueError("time=virtual computes everything in one process: start it without torchrun, or add "
                             "time=real")
        _be_rank(start, main, trace)
    if start.config.virtual:
        with as_virtual(start.config, start.folder, start.placement, trace) as rank_0:
            return _lead(rank_0, main)
    if start.config.processes:
        return spawn([*command.module.split(), *words], start.placement.world)
    with as_threads(start.config, start.folder, start.placement, trace) as rank_0:
        return _lead(rank_0, main)


def _bound(command: Command, keys: RunConfig | CommandKeys) -> tuple[Main, Tracing]:
    """What rank 0 does and what makes traces, with the keys of the command."""
    main = partial(command.main, own=keys) if command.kind else command.main
    made = command.trace
    if made is None:
        return main, open_trace
    return main, lambda _, rank, clock: made(keys, rank, clock)


def _check_environment() -> None:
    """Refuse what no launcher would say of a rank."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        value = os.environ.get(name, "0")
        if not re.fullmatch("[0-9]{1,6}", value):
            raise ValueError(f"{name}={value} in the environment is no number of ranks: unset it")


def _prepare(keys: RunConfig | CommandKeys) -> Start:
    """What a start needs; on several hosts, once all boards have come and belong together."""
    config = keys.run
    board = find_board(config, os.environ)
    if board is None:
        folder, placement = prepare(config)
        return Start(keys, folder, placement, LocalRendezvous())
    rendezvous = Participant(board) if board.rank else Coordinator(board)
    folder, placement = rendezvous.attend(keys, prepare)
    return Start(keys, folder, placement, rendezvous)


def _report(error: BaseException, debug: bool) -> None:
    """Report what has ended a command before its ranks were connected."""
    show(error, debug)
    if launched():
        note(explain(error))
    else:
        print(f"flowspec: {explain(error)}", file=sys.stderr)


# --- one process for each rank ----------------------------------------------------------------------------------------

def _be_rank(start: Start, main: Main, tracing: Tracing) -> NoReturn:
    """Be one rank from the rendezvous to the last good-bye. A rank that fails dies at once."""
    number = int(os.environ["RANK"])
    several_hosts = start.rendezvous.several_hosts
    if number == 0 or not several_hosts:  # elsewhere Ctrl-C is for this rank, or as its shell wants it
        signal.signal(signal.SIGINT, signal.SIG_IGN if number else interrupt)
    ending = _ending(start.config, number, several_hosts)
    try:
        code = _live(start, main, tracing, number, ending)
    except BaseException as error:
        ending.give_up(error)
    dist.destroy_process_group()
    if several_hosts and code >= STOPPED:  # else the launcher says it
        print("\nflowspec: stopped", file=sys.stderr)
    die(code)  # to take torch apart in good order would last longer than to bring it up


def _live(start: Start, main: Main, tracing: Tracing, number: int, ending: Ending) -> int:
    """Connect, work and say good-bye; `ending` learns of each thing that it would have to end. The exit code."""
    config, (_, folder, placement, rendezvous) = start.config, start
    store = rendezvous.connect()
    heartbeat = Heartbeat(store, number, placement.world, config.timeout, rendezvous.names)
    ending.heartbeat = heartbeat
    trace = tracing(config, number, REAL)
    ending.trace = trace
    wires = between_processes(config, placement, number, heartbeat, trace)
    ending.wires = wires
    heartbeat.start(ending.lose)
    rank = Rank(RankSpec(config, open_part(folder, number, config)), wires, trace, busy=heartbeat.busy)
    rank.compare_split(store)
    if config.trace and number == 0:
        send_time(store, range(1, placement.world), machine())
    elif config.trace:
        learn_time(store, number, machine(), trace)
    code = 0
    if number == 0:
        code = _lead(rank, main)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the answer is there, and all are about to end
    else:
        rank.serve()
    wires.close()
    trace.close()
    heartbeat.stop(outlive=number == 0)
    if number == 0:
        join_traces(config, rank.spec.part)
    return code


def _ending(config: RunConfig, rank: int, several_hosts: bool) -> Ending:
    """How this rank ends before its time.

    Rank 0 has the user's ear, but each board its own terminal; a launcher of ours speaks for its ranks. A person's
    torchrun ends all ranks with the first, so the others let rank 0 speak before they end.
    """
    speaks = several_hosts or (rank == 0 and not launched())
    if several_hosts:
        patience = 2.0 * GRACE
    elif speaks or launched():
        patience = GRACE / 3
    else:
        patience = GRACE
    read_elsewhere = launched() or (several_hosts and rank)  # the store in which the others read why
    linger = 0 if read_elsewhere else GRACE
    return Ending(rank, config.debug, speaks, launched(), patience, linger)


# --- rank 0 -----------------------------------------------------------------------------------------------------------

def _lead(rank_0: Rank, main: Main) -> int:
    """Do what the command does; whatever happens but the loss of a peer, the ring is stopped then. The exit code."""
    config = rank_0.spec.config
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # held until here, see `start_ranks`
        pipeline = Pipeline.of_rank_0(rank_0)
    except (ValueError, KeyboardInterrupt) as error:
        return _exit_code(error, config)
    code = 0
    try:
        main(pipeline)
    except (SystemExit, ValueError, BrokenPipeError, KeyboardInterrupt) as error:
        code = _exit_code(error, config)
    try:
        pipeline.stop()
    except PeerLost:
        if not code:  # else a reason was printed already
            raise
    return code


def _exit_code(error: BaseException, config: RunConfig) -> int:
    """The exit code of a command that ends with this error; what a person got wrong is printed."""
    if isinstance(error, SystemExit):  # the command's own
        return int(error.code or 0)
    if isinstance(error, BrokenPipeError):  # the reader of the answer has had enough; nothing is to be flushed there
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        return STOPPED + signal.SIGPIPE
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return INTERRUPTED
    if config.debug:
        traceback.print_exc()
    print(f"flowspec: {explain(error)}", file=sys.stderr)
    return WRONG
