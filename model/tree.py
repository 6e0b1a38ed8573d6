"""The token tree: settled text is its trunk, guesses are its branches.

It uses no tensors, and knows nothing about models or ranks. A node is an id that is assigned once and never changes its
meaning: token, parent and position belong to the id, so nothing is ever renumbered.
"""
from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field
from itertools import count, islice, takewhile
from typing import Any, Iterable, Iterator, NamedTuple, Sequence, Tuple

Guess = Tuple[int, int, float]  # parent, token, log-probability of the path


class Proposal(NamedTuple):
    """A token that is guessed after a node, its source, and the law (distribution) from which it was drawn, if any."""

    source: str
    token: int
    law: Any = None


@dataclass
class Node:
    """The data of a live or settled node."""

    token: int
    parent: int  # the root is its own parent
    pos: int
    score: float  # log-probability of the path, never above the parent's
    children: dict[int, int] = field(default_factory=dict)  # token -> child, so adding twice means merging
    proposals: dict[str, float] = field(default_factory=dict)  # of a guess: the source that proposed it -> its score
    drawn: Sequence[Proposal] = ()  # the tokens drawn after it, in this order, with duplicates
    target_token: int | None = None  # the token after it, as the target chooses it
    divergence: float = 0.0  # in nats, of the law from which a lossy rule chose `target_token` from the target's
    hidden: Any = None  # the target's feature of it, until it is released
    partial: Any = None  # features that stages have reported of it under way, for a draft that reads them
    logprob: Any = None  # log-probabilities of the token after it, if the request wants them


