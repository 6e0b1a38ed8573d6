"""Tools: the format of calls in a model's own template, the grammar of forced calls, and calls in a text.

Hermes and Qwen write `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` after a text or alone. Llama 3 writes
`{"name": ..., "parameters": {...}}` as its whole answer, with semicolons between several calls. Text that only looks
like a call stays text.
"""
from __future__ import annotations

import json
import re
from itertools import takewhile
from typing import Any, Iterator, Mapping, NamedTuple, Union

from model.grammar import FORM, Guide

CALLS = 8  # largest number in one answer, if a grammar forces calls
HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\\x00-\x1f]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
DEFINITIONS = ("$defs", "definitions")
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


class CallFormat(NamedTuple):
    """A model's format of calls: the strings before and after a call and between two, and the key of arguments."""

    opening: str
    closing: str
    between: str
    arguments: str


HERMES = CallFormat("<tool_call>", "</tool_call>", "\n", "arguments")
LLAMA = CallFormat("", "", "; ", "parameters")


def dialect_of(template: str) -> CallFormat | None:
    """Return the format of calls in a template; None if it does not support tools."""
    if "tools" not in template:
        return None
    return HERMES if HERMES.opening in template else LLAMA


# --- forced calls -----------------------------------------------------------------------------------------------------

def calls_of(functions: Mapping[str, Mapping[str, Any]], dialect: CallFormat, several: bool) -> Guide:
    """Return the grammar of an answer that calls one or several of these functions (name -> schema of arguments)."""
    bodies = [json.dumps(_body(name, schema, dialect)) for name, schema in functions.items()]
    opening, closing = (json.dumps(part) for part in (f"{dialect.opening}\n", f"\n{dialect.closing}"))
    call = f"{opening} body {closing}" if dialect.opening else "body"
    more = f" ({json.dumps(dialect.between)} call){{0,{CALLS - 1}}}" if several else ""
    either = " | ".join(f"b{number}" for number in range(len(bodies)))
    rules = [f"start: call{more}", f"call: {call}", f"body: {either}"]
    rules += [f"b{number}: %json {body}" for number, body in enumerate(bodies)]
    return Guide("lark", "\n".join(rules))


def _body(name: str, schema: Mapping[str, Any], dialect: CallFormat) -> dict[str, Any]:
    """Return the schema of a call; definitions in the arguments' schema move to its root, where references start.

    A function has only the arguments that it names, unless its schema allows others.
    """
    inner = {key: value for key, value in (schema or NOTHING).items() if key not in DEFINITIONS}
    if "properties" in inner:
        inner.setdefault("additionalProperties", False)
    outer = {key: schema[key] for key in DEFINITIONS if key in schema}
    return {**outer, "x-guidance": FORM, "type": "object", "required": ["name", dialect.arguments],
            "properties": {"name": {"const": name}, dialect.arguments: inner}, "additionalProperties": False}


# --- calls in a text --------------------------------------------------------------------------------------------------

class CallPart(NamedTuple):
    """A part of a call: first its name, then pieces of the JSON of its arguments."""

    name: str = ""
    arguments: str = ""


Part = Union[str, CallPart]  # text outside calls, or a part of a call


