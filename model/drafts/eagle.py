"""EAGLE's draft heads: those of EAGLE-1 and EAGLE-2, which share a form, and those of EAGLE-3.

They know nothing about pipelines. A draft pair is a token and the feature of the token before it, at the position of
that token (EAGLE, section 4.1). Pairs of settled nodes hold the target's features, pairs of guesses the head's own:
what it made of the pair before.

Shapes: T rows, D model, V vocabulary.
"""
from __future__ import annotations

from dataclasses import replace
from itertools import takewhile
from typing import Any, Callable, Mapping, Union

import torch
from torch import Tensor, nn

from config.schema.families import SPECULATORS, head_problems
from model.cache import Admitted, Rows
from model.drafts.network import TreeDraft
from model.llama import MLP, Attention, Layer, LlamaConfig, RMSNorm, Rotary, Rotation, embedding, fill, linear
from model.tree import TokenTree
from model.weights.checkpoint import Checkpoint
from model.weights.parts import BUFFER, Shape, check_shapes, read_sizes

OWN_EMBEDDING = "embed_tokens.weight"
UNROLLED = 4  # passes of a training, the one over the target's features included, from which on a head does not drift
MAPS = ("d2t", "t2d")  # from the draft's vocabulary to the target's, and which of the target's tokens it has


