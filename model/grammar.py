"""Grammars that an answer must follow: the tokens that may, or must, come after a node.

llguidance reads JSON schemas, regular expressions, and grammars in the forms of Lark and GBNF. It is imported for the
first request with a grammar, and only on the rank that verifies, so that boards do not need it. The tokens that a
grammar allows after a node depend only on the node's path.
"""
from __future__ import annotations

import json
from functools import cached_property, lru_cache
from importlib import import_module
from threading import Lock
from typing import Any, NamedTuple, Sequence

import numpy as np

from config.schema.untrusted import one_line, reason
from model.tree import TokenTree

KEPT = 32  # compiled grammars that are cached
LONGEST = 64  # the most forced tokens that are computed
FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # of JSON: as json.dumps writes it
MISSING = "grammars need llguidance, which is not installed: pip install -r serve/requirements.txt"


class Guide(NamedTuple):
    """A grammar as given by a request: `kind` is json_schema, regex, choice (a JSON list) or grammar."""

    kind: str
    source: str

    @staticmethod
    def json_schema(schema: Any = None) -> Guide:
        """Return the guide for JSON that follows a schema, or for any JSON object without one."""
        return Guide("json_schema", json.dumps({"type": "object"} if schema is None else schema))


class Grammar(NamedTuple):
    """A grammar over the tokens of one model, and the tokens that may end an answer once it is fulfilled."""

    matcher: Any  # at the beginning of the grammar; it is copied, never advanced
    ends: frozenset[int]


class Grammars:
    """The grammars over one tokenizer, for a model with `vocabulary` tokens. Thread-safe."""

    def __init__(self, tokenizer: Any, vocabulary: int, ends: frozenset[int]) -> None:
        self._tokenizer, self._vocabulary, self._ends = tokenizer, vocabulary, ends
        self._lock = Lock()
        self._of = lru_cache(maxsize=KEPT)(self._compiled)

    def of(self, guide: Guide) -> Grammar:
        """Return the compiled, cached grammar. Raises ValueError, with the reason, if no text can fulfil it."""
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
            why = one_line(reason(wrong)[:200])  # the library may quote untrusted text
            raise ValueError(f"the {guide.kind.replace('_', ' ')} cannot be met ({why}): mend it")
        return Grammar(matcher, self._ends)

    @cached_property
    def _tokens(self) -> Any:
        """The tokenizer in llguidance's form."""
        if not self._tokenizer.is_fast:
            raise ValueError("grammars need a tokenizer in the form of tokenizer.json, but this model's is different: "
                             "save it in that form, or leave the grammar out")
        own = self._tokenizer.eos_token_id
        end = own if own in self._ends else min(self._ends)
        text = _spelled(json.loads(self._tokenizer.backend_tokenizer.to_str()))
        return import_module("llguidance").LLTokenizer(text, n_vocab=self._vocabulary, eos_token=end)


def _spelled(file: dict[str, Any]) -> str:
    """Reduce a tokenizer.json to one decoder, since llguidance picks the wrong one of a GGUF file's several."""
    file.update(truncation=None, padding=None)
    levels = [one for one in (file["decoder"] or {}).get("decoders", ()) if one["type"] == "ByteLevel"]
    if levels:
        file["decoder"] = levels[0]
        file["model"]["byte_fallback"] = False
    return json.dumps(file)


def _endless(matcher: Any) -> str:
    """Return the problem of a grammar that forces an endless text from its beginning; empty: none."""
    forced = matcher.compute_ff_tokens()
    fails = forced and not matcher.consume_token(forced[0])
    return "it forces a text without an end, or one that is too long" if fails else ""


def _empty(matcher: Any) -> str:
    """Return the problem of a grammar that no text fulfils, such as one that only refers to itself; empty: none."""
    allowed = any(matcher.compute_bitmask()) and not matcher.is_error()
    return "" if allowed or matcher.is_accepting() else "no text follows it"


class State:
    """The state after a node on an allowed path; `grammar` is the rest of the grammar."""

    def __init__(self, grammar: Grammar) -> None:
        self.matcher, self._ends = grammar

    @cached_property
    def bits(self) -> np.ndarray[Any, Any]:
        """One bit per token, set if the token may follow. If none may, the end tokens may."""
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
        """The tokens that must follow, as far as known; an end token after a complete answer."""
        if self.matcher.is_stopped():
            return [min(self._ends)]
        return list(self.matcher.compute_ff_tokens()[:LONGEST])

    def after(self, token: int) -> State | None:
        """Return the state after a token, or None if the token breaks the grammar or ends the answer."""
        if token in self._ends or not self.allows(token):
            return None
        matcher = self.matcher.deep_copy()
        matcher.consume_token(token)  # a matcher that exceeds its limits is in error from now on, and allows only ends
        return State(Grammar(matcher, self._ends))

    def allows(self, token: int) -> bool:
        return bool(self.bits[token >> 3] >> (token & 7) & 1)


class Follower:
    """The states of one request's paths in its grammar, which applies after the first `begin` tokens."""

    def __init__(self, grammar: Grammar, begin: int) -> None:
        self._grammar, self._begin = grammar, begin
        self._tip = -1
        self._states: dict[int, State | None] = {}  # of the tip and of guesses; None: the path breaks the grammar

    def allows(self, tree: TokenTree, node: int, token: int) -> bool:
        """Return whether a token may follow a node, the tip or a guess."""
        state = self._state(tree, node)
        return state is not None and state.allows(token)

    def forced(self, tree: TokenTree, node: int) -> Sequence[int]:
        """Return the tokens that must follow a node, as far as known."""
        state = self._state(tree, node)
        return state.forced if state else ()

    def mask(self, tree: TokenTree, nodes: Sequence[int], size: int) -> np.ndarray[Any, Any]:
        """Return whether the first `size` tokens may follow each node, `[T, V]`; after a broken path, all may."""
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
