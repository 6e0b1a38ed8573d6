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
from pipeline.answers import Request
from pipeline.decode import Decoder, PipelineLimits
from pipeline.strategies import autoregressive

MAX_DEPTH = 64  # largest depth of a tree


class SelfFedOutputs(NamedTuple):
    """The outputs `[T, D]` of a draft at some places of a text, each after `depth` tokens that it read as guesses."""

    depth: int
    places: Sequence[int]  # positions in the text of the tokens that were read last
    out_TD: Tensor


def unrolled(draft: TreeDraft, tree: TokenTree, num_prompt: int, max_depth: int) -> Iterator[SelfFedOutputs]:
    """Yield the outputs of a draft for the text of a tree, after its first `num_prompt` tokens.

    From each token of the text on, the draft reads up to `max_depth` further tokens as if it had guessed them: with its
    own outputs as features.
    """
    draft.reset()
    text = tree.trunk

    # the target's features
    first_start = max(num_prompt - 1, draft.lag)
    _read_text(draft, tree, text[draft.lag:first_start], is_settled=True)
    out_TD = _read_text(draft, tree, text[first_start:-1], is_settled=False)

    # the draft's own outputs as features
    start_positions = list(range(first_start, len(text) - 1))
    free_slots = draft.cache.capacity - len(text)
    num_together = max(1, free_slots // max(1, max_depth))

    for begin in range(0, len(start_positions), num_together):
        end = begin + num_together
        yield from _unroll(draft, tree, start_positions[begin:end], out_TD[begin:end], max_depth)
        draft.cache.retain(set(text))
    draft.reset()


def blocks(draft: BlockDraft, tree: TokenTree, num_prompt: int) -> Iterator[SelfFedOutputs]:
    """Yield the outputs of a draft that guesses blocks. Each block begins at a token of the text, with the target's
    features of the tokens before it; `depth` is the number of guesses before the place in its block."""
    draft.reset()
    text, block_size = tree.trunk, draft.form.size
    if num_prompt > 1:
        read_all([draft.rows(tree, text[:num_prompt - 1], text[num_prompt - 1], 0)])

    block_outputs = []
    for begin in range(num_prompt - 1, len(text) - 1):
        new_nodes = text[begin - 1:begin] if begin >= num_prompt else []
        [output] = read_all([draft.rows(tree, new_nodes, text[begin], block_size)])
        block_outputs.append(output.out_TD[1 - block_size:])
        draft.cache.drop()

    for depth in range(block_size - 1):
        places = range(num_prompt - 1 + depth, len(text) - 1)
        outputs = [out_TD[depth] for out_TD in block_outputs[:len(places)]]
        if outputs:
            yield SelfFedOutputs(depth, places, torch.stack(outputs))
    draft.reset()


def _read_text(draft: TreeDraft, tree: TokenTree, nodes: Sequence[int], is_settled: bool) -> Tensor:
    """Return the outputs `[T, D]` of a draft for these nodes of the text, with the target's features."""
    if not nodes:
        return torch.empty(0)
    parents = [tree.nodes[node].parent for node in nodes]
    draft.cache.admit(nodes, parents, text=len(nodes) if is_settled else 0)
    places = [tree.nodes[node].pos for node in nodes]
    return _read(draft, [tree.nodes[node].token for node in nodes],
                 places, draft.features(tree, list(nodes)))


def _read(draft: TreeDraft, tokens: Sequence[int],
          places: Sequence[int], feature_TD: Tensor) -> Tensor:
    token_T, pos_T = torch.tensor([tokens, places], device=draft.cache.like.device)
    return draft.read(token_T, feature_TD, pos_T - draft.lag, draft.cache)


def _unroll(draft: TreeDraft, tree: TokenTree, start_positions: Sequence[int], out_TD: Tensor, max_depth: int
            ) -> Iterator[SelfFedOutputs]:
    """Yield the outputs from each of these positions in the text on; `out_TD` are those for their own tokens."""
    tokens, new_ids = tree.tokens, count(tree.horizon)
    last_nodes = [tree.trunk[start_position] for start_position in start_positions]  # of each unrolled text
    for depth in range(max_depth + 1):
        has_token_left = [start_position + depth + 1 < len(tokens) for start_position in start_positions]
        num_left = sum(has_token_left)  # the later starts end first
        start_positions, last_nodes, out_TD = start_positions[:num_left], last_nodes[:num_left], out_TD[:num_left]
        if not num_left:
            return

        places = [start_position + depth for start_position in start_positions]
        if depth:
            nodes = [next(new_ids) for _ in start_positions]
            draft.cache.admit(nodes, last_nodes, text=0)
            out_TD = _read(draft, [tokens[position] for position in places], places, out_TD)
            last_nodes = nodes
        yield SelfFedOutputs(depth, places, out_TD)


def read_text(decoder: Decoder, text: Sequence[int]) -> TokenTree:
    """Return a tree with this text and the target's next token as its trunk, and with the target's features."""
    reader = Decoder(decoder.ring, decoder.draft, autoregressive, decoder.cfg, PipelineLimits(decoder.max_length))
    _, stream = reader.stream(Request(text, Sampler(), MAX_DEPTH))
    with closing(stream):  # type: ignore[type-var]
        next(stream)
    return stream.tree
