"""Tools: which form of calls a model's own template has, the grammar of calls that must come, and calls in a text.

Hermes and Qwen write `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` behind a text or alone; Llama 3 writes
`{"name": ..., "parameters": {...}}` as its whole answer, several with semicolons between. What looks like a call and is
none stays text.
"""
from __future__ import annotations

import json
import re
from typing import Any, Iterator, Mapping, NamedTuple, Sequence, Union

from model.grammar import FORM, Guide

CALLS = 8  # of one answer whose calls a grammar holds
HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
STRING = re.compile(r'"(?:[^"\\]|\\.)*"?|[{}]', re.S)  # a string, whole or not, or a brace
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
    """A part of a call, by its number in the answer: the name at its begin, and then the JSON of its arguments."""

    number: int
    name: str = ""
    arguments: str = ""


Part = Union[str, CallPart]  # a text that is no call, or a part of a call


class CallReader:
    """The parts of an answer, as its text comes; a call begins with its name, and its arguments come as they are made.
    """

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._held = ""
        self._goes_on = self._text  # what reads on from here
        self._depth = 0  # braces of the arguments that are open …
        self._quoted = self._escaped = False  # … and whether their next letter is in a string, or behind a backslash
        self._spoken = False  # whether there was a text that is no call
        self.calls = 0

    def read(self, text: str) -> list[Part]:
        """The parts that are known once this text follows."""
        self._held += text
        return list(self._parts())

    def finish(self) -> list[Part]:
        """The last parts: of a call that has not begun to be one, its text."""
        held, self._held = self._held, ""
        if self._goes_on == self._call:
            return [self._dialect.opening + held]
        return [held] if held and self._goes_on == self._text else []

    def _parts(self) -> Iterator[Part]:
        while True:
            before = self._held, self._goes_on
            yield from self._goes_on()
            if before == (self._held, self._goes_on):
                return

    def _text(self) -> Iterator[Part]:
        opening = self._dialect.opening
        if not opening:
            held = self._held.lstrip(" ;\n")
            if self._spoken or held[:1] not in ("", "{"):
                self._spoken |= bool(held)
                yield from self._say(len(self._held))
            elif held:
                self._held, self._goes_on = held, self._call
            return
        begin = self._held.find(opening)
        if begin >= 0:
            yield from self._say(begin)
            self._held, self._goes_on = self._held[len(opening):], self._call
            return
        kept = len(opening) - 1
        while not self._held.endswith(opening[:kept]):
            kept -= 1
        yield from self._say(len(self._held) - kept)

    def _say(self, size: int) -> Iterator[Part]:
        """So much of what is held is text; blanks before the first call or between two are none."""
        said, self._held = self._held[:size], self._held[size:]
        if said.strip() or (said and not self.calls):
            yield said

    def _call(self) -> Iterator[Part]:
        """Behind the opening of a call, whose name is not known yet."""
        head = HEAD.match(self._held)
        if head:
            yield CallPart(self.calls, name=json.loads(head[1]))
            self._held, self._goes_on = self._held[head.end():], self._arguments
            return
        end, behind = self._end_of_call()
        if end < 0:
            return
        body, self._held = self._held[:end], self._held[behind:]
        self._goes_on = self._text
        found = _call_in(body)
        if found:
            yield CallPart(self.calls, name=found[0])
            yield CallPart(self.calls, arguments=found[1])
            self.calls += 1
        else:
            self._spoken = True
            yield self._dialect.opening + body + self._dialect.closing

    def _end_of_call(self) -> tuple[int, int]:
        """Where a call ends, and where what follows it begins; -1: not yet."""
        closing = self._dialect.closing
        if closing:
            end = self._held.find(closing)
            return end, end + len(closing)
        depth = 0
        for found in STRING.finditer(self._held):
            depth += {"{": 1, "}": -1}.get(found[0], 0)
            if not depth:
                return found.end(), found.end()
        return -1, -1

    def _arguments(self) -> Iterator[Part]:
        """In the arguments, up to the brace that closes them."""
        end = 0
        while end < len(self._held) and self._goes_on == self._arguments:
            letter = self._held[end]
            end += 1
            if self._escaped or letter == "\\":
                self._escaped = not self._escaped
            elif letter == '"':
                self._quoted = not self._quoted
            elif not self._quoted:
                self._depth += {"{": 1, "}": -1}.get(letter, 0)
                if not self._depth:
                    self._goes_on = self._tail
        said, self._held = self._held[:end], self._held[end:]
        if said:
            yield CallPart(self.calls, arguments=said)

    def _tail(self) -> Iterator[Part]:
        """Behind the arguments: the brace of the call, and what closes it."""
        yield from ()
        closing = self._dialect.closing or "}"
        end = self._held.find(closing)
        if end >= 0:
            self._held, self._goes_on = self._held[end + len(closing):], self._text
            self.calls += 1


def _call_in(body: str) -> tuple[str, str] | None:
    """The name and the arguments of a call whose keys come in another order, or whose arguments are a text."""
    try:
        found = json.loads(body)
        arguments = found.get("arguments", found.get("parameters", {}))
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        return (found["name"], text) if isinstance(found["name"], str) else None
    except (ValueError, KeyError, AttributeError):
        return None


def calls_in(text: str, dialect: Dialect) -> tuple[str, list[tuple[str, str]]]:
    """What is left of a whole answer as its text, and its calls as names and arguments."""
    reader = CallReader(dialect)
    return joined([*reader.read(text), *reader.finish()])


def joined(parts: Sequence[Part]) -> tuple[str, list[tuple[str, str]]]:
    """The text of an answer, and its calls as names and arguments."""
    text = "".join(part for part in parts if isinstance(part, str))
    calls: dict[int, tuple[str, str]] = {}
    for part in parts:
        if isinstance(part, CallPart):
            name, arguments = calls.get(part.number, ("", ""))
            calls[part.number] = name + part.name, arguments + part.arguments
    return text, [*calls.values()]
