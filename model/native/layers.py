"""The layers of a stage in C (`slice.c`): one call computes a segment in all of them.

`NativeSlice` replaces a `Slice` unless `reason_against` has a reason. A row has the same bits in every segment, with
any number of threads, and on every processor.

Shapes: T rows, D model, H heads, K key/value heads, S cache slots, E head dimension.
"""
from __future__ import annotations

from ctypes import byref, c_void_p
from functools import partial
from typing import Any, Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from model.cache import NativeCache
from model.llama import Layer, LlamaConfig, Slice, fill
from model.native.compiler import Level, library
from model.native.linear import EMBEDDING, LANES
from model.native.structures import (
    GIVEN_UP,
    CLayer,
    CModel,
    CRequest,
    CSegment,
    StillNeeded,
    Weights,
    check_result,
    reason_against_numbers,
    request_of,
    start,
)
from model.weights.checkpoint import form_of
from model.weights.quant import Recast
from model.weights.quant_layers import StoredEmbedding, hollow_blocks

CACHED_CODES = torch.int16  # of keys and values, unless another type is asked for


def reason_against(c: LlamaConfig, dtype: torch.dtype,
                   device: torch.device, kind: str) -> str:
    """Return why torch must compute these layers; empty if the native kernels can."""
    if reason := reason_against_numbers(dtype, device, kind, c.hidden):
        return reason
    family = c.family
    has_basics = family.rms and family.rotary and family.gated and family.before
    has_partial_local = c.local_theta and c.rotated_share != 1  # local tables have a head's full width
    extra_steps = family.wide_norms, family.sinks, family.clamped, c.experts, c.recurrent, has_partial_local
    if not has_basics or any(extra_steps):
        return f"the native kernels do not compute the layers of {family.architecture}"
    if c.head_dim % LANES or c.heads % c.kv_heads:
        return f"the native kernels need heads of a multiple of {LANES} dimensions"
    return ""


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

    `body` is that slice without weights, of which the embedding and the tables of positions are used. Weights in
    `tensors` may be in blocks. `windows` are those of the caches, as for `TreeCache`. Raises ValueError if there is no
    library, or if names or shapes of tensors do not match.
    """

    def __init__(self, body: Slice, tensors: Mapping[str, Tensor], num_threads: int,
                 windows: Sequence[int] = (), level: Level | None = None) -> None:
        assert body.rotary is not None, "a family without rotary positions is torch's"
        self.config, self.body, self.rotary = body.config, body, body.rotary
        self.layers = [int(number) for number in body.layers]  # their numbers in the model
        self._library = library(level)
        self._weights = Weights()

        hollow_blocks(body, tensors)
        cache_windows = windows or (0,) * len(self.layers)
        layer_structures = [self._pack_layer(number, tensors, cache_windows) for number in self.layers]
        self._structures = (CLayer * len(self.layers))(*layer_structures)

        body.layers = nn.ModuleDict()
        self._fill_outside_layers(tensors)
        self._handle = self._start(num_threads)

    def _pack_layer(self, number: int, tensors: Mapping[str, Tensor],
                    cache_windows: Sequence[int]) -> CLayer:
        """Fill the layer of this number, and pack its weights."""
        layer, weights = self.body.layers[str(number)], self._weights
        assert isinstance(layer, Layer), "a slice consists of layers"
        fill(layer, _Below(tensors, f"layers.{number}."), torch.float32, "cpu")
        attention, mlp = layer.self_attn, layer.mlp

        layer_index = number - self.layers[0]
        cache_window = cache_windows[layer_index]
        skips_rotation = self.config.skips_rope and self.config.skips_rope[number]
        structure = CLayer(
            window=self.config.window(number),
            rotates=not skips_rotation,
            slots_index=sorted(set(cache_windows)).index(cache_window),
            layer_in_slots=list(cache_windows[:layer_index]).count(cache_window))

        structure.is_local = self.body.local_rotary is not None and self.config.window(number) > 0
        structure.attention_norm = weights.norm_address(layer.input_layernorm)
        structure.mlp_norm = weights.norm_address(layer.post_attention_layernorm)
        structure.after_attention_norm = weights.norm_address(layer.after_attention)
        structure.after_mlp_norm = weights.norm_address(layer.after_mlp)
        structure.q_norm = weights.norm_address(attention.q_norm)
        structure.k_norm = weights.norm_address(attention.k_norm)
        structure.qkv = weights.linear_weight(attention.q_proj, attention.k_proj, attention.v_proj)
        structure.o = weights.linear_weight(attention.o_proj)
        structure.gate_up = weights.linear_weight(mlp.gate_proj, mlp.up_proj)
        structure.down = weights.linear_weight(mlp.down_proj)
        return structure

    def _fill_outside_layers(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill the parts that torch computes; the embedding stays as its file has it."""
        outside_names = {name for name in tensors if not name.startswith("layers.")}
        outside_tensors = {name: tensors[name] for name in outside_names - {EMBEDDING}}

        if EMBEDDING in outside_names:
            stored_embedding = tensors.map_stored(EMBEDDING) if isinstance(tensors, Recast) else tensors[EMBEDDING]
            self.body.embed_tokens = StoredEmbedding(  # type: ignore[assignment]
                form_of(stored_embedding), torch.float32)
            outside_tensors[EMBEDDING] = stored_embedding
        fill(self.body, outside_tensors, torch.float32, "cpu")

    def _start(self, num_threads: int) -> Any:
        """Return the slice in C."""
        c = self.config
        model = CModel(
            hidden_size=c.hidden, num_heads=c.heads, num_kv_heads=c.kv_heads, head_dim=c.head_dim,
            rotated_dim=int(c.head_dim * c.rotated_share), intermediate_size=c.intermediate,
            num_layers=len(self.layers), norm_eps=c.eps, score_scale=c.scales.scores or c.head_dim ** -0.5,
            layers=self._structures, final_norm=self._weights.norm_address(self.body.norm))
        model.uses_gelu, model.residual_scale, model.score_cap = c.family.gelu, c.scales.residual, c.scales.score_cap
        return start(self, self._library, model, num_threads)

    def __call__(self, x: Tensor, pos_T: Tensor, cache: NativeCache,
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
        local_rotary = self.body.local_rotary
        local_tables = [table.contiguous() for table in local_rotary.at(pos_T, x_TD)] if local_rotary else []
        admitted = cache.admitted()
        requests = (CRequest * len(admitted))(*map(request_of, admitted))
        wanted_inputs = filter(self._computes_input, inner or ())
        copies = {number: torch.empty_like(x_TD) for number in wanted_inputs}
        errors: list[BaseException] = []

        segment = CSegment(
            num_rows=len(x_TD), num_requests=len(admitted), x=x_TD.data_ptr(), cos=cos_table.data_ptr(),
            sin=sin_table.data_ptr(), requests=requests, layer_inputs=self._addresses(copies),
            still_needed=_keeping(still_needed, errors))
        if local_tables:
            segment.local_cos, segment.local_sin = (table.data_ptr() for table in local_tables)
        result = self._library.slice_run(self._handle, byref(segment))
        if errors:
            raise errors[0]
        check_result(result)

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
    """Return `still_needed` for C, through which no exception can pass: one is kept in `errors`.

    Ctrl-C during the computation is raised when Python code begins to run again. So that code is a generator, which
    goes on inside its `try`; the first line of a function is outside of any, and ctypes would drop the exception.
    """
    def answers() -> Iterator[bool]:
        answer = True
        try:
            while True:
                yield answer
                answer = still_needed()
        except GeneratorExit:
            raise
        except BaseException as error:
            errors.append(error)
            yield False

    generator = answers()
    next(generator)
    return StillNeeded(partial(next, generator))
