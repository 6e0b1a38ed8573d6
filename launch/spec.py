"""One rank as a configuration and its part of the split make it: sizes, device, number type, weights, cache slots.

It knows nothing about processes or rank numbers, and reads no weights.
"""
from __future__ import annotations

import os
import re
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Iterator

import torch
from torch import Tensor

from config.methods import METHODS
from config.run_config import RunConfig
from launch.folder import RENDEZVOUS
from model.llama import LlamaConfig
from model.weights.parts import Part
from model.weights.quant import probe, running_kind
from tp.links import Placement


def usable(name: str, key: str = "device=") -> torch.device:
    """The device of that name; `auto` is a CUDA device if there is one. Raises ValueError for one that is not here."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if count else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"{key}{name} is unknown: choose cpu, cuda or cuda:N")
    there = ", ".join(f"cuda:{number}" for number in range(count)) or "none that this torch can use"
    if name != "cpu" and int(name[len("cuda:"):] or 0) >= count:
        raise ValueError(f"{key}{name} is not here (CUDA devices: {there}): choose another, or {key}cpu")
    return torch.device(name)


def number_type(name: str, device: torch.device) -> torch.dtype:
    """The number type of that name; `auto` on a CPU is float32, in which a text does not depend on the method."""
    if name == "auto":
        name = "float16" if device.type == "cuda" else "float32"
    return getattr(torch, name)  # type: ignore[no-any-return]


def local_ranks(world: int) -> range:
    """The ranks of this machine, which load at the same time; on several hosts each has one."""
    if "RANK" not in os.environ or RENDEZVOUS in os.environ:
        return range(world)
    own = int(os.environ["RANK"])
    return range(own, own + 1)


@dataclass(frozen=True)
class RankSpec:
    """What a rank is built from. Everything else follows, and is worked out once."""

    config: RunConfig
    part: Part
    head: str = ""  # folder of a draft head to take in place of the split's

    @cached_property
    def sizes(self) -> LlamaConfig:
        """The hyperparameters of the whole model, for texts of up to `max_length` tokens."""
        return LlamaConfig.read(self.part.config).within(self.config.max_length)

    @cached_property
    def context(self) -> int:
        """The most tokens of prompt and answer together."""
        return min(self.config.max_length, self.sizes.context)

    @property
    def layers(self) -> int:
        """How many layers the rank holds, or shares; a small model's own do not count."""
        first, last = self.part.layers
        return last - first if self.drafter is None else 0

    @property
    def windows(self) -> tuple[int, ...]:
        """Behind how many positions each layer drops keys and values; 0 for never, as where texts are reused."""
        ours = map(self.sizes.window, range(*self.part.layers))
        cuts = not self.config.reuse
        return tuple(window if cuts and window < self.context else 0 for window in ours)

    @cached_property
    def slots(self) -> int:
        """How many nodes a cache holds: the text, and guesses that live, are under way or wait to be pruned."""
        tree = self.config.tree
        ranks = len(self.part.stages)
        grown = tree.expand.nodes + ranks * tree.idle.nodes
        layers = ranks * max(self.config.init_topk_pipedec, tree.run)
        return self.context + 8 * max(tree.init.nodes * self.trees_at_once, grown, layers)

    @property
    def copies(self) -> int:
        """How many copies of the model there are, for a method that has replicas."""
        return self.config.copies(len(self.part.stages))

    @property
    def partial(self) -> bool:
        """Whether the draft reads features of rows that are still under way, which stages report to rank 0."""
        return "spd" in self.sources and not self.config.replicated

    @property
    def reports(self) -> bool:
        """Whether its own stage reports: if it adds a feature; behind the last layer the segment itself is as early."""
        part = self.part
        return self.partial and bool(part.own_inner) and not part.member and part.layers[1] < self.sizes.layers

    @property
    def placement(self) -> Placement:
        """The placement of all ranks of the run."""
        part, config = self.part, self.config
        return Placement.of(part.stages, len(part.shares), self.copies, config.drafting_ranks, self.partial)

    @cached_property
    def drafter(self) -> int | None:
        """Which small model this rank holds in place of its part, counted from 0; None if it holds none."""
        return self.placement.drafter(self.part.rank)

    @cached_property
    def device(self) -> torch.device:
        """The device on which the rank computes."""
        if self.config.device != "auto":
            return torch.device(self.config.device)
        count = torch.cuda.device_count()
        return torch.device(f"cuda:{self.part.rank % count}" if count else "cpu")

    @cached_property
    def dtype(self) -> torch.dtype:
        """The number type in which the rank computes."""
        return number_type(self.config.dtype, self.device)

    @property
    def like(self) -> Tensor:
        """An empty tensor of `dtype` on `device`."""
        return torch.empty(0, dtype=self.dtype, device=self.device)

    @cached_property
    def quant(self) -> str:
        """The kind of weights that the layers run with; another than the split holds is refused."""
        return running_kind(self.config.quant, self.part.quant, self.part.folder)

    @property
    def quantizes(self) -> str:
        """The kind of weights that are made of plain ones while loading, or none."""
        return self.quant if self.part.quant == "none" else "none"

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources of the draft's guesses; none for a method that has no draft."""
        return () if METHODS[self.config.pipeline_type].draft == "none" else self.config.sources

    @property
    def small_models(self) -> list[Path]:
        """The folders of the small models that draft side by side: those that are named, or `draft` in rank 0's."""
        return [*map(Path, self.config.small_models)] or [self.part.folder / "draft"]

    @property
    def trees_at_once(self) -> int:
        """How many trees of the usual size make one."""
        return len(self.small_models) if "ssm" in self.sources else 1

    @property
    def draft_folder(self) -> Path:
        """The folder of a small model that drafts alone: as named, or `draft` in rank 0's."""
        return Path(self.config.draft_dir or self.part.folder / "draft")

    def draft_quant(self) -> str:
        """The kind of weights that a draft runs with; refused where this rank cannot compute them."""
        kind = self.quant if self.config.quant_draft else "none"
        probe(kind, self.dtype, self.device)
        return kind

    def prepare_torch(self) -> None:
        """Let torch compute no gradients in this process, with a fair share of the cores unless threads were given."""
        torch.set_grad_enabled(False)
        cores = os.cpu_count() or 1
        fair = max(1, cores // len(local_ranks(self.placement.world)))
        torch.set_num_threads(self.config.threads_per_rank or fair)


@contextmanager
def torch_as_it_was() -> Iterator[None]:
    """A pipeline computes no gradients and chooses its threads; the program around it gets its own settings back."""
    gradients = torch.is_grad_enabled()
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_grad_enabled(gradients)
        torch.set_num_threads(threads)
