"""The parts of a rank: from its specification to its stage, or to rank 0's LM head, draft and decoders.

It knows nothing about processes or rank numbers. A builder changes nothing but what it returns.
"""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Callable

import torch
from torch import Tensor

from config.methods import METHODS
from config.run_config import TreeConfig
from launch.spec import RankSpec
from model.cache import TreeCache
from model.checkpoint import Checkpoint
from model.drafts import ModelDraft, NoDraft
from model.eagle import Eagle, Eagle3Head, inner_layers, load_head
from model.llama import LlamaConfig, Slice, fill
from model.quant import Recast, compress, load, probe
from model.weights import EMBED, HEAD, assign, check_model
from pipeline.decode import Decoder
from pipeline.interfaces import Draft
from pipeline.stage import Stage
from pipeline.strategies import STRATEGIES
from pipeline.target import Ring
from pipeline.trace import OFF, NoTrace, TracedDraft
from sim.devices import SlowDraft, SlowHead, SlowSlice
from sim.groups import Paced
from sim.pace import Pace
from tp.comm import COMMS, Comm
from tp.group import Group
from tp.layers import ShardedSlice, hollow
from tp.shares import shares

LMHead = Callable[[Tensor], Tensor]


def build_stage(spec: RankSpec, trace: NoTrace, group: Group | None = None) -> Stage:
    """The slice of one rank, or its share of one that `group` has together, and the making of its caches."""
    spec.prepare_torch()
    part, sizes = spec.part, spec.sizes
    first, last = part.layers
    shared = group is not None and group.size > 1
    body = hollow(sizes, shares(sizes, part.shares)[part.member], first, last) if shared else Slice(sizes, first, last)
    probe(spec.quant, spec.dtype, spec.device)
    names = {name[len("model."):]: name for name in part.weights.names() if name != HEAD}
    load(body, spec.quant, Recast(part.weights, names, spec.quantizes), spec.dtype, spec.device)

    def new_cache() -> TreeCache:
        return body.config.cache(last - first, spec.slots, spec.like)

    computes: Callable[..., Tensor | None] = body
    if group is not None and shared:
        computes = ShardedSlice(body, _comm(spec, group, trace))
    elif spec.cluster:
        computes = SlowSlice(body, Pace(spec.cluster, trace=trace), (last - first) / sizes.layers)
    keep = [layer for layer in inner_layers(sizes.layers) if first <= layer < last]
    return Stage(computes, new_cache, trace, keep)


def _comm(spec: RankSpec, group: Group, trace: NoTrace) -> Comm:
    """How the ranks that share a stage add up."""
    comm = COMMS[spec.config.tensor_parallel.comm](group, spec.sizes.hidden)
    cluster = spec.cluster
    if cluster is None:
        return comm
    largest = max(spec.part.shares) / sum(spec.part.shares)
    return Paced(comm, Pace(cluster, trace=trace), cluster.layers / spec.sizes.layers, largest, group.size)


def build_lm_head(spec: RankSpec) -> torch.nn.Linear:
    """The LM head, which rank 0 holds."""
    spec.prepare_torch()
    return _linear_head(spec.sizes, spec.part.weights.read(HEAD), spec)


def build_ring(spec: RankSpec, lm_head: LMHead, link: Any, trace: NoTrace) -> Ring:
    """The pipeline as rank 0 sees it. In an emulated cluster the verification takes its time."""
    head = SlowHead(lm_head, Pace(spec.cluster, trace=trace)) if spec.cluster else lm_head
    return Ring(link, head, len(spec.part.stages), spec.device, trace)


def build_draft(spec: RankSpec, lm_head: LMHead, trace: NoTrace) -> Draft:
    """Who guesses; a draft may share the target's LM head."""
    draft: Draft = DRAFTS[spec.draft](spec, lm_head)
    if spec.cluster:
        draft = SlowDraft(draft, Pace(spec.cluster, trace=trace))
    return draft if trace is OFF else TracedDraft(draft, trace)


def build_decoder(spec: RankSpec, ring: Ring, draft: Draft, tree: TreeConfig) -> Decoder:
    """The strategy that the method names, over this ring and draft, with trees as `tree` says."""
    method = METHODS[spec.config.pipeline_type]
    used = NoDraft() if method.draft == "none" else draft
    return Decoder(ring, used, STRATEGIES[method.strategy], tree, spec.context)


def _no_draft(spec: RankSpec, lm_head: LMHead) -> NoDraft:
    return NoDraft()


def _eagle_draft(spec: RankSpec, lm_head: LMHead) -> Eagle:
    """The head in rank 0's folder."""
    part = spec.part
    if part.eagle is None:
        raise ValueError(f"{part.folder} has no draft head: split the model again with --eagle DIR, "
                         "or use pipeline_type=ar, draft=none or draft=model")

    def embed() -> Tensor:
        name = HEAD if spec.sizes.tied else EMBED
        if name not in part.weights.names():
            raise ValueError(f"{part.folder} lacks the embedding, which its draft head needs: split the model again")
        return part.weights.read(name)

    head = load_head(Checkpoint(part.eagle), part.config, embed, spec.dtype, spec.device)
    compress(head, spec.draft_quant(), spec.dtype)
    return Eagle(head, head.logits if isinstance(head, Eagle3Head) else lm_head, spec.slots)


def _model_draft(spec: RankSpec, lm_head: LMHead) -> ModelDraft:
    """A small model of the same vocabulary, whole: from the folder that is named, or `draft` in rank 0's."""
    folder = Path(spec.config.draft_dir) if spec.config.draft_dir else spec.part.folder / "draft"
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}: give draft_dir=FOLDER, a small model in Hugging Face form")
    source = Checkpoint(folder)
    check_model(source)
    sizes = _draft_sizes(LlamaConfig.read(source.config), spec, folder)
    top, body = assign(source.names(), [0, sizes.layers], sizes.tied)
    model, kind = Slice(sizes, 0, sizes.layers), spec.draft_quant()
    names = {name[len("model."):]: held for name, held in body.items()}
    load(model, kind, Recast(source, names, kind, sound=True), spec.dtype, spec.device)
    own_head = _linear_head(sizes, source.sound(top[HEAD]), spec)
    return ModelDraft(model, own_head, sizes.cache(sizes.layers, spec.slots, spec.like))


def _draft_sizes(sizes: LlamaConfig, spec: RankSpec, folder: Path) -> LlamaConfig:
    """Those of a draft model, for texts as long as the target's; one that does not fit the target is refused."""
    base = spec.sizes
    if sizes.vocab != base.vocab:
        raise ValueError(f"the draft model in {folder} has vocab_size {sizes.vocab}, but the model has {base.vocab}: "
                         "take one with the same tokenizer")
    if sizes.family.rotary:
        return replace(sizes, context=base.context)
    if sizes.context < spec.context:
        raise ValueError(f"the draft model in {folder} has only {sizes.context} positions: "
                         f"give max_length={sizes.context} or less")
    return sizes


def _linear_head(sizes: LlamaConfig, weight: Tensor, spec: RankSpec) -> torch.nn.Linear:
    lm_head = torch.nn.Linear(sizes.hidden, sizes.vocab, bias=False, device="meta")
    fill(lm_head, {"weight": weight}, spec.dtype, spec.device)
    return lm_head


DRAFTS: dict[str, Callable[[RankSpec, LMHead], Draft]] = {
    "none": _no_draft, "eagle": _eagle_draft, "model": _model_draft}
