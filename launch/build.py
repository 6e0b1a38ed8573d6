"""The parts of a rank: from a configuration and a rank's folder to its stage, its ring or its draft.

It knows nothing about processes or rank numbers.
"""
from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from config.methods import METHODS
from config.run_config import RunConfig
from launch.probe import segment_rows
from model.cache import TreeCache
from model.checkpoint import Checkpoint
from model.drafts import ModelDraft, NoDraft
from model.eagle import Eagle, Eagle3Head, inner_layers, load_head
from model.llama import LlamaConfig, Slice, fill
from model.quant import Recast, agreed, compress, load, probe
from model.weights import EMBED, HEAD, Part, assign, check_model
from pipeline.decode import Decoder
from pipeline.interfaces import Draft
from pipeline.stage import Stage
from pipeline.strategies import STRATEGIES
from pipeline.target import Ring
from pipeline.trace import OFF, NoTrace, TracedDraft
from pipeline.transport import Link
from sim.devices import SlowDraft, SlowHead, SlowLink, SlowSlice
from sim.groups import Paced
from tp.comm import Comm, Shared, Whole
from tp.group import Group
from tp.layers import Sharded, hollow
from tp.shares import shares


def build_stage(config: RunConfig, part: Part, trace: NoTrace, group: Group | None = None) -> Stage:
    """The slice of one rank, or its share of one that `group` has together, and its cache."""
    _prepare_torch(config, part)
    sizes = LlamaConfig.read(part.config)
    first, last = part.layers
    shared = group is not None and group.size > 1
    body = hollow(sizes, shares(sizes, part.shares)[part.member], first, last) if shared else Slice(sizes, first, last)
    device, dtype, kind = device_of(config, part), dtype_of(config, part), quant_of(config, part)
    probe(kind, dtype, device)
    names = {name[len("model."):]: name for name in part.weights.names() if name != HEAD}
    load(body, kind, Recast(part.weights, names, kind if part.quant == "none" else "none"), dtype, device)
    slots = capacity(config, sizes, len(part.stages))
    keep = [layer for layer in inner_layers(sizes.layers) if first <= layer < last]
    like = torch.empty(0, dtype=dtype, device=device)
    cluster, share = config.cluster, (last - first) / sizes.layers

    def new_cache() -> TreeCache:
        return body.config.cache(last - first, slots, like)

    if group is not None and shared:
        return Stage(Sharded(body, _comm(config, part, group, trace)), new_cache, trace, keep)
    return Stage(SlowSlice(body, cluster, share, trace) if cluster else body, new_cache, trace, keep)


def _comm(config: RunConfig, part: Part, group: Group, trace: NoTrace) -> Comm:
    """How the ranks that share a stage add up."""
    sizes, cluster = LlamaConfig.read(part.config), config.cluster
    comm: Comm = Whole(group) if config.sharing.way == "tp" else Shared(group, sizes.hidden)
    if cluster is None:
        return comm
    largest = max(part.shares) / sum(part.shares)
    return Paced(comm, cluster, cluster.layers / sizes.layers, largest, group.size, trace)


def build_ring(config: RunConfig, part: Part, link: Link, trace: NoTrace) -> Ring:
    """The target, with the LM head that rank 0 holds."""
    _prepare_torch(config, part)
    sizes = LlamaConfig.read(part.config)
    lm_head = torch.nn.Linear(sizes.hidden, sizes.vocab, bias=False, device="meta")
    device = device_of(config, part)
    fill(lm_head, {"weight": part.weights.read(HEAD)}, dtype_of(config, part), device)
    return Ring(link, lm_head, len(part.stages), device, trace)


def build_draft(config: RunConfig, part: Part, ring: Ring, trace: NoTrace) -> Draft:
    """Who guesses. In an emulated cluster the LM head, which a draft may share, takes a verdict's time from now on."""
    draft: Draft = NoDraft()
    if "none" not in (METHODS[config.pipeline_type].draft, config.draft):
        draft = _model_draft(config, part, ring) if config.draft == "model" else _eagle(config, part, ring)
    if cluster := config.cluster:
        ring.lm_head = SlowHead(ring.lm_head, cluster, trace)
        draft = SlowDraft(draft, cluster, trace)
    return draft if trace is OFF else TracedDraft(draft, trace)


def build_decoder(config: RunConfig, part: Part, ring: Ring, draft: Draft) -> Decoder:
    """The strategy that the method names, over this target and draft."""
    method = METHODS[config.pipeline_type]
    context = min(config.max_length, LlamaConfig.read(part.config).context)
    strategy, tree = STRATEGIES[method.strategy], config.tree
    for name, rows in (("init", config.init_subseq_token), ("expand", config.expand_subseq_token)):
        if rows == 0 and method.strategy in ("pruned", "continuous"):
            tree = replace(tree, **{name: replace(getattr(tree, name), segment=segment_rows(ring, context))})
    used = NoDraft() if method.draft == "none" else draft
    return Decoder(ring, used, strategy, tree, context)


