"""Files of draft heads: which kind of head a folder holds, its network with its weights, and the draft with it."""
from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any, Callable, Mapping

import torch
from torch import Tensor

from config.schema.block_heads import block_problems, is_block, read_block
from config.schema.fields import CONFIG, check
from config.schema.heads import VOCAB, head_problems, read_dialect, verifier
from config.schema.untrusted import short_repr
from model.drafts.dflash import BlockDraft, DFlashHead
from model.drafts.dspark import DSparkHead, MarkovDraft
from model.drafts.eagle import Eagle, Fit
from model.drafts.heads import Eagle3Head, EagleHead, Head, MtpHead
from model.drafts.network import LMHead, TreeDraft
from model.llama import LlamaConfig, fill
from model.weights.checkpoint import Checkpoint, form_of
from model.weights.parts import BUFFER, TensorShape, check_shapes, read_sizes
from model.weights.quant_layers import StoredEmbedding
from model.weights.unfold import AHEAD

OWN_EMBEDDING = "embed_tokens.weight"
NOT_READ = re.compile(r"^(verifier_|confidence_head\.)")  # a copy of the target's weights; DSpark's own estimate
UNROLLED = 4  # a head trained with at least this many passes, that over the target's features included, does not drift
VERIFIER_FIELDS = {"architectures": CONFIG["architectures"]}  # of the model for which a head was trained
DOWNLOAD_AGAIN = "download the head again: weights and config.json of the same head, as published for this model"
MAPS = ("d2t", "t2d")  # from the draft's vocabulary to the target's; which of the target's tokens the draft has
OF_LAYER = re.compile(r"^(self_attn|mlp|input_layernorm|post_attention_layernorm)\.")  # in an MtpHead's decoder layer


def draft_with(head: Head, lm_head: LMHead, capacity: int, fit: Fit | None = None) -> TreeDraft:
    """Return the draft that guesses with a head, in a cache of `capacity` slots; `fit` judges its first guesses."""
    if isinstance(head, DSparkHead):
        return MarkovDraft(head, lm_head, capacity)
    if isinstance(head, DFlashHead):
        return BlockDraft(head, lm_head, capacity)
    return Eagle(head, lm_head, capacity, fit)


def held_ahead(source: Checkpoint) -> list[str]:
    """Return the tensor names of a model's layer for multi-token prediction. Raises ValueError for several layers."""
    layer_by_name = {name: match[1] for name in source.names() if (match := AHEAD.search(name))}
    num_layers = len(set(layer_by_name.values()))
    if num_layers > 1:
        raise ValueError(f"{source.folder} has {num_layers} layers for multi-token prediction, but only one is "
                         "supported: take a model with one, or an EAGLE draft head")
    return list(layer_by_name)


def own_names(source: Checkpoint) -> dict[str, str]:
    """Return our names of a head's tensors, where EAGLE-3's first layer is `midlayer` -> their names in the file."""
    if ahead := held_ahead(source):
        return {OF_LAYER.sub(r"layers.0.\1.", AHEAD.sub("", name)): name for name in ahead}
    file_names = [name for name in source.names() if not BUFFER.search(name) and not NOT_READ.search(name)]
    weights = {re.sub(r"^model\.", "", name): name for name in file_names}
    if "layers.0.hidden_norm.weight" not in weights:
        return weights
    return {name.replace("layers.0.", "midlayer."): theirs for name, theirs in weights.items()}


def fit_head(source: Checkpoint, base: Mapping[str, Any]) -> Head:
    """Create the head of a file without its weights. Raises ValueError if it does not match the base's config."""
    file_names = own_names(source)
    shapes = {name: source.form(file_name).shape for name, file_name in file_names.items()}
    target = LlamaConfig.read(base)
    is_mtp, is_third = "input_proj.weight" in shapes, any(name.startswith("midlayer.") for name in shapes)
    if "fc.weight" not in shapes and not is_mtp and not is_third:
        raise ValueError(f"{source.folder} is not an EAGLE draft head (it has no fc.weight); give the folder of a head")
    _check_target(source, base, target, is_third)

    if not is_mtp:
        problems_of = block_problems if is_block(source.config) else partial(head_problems, is_eagle3=is_third)
        problem = next(problems_of(source.config, layers=target.layers, context=target.context), None)
        if problem:
            raise ValueError(f"{source.folder / 'config.json'} {problem}")

    sizes = read_sizes(source)
    has_bias = any(name.endswith(".q_proj.bias") for name in shapes)
    has_norms = any(name.endswith(".q_norm.weight") for name in shapes)
    family = replace(sizes.family, qkv_bias=has_bias, head_norms=has_norms)
    sizes = replace(sizes, context=target.context, family=family, windows=())

    if is_third:
        return _fit_third(source, shapes, sizes, target)
    if is_block(source.config):
        return _fit_block(source, shapes, sizes)
    head: Head
    if is_mtp:
        head = MtpHead(replace(sizes, layers=1))
        _check_names(source, head, {OWN_EMBEDDING})
        return head
    head = EagleHead(sizes, bias="fc.bias" in shapes)
    head.drifts = (source.config.get("unrolled_passes") or 1) < UNROLLED
    _check_names(source, head, set())
    return head


def _fit_block(source: Checkpoint, shapes: Mapping[str, TensorShape], sizes: LlamaConfig) -> Head:
    """Create the head of a file that guesses blocks, without its weights."""
    form = read_block(source.config)
    head = DSparkHead(sizes, form, "lm_head.weight" in shapes) if form.markov_rank else DFlashHead(sizes, form)
    _check_names(source, head, {OWN_EMBEDDING})
    return head


