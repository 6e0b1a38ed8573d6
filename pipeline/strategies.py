"""The strategies: when to draft, send, verify and prune. Each one is a generator.

They know nothing about ranks, devices or messages. Each yields settled tokens, `WAIT` while it waits for its target,
and the `Reading`s of its draft.
The noise of the target's samples is keyed by position, so all strategies produce the same text, and differ only in the
order of these steps. They need no torch, so they can be read, tested and simulated without it.
"""
from __future__ import annotations

from typing import Any, Callable, Generator, List, Protocol, Sequence, Union

from config.trees import TreeConfig
from model.drafts.draft import Draft, Reading
from model.tree import TokenTree, verify


class Waiting:
    """The value that a strategy yields while it waits for its target."""


WAIT = Waiting()

# A strategy yields settled tokens, `WAIT`, or a `Reading` of its draft. A `Reading` is answered with a `Read`.
Progress = Generator[Union[List[int], Waiting, Reading], Any, None]


class Target(Protocol):
    """The pipeline as seen by the strategy of one request."""

    @property
    def depth(self) -> int:
        """Number of segments that fill the pipeline."""

    @property
    def in_flight(self) -> int:
        """Number of this request's segments whose answers are not in the tree yet."""

    @property
    def has_room(self) -> bool:
        """Whether the pipeline can take another segment of this request."""

    @property
    def free(self) -> bool:
        """Whether the first stage is free, or nearly so, and this request may send."""

    def share(self) -> int | None:
        """Return the rows that this request may fill in the next segment; None: all."""

    def ready(self) -> bool:
        """Process arrived messages; return whether a segment has come back, so that `wait` would not wait."""

    def worth_drafting(self, expected_tokens: Sequence[float]) -> int:
        """Return how many guesses, of these expected tokens, are worth their time in a level; 0: no level is."""

    def worth_waiting(self, expected_tokens: Sequence[float]) -> int:
        """Return how many guesses are read in a level for which unsent nodes should wait; 0: they should not."""

    def send(self, nodes: Sequence[int]) -> None:
        """Send these nodes of the tree without waiting."""

    def wait(self) -> Progress:
        """Yield until a segment of this request has come back, then record its answers in the tree.

        Call it with `yield from`: at each `WAIT` the decoder serves other requests.
        """

    def wait_until_free(self) -> Progress:
        """Yield until a segment has come back or, if there are nodes to send, until the first stage is free."""

    def prune(self) -> None:
        """Record what has settled, for pacing; send the live nodes to every stage if guesses may have died."""


Strategy = Callable[[TokenTree, Target, Draft, TreeConfig], Progress]


def autoregressive(tree: TokenTree, target: Target, draft: Draft, cfg: TreeConfig) -> Progress:
    """Decode one token per round of the ring; chunks of the prompt follow each other through the stages."""
    while True:
        while segment := tree.cut(1, cfg.chunk):
            target.send(segment)

        while target.in_flight:
            yield from target.wait()

        yield verify(tree)


