"""Grammars that an answer must follow: the tokens that may, or must, come after a node.

llguidance reads JSON schemas, regular expressions, and grammars in the forms of Lark and GBNF. It is imported for the
first request with a grammar, and only on the rank that verifies, so that boards do not need it. The tokens that a
grammar allows after a node depend only on the node's path.

A grammar is compiled twice: first in a process of its own, which ends if it takes too long or too much memory, then
here, once for each request. A compiled grammar grows while an answer is written, and may reach a limit for good. So no
two requests share one.
"""
from __future__ import annotations

import json
from contextlib import contextmanager
from functools import cached_property, lru_cache
from importlib import import_module
from itertools import takewhile
from queue import LifoQueue
from typing import Any, Iterator, NamedTuple, Sequence

import numpy as np

from config.schema.untrusted import one_line, reason
from model.byte_tokens import ByteTokenizer
from model.sandbox import Sandbox
from model.schema_ranges import inexact_part
from model.tree import TokenTree

MAX_CHECKED = 32  # grammars whose check is remembered
MAX_CHARACTERS = 1 << 18  # of a grammar's source
MAX_SECONDS, MAX_BYTES = 5.0, 128 << 20  # that compiling a grammar may take
MAX_COMPILING = 4  # grammars that are checked at once; more wait
MAX_FORCED = 64  # the most forced tokens that are computed
LIMITS = {"step_lexer_fuel": 50_000, "max_lexer_states": 1 << 15, "verbose_errors": False}  # a few ms for each mask
FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # of JSON: as json.dumps writes it
AFTER_SPACE = {"lark_grammar": 'start: " " @answer'}  # for a tokenizer that drops the first space of a text
MISSING = "grammars need llguidance, which is not installed: pip install -r serve/requirements.txt"


class Guide(NamedTuple):
    """A grammar as given by a request: `kind` is json_schema, regex, choice (a JSON list), grammar or lark."""

    kind: str
    source: str

    @staticmethod
    def json_schema(schema: Any = None) -> Guide:
        """Return the guide for JSON that follows a schema, or for any JSON object without one."""
        return Guide("json_schema", json.dumps({"type": "object"} if schema is None else schema))

    @property
    def name(self) -> str:
        return self.kind.replace("_", " ")


class Grammar(NamedTuple):
    """One request's grammar over the tokens of a model, and the tokens that may end an answer once it is fulfilled."""

    matcher: Any  # at the beginning of the grammar; it is copied, never advanced
    end_ids: frozenset[int]


