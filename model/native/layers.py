"""The layers of a stage in C (`slice.c`): one call computes a segment in all of them.

`NativeSlice` replaces a `Slice` unless `reason_against` has a reason. A row has the same bits in every segment, with
any number of threads, and on every processor.

Shapes: T rows, D model, H heads, K key/value heads, S cache slots, E head dimension.
"""
from __future__ import annotations

import ctypes
import weakref
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p
from typing import Any, Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from model.cache import AdmittedRows, AdmittingRows
from model.llama import Layer, LlamaConfig, RMSNorm, Slice, fill
from model.native.compiler import Level, library
from model.native.packing import PackedWeight, Packing, pack_float, pack_int4, pack_int8
from model.weights.quant import hollow

LANES = 8  # a head has a multiple of this many dimensions
KINDS = ("none", "int8", "int4")  # of weights
LEVELS_OF_INT8 = 127
DONE, GIVEN_UP, NO_MEMORY = range(3)  # results of a segment
StillNeeded = ctypes.CFUNCTYPE(c_int32)


def reason_against(c: LlamaConfig, dtype: torch.dtype,
                   device: torch.device, kind: str) -> str:
    """Return why torch must compute these layers; empty if the native kernels can."""
    family, scales = c.family, c.scales
    if device.type != "cpu" or dtype != torch.float32:
        return "the native kernels compute in float32 on a CPU"
    if kind not in KINDS:
        return f"the native kernels have no {kind}"

    has_basics = family.rms and family.rotary and family.gated and family.before
    extra_steps = (
        family.gelu, family.after, family.wide_norms, family.one_more, family.sinks, family.clamped,
        c.local, c.experts, scales.score_cap, scales.residual != 1)
    if not has_basics or any(extra_steps):
        return f"the native kernels do not compute the layers of {family.architecture}"
    if c.head_dim % LANES or c.heads % c.kv_heads:
        return f"the native kernels need heads of a multiple of {LANES} dimensions"
    return ""


# --- the structures of slice.c ----------------------------------------------------------------------------------------

def _fields(names: str, kind: Any = c_int64) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class _Weight(Structure):
    _fields_ = (
        _fields("form outputs inputs") +
        _fields("numbers scales bias", c_void_p))


class _Slots(Structure):
    _fields_ = (
        _fields("keys values key_scales value_scales", c_void_p) +
        _fields("layers first room"))


class _Layer(Structure):
    _fields_ = (
        _fields("attention_norm mlp_norm q_norm k_norm", c_void_p) +
        _fields("qkv o gate_up down", _Weight) +
        _fields("window rotates slots place"))


class _Model(Structure):
    _fields_ = (
        _fields("hidden heads kv_heads head_dim rotated intermediate layers") +
        _fields("eps scale", c_float) +
        _fields("layer", POINTER(_Layer)) +
        _fields("norm pool", c_void_p))


class _Request(Structure):
    _fields_ = (
        _fields("rows settled tail stride") +
        _fields("sees", c_void_p) +
        _fields("slots", POINTER(_Slots)) +
        _fields("windows"))


class _Segment(Structure):
    _fields_ = (
        _fields("rows requests") +
        _fields("x cos sin", c_void_p) +
        _fields("request", POINTER(_Request)) +
        _fields("inputs", POINTER(c_void_p)) +
        _fields("still_needed", StillNeeded))


def _request(admitted: AdmittedRows) -> _Request:
    """Return the structure of a request's rows; the memory behind `admitted` must live as long."""
    slots = (_Slots * len(admitted.slots))()
    for slot, held_slots in zip(slots, admitted.slots):
        keys_LKSE = held_slots.held[0]
        slot.keys, slot.values, *scales = (x.data_ptr() for x in held_slots.held)
        slot.key_scales, slot.value_scales = scales or (None, None)
        slot.layers, _, slot.room, _ = keys_LKSE.shape
        slot.first = held_slots.first

    rows, tail = admitted.sees.shape
    stride = admitted.sees.strides[0]
    return _Request(rows, admitted.settled, tail, stride, admitted.sees.ctypes.data, slots, len(slots))


# --- weights ----------------------------------------------------------------------------------------------------------

def _joined(linears: Sequence[Any], name: str, dim: int = 0) -> Tensor:
    tensors = [getattr(linear, name) for linear in linears]
    return torch.cat(tensors, dim)


