"""A model's checkpoint in the decoder's form: LLaMA's names, and a tensor for each linear layer.

Fused layers are split, rows reordered and quantized weights unfolded while they are read, a tensor at a time.
"""
from __future__ import annotations

import math
import re
from functools import cached_property
from pathlib import Path
from typing import Iterator, Mapping, NamedTuple, Sequence, Tuple

import torch
from torch import Tensor

from config.schema.families import Family
from model.llama import Layer, LlamaConfig
from model.recurrent import DeltaSizes
from model.weights.checkpoint import Checkpoint, TensorForm
from model.weights.packed import COMPANIONS, Conversion, check_method, mxfp4, unfolding_of

BUFFER = re.compile(r"rotary_emb\.inv_freq$|decoder\.version$")  # not weights: recomputed where needed
MULTIMODAL_NAMES = (  # of the text's part of a multimodal model, and what replaces them
    (r"^language_model\.lm_head\.", "lm_head."), (r"^(model\.)?language_model\.(model\.)?", "model."))
VISION = re.compile(r"^(model\.)?(vision_tower|vision_model|visual|multi_modal_projector)\.")
FUSED_LAYERS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
AHEAD = re.compile(r"^model\.mtp_layers\.(\d+)\.")  # layers for multi-token prediction, which are a draft head
UNREAD = re.compile(r"^mtp\.")  # such layers of Qwen3-Next
LINEAR_LAYER = re.compile(r"\.(self_attn|mlp)\.(\w+)\.(weight|bias)$")
ROTATED_LAYER = re.compile(r"\.[qk]_proj\.(weight|bias)$")
LAYER = re.compile(r"^model\.layers\.\d+\.")
PACKED_WEIGHT = re.compile(r"\.(qweight|weight_packed)$")
DELTA_LAYER = re.compile(r"\.linear_attn\.in_proj_(qkvz|ba)\.weight$")  # of Qwen3-Next
ALL_EXPERTS = re.compile(r"\.mlp\.experts\.(gate_up_proj|down_proj)(_bias|_blocks|_scales)?$")  # in one tensor
NamedView = Tuple[str, "View"]


def as_read(source_tensors: Sequence[Tensor]) -> Tensor:
    """Return the file's tensor unchanged."""
    return source_tensors[0]


class View(NamedTuple):
    """A tensor of the decoder: its form, the file's tensors from which it is made, and the conversion."""

    form: TensorForm
    source_names: tuple[str, ...]
    convert: Conversion = as_read
    row_span: tuple[int, int] | None = None  # the rows of the file's tensors to read; None: all