def inner_layers(layers: int) -> tuple[int, ...]:
    """The numbers of the layers of a target whose inputs EAGLE-3 reads; a target too small for that has none."""
    return (2, layers // 2, layers - 3) if layers >= 7 else ()


class EagleHead(nn.Module):
    """`fc` over [embedding, feature], then one decoder layer without input norm; no norm at the end.

    The feature is the target's last hidden state, after its norm; the target's LM head makes logits of what it says.
    """

    shift = None

    def __init__(self, c: LlamaConfig, bias: bool) -> None:
        super().__init__()
        self.drifts = True
        self.config = c
        self.embed_tokens = embedding(c.vocab, c.hidden)
        self.fc = linear(2 * c.hidden, c.hidden, bias)
        self.layers = nn.ModuleList([Layer(c, input_norm=False)])
        self.rotary = Rotary(c)

    def forward(self, token_T: Tensor, feature_TD: Tensor, pos_T: Tensor, cache: Rows) -> Tensor:
        """The head's guess of the feature of each token, `[T, D]`."""
        x_TD = self.fc(torch.cat((self.embed_tokens(token_T), feature_TD), -1))
        return self.layers[0](x_TD, self.rotary.at(pos_T, x_TD), cache, 0)


class MidLayer(nn.Module):
    """EAGLE-3's decoder layer: attention looks at embedding and feature side by side, the residual is the feature."""

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = Attention(c)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            wide = linear(2 * c.hidden, narrow.out_features, bias=narrow.bias is not None)
            setattr(self.self_attn, name, wide)
        self.mlp = MLP(c)
        self.hidden_norm = RMSNorm(c.hidden, c.eps)
        self.input_layernorm = RMSNorm(c.hidden, c.eps)
        self.post_attention_layernorm = RMSNorm(c.hidden, c.eps)

    def forward(self, x_TD: Tensor, feature_TD: Tensor, rotation: Rotation, cache: Rows) -> Tensor:
        both = torch.cat((self.input_layernorm(x_TD), self.hidden_norm(feature_TD)), -1)
        x_TD = feature_TD + self.self_attn(both, rotation, cache, 0)
        return x_TD + self.mlp(self.post_attention_layernorm(x_TD))


class Eagle3Head(nn.Module):
    """`fc` over three inner features of a target of size `target`, one `midlayer`, and an LM head of its own.

    That LM head knows `vocab` tokens. If those are not all, its token i is the target's token i + `shift[i]`.
    """

    drifts = False  # its training feeds it its own outputs, for about seven passes

    def __init__(self, c: LlamaConfig, target: int, vocab: int) -> None:
        super().__init__()
        self.config = c
        self.shift: Tensor | None = None
        self.embed_tokens = embedding(c.vocab, c.hidden)
        self.fc = linear(3 * target, c.hidden)
        self.midlayer = MidLayer(c)
        self.norm = RMSNorm(c.hidden, c.eps)
        self.lm_head = linear(c.hidden, vocab)
        self.rotary = Rotary(c)

    def forward(self, token_T: Tensor, feature_TD: Tensor, pos_T: Tensor, cache: Rows) -> Tensor:
        """What the head makes of each pair, `[T, D]`; `feature_TD` is the target's `[T, 3 * target]` or its own."""
        if feature_TD.shape[-1] == self.fc.in_features:
            feature_TD = self.fc(feature_TD)
        x_TD = self.embed_tokens(token_T)
        return self.midlayer(x_TD, feature_TD, self.rotary.at(pos_T, x_TD), cache)

    def logits(self, out_TD: Tensor) -> Tensor:
        """Logits `[T, V]` over the head's own vocabulary."""
        return self.lm_head(self.norm(out_TD))  # type: ignore[no-any-return]


Head = Union[EagleHead, Eagle3Head]


class Eagle(TreeDraft):
    """A draft that guesses with a head; `lm_head` maps what the head makes to logits.

    `drifts`: whether its guesses get worse with every guess that they stand on, as those of a head do that was taught
    on the target's features alone.
    """

    source, lag = "eagle", 1

    def __init__(self, head: Head, lm_head: Callable[[Tensor], Tensor], capacity: int) -> None:
        self.head, self.lm_head = head, lm_head
        self.inner = isinstance(head, Eagle3Head)
        self.drifts = head.drifts
        super().__init__(head.config.cache(1, capacity, head.embed_tokens.weight))

    def known(self, tree: TokenTree, fresh: list[int]) -> list[int]:
        """Those whose pair can be formed: the target's feature of the token before has come."""
        above = {node: tree.nodes[tree.nodes[node].parent] for node in fresh}
        return list(takewhile(lambda node: above[node].hidden is not None, fresh))

    def features(self, tree: TokenTree, fresh: list[int]) -> Tensor:
        above = [tree.nodes[tree.nodes[node].parent] for node in fresh]
        feature_TD = torch.stack([node.hidden for node in above])
        return self.head.fc(feature_TD) if isinstance(self.head, Eagle3Head) else feature_TD

    @property
    def network(self) -> object:
        return self.head

    def read(self, token_T: Tensor, feature_TD: Tensor, pos_T: Tensor, cache: Admitted) -> Tensor:
        return self.head(token_T, feature_TD, pos_T, cache)  # type: ignore[no-any-return]

    def tokens(self, place: Tensor) -> Tensor:
        return place if self.head.shift is None else place + self.head.shift[place]


def fit_head(source: Checkpoint, base: Mapping[str, Any]) -> Head:
    """The head that a file holds, still without weights; one that does not fit the base's config is refused."""
    weights = [name for name in source.names() if not BUFFER.search(name)]
    forms = {name: source.form(name).shape for name in weights}
    third = _is_third(source, forms)
    target = LlamaConfig.read(base)
    _check_sizes(source, target, third)
    sizes = _read_config(source, target, third)
    has_bias = any(name.endswith(".q_proj.bias") for name in forms)
    has_norms = any(name.endswith(".q_norm.weight") for name in forms)
    family = replace(sizes.family, qkv_bias=has_bias, head_norms=has_norms)
    sizes = replace(sizes, context=target.context, family=family)
    if third:
        return _fit_third(source, forms, sizes, target)
    head = EagleHead(sizes, bias="fc.bias" in forms)
    head.drifts = (source.config.get("unrolled_passes") or 1) < UNROLLED
    _check_names(source, forms, head, set())
    return head


def _fit_third(source: Checkpoint, forms: Mapping[str, Shape], sizes: LlamaConfig,
               target: LlamaConfig) -> Eagle3Head:
    """The head of EAGLE-3 that a file holds, still without weights."""
    vocab = source.config.get("draft_vocab_size") or sizes.vocab
    head = Eagle3Head(sizes, target.hidden, vocab)
    mapped = bool(forms.keys() & MAPS)
    free = set() if mapped or vocab != sizes.vocab else set(MAPS)
    if sizes.hidden == target.hidden:
        free.add(OWN_EMBEDDING)
    _check_names(source, forms, head, free)
    if mapped:
        head.shift = _read_shift(source, vocab)
    return head


def _check_sizes(source: Checkpoint, target: LlamaConfig, third: bool) -> None:
    """Refuse a head whose sizes are not those of its target."""
    its = source.config
    hidden = its.get("hidden_size")
    if third:  # with an embedding of its own, it may differ from its target
        hidden = its.get("target_hidden_size", hidden)
    found = {"hidden_size": hidden, "vocab_size": its.get("vocab_size")}
    wanted = {"hidden_size": target.hidden, "vocab_size": target.vocab}
    for key, size in wanted.items():
        if found[key] != size:
            raise ValueError(f"the draft head in {source.folder} has {key} {found[key]!r}, but the model has {size}; "
                             "take the head that was trained for this model")


def borrows_embedding(source: Checkpoint, base: Mapping[str, Any]) -> bool:
    """Whether a head uses the embedding of its base; one that does not fit is refused."""
    fit_head(source, base)
    return OWN_EMBEDDING not in source.names()


def _is_third(source: Checkpoint, forms: Mapping[str, Shape]) -> bool:
    """Whether it is a head of EAGLE-3, and not one of EAGLE-1 or EAGLE-2; ValueError for whatever is none of them."""
    published = "take the head in the form in which EAGLE, SpecForge or AngelSlim publish it"
    if any(key in source.config for key in SPECULATORS):
        raise ValueError(f"{source.folder} holds a head in the format of the library speculators, which is not "
                         f"supported; {published}")
    if "layers.0.hidden_norm.weight" in forms:
        raise ValueError(f"{source.folder} holds a head of EAGLE-3 that calls its layer layers.0, as vLLM does, "
                         f"instead of midlayer, which is not supported; {published}")
    third = any(name.startswith("midlayer.") for name in forms)
    if "fc.weight" not in forms and not third:
        raise ValueError(f"{source.folder} is not an EAGLE draft head (it has no fc.weight); give the folder of a head")
    return third


def _read_config(source: Checkpoint, target: LlamaConfig, third: bool) -> LlamaConfig:
    """The sizes of a head; one that computes otherwise, or cannot get its features from the target, is refused."""
    inner = inner_layers(target.layers)
    if third and not inner:
        raise ValueError(f"the head in {source.folder} is one of EAGLE-3, which needs a model of 7 layers or more, and "
                         f"the model has {target.layers}; take an EAGLE-1 or EAGLE-2 head")
    problem = next(iter(head_problems(source.config, third, inner, target.context)), None)
    if problem:
        raise ValueError(f"{source.folder / 'config.json'} {problem}")
    return read_sizes(source)


def _read_shift(source: Checkpoint, vocab: int) -> Tensor:
    """What is to be added to a token of the head's vocabulary to make it the target's, `[vocab]`."""
    shift, has_V = (source.read(name) for name in MAPS)
    known = has_V.nonzero()[:, 0]
    reached = (torch.arange(vocab) + shift).sort().values
    if shift.is_floating_point() or not torch.equal(known, reached):
        raise ValueError(f"d2t and t2d in {source.folder} contradict each other; download the head again")
    return shift


def _check_names(source: Checkpoint, forms: Mapping[str, Shape], head: Head, free: set[str]) -> None:
    """Refuse a file whose tensors are not those of the head; the `free` ones may be missing."""
    wanted: dict[str, Shape] = {name: tuple(p.shape) for name, p in head.named_parameters()}
    if isinstance(head, Eagle3Head):
        sizes = head.lm_head.out_features, head.config.vocab
        wanted.update(zip(MAPS, ((size,) for size in sizes)))
    for name in free.difference(forms):
        wanted.pop(name, None)
    check_shapes(source, {name: name for name in forms}, wanted.items(),
                 "download the head again: weights and config.json of one head, as it is published for this model")


def load_head(source: Checkpoint, base: Mapping[str, Any], embed: Callable[[], Tensor],
              dtype: torch.dtype, device: torch.device | str) -> Head:
    """The head with its weights; `embed` reads the base's embedding, for a head without one of its own."""
    head = fit_head(source, base)
    weights = [name for name in source.names() if name not in MAPS and not BUFFER.search(name)]
    tensors = {name: source.read(name) for name in weights}
    if isinstance(head, Eagle3Head) and head.shift is not None:
        head.shift = head.shift.to(device)
    if OWN_EMBEDDING not in tensors:
        tensors[OWN_EMBEDDING] = embed()
    fill(head, tensors, dtype, device)
    return head
