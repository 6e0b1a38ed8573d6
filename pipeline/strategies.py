"""The strategies: when to draft, send, judge and prune; one generator each, side by side.

They know nothing about ranks, devices or messages. Each yields the tokens that it settled. Sampling is the target's
affair, and keyed by position: so every strategy writes the same text, and only the order of the verbs differs.
"""
from __future__ import annotations

from typing import Callable, Iterator, List

from config.run_config import TreeConfig
from model.drafts import Draft
from model.tree import TokenTree, verify
from pipeline.target import Target

Strategy = Callable[[TokenTree, Target, Draft, TreeConfig], Iterator[List[int]]]


def autoregressive(tree: TokenTree, target: Target, draft: Draft, cfg: TreeConfig) -> Iterator[list[int]]:
    """One token, once round the ring; the prompt goes in chunks that follow each other through the stages."""
    while True:
        while segment := tree.cut(1, cfg.chunk):
            target.send(tree, segment)
        target.recv(tree)
        yield verify(tree)


def serial(tree: TokenTree, target: Target, draft: Draft, cfg: TreeConfig) -> Iterator[list[int]]:
    """Draft a tree and send it whole: one stage works while the others wait."""
    while True:
        while draft.grow(tree, cfg.init):
            pass
        while segment := tree.cut(None, cfg.chunk):
            target.send(tree, segment)
        while target.in_flight:
            target.recv(tree)
        yield verify(tree)
        target.prune(tree)


def naive(tree: TokenTree, target: Target, draft: Draft, cfg: TreeConfig) -> Iterator[list[int]]:
    """Draft a tree, cut it into equal shares that fill the pipeline, judge it once all are back (Chunk-PP)."""
    while True:
        while draft.grow(tree, cfg.init):
            pass
        share = -(-tree.pending // target.depth)
        while segment := tree.cut(share, cfg.chunk):
            target.send(tree, segment)
        while target.in_flight:
            target.recv(tree)
        yield verify(tree)
        target.prune(tree)


def pruned(tree: TokenTree, target: Target, draft: Draft, cfg: TreeConfig) -> Iterator[list[int]]:
    """Send a tree best guesses first; judge every segment as it returns, and prune what is still on its way."""
    while True:
        while draft.grow(tree, cfg.init):
            pass
        while segment := tree.cut(cfg.init.segment, cfg.chunk):
            target.send(tree, segment)
        while not tree.unsent:  # an answer for the tip is on its way
            target.recv(tree)
            if new := verify(tree):
                target.prune(tree)
                yield new


def continuous(tree: TokenTree, target: Target, draft: Draft, cfg: TreeConfig) -> Iterator[list[int]]:
    """Keep the pipeline full of the best unsent guesses; judge, prune and regrow at every return (FlowSpec)."""
    growth = cfg.init
    while True:
        while not target.ready and draft.grow(tree, growth):
            pass
        while target.has_room and (segment := tree.cut(growth.segment, cfg.chunk)):
            target.send(tree, segment)
        target.recv(tree)
        if new := verify(tree):
            target.prune(tree)
            draft.refresh()
            growth = cfg.init if tree.unsent else cfg.expand
            yield new
        elif tree.live:
            growth = growth.deeper(cfg.idle)


def pipedec(tree: TokenTree, target: Target, draft: Draft, cfg: TreeConfig) -> Iterator[list[int]]:
    """Every step send one more layer of the tree, and judge the layer that comes back (PipeDec)."""
    while True:
        if segment := tree.cut(cfg.layer.segment, cfg.chunk):
            target.send(tree, segment)
            tree.forget()
        draft.grow(tree, cfg.layer)
        if not segment or not target.has_room:
            target.recv(tree)
            if new := verify(tree):
                target.prune(tree)
                yield new


STRATEGIES: dict[str, Strategy] = {strategy.__name__: strategy for strategy in (
    autoregressive, serial, naive, pruned, continuous, pipedec)}
