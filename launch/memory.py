"""Memory checks before loading: what the ranks of a machine need, what is free, and what to reduce if it is too little.

Only the headers of weight files are read. Sizes follow from the configuration; the workspace is an upper estimate.
"""
from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Callable, Iterable, Mapping, NamedTuple, Sequence

import torch

from config.drafts import FOLDERS, HEAD_KEY, MODEL_KEY, MODELS_KEY
from launch.available import available
from launch.spec import RankSpec
from model.attention import MAX_WIDENED
from model.cache import BLOCK_SLOTS
from model.drafts.network import CHUNK
from model.llama import LlamaConfig
from model.weights.blocks import block_type, plain_shape
from model.weights.checkpoint import Checkpoint, TensorForm
from model.weights.parts import EMBED, HEAD, read_sizes
from model.weights.quant import PIECE, STORED, Recast
from model.weights.unfold import AHEAD, Unfolded
from pipeline import replicas
from pipeline.pacing import MESSAGE_ROWS
from tp.shares import shares

GB = 1e9
SHORTEST = 64  # tokens: no smaller max_length is advised
LEAST = {"max_requests": 1, "max_length": SHORTEST}  # keys that may be reduced, and the least value that is advised
NAMED = 8  # the most ranks that a message names
SCRATCH = 40  # bytes for each weight of a piece that is being quantized
KEPT = 80_000_000  # bytes that malloc and the libraries of kernels keep for themselves
LIBRARY = 100_000_000  # bytes that bitsandbytes keeps for itself
PACKED_BYTES = 1.4  # of a weight in a GGUF file's blocks as native kernels keep it, at most
PACKING = 7  # bytes for each weight of a linear layer that is being packed for a CPU's kernel
SMALLER = (  # keys that reduce memory; those that change the text least come first
    {"dtype": "bfloat16"}, {"quant": "int8"}, {"quant": "nf4"},
    {"quant": "nf4", "dtype": "bfloat16"},
)


class Need(NamedTuple):
    """The most bytes that a rank takes, without Python and torch themselves; `begins` is the size of an empty cache."""

    weights: int = 0
    cache: int = 0
    workspace: int = 0
    begins: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.workspace

    def __str__(self) -> str:
        return (f"{self.total / GB:.2f} GB (weights {self.weights / GB:.2f}, cache {self.begins / GB:.2f} growing to "
                f"{self.cache / GB:.2f}, workspace {self.workspace / GB:.2f})")


def together(needs: Iterable[Need]) -> Need:
    """Return the sum of needs."""
    return Need(*map(sum, zip(*needs)))


def need(spec: RankSpec) -> Need:
    """Return the memory of one rank, with a cache for each of `max_requests` requests: of its layers, of the LM head
    and the draft."""
    found = []
    if spec.layers:
        found.append(_stage(spec))
    if HEAD in spec.part.weights.names():
        found.append(_head(spec))
    return together(found)


def _stage(spec: RankSpec) -> Need:
    part = spec.part
    share = shares(spec.sizes, part.shares)[part.member]
    sizes = share.sizes(spec.sizes)
    names = {name: name for name in part.weights.names() if name != HEAD}
    weights = _loaded(Recast(part.weights, names, spec.quantizes).forms, spec)
    kept = KEPT
    if spec.quant != "none":
        kept += LIBRARY + PACKING * sizes.hidden * sizes.intermediate
    step = _step(spec, sizes, spec.quant, _rows(spec))
    workspace = max(step, _loading(part.weights, spec.quantizes))
    cache, begins = _cache(spec, sizes, spec.windows, spec.config.quant_kv == "int8")
    return Need(weights, cache, workspace + kept, begins)


