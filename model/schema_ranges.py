"""Numbers, ranges and patterns in JSON schemas that a compiled grammar would not keep, so that they are refused.

llguidance computes with 64-bit floats. It lets an exclusive whole bound through if the other bound is less than 1 away.
Of a pattern it loses what follows a character that JSON escapes, as in `^"[ab]"$`, except in a choice of characters.
"""
from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any, Iterator

LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
BOUNDS = (*LOWER, *UPPER)
LITERALS = ("const", "enum")  # keywords with values that an answer repeats
VALUES = (*LITERALS, "default", "examples")  # keywords whose values are no schemas
EXACT_WHOLE = 2 ** 53  # up to here each whole number is a float
EXACT_DIGITS = 15  # of a decimal number that a float keeps
INLINE = "%json"  # precedes a schema in a grammar
CHOICE = re.compile(r"\[(?:\\x..|\\u....|\\[^xu]|[^\]\\]){2,}\]", re.S)  # of characters, in a pattern
ESCAPED = re.compile(r'["\x00-\x1f]|\\(?:["\\nrtfva]|c|x(?:[01].|22|5[cC]|\{)|u(?:00[01].|0022|005[cC]|\{))')
_DECODER = json.JSONDecoder(parse_float=Decimal)


def inexact_part(kind: str, source: str) -> str:
    """Return what is wrong with a grammar's schemas; empty: nothing. Raises ValueError for no JSON."""
    try:
        for schema in _schemas_in(kind, source):
            for entry in _objects_in(schema):
                problem = _problem(entry) or _cut_pattern(entry)
                if problem:
                    return problem
    except RecursionError:
        return "it is nested too deeply"
    return ""


def _schemas_in(kind: str, source: str) -> Iterator[Any]:
    if kind == "json_schema":
        yield _DECODER.decode(source)
        return
    begin = source.find(INLINE)
    while begin >= 0:
        schema, _ = _DECODER.raw_decode(source[begin + len(INLINE):].lstrip())
        yield schema
        begin = source.find(INLINE, begin + len(INLINE))


def _objects_in(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield the objects of a schema, except those in values."""
    open_entries = [schema]
    while open_entries:
        entry = open_entries.pop()
        if isinstance(entry, list):
            open_entries += entry
        elif isinstance(entry, dict):
            yield entry
            open_entries += [value for name, value in entry.items() if name not in VALUES]


def _problem(entry: dict[str, Any]) -> str:
    """Return the problem of one schema's numbers, with the bounds of its `allOf`."""
    schemas = [entry, *(part for part in _list_of(entry, "allOf") if isinstance(part, dict))]
    pairs = [pair for schema in schemas for pair in schema.items() if pair[0] in BOUNDS]
    bounds = [(name, bound) for name, bound in pairs if _is_number(bound)]

    # single numbers
    literals = [(name, number) for name in LITERALS for number in _numbers_in(entry.get(name))]
    for name, number in (*bounds, *literals):
        num_digits = len(Decimal(number).normalize().as_tuple().digits)
        if abs(number) > EXACT_WHOLE or num_digits > EXACT_DIGITS and number != int(number):
            return f"{name} {number} is not exact: give a number of at most 2 ** 53, and with at most 15 digits"

    # narrow ranges
    lower_bounds = [bound for name, bound in bounds if name in LOWER]
    upper_bounds = [bound for name, bound in bounds if name in UPPER]
    is_narrow = lower_bounds and upper_bounds and min(upper_bounds) - max(lower_bounds) < 1
    excludes_whole = any(name.startswith("exclusive") and bound == int(bound) for name, bound in bounds)
    if is_narrow and excludes_whole:
        return "the exclusive bound of a range narrower than 1 would be allowed: give bounds that are included"
    return ""


def _cut_pattern(entry: dict[str, Any]) -> str:
    """Return the problem of one schema's patterns."""
    names = entry.get("patternProperties")
    patterns = [entry.get("pattern"), *(names if isinstance(names, dict) else ())]
    for pattern in patterns:
        if isinstance(pattern, str) and ESCAPED.search(CHOICE.sub("", pattern)):
            return "a pattern would be cut after its quotation mark, backslash or control character: leave that " \
                   f"character out of {pattern}"
    return ""


def _list_of(entry: dict[str, Any], name: str) -> list[Any]:
    value = entry.get(name)
    return value if isinstance(value, list) else []


def _numbers_in(value: Any) -> list[Any]:
    """Return the numbers of a value, also of those inside."""
    if isinstance(value, (list, dict)):
        inner_values = value.values() if isinstance(value, dict) else value
        return [number for inner_value in inner_values for number in _numbers_in(inner_value)]
    return [value] if _is_number(value) else []


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, Decimal)) and not isinstance(value, bool)
