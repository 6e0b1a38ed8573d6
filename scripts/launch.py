"""The composition root: from a configuration and a rank to a live pipeline.

The only place that knows rank numbers; everything below it receives values. A command calls `run` with what rank 0
shall do. Started by hand, it looks the input over and starts torchrun's launcher with one process per
rank (or one thread per rank, with processes=false); started by torchrun, it is the rank that the environment says.
"""
from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Callable, NoReturn, Sequence

import torch.distributed as dist

from config.cli import parse
from config.presets import ROOT
from config.run_config import RunConfig
from model.checkpoint import Checkpoint
from model.llama import LlamaConfig
from model.text import Text
from model.weights import Part, parse_stages
from pipeline.decode import Decoder
from pipeline.pulse import Pulse
from pipeline.stage import serve
from pipeline.trace import OFF, NoTrace, Trace, merge
from pipeline.transport import DistLink, Link, LocalLink, PeerLost, Peers
from scripts.build import build_decoder, build_ring, build_stage
from split_and_save_models import split

WRONG, LOST, INTERRUPTED = 2, 75, 130  # exit codes: bad input, a peer is gone, Ctrl-C


@dataclass(frozen=True)
class Session:
    """What rank 0 works with; `text` is absent where prompts are token ids."""

    config: RunConfig
    decoder: Decoder
    text: Text | None
    trace: NoTrace


Main = Callable[[Session], None]


def run(module: str, argv: Sequence[str], main: Main) -> int:
    """The whole life of a command; its exit code. `module`, with its first words if
    it has any, is what torchrun shall start for each rank."""
    try:
        config = parse(argv)
        folder, world = prepare(config)
        if "RANK" in os.environ:
            return _one_of_many(config, folder, main)
        if config.processes:
            return _spawn(module, argv, config, world)
        return _all_in_one(config, folder, world, main)
    except (ValueError, PeerLost) as error:
        if "debug=true" in argv:
            traceback.print_exc()
        print(f"flowspec: {error}", file=sys.stderr)
        return LOST if isinstance(error, PeerLost) else WRONG
    except KeyboardInterrupt:
        print("\nflowspec: stopped", file=sys.stderr)
        return INTERRUPTED


def prepare(config: RunConfig) -> tuple[Path, int]:
    """The folder of the split model, which is made if need be, and the number of ranks."""
    if config.model_dir:
        part = Part(Path(config.model_dir) / "stage_0")
        if config.stages and parse_stages(config.stages, part.stages[-1] and sum(part.stages)) != part.stages:
            held = "+".join(map(str, part.stages))
            raise ValueError(f"{config.model_dir} is split as {held}, not as stages={config.stages}: leave stages out, "
                             "or split the model again into another folder")
        return part.folder.parent, len(part.stages)
    if not config.base_dir:
        raise ValueError("there is no model: give model_dir=FOLDER, as split_and_save_models.py wrote it, or a preset")
    layers = LlamaConfig.read(Checkpoint(config.base_dir).config).layers
    stages = parse_stages(config.stages or "4", layers)
    folder = ROOT / "splits" / f"{Path(config.base_dir).name}-{'+'.join(map(str, stages))}"
    if "RANK" not in os.environ:
        split(config.base_dir, folder, "+".join(map(str, stages)), config.eagle_dir or None)
    return folder, len(stages)


# --- one process for each rank ----------------------------------------------------------------------------------------

def _spawn(module: str, argv: Sequence[str], config: RunConfig, world: int) -> int:
    """Start torchrun's agent with this command for every rank, and tell in a sentence how it ended."""
    import logging
    import socket

    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches rank 0 too, which ends the others in good order
    if config.master_port:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((config.master_addr, config.master_port))
            except OSError as error:
                raise ValueError(f"port {config.master_port} of {config.master_addr} cannot be used "
                                 f"({error.strerror}): choose another master_port, or 0 for any free one") from error
    wanted: dict[str, Any] = {
        "min_nodes": 1, "max_nodes": 1, "nproc_per_node": world, "run_id": f"flowspec-{os.getpid()}",
        "rdzv_backend": "static" if config.master_port else "c10d", "max_restarts": 0, "monitor_interval": 0.1,
        "rdzv_endpoint": f"{config.master_addr}:{config.master_port}",
        "rdzv_configs": {"rank": 0} if config.master_port else {},
        "signals_to_handle": "SIGTERM,SIGHUP,SIGQUIT", "shutdown_timeout": 3}
    known = {option.name for option in fields(LaunchConfig)}
    launcher = LaunchConfig(**{name: value for name, value in wanted.items() if name in known})
    try:
        elastic_launch(launcher, sys.executable)("-m", *module.split(), *argv)
    except ChildFailedError as error:
        return _verdict({rank: failure.exitcode for rank, failure in error.failures.items()})
    return 0


