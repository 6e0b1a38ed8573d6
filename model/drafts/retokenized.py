"""A draft with a small model that has a tokenizer of its own: its text is converted to the target's tokens.

String-level exact match (N. Timor et al., arXiv 2502.05202, algorithm 2): the drafted text is encoded with the target's
tokenizer, and a token is accepted if it is the one that the target chooses. So no probability passes between the two
vocabularies, and `verify=match` stays exact.

The tokens of a word may change while the word grows, and the last character may be incomplete. So a word is guessed
only after the next space, or in a long text without spaces. If the target's text ends in an incomplete character,
nothing is drafted.
"""
from __future__ import annotations

import math
import re
from copy import copy
from os.path import commonprefix
from typing import Any, Sequence

from model.drafts.draft import Guesses, Steps
from model.drafts.network import Expansion, Network, TreeDraft
from model.sample import Sampler
from model.text import BROKEN, Text, call_tokenizer, decoded, silent
from model.tree import TokenTree

LAST_WORD = re.compile(r"\s+\S*$")  # with the space before it
AHEAD = 12  # tokens after the tip, at most
LONG = 2  # drafted tokens without a space, from which on all but the last character is guessed
TAIL = 8  # last tokens of the text that are decoded and encoded together with the draft


class Retokenized(Network):
    """The chain of a small model in the target's tokens; `own` and `target` are the two tokenizers.

    `limit` is the small model's context in its own tokens. The noise of a position belongs to the target's tokens, so
    the small model drafts its likeliest tokens at any temperature.
    """

    source, far, blind = "model", True, True

    def __init__(self, small: TreeDraft, own: Text, target: Text, limit: int) -> None:
        self.small, self._limit = small, limit
        self._own, self._target = own.tokenizer, target.tokenizer
        self._silent = silent(self._own)
        self.reset()

    def another(self) -> Retokenized:
        twin = copy(self)
        twin.small = self.small.another()
        twin.reset()
        return twin

    def begin(self, sampler: Sampler) -> None:
        self.restart()

    def keep(self, length: int) -> None:
        self.restart()  # the common beginning of both texts is found when the next one is read

    def copy(self, other: Retokenized, length: int) -> None:
        self.reset()

    def reset(self) -> None:
        self.small.reset()
        self._tree = TokenTree([0], 1)  # the text in the small model's tokens, and its guesses
        self.restart()

    def restart(self) -> None:
        self._base = -1  # the position of the tip after which it drafts; below 0: it has not begun
        self._chain: list[tuple[int, float]] = []  # the target's tokens after that tip, and their probabilities
        self._given: set[tuple[int, int]] = set()  # nodes, and the token that was guessed after each
        self._ended = False  # whether the small model drafts no more

    def settle(self, tree: TokenTree) -> None:
        if self._base < 0:
            return
        new = [tree.nodes[node].token for node in tree.trunk[self._base + 1:]]
        guessed = [token for token, _ in self._chain[:len(new)]]
        used_up = self._ended and len(new) >= len(self._chain)
        if new != guessed or used_up:
            self.restart()

    def wants(self, tree: TokenTree, node: int) -> bool:
        if self._base < 0:
            return node == tree.tip
        end, place = self._end(tree)
        ahead = place - (tree.nodes[tree.tip].pos - self._base)
        is_open = node == end and place == len(self._chain) and ahead < AHEAD
        return is_open and not self._ended and self.small.cache.room > 0

    def expand(self, tree: TokenTree, nodes: list[int], width: int) -> Expansion:
        if self._base < 0:
            if len(tree.unsent_text) > 1:  # send the prompt first, so that the pipeline does not wait for this reading
                return None
            self._begin(tree)
        if not self._ended:
            yield from self._draft()
            self._chain = self._rewritten()
        return [self.unrequested(tree, node, width) or [] for node in nodes]

    def unrequested(self, tree: TokenTree, node: int, width: int) -> Guesses | None:
        end, place = self._end(tree)
        if node != end or place >= len(self._chain):  # also before it has begun
            return None
        guess = self._chain[place]
        if (node, guess[0]) in self._given:
            return None
        self._given.add((node, guess[0]))
        return [guess]

    def _end(self, tree: TokenTree) -> tuple[int, int]:
        """Return the last node of the tree along the chain, and the index in the chain after it."""
        node, place = tree.tip, tree.nodes[tree.tip].pos - self._base
        while place < len(self._chain):
            child = tree.child(node, self._chain[place][0])
            if child is None:
                break
            node, place = child, place + 1
        return node, place

    # --- the small model's own text -----------------------------------------------------------------------------------

    def _begin(self, tree: TokenTree) -> None:
        """Begin with the target's text; the small model keeps what it has already read of it."""
        tokens = tree.tokens
        text = decoded(self._target, tokens)
        ids = self._own(text, verbose=False)["input_ids"]
        room = min(self._limit, self.small.cache.capacity) - AHEAD
        self._base = tree.nodes[tree.tip].pos
        self._ended = text.endswith(BROKEN) or not 0 < len(ids) < room
        if self._ended:
            return
        known = commonprefix([ids[:-1], self._tree.tokens])
        self.small.keep(min(len(known), self.small.num_keepable_tokens))
        self.small.begin(Sampler())
        self._tree = TokenTree(ids, self._limit)
        self._tree.unsent_text.clear()  # this tree is never sent
        self._leaf = self._tree.tip
        self._drafted: list[int] = []
        self._written: list[tuple[int, float]] = []  # after each drafted token: characters, and their log-probability
        self._text = ""
        self._before, self._tail = ids[-TAIL:], tokens[-TAIL:]

    def _draft(self) -> Steps[None]:
        """Draft one more of the small model's own tokens."""
        said = yield from self.small.expand(self._tree, [self._leaf], 1)
        guess = next(iter(said[0] if said else ()), None)
        if guess is None or guess[0] in self._silent:
            self._ended = True
            return
        token, chance = guess
        score = self._tree.nodes[self._leaf].score + math.log(chance)
        self._leaf = self._tree.add(self._leaf, token, score)
        self._drafted.append(token)
        before = decoded(self._own, self._before)
        whole = decoded(self._own, [*self._before, *self._drafted])
        if not whole.startswith(before):
            self._ended = True
            return
        self._text = whole[len(before):].rstrip(BROKEN)
        self._written.append((len(self._text), score))

    # --- in the target's tokens ---------------------------------------------------------------------------------------

    def _rewritten(self) -> list[tuple[int, float]]:
        """Return the drafted text in stable tokens of the target, as probable as the drafted tokens that end there."""
        ids = encoded_after(self._target, self._tail, self._text)
        word = LAST_WORD.search(self._text)
        stable = word.start() if word else len(self._text) - 1 if len(self._drafted) >= LONG else 0
        chain, above = [], 0.0
        begins = len(decoded(self._target, self._tail))
        for count, token in enumerate(ids, 1):
            end = len(decoded(self._target, [*self._tail, *ids[:count]])) - begins
            if end > stable and not self._ended:
                break
            score = next((score for chars, score in self._written if chars >= end), above)
            chain.append((token, math.exp(score - above)))
            above = score
        return chain


def encoded_after(tokenizer: Any, tail: Sequence[int], text: str) -> list[int]:
    """Return the tokens of a text after the tokens `tail`, or none if `tail` and they decode to another text.

    The text is encoded together with the text of `tail`, or alone if a token would cross the border, as in the middle
    of a word.
    """
    before = decoded(tokenizer, tail)
    both = call_tokenizer(tokenizer, before + text, add_special_tokens=False, verbose=False)
    ids: list[int] = both["input_ids"]
    borders = (begin for begin in range(len(ids)) if decoded(tokenizer, ids[:begin]) == before)
    border = next(borders, None)
    found = ids[border:]
    if border is None:
        found = call_tokenizer(tokenizer, text, add_special_tokens=False, verbose=False)["input_ids"]
    return found if decoded(tokenizer, [*tail, *found]) == before + text else []
