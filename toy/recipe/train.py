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

from train.course import Course, Hyperparameters

# By default freed pages return to the kernel, and faulting them in again costs as much as the arithmetic at this size.
PROCESS_SETTINGS = {
    "MALLOC_TRIM_THRESHOLD_": "8000000000",
    "MALLOC_MMAP_THRESHOLD_": "8000000000",
    "MALLOC_TOP_PAD_": "268435456",
    "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class ToyHyperparameters(Hyperparameters):
    """The hyperparameters of one of the bundled models."""

    rate: float = 4e-3
    matrix_rate: float = 0.02
    warm_up: int = 60
    betas: tuple[float, float] = (0.9, 0.98)
    batch: int = 4  # rows per process and step
    processes: int = 2

    def batch_number(self, step: int, rank: int) -> int:
        """Return the number of a process's batch among the batches of all processes."""
        return step * self.processes + rank


def begin(plan: ToyHyperparameters, model: torch.nn.Module, work_dir: Path) -> Course:
    """Return the training of one process, from its last checkpoint if one exists; rank 0 shows the bar and saves."""
    terms = {name: value for name, value in asdict(plan).items() if name != "saved_every"}
    return Course(plan, model, work_dir / f"{plan.name}.pt", terms, Accelerator(cpu=True))


def join(rank: int, plan: ToyHyperparameters, port: int) -> None:
    """Prepare a training process: one thread, its seed, and the address of the others."""
    torch.set_num_threads(1)
    torch.manual_seed(plan.seed)
    if plan.processes > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(plan.processes),
                          LOCAL_WORLD_SIZE=str(plan.processes), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def launch(train_process: Callable[..., None], plan: ToyHyperparameters, *more_arguments: object) -> None:
    """Start `train_process(rank, plan, port, *more_arguments)` in each process and wait for the end."""
    os.environ.update(PROCESS_SETTINGS)  # before the start of the children, as a process reads them only at its start
    with socket.socket() as free_socket:
        free_socket.bind(("127.0.0.1", 0))
        port = free_socket.getsockname()[1]
    mp.spawn(train_process, args=(plan, port, *more_arguments), nprocs=plan.processes)