def _head(spec: RankSpec) -> Need:
    vocab = _loaded({HEAD: spec.part.weights.form(HEAD)}, spec)
    sampled = 4 if spec.config.temperature == 0 else 32  # bytes for each logit: sampling is done in float64
    logits = _rows(spec) * spec.sizes.vocab * max(spec.like.element_size(), sampled)
    folders = {
        HEAD_KEY: [spec.part.eagle] if spec.part.eagle else [],
        MODEL_KEY: [spec.draft_folder],
        MODELS_KEY: spec.small_models,
    }
    keys = (FOLDERS[source] for source in spec.sources if source in FOLDERS)
    drafts = [_network(spec, folder, key == HEAD_KEY)
              for key in keys for folder in folders[key]]
    return together([Need(vocab, 0, max(logits, vocab)), *drafts])


def _network(spec: RankSpec, folder: Path, eagle: bool) -> Need:
    """Return the memory of one network; none if its folder is missing, which is reported when the draft is built."""
    part = spec.part
    if not (folder / "config.json").is_file():
        return Need()
    source = Checkpoint(folder) if eagle else Unfolded(folder)
    sizes = replace(read_sizes(source), context=spec.sizes.context)
    forms = {name: source.form(name) for name in source.names()}
    if sizes.tied and not eagle:
        forms[HEAD] = forms[EMBED]  # stored a second time
    if eagle and not any(name.endswith("embed_tokens.weight") for name in forms):
        forms[EMBED] = part.weights.form(HEAD)
    layers = 1 if eagle and any(map(AHEAD.search, forms)) else sizes.layers
    cache, begins = _cache(spec, sizes, (0,) * layers, small=False)
    rows = spec.config.max_requests * max(CHUNK, _rows_of_one(spec))  # it reads for all requests at once
    workspace = max(_step(spec, sizes, "none", rows), _loading(source, "none"))
    return Need(_loaded(forms, spec), cache, workspace, begins)


def _loaded(forms: Mapping[str, TensorForm], spec: RankSpec) -> int:
    """Return the bytes of weights in the run's number type; quantized weights and their scales keep their own type."""
    total = 0
    for name, form in forms.items():
        if block_type(form.shape):
            total += round(math.prod(plain_shape(form.shape)) * PACKED_BYTES)
            continue
        keeps_type = name.endswith(".scale") or not form.dtype.is_floating_point
        total += form.bytes if keeps_type else math.prod(form.shape) * spec.like.element_size()
    return total


def _loading(source: Checkpoint, making: str) -> int:
    """Return the temporary bytes of loading: a tensor as read and as converted, and a piece that is quantized."""
    forms = map(source.form, source.names())
    largest = max(forms, key=lambda form: form.bytes)
    piece = 0 if making in ("none", STORED) else min(PIECE, math.prod(largest.shape))
    return 2 * largest.bytes + SCRATCH * piece


