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
from typing import Any, NamedTuple, Sequence

from model.drafts.draft import Guesses, Steps
from model.drafts.network import Expansion, Network, TreeDraft
from model.sample import Sampler
from model.text import BROKEN, Text, call_tokenizer, decoded, silent
from model.tree import TokenTree

LAST_WORD = re.compile(r"\s+\S*$")  # with the space before it
MAX_AHEAD = 12  # tokens after the tip
LONG_WORD = 2  # drafted tokens without a space, from which on all but the last character is guessed
TAIL_TOKENS = 8  # last tokens of the text that are decoded and encoded together with the draft


class WrittenText(NamedTuple):
    """The drafted text up to one of the small model's tokens."""

    num_chars: int
    logprob: float


class ChainEnd(NamedTuple):
    """The last node of the tree along the chain."""

    node: int
    chain_index: int  # of the token after it


class Retokenized(Network):
    """The chain of a small model in the target's tokens.

    `small_text` and `target_text` have the two tokenizers. `limit` is the small model's context in its own tokens. The
    noise of a position belongs to the target's tokens, so the small model drafts its likeliest tokens at any
    temperature.
    """

    source, guesses_ahead = "model", True

    def __init__(self, small: TreeDraft, small_text: Text, target_text: Text, limit: int) -> None:
        self.small, self._limit = small, limit
        self._small_tokenizer, self._target_tokenizer = small_text.tokenizer, target_text.tokenizer
        self._silent_ids = silent(self._small_tokenizer)
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
        self._begin_position = -1  # of the tip after which it drafts; below 0: it has not begun
        self._chain: list[tuple[int, float]] = []  # the target's tokens after that tip, and their probabilities
        self._answered: set[tuple[int, int]] = set()  # nodes, and the token that was guessed after each
        self._has_ended = False  # whether the small model drafts no more

    def settle(self, tree: TokenTree) -> None:
        if self._begin_position < 0:
            return
        settled_tokens = [tree.nodes[node].token for node in tree.trunk[self._begin_position + 1:]]
        guessed_tokens = [token for token, _ in self._chain[:len(settled_tokens)]]
        is_used_up = self._has_ended and len(settled_tokens) >= len(self._chain)
        if settled_tokens != guessed_tokens or is_used_up:
            self.restart()

    def wants(self, tree: TokenTree, node: int) -> bool:
        if self._begin_position < 0:
            return node == tree.tip

        end = self._chain_end(tree)
        num_settled = tree.nodes[tree.tip].pos - self._begin_position
        num_ahead = end.chain_index - num_settled
        needs_more = node == end.node and end.chain_index == len(self._chain) and num_ahead < MAX_AHEAD
        return needs_more and not self._has_ended and self.small.cache.room > 0

    def expand(self, tree: TokenTree, nodes: list[int], width: int) -> Expansion:
        if self._begin_position < 0:
            if len(tree.unsent_text) > 1:  # send the prompt first, so that the pipeline does not wait for this reading
                return None
            self._begin(tree)

        if not self._has_ended:
            yield from self._draft()
            self._chain = self._target_chain()
        return [self.unrequested(tree, node, width) or [] for node in nodes]

    def unrequested(self, tree: TokenTree, node: int, width: int) -> Guesses | None:
        end = self._chain_end(tree)
        if node != end.node or end.chain_index >= len(self._chain):  # also before it has begun
            return None

        token, probability = self._chain[end.chain_index]
        if (node, token) in self._answered:
            return None
        self._answered.add((node, token))
        return [(token, probability)]

    def _chain_end(self, tree: TokenTree) -> ChainEnd:
        node, index = tree.tip, tree.nodes[tree.tip].pos - self._begin_position
        while index < len(self._chain):
            token, _ = self._chain[index]
            child = tree.child(node, token)
            if child is None:
                break
            node, index = child, index + 1
        return ChainEnd(node, index)

    # --- the small model's text ---------------------------------------------------------------------------------------

    def _begin(self, tree: TokenTree) -> None:
        """Begin with the target's text; the small model keeps what it has already read of it."""
        target_ids = tree.tokens
        text = decoded(self._target_tokenizer, target_ids)
        small_ids = self._small_tokenizer(text, verbose=False)["input_ids"]

        self._begin_position = tree.nodes[tree.tip].pos
        max_ids = min(self._limit, self.small.cache.capacity) - MAX_AHEAD
        self._has_ended = text.endswith(BROKEN) or not 0 < len(small_ids) < max_ids
        if self._has_ended:
            return

        # the small model
        common_ids = commonprefix([small_ids[:-1], self._tree.tokens])
        self.small.keep(min(len(common_ids), self.small.num_keepable_tokens))
        self.small.begin(Sampler())
        self._tree = TokenTree(small_ids, self._limit)
        self._tree.unsent_text.clear()  # this tree is never sent

        # its draft
        self._leaf = self._tree.tip
        self._drafted_ids: list[int] = []
        self._written: list[WrittenText] = []  # after each drafted token
        self._drafted_text = ""
        self._small_tail, self._target_tail = small_ids[-TAIL_TOKENS:], target_ids[-TAIL_TOKENS:]

    def _draft(self) -> Steps[None]:
        """Draft one more of the small model's own tokens."""
        expansion = yield from self.small.expand(self._tree, [self._leaf], 1)
        guesses = expansion[0] if expansion else ()
        if not guesses or guesses[0][0] in self._silent_ids:
            self._has_ended = True
            return

        token, probability = guesses[0]
        logprob = self._tree.nodes[self._leaf].score + math.log(probability)
        self._leaf = self._tree.add(self._leaf, token, logprob)
        self._drafted_ids.append(token)

        # its text
        tail_text = decoded(self._small_tokenizer, self._small_tail)
        whole_text = decoded(self._small_tokenizer, [*self._small_tail, *self._drafted_ids])
        if not whole_text.startswith(tail_text):
            self._has_ended = True
            return
        self._drafted_text = whole_text[len(tail_text):].rstrip(BROKEN)
        self._written.append(WrittenText(len(self._drafted_text), logprob))

    # --- in the target's tokens ---------------------------------------------------------------------------------------

    def _target_chain(self) -> list[tuple[int, float]]:
        """Return the drafted text in stable tokens of the target, as probable as the drafted tokens that end there."""
        target_ids = encoded_after(self._target_tokenizer, self._target_tail, self._drafted_text)
        num_tail_chars = len(decoded(self._target_tokenizer, self._target_tail))
        num_stable_chars = self._num_stable_chars()

        chain, previous_logprob = [], 0.0
        for count, token in enumerate(target_ids, 1):
            text = decoded(self._target_tokenizer, [*self._target_tail, *target_ids[:count]])
            num_chars = len(text) - num_tail_chars
            if num_chars > num_stable_chars and not self._has_ended:
                break

            logprobs = (written.logprob for written in self._written if written.num_chars >= num_chars)
            logprob = next(logprobs, previous_logprob)
            chain.append((token, math.exp(logprob - previous_logprob)))
            previous_logprob = logprob
        return chain

    def _num_stable_chars(self) -> int:
        """Return the number of leading characters of the draft whose tokens hardly change when it grows."""
        last_word = LAST_WORD.search(self._drafted_text)
        if last_word:
            return last_word.start()
        return len(self._drafted_text) - 1 if len(self._drafted_ids) >= LONG_WORD else 0


def encoded_after(tokenizer: Any, tail: Sequence[int], text: str) -> list[int]:
    """Return the tokens of a text after the tokens `tail`, or none if `tail` and they decode to another text.

    The text is encoded together with the text of `tail`, or alone if a token would cross the border, as in the middle
    of a word.
    """
    tail_text = decoded(tokenizer, tail)
    whole_ids: list[int] = call_tokenizer(tokenizer, tail_text + text,
                                          add_special_tokens=False, verbose=False)["input_ids"]
    borders = (begin for begin in range(len(whole_ids)) if decoded(tokenizer, whole_ids[:begin]) == tail_text)
    border = next(borders, None)

    if border is None:
        text_ids: list[int] = call_tokenizer(tokenizer, text, add_special_tokens=False, verbose=False)["input_ids"]
    else:
        text_ids = whole_ids[border:]
    return text_ids if decoded(tokenizer, [*tail, *text_ids]) == tail_text + text else []
