"""Tools: which form of calls a model's own template has, the grammar of calls that must come, and calls in a text.

Hermes and Qwen write `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` behind a text or alone; Llama 3 writes
`{"name": ..., "parameters": {...}}` as its whole answer, several with semicolons between. What looks like a call and is
none stays text.
"""
from __future__ import annotations

import json
import re
from itertools import takewhile
from typing import Any, Iterator, Mapping, NamedTuple, Union

from model.grammar import FORM, Guide

CALLS = 8  # of one answer whose calls a grammar holds
HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\\x00-\x1f]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
DEFINITIONS = ("$defs", "definitions")
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


class Dialect(NamedTuple):
    """How a model writes a call: what stands before and behind it, what between two, and its word for arguments."""

    opening: str
    closing: str
    between: str
    arguments: str


HERMES = Dialect("<tool_call>", "</tool_call>", "\n", "arguments")
LLAMA = Dialect("", "", "; ", "parameters")


def dialect_of(template: str) -> Dialect | None:
    """The form of calls in the words of a template; None if it has no place for tools."""
    if "tools" not in template:
        return None
    return HERMES if HERMES.opening in template else LLAMA


# --- calls that must come ---------------------------------------------------------------------------------------------

def calls_of(functions: Mapping[str, Mapping[str, Any]], dialect: Dialect, several: bool) -> Guide:
    """The grammar of an answer that calls one of these functions, or several; each name has the schema of arguments."""
    bodies = [json.dumps(_body(name, schema, dialect)) for name, schema in functions.items()]
    opening, closing = (json.dumps(part) for part in (f"{dialect.opening}\n", f"\n{dialect.closing}"))
    call = f"{opening} body {closing}" if dialect.opening else "body"
    more = f" ({json.dumps(dialect.between)} call){{0,{CALLS - 1}}}" if several else ""
    either = " | ".join(f"b{number}" for number in range(len(bodies)))
    rules = [f"start: call{more}", f"call: {call}", f"body: {either}"]
    rules += [f"b{number}: %json {body}" for number, body in enumerate(bodies)]
    return Guide("lark", "\n".join(rules))


def _body(name: str, schema: Mapping[str, Any], dialect: Dialect) -> dict[str, Any]:
    """The schema of a call; what the arguments define moves to its root, from which references count.

    A function has no other arguments than those that it names, unless it says so.
    """
    inner = {key: value for key, value in (schema or NOTHING).items() if key not in DEFINITIONS}
    if "properties" in inner:
        inner.setdefault("additionalProperties", False)
    outer = {key: schema[key] for key in DEFINITIONS if key in schema}
    return {**outer, "x-guidance": FORM, "type": "object", "required": ["name", dialect.arguments],
            "properties": {"name": {"const": name}, dialect.arguments: inner}, "additionalProperties": False}


# --- calls in a text --------------------------------------------------------------------------------------------------

class CallPart(NamedTuple):
    """A part of a call: the name at its begin, and then the JSON of its arguments."""

    name: str = ""
    arguments: str = ""


Part = Union[str, CallPart]  # a text that is no call, or a part of a call


class CallReader:
    """The parts of an answer, as its text comes; a call begins with its name, and its arguments come as they are made.
    """

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._blanks = dialect.between + " \n"  # they are no text before a call, or between two
        self._held = ""
        self._unclear: str | None = ""  # what stood before the held text, if that is no call; None: it is one
        self._spoken = bool(dialect.opening)  # whether blanks are text now
        self._found: Iterator[Any] = self._parts()

    def read(self, text: str) -> list[Part]:
        """The parts that are known once this text follows."""
        self._held += text
        return [*takewhile(bool, self._found)]

    def finish(self) -> list[Part]:
        """The last parts: of a call that has not begun to be one, its text."""
        if self._unclear is None:
            return []
        self._held = self._unclear + self._held
        return [*self._say(len(self._held))]

    def _parts(self) -> Iterator[Part | None]:
        """All parts, and None wherever more text is needed."""
        while True:
            yield from self._text()
            self._unclear = self._dialect.opening
            yield from self._call()
            self._unclear = ""

    def _text(self) -> Iterator[Part | None]:
        """What is said up to the next call, and the opening of that."""
        opening = self._dialect.opening
        while (begin := self._begin()) < 0:
            begun = [size for size in range(len(opening)) if self._held.endswith(opening[:size])]
            yield from self._say(len(self._held) - max(begun, default=0))
            yield None
        yield from self._say(begin)
        self._held = self._held.lstrip(self._blanks)[len(opening):]

    def _begin(self) -> int:
        """Where a call begins in the held text; -1: nowhere yet."""
        if self._dialect.opening:
            return self._held.find(self._dialect.opening)
        bare = self._held.lstrip(self._blanks)
        return self._held.find("{") if bare.startswith("{") and not self._spoken else -1

    def _say(self, size: int) -> Iterator[Part]:
        """So much of the held text is said, unless it is held back as blanks."""
        said = self._held[:size]
        if said.strip(self._blanks) or (said and self._spoken):
            self._held, self._spoken = self._held[size:], True
            yield said

    def _call(self) -> Iterator[Part | None]:
        """A call behind its opening, or the text of what is none."""
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
        """Where a call ends before what closes it; -1: not yet."""
        closing = self._dialect.closing
        return self._held.find(closing) if closing else Braces().end(self._held)

    def _arguments(self) -> Iterator[Part | None]:
        """The arguments, up to the brace that closes them, and what closes the call."""
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
    """The braces of an object that are open, as its text comes; those in its strings do not count."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = False  # whether the next letter is in a string, or behind a backslash

    def end(self, text: str) -> int:
        """Where the object ends in the text that follows; -1: not there."""
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
    """A call whose keys come in another order, or whose arguments are a text; empty for what is none."""
    try:
        found = json.loads(body)
        name, arguments = found["name"], found.get("arguments", found.get("parameters", {}))
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return []
    if not name or not isinstance(name, str):
        return []
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return [CallPart(name), CallPart(arguments=text)]
