"""The training loop: gradient steps with a progress bar, and a checkpoint from which the same loop continues.

It does not know what is learned. A step is a function of the model and the step's number only, so an interrupted course
ends with the same bits as an uninterrupted one. Processes, devices, gradients of several processes and their
accumulation are those of accelerate. Its `save_state` is not used: it writes a folder file by file, so that an
interruption could leave half of it, and its `load_state` unpickles what a caller has added.
"""
from __future__ import annotations

import math
import time
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Collection, Mapping, NamedTuple, Sequence, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from launch.progress import ProgressBar
from train.terms import Terms, check, store

Lesson = Callable[[int], Mapping[str, float]]  # adds gradients to the model for a batch; returns figures with "loss"
TrainingRow = TypeVar("TrainingRow")
WEIGHT_DECAY = 0.01  # weight decay
NUM_SHOWN = 50  # number of latest steps that the bar averages


def add_gradients(loss: Tensor) -> None:
    """Add the gradients of a loss to the parameters."""
    loss.backward()  # type: ignore[no-untyped-call]


class BatchShare(NamedTuple):
    """The part of each batch that this process reads, and how it adds gradients; a step takes their mean."""

    process: int = 0
    num_processes: int = 1
    backward: Callable[[Tensor], None] = add_gradients

    def of(self, rows: Sequence[TrainingRow]) -> list[tuple[int, TrainingRow]]:
        """Return this process's rows of a batch, each with its number in the batch."""
        return list(enumerate(rows))[self.process::self.num_processes]

    @property
    def writes(self) -> bool:
        """Whether this process shows and writes the results, which all processes have."""
        return self.process == 0


WHOLE = BatchShare()  # of a training in a single process


def share_of(accelerator: Accelerator) -> BatchShare:
    """Return this process's share of a batch."""
    return BatchShare(accelerator.process_index, accelerator.num_processes, accelerator.backward)


@dataclass(frozen=True)
class Hyperparameters:
    """The length of a training, and its learning rates."""

    name: str
    steps: int
    rate: float  # of AdamW
    matrix_rate: float = 0.0  # of Muon, for the matrices between embedding and vocabulary; 0: AdamW for all
    warm_up: int = 100  # steps
    own_steps: int = 0  # number of last steps with a warm-up of their own and half the rate
    betas: tuple[float, float] = (0.9, 0.95)
    seed: int = 0
    saved_every: int = 100  # steps


def optimizers(model: nn.Module, plan: Hyperparameters) -> list[torch.optim.Optimizer]:
    """Return AdamW, and Muon for the matrices if `matrix_rate` is given; frozen parameters belong to neither."""
    matrices: list[nn.Parameter] = []  # between embeddings and vocabulary
    other_parameters: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_inner = parameter.ndim == 2 and "embed_" not in name and "lm_head" not in name
            (matrices if plan.matrix_rate and is_inner else other_parameters).append(parameter)

    adam = torch.optim.AdamW(other_parameters, lr=plan.rate, betas=plan.betas, weight_decay=WEIGHT_DECAY)
    if not matrices:
        return [adam]
    muon = torch.optim.Muon(matrices, lr=plan.matrix_rate, weight_decay=WEIGHT_DECAY, momentum=0.95)
    return [adam, muon]


def rate_at(step: int, plan: Hyperparameters) -> float:
    """Return the rate of a step as a fraction of the highest: linear up, flat, then linear down to zero over the second
    half. The last `own_steps` repeat this schedule, half as high."""
    first_steps = plan.steps - plan.own_steps
    if step < first_steps:
        return _slope(step, first_steps, plan.warm_up)
    return 0.5 * _slope(step - first_steps, plan.own_steps, plan.warm_up)


def _slope(step: int, num_steps: int, warm_up: int) -> float:
    """Return the rate of a step out of `num_steps`, as a fraction between 0 and 1."""
    return min((step + 1) / warm_up, 1.0, 2.0 * (num_steps - step) / num_steps)


