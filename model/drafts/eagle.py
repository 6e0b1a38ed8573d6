"""A draft with a head that reads pairs, such as EAGLE's, and loading of all kinds of heads from files.

It knows nothing about pipelines. A pair is a token and the feature of the token before it, at the position of that
earlier token (EAGLE, section 4.1). Pairs of settled nodes have the target's features, pairs of guesses the head's
output for the pair before.

Shapes: T rows, D model, V vocabulary.
"""
from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Callable, ClassVar, Mapping, Sequence

import torch
from torch import Tensor

from config.schema.heads import VOCAB, block_problems, head_problems, is_block, read_block, read_dialect, verifier
from config.schema.untrusted import short_repr
from model.drafts.draft import Read, Steps
from model.drafts.heads import DFlashHead, Eagle3Head, EagleHead, Head, MtpHead
from model.drafts.network import LMHead, TreeDraft
from model.llama import LlamaConfig, fill
from model.tree import TokenTree
from model.weights.blocks import block_type
from model.weights.checkpoint import Checkpoint, form_of
from model.weights.parts import BUFFER, Shape, check_shapes, read_sizes
from model.weights.quant import BlockEmbedding
from model.weights.unfold import AHEAD

OWN_EMBEDDING = "embed_tokens.weight"
UNROLLED = 4  # a head trained with at least this many passes, that over the target's features included, does not drift
TRIED, LEAST = 32, 0.1  # guesses by which a head is judged, and the least acceptable share of correct ones
MAPS = ("d2t", "t2d")  # from the draft's vocabulary to the target's; which of the target's tokens the draft has
OF_LAYER = re.compile(r"^(self_attn|mlp|input_layernorm|post_attention_layernorm)\.")  # in an MtpHead's decoder layer


@dataclass
class Fit:
    """The accuracy of a head's best guess after settled text, over the first `TRIED` guesses.

    If it is too low, `report` is called once with a sentence: a head of another model, or one that was trained with
    another template, is almost never correct.
    """

    remedy: ClassVar[str] = "take the head of this model, or add draft=suffix"
    name: str
    report: Callable[[str], None]
    tried: int = 0
    right: int = 0

    @property
    def counted(self) -> str:
        """The counts, as part of a sentence."""
        return f"the draft head in {self.name} foresaw {self.right} of the first {self.tried} tokens"

    @property
    def misfit(self) -> str:
        """The problem of the head, as part of a sentence; empty if there is none, or too few guesses were counted."""
        if self.tried < TRIED or self.right >= LEAST * TRIED:
            return ""
        return f"{self.counted}: it was probably trained for another model or another template"

    def count(self, guessed: int, became: int) -> None:
        """Compare a guess with the settled token."""
        self.tried += 1
        self.right += guessed == became
        if self.tried == TRIED and self.misfit:
            self.report(f"{self.misfit}, so {self.remedy}")


class Eagle(TreeDraft):
    """A draft that guesses with a head; `lm_head` computes the logits if the head has no LM head of its own."""

    source, lag = "eagle", 1

    def __init__(self, head: Head, lm_head: LMHead, capacity: int, fit: Fit | None = None) -> None:
        self.network, self.lm_head, self.fit = head, head.logits or lm_head, fit
        self.inner, self.drifts = bool(head.inner), head.drifts
        layers = head.config.layers if self.inner else 1
        super().__init__(head.config.cache(layers, capacity, head.like))

    def features(self, tree: TokenTree, fresh: list[int]) -> Tensor:
        feature_TD = super().features(tree, fresh)
        return self.network.join(feature_TD) if self.inner else feature_TD

    def _begin_behind(self, length: int) -> None:
        super()._begin_behind(length)
        self._foreseen: tuple[int, int] | None = None  # an index in the text, and the token that was guessed for it

    def _follow(self, tree: TokenTree,
                ahead: Sequence[int] = ()) -> Steps[Read | None]:
        read = yield from super()._follow(tree, ahead)
        if self.fit and self.fit.tried < TRIED and read is not None:
            place = len(tree.trunk)
            if self._foreseen and self._foreseen[0] < place:
                known, guessed = self._foreseen
                self.fit.count(guessed, tree.nodes[tree.trunk[known]].token)
            best = self.tokens(read.logits_AV[:1].argmax(-1))
            self._foreseen = place, int(best)
        return read

    def tokens(self, place: Tensor) -> Tensor:
        shift = self.network.shift
        return place if shift is None else place + shift[place]


