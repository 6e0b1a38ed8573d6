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
from pathlib import Path
from typing import Callable, NoReturn, Sequence

import torch
import torch.distributed as dist

from config.cli import parse
from config.run_config import RunConfig
from model.text import Text
from model.weights import Part
from pipeline.decode import Decoder
from pipeline.pulse import Pulse
from pipeline.stage import serve
from pipeline.trace import OFF, NoTrace, Trace, merge
from pipeline.transport import DistLink, Link, LocalLink, PeerLost, Peers
from scripts.start.build import build_decoder, build_ring, build_stage
from scripts.start.prepare import check_split, open_part, prepare
from scripts.start.torchrun import GRACE, INTERRUPTED, LOST, STOPPED, WRONG, die, live_no_longer_than_launcher, spawn


@dataclass(frozen=True)
class Session:
    """What rank 0 works with; `text` is absent where prompts are token ids."""

    config: RunConfig
    decoder: Decoder
    text: Text | None
    trace: NoTrace


Main = Callable[[Session], None]


def run(module: str, argv: Sequence[str], main: Main) -> int:
    """The whole life of a command; its exit code. `module`, with its first words, is what starts in each rank."""
    try:
        config = parse(argv)
        folder, world = prepare(config)
        if "RANK" in os.environ:
            _one_of_many(config, folder, main)
        if config.processes:
            code = spawn([*module.split(), *argv], config.master_addr, config.master_port, world)
        else:
            code = _all_in_one(config, folder, world, main)
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


# --- one process for each rank ----------------------------------------------------------------------------------------

def _one_of_many(config: RunConfig, folder: Path, main: Main) -> NoReturn:
    """Be one rank from the first handshake to the last good-bye. A rank that fails dies at once."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    signal.signal(signal.SIGINT, signal.SIG_IGN if rank else signal.default_int_handler)
    live_no_longer_than_launcher()
    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    pulse, trace, code = Pulse(store, rank, world, config.timeout), _trace(config, rank), 0
    link = DistLink(Peers((rank - 1) % world, (rank + 1) % world, range(1, world) if rank == 0 else (),
                          None if rank == 0 else 0), pulse.report, trace)
    pulse.start(lambda loss: link.fail(PeerLost(loss)))
    try:
        part = open_part(folder, rank)
        store.set(f"split/{rank}", part.split_id)
        check_split(part, store.get("split/0").decode())
        if rank == 0:
            code = _lead(config, part, link, trace, main)
        else:
            serve(build_stage(config, part, trace), link)
    except BaseException as error:
        _unforeseen(config, error)
        if rank == 0 or not isinstance(error, PeerLost):
            print(f"\nflowspec: {error}" if rank == 0 else f"\nflowspec: rank {rank}: {error}", file=sys.stderr)
        else:
            time.sleep(GRACE)  # rank 0, which has the user's ear, shall tell it before torchrun ends all
        die(LOST if isinstance(error, PeerLost) else WRONG)
    link.close()
    trace.close()
    pulse.stop()
    dist.destroy_process_group()
    if rank == 0:
        _merge(config)
    die(code)  # to take torch apart in good order would last longer than to bring it up


def _unforeseen(config: RunConfig, error: BaseException) -> None:
    """The traceback, unless a sentence says it all."""
    if config.debug or not isinstance(error, (PeerLost, ValueError, OSError)):
        traceback.print_exception(type(error), error, error.__traceback__)


# --- all ranks in one process -----------------------------------------------------------------------------------------

def _all_in_one(config: RunConfig, folder: Path, world: int, main: Main) -> int:
    """Be all ranks at once, each a thread: for a debugger, and for tests."""
    torch.empty(0, device="meta")  # with the first of these torch loads modules; 2.3 hangs if threads race to do it
    traces = [_trace(config, rank) for rank in range(world)]
    links = LocalLink.ring(traces)

    def work(rank: int) -> None:
        try:
            serve(build_stage(config, open_part(folder, rank), traces[rank]), links[rank])
        except BaseException as error:
            _unforeseen(config, error)
            links[rank].fail(PeerLost(f"rank {rank}: {error}"))

    threads = [threading.Thread(target=work, args=(rank,), name=f"rank {rank}", daemon=True)
               for rank in range(1, world)]
    for thread in threads:
        thread.start()
    code = _lead(config, open_part(folder, 0), links[0], traces[0], main)
    for thread in threads:
        thread.join()
    for trace in traces:
        trace.close()
    _merge(config)
    return code


def _lead(config: RunConfig, part: Part, link: Link, trace: NoTrace, main: Main) -> int:
    """Be rank 0; whatever happens but the loss of a peer, the ring is stopped at the end."""
    ring = build_ring(config, part, link, trace)
    code = 0
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # held until here, see scripts/start/torchrun.py
        decoder = build_decoder(config, part, ring, trace)
        text = None if config.prompt_ids else Text(part.folder)
        ring.start()
        main(Session(config, decoder, text, trace))
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
    return Trace(config.trace, rank) if config.trace else OFF


def _merge(config: RunConfig) -> None:
    """Join the traces of all ranks that wrote to this machine."""
    if config.trace:
        print(f"trace: {merge(config.trace)} (open it at https://ui.perfetto.dev)", file=sys.stderr)