class _Weights:
    """The structures of packed weights, and the tensors behind them, which must live as long."""

    def __init__(self, packing: Packing) -> None:
        self.packing = packing
        self.tensors: list[Tensor] = []

    def address(self, tensor: Tensor | None) -> int | None:
        """Return the address of a tensor, which is kept; None for none."""
        if tensor is None:
            return None
        self.tensors.append(tensor.detach().contiguous())
        return self.tensors[-1].data_ptr()

    def norm_address(self, norm: nn.Module) -> int | None:
        """Return the address of a norm's weight; None if there is no norm."""
        return self.address(norm.weight) if isinstance(norm, RMSNorm) else None

    def linear_weight(self, *linears: Any) -> _Weight:
        """Pack linear layers that read the same inputs as one weight."""
        packed_weight = self._pack(linears)
        bias = None if linears[0].bias is None else _joined(linears, "bias")
        num_outputs = sum(linear.out_features for linear in linears)

        addresses = map(self.address, (packed_weight.numbers, packed_weight.scales, bias))
        return _Weight(packed_weight.form, num_outputs, linears[0].in_features, *addresses)

    def _pack(self, linears: Sequence[Any]) -> PackedWeight:
        kind = getattr(linears[0], "kind", "none")
        weight = _joined(linears, "weight")
        if kind == "int8":
            int8_scale = _joined(linears, "scale") / LEVELS_OF_INT8
            return pack_int8(weight, int8_scale, self.packing)
        if kind == "int4":
            return pack_int4(weight, _joined(linears, "scale", 1), self.packing)
        return pack_float(weight)


