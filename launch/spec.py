"""The specification of one rank, from a configuration and a part of the split: sizes, device, number type, cache slots.

It knows nothing about processes, and reads no weights.
"""
from __future__ import annotations

import os
import re
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Iterable, Iterator

import torch
from torch import Tensor

from cluster.folder import RENDEZVOUS
from config.methods import METHODS
from config.run_config import RunConfig
from model.llama import LlamaConfig
from model.native.layers import CACHED_CODES, reason_against
from model.native.structures import reason_against_numbers
from model.weights.blocks import QUANTIZERS
from model.weights.parts import Part
from model.weights.quant import BLOCKS, kind_on, running_quantization
from model.weights.quant_layers import probe
from tp.links import Placement


def device_named(name: str, key: str = "device=") -> torch.device:
    """Return the device of this name; `auto` is CUDA if available, else the CPU. Raises ValueError if it is missing."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if num_gpus else "cpu"

    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"{key}{name} is unknown: choose cpu, cuda or cuda:N")
    gpu_names = ", ".join(f"cuda:{number}" for number in range(num_gpus)) or "none that this torch can use"
    if name != "cpu" and int(name[len("cuda:"):] or 0) >= num_gpus:
        raise ValueError(f"{key}{name} does not exist here (CUDA devices: {gpu_names}): choose another, or {key}cpu")
    return torch.device(name)


def number_type(name: str, device: torch.device) -> torch.dtype:
    """Return the number type of this name; `auto` on a CPU is float32, in which no text depends on the method."""
    if name == "auto":
        name = "float16" if device.type == "cuda" else "float32"
    return getattr(torch, name)  # type: ignore[no-any-return]


def local_ranks(world: int) -> range:
    """Return the ranks of this machine, which load at the same time; of several hosts each has one."""
    if "RANK" not in os.environ or RENDEZVOUS in os.environ:
        return range(world)
    this_rank = int(os.environ["RANK"])
    return range(this_rank, this_rank + 1)


@dataclass(frozen=True)
class RankSpec:
    """The inputs that a rank is built from; its properties are derived from them."""

    config: RunConfig
    part: Part
    head: str = ""  # folder of a draft head that replaces the split's

    @cached_property
    def sizes(self) -> LlamaConfig:
        """The hyperparameters of the whole model, for texts of up to `max_length` tokens."""
        return LlamaConfig.read(self.part.config).within(self.config.max_length)

    @cached_property
    def context(self) -> int:
        """The maximum number of tokens of prompt and answer together."""
        return min(self.config.max_length, self.sizes.context)

    @property
    def layers(self) -> int:
        """The number of layers that the rank holds or shares; layers of small models do not count."""
        first, last = self.part.layers
        return last - first

    @property
    def windows(self) -> tuple[int, ...]:
        """The number of positions after which each layer drops keys and values; 0 for never, as with `reuse`."""
        return dropping_windows(self.config, self.sizes, range(*self.part.layers))

    @cached_property
    def slots(self) -> int:
        """The number of nodes that a cache holds: the text, and guesses that are live, in flight or not yet pruned.

        On long wires all live guesses of `streaming` may be in flight, and as many dead ones before their prune.
        """
        tree = self.config.tree
        num_ranks = len(self.part.stages)
        expanded_nodes = tree.expand.nodes + num_ranks * tree.idle.nodes
        layer_nodes = num_ranks * max(self.config.init_topk_pipedec, tree.run)
        tree_nodes = 8 * max(tree.init.nodes * self.trees_at_once, expanded_nodes, layer_nodes)
        return self.context + max(tree_nodes, 2 * tree.stream.nodes)

    @property
    def copies(self) -> int:
        """The number of copies of the model, for a method that has replicas."""
        return self.config.copies(len(self.part.stages))

    @property
    def placement(self) -> Placement:
        """The placement of all ranks of the run."""
        part = self.part
        return Placement.of(part.stages, len(part.shares), self.copies)

    @cached_property
    def device(self) -> torch.device:
        """The device on which the rank computes."""
        if self.config.device != "auto":
            return torch.device(self.config.device)
        num_gpus = torch.cuda.device_count()
        return torch.device(f"cuda:{self.part.rank % num_gpus}" if num_gpus else "cpu")

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
        """The kind of weights that the layers compute with; raises ValueError if the split holds another kind."""
        kind = self._wanted_quant
        return "none" if kind == BLOCKS and not self.has_native_layers else kind

    @cached_property
    def _wanted_quant(self) -> str:
        """Like `quant`, if native kernels compute."""
        keeps_blocks = self.config.quant == "auto" and self._kind == "none" and self.part.has_blocks
        return BLOCKS if keeps_blocks or self._kind in QUANTIZERS else self._kind

    @cached_property
    def _kind(self) -> str:
        """The kind to which weights are quantized on this device, now or at the split; "none" if the model's stay."""
        quantization = running_quantization(self.config.quant, self.part.quant, self.part.folder)
        return kind_on(self.device, quantization)

    @property
    def quantizes(self) -> str:
        """The kind to which weights are quantized while loading, or "none"; a split has no int8 of bitsandbytes."""
        return self._kind if self.part.quant == "none" or self._kind == "int8" else "none"

    @property
    def reason_for_torch(self) -> str:
        """Why torch computes this rank's layers; empty if native kernels do."""
        if self.config.kernel != "native":
            return f"kernel={self.config.kernel}"
        if len(self.part.shares) > 1:
            return "ranks share them"
        return reason_against(self.sizes, self.dtype, self.device, self._wanted_quant)

    @property
    def has_native_layers(self) -> bool:
        """Whether native kernels compute its layers: whole, or at least their products."""
        is_alone = len(self.part.shares) == 1
        return is_alone and self.has_native_products(self._wanted_quant)

    @property
    def code_type(self) -> torch.dtype | None:
        """The codes of keys and values; None: they have the rank's number type."""
        return codes_of(self.config.quant_kv, not self.reason_for_torch)

    def has_native_products(self, kind: str) -> bool:
        """Whether native kernels compute this rank's linear layers outside of a stage, with this kind of weights."""
        reason = reason_against_numbers(self.dtype, self.device, kind, self.sizes.hidden)
        return self.config.kernel == "native" and not reason

    def keeps_blocks(self, name: str) -> bool:
        """Whether a weight outside of the layers stays in blocks, which native kernels read."""
        return self.part.is_in_blocks(name) and self.has_native_products(BLOCKS)

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources of the draft's guesses; empty for a method without a draft."""
        return () if METHODS[self.config.pipeline_type].draft == "none" else self.config.sources

    @property
    def small_models(self) -> list[Path]:
        """The folders of the small models that draft together: as given, or `draft` in rank 0's folder."""
        return [*map(Path, self.config.small_models)] or [self.part.folder / "draft"]

    @property
    def trees_at_once(self) -> int:
        """The number of trees of the configured size that are merged into one."""
        return len(self.small_models) if "ssm" in self.sources else 1

    @property
    def draft_folder(self) -> Path:
        """The folder of a single small model that drafts: as given, or `draft` in rank 0's folder."""
        return Path(self.config.draft_dir or self.part.folder / "draft")

    def draft_quant(self) -> str:
        """Return the kind of weights of a draft; raises ValueError if this rank cannot compute with them."""
        kind = self._kind if self.config.quant_draft else "none"
        probe(kind, self.dtype, self.device)
        return kind

    def prepare_torch(self) -> None:
        """Disable gradients in this process; set torch's threads as given, or to a fair share of the cores."""
        torch.set_grad_enabled(False)
        num_cores = os.cpu_count() or 1
        fair_share = max(1, num_cores // len(local_ranks(self.placement.world)))
        torch.set_num_threads(self.config.threads_per_rank or fair_share)


def dropping_windows(config: RunConfig, sizes: LlamaConfig, layers: Iterable[int]) -> tuple[int, ...]:
    """Return the number of positions after which each of these layers drops what it keeps; 0 for never."""
    max_window = 0 if config.reuse else min(config.max_length, sizes.context) - 1
    return tuple(window if window <= max_window else 0 for window in map(sizes.window, layers))


def codes_of(quant_kv: str, is_native: bool) -> torch.dtype | None:
    """Return the codes of keys and values that a key says; None: they have the rank's number type."""
    if quant_kv == "auto":
        return CACHED_CODES if is_native else None
    return None if quant_kv == "none" else getattr(torch, quant_kv)


@contextmanager
def torch_as_it_was() -> Iterator[None]:
    """Restore torch's settings of gradients and threads at the end, since a pipeline changes both."""
    had_gradients = torch.is_grad_enabled()
    num_threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_grad_enabled(had_gradients)
        torch.set_num_threads(num_threads)
