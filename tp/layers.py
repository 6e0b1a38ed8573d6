"""ShardedSlice layers: a slice of the model with fewer heads and columns in each layer, whose sums a group adds up.

They are made of the model's own modules and know nothing about what a family computes; the model's file knows nothing
about them. Embedding and norms are whole on every member.

Shapes: T rows of a segment, t rows that a member keeps between blocks, D model, N what it holds of a wider dimension.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable

from torch import Tensor, nn

from model.cache import TreeCache
from model.llama import Layer, LlamaConfig, Slice
from tp.comm import Comm, Products
from tp.shares import Share

INTO, OUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")  # of a block


class Column(nn.Module):
    """A product whose outputs are sharded; it may have been made already, while the rows came in."""

    def __init__(self, product: nn.Module) -> None:
        super().__init__()
        self.product = product

    def forward(self, x: Any) -> Any:
        return x.of(self.product) if isinstance(x, Products) else self.product(x)


class Row(nn.Module):
    """A product whose inputs are sharded, so that its outputs have to be added up."""

    def __init__(self, product: nn.Module, comm: Comm) -> None:
        super().__init__()
        self.product, self.comm = product, comm

    def forward(self, x_TN: Tensor) -> Tensor:
        return self.comm.leave(x_TN, self.product)


class Nothing(nn.Module):
    """The product of a member that holds nothing of it: zeros."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs

    def forward(self, x_TN: Tensor) -> Tensor:
        return x_TN.new_zeros(len(x_TN), self.outputs)


class Idle(nn.Module):
    """The attention of a member without heads, or its MLP without columns: it only takes part in what others send."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = Nothing(0), Nothing(hidden)

    def forward(self, x: Any, *_: Any) -> Any:
        return self.down_proj(self.up_proj(x))


class TPLayer(nn.Module):
    """A layer of which this member holds a share; the layer that `opens` a slice gets all rows."""

    def __init__(self, layer: Layer, comm: Comm, opens: bool) -> None:
        super().__init__()
        self.comm, self.opens = comm, opens
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        self.self_attn: nn.Module = layer.self_attn
        self.mlp: nn.Module = layer.mlp
        self.into_attention, self.into_mlp = self._join(self.self_attn), self._join(self.mlp)

    def _join(self, block: nn.Module) -> list[nn.Module]:
        """Let a block take rows that come in, and its sums be added up; the products that it begins with."""
        into = [name for name in INTO if getattr(block, name, None) is not None]
        products: list[nn.Module] = [getattr(block, name) for name in into]
        for name, product in zip(into if self.comm.gathers else (), products):
            setattr(block, name, Column(product))
        for name in OUT:
            if hasattr(block, name):
                setattr(block, name, Row(getattr(block, name), self.comm))
        return products

    def forward(self, x_TD: Tensor, turn: tuple[Tensor, Tensor] | None, cache: TreeCache, layer: int) -> Tensor:
        x = self.input_layernorm(x_TD)
        if self.opens:
            x_tD = self.comm.scatter(x_TD)
        else:
            x_tD, x = x_TD, self.comm.enter(x, self.into_attention)
        x_tD = x_tD + self.self_attn(x, turn, cache, layer)
        return x_tD + self.mlp(self.comm.enter(self.post_attention_layernorm(x_tD), self.into_mlp))


def hollow(c: LlamaConfig, share: Share, first: int, last: int) -> Slice:
    """The slice [first, last) of one member, without memory yet: what `share.cut` leaves of the tensors fills it."""
    own = share.sizes(c)
    part = Slice(replace(own, heads=max(1, own.heads), kv_heads=max(1, own.kv_heads),
                         intermediate=max(1, own.intermediate)), first, last)
    part.config = own
    blocks = (("self_attn", "o_proj", own.heads), ("mlp", "down_proj", own.intermediate))
    for layer in part.layers.values():
        for (block, out, held), biased in zip(blocks, share.biased):
            if not held:
                setattr(layer, block, Idle(c.hidden))
            elif not biased:
                setattr(layer.get_submodule(f"{block}.{out}"), "bias", None)  # noqa: B010
    return part


class ShardedSlice:
    """A member's slice, filled, as a stage calls it: all rows in, all rows out.

    A segment is never given up between two layers, since not all members hear at the same layer that it has died.
    """

    def __init__(self, part: Slice, comm: Comm) -> None:
        self.part, self.comm = part, comm
        self._first = int(next(iter(part.layers)))
        for number, layer in part.layers.items():
            assert isinstance(layer, Layer)
            part.layers[number] = TPLayer(layer, comm, opens=int(number) == self._first)

    def __call__(self, x: Tensor, pos_T: Tensor, cache: TreeCache, inner: dict[int, Tensor] | None = None,
                 go_on: Callable[[], bool] = lambda: True) -> Tensor:
        self.comm.open(len(x), cache.settled)
        out_TD = self.comm.gather(self.part(x, pos_T, cache, inner))
        if inner:
            inner.update((number, self.comm.gather(x)) for number, x in inner.items() if number != self._first)
        return out_TD
