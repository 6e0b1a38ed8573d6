"""The strategies: when to draft, send, verify and prune; one generator each, side by side.

They know nothing about ranks, devices or messages. Each yields the tokens that it settled, `WAIT` while it waits, and
its draft's `Reading`s.
The target samples, keyed by position: so every strategy writes the same text, and only the order of the verbs differs.
They need no torch, so they can be read, tested and simulated without.
"""
from __future__ import annotations

from typing import Any, Callable, Generator, List, Protocol, Sequence, Union

from config.trees import TreeConfig
from model.drafts.draft import Draft, Reading
from model.tree import TokenTree, verify


class Waiting:
    """What a strategy yields while it waits for its target."""


WAIT = Waiting()

# A strategy yields settled tokens, `WAIT`, or a `Reading` of its draft, for which it is sent what was `Read`.
Progress = Generator[Union[List[int], Waiting, Reading], Any, None]


class Target(Protocol):
    """The pipeline, as the strategy of one request sees it."""

    @property
    def depth(self) -> int:
        """The number of segments that fill the pipeline."""

    @property
    def in_flight(self) -> int:
        """The number of this request's segments that were sent and not verified yet."""

    @property
    def has_room(self) -> bool:
        """Whether the pipeline is not full yet."""

    @property
    def free(self) -> bool:
        """Whether the first stage is about free, and this request may send."""

    def share(self, size: int | None) -> int | None:
        """How many of `size` rows in the next segment this request may fill; None: no bound."""

    def ready(self) -> bool:
        """Take in what has arrived; whether a segment is back, so that `wait` would return at once."""

    def pays(self, promise: float) -> bool:
        """Whether a level of guesses, of `promise` expected tokens, is worth its time."""

    def waits_for(self, promise: float) -> bool:
        """Whether the waiting nodes should leave together with a level of `promise` expected tokens."""

    def send(self, nodes: Sequence[int]) -> None:
        """Send these nodes of the tree; does not wait."""

    def wait(self) -> Progress:
        """Yield until a segment of this request is back, and note its answers in the tree.

        `yield from` it: the decoder serves other requests at each `WAIT`.
        """

    def rest(self) -> Progress:
        """Yield until a segment is back or, if there are nodes to send, until the first stage is free."""

    def prune(self) -> None:
        """Send every stage which nodes are alive."""

    def close(self) -> None:
        """End the request; returns when every stage has forgotten it."""


Strategy = Callable[[TokenTree, Target, Draft, TreeConfig], Progress]


def autoregressive(tree: TokenTree, target: Target, draft: Draft, cfg: TreeConfig) -> Progress:
    """One token, once round the ring; the prompt goes in chunks that follow each other through the stages."""
    while True:
        while segment := tree.cut(1, cfg.chunk):
            target.send(segment)
        while target.in_flight:
            yield from target.wait()
        yield verify(tree)


def serial(tree: TokenTree, target: Target, draft: Draft, cfg: TreeConfig) -> Progress:
    """Draft a tree and send it whole: one stage works while the others wait."""
    while True:
        while (yield from draft.grow(tree, cfg.init)):
            pass
        while segment := tree.cut(None, cfg.chunk):
            target.send(segment)
        while target.in_flight:
            yield from target.wait()
        yield verify(tree)
        target.prune()


