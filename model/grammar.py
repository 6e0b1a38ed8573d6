"""Grammars that an answer has to follow: which tokens may come behind a node, and which have to.

llguidance reads JSON schemas, regular expressions, and grammars in the forms of Lark and GBNF. It is imported when the
first request has a grammar, and only where answers are judged, so boards do without it. What a grammar allows behind a
node follows from the node's path alone.
"""
from __future__ import annotations

import json
from functools import cached_property, lru_cache
from importlib import import_module
from threading import Lock
from typing import Any, NamedTuple, Sequence

import numpy as np

from config.schema.untrusted import plain, reason
from model.tree import TokenTree

KEPT = 32  # grammars that stay compiled
LONGEST = 64  # tokens that are known to have to come, at most
FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # of JSON: as json.dumps writes it
MISSING = "grammars need llguidance, which is not installed: pip install -r serve/requirements.txt"


class Guide(NamedTuple):
    """A grammar as a request asks for it: `kind` is json_schema, regex, choice (a JSON list) or grammar."""

    kind: str
    source: str

    @staticmethod
    def json_schema(schema: Any = None) -> Guide:
        """JSON of a schema; without one, any object."""
        return Guide("json_schema", json.dumps({"type": "object"} if schema is None else schema))


class Grammar(NamedTuple):
    """A grammar over the tokens of one model, and the tokens that may end an answer once it is fulfilled."""

    matcher: Any  # at the beginning; it is copied, and never moved
    ends: frozenset[int]


class Grammars:
    """The grammars over one tokenizer, for a model of so many tokens. Any thread may ask."""

    def __init__(self, tokenizer: Any, vocabulary: int, ends: frozenset[int]) -> None:
        self._tokenizer, self._vocabulary, self._ends = tokenizer, vocabulary, ends
        self._lock = Lock()
        self._of = lru_cache(maxsize=KEPT)(self._compiled)

    def of(self, guide: Guide) -> Grammar:
        """The grammar, compiled once; raises ValueError, with the reason, for one that nothing can fulfil."""
        with self._lock:
            return self._of(guide)

    def _compiled(self, guide: Guide) -> Grammar:
        try:
            library = import_module("llguidance")
        except ImportError:
            raise ValueError(MISSING) from None
        tokens = self._tokens
        try:
            if guide.kind == "json_schema":
                text = library.LLMatcher.grammar_from_json_schema(guide.source, overrides=FORM)
            else:
                text = library.grammar_from(guide.kind, guide.source)
            matcher = library.LLMatcher(tokens, text, log_level=0)
            wrong = matcher.get_error() or _endless(matcher.deep_copy()) or _empty(matcher.deep_copy())
        except (ValueError, TypeError) as error:
            wrong = str(error)
        if wrong:
            why = plain(reason(wrong)[:200])  # a library says it of a stranger's text
            raise ValueError(f"the {guide.kind.replace('_', ' ')} cannot be met ({why}): mend it")
        return Grammar(matcher, self._ends)

    @cached_property
    def _tokens(self) -> Any:
        """The tokenizer as llguidance has it."""
        if not self._tokenizer.is_fast:
            raise ValueError("grammars need a tokenizer in the form of tokenizer.json, and this model's is another: "
                             "save it in that form, or leave the grammar out")
        own = self._tokenizer.eos_token_id
        end = own if own in self._ends else min(self._ends)
        text = _spelled(json.loads(self._tokenizer.backend_tokenizer.to_str()))
        return import_module("llguidance").LLTokenizer(text, n_vocab=self._vocabulary, eos_token=end)


def _spelled(file: dict[str, Any]) -> str:
    """A tokenizer.json that spells tokens in one way; of a GGUF file's several, llguidance takes the wrong one."""
    file.update(truncation=None, padding=None)
    levels = [one for one in (file["decoder"] or {}).get("decoders", ()) if one["type"] == "ByteLevel"]
    if levels:
        file["decoder"] = levels[0]
        file["model"]["byte_fallback"] = False
    return json.dumps(file)


