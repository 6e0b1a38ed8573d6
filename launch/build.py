"""Build the parts of a rank from its specification: its stage, or rank 0's ring, LM head, draft and decoders.

It knows nothing about processes or rank numbers. Builders change nothing but what they return.
"""
from __future__ import annotations

from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Callable, Sequence

import torch
from torch import Tensor

from config.cli import no_head, other_head
from config.console import say
from config.methods import METHODS
from config.run_config import RunConfig, TreeConfig
from config.schema.untrusted import short_repr
from config.trees import FIXED
from launch.spec import RankSpec
from model.cache import TreeCache
from model.drafts.dflash import BlockDraft
from model.drafts.draft import Draft, NoDraft, Passes
from model.drafts.eagle import Eagle, Fit, load_head
from model.drafts.heads import DFlashHead, Eagle3Head
from model.drafts.mixture import Mixture
from model.drafts.network import ModelDraft, Network, TreeDraft, read_all
from model.drafts.partial import PartialDraft
from model.drafts.retokenized import Retokenized
from model.drafts.suffix import SUFFIX, Suffix, add_texts, load_texts
from model.llama import Logits, Slice, fill
from model.native.layers import NativeSlice
from model.native.linear import NativeProducts
from model.sample import Penalties, Sampler
from model.text import VOCABULARIES, Text
from model.weights.checkpoint import Checkpoint
from model.weights.onednn import packed
from model.weights.parts import EMBED, HEAD, read_sizes
from model.weights.quant import (
    Packer,
    Recast,
    compress,
    fuse,
    load,
    pack,
    probe,
    return_freed_memory,
    unfolded,
)
from model.weights.unfold import Unfolded
from model.whole import Whole
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

SPECIAL = ("bos_token_id", "eos_token_id")
KEPT = 100_000  # tokens of earlier answers; their automaton takes 31 MB
LMHead = Callable[[Tensor], Tensor]


def build_stage(spec: RankSpec, trace: NoTrace, group: Group | None = None) -> Stage:
    """Build the stage of one rank: its layers, or its share of the layers of its `group`, and a factory of caches."""
    spec.prepare_torch()
    sizes = spec.sizes
    first, last = spec.part.layers
    members = group if group is not None and group.size > 1 else None
    body = load_layers(spec, spec.part.weights, members is not None, spec.windows)

    def new_cache() -> TreeCache:
        return body.config.cache(last - first, spec.slots, spec.like, spec.windows, spec.config.quant_kv == "int8")

    computes: Callable[..., Tensor | None] = body
    if members is not None:
        assert isinstance(body, Slice), "ranks share torch's layers only"
        computes = ShardedSlice(body, _comm(spec, members, trace))
    elif spec.config.cluster:
        of_model = (last - first) / sizes.layers
        computes = SlowSlice(body, Pace(spec.config.cluster.board(spec.part.rank), trace=trace), of_model)
    return Stage(computes, new_cache, trace, spec.part.own_inner, spec.config.max_requests, spec.reports)


def load_layers(spec: RankSpec, source: Checkpoint, shared: bool = False,
                windows: Sequence[int] = ()) -> Slice | NativeSlice:
    """Load the rank's layers with weights from `source`; if `shared`, only this member's heads and columns of each.

    `windows` are those of the caches, if these drop slots.
    """
    part, sizes = spec.part, spec.sizes
    if shared:
        share = shares(sizes, part.shares)[part.member]
        body = empty_slice(sizes, share, *part.layers)
    else:
        body = Slice(sizes, *part.layers)
    is_native = not spec.reason_for_torch
    probe(spec.quantizes if is_native else spec.quant, spec.dtype, spec.device)
    held = [name for name in source.names() if name != HEAD]
    names = {name[len("model."):]: name for name in held}
    weights = Recast(source, names, spec.quantizes)
    if is_native:
        native_slice = NativeSlice(body, spec.quant, weights, torch.get_num_threads(), windows)
        return_freed_memory()
        return native_slice
    load(body, spec.quant, weights, spec.dtype, spec.device)
    if not shared:  # members may send rows between the parts of a product
        pack(body)
    _warn_if_unfolded(spec, body)
    return body


