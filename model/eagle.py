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

from config.heads import head_problems, is_speculators
from model.cache import TreeCache
from model.checkpoint import Checkpoint
from model.drafts import TreeDraft, likeliest
from model.llama import MLP, Attention, Layer, LlamaConfig, RMSNorm, Rotary, embedding, fill, linear
from model.tree import TokenTree
from model.weights import BUFFER

OWN_EMBEDDING = "embed_tokens.weight"
MAPS = ("d2t", "t2d")  # from the draft's vocabulary to the target's, and which of the target's tokens it has


def inner_layers(layers: int) -> tuple[int, ...]:
    """The layers of a target whose inputs are the features of EAGLE-3; a target too small for that has none."""
    return (2, layers // 2, layers - 3) if layers >= 7 else ()


class EagleHead(nn.Module):
    """`fc` over [embedding, feature], then one decoder layer without input norm; no norm at the end.

    The feature is the target's last hidden state, after its norm; the target's LM head makes logits of what it says.
    """

    shift = None

    def __init__(self, c: LlamaConfig, bias: bool) -> None:
        super().__init__()
        self.config = c
        self.embed_tokens = embedding(c.vocab, c.hidden)
        self.fc = linear(2 * c.hidden, c.hidden, bias)
        self.layers = nn.ModuleList([Layer(c, input_norm=False)])
        self.rotary = Rotary(c)

    def forward(self, token_T: Tensor, feature_TD: Tensor, pos_T: Tensor, cache: TreeCache) -> Tensor:
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
            setattr(self.self_attn, name, linear(2 * c.hidden, narrow.out_features, narrow.bias is not None))
        self.mlp = MLP(c)
        self.hidden_norm = RMSNorm(c.hidden, c.eps)
        self.input_layernorm = RMSNorm(c.hidden, c.eps)
        self.post_attention_layernorm = RMSNorm(c.hidden, c.eps)

    def forward(self, x_TD: Tensor, feature_TD: Tensor, turn: tuple[Tensor, Tensor], cache: TreeCache) -> Tensor:
        both = torch.cat((self.input_layernorm(x_TD), self.hidden_norm(feature_TD)), -1)
        x_TD = feature_TD + self.self_attn(both, turn, cache, 0)
        return x_TD + self.mlp(self.post_attention_layernorm(x_TD))


class Eagle3Head(nn.Module):
    """`fc` over three inner features of a target of size `target`, one `midlayer`, and an LM head of its own.

    That LM head knows `vocab` tokens. If those are not all, its token i is the target's token i + `shift[i]`.
    """

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

    def forward(self, token_T: Tensor, feature_TD: Tensor, pos_T: Tensor, cache: TreeCache) -> Tensor:
        """What the head makes of each pair, `[T, D]`; `feature_TD` is the target's `[T, 3 * target]` or its own."""
        if feature_TD.shape[-1] == self.fc.in_features:
            feature_TD = self.fc(feature_TD)
        x_TD = self.embed_tokens(token_T)
        return self.midlayer(x_TD, feature_TD, self.rotary.at(pos_T, x_TD), cache)

    def logits(self, out_TD: Tensor) -> Tensor:
        """Over the head's own vocabulary."""
        return self.lm_head(self.norm(out_TD))  # type: ignore[no-any-return]


Head = Union[EagleHead, Eagle3Head]


class Eagle(TreeDraft):
    """A draft that guesses with a head; `lm_head` maps what it makes to logits."""

    source, lag = "eagle", 1

    def __init__(self, head: Head, lm_head: Callable[[Tensor], Tensor], capacity: int) -> None:
        self.head, self.lm_head, self.inner = head, lm_head, isinstance(head, Eagle3Head)
        super().__init__(head.config.cache(1, capacity, head.embed_tokens.weight))

    def known(self, tree: TokenTree, fresh: list[int]) -> list[int]:
        """Those whose pair can be formed: the target's feature of the token before has come."""
        return list(takewhile(lambda node: tree.parent[node] in tree.hidden, fresh))

    def features(self, tree: TokenTree, fresh: list[int]) -> Tensor:
        return torch.stack([tree.hidden[tree.parent[node]] for node in fresh])

    def read(self, token_T: Tensor, feature_TD: Tensor, pos_T: Tensor) -> Tensor:
        return self.head(token_T, feature_TD, pos_T, self.cache)  # type: ignore[no-any-return]

    def guess(self, out_TD: Tensor, width: int) -> tuple[Tensor, Tensor]:
        gain_TW, place_TW = likeliest(self.lm_head(out_TD), width)
        return gain_TW, place_TW if self.head.shift is None else place_TW + self.head.shift[place_TW]


def fit_head(source: Checkpoint, base: Mapping[str, Any]) -> Head:
    """The head that a file holds, still without weights; one that does not fit the base's config is refused."""
    forms = {name: source.form(name).shape for name in source.names() if not BUFFER.search(name)}
    its, third = source.config, _is_third(source, forms)
    target = LlamaConfig.read(base)
    wide = its.get("hidden_size")  # a head of EAGLE-3 with an embedding of its own may differ from its target
    for key, one, two in (("hidden_size", its.get("target_hidden_size", wide) if third else wide, target.hidden),
                          ("vocab_size", its.get("vocab_size"), target.vocab)):
        if one != two:
            raise ValueError(f"the draft head in {source.folder} has {key} {one!r}, but the model has {two}; "
                             "take the head that was trained for this model")
    sizes = _read_config(source, target, third)
    family = replace(sizes.family, qkv_bias=any(name.endswith(".q_proj.bias") for name in forms),
                     head_norms=any(name.endswith(".q_norm.weight") for name in forms))
    sizes = replace(sizes, context=target.context, family=family)
    if not third:
        head: Head = EagleHead(sizes, bias="fc.bias" in forms)
        _check_names(source, forms, head, set())
        return head
    vocab = its.get("draft_vocab_size") or sizes.vocab
    head = Eagle3Head(sizes, target.hidden, vocab)
    free = set(MAPS) if vocab == sizes.vocab and not forms.keys() & MAPS else set()
    _check_names(source, forms, head, free if wide != target.hidden else {*free, OWN_EMBEDDING})
    if forms.keys() & MAPS:
        head.shift = _read_shift(source, vocab)
    return head


def borrows_embedding(source: Checkpoint, base: Mapping[str, Any]) -> bool:
    """Whether a head uses the embedding of its base; one that does not fit is refused."""
    fit_head(source, base)
    return OWN_EMBEDDING not in source.names()


def _is_third(source: Checkpoint, forms: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether it is a head of EAGLE-3, and not one of EAGLE-1 or EAGLE-2; whatever is none of them is told as such."""
    published = "take the head in the form in which EAGLE, SpecForge or AngelSlim publish it"
    if is_speculators(source.config):
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
    for problem in head_problems(source.config, third, inner, target.context):
        raise ValueError(f"{source.folder / 'config.json'} {problem}")
    try:
        return LlamaConfig.read(source.config)
    except ValueError as error:
        raise ValueError(f"the draft head in {source.folder}: {error}") from None


def _read_shift(source: Checkpoint, vocab: int) -> Tensor:
    """What leads from the tokens of the head's vocabulary to the target's."""
    shift, has_V = (source.read(name) for name in MAPS)
    known = has_V.nonzero()[:, 0]
    if shift.is_floating_point() or not torch.equal(known, (torch.arange(vocab) + shift).sort().values):
        raise ValueError(f"d2t and t2d in {source.folder} contradict each other; download the head again")
    return shift


def _check_names(source: Checkpoint, forms: Mapping[str, tuple[int, ...]], head: Head, free: set[str]) -> None:
    """Refuse a file whose tensors are not those of the head; the `free` ones may be missing."""
    wanted = {name: tuple(p.shape) for name, p in head.named_parameters()}
    if isinstance(head, Eagle3Head):
        wanted.update(zip(MAPS, ((head.lm_head.out_features,), (head.config.vocab,))))
    missing, extra = sorted(set(wanted) - set(forms) - free), sorted(set(forms) - set(wanted))
    if missing or extra:
        strange = ", ".join(ascii(name)[1:-1] for name in extra[:4])  # as a stranger named them
        said = [f"it lacks {', '.join(missing[:4])}"] * bool(missing) + [f"it has {strange}"] * bool(extra)
        raise ValueError(f"{source.folder} does not hold an EAGLE head as it is published: {' and '.join(said)}; "
                         "download the head again")
    for name, shape in forms.items():
        if shape != wanted[name]:
            raise ValueError(f"{name} in {source.folder} has shape {shape} instead of {wanted[name]}; "
                             "take weights and config.json of one head, made for this model")


def load_head(source: Checkpoint, base: Mapping[str, Any], embed: Callable[[], Tensor], dtype: torch.dtype,
              device: torch.device | str) -> Head:
    """The head with its weights; `embed` reads the base's embedding, for a head without one of its own."""
    head = fit_head(source, base)
    tensors = {name: x for name, x in source.tensors().items() if name not in MAPS and not BUFFER.search(name)}
    if isinstance(head, Eagle3Head) and head.shift is not None:
        head.shift = head.shift.to(device)
    if OWN_EMBEDDING not in tensors:
        tensors[OWN_EMBEDDING] = embed()
    fill(head, tensors, dtype, device)
    return head
