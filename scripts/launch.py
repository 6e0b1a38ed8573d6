"""The composition root: from a configuration and a rank to a live pipeline.

The only place that knows rank numbers; everything below it receives values. A command calls `run` with what rank 0
shall do. Started by hand, it looks the input over and starts torchrun's launcher with one process per rank (or one
thread per rank, with processes=false); started by torchrun, it is the rank that the environment says.
"""
from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Callable, NoReturn, Sequence

import torch
import torch.distributed as dist

from config.cli import parse
from config.eval_config import EvalConfig
from config.run_config import RunConfig
from eval.tally import Tally
from model.text import Text
from model.weights import Part
from pipeline.decode import Decoder
from pipeline.pulse import Pulse
from pipeline.stage import serve
from pipeline.trace import OFF, NoTrace, Trace, merge
from pipeline.transport import PeerLost
from scripts.start.build import build_decoder, build_draft, build_ring, build_stage
from scripts.start.clock import learn_time, machine, tell_time
from scripts.start.hosts import COMMAND, find_board
from scripts.start.meeting import Guest, Host, Meeting
from scripts.start.prepare import check_split, open_part, open_text, prepare
from scripts.start.torchrun import GRACE, INTERRUPTED, LOST, STOPPED, WRONG, Agent, die, spawn
from scripts.start.wiring import Wires, between_processes, between_threads
from scripts.timeline import describe
from tp.links import Loop, Seats


@dataclass(frozen=True)
class Session:
    """What rank 0 works with; `text` is absent where prompts are token ids.

    `decoder_for` makes decoders of other methods, or with other trees, over the same pipeline and draft.
    """

    config: RunConfig
    decoder_for: Callable[[RunConfig], Decoder]
    text: Text | None
    trace: NoTrace

    @cached_property
    def decoder(self) -> Decoder:
        """That of the configuration itself."""
        return self.decoder_for(self.config)

    @property
    def scale(self) -> float:
        """Seconds that pass here for each second that is modelled."""
        return self.config.slowdown


Main = Callable[[Session], None]


def run(module: str, argv: Sequence[str], main: Main, kind: type[RunConfig] = RunConfig) -> int:
    """The whole life of a command; its exit code. `module`, with its first words, is what starts in each rank.

    `kind` is the command's configuration: a `RunConfig`, or one with keys of its own.
    """
    try:
        config = parse(argv, os.environ.get(COMMAND, "bash run_pipe.sh"), kind)
        folder, seats, meeting = _gather(config)
        if "RANK" in os.environ:
            _one_of_many(config, (folder, seats, meeting), main)
        if config.processes:
            code = spawn([*module.split(), *argv], config.master_addr, config.master_port, seats.world)
        else:
            code = _all_in_one(config, folder, seats, main)
    except (ValueError, OSError, PeerLost) as error:
        if "debug=true" in argv:
            traceback.print_exc()
        print(f"flowspec: {error}", file=sys.stderr)
        return LOST if isinstance(error, PeerLost) else WRONG
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code >= STOPPED:
        print("\nflowspec: stopped", file=sys.stderr)
    return code


def _gather(config: RunConfig) -> tuple[Path, Seats, Agent | Meeting]:
    """What a start needs; on several hosts, once all boards have come and belong together."""
    board = find_board(config, os.environ)
    if board is None:
        return (*prepare(config), Agent())
    meeting = (Guest if board.rank else Host)(board)
    return (*meeting.attend(config, prepare), meeting)


# --- one process for each rank ----------------------------------------------------------------------------------------

def _one_of_many(config: RunConfig, start: tuple[Path, Seats, Agent | Meeting], main: Main) -> NoReturn:
    """Be one rank from the first handshake to the last good-bye. A rank that fails dies at once."""
    rank, world, (folder, seats, meeting) = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), start
    tells = rank == 0 or meeting.apart  # somebody sits before its terminal
    if not (rank and meeting.apart):  # where Ctrl-C is for this rank, or as its shell wants it
        signal.signal(signal.SIGINT, signal.SIG_IGN if rank else signal.default_int_handler)
    meeting.connect()
    store = dist.distributed_c10d._get_default_store()
    pulse, trace, code = Pulse(store, rank, world, config.timeout, meeting.names), _trace(config, rank), 0
    wires = between_processes(config, seats, rank, pulse, trace)

    def lose(loss: str) -> None:
        wires.fail(PeerLost(loss))
        time.sleep(2 * GRACE if meeting.apart else GRACE if rank else GRACE / 3)
        if tells:  # its main thread waits for other ranks in the midst of a product
            print(f"\nflowspec: {loss}", file=sys.stderr)
        die(LOST)

    pulse.start(lose)
    try:
        part = open_part(folder, rank)
        store.set(f"split/{rank}", part.split_id)
        check_split(part, store.get("split/0").decode())
        _set_clock(config, store, world, trace, rank)
        if rank == 0:
            code = _lead(config, part, wires, trace, main)
        else:
            serve(build_stage(config, part, trace, wires.group), wires.serving)
    except BaseException as error:
        _unforeseen(config, error)
        _give_up(rank, meeting, pulse, error)
    wires.close()
    trace.close()
    pulse.stop(outlive=meeting.apart and rank == 0)
    dist.destroy_process_group()
    if meeting.apart and code >= STOPPED:  # else the launcher says it
        print("\nflowspec: stopped", file=sys.stderr)
    if rank == 0:
        _merge(config, part)
    die(code)  # to take torch apart in good order would last longer than to bring it up