class Unfolded(Checkpoint):
    """The checkpoint of a model of any family, with the decoder's names, forms and data."""

    @cached_property
    def _views(self) -> dict[str, View]:
        """The views by the decoder's names, in the files' order. Raises ValueError for an unsupported config."""
        try:
            sizes = LlamaConfig.read(self.config)
            check_method(self.config)
        except ValueError as error:
            raise ValueError(f"{self.folder}: {error}") from None

        views: dict[str, View] = {}
        forms = {name: location.form for name, location in self._locations.items()}
        is_quantized = bool(self.config.get("quantization_config"))
        expected_names = {name for name, _ in Layer(sizes).named_parameters()} if is_quantized else set()
        for source_name in self._locations:
            is_unused = any(pattern.search(source_name) for pattern in (BUFFER, VISION, AHEAD, UNREAD))
            if is_unused or is_quantized and source_name.endswith(COMPANIONS):
                continue

            name = source_name
            for pattern, replacement in (*MULTIMODAL_NAMES, *sizes.family.names):
                name = re.sub(pattern, replacement, name)
            if is_quantized and LAYER.sub("", name) not in expected_names and self._is_idle_bias(source_name):
                continue
            is_packed = source_name.endswith(COMPANIONS) or PACKED_WEIGHT.search(source_name)
            if is_packed and not is_quantized:
                raise ValueError(f"{self.folder} holds {source_name}, of a quantized weight, but its config.json has "
                                 "no quantization_config: add it there, with quant_method, as the model's publisher "
                                 "or its quantize_config.json describes it")

            all_experts = ALL_EXPERTS.search(name)
            if all_experts:
                views.update(_views_of_experts(name, source_name, all_experts[1], forms, sizes.family))
                continue

            whole_view = View(forms[source_name], (source_name,))
            if is_quantized:
                whole_view = self._unfolded_view(source_name, forms) or whole_view
            name = PACKED_WEIGHT.sub(".weight", name)

            delta_layer = DELTA_LAYER.search(name)
            if delta_layer:
                views.update(_views_by_heads(sizes.delta, name, delta_layer[1], whole_view))
                continue

            views.update(_views_of_parts(sizes, name, whole_view))

        for name, view in views.items() if sizes.family.neighbours else ():
            if ROTATED_LAYER.search(name):
                views[name] = view._replace(convert=_half_a_head_apart(sizes, view.convert))
        return views

    def _is_idle_bias(self, source_name: str) -> bool:
        """Whether a tensor is a bias of zeros, as writers of GPTQ add to layers that have none."""
        layer_name, _, ending = source_name.rpartition(".")
        has_codes = f"{layer_name}.qweight" in self._locations
        return ending == "bias" and has_codes and not super().read(source_name).any()

    def _unfolded_view(self, source_name: str, forms: Mapping[str, TensorForm]) -> View | None:
        """Return the view of a quantized tensor, or None if it is not quantized."""
        try:
            unfolding = unfolding_of(source_name, forms, self.config)
            missing_names = [name for name in unfolding[1] if name not in forms] if unfolding else []
        except KeyError as error:
            missing_names = [error.args[0]]
        if missing_names:
            raise ValueError(f"{self.folder} lacks {missing_names[0]}, which {source_name} needs; download the model "
                             "again")
        return View(*unfolding) if unfolding else None

    def names(self) -> list[str]:
        return list(self._views)

    def form(self, name: str) -> TensorForm:
        return self._views[name].form

    def stored_form(self, name: str) -> TensorForm:
        view = self._views[name]
        if view.convert is not as_read:
            return view.form
        source_form = super().stored_form(view.source_names[0])
        return TensorForm(source_form.dtype, (view.form.shape[0], *source_form.shape[1:]))

    def tensor_path(self, name: str) -> Path:
        return super().tensor_path(self._views[name].source_names[0])

    def read(self, name: str) -> Tensor:
        view = self._views[name]
        source_tensors = [self.rows(source_name, view.row_span) for source_name in view.source_names]
        return view.convert(source_tensors).contiguous()

    def read_stored(self, name: str) -> Tensor:
        view = self._views[name]
        is_as_read = view.convert is as_read
        return self.stored_rows(view.source_names[0], view.row_span) if is_as_read else self.read(name)

    def map_stored(self, name: str) -> Tensor:
        view = self._views[name]
        is_whole = view.convert is as_read and view.row_span is None
        return super().map_stored(view.source_names[0]) if is_whole else self.read_stored(name)


def _views_of_parts(sizes: LlamaConfig, name: str, whole_view: View) -> Iterator[NamedView]:
    """Yield the parts of a fused linear layer, or any other tensor unchanged."""
    linear_layer = LINEAR_LAYER.search(name)
    layer_name = linear_layer[2] if linear_layer else ""
    rows_of_parts = [sizes.intermediate, sizes.intermediate]
    if layer_name == "qkv_proj":
        rows_of_parts = [num_heads * sizes.head_dim for num_heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads)]

    dtype, shape = whole_view.form.dtype, whole_view.form.shape
    if layer_name not in FUSED_LAYERS or sum(rows_of_parts) != shape[0]:
        yield name, whole_view  # a wrong size is reported when shapes are compared
        return

    begin, source_names = 0, whole_view.source_names
    for part_name, part_rows in zip(FUSED_LAYERS[layer_name], rows_of_parts):
        form = TensorForm(dtype, (part_rows, *shape[1:]))
        if len(source_names) == 1:
            view = View(form, source_names, row_span=(begin, begin + part_rows))
        else:
            view = View(form, source_names, _rows(whole_view.convert, begin, part_rows))
        yield name.replace(layer_name, part_name), view
        begin += part_rows


def _rows(convert: Conversion, begin: int, num_rows: int) -> Conversion:
    return lambda source_tensors: convert(source_tensors).narrow(0, begin, num_rows)


