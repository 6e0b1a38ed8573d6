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

MAX_CALLS = 8  # largest number in one answer, if a grammar forces calls
CALL_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\\x00-\x1f]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
DEFINITION_KEYS = ("$defs", "definitions")
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


class CallFormat(NamedTuple):
    """A model's format of calls: the strings before and after a call and between two, and the key of arguments."""

    opening: str
    closing: str
    between: str
    arguments_key: str


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
    schemas = [json.dumps(_call_schema(name, schema, dialect)) for name, schema in functions.items()]

    # rules
    opening = json.dumps(f"{dialect.opening}\n")
    closing = json.dumps(f"\n{dialect.closing}")
    call_rule = f"{opening} body {closing}" if dialect.opening else "body"
    more_calls = f" ({json.dumps(dialect.between)} call){{0,{MAX_CALLS - 1}}}" if several else ""
    body_rule = " | ".join(f"b{number}" for number in range(len(schemas)))

    rules = [f"start: call{more_calls}", f"call: {call_rule}", f"body: {body_rule}"]
    rules += [f"b{number}: %json {schema}" for number, schema in enumerate(schemas)]
    return Guide("lark", "\n".join(rules))


def _call_schema(name: str, schema: Mapping[str, Any], dialect: CallFormat) -> dict[str, Any]:
    """Return the schema of a call; definitions in the arguments' schema move to its root, where references start.

    A function has only the arguments that it names, unless its schema allows others.
    """
    argument_schema = {key: value for key, value in (schema or NO_ARGUMENTS).items() if key not in DEFINITION_KEYS}
    if "properties" in argument_schema:
        argument_schema.setdefault("additionalProperties", False)

    definitions = {key: schema[key] for key in DEFINITION_KEYS if key in schema}
    return {**definitions, "x-guidance": FORM, "type": "object", "required": ["name", dialect.arguments_key],
            "properties": {"name": {"const": name}, dialect.arguments_key: argument_schema},
            "additionalProperties": False}


# --- calls in a text --------------------------------------------------------------------------------------------------

class CallPart(NamedTuple):
    """A part of a call: first its name, then pieces of the JSON of its arguments."""

    name: str = ""
    arguments: str = ""


TextOrCallPart = Union[str, CallPart]  # text outside calls, or a part of a call