def held_ahead(source: Checkpoint) -> list[str]:
    """Return the tensor names of a model's layer for multi-token prediction. Raises ValueError for several layers."""
    found = {name: match[1] for name in source.names() if (match := AHEAD.search(name))}
    numbers = set(found.values())
    if len(numbers) > 1:
        raise ValueError(f"{source.folder} has {len(numbers)} layers for multi-token prediction, but only one is "
                         "supported: take a model with one, or an EAGLE draft head")
    return list(found)


def own_names(source: Checkpoint) -> dict[str, str]:
    """Return our names of a head's tensors, where EAGLE-3's first layer is `midlayer` -> their names in the file."""
    if ahead := held_ahead(source):
        return {OF_LAYER.sub(r"layers.0.\1.", AHEAD.sub("", name)): name for name in ahead}
    held = [name for name in source.names() if not BUFFER.search(name) and not name.startswith("verifier_")]
    weights = {re.sub(r"^model\.", "", name): name for name in held}
    if "layers.0.hidden_norm.weight" not in weights:
        return weights
    return {name.replace("layers.0.", "midlayer."): theirs for name, theirs in weights.items()}


def fit_head(source: Checkpoint, base: Mapping[str, Any]) -> Head:
    """Create the head of a file without its weights. Raises ValueError if it does not match the base's config."""
    names = own_names(source)
    forms = {name: source.form(names[name]).shape for name in names}
    target = LlamaConfig.read(base)
    is_mtp, third = "input_proj.weight" in forms, any(name.startswith("midlayer.") for name in forms)
    if "fc.weight" not in forms and not is_mtp and not third:
        raise ValueError(f"{source.folder} is not an EAGLE draft head (it has no fc.weight); give the folder of a head")
    _check_target(source, base, target, third)
    if not is_mtp:
        found = block_problems if is_block(source.config) else partial(head_problems, third=third)
        problem = next(found(source.config, layers=target.layers, context=target.context), None)
        if problem:
            raise ValueError(f"{source.folder / 'config.json'} {problem}")
    sizes = read_sizes(source)
    has_bias = any(name.endswith(".q_proj.bias") for name in forms)
    has_norms = any(name.endswith(".q_norm.weight") for name in forms)
    family = replace(sizes.family, qkv_bias=has_bias, head_norms=has_norms)
    sizes = replace(sizes, context=target.context, family=family, windows=())
    if third:
        return _fit_third(source, forms, sizes, target)
    head: Head
    if is_mtp:
        head = MtpHead(replace(sizes, layers=1))
    elif is_block(source.config):
        head = DFlashHead(sizes, read_block(source.config))
    else:
        head = EagleHead(sizes, bias="fc.bias" in forms)
        head.drifts = (source.config.get("unrolled_passes") or 1) < UNROLLED
    _check_names(source, head, set() if isinstance(head, EagleHead) else {OWN_EMBEDDING})
    return head


def _fit_third(source: Checkpoint, forms: Mapping[str, Shape], sizes: LlamaConfig,
               target: LlamaConfig) -> Eagle3Head:
    """Create the EAGLE-3 head of a file without its weights."""
    dialect = read_dialect(source.config, target.layers)
    if not dialect.inner:
        raise ValueError(f"the head in {source.folder} is an EAGLE-3 head that names no layers, which needs a model of "
                         f"7 layers or more, but the model has {target.layers}; take an EAGLE-1 or EAGLE-2 head")
    vocab = next(filter(None, map(source.config.get, VOCAB)), sizes.vocab)
    head = Eagle3Head(sizes, target.hidden, vocab, dialect)
    mapped = bool(forms.keys() & MAPS)
    free = set() if mapped or vocab != sizes.vocab else set(MAPS)
    if sizes.hidden == target.hidden:
        free.add(OWN_EMBEDDING)
    _check_names(source, head, free)
    if mapped:
        head.shift = _read_shift(source, vocab)
    return head