def _cache(spec: RankSpec, sizes: LlamaConfig,
           windows: Sequence[int], small: bool) -> tuple[int, int]:
    """Return the bytes of the caches of all requests: at most, as CUDA temporarily holds the keys twice, and at first.

    A `small` cache holds 8 bits.
    """
    head = sizes.head_dim + 4 if small else sizes.head_dim * spec.like.element_size()
    slot = 2 * sizes.kv_heads * head * spec.config.max_requests
    tail = spec.slots - spec.context + _rows_of_one(spec)
    near = (window + BLOCK_SLOTS + tail for window in windows if window)
    held = [min(spec.slots, 3 * slots // 2) for slots in near]
    held += [spec.slots] * windows.count(0)
    grown = sum(held) * 4 // 3 if spec.device.type == "cuda" else sum(held)
    return slot * grown, slot * len(windows) * min(BLOCK_SLOTS, spec.slots)


def _rows(spec: RankSpec) -> int:
    """Return the rows of the largest expected message; several requests may share one."""
    return max(_rows_of_one(spec), MESSAGE_ROWS if spec.config.max_requests > 1 else 0)


def _rows_of_one(spec: RankSpec) -> int:
    tree = spec.config.tree
    copied = replicas.MAX_SEGMENT_ROWS if spec.copies > 1 else 0
    guesses = tree.init.nodes * spec.trees_at_once
    return max(copied, tree.chunk, guesses + 1, spec.config.init_topk_pipedec, tree.run)


def _step(spec: RankSpec, sizes: LlamaConfig, kind: str, rows: int) -> int:
    """Return the bytes for this many rows, without weights and cache, plus those of the tables of positions."""
    width = spec.like.element_size()
    wide = max(width, 4)  # some steps are taken in float32
    heads = sizes.heads * sizes.head_dim
    tables = 2 * sizes.context * sizes.head_dim * (width + 4) if sizes.family.rotary else 0
    step = rows * (3 * sizes.intermediate + 4 * sizes.hidden + 6 * heads) * wide
    summed = 8 if spec.device.type == "cpu" else width  # the type in which attention adds up
    head = spec.slots * sizes.head_dim
    widened = min(head * sizes.kv_heads, max(MAX_WIDENED, head))  # keys, and as many values
    scores = rows * spec.slots * 2 * sizes.heads * max(summed, 4) + 2 * widened * summed
    masked = max(rows, spec.config.max_requests * _rows_of_one(spec))  # by the masks of all requests
    masks = masked * spec.slots * 2 * summed  # with room to grow
    unfolded = sizes.hidden * sizes.intermediate * wide if kind != "none" else 0
    return tables + step + scores + masks + unfolded


def free(device: torch.device) -> int:
    """Return the bytes that are free for this process on a device."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else available()


def check_memory(specs: Sequence[RankSpec], mine: Sequence[RankSpec], report: bool = True) -> None:
    """Raise ValueError if `specs`, all ranks of this machine, do not fit on a device of `mine`; may report `mine`.

    No rank has loaded yet, so all of them share what is free.
    """
    for device in {spec.device for spec in mine}:
        there = [spec for spec in specs if spec.device == device]
        ranks, verb = ("rank", "needs") if len(there) == 1 else ("ranks", "need")
        left = free(device)
        has = f"{left / GB:.2f} GB free"
        for spec in there:
            if report and spec in mine:
                line = f"rank {spec.part.rank} needs {need(spec)}; {device} has {has} for {len(there)} {ranks}\n"
                print(line, end="", file=sys.stderr)  # in one piece: other ranks write there, too
        total = together(map(need, there))
        if total.total > left:
            names = ", ".join(str(spec.part.rank) for spec in there[:NAMED])
            if there[NAMED:]:
                names += f" and {len(there[NAMED:])} more"
            raise ValueError(f"{ranks} {names} {verb} {total} of memory on {device}, which has {has}: "
                             f"{advice(there, left)}")


def advice(specs: Sequence[RankSpec], left: int) -> str:
    """Return what would fit into `left` bytes: fewer requests, a smaller max_length, smaller weights; else advice."""
    def fits(**change: object) -> bool:
        smaller = [replace(spec, config=replace(spec.config, **change)) for spec in specs]  # type: ignore[arg-type]
        return together(map(need, smaller)).total <= left

    less = []
    for key, least in LEAST.items():
        asked = getattr(specs[0].config, key)
        if least < asked and fits(**{key: least}):
            less.append(f"{key}={_most(key, least, asked, fits)}")
    if less:
        return f"give {' or '.join(less)} or less, or end other programs"
    held = {spec.part.quant for spec in specs if spec.layers}
    for change in SMALLER:
        possible = "quant" not in change or held == {"none"}
        if possible and fits(**change):
            keys = " ".join(f"{key}={value}" for key, value in change.items())
            return f"give {keys}"
    return "spread the ranks over more devices, split the model into more stages, or free memory"


def _most(key: str, low: int, high: int, fits: Callable[..., bool]) -> int:
    while high - low > 1:
        middle = (low + high) // 2
        if fits(**{key: middle}):
            low = middle
        else:
            high = middle
    return low
