"""The rendezvous of ranks on one machine: how a rank finds the others, and ends with the launcher that started it.

It knows nothing about what a rank does afterwards. On several hosts see `hosts/rendezvous.py`.
"""
from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import torch.distributed as dist

from launch.console import LOST, die
from launch.folder import Folder, hold
from launch.fork_server import LAUNCHER, LOOK, Ranks
from launch.processes import FOLDER, GRACE, environment_kept, keep_on_loopback, launched, noted_in, reason_of
from pipeline.failure import PeerLost, explain, guarded


def connect(rank: int, world: int) -> Any:
    """Join the process group of all ranks, whether `spawn` has started them or a person's own torchrun.

    Returns the store in which they write their heartbeats.
    """
    launcher = int(os.environ.get(LAUNCHER) or os.getppid())
    if launched():
        with suppress(OSError):  # gone, if the launcher is
            hold(os.environ[FOLDER])
    if os.getppid() != launcher:
        _end_as_orphan()
    guarded("launcher", partial(_end_with, launcher), lambda thread, error: die(LOST))
    try:
        if launched():
            return join(os.environ[FOLDER], rank, world)
        if os.environ.get("LOCAL_WORLD_SIZE") == str(world):
            keep_on_loopback(os.environ)
        dist.init_process_group("gloo")
    except RuntimeError as error:
        raise PeerLost(f"rank {rank} could not connect to the others: {explain(error)}") from error
    return dist.distributed_c10d._get_default_store()


def join(folder: str, rank: int, world: int) -> Folder:
    """Join the process group of all ranks of this machine. Returns the store in which they write their heartbeats."""
    files = dist.FileStore(os.path.join(folder, "groups"), world)
    dist.init_process_group("gloo", store=files, rank=rank, world_size=world)
    return Folder(folder)


def join_beside(others: Ranks, folder: str, world: int) -> Folder:
    """`join` as rank 0, which has started the others itself; raises PeerLost, with the reason, if one ends instead."""
    joined: list[Folder] = []
    failed: list[BaseException] = []

    def join_as_0() -> None:
        joined.append(join(folder, 0, world))

    with environment_kept("GLOO_SOCKET_IFNAME"):
        os.environ.pop("GLOO_SOCKET_IFNAME", None)  # the way to other machines
        keep_on_loopback(os.environ)
        joining = guarded("join", join_as_0, lambda thread, error: failed.append(error))
        while joining.is_alive() and not others.ended():
            joining.join(LOOK)
    if joined:
        return joined[0]
    noted, ended = noted_in(folder), others.ended()
    if ended:
        raise PeerLost(reason_of(ended, noted))
    raise PeerLost(noted or f"rank 0 could not connect to the others: {explain(failed[0])}")


def _end_with(launcher: int) -> None:
    """If the launcher is killed, so is this rank, even before there is a heartbeat that would notice."""
    while os.getppid() == launcher:
        time.sleep(GRACE / 6)
    _end_as_orphan()


def _end_as_orphan() -> NoReturn:
    """End a rank without a launcher, together with the folder that nobody else can remove now."""
    if launched():
        # Who has just begun to connect in the folder must be done with that: torch waits for a file that is gone, and
        # lets no other thread run meanwhile.
        time.sleep(1)
        shutil.rmtree(os.environ[FOLDER], ignore_errors=True)
    die(LOST)