def emulated(config: RunConfig, link: Any, trace: NoTrace) -> Any:
    """The link itself, or with the wires of the cluster that is emulated."""
    return SlowLink(link, config.cluster, trace) if config.cluster else link


def _eagle(config: RunConfig, part: Part, ring: Ring) -> Eagle:
    if part.eagle is None:
        raise ValueError(f"{part.folder} has no draft head: split the model again with --eagle DIR, "
                         "or use pipeline_type=ar, draft=none or draft=model")

    def embed() -> torch.Tensor:
        name = HEAD if LlamaConfig.read(part.config).tied else EMBED
        if name not in part.weights.names():
            raise ValueError(f"{part.folder} lacks the embedding, which its draft head needs: split the model again")
        return part.weights.read(name)

    head = load_head(Checkpoint(part.eagle), part.config, embed, dtype_of(config, part), ring.device)
    compress(head, draft_quant(config, part), dtype_of(config, part))
    lm_head = head.logits if isinstance(head, Eagle3Head) else ring.lm_head
    return Eagle(head, lm_head, capacity(config, head.config, len(part.stages)))


def _model_draft(config: RunConfig, part: Part, ring: Ring) -> ModelDraft:
    """A small model of the same vocabulary, whole: from the folder that is named, or `draft` in rank 0's."""
    folder = Path(config.draft_dir) if config.draft_dir else part.folder / "draft"
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}: give draft_dir=FOLDER, a small model in Hugging Face form")
    source = Checkpoint(folder)
    check_model(source)
    sizes, base = LlamaConfig.read(source.config), LlamaConfig.read(part.config)
    if sizes.vocab != base.vocab:
        raise ValueError(f"the draft model in {folder} has vocab_size {sizes.vocab}, but the model has {base.vocab}: "
                         "take one with the same tokenizer")
    if sizes.family.rotary:
        sizes = replace(sizes, context=base.context)
    elif sizes.context < min(base.context, config.max_length):
        raise ValueError(f"the draft model in {folder} has only {sizes.context} positions: "
                         f"give max_length={sizes.context} or less")
    top, body = assign(source.names(), [0, sizes.layers], sizes.tied)
    dtype, model, kind = dtype_of(config, part), Slice(sizes, 0, sizes.layers), draft_quant(config, part)
    names = {name[len("model."):]: held for name, held in body.items()}
    load(model, kind, Recast(source, names, kind, sound=True), dtype, ring.device)
    lm_head = torch.nn.Linear(sizes.hidden, sizes.vocab, bias=False, device="meta")
    fill(lm_head, {"weight": source.sound(top[HEAD])}, dtype, ring.device)
    like = torch.empty(0, dtype=dtype, device=ring.device)
    return ModelDraft(model, lm_head, sizes.cache(sizes.layers, capacity(config, base, len(part.stages)), like))


def capacity(config: RunConfig, sizes: LlamaConfig, ranks: int) -> int:
    """Slots for the text, and for guesses that live, are under way or wait to be pruned."""
    tree, layer = config.tree, config.init_topk_pipedec
    guesses = max(tree.init.nodes, tree.expand.nodes + ranks * tree.idle.nodes, ranks * layer)
    return min(config.max_length, sizes.context) + 8 * guesses


def quant_of(config: RunConfig, part: Part) -> str:
    """The kind of weights that the layers run with; refuses another than the split holds."""
    return agreed(config.quant, part.quant, part.folder)


def draft_quant(config: RunConfig, part: Part) -> str:
    """The kind of weights that a draft runs with; a rank that cannot compute them ends here."""
    kind = quant_of(config, part) if config.quant_draft else "none"
    probe(kind, dtype_of(config, part), device_of(config, part))
    return kind


def _prepare_torch(config: RunConfig, part: Part) -> None:
    torch.set_grad_enabled(False)
    torch.set_num_threads(config.threads_per_rank or max(1, (os.cpu_count() or 1) // part.world))


def device_of(config: RunConfig, part: Part) -> torch.device:
    """Where a rank computes."""
    if config.device != "auto":
        return torch.device(config.device)
    count = torch.cuda.device_count()
    return torch.device(f"cuda:{part.rank % count}" if count else "cpu")


def dtype_of(config: RunConfig, part: Part) -> torch.dtype:
    """The type in which a rank computes. `auto` keeps float32 on a CPU, although some are faster in bfloat16: there a
    text shall not depend on the method (docs/performance.md)."""
    if config.dtype != "auto":
        return getattr(torch, config.dtype)  # type: ignore[no-any-return]
    return torch.float16 if device_of(config, part).type == "cuda" else torch.float32