class CallReader:
    """A parser of an answer's text as it arrives; of a call it gives first the name, then pieces of the arguments."""

    def __init__(self, dialect: CallFormat) -> None:
        self._dialect = dialect
        self._blanks = dialect.between + " \n"  # dropped before a call and between two
        self._held = ""
        self._unclear: str | None = ""  # precedes the held text if that is no call; None: it is one
        self._spoken = bool(dialect.opening)  # whether blanks are now text
        self._found: Iterator[Any] = self._parts()

    def read(self, text: str) -> list[Part]:
        """Return the parts that are known once this text follows."""
        self._held += text
        return [*takewhile(bool, self._found)]

    def finish(self) -> list[Part]:
        """Return the last parts; the beginning of what might have become a call is text."""
        if self._unclear is None:
            return []
        self._held = self._unclear + self._held
        return [*self._emit(len(self._held))]

    def _parts(self) -> Iterator[Part | None]:
        """Yield all parts, and None whenever more text is needed."""
        while True:
            yield from self._text()
            self._unclear = self._dialect.opening
            yield from self._call()
            self._unclear = ""

    def _text(self) -> Iterator[Part | None]:
        """Yield the text up to the next call, and skip the opening of that call."""
        opening = self._dialect.opening
        while (begin := self._begin()) < 0:
            begun = [size for size in range(len(opening)) if self._held.endswith(opening[:size])]
            yield from self._emit(len(self._held) - max(begun, default=0))
            yield None
        yield from self._emit(begin)
        self._held = self._held.lstrip(self._blanks)[len(opening):]

    def _begin(self) -> int:
        """Return where a call begins in the held text; -1 if none begins yet."""
        if self._dialect.opening:
            return self._held.find(self._dialect.opening)
        bare = self._held.lstrip(self._blanks)
        return self._held.find("{") if bare.startswith("{") and not self._spoken else -1

    def _emit(self, size: int) -> Iterator[Part]:
        """Yield the first `size` characters of the held text, unless they are blanks to hold back."""
        said = self._held[:size]
        if said.strip(self._blanks) or (said and self._spoken):
            self._held, self._spoken = self._held[size:], True
            yield said

    def _call(self) -> Iterator[Part | None]:
        """Yield a call after its opening, or its text if it is no call."""
        while not self._held.strip():
            yield None
        if not self._held.lstrip().startswith("{"):  # the opening is only mentioned
            self._spoken = True
            yield self._dialect.opening
            return
        while not (head := HEAD.match(self._held)) and self._end_of_call() < 0:
            yield None
        self._unclear, self._spoken = None, False
        if head:
            yield CallPart(head[1])
            self._held = self._held[head.end():]
            yield from self._arguments()
            return
        end = self._end_of_call()
        body, rest = self._held[:end], self._held[end:]
        call = _call_in(body)
        self._held, self._spoken = rest[len(self._dialect.closing):], not call
        yield from call or [self._dialect.opening + body + self._dialect.closing]

    def _end_of_call(self) -> int:
        """Return where a call ends, before its closing; -1 if it does not end yet."""
        end = Braces().end(self._held)
        return self._held.find(self._dialect.closing, end) if end >= 0 else end

    def _arguments(self) -> Iterator[Part | None]:
        """Yield the arguments up to their closing brace, and skip the closing of the call."""
        braces = Braces()
        while (end := braces.end(self._held)) < 0:
            said, self._held = self._held, ""
            if said:
                yield CallPart(arguments=said)
            yield None
        said, self._held = self._held[:end], self._held[end:]
        yield CallPart(arguments=said)
        closing = self._dialect.closing or "}"
        while closing not in self._held:
            yield None
        self._held = self._held.partition(closing)[2]


class Braces:
    """A counter of open braces in an object that arrives in pieces; braces in strings do not count."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = False  # whether the next letter is in a string, or after a backslash

    def end(self, text: str) -> int:
        """Return where the object ends in the text that follows; -1 if it does not end there."""
        for end, letter in enumerate(text, 1):
            if self._escaped or letter == "\\":
                self._escaped = not self._escaped
            elif letter == '"':
                self._quoted = not self._quoted
            elif letter in "{}" and not self._quoted:
                self._depth += 1 if letter == "{" else -1
                if not self._depth:
                    return end
        return -1


def _call_in(body: str) -> list[Part]:
    """Return a call with keys in another order, or with arguments as a string; empty if it is no call."""
    try:
        found = json.loads(body)
        name, arguments = found["name"], found.get("arguments", found.get("parameters", {}))
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return []
    if not name or not isinstance(name, str):
        return []
    text = arguments if isinstance(arguments, str) else json.dumps({} if arguments is None else arguments)
    return [CallPart(name), CallPart(arguments=text)]
