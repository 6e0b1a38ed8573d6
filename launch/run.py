"""The composition root: from a configuration and a rank to a live pipeline.

The only place that knows rank numbers; everything below it receives values. A command calls `run` with what rank 0
shall do. Started by hand, it looks the input over and starts one process per rank (or one thread per rank, with
processes=false); where the environment names a rank, as torchrun does too, it is that rank.
"""
from __future__ import annotations

import os
import signal
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, NoReturn, Sequence

import torch.distributed as dist

from config.cli import parse
from config.run_config import RunConfig
from launch.build import build_stage
from launch.ending import Ending, show
from launch.hosts.board import COMMAND, find_board
from launch.hosts.clock import learn_time, machine, tell_time
from launch.hosts.rendezvous import Follower, Leader, Rendezvous
from launch.interrupt import interrupt
from launch.pipeline import Pipeline
from launch.prepare import check_split, open_part, prepare
from launch.processes import GRACE, INTERRUPTED, LOST, STOPPED, WRONG, Agent, die, launched, note, spawn
from launch.ranks import Lead, as_threads
from launch.spec import RankSpec
from launch.trace import join_traces, open_trace
from launch.wiring import between_processes
from pipeline.heartbeat import Heartbeat
from pipeline.loss import PeerLost, explain, foreseen
from pipeline.stage import run_stage
from pipeline.trace import NoTrace
from tp.links import Placement


@dataclass(frozen=True)
class Command:
    """What a command does with a live pipeline.

    `module`, with its first words, is what starts in each rank; `main` is what rank 0 does; `kind` is the command's
    configuration, a `RunConfig` or one with keys of its own; `trace` makes the trace of a rank.
    """

    module: str
    main: Callable[[Pipeline], None]
    kind: type[RunConfig] = RunConfig
    trace: Callable[[Any, int], NoTrace] = open_trace


def run(command: Command, argv: Sequence[str]) -> int:
    """The whole life of a command; its exit code."""
    try:
        config = parse(argv, os.environ.get(COMMAND, "bash run_pipe.sh"), command.kind)
        folder, placement, rendezvous = _gather(config)
        if "RANK" in os.environ:
            _one_of_many(config, (folder, placement, rendezvous), command)
        if config.processes:
            code = spawn([*command.module.split(), *argv], placement.world)
        else:
            with as_threads(config, folder, placement, command.trace) as lead:
                code = _lead(lead, command.main)
    except Exception as error:
        if not foreseen(error):
            raise
        show(error, "debug=true" in argv)
        if launched():
            note(explain(error))
        else:
            print(f"flowspec: {explain(error)}", file=sys.stderr)
        return LOST if isinstance(error, PeerLost) else WRONG
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code >= STOPPED:
        with suppress(OSError):  # the terminal may be gone
            print("\nflowspec: stopped", file=sys.stderr)
    return code


def _gather(config: RunConfig) -> tuple[Path, Placement, Agent | Rendezvous]:
    """What a start needs; on several hosts, once all boards have come and belong together."""
    board = find_board(config, os.environ)
    if board is None:
        return (*prepare(config), Agent())
    rendezvous = (Follower if board.rank else Leader)(board)
    return (*rendezvous.attend(config, prepare), rendezvous)


# --- one process for each rank ----------------------------------------------------------------------------------------

def _one_of_many(config: RunConfig, start: tuple[Path, Placement, Agent | Rendezvous], command: Command) -> NoReturn:
    """Be one rank from the first handshake to the last good-bye. A rank that fails dies at once."""
    rank, world, (folder, placement, rendezvous) = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), start
    if not (rank and rendezvous.apart):  # where Ctrl-C is for this rank, or as its shell wants it
        signal.signal(signal.SIGINT, signal.SIG_IGN if rank else interrupt)
    ending, code = _ending(config, rank, rendezvous.apart), 0
    try:
        store = rendezvous.connect()
        ending.heartbeat = heartbeat = Heartbeat(store, rank, world, config.timeout, rendezvous.names)
        ending.trace = trace = command.trace(config, rank)
        ending.wires = wires = between_processes(config, placement, rank, heartbeat, trace)
        heartbeat.start(ending.lose)
        part = open_part(folder, rank)
        store.set(f"split/{rank}", part.split_id)
        check_split(part, store.get("split/0").decode())
        _set_clock(config, store, world, trace, rank)
        if rank == 0:
            code = _lead((RankSpec(config, part), wires, trace), command.main)
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the answer is there, and all are about to end
        else:
            run_stage(build_stage(RankSpec(config, part), trace, wires.group), wires.serving)
        wires.close()
        trace.close()
        heartbeat.stop(outlive=rank == 0)
        if rank == 0:
            join_traces(config, part)
    except BaseException as error:
        ending.give_up(error)
    dist.destroy_process_group()
    if rendezvous.apart and code >= STOPPED:  # else the launcher says it
        print("\nflowspec: stopped", file=sys.stderr)
    die(code)  # to take torch apart in good order would last longer than to bring it up


def _ending(config: RunConfig, rank: int, apart: bool) -> Ending:
    """Rank 0 has the user's ear, but each board its own terminal; a launcher of ours speaks for its ranks.

    A person's torchrun ends all ranks with the first, so the others let rank 0 speak before they end.
    """
    tells = apart or rank == 0 and not launched()
    patience = 2 * GRACE if apart else GRACE / 3 if tells or launched() else GRACE
    return Ending(rank, config.debug, tells, launched(), patience, linger=0 if launched() else GRACE)


# --- rank 0 -----------------------------------------------------------------------------------------------------------

def _lead(lead: Lead, main: Callable[[Pipeline], None]) -> int:
    """Be rank 0; whatever happens but the loss of a peer, the ring is stopped at the end. The exit code."""
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # held until here, see `start_ranks`
        pipeline = Pipeline.lead(*lead)
    except (ValueError, KeyboardInterrupt) as error:
        return _verdict(error, lead[0].config)
    code = 0
    try:
        main(pipeline)
    except (SystemExit, ValueError, BrokenPipeError, KeyboardInterrupt) as error:
        code = _verdict(error, pipeline.config)
    try:
        pipeline.ring.stop()
    except PeerLost:
        if not code:  # else a verdict was told already
            raise
    return code


def _verdict(error: BaseException, config: RunConfig) -> int:
    """The exit code of a command that ends so; what a person got wrong is told."""
    if isinstance(error, SystemExit):  # the command's own
        return int(error.code or 0)
    if isinstance(error, BrokenPipeError):  # whoever reads the answer has had enough; nothing is to be flushed there
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return STOPPED + signal.SIGPIPE
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return INTERRUPTED
    if config.debug:
        traceback.print_exc()
    print(f"flowspec: {error}", file=sys.stderr)
    return WRONG


def _set_clock(config: RunConfig, store: Any, world: int, trace: NoTrace, rank: int) -> None:
    """Let rank 0's clock tell the spans of all machines."""
    if config.trace and rank == 0:
        tell_time(store, range(1, world), machine())
    elif config.trace:
        learn_time(store, rank, machine(), trace)
