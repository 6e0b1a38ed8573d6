"""Training of the bundled models by one process, or by several that accelerate connects over gloo.

The loop is that of train/course.py. Each process has one thread: for such narrow layers, two processes of one thread
are faster than one of two.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.multiprocessing as mp
from accelerate import Accelerator

from train import course
from train.course import Course

# By default freed pages return to the kernel, and faulting them in again costs as much as the arithmetic at this size.
SETTINGS = {"MALLOC_TRIM_THRESHOLD_": "8000000000", "MALLOC_MMAP_THRESHOLD_": "8000000000",
            "MALLOC_TOP_PAD_": "268435456",
            "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Hyperparameters(course.Hyperparameters):
    """The hyperparameters of one of the bundled models."""

    rate: float = 4e-3
    matrix_rate: float = 0.02
    warm_up: int = 60
    betas: tuple[float, float] = (0.9, 0.98)
    batch: int = 4  # rows per process and step
    processes: int = 2


def begin(plan: Hyperparameters, model: torch.nn.Module, work: Path) -> Course:
    """Return the training of one process, from its last checkpoint if one exists; rank 0 shows the bar and saves."""
    terms = {name: value for name, value in asdict(plan).items() if name != "saved_every"}
    return Course(plan, model, work / f"{plan.name}.pt", terms, Accelerator(cpu=True))


def join(rank: int, plan: Hyperparameters, port: int) -> None:
    """Prepare a training process: one thread, its seed, and the address of the others."""
    torch.set_num_threads(1)
    torch.manual_seed(plan.seed)
    if plan.processes > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(plan.processes),
                          LOCAL_WORLD_SIZE=str(plan.processes), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def launch(work: Callable[..., None], plan: Hyperparameters, *values: object) -> None:
    """Start `work(rank, plan, port, *values)` in each process and wait for the end."""
    os.environ.update(SETTINGS)  # before the start of the children, as a process reads them only at its start
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(work, args=(plan, port, *values), nprocs=plan.processes)
