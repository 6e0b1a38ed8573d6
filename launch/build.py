"""Build the parts of a rank from its specification: its stage, or rank 0's ring, LM head and decoders.

It knows nothing about processes. Builders change nothing but what they return.
"""
from __future__ import annotations

from typing import Any, Callable, Sequence

import torch
from torch import Tensor

from config.methods import METHODS
from config.run_config import RunConfig, TreeConfig
from launch.spec import RankSpec
from model.cache import TreeCache
from model.drafts.draft import Draft, NoDraft, Passes
from model.drafts.network import LMHead, read_all
from model.llama import Logits, Slice, fill
from model.native.layers import NativeSlice
from model.native.linear import NativeProducts, load_with_products
from model.sample import Penalties, Sampler
from model.weights.checkpoint import Checkpoint
from model.weights.parts import HEAD
from model.weights.quant import BLOCKS, Recast, kind_on
from model.weights.quant_layers import compress, load, pack, probe, return_freed_memory
from pipeline.decode import Decoder, PipelineLimits
from pipeline.replicas import Replicas
from pipeline.requests import Ring
from pipeline.stage import Stage
from pipeline.strategies import STRATEGIES
from pipeline.trace import REAL, Clock, NoTrace
from sim.clock import Pace
from sim.devices import SlowHead, SlowPasses, SlowSlice
from sim.groups import Paced, Times, slowest
from sim.ring import VirtualRing
from tp.comm import COMMS, Comm
from tp.group import Group
from tp.layers import ShardedSlice, empty_slice
from tp.shares import shares


def build_stage(spec: RankSpec, trace: NoTrace, group: Group | None = None) -> Stage:
    """Build the stage of one rank: its layers, or its share of the layers of its `group`, and a factory of caches."""
    spec.prepare_torch()
    sharing_group = group if group is not None and group.size > 1 else None
    body = load_layers(spec, spec.part.weights, sharing_group is not None, spec.windows)

    def new_cache() -> TreeCache:
        return body.config.cache(spec.layers, spec.slots, spec.like,
                                 spec.windows, spec.code_type, spec.part.layers[0])

    stage_layers: Callable[..., Tensor | None] = body
    if sharing_group is not None:
        assert isinstance(body, Slice), "ranks share torch's layers only"
        stage_layers = ShardedSlice(body, _comm(spec, sharing_group, trace))
    elif spec.config.cluster:
        share_of_model = spec.layers / spec.sizes.layers
        stage_layers = SlowSlice(body, Pace(spec.config.cluster.board(spec.part.rank), trace=trace), share_of_model)
    return Stage(stage_layers, new_cache, trace, spec.part.own_inner, spec.config.max_requests)


def load_layers(spec: RankSpec, source: Checkpoint, is_shared: bool = False,
                windows: Sequence[int] = ()) -> Slice | NativeSlice:
    """Load the rank's layers with weights from `source`; if `is_shared`, only this member's heads and columns of each.

    `windows` are those of the caches, if these drop slots.
    """
    # empty layers
    part, sizes = spec.part, spec.sizes
    if is_shared:
        share = shares(sizes, part.shares)[part.member]
        body = empty_slice(sizes, share, *part.layers)
    else:
        body = Slice(sizes, *part.layers)

    # their weights
    is_native = not spec.reason_for_torch
    probe(spec.quant, spec.dtype, spec.device)
    file_names = [name for name in source.names() if name != HEAD]
    name_in_file = {name[len("model."):]: name for name in file_names}
    weights = Recast(source, name_in_file, spec.quantizes, keeps_blocks=spec.quant == BLOCKS)
    if is_native:
        native_slice = NativeSlice(body, weights, torch.get_num_threads(), windows)
        return_freed_memory()
        return native_slice

    if spec.has_native_layers:
        load_with_products(body, weights, NativeProducts(torch.get_num_threads()))
        return_freed_memory()
        return body

    load(body, spec.quant, weights, spec.dtype, spec.device)
    if not is_shared:  # members may send rows between the parts of a product
        pack(body)
    return body


def _comm(spec: RankSpec, group: Group, trace: NoTrace) -> Comm:
    """Build the collective operations of ranks that share a stage; an emulated cluster delays them."""
    comm = COMMS[spec.config.comm](group, spec.sizes.hidden)
    cluster = spec.config.cluster
    if cluster is None:
        return comm

    layers_per_layer = cluster.layers / spec.sizes.layers  # of the modelled model, for one that is computed
    largest_share = max(spec.part.shares) / sum(spec.part.shares)
    first_rank = spec.part.rank - spec.part.member
    times = Times(slowest(cluster, range(first_rank, first_rank + group.size)), largest_share, group.size)
    return Paced(comm, Pace(cluster, trace=trace), layers_per_layer, times)


def build_lm_head(spec: RankSpec) -> Logits:
    """Build the LM head, which rank 0 holds."""
    spec.prepare_torch()
    quantization = spec.config.quant_head
    lm_head = Logits(spec.sizes)
    if quantization == "auto" and spec.keeps_blocks(HEAD):
        products = NativeProducts(torch.get_num_threads())
        lm_head.product = products.linear(spec.part.weights.read_stored(HEAD))  # type: ignore[assignment]
        return_freed_memory()
        return lm_head

    kind = "none" if quantization == "auto" else kind_on(spec.device, quantization)
    fill(lm_head, {"product.weight": spec.part.weights.read(HEAD)}, spec.dtype, spec.device)
    probe(kind, spec.dtype, spec.device)

    if spec.has_native_products(kind):
        products = NativeProducts(torch.get_num_threads())
        lm_head.product = products.quantized(kind, lm_head.product.weight)  # type: ignore[assignment]
        return lm_head

    compress(lm_head, kind, spec.dtype)
    pack(lm_head)
    return lm_head


def build_ring(spec: RankSpec, lm_head: LMHead, links: Sequence[Any], trace: NoTrace, clock: Clock = REAL) -> Ring:
    """Build the pipeline as rank 0 sees it, or copies of it; an emulated cluster delays the verification."""
    head = SlowHead(lm_head, Pace(spec.config.cluster, clock, trace)) if spec.config.cluster else lm_head
    num_stages = len(spec.part.stages)
    if spec.config.replicated:
        return Replicas(links, head, num_stages - 1, spec.device, trace, clock)
    ring_kind: Callable[..., Ring] = VirtualRing if spec.config.virtual else Ring
    return ring_kind(links[0], head, num_stages, spec.device, trace, clock)


def build_passes(spec: RankSpec, trace: NoTrace, clock: Clock = REAL) -> Passes:
    """Return the function that runs the networks of drafts; an emulated cluster delays each pass."""
    return SlowPasses(read_all, Pace(spec.config.cluster, clock, trace)) if spec.config.cluster else read_all


def sampler_of(run: RunConfig) -> Sampler:
    """Return the sampler that chooses the target's tokens."""
    penalties = Penalties(run.biases, run.repetition_penalty, run.frequency_penalty, run.presence_penalty)
    return Sampler(run.temperature, run.top_p, run.top_k, run.seed, run.verify, run.min_p, penalties)


def build_decoder(spec: RankSpec, ring: Ring, draft: Draft, tree: TreeConfig, passes: Passes) -> Decoder:
    """Build the decoder of the configured method over this ring and draft, with trees as `tree` specifies."""
    method = METHODS[spec.config.pipeline_type]
    method_draft = NoDraft() if method.draft == "none" else draft
    limits = PipelineLimits(spec.context, spec.config.max_requests, spec.config.reuse)
    return Decoder(ring, method_draft, STRATEGIES[method.strategy], tree, limits, passes)
