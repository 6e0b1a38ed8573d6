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
from functools import cached_property, partial
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
from pipeline.loss import PeerLost, explain, foreseen, guarded
from pipeline.pulse import Pulse
from pipeline.stage import serve
from pipeline.trace import OFF, NoTrace, Trace, merge, writable
from scripts import interrupt
from scripts.start.build import build_decoder, build_draft, build_ring, build_stage
from scripts.start.clock import learn_time, machine, tell_time
from scripts.start.ending import Ending, show
from scripts.start.hosts import COMMAND, find_board
from scripts.start.meeting import Guest, Host, Meeting
from scripts.start.prepare import check_split, open_part, prepare
from scripts.start.processes import GRACE, INTERRUPTED, LOST, STOPPED, WRONG, Agent, die, launched, note, spawn
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
            code = spawn([*module.split(), *argv], seats.world)
        else:
            code = _all_in_one(config, folder, seats, main)
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
    if not (rank and meeting.apart):  # where Ctrl-C is for this rank, or as its shell wants it
        signal.signal(signal.SIGINT, signal.SIG_IGN if rank else interrupt)
    ending, code = _ending(config, rank, meeting.apart), 0
    try:
        store = meeting.connect()
        ending.pulse = pulse = Pulse(store, rank, world, config.timeout, meeting.names)
        ending.trace = trace = _trace(config, rank)
        ending.wires = wires = between_processes(config, seats, rank, pulse, trace)
        pulse.start(ending.lose)
        part = open_part(folder, rank)
        store.set(f"split/{rank}", part.split_id)
        check_split(part, store.get("split/0").decode())
        _set_clock(config, store, world, trace, rank)
        if rank == 0:
            code = _lead(config, part, wires, trace, main)
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the answer is there, and all are about to end
        else:
            serve(build_stage(config, part, trace, wires.group), wires.serving)
        wires.close()
        trace.close()
        pulse.stop(outlive=rank == 0)
        if rank == 0:
            _merge(config, part)
    except BaseException as error:
        ending.give_up(error)
    dist.destroy_process_group()
    if meeting.apart and code >= STOPPED:  # else the launcher says it
        print("\nflowspec: stopped", file=sys.stderr)
    die(code)  # to take torch apart in good order would last longer than to bring it up


def _ending(config: RunConfig, rank: int, apart: bool) -> Ending:
    """Rank 0 has the user's ear, but each board its own terminal; a launcher of ours speaks for its ranks.

    A person's torchrun ends all ranks with the first, so the others let rank 0 speak before they end.
    """
    tells = apart or rank == 0 and not launched()
    patience = 2 * GRACE if apart else GRACE / 3 if tells or launched() else GRACE
    return Ending(rank, config.debug, tells, launched(), patience, linger=0 if launched() else GRACE)


# --- all ranks in one process -----------------------------------------------------------------------------------------

def _all_in_one(config: RunConfig, folder: Path, seats: Seats, main: Main) -> int:
    """Be all ranks at once, each a thread: for a debugger, and for tests."""
    torch.empty(0, device="meta")  # with the first of these torch loads modules; 2.3 hangs if threads race to do it
    traces = [_trace(config, rank) for rank in range(seats.world)]
    wires = between_threads(config, seats, traces)

    def work(rank: int) -> None:
        serve(build_stage(config, open_part(folder, rank), traces[rank], wires[rank].group), wires[rank].serving)

    def failed(name: str, error: BaseException) -> None:
        show(error, config.debug)
        wires[0].fail(error if isinstance(error, PeerLost) else PeerLost(f"{name}: {explain(error)}"))

    threads = [guarded(f"rank {rank}", partial(work, rank), failed) for rank in range(1, seats.world)]
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
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # held until here, see `spawn`
        draft = build_draft(config, part, ring, trace)
        text = None if config.prompt_ids else Text(part.folder)
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
    try:
        ring.stop()
    except PeerLost:
        if not code:  # else a verdict was told already
            raise
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
        with writable(Path(config.trace) / "run.json"):
            describe(config, part)
        print(f"trace: {merge(config.trace)} (open it at https://ui.perfetto.dev, or make a page of it: python -m "
              f"scripts.timeline {config.trace})", file=sys.stderr)