class _Below(Mapping[str, Tensor]):
    """The tensors whose names begin with a prefix, under the rest of their names."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str) -> None:
        self.tensors, self.prefix = tensors, prefix

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[self.prefix + name]

    def __iter__(self) -> Iterator[str]:
        return (name[len(self.prefix):] for name in self.tensors if name.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


# --- the slice --------------------------------------------------------------------------------------------------------

class NativeSlice:
    """A slice whose layers are computed in C, and which is called as a `Slice`.

    `body` is that slice without weights, of which the embedding and the tables of positions are used. `kind` is that of
    the weights in `tensors`. `windows` are those of the caches, as for `TreeCache`. Raises ValueError if there is no
    library, or if names or shapes of tensors do not match.
    """

    def __init__(self, body: Slice, kind: str,
                 tensors: Mapping[str, Tensor], num_threads: int,
                 windows: Sequence[int] = (), level: Level | None = None) -> None:
        assert body.rotary is not None, "a family without rotary positions is torch's"
        self.config, self.body, self.rotary = body.config, body, body.rotary
        self.layers = [int(number) for number in body.layers]  # their numbers in the model
        self._library = library(level)
        packing = (c_int64 * 3)()
        self._library.slice_packing(packing)
        self._weights = _Weights(Packing(*packing))

        hollow(body, kind)
        cache_windows = windows or (0,) * len(self.layers)
        layer_structures = [self._pack_layer(number, tensors, cache_windows) for number in self.layers]
        self._structures = (_Layer * len(self.layers))(*layer_structures)

        body.layers = nn.ModuleDict()
        outside_layers = {name: tensors[name] for name in tensors if not name.startswith("layers.")}
        fill(body, outside_layers, torch.float32, "cpu")
        self._handle = self._begin(num_threads)

    def _pack_layer(self, number: int, tensors: Mapping[str, Tensor],
                    cache_windows: Sequence[int]) -> _Layer:
        """Fill the layer of this number, and pack its weights."""
        layer, weights = self.body.layers[str(number)], self._weights
        assert isinstance(layer, Layer), "a slice consists of layers"
        fill(layer, _Below(tensors, f"layers.{number}."), torch.float32, "cpu")
        attention, mlp = layer.self_attn, layer.mlp

        layer_index = number - self.layers[0]
        cache_window = cache_windows[layer_index]
        skips_rotation = self.config.unturned and self.config.unturned[number]
        structure = _Layer(
            window=self.config.window(number),
            rotates=not skips_rotation,
            slots=sorted(set(cache_windows)).index(cache_window),
            place=list(cache_windows[:layer_index]).count(cache_window))

        structure.attention_norm = weights.norm_address(layer.input_layernorm)
        structure.mlp_norm = weights.norm_address(layer.post_attention_layernorm)
        structure.q_norm = weights.norm_address(attention.q_norm)
        structure.k_norm = weights.norm_address(attention.k_norm)
        structure.qkv = weights.linear_weight(attention.q_proj, attention.k_proj, attention.v_proj)
        structure.o = weights.linear_weight(attention.o_proj)
        structure.gate_up = weights.linear_weight(mlp.gate_proj, mlp.up_proj)
        structure.down = weights.linear_weight(mlp.down_proj)
        return structure

    def _begin(self, num_threads: int) -> int:
        """Return the library's handle of this slice, which is freed with this object."""
        c = self.config
        model = _Model(
            hidden=c.hidden, heads=c.heads, kv_heads=c.kv_heads, head_dim=c.head_dim,
            rotated=int(c.head_dim * c.turned), intermediate=c.intermediate, layers=len(self.layers),
            eps=c.eps, scale=c.scales.scores or c.head_dim ** -0.5,
            layer=self._structures, norm=self._weights.norm_address(self.body.norm))

        self._library.slice_new.restype = c_void_p
        handle = self._library.slice_new(byref(model), c_int64(num_threads))
        if not handle:
            raise MemoryError(f"{num_threads} threads cannot be started: give threads_per_rank a smaller value")
        weakref.finalize(self, self._library.slice_free, c_void_p(handle))
        return handle  # type: ignore[no-any-return]

    def __call__(self, x: Tensor, pos_T: Tensor, cache: AdmittingRows,
                 inner: dict[int, Tensor] | None = None,
                 still_needed: Callable[[], bool] = lambda: True) -> Tensor | None:
        """Return the hidden states `[T, D]` after the last layer; the arguments are those of `Slice.forward`.

        Raises IndexError for rows of a wrong width, at positions beyond the context, or without slots in the caches.
        """
        x_TD = self.body.embed(x, pos_T).clone(memory_format=torch.contiguous_format)
        shape, expected_shape = tuple(x_TD.shape), (len(pos_T), self.config.hidden)
        if shape != expected_shape or x_TD.dtype != torch.float32:
            raise IndexError(f"rows of shape {shape} in {x_TD.dtype} instead of {expected_shape} in float32")

        # all of these own memory that the library reads, and live until it returns
        rotation = self.rotary.at(pos_T, x_TD)
        cos_table, sin_table = (table.contiguous() for table in rotation)
        admitted = cache.admitted()
        requests = (_Request * len(admitted))(*map(_request, admitted))
        wanted_inputs = filter(self._computes_input, inner or ())
        copies = {number: torch.empty_like(x_TD) for number in wanted_inputs}
        errors: list[BaseException] = []

        segment = _Segment(
            rows=len(x_TD), requests=len(admitted), x=x_TD.data_ptr(), cos=cos_table.data_ptr(),
            sin=sin_table.data_ptr(), request=requests, inputs=self._addresses(copies),
            still_needed=_keeping(still_needed, errors))
        result = self._library.slice_run(c_void_p(self._handle), byref(segment))
        _check(result, errors)

        if result == GIVEN_UP:
            return None
        if inner:
            inner.update(copies)
        return x_TD

    def _computes_input(self, number: int) -> bool:
        """Whether this slice computes the input of this layer, or the output of the model's last one."""
        is_output = number == self.config.layers == self.layers[-1] + 1
        return number in self.layers or is_output

    def _addresses(self, copies: Mapping[int, Tensor]) -> Any:
        """Return where to copy the input of each layer, and the output of the last one."""
        addresses = (c_void_p * (len(self.layers) + 1))()
        for number, copy in copies.items():
            addresses[number - self.layers[0]] = copy.data_ptr()
        return addresses


def _keeping(still_needed: Callable[[], bool], errors: list[BaseException]) -> Any:
    """Return `still_needed` for C, through which no exception can pass: one is kept in `errors`."""
    def is_needed() -> bool:
        try:
            return still_needed()
        except BaseException as error:
            errors.append(error)
            return False

    return StillNeeded(is_needed)


def _check(result: int, errors: Sequence[BaseException]) -> None:
    if errors:
        raise errors[0]
    if result == NO_MEMORY:
        raise MemoryError("the native kernels got no memory: give max_length or prefill_chunk a smaller value")
    if result not in (DONE, GIVEN_UP):
        raise IndexError("the rows do not fit their caches")