def _packer(spec: RankSpec) -> Packer:
    """Return the function that packs plain linear layers of drafts."""
    return NativeProducts(torch.get_num_threads()).plain if spec.has_native_products("none") else packed


def _warn_if_unfolded(spec: RankSpec, module: torch.nn.Module) -> None:
    if why := unfolded(module):
        say(f"rank {spec.part.rank} unfolds int4 weights for every product, which is slow: {spec.device} has no kernel "
            f"for them here ({why})")


def _comm(spec: RankSpec, group: Group, trace: NoTrace) -> Comm:
    """Build the collective operations of ranks that share a stage; an emulated cluster delays them."""
    comm = COMMS[spec.config.comm](group, spec.sizes.hidden)
    cluster = spec.config.cluster
    if cluster is None:
        return comm
    layers = cluster.layers / spec.sizes.layers
    largest = max(spec.part.shares) / sum(spec.part.shares)
    first = spec.part.rank - spec.part.member
    times = Times(slowest(cluster, range(first, first + group.size)), largest, group.size)
    return Paced(comm, Pace(cluster, trace=trace), layers, times)


def build_lm_head(spec: RankSpec) -> Logits:
    """Build the LM head, which rank 0 holds."""
    spec.prepare_torch()
    kind = spec.config.quant_head
    lm_head = Logits(spec.sizes)
    if kind == "auto" and spec.keeps_blocks(HEAD):
        products = NativeProducts(torch.get_num_threads())
        lm_head.product = products.stored(spec.part.weights.read_stored(HEAD))  # type: ignore[assignment]
        return_freed_memory()
        return lm_head

    kind = "none" if kind == "auto" else kind
    fill(lm_head, {"product.weight": spec.part.weights.read(HEAD)}, spec.dtype, spec.device)
    probe(kind, spec.dtype, spec.device)

    if spec.has_native_products(kind):
        products = NativeProducts(torch.get_num_threads())
        lm_head.product = products.quantized(lm_head.product, kind)  # type: ignore[assignment]
        return lm_head
    compress(lm_head, kind, spec.dtype)
    pack(lm_head)
    _warn_if_unfolded(spec, lm_head)
    return lm_head


def build_ring(spec: RankSpec, lm_head: LMHead, links: Sequence[Any], trace: NoTrace, clock: Clock = REAL) -> Ring:
    """Build the pipeline as rank 0 sees it, or copies of it; an emulated cluster delays the verification."""
    head = SlowHead(lm_head, Pace(spec.config.cluster, clock, trace)) if spec.config.cluster else lm_head
    stages = len(spec.part.stages)
    if spec.config.replicated:
        return Replicas(links, head, stages - 1, spec.device, trace, clock)
    kind: Callable[..., Ring] = VirtualRing if spec.config.virtual else Ring
    return kind(links[0], head, stages, spec.device, trace, clock)


def build_draft(spec: RankSpec, lm_head: LMHead) -> Draft:
    """Build the configured draft, which may share the target's LM head."""
    if not spec.sources:
        return NoDraft()
    made = [DRAFTS[name](spec, lm_head) for name in spec.sources if name in DRAFTS]
    networks = [*chain.from_iterable(made)]
    policy = spec.config.growth_policy
    if policy in (*FIXED, "opt") and not all(network.by_level for network in networks):
        raise ValueError(f"policy={policy} grows trees level by level, and draft={spec.config.draft} does not: leave "
                         "policy out")
    for number, network in enumerate(networks):
        network.number = number
    return Mixture(networks, _suffix(spec) if SUFFIX in spec.sources else None)


def build_passes(spec: RankSpec, trace: NoTrace, clock: Clock = REAL) -> Passes:
    """Return the function that runs the networks of drafts; an emulated cluster delays each pass."""
    return SlowPasses(read_all, Pace(spec.config.cluster, clock, trace)) if spec.config.cluster else read_all


