"""Memory before loading: what the ranks of a machine will take, what is free, and what would fit if that is too little.

It reads the headers of weight files and no weights. Sizes follow from the configuration; the workspace is an estimate
from above.
"""
from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Mapping, Sequence

import torch

from config.methods import METHODS
from config.run_config import RunConfig
from launch.build import capacity, device_of, dtype_of, quant_of
from model.checkpoint import Checkpoint, Form
from model.llama import LlamaConfig
from model.quant import PIECE, Recast
from model.weights import EMBED, HEAD, Part
from tp.shares import shares

GB = 1e9
MEMINFO = Path("/proc/meminfo")
SHORTEST = 64  # tokens: a smaller max_length is no advice
SCRATCH = 40  # bytes for each weight of a piece that is being quantized
KEPT = 80_000_000  # bytes that malloc and the libraries of kernels keep for themselves
LIBRARY = 100_000_000  # and bitsandbytes
PACKING = 7  # bytes for each weight of a linear that is being put in the order that a CPU's kernel wants
SMALLER = ({"dtype": "bfloat16"}, {"quant": "int8"}, {"quant": "nf4"}, {"quant": "nf4", "dtype": "bfloat16"})


@dataclass(frozen=True)
class Need:
    """Bytes that a rank takes beside Python and torch themselves."""

    weights: int
    cache: int
    workspace: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.workspace

    def __add__(self, other: Need) -> Need:
        return Need(self.weights + other.weights, self.cache + other.cache, self.workspace + other.workspace)

    def __str__(self) -> str:
        return (f"{self.total / GB:.2f} GB (weights {self.weights / GB:.2f}, cache {self.cache / GB:.2f}, workspace "
                f"{self.workspace / GB:.2f})")


def need(config: RunConfig, part: Part) -> Need:
    """Of one rank: of its layers, of the LM head and the draft, or of both where there is no pipeline."""
    sizes = LlamaConfig.read(part.config)
    width, slots = _width(config, part), capacity(config, sizes, len(part.stages))
    found = Need(0, 0, 0)
    if part.layers[0] < part.layers[1]:
        found += _layers(config, part, slots, width)
    if HEAD in part.weights.names():
        found += _head(config, part, slots, width)
    return found


def _layers(config: RunConfig, part: Part, slots: int, width: int) -> Need:
    """Of a stage, or of the rank's share of it."""
    kind = quant_of(config, part)
    making = kind if part.quant == "none" else "none"
    whole = LlamaConfig.read(part.config)
    sizes = shares(whole, part.shares)[part.member].sizes(whole)
    forms = Recast(part.weights, {name: name for name in part.weights.names() if name != HEAD}, making).forms
    return Need(_loaded(forms, width), _cache(sizes, part.layers[1] - part.layers[0], slots, width),
                max(_step(config, sizes, slots, width, kind), _loading(part.weights, making))
                + KEPT + (LIBRARY + PACKING * sizes.hidden * sizes.intermediate if kind != "none" else 0))


def _head(config: RunConfig, part: Part, slots: int, width: int) -> Need:
    """Of the LM head and the draft."""
    sizes = LlamaConfig.read(part.config)
    vocab = _loaded({HEAD: part.weights.form(HEAD)}, width)
    logits = _rows(config) * sizes.vocab * max(width, 4 if config.temperature == 0 else 32)  # sampled in float64
    rest = Need(vocab, 0, max(logits, vocab))
    draft = _draft(config, part, sizes, slots, width)
    return rest + draft if draft else rest


def _draft(config: RunConfig, part: Part, base: LlamaConfig, slots: int, width: int) -> Need | None:
    folder = Path(config.draft_dir) if config.draft_dir else part.folder / "draft"
    if "none" in (METHODS[config.pipeline_type].draft, config.draft):
        return None
    if config.draft == "eagle" and part.eagle:
        folder = part.eagle
    if not (folder / "config.json").is_file():
        return None  # it will be missed when the draft is built
    source = Checkpoint(folder)
    sizes, forms = replace(LlamaConfig.read(source.config), context=base.context), _forms(source)
    if config.draft == "eagle" and "embed_tokens.weight" not in forms:
        forms[EMBED] = part.weights.form(HEAD)
    layers = 1 if config.draft == "eagle" else sizes.layers
    return Need(_loaded(forms, width), _cache(sizes, layers, slots, width),
                max(_step(config, sizes, slots, width, "none"), _loading(source, "none")))


def _width(config: RunConfig, part: Part) -> int:
    return torch.empty(0, dtype=dtype_of(config, part)).element_size()


def _forms(source: Checkpoint) -> dict[str, Form]:
    return {name: source.form(name) for name in source.names()}


