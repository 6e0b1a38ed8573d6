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

INTO = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # products at the beginning of a block
OUT = ("o_proj", "down_proj")  # products at the end of a block


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

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs

    def forward(self, x_TN: Tensor) -> Tensor:
        return x_TN.new_zeros(len(x_TN), self.outputs)


class Summed(nn.Module):
    """A feed-forward layer of sharded experts; all members choose the same experts for a row."""

    def __init__(self, experts: nn.Module, comm: Comm) -> None:
        super().__init__()
        self.experts, self.rows, self.comm = experts, nn.Identity(), comm

    def forward(self, x: Any) -> Tensor:
        x_TD = x.of(self.rows) if isinstance(x, Products) else x
        return self.comm.leave_block(x_TD, self.experts)


class Idle(nn.Module):
    """The attention of a member without heads, or the MLP of one without columns: it only takes part in the sums."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up_proj = ZeroProduct(0)
        self.down_proj = ZeroProduct(hidden)

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
        self.into_attention = self._join(self.self_attn)
        if isinstance(layer.mlp, Experts):
            self.mlp = summed = Summed(layer.mlp, comm)
            self.into_mlp: list[nn.Module] = [summed.rows]
        else:
            self.into_mlp = self._join(self.mlp)

    def _join(self, block: nn.Module) -> list[nn.Module]:
        """Make the products at both ends of a block parallel; return those at its beginning."""
        into = [name for name in INTO if getattr(block, name, None) is not None]
        products: list[nn.Module] = [getattr(block, name) for name in into]
        if self.comm.gathers:
            block.fused_product = None  # type: ignore[assignment]
            for name, product in zip(into, products):
                setattr(block, name, ColumnParallel(product))
        for name in OUT:
            if hasattr(block, name):
                setattr(block, name, RowParallel(getattr(block, name), self.comm))
        return products

    def forward(self, x_TD: Tensor, rotation: Rotation | None, cache: CachedRows, layer: int) -> Tensor:
        x = self.input_layernorm(x_TD)
        if self.opens:
            x_tD = self.comm.scatter(x_TD)
        else:
            x_tD, x = x_TD, self.comm.enter_block(x, self.into_attention)
        made_tD = self.self_attn(x, rotation, cache, layer)
        x_tD = self.add(x_tD, self.after_attention(made_tD))
        x = self.comm.enter_block(self.post_attention_layernorm(x_tD), self.into_mlp)
        return self.add(x_tD, self.after_mlp(self.mlp(x)))


def empty_slice(c: LlamaConfig, share: Share, first: int, last: int) -> Slice:
    """Return the layers [first, last) of one member, without memory; cut tensors (`share.cut`) will fill them."""
    own = share.sizes(c)
    # a module needs at least one head and one column; blocks without any are replaced below
    least = {name: max(1, getattr(own, name)) for name in ("heads", "kv_heads", "intermediate")}
    body = Slice(replace(own, **least), first, last)
    body.config = own
    blocks = (("self_attn", "o_proj", own.heads), ("mlp", "down_proj", own.intermediate))
    for layer in body.layers.values():
        for (block, out, held), biased in zip(blocks, share.biased):
            if not held:
                setattr(layer, block, Idle(c.hidden))
            elif not biased:
                for name, product in layer.get_submodule(block).named_modules():
                    if name.endswith(out):
                        setattr(product, "bias", None)  # noqa: B010
    return body


class ShardedSlice:
    """A member's slice with its weights, as a stage calls it: inputs and outputs are all rows.

    `still_needed` is not called, since members would notice a dead segment at different layers.
    """

    def __init__(self, body: Slice, comm: Comm) -> None:
        self.body, self.comm = body, comm
        self._first = int(next(iter(body.layers)))
        for number, layer in body.layers.items():
            assert isinstance(layer, Layer), f"layer {number} is a {type(layer).__name__}: it was sharded before"
            body.layers[number] = TPLayer(layer, comm, opens=int(number) == self._first)

    def __call__(self, x: Tensor, pos_T: Tensor, cache: SegmentCache, inner: dict[int, Tensor] | None = None,
                 still_needed: Callable[[], bool] = lambda: True) -> Tensor:
        self.comm.open(len(x), cache.settled)
        out_TD = self.comm.gather(self.body(x, pos_T, cache, inner))
        if inner:
            # the first layer's input has all rows already; all members gather the others in the same order
            for number in sorted(set(inner) - {self._first}):
                inner[number] = self.comm.gather(inner[number])
        return out_TD