class Grammars:
    """The grammars over one tokenizer, for a model with `vocab_size` tokens. Thread-safe."""

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: frozenset[int]) -> None:
        self._tokenizer, self._vocab_size, self._end_ids = tokenizer, vocab_size, end_ids
        self._check = lru_cache(maxsize=MAX_CHECKED)(self._checked)
        self._sandboxes: LifoQueue[Sandbox] = LifoQueue()
        for _ in range(MAX_COMPILING):
            self._sandboxes.put(Sandbox(self._problem, MAX_BYTES))

    def of(self, guide: Guide) -> Grammar:
        """Return a new grammar. Raises ValueError, with the reason, if no text can fulfil it, or if it is too large."""
        self._check(guide)
        return Grammar(self._compiled(guide), self._end_ids)

    def prepare(self) -> None:
        """Do what takes a second before the first grammar."""
        self._llguidance_tokenizer  # noqa: B018

    def _checked(self, guide: Guide) -> None:
        """Raise ValueError unless the grammar can be compiled within the limits, and some text fulfils it."""
        self.prepare()
        size = len(guide.source)
        if size > MAX_CHARACTERS:
            raise _too_large(guide, f"{size} characters, and at most {MAX_CHARACTERS} are read")

        with self._sandbox() as sandbox:
            try:
                problem = sandbox.call(MAX_SECONDS, guide)
            except TimeoutError:
                raise _too_large(guide, f"compiling it takes more than {MAX_SECONDS:g} s") from None
            except ValueError:
                raise _too_large(guide, f"compiling it takes more than {MAX_BYTES >> 20} MB") from None
        if problem:
            raise ValueError(f"the {guide.name} cannot be met ({problem}): mend it")

    @contextmanager
    def _sandbox(self) -> Iterator[Sandbox]:
        sandbox = self._sandboxes.get()
        try:
            yield sandbox
        finally:
            self._sandboxes.put(sandbox)

    def _problem(self, guide: Guide) -> str:
        """Return why a grammar cannot be met; empty: it can. Called in a process of its own."""
        try:
            problem = inexact_part(*guide) or _unmet(self._compiled(guide))
        except MemoryError:
            raise
        except BaseException as error:  # native code that panics raises none of Exception
            problem = reason(error)
        return one_line(problem[:200])  # it may quote untrusted text

    def _compiled(self, guide: Guide) -> Any:
        """Return llguidance's matcher, which may be in error."""
        library, tokenizer = import_module("llguidance"), self._llguidance_tokenizer
        if guide.kind == "json_schema":
            form = library.LLMatcher.grammar_from_json_schema(guide.source, overrides=FORM)
        else:
            form = library.grammar_from(guide.kind, guide.source)
        is_json = guide.kind in ("json_schema", "regex")
        grammar = json.loads(form)["grammars"][0] if is_json else {"lark_grammar": form}

        grammars = [{**grammar, "name": "answer"}]
        if self._byte_tokenizer.drops_first_space:
            grammars.insert(0, AFTER_SPACE)
        text = json.dumps({"grammars": grammars})
        return library.LLMatcher(tokenizer, text, log_level=0, limits=library.LLParserLimits(**LIMITS))

    @cached_property
    def _byte_tokenizer(self) -> ByteTokenizer:
        if not self._tokenizer.is_fast:
            raise ValueError("grammars need a tokenizer in the form of tokenizer.json, but this model's is different: "
                             "save it in that form, or leave the grammar out")
        return ByteTokenizer(self._tokenizer, self._vocab_size, self._end_ids)

    @cached_property
    def _llguidance_tokenizer(self) -> Any:
        try:
            library = import_module("llguidance")
        except ImportError:
            raise ValueError(MISSING) from None
        return library.LLTokenizer(self._byte_tokenizer)


def _too_large(guide: Guide, measure: str) -> ValueError:
    return ValueError(f"the {guide.name} is too large ({measure}): make it smaller")


def _error_of(matcher: Any) -> str:
    """Return the first line of a matcher's error; empty: none."""
    lines: list[str] = matcher.get_error().splitlines()
    return lines[0] if lines else ""


def _unmet(matcher: Any) -> str:
    """Return why the grammar of a matcher cannot be met; empty: it can."""
    return _error_of(matcher) or _endless(matcher.deep_copy()) or _empty(matcher.deep_copy())


def _endless(matcher: Any) -> str:
    """Return the problem of a grammar that fails at the text that it forces from its beginning; empty: none."""
    forced = matcher.compute_ff_tokens()
    if not forced or matcher.consume_token(forced[0]):
        return ""
    problem = _error_of(matcher)
    return "it forces a text without an end, or one that is too long" if "ff_tokens" in problem else problem


def _empty(matcher: Any) -> str:
    """Return the problem of a grammar that no text fulfils, such as one that only refers to itself; empty: none."""
    allowed = any(matcher.compute_bitmask()) and not matcher.is_error()
    return "" if allowed or matcher.is_accepting() else "no text follows it"