def naive(tree: TokenTree, target: Target, draft: Draft, cfg: TreeConfig) -> Progress:
    """Draft a tree, cut it into equal shares that fill the pipeline, verify it once all are back (Chunk-PP)."""
    while True:
        while (yield from draft.grow(tree, cfg.init)):
            pass
        share = -(-tree.pending // target.depth)
        while segment := tree.cut(share, cfg.chunk):
            target.send(segment)
        while target.in_flight:
            yield from target.wait()
        yield verify(tree)
        target.prune()


def pruned(tree: TokenTree, target: Target, draft: Draft, cfg: TreeConfig) -> Progress:
    """Send a tree best guesses first; verify every segment as it returns, and prune what is still on its way."""
    while True:
        while (yield from draft.grow(tree, cfg.init)):
            pass
        while segment := tree.cut(cfg.init.segment, cfg.chunk):
            target.send(segment)
        while not tree.unsent:  # an answer for the tip is on its way
            yield from target.wait()
            if new := verify(tree):
                target.prune()
                yield new


def continuous(tree: TokenTree, target: Target, draft: Draft, cfg: TreeConfig) -> Progress:
    """Keep the pipeline full of the best unsent guesses; verify, prune and regrow at every return (FlowSpec)."""
    growth = cfg.init
    while True:
        if tree.unsent:  # the tip shall not wait for the whole tree, nor leave alone
            while (yield from draft.grow(tree, cfg.init.young)):
                pass
            target.send(tree.cut(cfg.init.segment, cfg.chunk))
        while not target.ready() and (yield from draft.grow(tree, growth)):
            pass
        while target.has_room and (segment := tree.cut(growth.segment, cfg.chunk)):
            target.send(segment)
        yield from target.wait()
        if new := verify(tree):
            target.prune()
            draft.refresh()
            growth = cfg.init if tree.unsent else cfg.expand
            yield new
        elif tree.live:
            growth = growth.deeper(cfg.idle)


def pipedec(tree: TokenTree, target: Target, draft: Draft, cfg: TreeConfig) -> Progress:
    """Every step send one more layer of the tree, and verify the layer that comes back (PipeDec)."""
    while True:
        if segment := tree.cut(cfg.layer.segment, cfg.chunk):
            target.send(segment)
            tree.forget()
        yield from draft.grow(tree, cfg.layer)
        if not segment or not target.has_room:
            yield from target.wait()
            if new := verify(tree):
                target.prune()
                yield new


def pipeinfer(tree: TokenTree, target: Target, draft: Draft, cfg: TreeConfig) -> Progress:
    """The tip at once and alone, then run after run of one drafted chain, which a miss ends (PipeInfer)."""
    while True:
        while tree.unsent:
            target.send(tree.cut(1, cfg.chunk))
        while not target.ready() and tree.pending < cfg.run and (yield from draft.grow(tree, cfg.chain)):
            pass
        if target.ready() or not target.has_room or not (segment := tree.cut(cfg.run)):
            yield from target.wait()
            if new := verify(tree):
                target.prune()
                yield new
        else:
            target.send(segment)


def pearl(tree: TokenTree, target: Target, draft: Draft, cfg: TreeConfig) -> Progress:
    """One verification at a time of all that one chain has by then, while the chain goes on (PEARL, AMUSD).

    After a miss that is the tip alone, beside which the first guesses are drafted (PEARL's pre-verify, algorithm 2); as
    long as guesses are right, it is what was drafted during the verification before (its post-verify).
    """
    while True:
        while segment := tree.cut(None, cfg.chunk):
            target.send(segment)
        while target.in_flight:
            room = tree.pending < cfg.init.nodes
            if target.ready() or not room or not (yield from draft.grow(tree, cfg.chain)):
                yield from target.wait()
        yield verify(tree)
        target.prune()


def ssd(tree: TokenTree, target: Target, draft: Draft, cfg: TreeConfig) -> Progress:
    """One verification at a time; meanwhile grow below all that its answer may be, so that the next leaves at once.

    That is Saguaro's speculation cache (SSD, section 4.1). After an answer below which nothing was grown, a tree is
    drafted first, with the same draft: the paper's fallback where requests are few (section 4.3).
    """
    growth = cfg.outcomes
    while True:
        levels = 0 if tree.waiting else growth.outcome_levels
        while levels and (yield from draft.grow(tree, growth)):
            levels -= 1
        while tree.unsent:
            target.send(tree.cut(growth.segment, cfg.chunk))
        while target.in_flight:
            if target.ready() or not (yield from draft.grow(tree, growth)):
                yield from target.wait()
        yield verify(tree)
        target.prune()
        draft.refresh()


def streaming(tree: TokenTree, target: Target, draft: Draft, cfg: TreeConfig) -> Progress:
    """Judge what is back; else send the best guesses just as the first stage gets free; else draft; else rest.

    Guesses that are not worth their row are not sent, levels that are not worth rank 0's time are not drafted.
    """
    while True:
        if target.ready():
            yield from target.wait()
            if new := verify(tree):
                target.prune()
                draft.refresh()
                yield new
        elif len(tree.unsent) == 1 and target.free and (yield from draft.grow(tree, cfg.stream, target.waits_for)):
            pass  # guesses that leave with a bare tip do not wait behind it
        elif target.free and (segment := tree.cut(target.share(cfg.stream.segment), cfg.chunk)):
            target.send(segment)
        elif not (yield from draft.grow(tree, cfg.stream, target.pays)):
            yield from target.rest()


def spd(tree: TokenTree, target: Target, draft: Draft, cfg: TreeConfig) -> Progress:
    """One guess for each step of a stage, so that each stage has one of a chain (SPD)."""
    while True:
        if target.ready():
            yield from target.wait()
            if new := verify(tree):
                target.prune()
                yield new
        elif target.free and (segment := tree.cut(1, cfg.chunk)):
            target.send(segment)
        elif tree.pending or not target.has_room or not (yield from draft.grow(tree, cfg.coupled)):
            yield from target.rest()


def dsi(tree: TokenTree, target: Target, draft: Draft, cfg: TreeConfig) -> Progress:
    """A drafter that never waits: the tip at once, and every few guesses of one chain to a free replica (DSI)."""
    enough = cfg.lookahead
    while True:
        if target.ready():
            yield from target.wait()
            if new := verify(tree):
                target.prune()
                yield new
        elif tree.unsent or (target.free and tree.pending >= enough):
            target.send(tree.cut(None, cfg.chunk))
            enough = cfg.lookahead
        elif not (yield from draft.grow(tree, cfg.coupled)):
            enough = 1  # there are no more guesses to wait for
            yield from target.rest()


STRATEGIES: dict[str, Strategy] = {strategy.__name__: strategy for strategy in (
    autoregressive, serial, naive, pruned, continuous, pipedec, pipeinfer, pearl, ssd, streaming, spd, dsi)}
