"""Memory checks before loading: what the ranks of a machine need, what is free, and what to reduce if it is too little.

Only the headers of weight files are read. Sizes follow from the configuration; the workspace is an upper estimate.
"""
from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Callable, Collection, Iterable, Mapping, NamedTuple, Sequence

import torch

from config.drafts import FOLDERS, HEAD_KEY, MODEL_KEY, MODELS_KEY
from launch.available import available
from launch.spec import RankSpec
from model.attention import MAX_WIDENED
from model.drafts.network import CHUNK
from model.llama import LlamaConfig
from model.memory import MAX_STATES
from model.slots import BLOCK_SLOTS
from model.weights.blocks import block_type, plain_shape
from model.weights.checkpoint import Checkpoint, TensorForm
from model.weights.parts import EMBED, HEAD, read_sizes
from model.weights.quant import BLOCKS, LIBRARY_KINDS, WEIGHTS_AT_ONCE, Recast
from model.weights.unfold import AHEAD, Unfolded
from pipeline import replicas
from pipeline.allocation import MESSAGE_ROWS
from tp.shares import shares

GB = 1e9
SHORTEST = 64  # tokens: no smaller max_length is advised
LEAST_VALUES = {"max_requests": 1, "max_length": SHORTEST}  # keys that may be reduced, with their least values
MAX_NAMED_RANKS = 8  # the most ranks that a message names
SCRATCH_BYTES = 40  # bytes for each weight of a piece that is being quantized
RETAINED_BYTES = 80_000_000  # bytes that malloc and the libraries of kernels keep for themselves
LIBRARY_BYTES = 100_000_000  # bytes that bitsandbytes keeps for itself
PACKED_BYTES = {"Q4_1": 0.75, "Q8_0": 1.125}  # of a weight in blocks as native kernels keep it, if all are of a type
MAX_PACKED_BYTES = 1.4  # of one in blocks of any type
PACKING_BYTES = 10  # bytes for each weight of a linear layer that is being packed for a CPU's kernel
SMALLER_WEIGHTS = (  # keys that reduce memory; those that change the text least come first
    {"dtype": "bfloat16"}, {"quant": "int8"}, {"quant": "int4"}, {"quant": "nf4"},
    {"quant": "nf4", "dtype": "bfloat16"},
)


class Need(NamedTuple):
    """The most bytes that a rank takes, without Python and torch themselves."""

    weights: int = 0
    cache: int = 0
    workspace: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.workspace

    def __str__(self) -> str:
        return (f"{self.total / GB:.2f} GB (weights {self.weights / GB:.2f}, cache up to {self.cache / GB:.2f}, "
                f"workspace {self.workspace / GB:.2f})")


def together(needs: Iterable[Need]) -> Need:
    """Return the sum of needs."""
    return Need(*map(sum, zip(*needs)))


def need(spec: RankSpec) -> Need:
    """Return the memory of one rank, with a cache for each of `max_requests` requests: of its layers, of the LM head
    and the draft."""
    needs = []
    if spec.layers:
        needs.append(_stage(spec))
    if HEAD in spec.part.weights.names():
        needs.append(_head(spec))
    return together(needs)


def layer_bytes(spec: RankSpec) -> float:
    """Return the bytes of one of a rank's layers, with keys and values; 0 if it has none."""
    stage = _stage(spec) if spec.layers else Need()
    return (stage.weights + stage.cache) / max(1, spec.layers)


def _stage(spec: RankSpec) -> Need:
    """Return the memory of a rank's share of its layers."""
    part = spec.part
    share = shares(spec.sizes, part.shares)[part.member]
    sizes = share.sizes(spec.sizes)

    names = {name: name for name in part.weights.names() if name != HEAD}
    forms = dict(Recast(part.weights, names, spec.quantizes, keeps_blocks=spec.quant == BLOCKS).forms)
    stored_names = {EMBED}.intersection(forms) if spec.has_native_layers else set()  # those that stay as they are
    weights = sum(forms.pop(name).bytes for name in stored_names) + loaded(forms, spec.like)

    retained_bytes = RETAINED_BYTES
    if spec.quant in LIBRARY_KINDS:
        retained_bytes += LIBRARY_BYTES
    if spec.quant != "none":
        retained_bytes += PACKING_BYTES * sizes.hidden * sizes.intermediate

    step_bytes = _step(spec, sizes, spec.quant, _rows(spec))
    workspace = max(step_bytes, _loading(part.weights, spec.quantizes, stored_names))
    cache = _cache(spec, sizes, spec.windows, spec.code_type, part.layers[0])
    return Need(weights, cache, workspace + retained_bytes)


def _head(spec: RankSpec) -> Need:
    """Return the memory of the LM head and of the networks of the draft."""
    head_bytes = loaded({HEAD: spec.part.weights.form(HEAD)}, spec.like)
    sampled_bytes = 4 if spec.config.temperature == 0 else 32  # for each logit: sampling is done in float64
    logit_bytes = max(spec.like.element_size(), sampled_bytes)
    logits_bytes = _rows(spec) * spec.sizes.vocab * logit_bytes
    needs = [Need(head_bytes, 0, max(logits_bytes, head_bytes))]

    folders = {
        HEAD_KEY: [spec.part.eagle] if spec.part.eagle else [],
        MODEL_KEY: [spec.draft_folder],
        MODELS_KEY: spec.small_models,
    }
    for source in spec.sources:
        key = FOLDERS.get(source)
        if key is not None:
            needs += [_network(spec, folder, key == HEAD_KEY) for folder in folders[key]]
    return together(needs)


