"""Guesses from earlier text with the same words: an online suffix automaton of token ids, and the texts that it reads.

After A. Blumer, J. Blumer, D. Haussler, A. Ehrenfeucht, M. T. Chen and J. Seiferas, *The smallest automaton
recognizing the subwords of a text* (1985), with several texts in one automaton. Texts of earlier requests may be in a
file that only its user can read. Its first line is JSON with the size of the vocabulary. Each other line is the list of
a text's token ids, the oldest text first.
"""
from __future__ import annotations

import fcntl
import json
import os
from heapq import nsmallest
from typing import Callable, Iterable, List, NamedTuple, Sequence, Tuple

from config.files import SPACE_REMEDY, as_value_error, fits, lines, make_private, open_lock, replace
from config.schema.untrusted import Name, short_repr
from model.tree import TokenTree

SUFFIX = "suffix"  # the source with guesses that depend on the length of a match
COUNTED = 32  # states that are counted at a token, of the strings that end there, the longest first
DISCOUNT = 0.1  # of the count of every following token; small, since the length of a match has a weight, too
LEARNED_GUESSES = 3  # after each match whose hits are learned
KEPT_ANSWERS = b'{"vocabulary"'  # begins a file of texts
KEPT_TOKENS = 100_000  # of earlier answers; their automaton takes 31 MB
KeepText = Callable[[List[int]], None]
Learn = Callable[[List[Tuple[int, float]], int, int], None]  # guesses, the length of their match, the next token
NEW_FILE_REMEDY = "delete the file to begin a new one, or name another"


class Match(NamedTuple):
    """The longest suffix of the tokens read so far that occurs in the texts with a token after it."""

    state: int
    length: int  # tokens


NOTHING = Match(0, 0)


class SuffixAutomaton:
    """A suffix automaton over texts of token ids; at every token, it finds the longest suffix that occurs elsewhere.

    A state stands for all strings that end at the same places of the texts; the longest of them has `_longest` tokens.
    Its link leads to the longest suffix of these strings that ends at more places. An automaton of n tokens has at most
    2n states and 3n transitions. A token takes a constant number of steps on average, and at most `COUNTED` to count.

    A match needs a token after it. So the end of the growing text never matches itself, and a repetition that has
    reached the end of the text continues from its last but one occurrence.
    """

    def __init__(self) -> None:
        self._transitions: list[dict[int, int]] = [{}]  # state -> token -> state
        self._links: list[int] = [-1]
        self._longest: list[int] = [0]
        self._counts: list[int] = [0]  # occurrences of the strings of a state
        self._last_seen: list[int] = [0]  # the number of tokens read at their last occurrence
        self._end_state = 0  # of the whole text so far
        self.size = 0  # tokens of all texts

    def extend(self, token: int) -> None:
        """Append a token to the text."""
        occurs_in_other_text = token in self._transitions[self._end_state]
        if occurs_in_other_text:
            self._end_state = self._reach(self._end_state, token)
        else:
            new_state = self._add_state({}, self._longest[self._end_state] + 1)
            state = self._end_state
            while state >= 0 and token not in self._transitions[state]:
                self._transitions[state][token] = new_state
                state = self._links[state]

            self._links[new_state] = 0 if state < 0 else self._reach(state, token)
            self._end_state = new_state

        self.size += 1
        self._count_end()

    def separate(self) -> None:
        """Begin a new text; no match spans two texts."""
        self._end_state = 0

    @property
    def tip(self) -> Match:
        """The match of the end of the text: its longest suffix that occurs earlier, in this text or in another."""
        return self._followed(self._end_state, self._longest[self._end_state])

    def step(self, match: Match, token: int) -> Match:
        """Return the match after one more token; it stays valid while the text grows, but may not stay the longest."""
        state, length = self._current_state(match), match.length
        while state >= 0 and token not in self._transitions[state]:
            state = self._links[state]
            length = self._longest[state] if state >= 0 else 0

        if state < 0:
            return NOTHING
        return self._followed(self._transitions[state][token], length + 1)

    def continuations(self, match: Match, width: int) -> list[tuple[int, float]]:
        """Return the `width` tokens that followed the match most often, with probabilities; ties go to the latest.

        A token that followed c times of n has probability (c - DISCOUNT) / n: absolute discounting (Ney, Essen and
        Kneser, 1994). So a context seen once is not certain, one seen often nearly is, and the probability left for
        other tokens grows with the number of different ones. Counts are those of `_count_end`. An empty match predicts
        nothing.
        """
        if not match.length:
            return []

        next_states = self._transitions[self._current_state(match)]  # by token
        total = sum(self._counts[state] for state in next_states.values())
        best_tokens = nsmallest(width, next_states, key=lambda token: self._sort_key(next_states[token]))
        return [(token, (self._counts[next_states[token]] - DISCOUNT) / total) for token in best_tokens]

    def _current_state(self, match: Match) -> int:
        """Return the current state of a match; states may have been split since it was created."""
        state = match.state
        while match.length and self._longest[self._links[state]] >= match.length:
            state = self._links[state]
        return state

    def _add_state(self, transitions: dict[int, int], longest: int) -> int:
        self._transitions.append(transitions)
        self._longest.append(longest)
        self._links.append(0)
        self._counts.append(0)
        self._last_seen.append(0)
        return len(self._transitions) - 1

    def _reach(self, state: int, token: int) -> int:
        """Return the state of the longest string of `state` plus this token, split off from that of longer strings."""
        next_state = self._transitions[state][token]
        length = self._longest[state] + 1
        if self._longest[next_state] == length:
            return next_state

        clone = self._add_state(dict(self._transitions[next_state]), length)
        self._links[clone] = self._links[next_state]
        self._counts[clone] = self._counts[next_state]
        self._last_seen[clone] = self._last_seen[next_state]

        self._links[next_state] = clone
        while state >= 0 and self._transitions[state].get(token) == next_state:
            self._transitions[state][token] = clone
            state = self._links[state]
        return clone

    def _count_end(self) -> None:
        """Count the strings that end here, exactly but for suffixes of more than COUNTED longer repeated strings."""
        state = self._end_state
        for _ in range(COUNTED):
            if not state:
                break
            self._counts[state] += 1
            self._last_seen[state] = self.size
            state = self._links[state]

    def _followed(self, state: int, length: int) -> Match:
        """Return the longest suffix of a string that is followed by a token."""
        while state and not self._transitions[state]:
            state = self._links[state]
            length = self._longest[state]
        return Match(state, length)

    def _sort_key(self, state: int) -> tuple[int, int]:
        """Return a key by which the most frequent states are first, and of these the latest."""
        return -self._counts[state], -self._last_seen[state]