def _give_up(rank: int, meeting: Agent | Meeting, pulse: Pulse, error: BaseException) -> NoReturn:
    """Tell why, where somebody reads it, and end. Rank 0 has the user's ear, but each board its own terminal."""
    lost, why = isinstance(error, PeerLost), str(error) or "it was stopped"
    told = rank == 0 or meeting.apart or not lost
    if told:
        print(f"\nflowspec: {why}" if rank == 0 or lost else f"\nflowspec: rank {rank}: {why}", file=sys.stderr)
    if meeting.apart and not lost:
        pulse.report(f"rank {rank} failed: {why}")
    if meeting.apart or not told:
        time.sleep(GRACE)  # torchrun's agent ends all with the first; several hosts need this rank to hear why
    die(INTERRUPTED if isinstance(error, KeyboardInterrupt) else LOST if lost else WRONG)


def _unforeseen(config: RunConfig, error: BaseException) -> None:
    """The traceback, unless a sentence says it all."""
    if config.debug or not isinstance(error, (PeerLost, ValueError, OSError, KeyboardInterrupt)):
        traceback.print_exception(type(error), error, error.__traceback__)


# --- all ranks in one process -----------------------------------------------------------------------------------------

def _all_in_one(config: RunConfig, folder: Path, seats: Seats, main: Main) -> int:
    """Be all ranks at once, each a thread: for a debugger, and for tests."""
    torch.empty(0, device="meta")  # with the first of these torch loads modules; 2.3 hangs if threads race to do it
    traces = [_trace(config, rank) for rank in range(seats.world)]
    wires = between_threads(config, seats, traces)

    def work(rank: int) -> None:
        try:
            serve(build_stage(config, open_part(folder, rank), traces[rank], wires[rank].group), wires[rank].serving)
        except BaseException as error:
            _unforeseen(config, error)
            wires[rank].fail(PeerLost(f"rank {rank}: {error}"))

    threads = [threading.Thread(target=work, args=(rank,), name=f"rank {rank}", daemon=True)
               for rank in range(1, seats.world)]
    for thread in threads:
        thread.start()
    code = _lead(config, open_part(folder, 0), wires[0], traces[0], main)
    for thread in threads:
        thread.join()
    for link, trace in zip(wires, traces):
        link.close()
        trace.close()
    _merge(config, open_part(folder, 0))
    return code


def _lead(config: RunConfig, part: Part, wires: Wires, trace: NoTrace, main: Main) -> int:
    """Be rank 0; whatever happens but the loss of a peer, the ring is stopped at the end."""
    alone = len(part.stages) == 1  # or with members, but without a ring
    link = Loop(build_stage(config, part, trace, wires.group), wires.fan) if alone else wires.link
    ring = build_ring(config, part, link, trace)
    code = 0
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # held until here, see scripts/start/torchrun.py
        text = open_text(config, part.folder)
        draft = build_draft(config, part, ring, trace)
        ring.start()
        main(Session(config, lambda wanted: build_decoder(wanted, part, ring, draft), text, trace))
    except SystemExit as end:  # the command's own verdict
        code = int(end.code or 0)
    except ValueError as error:
        if config.debug:
            traceback.print_exc()
        print(f"flowspec: {error}", file=sys.stderr)
        code = WRONG
    except BrokenPipeError:  # whoever reads the answer has had enough; nothing more is to be flushed there
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = STOPPED + signal.SIGPIPE
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        code = INTERRUPTED
    ring.stop()
    return code


def _trace(config: RunConfig, rank: int) -> NoTrace:
    trace = Trace(config.trace, rank) if config.trace else OFF
    if isinstance(config, EvalConfig):
        return Tally(Path(config.results) / "tally" / config.launch, rank, trace)
    return trace


def _set_clock(config: RunConfig, store: Any, world: int, trace: NoTrace, rank: int) -> None:
    """Let rank 0's clock tell the spans of all machines."""
    if config.trace and rank == 0:
        tell_time(store, range(1, world), machine())
    elif config.trace:
        learn_time(store, rank, machine(), trace)


def _merge(config: RunConfig, part: Part) -> None:
    """Join the traces of all ranks that wrote to this machine, and leave beside them what was run."""
    if config.trace:
        describe(config, part)
        print(f"trace: {merge(config.trace)} (open it at https://ui.perfetto.dev, or make a page of it: python -m "
              f"scripts.timeline {config.trace})", file=sys.stderr)