def _network(spec: RankSpec, folder: Path, is_eagle: bool) -> Need:
    """Return the memory of one network; none if its folder is missing, which is reported when the draft is built."""
    part = spec.part
    if not (folder / "config.json").is_file():
        return Need()

    # weights
    source = Checkpoint(folder) if is_eagle else Unfolded(folder)
    sizes = replace(read_sizes(source), context=spec.sizes.context)
    forms = {name: source.form(name) for name in source.names()}
    if sizes.tied and not is_eagle:
        forms[HEAD] = forms[EMBED]  # stored a second time
    if is_eagle and not any(name.endswith("embed_tokens.weight") for name in forms):
        forms[EMBED] = part.weights.form(HEAD)
    weights = loaded(forms, spec.like)

    # cache
    num_layers = 1 if is_eagle and any(map(AHEAD.search, forms)) else sizes.layers
    cache = _cache(spec, sizes, (0,) * num_layers)

    num_rows = spec.config.max_requests * max(CHUNK, _rows_of_one(spec))  # it reads for all requests at once
    workspace = max(_step(spec, sizes, "none", num_rows), _loading(source, "none"))
    return Need(weights, cache, workspace)


def loaded(forms: Mapping[str, TensorForm], like: torch.Tensor) -> int:
    """Return the bytes of weights in the number type of `like`; quantized ones and their scales keep their own type."""
    type_names = {block.name for form in forms.values() if (block := block_type(form.shape))}
    only_type = type_names.pop() if len(type_names) == 1 else ""
    packed_bytes = PACKED_BYTES.get(only_type, MAX_PACKED_BYTES)

    num_bytes = 0
    for name, form in forms.items():
        if block_type(form.shape):
            num_weights = math.prod(plain_shape(form.shape))
            num_bytes += round(num_weights * packed_bytes)
            continue

        keeps_type = name.endswith(".scale") or not form.dtype.is_floating_point
        num_bytes += form.bytes if keeps_type else math.prod(form.shape) * like.element_size()
    return num_bytes


def _loading(source: Checkpoint, quantizes: str, stored_names: Collection[str] = ()) -> int:
    """Return the temporary bytes of loading: a tensor as read and as converted, and a piece that is quantized.

    Tensors of `stored_names` stay as they are, so they take none.
    """
    forms = [source.form(name) for name in source.names() if name not in stored_names]
    largest = max(forms, key=lambda form: form.bytes)
    if quantizes == "none":
        return 2 * largest.bytes
    piece_weights = min(WEIGHTS_AT_ONCE, math.prod(largest.shape))
    return 2 * largest.bytes + SCRATCH_BYTES * piece_weights


def _cache(spec: RankSpec, sizes: LlamaConfig, windows: Sequence[int],
           code_type: torch.dtype | None = None, first_layer: int = 0) -> int:
    """Return the most bytes of the caches of all requests, of which CUDA temporarily holds the keys twice; `windows`
    are those of the layers from the first one on, 0 if one drops nothing."""
    guess_slots = spec.slots - spec.context + _rows_of_one(spec)
    layer_windows = enumerate(windows, first_layer)
    slot_bytes, state_bytes = cached(sizes, layer_windows, spec.slots, spec.like, code_type, guess_slots)
    if spec.device.type == "cuda":
        slot_bytes = slot_bytes * 4 // 3
    return (slot_bytes + state_bytes) * spec.config.max_requests


def cached(sizes: LlamaConfig, layer_windows: Iterable[tuple[int, int]], num_slots: int, like: torch.Tensor,
           code_type: torch.dtype | None, guess_slots: int = 0) -> tuple[int, int]:
    """Return the most bytes of a request's slots, and of its states.

    `layer_windows` has the number of each layer and its window, 0 if it drops nothing.
    """
    type_bytes = like.element_size()
    head_bytes = sizes.head_dim * torch.empty(0, dtype=code_type or like.dtype).element_size()
    if code_type:
        head_bytes += 4  # its scale

    slot_bytes = state_bytes = 0
    for layer, window in layer_windows:
        memory = sizes.memory(layer)
        token_bytes = memory.input_width * type_bytes if memory else 2 * sizes.kv_heads * head_bytes
        window_slots = 3 * (window + BLOCK_SLOTS + guess_slots) // 2
        slot_bytes += token_bytes * (min(num_slots, window_slots) if window else num_slots)
        if memory and memory.state_shape:
            state_bytes += (MAX_STATES + 1) * math.prod(memory.state_shape) * max(type_bytes, 4)  # one is computed
    return slot_bytes, state_bytes


def _rows(spec: RankSpec) -> int:
    """Return the rows of the largest expected message; several requests may share one."""
    return max(_rows_of_one(spec), MESSAGE_ROWS if spec.config.max_requests > 1 else 0)


