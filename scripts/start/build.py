"""The parts of a rank: from a configuration and a rank's folder to its stage, its ring or its draft.

It knows nothing about processes or rank numbers.
"""
from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch

from config.methods import METHODS
from config.run_config import RunConfig
from model.checkpoint import Checkpoint
from model.drafts import Draft, ModelDraft, NoDraft
from model.eagle import Eagle, Eagle3Head, inner_layers, load_head
from model.llama import LlamaConfig, Slice, fill
from model.weights import EMBED, HEAD, Part, assign, check_model
from pipeline.decode import Decoder
from pipeline.stage import Stage
from pipeline.strategies import STRATEGIES
from pipeline.target import Ring
from pipeline.trace import NoTrace, TracedDraft
from pipeline.transport import Link


def build_stage(config: RunConfig, part: Part, trace: NoTrace) -> Stage:
    """The slice of one rank and its cache."""
    _prepare_torch(config, part)
    sizes = LlamaConfig.read(part.config)
    first, last = part.layers
    body = Slice(sizes, first, last)
    device, dtype = _device(config, part), _dtype(config, part)
    fill(body, {name[len("model."):]: x for name, x in part.tensors().items()}, dtype, device)
    capacity = _capacity(config, sizes, len(part.stages))
    keep = [layer for layer in inner_layers(sizes.layers) if first <= layer < last]
    return Stage(body, sizes.cache(last - first, capacity, torch.empty(0, dtype=dtype, device=device)), trace, keep)


def build_ring(config: RunConfig, part: Part, link: Link, trace: NoTrace) -> Ring:
    """The target, with the LM head that rank 0 holds."""
    _prepare_torch(config, part)
    sizes = LlamaConfig.read(part.config)
    lm_head = torch.nn.Linear(sizes.hidden, sizes.vocab, bias=False, device="meta")
    device = _device(config, part)
    fill(lm_head, {"weight": part.weights.read(HEAD)}, _dtype(config, part), device)
    return Ring(link, lm_head, len(part.stages), device, trace)


def build_decoder(config: RunConfig, part: Part, ring: Ring, trace: NoTrace) -> Decoder:
    """The strategy and the draft that the method names, over this target."""
    method = METHODS[config.pipeline_type]
    draft: Draft = NoDraft()
    if "none" not in (method.draft, config.draft):
        draft = _model_draft(config, part, ring) if config.draft == "model" else _eagle(config, part, ring)
    context = min(config.max_length, LlamaConfig.read(part.config).context)
    return Decoder(ring, TracedDraft(draft, trace) if config.trace else draft, STRATEGIES[method.strategy],
                   config.tree, context)


def _eagle(config: RunConfig, part: Part, ring: Ring) -> Eagle:
    if part.eagle is None:
        raise ValueError(f"{part.folder} has no draft head: split the model again with --eagle DIR, "
                         "or use pipeline_type=ar, draft=none or draft=model")

    def embed() -> torch.Tensor:
        name = HEAD if LlamaConfig.read(part.config).tied else EMBED
        if name not in part.weights.names():
            raise ValueError(f"{part.folder} lacks the embedding, which its draft head needs: split the model again")
        return part.weights.read(name)

    head = load_head(Checkpoint(part.eagle), part.config, embed, _dtype(config, part), ring.device)
    ring.inner = isinstance(head, Eagle3Head)
    lm_head = head.logits if isinstance(head, Eagle3Head) else ring.lm_head
    return Eagle(head, lm_head, _capacity(config, head.config, len(part.stages)))


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
    dtype, model = _dtype(config, part), Slice(sizes, 0, sizes.layers)
    fill(model, {name[len("model."):]: source.sound(held) for name, held in body.items()}, dtype, ring.device)
    lm_head = torch.nn.Linear(sizes.hidden, sizes.vocab, bias=False, device="meta")
    fill(lm_head, {"weight": source.sound(top[HEAD])}, dtype, ring.device)
    like = torch.empty(0, dtype=dtype, device=ring.device)
    return ModelDraft(model, lm_head, sizes.cache(sizes.layers, _capacity(config, base, len(part.stages)), like))


def _capacity(config: RunConfig, sizes: LlamaConfig, ranks: int) -> int:
    """Slots for the text, and for guesses that live, are under way or wait to be pruned."""
    tree, layer = config.tree, config.init_topk_pipedec
    guesses = max(tree.init.nodes, tree.expand.nodes + ranks * tree.idle.nodes, ranks * layer)
    return min(config.max_length, sizes.context) + 8 * guesses


def _prepare_torch(config: RunConfig, part: Part) -> None:
    torch.set_grad_enabled(False)
    torch.set_num_threads(config.threads_per_rank or max(1, (os.cpu_count() or 1) // len(part.stages)))


def _device(config: RunConfig, part: Part) -> torch.device:
    if config.device != "auto":
        return torch.device(config.device)
    count = torch.cuda.device_count()
    return torch.device(f"cuda:{part.rank % count}" if count else "cpu")


def _dtype(config: RunConfig, part: Part) -> torch.dtype:
    if config.dtype != "auto":
        return getattr(torch, config.dtype)  # type: ignore[no-any-return]
    return torch.float16 if _device(config, part).type == "cuda" else torch.float32