class TokenTree:
    """One request: the text so far and every live guess below its tip.

    `limit` is the largest number of tokens of the text. `ids` yields node ids, and is shared by all requests of a
    pipeline, so that a message about an old node can never mean a new one. Guesses are cut `best_first`, or in the
    order in which they were added. `law` is the part of the target's law that depends on the path (model/law.py).
    """

    def __init__(self, prompt: Iterable[int], limit: int, ids: Iterator[int] | None = None,
                 best_first: bool = True, law: Any = None) -> None:
        self._ids = count() if ids is None else ids
        self.limit, self.best_first, self.law = limit, best_first, law
        self.nodes: dict[int, Node] = {}  # the trunk and the live guesses
        self.trunk: list[int] = []
        self.unsent: deque[int] = deque()  # settled nodes that were not yet sent to the target
        self.live: set[int] = set()  # guesses below the tip
        self.waiting: set[int] = set()  # live guesses that were not yet sent
        self._released = 0  # nodes of the trunk with released features
        self.guessed = 0  # guesses that were sent
        self.foreseen: list[int] = []  # positions of the text at which a sent guess was accepted
        for token in prompt:
            self.settle(token)
        if not self.trunk:
            raise ValueError("the prompt is empty: give at least one token")
        self.verifications = 0  # times that `verify` followed the return of rows that were not all of the prompt
        self.has_unverified = False  # whether such rows have come back since the last one
        # Settled tokens after the prompt that had to be sent as text because no sent guess covered them. The prompt's
        # tokens are also sent, so they are subtracted here.
        self.misses = -len(self.trunk)

    def again(self, prompt: int, length: int, law: Any = None) -> TokenTree:
        """Return a tree of the first `length` tokens for a target that holds none; counts continue, `law` is new."""
        tree = TokenTree(self.tokens[:length], self.limit, self._ids, self.best_first, law)
        tree.guessed = self.guessed
        tree.foreseen = [position for position in self.foreseen if position < length]
        tree.misses = -prompt - len(tree.foreseen)
        tree.verifications = self.verifications
        return tree

    @property
    def tip(self) -> int:
        """The last settled node."""
        return self.trunk[-1]

    @property
    def room(self) -> int:
        """The number of tokens by which the text may still grow."""
        return self.limit - len(self.trunk)

    @property
    def horizon(self) -> int:
        """An id above the ids of all nodes of this tree so far."""
        return self._last + 1

    @property
    def pending(self) -> int:
        """The number of nodes that the next cuts could send."""
        return len(self.unsent) + len(self.waiting)

    @property
    def tokens(self) -> list[int]:
        """The text so far, prompt included."""
        return [self.nodes[node].token for node in self.trunk]

    def add(self, parent: int, token: int, score: float, source: str = "") -> int:
        """Add the guess `token` after `parent`, with the log-probability of the path by `source`; return its node.

        An existing guess keeps its id, and the better of its scores. A guess that the law excludes is not sent.
        """
        above = self.nodes[parent]
        path = min(score, above.score)
        found = above.children.get(token)
        if found is not None:
            guess = self.nodes[found]
            guess.score = max(path, guess.score)
            guess.proposals[source] = score
            return found
        node = self._new(parent, token, path)
        self.nodes[node].proposals[source] = score
        self.live.add(node)
        if self.law is None or self.law.allows(self, parent, token):
            self.waiting.add(node)
        return node

    def propose(self, parent: int, proposal: Proposal, score: float) -> int:
        """Add a proposal after `parent` and return its node. Drawn proposals are recorded, duplicates too."""
        if proposal.law is not None:
            self.nodes[parent].drawn = [*self.nodes[parent].drawn, proposal]
        return self.add(parent, proposal.token, score, proposal.source)

    def settle(self, token: int) -> None:
        """Continue the text with `token`; all other branches below the tip die."""
        node = None
        if self.trunk:
            tip = self.nodes[self.tip]
            branches, tip.children, tip.drawn = tip.children, {}, ()
            node = branches.pop(token, None)
            for dead in branches.values():
                self.drop(dead)
        if node is None:
            parent = self.tip if self.trunk else None
            node = self._new(parent, token, 0.0 if parent is None else self.nodes[parent].score)
            self.unsent.append(node)
        elif node in self.waiting:
            self.waiting.remove(node)
            self.unsent.append(node)
        else:
            self.foreseen.append(self.nodes[node].pos)
        self.live.discard(node)
        self.trunk.append(node)

    def skip(self, count: int) -> None:
        """Skip sending the first `count` nodes of the text, since the target already holds these tokens."""
        assert count <= len(self.unsent), f"{len(self.unsent)} nodes were not sent, fewer than {count}"
        for _ in range(count):
            self.unsent.popleft()
        self.misses += count

    def cut(self, size: int | None = None, chunk: int | None = None) -> list[int]:
        """Return the next nodes to send: at most `chunk` rows of unsent text, then best guesses, up to `size` in all.

        Text that needs several chunks is cut into nearly equal ones, since all wait for the largest; guesses follow the
        last one. Parents come before their children: a score never exceeds the parent's, and ties go to the older node.
        A tree that is not cut best first is cut in the order of ids, in which parents come first, too.
        """
        assert chunk is None or chunk > 0, f"a chunk of {chunk} rows"
        left = len(self.unsent)
        chunks = max(1, math.ceil(left / chunk)) if chunk else 1
        rows = math.ceil(left / chunks)
        text = [self.unsent.popleft() for _ in range(rows)]
        self.misses += len(text)
        if self.unsent:
            return text
        room = len(self.waiting) if size is None else max(0, size - len(text))
        best = heapq.nsmallest(room, self.waiting, key=self._rank)
        self.waiting.difference_update(best)
        self.guessed += len(best)
        return text + best

    def offer(self, guesses: Sequence[Guess], size: int, least: float,
              source: str = "") -> list[int]:
        """Add the guesses that score `least` or more and are then among the best `size` live guesses.

        `guesses` are sorted, best first. The nodes of added guesses are returned, in this order. A guess that the tree
        already has does not count again.
        """
        new = (score for parent, token, score in guesses if token not in self.nodes[parent].children)
        floor = max(self.trim(size, islice(new, size + 1)), least)
        taken = takewhile(lambda guess: guess[2] >= floor, guesses)
        return [self.add(*guess, source) for guess in taken]

    def trim(self, size: int, offered: Iterable[float] = ()) -> float:
        """Return the least score of the best `size` live or offered guesses, and drop waiting guesses below it."""
        scores = [self.nodes[node].score for node in self.live]
        scores += offered
        if len(scores) <= size:
            return float("-inf")
        scores.sort(reverse=True)
        least = scores[size - 1]
        self.forget(least)
        return least

    def forget(self, least: float = math.inf) -> None:
        """Drop all unsent guesses that score less than `least`."""
        for node in [node for node in self.waiting if self.nodes[node].score < least]:
            if node in self.waiting:  # it may have been dropped together with its parent
                self.drop(node)

    def release(self, count: int) -> None:
        """Release the features of the first `count` nodes of the text, which every draft has read."""
        end = min(count, len(self.trunk) - 1)  # the tip's feature may still arrive
        for node in self.trunk[self._released:end]:
            self.nodes[node].hidden = self.nodes[node].partial = None
        self._released = max(self._released, end)

    def drop(self, node: int) -> None:
        """Remove a guess and everything below it."""
        guess = self.nodes[node]
        self.nodes[guess.parent].children.pop(guess.token, None)
        doomed = [node]
        while doomed:
            node = doomed.pop()
            self.live.discard(node)
            self.waiting.discard(node)
            doomed.extend(self.nodes.pop(node).children.values())

    def _new(self, parent: int | None, token: int, score: float) -> int:
        self._last = node = next(self._ids)
        if parent is None:
            self.nodes[node] = Node(token, node, 0, score)
            return node
        assert parent < node, f"node {node} is older than its parent {parent}"
        above = self.nodes[parent]
        self.nodes[node] = Node(token, parent, above.pos + 1, score)
        above.children[token] = node
        return node

    def child(self, parent: int, token: int) -> int | None:
        """Return the node of `token` after `parent`, settled or guessed, or None."""
        above = self.nodes.get(parent)
        return above.children.get(token) if above else None

    def _rank(self, node: int) -> tuple[float, int]:
        return -self.nodes[node].score if self.best_first else 0.0, node


def verify(tree: TokenTree) -> list[int]:
    """Verify guesses: settle the target's tokens from the tip on, as far as they are known, and return them."""
    tree.verifications += tree.has_unverified
    tree.has_unverified = False

    new: list[int] = []
    while (token := tree.nodes[tree.tip].target_token) is not None:
        new.append(token)
        tree.settle(token)
    return new
