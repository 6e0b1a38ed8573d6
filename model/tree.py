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
    score: float  # log-probability of the path from the root, never above the parent's
    children: dict[int, int] = field(default_factory=dict)  # token -> child, so adding twice means merging
    proposals: dict[str, float] = field(default_factory=dict)  # of a guess: the source that proposed it -> its score
    drawn: Sequence[Proposal] = ()  # the tokens drawn after it, in this order, with duplicates
    target_token: int | None = None  # the token after it, as the target chooses it
    divergence: float = 0.0  # in nats, of the law from which a lossy rule chose `target_token` from the target's
    hidden: Any = None  # the target's feature of it, until it is released
    logprob: Any = None  # log-probabilities of the token after it, if the request wants them


class TokenTree:
    """One request: the text so far and every live guess below its tip.

    The text ends with `max_tokens` tokens. `ids` yields node ids, and is shared by all requests of a
    pipeline, so that a message about an old node can never mean a new one. Guesses are cut `best_first`, or in the
    order in which they were added. `law` is the part of the target's law that depends on the path (model/law.py).
    """

    def __init__(self, prompt: Iterable[int], max_tokens: int, ids: Iterator[int] | None = None,
                 best_first: bool = True, law: Any = None) -> None:
        self._ids = count() if ids is None else ids
        self.max_tokens, self.best_first, self.law = max_tokens, best_first, law
        self.nodes: dict[int, Node] = {}  # the trunk and the live guesses
        self.trunk: list[int] = []
        self.live: set[int] = set()  # guesses below the tip
        self.unsent_text: deque[int] = deque()  # settled nodes that were not yet sent to the target
        self.unsent_guesses: set[int] = set()  # live ones
        self.num_sent_guesses = 0
        self.accepted_positions: list[int] = []  # positions of the text at which a sent guess was accepted
        self._num_released = 0  # nodes of the trunk with released features

        for token in prompt:
            self.settle(token)
        if not self.trunk:
            raise ValueError("the prompt is empty: give at least one token")

        self.num_verifications = 0  # times that `verify` followed the return of rows that were not all of the prompt
        self.has_unverified = False  # whether such rows have come back since the last one
        # Settled tokens after the prompt that had to be sent as text because no sent guess covered them. The prompt's
        # tokens are also sent, so they are subtracted here.
        self.num_misses = -len(self.trunk)

    def again(self, num_prompt_tokens: int, num_tokens: int, law: Any = None) -> TokenTree:
        """Return a tree of the first `num_tokens` tokens for a target without any; counts continue, `law` is new."""
        tree = TokenTree(self.tokens[:num_tokens], self.max_tokens, self._ids, self.best_first, law)
        tree.num_sent_guesses = self.num_sent_guesses
        tree.accepted_positions = [position for position in self.accepted_positions if position < num_tokens]
        tree.num_misses = -num_prompt_tokens - len(tree.accepted_positions)
        tree.num_verifications = self.num_verifications
        return tree

    @property
    def tip(self) -> int:
        """The last settled node."""
        return self.trunk[-1]

    @property
    def room(self) -> int:
        """The number of tokens by which the text may still grow."""
        return self.max_tokens - len(self.trunk)

    @property
    def horizon(self) -> int:
        """An id above the ids of all nodes of this tree so far."""
        return self._last + 1

    @property
    def num_unsent(self) -> int:
        """The number of nodes that the next cuts could send."""
        return len(self.unsent_text) + len(self.unsent_guesses)

    @property
    def tokens(self) -> list[int]:
        """The text so far, prompt included."""
        return [self.nodes[node].token for node in self.trunk]

    def add(self, parent: int, token: int, score: float, source: str = "") -> int:
        """Add the guess `token` after `parent`, with the log-probability of the path by `source`; return its node.

        An existing guess keeps its id, and the better of its scores, which raises those below it as well. A guess that
        the law excludes is not sent.
        """
        parent_node = self.nodes[parent]
        path_score = min(score, parent_node.score)
        existing = parent_node.children.get(token)
        if existing is not None:
            guess = self.nodes[existing]
            guess.proposals[source] = score
            if path_score > guess.score:
                self._raise(existing, path_score - guess.score)
            return existing

        node = self._new(parent, token, path_score)
        self.nodes[node].proposals[source] = score
        self.live.add(node)
        if self.law is None or self.law.allows(self, parent, token):
            self.unsent_guesses.add(node)
        return node

    def propose(self, parent: int, proposal: Proposal, score: float) -> int:
        """Add a proposal after `parent` and return its node. Drawn proposals are recorded, duplicates too."""
        if proposal.law is not None:
            self.nodes[parent].drawn = [*self.nodes[parent].drawn, proposal]
        return self.add(parent, proposal.token, score, proposal.source)

    def settle(self, token: int) -> None:
        """Continue the text with `token`; all other branches below the tip die."""
        # the branches below the tip
        node = None
        if self.trunk:
            tip = self.nodes[self.tip]
            branches, tip.children, tip.drawn = tip.children, {}, ()
            node = branches.pop(token, None)
            for dead_node in branches.values():
                self.drop(dead_node)

        # the new tip: a miss, a guess that was not sent, or one that was
        if node is None:
            parent = self.tip if self.trunk else None
            node = self._new(parent, token, 0.0 if parent is None else self.nodes[parent].score)
            self.unsent_text.append(node)
        elif node in self.unsent_guesses:
            self.unsent_guesses.remove(node)
            self.unsent_text.append(node)
        else:
            self.accepted_positions.append(self.nodes[node].pos)

        self.live.discard(node)
        self.trunk.append(node)

    def skip(self, count: int) -> None:
        """Skip sending the first `count` nodes of the text, since the target already holds these tokens."""
        assert count <= len(self.unsent_text), f"{len(self.unsent_text)} nodes were not sent, fewer than {count}"
        for _ in range(count):
            self.unsent_text.popleft()
        self.num_misses += count

    def cut(self, max_rows: int | None = None, max_text_rows: int | None = None) -> list[int]:
        """Return the next nodes to send: at most `max_text_rows` of unsent text, then guesses, `max_rows` in all.

        Text that needs several chunks is cut into nearly equal ones, since all wait for the largest; guesses follow the
        last one. Parents come before their children: a score never exceeds the parent's, and ties go to the older node.
        A tree that is not cut best first is cut in the order of ids, in which parents come first, too.
        """
        assert max_text_rows is None or max_text_rows > 0, f"a chunk of {max_text_rows} rows"
        num_text_rows = len(self.unsent_text)
        num_chunks = max(1, math.ceil(num_text_rows / max_text_rows)) if max_text_rows else 1
        text = [self.unsent_text.popleft() for _ in range(math.ceil(num_text_rows / num_chunks))]
        self.num_misses += len(text)
        if self.unsent_text:
            return text

        num_guesses = len(self.unsent_guesses) if max_rows is None else max(0, max_rows - len(text))
        best_guesses = heapq.nsmallest(num_guesses, self.unsent_guesses, key=self._rank)
        self.unsent_guesses.difference_update(best_guesses)
        self.num_sent_guesses += len(best_guesses)
        return text + best_guesses

    def offer(self, guesses: Sequence[Guess], max_guesses: int,
              min_score: float, source: str = "") -> list[int]:
        """Add the guesses that score `min_score` or more and are then among the best `max_guesses` live ones.

        `guesses` are sorted, best first. The nodes of added guesses are returned, in this order. A guess that the tree
        already has does not count again.
        """
        score_floor = min_score
        if len(self.live) + len(guesses) > max_guesses:
            new_scores = (score for parent, token, score in guesses if token not in self.nodes[parent].children)
            score_floor = max(self.trim(max_guesses, islice(new_scores, max_guesses + 1)), min_score)
        good_guesses = takewhile(lambda guess: guess[2] >= score_floor, guesses)
        return [self.add(*guess, source) for guess in good_guesses]

    def trim(self, max_guesses: int, offered_scores: Iterable[float] = ()) -> float:
        """Return the least score of the best `max_guesses` live or offered ones, and drop unsent guesses below it."""
        scores = [self.nodes[node].score for node in self.live]
        scores += offered_scores
        if len(scores) <= max_guesses:
            return float("-inf")

        scores.sort(reverse=True)
        min_score = scores[max_guesses - 1]
        self.forget(min_score)
        return min_score

    def forget(self, min_score: float = math.inf) -> None:
        """Drop all unsent guesses that score less than `min_score`."""
        for node in [node for node in self.unsent_guesses if self.nodes[node].score < min_score]:
            if node in self.unsent_guesses:  # it may have been dropped together with its parent
                self.drop(node)

    def release(self, count: int) -> None:
        """Release the features of the first `count` nodes of the text, which every draft has read."""
        num_released = min(count, len(self.trunk) - 1)  # the tip's feature may still arrive
        for node in self.trunk[self._num_released:num_released]:
            self.nodes[node].hidden = None
        self._num_released = max(self._num_released, num_released)

    def drop(self, node: int) -> None:
        """Remove a guess and everything below it."""
        guess = self.nodes[node]
        self.nodes[guess.parent].children.pop(guess.token, None)
        dead_nodes = [node]
        while dead_nodes:
            node = dead_nodes.pop()
            self.live.discard(node)
            self.unsent_guesses.discard(node)
            dead_nodes.extend(self.nodes.pop(node).children.values())

    def _new(self, parent: int | None, token: int, score: float) -> int:
        self._last = node = next(self._ids)
        if parent is None:
            self.nodes[node] = Node(token, node, 0, score)
            return node

        assert parent < node, f"node {node} is older than its parent {parent}"
        parent_node = self.nodes[parent]
        self.nodes[node] = Node(token, parent, parent_node.pos + 1, score)
        parent_node.children[token] = node
        return node

    def _raise(self, node: int, gain: float) -> None:
        """Add a gain to the scores of a guess and of all guesses below it; rounding lifts none above its parent."""
        raised_nodes = [node]
        while raised_nodes:
            guess = self.nodes[raised_nodes.pop()]
            guess.score = min(guess.score + gain, self.nodes[guess.parent].score)
            raised_nodes.extend(guess.children.values())

    def child(self, parent: int, token: int) -> int | None:
        """Return the guess `token` after `parent`, which is the tip or a guess itself; None if there is none."""
        parent_node = self.nodes.get(parent)
        return parent_node.children.get(token) if parent_node else None

    def _rank(self, node: int) -> tuple[float, int]:
        return -self.nodes[node].score if self.best_first else 0.0, node


def verify(tree: TokenTree) -> list[int]:
    """Verify guesses: settle the target's tokens from the tip on, as far as they are known, and return them.

    The text never becomes longer than `max_tokens`.
    """
    tree.num_verifications += tree.has_unverified
    tree.has_unverified = False

    new_tokens: list[int] = []
    while tree.room and (token := tree.nodes[tree.tip].target_token) is not None:
        new_tokens.append(token)
        tree.settle(token)
    return new_tokens