class CallReader:
    """A parser of an answer's text as it arrives; of a call it gives first the name, then pieces of the arguments."""

    def __init__(self, dialect: CallFormat) -> None:
        self._dialect = dialect
        self._blanks = dialect.between + " \n"  # dropped before a call and between two
        self._unread_text = ""
        self._pending_opening: str | None = ""  # precedes the unread text if that is no call; None: it is one
        self._keeps_blanks = bool(dialect.opening)  # whether blanks are now text
        self._part_iterator: Iterator[Any] = self._all_parts()

    def read(self, text: str) -> list[TextOrCallPart]:
        """Return the parts that are certain once this text follows."""
        self._unread_text += text
        return [*takewhile(bool, self._part_iterator)]

    def finish(self) -> list[TextOrCallPart]:
        """Return the last parts; the beginning of what might have become a call is text."""
        if self._pending_opening is None:
            return []
        self._unread_text = self._pending_opening + self._unread_text
        return [*self._emit_text(len(self._unread_text))]

    def _all_parts(self) -> Iterator[TextOrCallPart | None]:
        """Yield all parts, and None whenever more text is needed."""
        while True:
            yield from self._text_parts()
            self._pending_opening = self._dialect.opening
            yield from self._call_parts()
            self._pending_opening = ""

    def _text_parts(self) -> Iterator[TextOrCallPart | None]:
        """Yield the text up to the next call, and skip the opening of that call."""
        opening = self._dialect.opening
        while (call_start := self._call_start()) < 0:
            # the last letters may be the beginning of an opening
            opening_sizes = [size for size in range(len(opening)) if self._unread_text.endswith(opening[:size])]
            yield from self._emit_text(len(self._unread_text) - max(opening_sizes, default=0))
            yield None

        yield from self._emit_text(call_start)
        self._unread_text = self._unread_text.lstrip(self._blanks)[len(opening):]

    def _call_start(self) -> int:
        """Return where a call begins in the unread text; -1 if none begins yet."""
        if self._dialect.opening:
            return self._unread_text.find(self._dialect.opening)
        begins_with_brace = self._unread_text.lstrip(self._blanks).startswith("{")
        return self._unread_text.find("{") if begins_with_brace and not self._keeps_blanks else -1

    def _emit_text(self, size: int) -> Iterator[TextOrCallPart]:
        """Yield the first `size` characters of the unread text, unless they are blanks to hold back."""
        piece = self._unread_text[:size]
        if piece.strip(self._blanks) or (piece and self._keeps_blanks):
            self._unread_text, self._keeps_blanks = self._unread_text[size:], True
            yield piece

    def _call_parts(self) -> Iterator[TextOrCallPart | None]:
        """Yield a call after its opening, or its text if it is no call."""
        while not self._unread_text.strip():
            yield None
        if not self._unread_text.lstrip().startswith("{"):  # the opening is only mentioned
            self._keeps_blanks = True
            yield self._dialect.opening
            return

        while not (call_head := CALL_HEAD.match(self._unread_text)) and self._call_end() < 0:
            yield None
        self._pending_opening, self._keeps_blanks = None, False

        # a call in the usual order of keys
        if call_head:
            yield CallPart(call_head[1])
            self._unread_text = self._unread_text[call_head.end():]
            yield from self._argument_parts()
            return

        # any other object
        call_end = self._call_end()
        body, rest = self._unread_text[:call_end], self._unread_text[call_end:]
        call_parts = _parsed_call(body)
        self._unread_text, self._keeps_blanks = rest[len(self._dialect.closing):], not call_parts
        yield from call_parts or [self._dialect.opening + body + self._dialect.closing]

    def _call_end(self) -> int:
        """Return where a call ends, before its closing; -1 if it does not end yet."""
        object_end = Braces().end(self._unread_text)
        return self._unread_text.find(self._dialect.closing, object_end) if object_end >= 0 else -1

    def _argument_parts(self) -> Iterator[TextOrCallPart | None]:
        """Yield the arguments up to their closing brace, and skip the closing of the call."""
        braces = Braces()
        while (object_end := braces.end(self._unread_text)) < 0:
            piece, self._unread_text = self._unread_text, ""
            if piece:
                yield CallPart(arguments=piece)
            yield None

        piece, self._unread_text = self._unread_text[:object_end], self._unread_text[object_end:]
        yield CallPart(arguments=piece)

        closing = self._dialect.closing or "}"
        while closing not in self._unread_text:
            yield None
        self._unread_text = self._unread_text.partition(closing)[2]


class Braces:
    """A counter of open braces in an object that arrives in pieces; braces in strings do not count."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._after_backslash = False  # whether the next letter is in a string, or after a backslash

    def end(self, text: str) -> int:
        """Return where the object ends in the text that follows; -1 if it does not end there."""
        for end, letter in enumerate(text, 1):
            if self._after_backslash or letter == "\\":
                self._after_backslash = not self._after_backslash
            elif letter == '"':
                self._in_string = not self._in_string
            elif letter in "{}" and not self._in_string:
                self._depth += 1 if letter == "{" else -1
                if not self._depth:
                    return end
        return -1


def _parsed_call(body: str) -> list[TextOrCallPart]:
    """Return a call with keys in another order, or with arguments as a string; empty if it is no call."""
    try:
        call = json.loads(body)
        name, arguments = call["name"], call.get("arguments", call.get("parameters", {}))
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return []
    if not name or not isinstance(name, str):
        return []
    if not isinstance(arguments, str):
        arguments = json.dumps({} if arguments is None else arguments)
    return [CallPart(name), CallPart(arguments=arguments)]