def _loaded(forms: Mapping[str, Form], width: int) -> int:
    """Weights in the type of the run; those that are quantized, and their scales, keep their own."""
    return sum(form.bytes if name.endswith(".scale") or not form.dtype.is_floating_point
               else math.prod(form.shape) * width for name, form in forms.items())


def _loading(source: Checkpoint, making: str) -> int:
    """What loading takes for a while: a tensor as it is read and as it is changed, and the making of quantized ones."""
    largest = max((source.form(name) for name in source.names()), key=lambda form: form.bytes)
    return 2 * largest.bytes + (SCRATCH * min(PIECE, math.prod(largest.shape)) if making != "none" else 0)


def _cache(sizes: LlamaConfig, layers: int, slots: int, width: int) -> int:
    return 2 * layers * sizes.kv_heads * slots * sizes.head_dim * width


def _rows(config: RunConfig) -> int:
    """Of the largest segment that is to be expected."""
    return max(config.tree.chunk, config.tree.init.nodes + 1, config.init_topk_pipedec)


def _step(config: RunConfig, sizes: LlamaConfig, slots: int, width: int, kind: str) -> int:
    """What a segment takes beside weights and cache, and the tables of positions."""
    rows, heads = _rows(config), sizes.heads * sizes.head_dim
    tables = 2 * sizes.context * sizes.head_dim * (width + 4) if sizes.family.rotary else 0
    step = rows * (3 * sizes.intermediate + 4 * sizes.hidden + 6 * heads) * max(width, 4)
    attention = rows * slots * (2 * sizes.heads * 4 + 2 * width)  # scores, and the mask with room to grow
    unfolded = sizes.hidden * sizes.intermediate * max(width, 4) if kind != "none" else 0
    return tables + step + attention + unfolded


def free(device: torch.device) -> int:
    """Bytes that this process could still get there."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if MEMINFO.is_file():
        for line in MEMINFO.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def local_ranks(world: int) -> range:
    """The ranks that load on this machine at the same time."""
    if "RANK" not in os.environ:
        return range(world)
    first = int(os.environ["RANK"]) - int(os.environ.get("LOCAL_RANK", "0"))
    return range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def check_memory(config: RunConfig, parts: Sequence[Part], mine: Sequence[Part], tell: bool = True) -> None:
    """Refuse to load `parts`, all ranks of this machine, if on a device of `mine` they do not fit; may tell of `mine`.

    It is called before ranks meet, so before any of them loads: what is free is free for all of them.
    """
    for device in {device_of(config, part) for part in mine}:
        there = [part for part in parts if device_of(config, part) == device]
        left = free(device)
        for part in (part for part in mine if tell and part in there):
            print(f"rank {part.rank} needs {need(config, part)}; {device} has {left / GB:.2f} GB free for "
                  f"{len(there)} rank{'s' * (len(there) > 1)}", file=sys.stderr)
        total = sum((need(config, part) for part in there), Need(0, 0, 0))
        if total.total > left:
            raise ValueError(f"rank{'s' * (len(there) > 1)} {', '.join(str(part.rank) for part in there)} need {total} "
                             f"of memory on {device}, which has {left / GB:.2f} GB free: "
                             f"{advice(config, there, left)}")


def advice(config: RunConfig, parts: Sequence[Part], left: int) -> str:
    """What would fit: a smaller max_length, smaller weights, or more devices."""
    def fits(**change: object) -> bool:
        smaller = replace(config, **change)  # type: ignore[arg-type]
        return sum(need(smaller, part).total for part in parts) <= left

    if fits(max_length=SHORTEST):
        low, high = SHORTEST, config.max_length  # fits, does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(max_length=middle) else (low, middle)
        return f"give max_length={low} or less, or end other programs"
    held = {part.quant for part in parts if part.layers[0] < part.layers[1]}
    for change in SMALLER:
        if ("quant" not in change or held == {"none"}) and fits(**change):
            return f"give {' '.join(f'{key}={value}' for key, value in change.items())}"
    return f"{_spread(config, parts, left)}, or free memory"


def _spread(config: RunConfig, parts: Sequence[Part], left: int) -> str:
    """How many devices like this one would do."""
    needs = [need(config, part) for part in parts]
    if len(parts) > 1:
        if max(each.total for each in needs) <= left:
            return f"spread these ranks over {-(-sum(each.total for each in needs) // left)} such devices or more"
        parts = [max(parts, key=lambda part: need(config, part).total)]
    biggest, layers = need(config, parts[0]), parts[0].layers[1] - parts[0].layers[0]
    fixed = biggest.workspace
    if not layers or (biggest.total - fixed) // layers + fixed > left:
        return "not even one layer fits: take a device with more memory, or a smaller model"
    whole = LlamaConfig.read(parts[0].config).layers * (biggest.total - fixed) // layers
    return f"split the model into {-(-whole // (left - fixed))} stages or more, each on a device of its own"
