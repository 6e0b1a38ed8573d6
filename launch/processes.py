"""torchrun's agent as a person wants to meet it: a process for every rank of this machine, one sentence at the end.

It knows nothing about models; what a rank does is told in launch/run.py.
"""
from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import fields
from typing import Any, MutableMapping, NoReturn, Sequence

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

WRONG, LOST, STOPPED = 2, 75, 128  # exit codes: bad input, a peer is gone, ended by a signal (whose number is added)
INTERRUPTED = STOPPED + signal.SIGINT
LAUNCHER = "FLOWSPEC_LAUNCHER"  # in the environment of a rank: the process that it shall not outlive
GRACE = 3  # seconds for a rank to end in good order, before it is killed
OPTIONS = {option.name for option in fields(LaunchConfig)}  # of this torch's agent


def spawn(command: Sequence[str], address: str, port: int, world: int) -> int:
    """Run `python -m command` once for each rank; the exit code, once all have ended."""
    found = usable_port(address, port)
    if "local_addr" not in OPTIONS:  # before torch 1.13, ranks without a port would meet where the host's name leads
        port = found
    _prepare(os.environ)
    logging.disable(logging.CRITICAL)  # the agent would tell every end in tracebacks of its own
    _quicken()
    _hold_interrupts()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        elastic_launch(_launch_config(address, port, world), sys.executable)("-m", *command)
    except ChildFailedError as error:
        return _verdict({rank: failure.exitcode for rank, failure in error.failures.items()})
    except SignalException as error:
        return STOPPED + error.sigval
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return 0


def usable_port(address: str, port: int) -> int:
    """The port itself, or a free one if it is 0."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
            return int(probe.getsockname()[1])
        except OSError as error:
            raise ValueError(f"port {port} of {address} cannot be used ({error.strerror}): choose another master_port, "
                             "or 0 for any free one") from error


def _prepare(environment: MutableMapping[str, str]) -> None:
    """What every rank of this machine shall find in its environment."""
    environment[LAUNCHER] = str(os.getpid())
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a broken connection is told in our words
    if any(name == "lo" for _, name in socket.if_nameindex()):
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else it takes what the host's name resolves to


def _launch_config(address: str, port: int, world: int) -> LaunchConfig:
    wanted: dict[str, Any] = {
        "min_nodes": 1, "max_nodes": 1, "nproc_per_node": world, "run_id": f"flowspec-{os.getpid()}",
        "rdzv_backend": "static" if port else "c10d", "rdzv_endpoint": f"{address}:{port}", "local_addr": address,
        "rdzv_configs": {"rank": 0} if port else {}, "max_restarts": 0, "monitor_interval": 0.1,
        "signals_to_handle": "SIGINT,SIGTERM,SIGHUP,SIGQUIT"}
    return LaunchConfig(**{name: value for name, value in wanted.items() if name in OPTIONS})


def _quicken() -> None:
    """After a failure the agent gives the other ranks 30 seconds, which one that hangs would use up."""
    close = PContext.close

    def close_soon(context: PContext, death_sig: signal.Signals | None = None, timeout: int = GRACE) -> None:
        close(context, death_sig, min(timeout, GRACE))

    PContext.close = close_soon  # type: ignore


def _hold_interrupts() -> None:
    """Let Ctrl-C end this process, and wait in the ranks, which inherit the mask, until rank 0 can obey it.

    A rank that still imports its modules would answer with a traceback. The agent's own handler is woken by a thread
    without the mask.
    """
    threading.Thread(target=threading.Event().wait, name="interrupts", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def _verdict(codes: dict[int, int]) -> int:
    """The exit code of a run in which ranks failed; those that could not tell their end themselves are named here."""
    wrong = [code for code in codes.values() if code > 0 and code != LOST]
    if not wrong and codes.get(0) != LOST:
        for rank, code in codes.items():
            if code < 0 and -code != signal.SIGTERM:
                print(f"\nflowspec: rank {rank} was killed ({signal.Signals(-code).name})", file=sys.stderr)
    return wrong[0] if wrong else LOST


def die(code: int) -> NoReturn:
    """End this process at once, without waiting for threads that wait for peers."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Agent:
    """The meeting of ranks that torchrun's agent has started, as a rank sees it."""

    apart = False  # they share a machine and a terminal
    names: Sequence[str] = ()

    def connect(self) -> None:
        """Join the process group of all ranks."""
        live_no_longer_than_launcher()
        dist.init_process_group("gloo")


def live_no_longer_than_launcher() -> None:
    """If torchrun's agent is killed, so is this rank, even before there is a pulse that would notice."""
    launcher = int(os.environ.get(LAUNCHER) or os.getppid())

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(1)
        die(LOST)

    threading.Thread(target=watch, name="launcher", daemon=True).start()