def _fit_third(
        source: Checkpoint, shapes: Mapping[str, TensorShape], sizes: LlamaConfig, target: LlamaConfig) -> Eagle3Head:
    """Create the EAGLE-3 head of a file without its weights."""
    dialect = read_dialect(source.config, target.layers)
    if not dialect.inner:
        raise ValueError(f"the head in {source.folder} is an EAGLE-3 head that names no layers, which needs a model of "
                         f"7 layers or more, but the model has {target.layers}; take an EAGLE-1 or EAGLE-2 head")
    vocab = next(filter(None, map(source.config.get, VOCAB)), sizes.vocab)
    if not any(name.startswith("layers.") for name in shapes):  # a head of one layer may say the target's number
        sizes = replace(sizes, layers=1)
    head = Eagle3Head(sizes, target.hidden, vocab, dialect)
    has_maps = bool(shapes.keys() & MAPS)
    may_lack = {MAPS[1]} if has_maps or vocab != sizes.vocab else set(MAPS)
    if sizes.hidden == target.hidden:
        may_lack.add(OWN_EMBEDDING)

    _check_names(source, head, may_lack)
    if has_maps:
        head.shift = _read_shift(source, vocab, sizes.vocab)
    return head


def _check_target(source: Checkpoint, base: Mapping[str, Any], target: LlamaConfig, is_third: bool) -> None:
    """Raise ValueError if a head was trained for another kind of model than its base, or for other sizes."""
    trained_for = verifier(source.config)
    check(trained_for, VERIFIER_FIELDS, f"speculators_config in {source.folder}", DOWNLOAD_AGAIN)
    head_kinds, base_kinds = trained_for.get("architectures") or [], base.get("architectures") or []
    if head_kinds and base_kinds and not set(head_kinds) & set(base_kinds):
        raise ValueError(f"the draft head in {source.folder} was trained for "
                         f"{short_repr(trained_for.get('name_or_path'))}, a {short_repr(head_kinds[0])}, but the model "
                         f"is a {base_kinds[0]}; take the head trained for it")

    hidden_size, vocab_size = source.config.get("hidden_size"), source.config.get("vocab_size")
    if is_third:  # with an embedding of its own, its size may differ from the target's
        hidden_size = source.config.get("target_hidden_size") or hidden_size
    sizes = (("hidden_size", hidden_size, target.hidden), ("vocab_size", vocab_size, target.vocab))
    for size_name, head_size, base_size in sizes:
        if head_size != base_size:
            raise ValueError(f"the draft head in {source.folder} has {size_name} {head_size!r}, but the model has "
                             f"{base_size}; take the head that was trained for this model")


def borrows_embedding(source: Checkpoint, base: Mapping[str, Any]) -> bool:
    """Return whether a head uses the embedding of its base. Raises ValueError if it does not match the base."""
    fit_head(source, base)
    return OWN_EMBEDDING not in own_names(source)


def _read_shift(source: Checkpoint, vocab: int, target_vocab: int) -> Tensor:
    """Read the numbers `[vocab]` to add to the head's tokens to get the target's; t2d, which may be missing, only says
    which these are, and nothing where the head has all of them."""
    names = own_names(source)
    shift, *has_V = (source.read(names[name]) for name in MAPS if name in names)
    if any(table.is_floating_point() for table in (shift, *has_V)):
        raise ValueError(f"d2t and t2d in {source.folder} should be whole numbers; download the head again")

    if vocab == target_vocab and not shift.any():
        return shift

    shifted_tokens = (torch.arange(vocab) + shift).sort().values
    is_rising = bool((shifted_tokens.diff() > 0).all())
    if shifted_tokens[0] < 0 or shifted_tokens[-1] >= target_vocab or not is_rising:
        raise ValueError(f"d2t in {source.folder} names a token twice, or one that the model does not have; download "
                         "the head again")

    # torch would start threads to find the tokens, which no fork survives
    token_lists = [torch.from_numpy(table.numpy().nonzero()[0]) for table in has_V]
    if any(not torch.equal(tokens, shifted_tokens) for tokens in token_lists):
        raise ValueError(f"d2t and t2d in {source.folder} contradict each other; download the head again")
    return shift


def _check_names(source: Checkpoint, head: Head, may_lack: set[str]) -> None:
    """Raise ValueError if a file does not have exactly the head's tensors; those in `may_lack` may be missing."""
    file_names = own_names(source)
    shapes: dict[str, TensorShape] = {name: tuple(weight.shape) for name, weight in head.named_parameters()}
    if isinstance(head, Eagle3Head):
        map_sizes = head.lm_head.out_features, head.config.vocab
        shapes.update(zip(MAPS, ((size,) for size in map_sizes)))
    for name in may_lack.difference(file_names):
        shapes.pop(name, None)

    check_shapes(source, file_names, shapes.items(), DOWNLOAD_AGAIN)


def load_head(source: Checkpoint, base: Mapping[str, Any], embed: Callable[[], Tensor],
              dtype: torch.dtype, device: torch.device | str) -> Head:
    """Load a head with its weights; `embed` reads the base's embedding, for a head without one of its own.

    That embedding keeps its form, as the blocks of a GGUF file.
    """
    head = fit_head(source, base)
    file_names = own_names(source)
    tensors = {name: source.read(file_name) for name, file_name in file_names.items() if name not in MAPS}
    if isinstance(head, Eagle3Head) and head.shift is not None:
        head.shift = head.shift.to(device)
    if OWN_EMBEDDING not in tensors:
        tensors[OWN_EMBEDDING] = embed()
        head.embed_tokens = StoredEmbedding(form_of(tensors[OWN_EMBEDDING]), dtype)

    fill(head, tensors, dtype, device)
    return head