def _views_by_heads(sizes: DeltaSizes, name: str, layer_name: str, whole_view: View) -> Iterator[NamedView]:
    """Yield the parts of a delta net's fused layer, which has all parts of the first key head before the second's."""
    values_per_key = sizes.value_heads // max(1, sizes.key_heads)
    value_width = values_per_key * sizes.value_dim
    rows_of_parts = {"q": sizes.key_dim, "k": sizes.key_dim, "v": value_width, "z": value_width}
    parts = ["qkv", "z"]
    if layer_name == "ba":
        rows_of_parts, parts = {"b": values_per_key, "a": values_per_key}, ["b", "a"]

    rows_of_head = [*rows_of_parts.values()]
    all_rows = torch.arange(sizes.key_heads * sum(rows_of_head)).view(-1, sum(rows_of_head))
    rows_by_letter = dict(zip(rows_of_parts, all_rows.split(rows_of_head, 1)))

    for letters in parts:
        rows = torch.cat([rows_by_letter[letter].flatten() for letter in letters])
        part_form = TensorForm(whole_view.form.dtype, (len(rows), *whole_view.form.shape[1:]))
        part_name = name.replace(f"in_proj_{layer_name}", f"in_proj_{letters}")
        yield part_name, View(part_form, whole_view.source_names, _picked(whole_view.convert, rows))


def _picked(convert: Conversion, rows: Tensor) -> Conversion:
    return lambda source_tensors: convert(source_tensors)[rows]


def _half_a_head_apart(sizes: LlamaConfig, convert: Conversion) -> Conversion:
    """Reorder queries or keys so that two dimensions that rotate together are half a head apart, as in the decoder."""
    num_rotated = int(sizes.head_dim * sizes.rotated_share)
    dim_order = [*range(0, num_rotated, 2), *range(1, num_rotated, 2)]
    dim_order += range(num_rotated, sizes.head_dim)

    def reordered(source_tensors: Sequence[Tensor]) -> Tensor:
        heads = convert(source_tensors).unflatten(0, (-1, sizes.head_dim))
        return heads[:, dim_order].flatten(0, 1)

    return reordered


# --- experts in one tensor, as GPT-OSS and Qwen3.5 have them ----------------------------------------------------------

def _views_of_experts(name: str, source_name: str, layer_name: str, forms: Mapping[str, TensorForm],
                      family: Family) -> Iterator[NamedView]:
    """Yield the weights or biases of each expert separately; gate and up alternate in the fused rows of GPT-OSS, whose
    weights are transposed, and follow one another in others'."""
    if name.endswith("_scales"):  # which are read together with their blocks
        return

    kind = "bias" if name.endswith("_bias") else "weight"
    is_transposed = kind == "weight" and family.clamped
    source_names: tuple[str, ...] = (source_name,)
    dtype, (num_experts, *shape) = forms[source_name].dtype, forms[source_name].shape
    if name.endswith("_blocks"):
        dtype, source_names = torch.bfloat16, (source_name, source_name[:-len("blocks")] + "scales")
        shape = [shape[0], math.prod(shape[1:]) * 2]
    elif is_transposed:
        shape = shape[::-1]

    half = shape[0] // 2
    rows_of_parts = {"gate_proj": slice(0, half), "up_proj": slice(half, None)}
    if layer_name == "down_proj":
        rows_of_parts = {layer_name: slice(None)}
    elif family.clamped:
        rows_of_parts = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}

    name_before = name[:name.index(layer_name)]
    for expert in range(num_experts):
        for part_name, rows in rows_of_parts.items():
            form = TensorForm(dtype, (shape[0] // len(rows_of_parts), *shape[1:]))
            view = View(form, source_names, _rows_of_expert(rows, is_transposed), (expert, expert + 1))
            yield f"{name_before}{expert}.{part_name}.{kind}", view


def _rows_of_expert(rows: slice, is_transposed: bool) -> Conversion:
    def convert(source_tensors: Sequence[Tensor]) -> Tensor:
        if len(source_tensors) == 2:
            blocks, scales = source_tensors
            return mxfp4(blocks[0], scales[0])[rows]
        whole = source_tensors[0][0]
        return (whole.t() if is_transposed else whole)[rows]

    return convert