def _check_target(source: Checkpoint, base: Mapping[str, Any], target: LlamaConfig, third: bool) -> None:
    """Raise ValueError if a head was trained for another kind of model than its base, or for other sizes."""
    its, named = source.config, verifier(source.config)
    kinds, ours = named.get("architectures") or [], base.get("architectures") or []
    if kinds and ours and not set(kinds) & set(ours):
        raise ValueError(f"the draft head in {source.folder} was trained for {short_repr(named.get('name_or_path'))}, "
                         f"a {short_repr(kinds[0])}, but the model is a {ours[0]}; take the head trained for it")
    hidden, vocab = its.get("hidden_size"), its.get("vocab_size")
    if third:  # with an embedding of its own, its size may differ from the target's
        hidden = its.get("target_hidden_size") or hidden
    for key, found, size in (("hidden_size", hidden, target.hidden), ("vocab_size", vocab, target.vocab)):
        if found != size:
            raise ValueError(f"the draft head in {source.folder} has {key} {found!r}, but the model has {size}; "
                             "take the head that was trained for this model")


def borrows_embedding(source: Checkpoint, base: Mapping[str, Any]) -> bool:
    """Return whether a head uses the embedding of its base. Raises ValueError if it does not match the base."""
    fit_head(source, base)
    return OWN_EMBEDDING not in own_names(source)


def _read_shift(source: Checkpoint, vocab: int) -> Tensor:
    """Read the numbers `[vocab]` to add to the head's tokens to get the target's."""
    names = own_names(source)
    shift, has_V = (source.read(names[name]) for name in MAPS)
    known = torch.from_numpy(has_V.numpy().nonzero()[0])  # torch would start threads, which do not survive a fork
    reached = (torch.arange(vocab) + shift).sort().values
    if shift.is_floating_point() or not torch.equal(known, reached):
        raise ValueError(f"d2t and t2d in {source.folder} contradict each other; download the head again")
    return shift


def _check_names(source: Checkpoint, head: Head, free: set[str]) -> None:
    """Raise ValueError if a file does not have exactly the head's tensors; the `free` ones may be missing."""
    names = own_names(source)
    wanted: dict[str, Shape] = {name: tuple(p.shape) for name, p in head.named_parameters()}
    if isinstance(head, Eagle3Head):
        sizes = head.lm_head.out_features, head.config.vocab
        wanted.update(zip(MAPS, ((size,) for size in sizes)))
    for name in free.difference(names):
        wanted.pop(name, None)
    check_shapes(source, names, wanted.items(),
                 "download the head again: weights and config.json of the same head, as published for this model")


def load_head(source: Checkpoint, base: Mapping[str, Any], embed: Callable[[], Tensor],
              dtype: torch.dtype, device: torch.device | str) -> Head:
    """Load a head with its weights; `embed` reads the base's embedding, for a head without one of its own.

    If the embedding consists of a GGUF file's blocks, they are kept.
    """
    head = fit_head(source, base)
    names = own_names(source)
    tensors = {name: source.read(names[name]) for name in names if name not in MAPS}
    if isinstance(head, Eagle3Head) and head.shift is not None:
        head.shift = head.shift.to(device)
    if OWN_EMBEDDING not in tensors:
        tensors[OWN_EMBEDDING] = embed()
        if block_type(tensors[OWN_EMBEDDING].shape):
            head.embed_tokens = BlockEmbedding(form_of(tensors[OWN_EMBEDDING]))
    fill(head, tensors, dtype, device)
    return head