def _suffix(spec: RankSpec) -> Suffix:
    """Build the automaton over a request's text and, if `answers` names a file, over earlier answers."""
    path, vocab = spec.config.answers, spec.sizes.vocab
    if not path:
        return Suffix()
    return Suffix(load_texts(path, vocab, KEPT), lambda text: add_texts(path, [text], vocab, KEPT))


def sampler_of(run: RunConfig) -> Sampler:
    """Return the sampler that chooses the target's tokens."""
    penalties = Penalties(run.biases, run.repetition_penalty, run.frequency_penalty, run.presence_penalty)
    return Sampler(run.temperature, run.top_p, run.top_k, run.seed, run.verify, run.min_p, penalties)


def build_decoder(spec: RankSpec, ring: Ring, draft: Draft, tree: TreeConfig, passes: Passes) -> Decoder:
    """Build the decoder of the configured method over this ring and draft, with trees as `tree` specifies."""
    method = METHODS[spec.config.pipeline_type]
    used = NoDraft() if method.draft == "none" else draft
    limits = PipelineLimits(spec.context, spec.config.max_requests, spec.config.reuse)
    return Decoder(ring, used, STRATEGIES[method.strategy], tree, limits, passes)


def _head_draft(spec: RankSpec, lm_head: LMHead) -> TreeDraft:
    """Load the draft head of the specification, or that in rank 0's folder; raises ValueError if there is none."""
    part = spec.part
    if not spec.head and not part.eagle:
        raise ValueError(no_head(spec.config))
    source = Checkpoint(spec.head) if spec.head else part.open_head()

    def embed() -> Tensor:
        name = HEAD if spec.sizes.tied else EMBED
        if name not in part.weights.names():
            raise ValueError(f"{part.folder} lacks the embedding, which its draft head needs: split the model again")
        return part.weights.read_stored(name) if spec.keeps_blocks(name) else part.weights.read(name)

    head = load_head(source, part.config, embed, spec.dtype, spec.device)
    if head.inner and head.inner != part.inner:
        raise ValueError(f"the head in {source.folder} reads layers {list(head.inner)}, but the stages of this split "
                         f"pass on {list(part.inner)}: split the model again with --eagle {source.folder}")
    compress(head, spec.draft_quant(), spec.dtype)
    if isinstance(head, DFlashHead):
        return BlockDraft(head, lm_head, spec.slots)
    fuse(head)
    pack(head, _packer(spec))
    kind = PartialDraft if isinstance(head, Eagle3Head) and head.dialect.partial else Eagle
    return kind(head, lm_head, spec.slots, Fit(str(source.folder), say))


def _draft_of(maker: str, kinds: Sequence[str], spec: RankSpec, lm_head: LMHead) -> list[TreeDraft]:
    """Return the draft of the head; raises ValueError unless it is of one of these kinds."""
    draft = _head_draft(spec, lm_head)
    if draft.source not in kinds:
        raise ValueError(f"draft={spec.config.draft} needs a head of {maker}, and this model has another kind: take "
                         f"draft={draft.source}, or {other_head(spec.config)}")
    return [draft]


def _small_models(spec: RankSpec) -> list[ModelDraft]:
    """Build all small models, in order: drafts that are called ssm1, ssm2 and so on."""
    drafts = [_small_model(spec, folder, "ssm") for folder in spec.small_models]
    for number, draft in enumerate(drafts, 1):
        draft.source = f"ssm{number}"
    return drafts


