"""Sharded layers: each member of a group computes some heads and columns of each layer, and the group adds them up.

They consist of the model's own modules, and know nothing about the formulas of a model family; model/llama.py knows
nothing about them. Every member has the whole embedding and all norms.

Shapes: T rows of a segment, t rows that a member keeps between blocks, D model, N a member's share of another width.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable

from torch import Tensor, nn

from model.attention import CachedRows
from model.cache import SegmentCache
from model.llama import Experts, Layer, LlamaConfig, Slice
from model.rotary import Rotation
from tp.comm import Comm, Products
from tp.shares import Share

FIRST_PRODUCTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # at the beginning of a block
LAST_PRODUCTS = ("o_proj", "down_proj")  # at the end of a block


class ColumnParallel(nn.Module):
    """A product with sharded outputs (column-parallel); it may have been computed while the rows arrived."""

    def __init__(self, product: nn.Module) -> None:
        super().__init__()
        self.product = product

    def forward(self, x: Any) -> Any:
        return x.of(self.product) if isinstance(x, Products) else self.product(x)


class RowParallel(nn.Module):
    """A product with sharded inputs (row-parallel); its outputs are summed over the members."""

    def __init__(self, product: nn.Module, comm: Comm) -> None:
        super().__init__()
        self.product, self.comm = product, comm

    def forward(self, x_TN: Tensor) -> Tensor:
        return self.comm.leave_block(x_TN, self.product)


class ZeroProduct(nn.Module):
    """The product of a member without a share of it: zeros."""

    def __init__(self, num_outputs: int) -> None:
        super().__init__()
        self.num_outputs = num_outputs

    def forward(self, x_TN: Tensor) -> Tensor:
        return x_TN.new_zeros(len(x_TN), self.num_outputs)


class Summed(nn.Module):
    """A feed-forward layer of sharded experts; all members choose the same experts for a row."""

    def __init__(self, experts: nn.Module, comm: Comm) -> None:
        super().__init__()
        self.experts, self.row_product, self.comm = experts, nn.Identity(), comm

    def forward(self, x: Any) -> Tensor:
        x_TD = x.of(self.row_product) if isinstance(x, Products) else x
        return self.comm.leave_block(x_TD, self.experts)


class Idle(nn.Module):
    """The attention of a member without heads, or the MLP of one without columns: it only takes part in the sums."""

    def __init__(self, row_width: int) -> None:
        super().__init__()
        self.up_proj = ZeroProduct(0)
        self.down_proj = ZeroProduct(row_width)

    def forward(self, x: Any, *_: Any) -> Any:
        return self.down_proj(self.up_proj(x))


class TPLayer(nn.Module):
    """A layer of which this member holds a share; if it `opens` the slice, its input is all rows `[T, D]`."""

    def __init__(self, layer: Layer, comm: Comm, opens: bool) -> None:
        super().__init__()
        self.comm, self.opens = comm, opens
        self.input_layernorm = layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.after_attention, self.after_mlp, self.add = layer.after_attention, layer.after_mlp, layer.add
        self.self_attn: nn.Module = layer.self_attn
        self.mlp: nn.Module = layer.mlp

        self.attention_products = self._parallelize(self.self_attn)
        if isinstance(layer.mlp, Experts):
            self.mlp = summed = Summed(layer.mlp, comm)
            self.mlp_products: list[nn.Module] = [summed.row_product]
        else:
            self.mlp_products = self._parallelize(self.mlp)

    def _parallelize(self, block: nn.Module) -> list[nn.Module]:
        """Make the products at both ends of a block parallel; return those at its beginning."""
        first_names = [name for name in FIRST_PRODUCTS if getattr(block, name, None) is not None]
        first_products: list[nn.Module] = [getattr(block, name) for name in first_names]
        if self.comm.gathers:
            block.fused_product = None  # type: ignore[assignment]
            for name, product in zip(first_names, first_products):
                setattr(block, name, ColumnParallel(product))

        for name in LAST_PRODUCTS:
            if hasattr(block, name):
                setattr(block, name, RowParallel(getattr(block, name), self.comm))
        return first_products

    def forward(self, x_TD: Tensor, rotation: Rotation | None, cache: CachedRows, layer: int) -> Tensor:
        # attention
        block_input = self.input_layernorm(x_TD)
        if self.opens:
            x_tD = self.comm.scatter(x_TD)
        else:
            x_tD, block_input = x_TD, self.comm.enter_block(block_input, self.attention_products)
        attention_tD = self.self_attn(block_input, rotation, cache, layer)
        x_tD = self.add(x_tD, self.after_attention(attention_tD))

        # MLP
        block_input = self.comm.enter_block(self.post_attention_layernorm(x_tD), self.mlp_products)
        mlp_tD = self.mlp(block_input)
        return self.add(x_tD, self.after_mlp(mlp_tD))


def empty_slice(c: LlamaConfig, share: Share, first: int, last: int) -> Slice:
    """Return the layers [first, last) of one member, without memory; cut tensors (`share.cut`) will fill them."""
    member_config = share.sizes(c)
    # a module needs at least one head and one column; blocks without any are replaced below
    min_sizes = {name: max(1, getattr(member_config, name)) for name in ("heads", "kv_heads", "intermediate")}
    body = Slice(replace(member_config, **min_sizes), first, last)
    body.config = member_config

    blocks = (("self_attn", "o_proj", member_config.heads), ("mlp", "down_proj", member_config.intermediate))
    for layer in body.layers.values():
        for (block_name, last_product, size), adds_bias in zip(blocks, share.biased):
            if not size:
                setattr(layer, block_name, Idle(c.hidden))
            elif not adds_bias:
                for name, product in layer.get_submodule(block_name).named_modules():
                    if name.endswith(last_product):
                        setattr(product, "bias", None)  # noqa: B010
    return body


class ShardedSlice:
    """A member's slice with its weights, as a stage calls it: inputs and outputs are all rows.

    `still_needed` is not called, since members would notice a dead segment at different layers.
    """

    def __init__(self, body: Slice, comm: Comm) -> None:
        self.body, self.comm = body, comm
        self._first_layer = int(next(iter(body.layers)))
        for number, layer in body.layers.items():
            assert isinstance(layer, Layer), f"layer {number} is a {type(layer).__name__}: it was sharded before"
            body.layers[number] = TPLayer(layer, comm, opens=int(number) == self._first_layer)

    def __call__(self, x: Tensor, pos_T: Tensor, cache: SegmentCache, inner: dict[int, Tensor] | None = None,
                 still_needed: Callable[[], bool] = lambda: True) -> Tensor:
        self.comm.open(len(x), cache.settled)
        out_TD = self.comm.gather(self.body(x, pos_T, cache, inner))
        if inner:
            # the first layer's input has all rows already; all members gather the others in the same order
            for number in sorted(set(inner) - {self._first_layer}):
                inner[number] = self.comm.gather(inner[number])
        return out_TD