def serial(tree: TokenTree, target: Target, draft: Draft, cfg: TreeConfig) -> Progress:
    """Draft a tree and send it as one segment: one stage works while the others wait."""
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
    """Draft a tree, send it in equal shares that fill the pipeline, verify it once all are back (Chunk-PP)."""
    while True:
        while (yield from draft.grow(tree, cfg.init)):
            pass

        rows_per_segment = -(-tree.num_unsent // target.depth)
        while segment := tree.cut(rows_per_segment, cfg.chunk):
            target.send(segment)

        while target.in_flight:
            yield from target.wait()

        yield verify(tree)
        target.prune()


def pruned(tree: TokenTree, target: Target, draft: Draft, cfg: TreeConfig) -> Progress:
    """Send a tree with the best guesses first; verify each segment as it returns, and prune those in flight."""
    while True:
        while (yield from draft.grow(tree, cfg.init)):
            pass

        while segment := tree.cut(cfg.init.segment, cfg.chunk):
            target.send(segment)

        while not tree.unsent_text:  # an answer for the tip is on its way
            yield from target.wait()
            if new_tokens := verify(tree):
                target.prune()
                yield new_tokens


def continuous(tree: TokenTree, target: Target, draft: Draft, cfg: TreeConfig) -> Progress:
    """Fill the pipeline with the best unsent guesses; verify, prune and grow at each returned segment (FlowSpec)."""
    growth = cfg.init
    while True:
        if tree.unsent_text:  # the tip must neither wait for the whole tree nor leave alone
            while (yield from draft.grow(tree, cfg.init.young)):
                pass
            target.send(tree.cut(cfg.init.segment, cfg.chunk))

        while not target.ready() and (yield from draft.grow(tree, growth)):
            pass
        while target.has_room and (segment := tree.cut(growth.segment, cfg.chunk)):
            target.send(segment)

        yield from target.wait()
        if new_tokens := verify(tree):
            target.prune()
            draft.refresh()
            growth = cfg.init if tree.unsent_text else cfg.expand
            yield new_tokens
        elif tree.live:
            growth = growth.deeper(cfg.idle)


def pipedec(tree: TokenTree, target: Target, draft: Draft, cfg: TreeConfig) -> Progress:
    """In each step send the next layer of the tree, and verify the layer that comes back (PipeDec)."""
    while True:
        if segment := tree.cut(cfg.layer.segment, cfg.chunk):
            target.send(segment)
            tree.forget()

        yield from draft.grow(tree, cfg.layer)
        if not segment or not target.has_room:
            yield from target.wait()
            if new_tokens := verify(tree):
                target.prune()
                yield new_tokens


def pipeinfer(tree: TokenTree, target: Target, draft: Draft, cfg: TreeConfig) -> Progress:
    """Send the tip at once and alone, then successive runs of one drafted chain, until a miss (PipeInfer)."""
    while True:
        while tree.unsent_text:
            target.send(tree.cut(1, cfg.chunk))

        while not target.ready() and tree.num_unsent < cfg.run and (yield from draft.grow(tree, cfg.chain)):
            pass

        if target.ready() or not target.has_room or not (segment := tree.cut(cfg.run)):
            yield from target.wait()
            if new_tokens := verify(tree):
                target.prune()
                yield new_tokens
        else:
            target.send(segment)


def windows(tree: TokenTree, target: Target, draft: Draft, cfg: TreeConfig) -> Progress:
    """Cut one chain into windows that leave without waiting, as many as fill the round trip (Mesh-LLM, leyten/shard).

    They come back in the order of their departure. After a miss those in flight are stale: the prune that cancels them
    overtakes them, and the next window begins with the tip.
    """
    while True:
        if target.ready():
            yield from target.wait()
            if new_tokens := verify(tree):
                target.prune()
                yield new_tokens

        elif tree.num_unsent < cfg.run and (yield from draft.grow(tree, cfg.chain)):
            pass  # a window leaves full, unless there are no more guesses

        elif target.free and (window := tree.cut(cfg.run, cfg.chunk)):
            target.send(window)

        else:
            yield from target.wait_until_free()


def pearl(tree: TokenTree, target: Target, draft: Draft, cfg: TreeConfig) -> Progress:
    """Verify all guesses of a chain so far, one verification at a time, while the chain grows (PEARL, AMUSD).

    After a miss the tip alone is verified, while the first guesses are drafted (PEARL's pre-verify, algorithm 2). As
    long as guesses are accepted, those drafted during the previous verification are verified next (its post-verify).
    """
    while True:
        while segment := tree.cut(None, cfg.chunk):
            target.send(segment)

        while target.in_flight:
            is_full = tree.num_unsent >= cfg.init.nodes
            if target.ready() or is_full or not (yield from draft.grow(tree, cfg.chain)):
                yield from target.wait()

        yield verify(tree)
        target.prune()


def ssd(tree: TokenTree, target: Target, draft: Draft, cfg: TreeConfig) -> Progress:
    """Run one verification at a time; meanwhile draft below its likely outcomes, so that the next leaves at once.

    This is Saguaro's speculation cache (SSD, section 4.1). After an outcome below which nothing was drafted, a tree is
    drafted first, with the same draft: the paper's fallback for few requests (section 4.3).
    """
    growth = cfg.outcomes
    while True:
        num_levels = 0 if tree.unsent_guesses else growth.outcome_levels
        while num_levels and (yield from draft.grow(tree, growth)):
            num_levels -= 1

        while tree.unsent_text:
            target.send(tree.cut(growth.segment, cfg.chunk))

        while target.in_flight:
            if target.ready() or not (yield from draft.grow(tree, growth)):
                yield from target.wait()

        yield verify(tree)
        target.prune()
        draft.refresh()


def streaming(tree: TokenTree, target: Target, draft: Draft, cfg: TreeConfig) -> Progress:
    """Verify a returned segment; else send the best guesses as the first stage gets free; else draft; else wait.

    A bare tip may wait for a level before it is sent. Guesses that are not worth a row are not sent. Levels that are
    not worth rank 0's time are not drafted.
    """
    while True:
        has_bare_tip = len(tree.unsent_text) == 1

        if target.ready():
            yield from target.wait()
            if new_tokens := verify(tree):
                target.prune()
                draft.refresh()
                yield new_tokens

        elif has_bare_tip and target.free and (yield from draft.grow(tree, cfg.stream, target.worth_waiting)):
            pass  # guesses that leave with a bare tip do not wait behind it

        elif target.free and (segment := tree.cut(target.share(), cfg.chunk)):
            target.send(segment)

        elif not (yield from draft.grow(tree, cfg.stream, target.worth_drafting)):
            yield from target.wait_until_free()


def dsi(tree: TokenTree, target: Target, draft: Draft, cfg: TreeConfig) -> Progress:
    """Draft a chain without waiting; the tip leaves at once, every `lookahead` guesses go to a free replica (DSI)."""
    num_guesses = cfg.lookahead

    while True:
        if target.ready():
            yield from target.wait()
            if new_tokens := verify(tree):
                target.prune()
                yield new_tokens

        elif tree.unsent_text or (target.free and tree.num_unsent >= num_guesses):
            target.send(tree.cut(None, cfg.chunk))
            num_guesses = cfg.lookahead

        elif not (yield from draft.grow(tree, cfg.coupled)):
            num_guesses = 1  # there are no more guesses to wait for
            yield from target.wait_until_free()


STRATEGIES: dict[str, Strategy] = {strategy.__name__: strategy for strategy in (
    autoregressive, serial, naive, pruned, continuous, pipedec, pipeinfer, windows, pearl, ssd, streaming, dsi)}
