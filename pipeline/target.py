"""The target: where a strategy streams segments, and where the tree learns what follows each node.

It knows nothing about strategies, and strategies know nothing else about the pipeline.
"""
from __future__ import annotations

from collections import deque
from itertools import chain, count
from typing import Any, Callable, Iterable, Iterator, Protocol, Sequence

import torch
from torch import Tensor

from model.cache import upload
from model.sample import Sampler
from model.tree import TokenTree
from pipeline.messages import Prune, Reset, Segment, Stop
from pipeline.trace import OFF, NoTrace
from pipeline.transport import Link


class Target(Protocol):
    """What a strategy may ask of the pipeline."""

    depth: int  # segments that fill it
    in_flight: int  # segments that were sent and have not come back
    segments: int  # sent since the start
    requests: int  # ended since the start
    ids: Iterator[int]  # for the nodes of all requests, so that an old message can never mean a new node
    sampler: Sampler  # of the present request

    @property
    def has_room(self) -> bool:
        """Whether the next segment would find the pipeline not yet full."""

    @property
    def ready(self) -> bool:
        """Whether a segment has come back and waits to be received."""

    def send(self, tree: TokenTree, nodes: Sequence[int]) -> None:
        """Send these nodes; does not wait."""

    def recv(self, tree: TokenTree) -> None:
        """Wait for the oldest segment and note in the tree what it says."""

    def prune(self, tree: TokenTree) -> None:
        """Tell every stage what has died."""

    def reset(self, tree: TokenTree) -> None:
        """End a request."""


class Ring:
    """The stages in a ring: rank 0 sends to the first and hears from the last; it alone holds the LM head."""

    def __init__(self, link: Link, lm_head: Callable[[Tensor], Tensor], depth: int, device: torch.device | str = "cpu",
                 trace: NoTrace = OFF) -> None:
        self.link, self.lm_head, self.depth, self.device = link, lm_head, depth, device
        self.trace = trace
        self.in_flight, self.segments, self.requests = 0, 0, 0
        self.inner = False  # whether the draft's features are inner ones, which segments must ask the stages for
        self.ids: Iterator[int] = count()
        self.sampler = Sampler()

    @property
    def has_room(self) -> bool:
        return self.in_flight < self.depth

    @property
    def ready(self) -> bool:
        return self.link.ready

    def send(self, tree: TokenTree, nodes: Sequence[int]) -> None:
        tokens, parents = [tree.token[node] for node in nodes], [tree.parent[node] for node in nodes]
        text = sum(node not in tree.live for node in nodes)
        with self.trace.span("send", nodes=nodes, tokens=tokens, parents=parents, text=text):
            token_T = torch.tensor(tokens)
            self.link.send(Segment(list(nodes), parents, [tree.pos[node] for node in nodes], text, token_T,
                                   token_T.new_empty(len(nodes), 0) if self.inner else None))
        self.in_flight += 1
        self.segments += 1

    def recv(self, tree: TokenTree) -> None:
        assert self.in_flight, "nothing is in flight, so nothing can come back"
        with self.trace.span("wait"):
            segment = self.link.recv()
        assert isinstance(segment, Segment), f"a {type(segment).__name__} came back instead of a segment"
        self.in_flight -= 1
        said: dict[int, int] = {}
        with self.trace.span("judge", nodes=segment.nodes, said=said):
            self._note(tree, segment, said)

    def _note(self, tree: TokenTree, segment: Segment, said: dict[int, int]) -> None:
        """Keep the features of nodes that live, and the answers of those that can still be asked for one."""
        known = [i for i, node in enumerate(segment.nodes) if node in tree.token]
        x_TD = upload(segment.x, self.device)
        feature_TD = x_TD if segment.inner is None else upload(segment.inner, self.device)
        for i in known:
            tree.hidden[segment.nodes[i]] = feature_TD[i]
        asked = [i for i in known if segment.nodes[i] in tree.live or segment.nodes[i] == tree.tip]
        if asked:
            asked_TD = x_TD.index_select(0, upload(torch.tensor(asked), self.device))
            tokens = self.sampler(self.lm_head(asked_TD), [segment.pos[i] + 1 for i in asked])
            said.update(zip((segment.nodes[i] for i in asked), tokens))
            tree.answer.update(said)

    def prune(self, tree: TokenTree, spared: Iterable[int] = ()) -> None:
        """Tell every stage what has died, those nodes aside that are `spared`."""
        with self.trace.span("prune", tip=tree.tip, token=tree.token[tree.tip], parent=tree.parent[tree.tip]):
            self._broadcast(tree, [*tree.live.union(spared)])

    def _broadcast(self, tree: TokenTree, keep: list[int]) -> None:
        self.link.broadcast(Prune(tree.tip, tree.parent[tree.tip], tree.horizon, keep))

    def start(self) -> None:
        """Wait until every stage is there."""
        self._round(Reset())

    def reset(self, tree: TokenTree) -> None:
        """End a request: what is in flight is declared dead, and every stage has forgotten it on return."""
        with self.trace.span("reset", tip=tree.tip, token=tree.token[tree.tip], parent=tree.parent[tree.tip]):
            self._broadcast(tree, [])
            self._round(Reset())
        self.in_flight = 0
        self.requests += 1

    def stop(self) -> None:
        """End the pipeline: every stage has passed the message on when this returns."""
        self._round(Stop())

    def _round(self, msg: Reset | Stop) -> None:
        """Send a message round the ring and drop what comes back before it."""
        self.link.send(msg)
        while not isinstance(self.link.recv(), type(msg)):
            pass


class Sparing:
    """A ring for one request that spares what is in flight: what died on its way is computed to its end all the same.

    So pruning saves no time, but caches are still rid of what has come back.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._flying: deque[Sequence[int]] = deque()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ring, name)

    def send(self, tree: TokenTree, nodes: Sequence[int]) -> None:
        self._flying.append(nodes)
        self._ring.send(tree, nodes)

    def recv(self, tree: TokenTree) -> None:
        self._ring.recv(tree)
        self._flying.popleft()

    def prune(self, tree: TokenTree) -> None:
        self._ring.prune(tree, chain.from_iterable(self._flying))