def _small_model(spec: RankSpec, folder: Path, key: str) -> ModelDraft:
    """Load the small model in a folder, given by the key `key`; raises ValueError if it is missing or does not fit."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}: give {key}=FOLDER, a small model in Hugging Face form")
    source = Unfolded(folder)
    _check_tokens(source, spec)
    context = _context(source, spec)
    if context < spec.context:
        raise ValueError(f"the draft model in {folder} has only {context} positions: give max_length={context} or less")
    return _drafting(source, spec, context)


def _context(source: Checkpoint, spec: RankSpec) -> int:
    """Return the positions of a draft model; if it has no limit of its own, those of the target."""
    sizes = read_sizes(source)
    return spec.sizes.context if sizes.family.rotary else sizes.context


def _drafting(source: Checkpoint, spec: RankSpec, context: int) -> ModelDraft:
    """Load a small model with its weights, as a draft."""
    whole = Whole(source, spec.dtype, spec.device, spec.draft_quant(), context)
    packer = _packer(spec)
    pack(whole.body, packer)
    pack(whole.lm_head, packer)
    return ModelDraft(whole.body, whole.lm_head, whole.cache(spec.slots))


def _model_draft(spec: RankSpec) -> Network:
    """Load a single small model as a draft. If its tokenizer differs, its guesses are retokenized for the target."""
    folder, target = spec.draft_folder, spec.part.folder
    if not (folder.is_dir() and _vocabulary(folder) and _vocabulary(target)):
        return _small_model(spec, folder, "draft_dir")
    source = Unfolded(folder)
    try:
        _check_tokens(source, spec)
    except ValueError as error:
        difference = str(error).rpartition(": ")[0]
        say(f"{difference}: that model's guesses are decoded, and encoded again in the tokens of the target")
        context = _context(source, spec)
        return Retokenized(_drafting(source, spec, context), Text(folder), Text(target), context)
    return _small_model(spec, folder, "draft_dir")


def _check_tokens(small: Checkpoint, spec: RankSpec) -> None:
    """Raise ValueError if a small model numbers its tokens in another way than the target.

    A small model without tokenizer files is trusted.
    """
    target, vocab = spec.part, read_sizes(small).vocab
    if vocab != spec.sizes.vocab:
        raise ValueError(f"the draft model in {small.folder} has vocab_size {vocab}, but the model has "
                         f"{spec.sizes.vocab}: take one with the same tokenizer")
    other = "take a small model that was made for the same tokenizer"
    for name in SPECIAL:
        theirs, ours = small.config.get(name), target.config.get(name)
        if _numbers(theirs) and _numbers(ours) and not _numbers(theirs) & _numbers(ours):
            raise ValueError(f"{small.folder / 'config.json'} has {name}={short_repr(theirs)}, but the model has "
                             f"{short_repr(ours)}: {other}")
    path, known = _vocabulary(small.folder), _vocabulary(target.folder)
    if path is None or known is None:
        return
    if path.name == known.name and path.read_bytes() == known.read_bytes():
        return
    found, wanted = _tokens(small.folder), _tokens(target.folder)
    both = sorted(found.keys() & wanted.keys())
    wrong = next((number for number in both if found[number] != wanted[number]), None)
    if wrong is not None:
        raise ValueError(f"{path} calls token {wrong} {short_repr(found[wrong])}, but the model's {known.name} calls "
                         f"it {short_repr(wanted[wrong])}: {other}")


def _vocabulary(folder: Path) -> Path | None:
    return next((folder / name for name in VOCABULARIES if (folder / name).is_file()), None)


def _tokens(folder: Path) -> dict[int, str]:
    return {number: token for token, number in Text(folder).tokenizer.get_vocab().items()}


def _numbers(value: Any) -> set[int]:
    named = value if isinstance(value, list) else [value]
    return {number for number in named if isinstance(number, int)}


DRAFTS: dict[str, Callable[[RankSpec, LMHead], Sequence[Network]]] = {
    "eagle": partial(_draft_of, "EAGLE or DFlash", ("eagle", "dflash")),
    "dflash": partial(_draft_of, "DFlash", ("dflash",)),
    "spd": partial(_draft_of, "SPD", ("spd",)),
    "model": lambda spec, lm_head: [_model_draft(spec)],
    "ssm": lambda spec, lm_head: _small_models(spec),
}