def _verdict(codes: dict[int, int]) -> int:
    """The exit code of a run in which ranks failed; a rank that could not tell its end itself is named here."""
    told = [code for code in codes.values() if code > 0 and code != LOST]
    for rank, code in codes.items():
        if code < 0 and -code != signal.SIGTERM:
            print(f"flowspec: rank {rank} was killed ({signal.Signals(-code).name})", file=sys.stderr)
    return told[0] if told else LOST


def _one_of_many(config: RunConfig, folder: Path, main: Main) -> int:
    """Be one rank from the first handshake to the last good-bye."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    signal.signal(signal.SIGINT, signal.SIG_IGN if rank else signal.default_int_handler)
    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    pulse = Pulse(store, rank, world, config.timeout)
    trace = _trace(config, rank)
    link = DistLink(Peers((rank - 1) % world, (rank + 1) % world, range(1, world) if rank == 0 else (),
                          None if rank == 0 else 0), pulse.report, trace)
    pulse.start(lambda loss: link.fail(PeerLost(loss)))
    _same_split(store, folder, rank)
    code = 0
    try:
        if rank == 0:
            code = _lead(config, folder, link, trace, main)
        else:
            serve(build_stage(config, Part(folder / f"stage_{rank}"), trace), link)
    except PeerLost as error:
        if rank == 0:
            print(f"\nflowspec: {error}", file=sys.stderr)
        _die(LOST)
    except ValueError as error:
        print(f"flowspec: rank {rank}: {error}", file=sys.stderr)
        _die(WRONG)
    link.close()
    trace.close()
    pulse.stop()
    dist.destroy_process_group()
    if rank == 0:
        _merge(config)
    return code


def _die(code: int) -> NoReturn:
    """End at once, without waiting for threads that wait for peers."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _same_split(store: Any, folder: Path, rank: int) -> None:
    """Refuse to run with parts of different splits."""
    mine = Part(folder / f"stage_{rank}").split_id
    store.set(f"split/{rank}", mine)
    if store.get("split/0").decode() != mine:
        raise ValueError(f"rank {rank} holds a part of another split than rank 0: copy the parts of one split")


# --- all ranks in one process -----------------------------------------------------------------------------------------

def _all_in_one(config: RunConfig, folder: Path, world: int, main: Main) -> int:
    """Be all ranks at once, each a thread: for a debugger, and for tests."""
    traces = [_trace(config, rank) for rank in range(world)]
    links = LocalLink.ring(traces)

    def work(rank: int) -> None:
        try:
            serve(build_stage(config, Part(folder / f"stage_{rank}"), traces[rank]), links[rank])
        except BaseException as error:
            links[rank].fail(PeerLost(f"rank {rank} failed: {error}"))
            raise

    threads = [threading.Thread(target=work, args=(rank,), name=f"rank {rank}", daemon=True)
               for rank in range(1, world)]
    for thread in threads:
        thread.start()
    code = _lead(config, folder, links[0], traces[0], main)
    for thread in threads:
        thread.join()
    for trace in traces:
        trace.close()
    _merge(config)
    return code


def _lead(config: RunConfig, folder: Path, link: Link, trace: NoTrace, main: Main) -> int:
    """Be rank 0; whatever happens but the loss of a peer, the ring is stopped at the end."""
    part = Part(folder / "stage_0")
    ring = build_ring(config, part, link, trace)
    code = 0
    try:
        decoder = build_decoder(config, part, ring, trace)
        text = None if config.prompt_ids else Text(part.folder)
        ring.start()
        main(Session(config, decoder, text, trace))
    except ValueError as error:
        if config.debug:
            traceback.print_exc()
        print(f"flowspec: {error}", file=sys.stderr)
        code = WRONG
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("\nflowspec: stopped", file=sys.stderr)
        code = INTERRUPTED
    ring.stop()
    return code


def _trace(config: RunConfig, rank: int) -> NoTrace:
    return Trace(config.trace, rank) if config.trace else OFF


def _merge(config: RunConfig) -> None:
    """Join the traces of all ranks that wrote to this machine."""
    if config.trace:
        print(f"trace: {merge(config.trace)} (open it at https://ui.perfetto.dev)", file=sys.stderr)