class Course:
    """A model, its optimizers and their current step; it can be saved and resumed.

    `terms` are all other settings that determine the result; a checkpoint with other terms is rejected. Of several
    processes of the `accelerator` only one shows the bar and writes the checkpoint.
    """

    def __init__(self, plan: Hyperparameters, model: nn.Module, path: Path, terms: Terms | None = None,
                 accelerator: Accelerator | None = None) -> None:
        self.plan, self.model, self.path = plan, model, path
        self.accelerator = accelerator or Accelerator(cpu=True)
        self.share = share_of(self.accelerator)
        self.terms = dict(terms or {})
        self.optimizers = [self.accelerator.prepare_optimizer(optimizer) for optimizer in optimizers(model, plan)]
        self.step = 0
        self.seconds = 0.0
        if path.exists():
            self._resume()

    @property
    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def _resume(self) -> None:
        try:
            checkpoint = torch.load(self.path, weights_only=True, map_location="cpu")
            saved_terms, saved_parameters = checkpoint["terms"], checkpoint["model"]
        except Exception as error:  # torch does not document what it raises on a damaged file
            raise ValueError(f"{self.path} cannot be read ({str(error).splitlines()[0]}); delete it to begin "
                             "again") from None

        check(self.path, saved_terms, self.terms, "another folder")
        with torch.no_grad():
            for name, parameter in self._trained.items():
                parameter.copy_(saved_parameters[name])
        for optimizer, saved_state in zip(self.optimizers, checkpoint["optimizers"]):
            optimizer.load_state_dict(saved_state)
        self.step, self.seconds = checkpoint["step"], checkpoint["seconds"]

    def save(self) -> None:
        """Write the checkpoint."""
        store(self.path, {
            "model": {name: parameter.detach() for name, parameter in self._trained.items()},
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "seconds": self.seconds,
            "terms": self.terms})

    def advance(self) -> None:
        """Take one gradient step."""
        self._average()
        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)

        max_rates = (self.plan.rate, self.plan.matrix_rate)
        for optimizer, max_rate in zip(self.optimizers, max_rates):
            for group in optimizer.param_groups:
                group["lr"] = max_rate * rate_at(self.step, self.plan)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

        self.step += 1

    def _average(self) -> None:
        """Replace the gradients of all processes by their mean, with one all-reduce of a single flat tensor."""
        if self.share.num_processes == 1:
            return

        parameters = list(self._trained.values())
        gradients = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                     for parameter in parameters]
        flat_gradient = torch.cat([gradient.reshape(-1) for gradient in gradients])
        mean_flat = self.accelerator.reduce(flat_gradient, reduction="mean")
        mean_parts = mean_flat.split([gradient.numel() for gradient in gradients])
        for parameter, mean_gradient in zip(parameters, mean_parts):
            parameter.grad = mean_gradient.view_as(parameter)

    def run(self, lesson: Lesson) -> None:
        """Advance to the last step, each of one batch or of as many as accelerate accumulates.

        Raise ValueError if a loss is not finite.
        """
        num_batches = self.accelerator.gradient_accumulation_steps
        plan, started_at = self.plan, time.monotonic() - self.seconds
        recent_figures: deque[Mapping[str, float]] = deque(maxlen=NUM_SHOWN)

        with ProgressBar(total=plan.steps, initial=self.step, desc=plan.name, unit="step",
                         disable=not self.share.writes, mininterval=1) as progress_bar:
            while self.step < plan.steps:
                for batch_index in range(num_batches):
                    recent_figures.append(lesson(self.step * num_batches + batch_index))
                    if not math.isfinite(recent_figures[-1]["loss"]):
                        raise ValueError(f"the loss is not finite at step {self.step}; begin again with a lower rate")

                self.advance()
                self.seconds = time.monotonic() - started_at
                progress_bar.set_postfix(_means(recent_figures), refresh=False)
                progress_bar.update()

                is_due = self.step % plan.saved_every == 0 or self.step == plan.steps
                if self.share.writes and is_due:
                    self.save()


def _means(recent_figures: Collection[Mapping[str, float]]) -> dict[str, str]:
    """Return the mean of each figure over these steps, formatted for the bar."""
    sums: Counter[str] = Counter()
    for figures in recent_figures:
        sums.update(figures)  # type: ignore[arg-type]
    return {name: f"{total / len(recent_figures):.3f}" for name, total in sums.items()}