class State:
    """The state after a node on an allowed path; `grammar` is the rest of the grammar.

    `forced` are the first tokens that must follow, if they are known already. `allows` and `mask` raise ValueError once
    the grammar has reached a limit of llguidance.
    """

    def __init__(self, grammar: Grammar, forced: Sequence[int] = ()) -> None:
        self._grammar, self._known_forced = grammar, forced
        self.matcher = grammar.matcher

    @cached_property
    def forced(self) -> Sequence[int]:
        """The tokens that must follow, as far as known; an end token after a complete answer."""
        if self.matcher.is_stopped():
            return () if self.matcher.is_error() else (min(self._grammar.end_ids),)
        forced = self._known_forced or self.matcher.compute_ff_tokens()[:MAX_FORCED]
        return tuple(takewhile(lambda token_id: token_id not in self._grammar.end_ids, forced))

    def allows(self, token_id: int) -> bool:
        if self.forced:
            return token_id in (self._grammar.end_ids if self.matcher.is_stopped() else self.forced[:1])
        return bool(self._bits[token_id >> 3] >> (token_id & 7) & 1)

    def mask(self, size: int) -> np.ndarray[Any, Any]:
        """Return whether each of the first `size` tokens may follow, `[V]`."""
        if not self.forced:
            return np.unpackbits(self._bits, count=size, bitorder="little").astype(bool)
        allowed_V = np.zeros(size, dtype=bool)
        token_ids = self._grammar.end_ids if self.matcher.is_stopped() else self.forced[:1]
        allowed_V[[token_id for token_id in token_ids if token_id < size]] = True
        return allowed_V

    @cached_property
    def _bits(self) -> np.ndarray[Any, Any]:
        """One bit per token, set if the token may follow; end tokens may only follow a complete answer."""
        bits = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8).copy()
        is_complete = not self.matcher.is_error() and self.matcher.is_accepting()
        for end_id in self._grammar.end_ids:
            bits[end_id >> 3] &= 0xFF ^ 1 << (end_id & 7)
            bits[end_id >> 3] |= is_complete << (end_id & 7)

        if self.matcher.is_error() or not bits.any():
            problem = one_line(_error_of(self.matcher)[:200]) or "no token may follow"
            raise ValueError(f"the answer cannot be continued in its grammar ({problem}): simplify the grammar")
        return bits

    def after(self, token_id: int) -> State | None:
        """Return the state after a token, or None if the token breaks the grammar or ends the answer."""
        if token_id in self._grammar.end_ids or not self.allows(token_id):
            return None
        matcher = self.matcher.deep_copy()
        matcher.consume_token(token_id)  # a matcher that exceeds its limits is in error from now on
        return State(self._grammar._replace(matcher=matcher), self.forced[1:])


class Follower:
    """The states of one request's paths in its grammar, which applies after the first `prompt_length` tokens."""

    def __init__(self, grammar: Grammar, prompt_length: int) -> None:
        self._grammar, self._prompt_length = grammar, prompt_length
        self._last_tip = -1
        self._node_states: dict[int, State | None] = {}  # of the tip and of guesses; None: the path breaks the grammar

    def allows(self, tree: TokenTree, node: int, token_id: int) -> bool:
        """Return whether a token may follow a node, the tip or a guess."""
        try:
            state = self._state(tree, node)
            return state is not None and state.allows(token_id)
        except ValueError:  # nothing is guessed where the answer would fail
            return False

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
                allowed_TV[row] = state.mask(size)
        return allowed_TV

    def _state(self, tree: TokenTree, node: int) -> State | None:
        if tree.tip != self._last_tip:
            self._last_tip = tree.tip
            self._reach(tree, tree.tip)
            live_nodes = {*tree.live, tree.tip}
            self._node_states = {node: state for node, state in self._node_states.items() if node in live_nodes}
        return self._reach(tree, node)

    def _reach(self, tree: TokenTree, node: int) -> State | None:
        path = []
        while node not in self._node_states:
            path.append(node)
            if tree.nodes[node].pos < self._prompt_length:
                break
            node = tree.nodes[node].parent

        state = self._node_states.get(node)
        for node in reversed(path):
            if tree.nodes[node].pos < self._prompt_length:
                state = State(self._grammar._replace(matcher=self._grammar.matcher.deep_copy()))
            elif state:
                state = state.after(tree.nodes[node].token)
            self._node_states[node] = state

        return state
