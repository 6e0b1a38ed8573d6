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

from launch.spec import RankSpec
from model.checkpoint import Checkpoint, Form
from model.llama import LlamaConfig
from model.quant import PIECE, Recast
from model.weights import EMBED, HEAD
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


def need(spec: RankSpec) -> Need:
    """Of one rank: of its layers, of the LM head and the draft, or of both where there is no pipeline."""
    found = Need(0, 0, 0)
    if _layers(spec):
        found += _stage(spec)
    if HEAD in spec.part.weights.names():
        found += _head(spec)
    return found


def _layers(spec: RankSpec) -> int:
    """How many layers the rank holds, whole or a share of each."""
    first, last = spec.part.layers
    return last - first


def _stage(spec: RankSpec) -> Need:
    """Of a stage, or of the rank's share of it."""
    part, kind = spec.part, spec.quant
    sizes = shares(spec.sizes, part.shares)[part.member].sizes(spec.sizes)
    names = {name: name for name in part.weights.names() if name != HEAD}
    weights = _loaded(Recast(part.weights, names, spec.quantizes).forms, spec)
    kept = KEPT
    if kind != "none":
        kept += LIBRARY + PACKING * sizes.hidden * sizes.intermediate
    workspace = max(_step(spec, sizes, kind), _loading(part.weights, spec.quantizes))
    return Need(weights, _cache(spec, sizes, _layers(spec)), workspace + kept)


def _head(spec: RankSpec) -> Need:
    """Of the LM head, the features of the text, and the draft."""
    vocab = _loaded({HEAD: spec.part.weights.form(HEAD)}, spec)
    sampled = 4 if spec.config.temperature == 0 else 32  # in float64
    logits = _rows(spec) * spec.sizes.vocab * max(_width(spec), sampled)
    return Need(vocab, 0, max(logits, vocab)) + _draft(spec)


def _draft(spec: RankSpec) -> Need:
    config, part, nothing = spec.config, spec.part, Need(0, 0, 0)
    folder = Path(config.draft_dir) if config.draft_dir else part.folder / "draft"
    if spec.draft == "none":
        return nothing
    if spec.draft == "eagle" and part.eagle:
        folder = part.eagle
    if not (folder / "config.json").is_file():
        return nothing  # it will be missed when the draft is built
    source = Checkpoint(folder)
    sizes, forms = replace(LlamaConfig.read(source.config), context=spec.sizes.context), _forms(source)
    if spec.draft == "eagle" and "embed_tokens.weight" not in forms:
        forms[EMBED] = part.weights.form(HEAD)
    layers = 1 if spec.draft == "eagle" else sizes.layers
    workspace = max(_step(spec, sizes, "none"), _loading(source, "none"))
    return Need(_loaded(forms, spec), _cache(spec, sizes, layers), workspace)


def _width(spec: RankSpec) -> int:
    """Bytes of a number."""
    return spec.like.element_size()


def _forms(source: Checkpoint) -> dict[str, Form]:
    return {name: source.form(name) for name in source.names()}


def _loaded(forms: Mapping[str, Form], spec: RankSpec) -> int:
    """Weights in the type of the run; those that are quantized, and their scales, keep their own."""
    total = 0
    for name, form in forms.items():
        keeps_type = name.endswith(".scale") or not form.dtype.is_floating_point
        total += form.bytes if keeps_type else math.prod(form.shape) * _width(spec)
    return total


def _loading(source: Checkpoint, making: str) -> int:
    """What loading takes for a while: a tensor as it is read and as it is changed, and the making of quantized ones."""
    largest = max((source.form(name) for name in source.names()), key=lambda form: form.bytes)
    return 2 * largest.bytes + (SCRATCH * min(PIECE, math.prod(largest.shape)) if making != "none" else 0)


def _cache(spec: RankSpec, sizes: LlamaConfig, layers: int) -> int:
    """Keys and values."""
    return 2 * layers * sizes.kv_heads * spec.slots * sizes.head_dim * _width(spec)


def _rows(spec: RankSpec) -> int:
    """Of the largest segment that is to be expected."""
    tree = spec.config.tree
    return max(tree.chunk, tree.init.nodes + 1, spec.config.init_topk_pipedec)


def _step(spec: RankSpec, sizes: LlamaConfig, kind: str) -> int:
    """What a segment takes beside weights and cache, and the tables of positions."""
    rows, width, heads = _rows(spec), _width(spec), sizes.heads * sizes.head_dim
    wide = max(width, 4)
    tables = 2 * sizes.context * sizes.head_dim * (width + 4) if sizes.family.rotary else 0
    step = rows * (3 * sizes.intermediate + 4 * sizes.hidden + 6 * heads) * wide
    scores_and_mask = 2 * sizes.heads * 4 + 2 * width  # the mask with room to grow
    attention = rows * spec.slots * scores_and_mask
    unfolded = sizes.hidden * sizes.intermediate * wide if kind != "none" else 0
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


def check_memory(specs: Sequence[RankSpec], mine: Sequence[RankSpec], tell: bool = True) -> None:
    """Refuse to load `specs`, all ranks of this machine, if on a device of `mine` they do not fit; may tell of `mine`.

    It is called before ranks meet, so before any of them loads: what is free is free for all of them.
    """
    for device in {spec.device for spec in mine}:
        there = [spec for spec in specs if spec.device == device]
        left = free(device)
        ranks = f"rank{'s' * (len(there) > 1)}"
        for spec in (spec for spec in mine if tell and spec in there):
            print(f"rank {spec.part.rank} needs {need(spec)}; {device} has {left / GB:.2f} GB free for "
                  f"{len(there)} {ranks}", file=sys.stderr)
        total = sum((need(spec) for spec in there), Need(0, 0, 0))
        if total.total > left:
            names = ", ".join(str(spec.part.rank) for spec in there)
            raise ValueError(f"{ranks} {names} need {total} of memory on {device}, which has {left / GB:.2f} GB free: "
                             f"{advice(there, left)}")


def advice(specs: Sequence[RankSpec], left: int) -> str:
    """What would fit: a smaller max_length, smaller weights, or more devices."""
    def fits(**change: object) -> bool:
        smaller = [replace(spec, config=replace(spec.config, **change)) for spec in specs]  # type: ignore[arg-type]
        return sum(need(spec).total for spec in smaller) <= left

    if fits(max_length=SHORTEST):
        low, high = SHORTEST, specs[0].config.max_length  # fits, does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(max_length=middle) else (low, middle)
        return f"give max_length={low} or less, or end other programs"
    held = {spec.part.quant for spec in specs if _layers(spec)}
    for change in SMALLER:
        if ("quant" not in change or held == {"none"}) and fits(**change):
            return f"give {' '.join(f'{key}={value}' for key, value in change.items())}"
    return f"{_spread(specs, left)}, or free memory"


def _spread(specs: Sequence[RankSpec], left: int) -> str:
    """How many devices like this one would do."""
    needs = [need(spec).total for spec in specs]
    if len(specs) > 1:
        if max(needs) <= left:
            return f"spread these ranks over {-(-sum(needs) // left)} such devices or more"
        specs = [max(specs, key=lambda spec: need(spec).total)]
    biggest, layers = need(specs[0]), _layers(specs[0])
    fixed = biggest.workspace
    if not layers or (biggest.total - fixed) // layers + fixed > left:
        return "not even one layer fits: take a device with more memory, or a smaller model"
    whole = specs[0].sizes.layers * (biggest.total - fixed) // layers
    return f"split the model into {-(-whole // (left - fixed))} stages or more, each on a device of its own"