def _rows_of_one(spec: RankSpec) -> int:
    """Return the rows of the largest expected message of one request."""
    tree = spec.config.tree
    replica_rows = replicas.MAX_SEGMENT_ROWS if spec.copies > 1 else 0
    num_guesses = tree.init.nodes * spec.trees_at_once
    return max(replica_rows, tree.chunk, num_guesses + 1, spec.config.init_topk_pipedec, tree.run)


def _step(spec: RankSpec, sizes: LlamaConfig, quant: str, num_rows: int) -> int:
    """Return the bytes for this many rows, without weights and cache, plus those of the tables of positions."""
    type_bytes = spec.like.element_size()
    wide_bytes = max(type_bytes, 4)  # some steps are taken in float32
    sum_bytes = 8 if spec.device.type == "cpu" else type_bytes  # the type in which attention adds up

    table_bytes = 2 * sizes.context * sizes.head_dim * (type_bytes + 4) if sizes.family.rotary else 0
    heads_width = sizes.heads * sizes.head_dim
    row_width = 3 * sizes.intermediate + 4 * sizes.hidden + 6 * heads_width
    if sizes.recurrent:  # the last inputs of a row, and their products
        input_width = sizes.hidden + sum(sizes.delta.widths)
        row_width += 2 * (sizes.num_taps + 2) * input_width
    activation_bytes = num_rows * row_width * wide_bytes

    # attention
    head_values = spec.slots * sizes.head_dim
    widened_values = min(head_values * sizes.kv_heads, max(MAX_WIDENED, head_values))  # of keys, and as many of values
    score_bytes = num_rows * spec.slots * 2 * sizes.heads * max(sum_bytes, 4) + 2 * widened_values * sum_bytes
    mask_rows = max(num_rows, spec.config.max_requests * _rows_of_one(spec))  # by the masks of all requests
    mask_bytes = mask_rows * spec.slots * 2 * sum_bytes  # and their copies

    unfolded_bytes = sizes.hidden * sizes.intermediate * wide_bytes if quant in LIBRARY_KINDS else 0
    return table_bytes + activation_bytes + score_bytes + mask_bytes + unfolded_bytes


def free(device: torch.device) -> int:
    """Return the bytes that are free for this process on a device."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else available()


def check_memory(specs: Sequence[RankSpec], mine: Sequence[RankSpec], report: bool = True) -> None:
    """Raise ValueError if `specs`, all ranks of this machine, do not fit on a device of `mine`; may report `mine`.

    No rank has loaded yet, so all of them share what is free.
    """
    for device in {spec.device for spec in mine}:
        sharing = [spec for spec in specs if spec.device == device]
        num_ranks = len(sharing)
        ranks, verb = ("rank", "needs") if num_ranks == 1 else ("ranks", "need")
        free_bytes = free(device)
        free_text = f"{free_bytes / GB:.2f} GB free"

        for spec in sharing:
            if report and spec in mine:
                line = f"rank {spec.part.rank} needs {need(spec)}; {device} has {free_text} for {num_ranks} {ranks}\n"
                print(line, end="", file=sys.stderr)  # in one piece: other ranks write there, too

        total_need = together(map(need, sharing))
        if total_need.total > free_bytes:
            names = ", ".join(str(spec.part.rank) for spec in sharing[:MAX_NAMED_RANKS])
            num_unnamed = len(sharing[MAX_NAMED_RANKS:])
            if num_unnamed:
                names += f" and {num_unnamed} more"
            raise ValueError(f"{ranks} {names} {verb} {total_need} of memory on {device}, which has {free_text}: "
                             f"{advice(sharing, free_bytes)}")


def advice(specs: Sequence[RankSpec], free_bytes: int) -> str:
    """Return what would fit into the free bytes: fewer requests, a smaller max_length, smaller weights; else advice."""
    def fits(**change: object) -> bool:
        changed = [replace(spec, config=replace(spec.config, **change)) for spec in specs]  # type: ignore[arg-type]
        return together(map(need, changed)).total <= free_bytes

    reductions = []
    for key, least_value in LEAST_VALUES.items():
        value = getattr(specs[0].config, key)
        if least_value < value and fits(**{key: least_value}):
            reductions.append(f"{key}={_largest_fit(key, least_value, value, fits)}")
    if reductions:
        return f"give {' or '.join(reductions)} or less, or end other programs"

    stored_quants = {spec.part.quant for spec in specs if spec.layers}
    for change in SMALLER_WEIGHTS:
        is_possible = "quant" not in change or stored_quants == {"none"}
        if is_possible and fits(**change):
            keys = " ".join(f"{key}={value}" for key, value in change.items())
            return f"give {keys}"
    return "spread the ranks over more devices, split the model into more stages, or free memory"


def _largest_fit(key: str, low: int, high: int, fits: Callable[..., bool]) -> int:
    """Return the largest value of a key that fits, by bisection: `low` fits, `high` does not."""
    while high - low > 1:
        middle = (low + high) // 2
        if fits(**{key: middle}):
            low = middle
        else:
            high = middle
    return low