class Suffix:
    """The automaton over the text so far and, with `keep`, over texts of earlier requests.

    `keep` is called with each text when its request is finished. `earlier` are texts that exist at the beginning.
    """

    def __init__(self, earlier: Sequence[Sequence[int]] = (), keep: KeepText | None = None) -> None:
        assert keep or not earlier, "earlier texts are forgotten with the first request, unless texts are kept"
        self._keep = keep
        self.automaton = SuffixAutomaton()
        self._text: list[int] = []
        self._earlier_texts = list(earlier)  # which twins share
        self._num_read = 0  # how many of them the automaton has
        self._catch_up()

    def another(self) -> Suffix:
        """Return a twin for another request, which shares the earlier texts."""
        twin = Suffix(keep=self._keep)
        twin._earlier_texts = self._earlier_texts
        twin._catch_up()
        return twin

    def reset(self) -> None:
        """Forget the request, or with `keep` turn its text into an earlier one."""
        if self._keep is None:
            self.automaton = SuffixAutomaton()
        else:
            if self._text:
                self.automaton.separate()
                self._keep(self._text)

            self._catch_up()
            if self._text:  # the automaton has it already
                self._earlier_texts.append(self._text)
                self._num_read += 1
        self._text = []

    def _catch_up(self) -> None:
        """Read new earlier texts."""
        for text in self._earlier_texts[self._num_read:]:
            for token in text:
                self.automaton.extend(token)
            self.automaton.separate()
        self._num_read = len(self._earlier_texts)

    def settle(self, tree: TokenTree, learn: Learn | None = None) -> None:
        """Read newly settled text; `learn` is called with the guesses before each token, if there were any."""
        for node in tree.trunk[len(self._text):]:
            token, match = tree.nodes[node].token, self.automaton.tip
            if learn and match.length:
                learn(self.automaton.continuations(match, LEARNED_GUESSES), match.length, token)
            self._text.append(token)
            self.automaton.extend(token)


# --- texts in a file --------------------------------------------------------------------------------------------------

def load_texts(path: Name, vocabulary: int, limit: int) -> list[list[int]]:
    """Return the newest texts of a file, oldest first, with `limit` tokens in total. Raises ValueError if invalid."""
    numbered_lines = lines(path, NEW_FILE_REMEDY) if os.path.exists(path) else iter(())

    # the header
    header: object
    line_number, header = next(numbered_lines, (0, None))
    if not line_number:
        return []
    if not fits(header, {"vocabulary": int}):
        raise ValueError(f"line {line_number} of {path} does not name the size of a vocabulary: {NEW_FILE_REMEDY}")
    if header != {"vocabulary": vocabulary}:
        raise ValueError(f"{path} holds answers of another vocabulary ({short_repr(header)}) than the model's, which "
                         f"has {vocabulary} tokens: {NEW_FILE_REMEDY}")

    def is_token(value: object) -> bool:
        return fits(value, int) and value in range(vocabulary)

    # the texts
    texts = []
    for line_number, text in numbered_lines:
        if not fits(text, [is_token]):
            raise ValueError(f"line {line_number} of {path} is not a list of token ids from 0 to {vocabulary - 1}: "
                             f"{NEW_FILE_REMEDY}")
        texts.append(text)
    return _newest(texts, limit)


def add_texts(path: Name, texts: Iterable[list[int]], vocabulary: int, limit: int) -> None:
    """Add texts to a file, which keeps the newest `limit` tokens; the file and its folder are created if necessary.

    The file is replaced atomically, by one process at a time, with a lock file next to it, so an interrupted process
    does not damage it. The time grows with `limit`. Raises ValueError as `load_texts` does, or if the file cannot be
    written.
    """
    with as_value_error(path, SPACE_REMEDY), open_lock(f"{path}.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        newest_texts = _newest([*load_texts(path, vocabulary, limit), *texts], limit)
        make_private(path)

        content = [{"vocabulary": vocabulary}, *newest_texts]
        json_lines = [f"{json.dumps(line)}\n" for line in content]
        replace(path, "".join(json_lines).encode())


def _newest(texts: list[list[int]], limit: int) -> list[list[int]]:
    """Return the last texts with at most `limit` tokens in total; the first of them may be cut at its beginning."""
    newest_first: list[list[int]] = []
    for text in reversed(texts):
        if limit < 1:
            break
        if text:
            newest_first.append(text[-limit:])
            limit -= len(text)
    return newest_first[::-1]
