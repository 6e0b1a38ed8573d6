"""The training loop: one process or several that average their gradients over gloo. It does not know what is learnt.

One thread a process: two processes of one thread are faster than one of two, for layers as thin as these.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tqdm import tqdm

from toy.recipe.pack import Rows

# Freed pages go back to the kernel by default, and faulting them in again costs as much as the arithmetic at this size.
SETTINGS = {"MALLOC_TRIM_THRESHOLD_": "8000000000", "MALLOC_MMAP_THRESHOLD_": "8000000000",
            "MALLOC_TOP_PAD_": "268435456",
            "OMP_NUM_THREADS": "1"}
SAVED_EVERY = 100

Lesson = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # ids and weights of a batch -> loss


@dataclass(frozen=True)
class Plan:
    """How one model is trained."""

    name: str
    steps: int
    batch: int = 4  # rows a process takes each step
    processes: int = 2
    matrix_rate: float = 0.02
    other_rate: float = 4e-3
    warm_up: int = 60
    seed: int = 0


def optimizers(model: torch.nn.Module, plan: Plan) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between embedding and vocabulary; AdamW for these two, norms and biases."""
    learnt = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [p for name, p in learnt if p.ndim == 2 and "embed_tokens" not in name and "lm_head" not in name]
    chosen = {id(p) for p in matrices}
    return [torch.optim.Muon(matrices, lr=plan.matrix_rate, weight_decay=0.01, momentum=0.95),
            torch.optim.AdamW([p for _, p in learnt if id(p) not in chosen], lr=plan.other_rate, betas=(0.9, 0.98),
                              weight_decay=0.01)]


def rate(step: int, plan: Plan) -> float:
    """Linear up, flat, then linear down to nothing over the second half."""
    return min((step + 1) / plan.warm_up, 1.0, 2.0 * (plan.steps - step) / plan.steps)


def average_gradients(model: torch.nn.Module) -> None:
    """One all-reduce of all gradients in a row."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.reshape(-1) for g in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients])):
        gradient.copy_(part.view_as(gradient))


class Course:
    """A model, its optimizers and the step they have reached; it can be put away and taken up again."""

    def __init__(self, plan: Plan, model: torch.nn.Module, path: Path) -> None:
        self.plan, self.model, self.path = plan, model, path
        self.steppers, self.step, self.seconds = optimizers(model, plan), 0, 0.0
        if path.exists():
            state = torch.load(path, weights_only=True)
            model.load_state_dict(state["model"])
            for stepper, saved in zip(self.steppers, state["optimizers"]):
                stepper.load_state_dict(saved)
            self.step, self.seconds = state["step"], state["seconds"]

    def save(self) -> None:
        state = {"model": self.model.state_dict(), "optimizers": [o.state_dict() for o in self.steppers],
                 "step": self.step,
                 "seconds": self.seconds}
        torch.save(state, self.path.with_suffix(".part"))
        self.path.with_suffix(".part").replace(self.path)  # an interruption leaves the older checkpoint whole

    def advance(self, loss: torch.Tensor) -> None:
        """One step along the gradient."""
        loss.backward()
        if self.plan.processes > 1:
            average_gradients(self.model)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for stepper, top in zip(self.steppers, (self.plan.matrix_rate, self.plan.other_rate)):
            for group in stepper.param_groups:
                group["lr"] = top * rate(self.step, self.plan)
            stepper.step()
            stepper.zero_grad(set_to_none=False)
        self.step += 1

    def run(self, rows: Rows, lesson: Lesson, rank: int) -> None:
        """To the last step; rank 0 shows the way and keeps the checkpoints."""
        plan, begin = self.plan, time.monotonic() - self.seconds
        with tqdm(total=plan.steps, initial=self.step, desc=plan.name, disable=rank > 0, mininterval=5) as bar:
            while self.step < plan.steps:
                ids, weights = rows.batch(self.step, plan.batch, rank, plan.processes)
                loss = lesson(ids, weights)
                self.advance(loss)
                bar.set_postfix(loss=f"{float(loss.detach()):.3f}", refresh=False)
                bar.update()
                self.seconds = time.monotonic() - begin
                if rank == 0 and (self.step % SAVED_EVERY == 0 or self.step == plan.steps):
                    self.save()


def join(rank: int, plan: Plan, port: int) -> None:
    """What a training process does first."""
    torch.set_num_threads(1)
    torch.manual_seed(plan.seed)
    if plan.processes > 1:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=plan.processes)


def launch(work: Callable[..., None], plan: Plan, *values: object) -> None:
    """Start `work(rank, plan, port, *values)` in each process and wait for the end."""
    os.environ.update(SETTINGS)  # read when a process starts, so it must stand here before the children do
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(work, args=(plan, port, *values), nprocs=plan.processes)
