"""Layers whose outputs depend on the path of a row, in its order: short convolutions and gated delta nets.

Shapes: T rows, D model, W inputs that a step reads, N numbers of an input, H heads, K dimensions of a key, V of a
value.
"""
from __future__ import annotations

from typing import Any, Mapping, NamedTuple, Sequence

import torch
from torch import Tensor, nn

from model.attention import CachedRows
from model.memory import MemoryForm
from model.plain_layers import Product, RMSNorm, linear
from model.precision import for_sums, sigmoid, silu, softplus
from model.rotary import Rotation

LEAST_SQUARE = 1e-6  # added to the squared length of a delta net's queries and keys


class DeltaSizes(NamedTuple):
    """The sizes of a gated delta net; each key head serves as many value heads."""

    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    is_tiled: bool = False  # a key head's value heads are as far apart as there are key heads, not neighbours

    @property
    def widths(self) -> list[int]:
        """The numbers of a row's queries, keys and values."""
        key_width = self.key_heads * self.key_dim
        return [key_width, key_width, self.value_heads * self.value_dim]

    @property
    def memory_form(self) -> MemoryForm:
        """What a delta net keeps."""
        state_shape = self.value_heads, self.key_dim, self.value_dim
        return MemoryForm(sum(self.widths) + 2 * self.value_heads, state_shape)

    @staticmethod
    def read(fields: Mapping[str, Any]) -> DeltaSizes:
        """Read the sizes from the fields of a `config.json`; zeros if there are none."""
        names = "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"
        key_heads, value_heads, key_dim, value_dim = (fields.get(f"linear_{name}") or 0 for name in names)
        return DeltaSizes(key_heads, value_heads, key_dim, value_dim, is_tiled=bool(fields.get("tiled_value_heads")))


class ShortConvolution(nn.Module):
    """LFM2's recurrent layer: a gated row, weighted with the last ones of its path, column by column, and gated again.

    A `Recurrence` without a state.
    """

    def __init__(self, hidden: int, num_taps: int) -> None:
        super().__init__()
        self.num_taps = num_taps
        self.in_proj = linear(hidden, 3 * hidden)
        self.conv = Taps(hidden, num_taps)
        self.out_proj = linear(hidden, hidden)

    def forward(self, x_TD: Tensor, rotation: Rotation | None, cache: CachedRows, layer: int) -> Tensor:
        in_gate, out_gate, row = self.in_proj(x_TD).chunk(3, -1)
        return self.out_proj(out_gate * cache.recur(layer, in_gate * row, self))  # type: ignore[no-any-return]

    def steps(self, inputs_TWN: Tensor) -> Sequence[Tensor]:
        return [self.conv(inputs_TWN)]

    def advance(self, steps: Sequence[Tensor], state: Tensor) -> Tensor:
        raise NotImplementedError("it has no states")


class Taps(nn.Module):
    """The weights `[N, 1, W]` of a convolution over the last inputs of a path, each column by itself."""

    def __init__(self, width: int, num_taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, 1, num_taps, device="meta"), requires_grad=False)

    def forward(self, inputs_TWN: Tensor) -> Tensor:
        wide_dtype = torch.promote_types(torch.float32, inputs_TWN.dtype)
        weight_WN = self.weight[:, 0].t().to(wide_dtype)
        sum_TN = inputs_TWN[:, 0] * weight_WN[0]
        for tap in range(1, len(weight_WN)):
            sum_TN = sum_TN + inputs_TWN[:, tap] * weight_WN[tap]
        return sum_TN.to(inputs_TWN.dtype)


class DeltaRows(NamedTuple):
    """What the rows of one path do to the state `[H, K, V]` of a delta net."""

    queries: Tensor  # `[T, H, K]`, as keys
    keys: Tensor
    values: Tensor  # `[T, H, V]`
    decays: Tensor  # `[T, H]`, as rates
    rates: Tensor


def continue_state(rows: DeltaRows, state_HKV: Tensor) -> Tensor:
    """Continue a state by rows, token by token; return what they read of it `[T, H, V]`."""
    out_THV = torch.empty_like(rows.values)
    for row, (query_HK, key_HK, value_HV, decay_H, rate_H) in enumerate(zip(*rows)):
        state_HKV *= decay_H[:, None, None]
        recalled_HV = (state_HKV * key_HK[..., None]).sum(1)
        difference_HV = (value_HV - recalled_HV) * rate_H[:, None]
        state_HKV += key_HK[..., None] * difference_HV[:, None]
        out_THV[row] = (state_HKV * query_HK[..., None]).sum(1)
    return out_THV


