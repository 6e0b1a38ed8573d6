"""A draft unrolled along a given text: from each token of the text on, it reads its own features.

A text is a token tree with the target's features at its nodes. `read_text` creates one.
"""
from __future__ import annotations

from contextlib import closing
from itertools import count
from typing import Iterator, NamedTuple, Sequence

import torch
from torch import Tensor

from model.drafts.dflash import BlockDraft
from model.drafts.network import TreeDraft, read_all
from model.sample import Sampler
from model.tree import TokenTree
from pipeline.decode import Decoder, PipelineLimits, Request
from pipeline.strategies import autoregressive

ROOM = 64  # largest depth of a tree


class SelfFedOutputs(NamedTuple):
    """The outputs `[T, D]` of a draft at some places of a text, each after `depth` tokens that it read as guesses."""

    depth: int
    places: Sequence[int]  # positions in the text of the tokens that were read last
    out_TD: Tensor


def unrolled(draft: TreeDraft, tree: TokenTree, prompt: int, deepest: int) -> Iterator[SelfFedOutputs]:
    """Yield the outputs of a draft for the text of a tree, after its first `prompt` tokens.

    From each token of the text on, the draft reads up to `deepest` further tokens as if it had guessed them: with its
    own outputs as features.
    """
    draft.reset()
    text = tree.trunk
    first = max(prompt - 1, draft.lag)
    _read_text(draft, tree, text[draft.lag:first], settled=True)
    out_TD = _read_text(draft, tree, text[first:-1], settled=False)
    starts = list(range(first, len(text) - 1))
    at_once = max(1,
                  (draft.cache.capacity - len(text)) // max(1, deepest))
    for i in range(0, len(starts), at_once):
        yield from _unroll(draft, tree, starts[i:i + at_once],
                           out_TD[i:i + at_once], deepest)
        draft.cache.retain(set(text))
    draft.reset()


def blocks(draft: BlockDraft, tree: TokenTree, prompt: int) -> Iterator[SelfFedOutputs]:
    """Yield the outputs of a draft that guesses blocks. Each block begins at a token of the text, with the target's
    features of the tokens before it; `depth` is the number of guesses before the place in its block."""
    draft.reset()
    text, size = tree.trunk, draft.form.size
    if prompt > 1:
        read_all([draft.rows(tree, text[:prompt - 1], text[prompt - 1], 0)])
    made = []
    for begin in range(prompt - 1, len(text) - 1):
        fresh = text[begin - 1:begin] if begin >= prompt else []
        [read] = read_all([draft.rows(tree, fresh, text[begin], size)])
        made.append(read.out_TD[1 - size:])
        draft.cache.drop()
    for depth in range(size - 1):
        places = range(prompt - 1 + depth, len(text) - 1)
        out = [out_TD[depth] for out_TD in made[:len(places)]]
        if out:
            yield SelfFedOutputs(depth, places, torch.stack(out))
    draft.reset()


def _read_text(draft: TreeDraft, tree: TokenTree, nodes: Sequence[int], settled: bool) -> Tensor:
    """Return the outputs `[T, D]` of a draft for these nodes of the text, with the target's features."""
    if not nodes:
        return torch.empty(0)
    parents = [tree.nodes[node].parent for node in nodes]
    draft.cache.admit(nodes, parents, text=len(nodes) if settled else 0)
    places = [tree.nodes[node].pos for node in nodes]
    return _read(draft, [tree.nodes[node].token for node in nodes],
                 places, draft.features(tree, list(nodes)))


def _read(draft: TreeDraft, tokens: Sequence[int],
          places: Sequence[int], feature_TD: Tensor) -> Tensor:
    token_T, pos_T = torch.tensor([tokens, places], device=draft.cache.like.device)
    return draft.read(token_T, feature_TD, pos_T - draft.lag, draft.cache)


def _unroll(draft: TreeDraft, tree: TokenTree, starts: Sequence[int], out_TD: Tensor, deepest: int
            ) -> Iterator[SelfFedOutputs]:
    """Yield the outputs from each of these places of the text on; `out_TD` are those for their own tokens."""
    tokens, ids = tree.tokens, count(tree.horizon)
    ends = [tree.trunk[start] for start in starts]  # the last node of each unrolled text
    for depth in range(deepest + 1):
        left = sum(start + depth + 1 < len(tokens) for start in starts)  # starts that have a token left to guess
        starts, ends, out_TD = starts[:left], ends[:left], out_TD[:left]
        if not left:
            return
        places = [start + depth for start in starts]
        if depth:
            nodes = [next(ids) for _ in starts]
            draft.cache.admit(nodes, ends, text=0)
            out_TD = _read(draft, [tokens[place] for place in places], places, out_TD)
            ends = nodes
        yield SelfFedOutputs(depth, places, out_TD)


def read_text(decoder: Decoder, text: Sequence[int]) -> TokenTree:
    """Return a tree with this text and the target's next token as its trunk, and with the target's features."""
    reader = Decoder(decoder.ring, decoder.draft, autoregressive, decoder.cfg, PipelineLimits(decoder.max_length))
    _, stream = reader.stream(Request(text, Sampler(), ROOM))
    with closing(stream):  # type: ignore[type-var]
        next(stream)
    return stream.tree