def _endless(matcher: Any) -> str:
    """What is wrong with a grammar that forces a text without an end from the beginning; empty: it does not."""
    forced = matcher.compute_ff_tokens()
    fails = forced and not matcher.consume_token(forced[0])
    return "it forces a text without an end, or one that is too long" if fails else ""


def _empty(matcher: Any) -> str:
    """What is wrong with a grammar that no text follows, as one that refers to itself alone; empty: it is not so."""
    allowed = any(matcher.compute_bitmask()) and not matcher.is_error()
    return "" if allowed or matcher.is_accepting() else "no text follows it"


class State:
    """A node whose path the grammar allows; `grammar` is there what is left of it."""

    def __init__(self, grammar: Grammar) -> None:
        self.matcher, self._ends = grammar

    @cached_property
    def bits(self) -> np.ndarray[Any, Any]:
        """A bit for each token, which says whether it may follow. Where nothing may, the answer has to end."""
        bits = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8).copy()
        stuck = self.matcher.is_error() or not bits.any()
        if stuck:
            bits[:] = 0
        if stuck or self.matcher.is_accepting():
            for end in self._ends:
                bits[end >> 3] |= 1 << (end & 7)
        return bits

    @cached_property
    def forced(self) -> list[int]:
        """The tokens that have to follow, as far as that is known; a whole answer is followed by its end."""
        if self.matcher.is_stopped():
            return [min(self._ends)]
        return list(self.matcher.compute_ff_tokens()[:LONGEST])

    def after(self, token: int) -> State | None:
        """What follows a token; None for one that breaks the grammar, or ends the answer."""
        if token in self._ends or not self.allows(token):
            return None
        matcher = self.matcher.deep_copy()
        matcher.consume_token(token)  # one that is too much for it is in error from now on, and has to end
        return State(Grammar(matcher, self._ends))

    def allows(self, token: int) -> bool:
        return bool(self.bits[token >> 3] >> (token & 7) & 1)


class Follower:
    """Where the paths of one request are in its grammar, which begins behind the first `begin` tokens."""

    def __init__(self, grammar: Grammar, begin: int) -> None:
        self._grammar, self._begin = grammar, begin
        self._tip = -1
        self._states: dict[int, State | None] = {}  # of the tip and of guesses; None: the path breaks the grammar

    def allows(self, tree: TokenTree, node: int, token: int) -> bool:
        """Whether a token may follow a node, which is the tip or a guess."""
        state = self._state(tree, node)
        return state is not None and state.allows(token)

    def forced(self, tree: TokenTree, node: int) -> Sequence[int]:
        """The tokens that have to follow a node, as far as that is known."""
        state = self._state(tree, node)
        return state.forced if state else ()

    def mask(self, tree: TokenTree, nodes: Sequence[int], size: int) -> np.ndarray[Any, Any]:
        """Whether each of the first `size` tokens may follow each node, `[T, V]`; all may where the path is broken."""
        allowed_TV = np.ones((len(nodes), size), dtype=bool)
        for row, node in enumerate(nodes):
            state = self._state(tree, node)
            if state:
                allowed_TV[row] = np.unpackbits(state.bits, count=size, bitorder="little")
        return allowed_TV

    def _state(self, tree: TokenTree, node: int) -> State | None:
        if tree.tip != self._tip:
            self._tip = tree.tip
            self._reach(tree, tree.tip)
            self._states = {known: state for known, state in self._states.items()
                            if known in tree.live or known == tree.tip}
        return self._reach(tree, node)

    def _reach(self, tree: TokenTree, node: int) -> State | None:
        way = []
        while node not in self._states:
            way.append(node)
            if tree.nodes[node].pos < self._begin:
                break
            node = tree.nodes[node].parent
        state = self._states.get(node)
        for node in reversed(way):
            known = tree.nodes[node]
            if known.pos < self._begin:
                state = State(self._grammar._replace(matcher=self._grammar.matcher.deep_copy()))
            elif state:
                state = state.after(known.token)
            self._states[node] = state
        return state