class DeltaNet(nn.Module):
    """Qwen3-Next's recurrent layer: a state that decays, and learns the difference to what it recalls for a key.

    A `Recurrence`. Its inputs are queries, keys and values before a convolution, then a rate and a decay of each head.
    """

    fusible = ("in_proj_qkv", "in_proj_b", "in_proj_a", "in_proj_z")
    exact = ("A_log", "dt_bias")

    def __init__(self, hidden: int, num_taps: int, sizes: DeltaSizes, eps: float) -> None:
        super().__init__()
        self.sizes, self.num_taps = sizes, num_taps
        self.continue_state = continue_state
        num_heads, input_width, value_width = sizes.value_heads, sum(sizes.widths), sizes.widths[-1]

        # products
        self.fused_product: Product | None = None
        self.in_proj_qkv = linear(hidden, input_width)
        self.in_proj_b = linear(hidden, num_heads)
        self.in_proj_a = linear(hidden, num_heads)
        self.in_proj_z = linear(hidden, value_width)
        self.out_proj = linear(value_width, hidden)

        # other weights
        self.conv1d = Taps(input_width, num_taps)
        unfilled = torch.empty(num_heads, device="meta")
        self.A_log = nn.Parameter(unfilled, requires_grad=False)
        self.dt_bias = nn.Parameter(unfilled, requires_grad=False)
        self.norm = RMSNorm(sizes.value_dim, eps)

    def forward(self, x_TD: Tensor, rotation: Rotation | None, cache: CachedRows, layer: int) -> Tensor:
        if self.fused_product is None:
            products = self.in_proj_qkv, self.in_proj_b, self.in_proj_a, self.in_proj_z
            input_gate_TN = torch.cat([product(x_TD) for product in products], -1)
        else:
            input_gate_TN = self.fused_product(x_TD)
        value_width = self.sizes.widths[-1]
        input_TN, gate_TN = input_gate_TN.split((input_gate_TN.shape[-1] - value_width, value_width), -1)

        out_TN = cache.recur(layer, input_TN, self)
        normed_THV = self.norm(out_TN.unflatten(1, (-1, self.sizes.value_dim)))
        gated_TN = normed_THV.flatten(1) * silu(gate_TN.to(out_TN.dtype))
        return self.out_proj(gated_TN.to(x_TD.dtype))  # type: ignore[no-any-return]

    def advance(self, steps: Sequence[Tensor], state: Tensor) -> Tensor:
        return self.continue_state(DeltaRows(*steps), state).flatten(1)

    def steps(self, inputs_TWN: Tensor) -> Sequence[Tensor]:
        key_width, _, value_width = self.sizes.widths
        wide_dtype = torch.promote_types(torch.float32, inputs_TWN.dtype)
        inputs_TWN = inputs_TWN.to(wide_dtype)
        input_widths = 2 * key_width + value_width, 2 * self.sizes.value_heads
        mixed_TWN, rate_decay_TN = inputs_TWN.split(input_widths, -1)

        # queries and keys of each value head, values, rates and decays
        mixed_TN = silu(self.conv1d(mixed_TWN))
        query_TN, key_TN, value_TN = mixed_TN.split(self.sizes.widths, -1)
        query_THK, key_THK = self._unit(query_TN), self._unit(key_TN)
        query_THK = query_THK * self.sizes.key_dim ** -0.5
        value_THV = value_TN.unflatten(1, (-1, self.sizes.value_dim))

        rate_TH, step_TH = for_sums(rate_decay_TN[:, -1]).chunk(2, -1)
        log_speed_H, dt_bias_H = (for_sums(x.to(wide_dtype)) for x in (self.A_log, self.dt_bias))
        decay_TH = torch.exp(-log_speed_H.exp() * softplus(step_TH + dt_bias_H))

        decays_and_rates = (x.to(wide_dtype) for x in (decay_TH, sigmoid(rate_TH)))
        return DeltaRows(query_THK, key_THK, value_THV, *decays_and_rates)

    def _unit(self, x_TN: Tensor) -> Tensor:
        """Return queries or keys of each value head, of length 1."""
        x_THK = x_TN.unflatten(1, (self.sizes.key_heads, self.sizes.key_dim))
        square_TH1 = for_sums(x_THK).square().sum(-1, keepdim=True)
        unit_THK = x_THK * torch.rsqrt(square_TH1 + LEAST_SQUARE).to(x_TN.dtype)
        values_per_key = self.sizes.value_heads // self.sizes.key_heads
        if self.sizes.is_tiled:
            return unit_THK.repeat(1, values_per_key, 1)
        return unit_THK.repeat_interleave(values_per_key, 1)
