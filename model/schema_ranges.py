"""Numbers, ranges and patterns in JSON schemas that a compiled grammar would not keep, so that they are refused.

llguidance computes with 64-bit floats. It lets an exclusive whole bound through if the other bound is less than 1 away.
Of a pattern it loses what follows a character that JSON escapes, as in `^"[ab]"$`, except in a choice of characters.

A schema is untrusted: the steps of each check grow at most linearly with its size.
"""
from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any, Iterable, Iterator
from urllib.parse import unquote

LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
BOUNDS = (*LOWER, *UPPER)
LITERALS = ("const", "enum")  # keywords with values that an answer repeats
VALUES = (*LITERALS, "default", "examples")  # keywords whose values are no schemas, unless a reference leads there
NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # by names of any kind
EXACT_WHOLE = 2 ** 53  # up to here each whole number is a float
SMALLEST = Decimal("1e-300")  # from here on a float keeps as many digits
EXACT_NUMBERS = "give 0, or a number from 1e-300 to 2 ** 53 with at most 15 digits"
EXACT_DIGITS = 15  # of a decimal number that a float keeps
INLINE = "%json"  # precedes a schema in a grammar
SIGN = re.compile(r"\\x..|\\u....|\\.|.", re.S)  # of a pattern: a character, or an escape of one
CHOICE_SIGNS = 4  # the fewest signs of a choice of several characters, with its brackets
ESCAPED = re.compile(r'["\x00-\x1f]|\\(?:["\\nrtfva]|c|x(?:[01].|22|5[cC]|\{)|u(?:00[01].|0022|005[cC]|\{))')
_DECODER = json.JSONDecoder(parse_float=Decimal, parse_int=Decimal)


def inexact_part(kind: str, source: str) -> str:
    """Return what is wrong with a grammar's schemas; empty: nothing."""
    try:
        for document in _documents_in(kind, source):
            for schema in _schemas_in(document):
                problem = _problem(schema) or _cut_pattern(schema)
                if problem:
                    return problem

    except RecursionError:
        return "it is nested too deeply"
    except ArithmeticError:  # of Decimal
        return f"a number has an exponent that is not read: {EXACT_NUMBERS}"
    except ValueError as error:
        return f"it is not JSON: {error}"
    return ""


def _documents_in(kind: str, source: str) -> Iterator[Any]:
    """Yield the JSON documents of a grammar, each a schema with all that it has inside."""
    if kind == "json_schema":
        yield _DECODER.decode(source)
        return

    begin = source.find(INLINE) if kind in ("grammar", "lark") else -1
    while begin >= 0:
        begin += len(INLINE)
        while source[begin:begin + 1].isspace():
            begin += 1

        document, end = _DECODER.raw_decode(source, begin)
        if not isinstance(document, (dict, bool)):
            raise ValueError(f"{INLINE} precedes no object")

        yield document
        begin = source.find(INLINE, end)


def _schemas_in(document: Any) -> Iterable[dict[str, Any]]:
    """Return the schemas of a document: its objects, except those in values; all of them if a reference leads there."""
    objects = [value for value in values_in(document) if isinstance(value, dict)]
    if any(_leads_into_value(entry.get("$ref")) for entry in objects):
        return objects
    return _schemas_besides_values(document)


def _schemas_besides_values(document: Any) -> list[dict[str, Any]]:
    schemas, open_values = [], [document]
    while open_values:
        value = open_values.pop()

        if isinstance(value, list):
            open_values += value
        elif isinstance(value, dict):
            schemas.append(value)
            for name, inner_value in value.items():
                if name in NAMED_SCHEMAS and isinstance(inner_value, dict):
                    open_values += inner_value.values()
                elif name not in VALUES:
                    open_values.append(inner_value)
    return schemas


def without_nulls(document: Any) -> Any:
    """Return a schema whose keywords are never null, as some programs write those that they leave out."""
    if isinstance(document, dict):
        for schema in _schemas_besides_values(document):
            for name in [name for name, value in schema.items() if value is None and name not in VALUES]:
                del schema[name]
    return document


def _leads_into_value(reference: Any) -> bool:
    return isinstance(reference, str) and not set(VALUES).isdisjoint(unquote(reference).split("/"))


def values_in(value: Any) -> Iterator[Any]:
    """Yield a JSON value and all values inside it."""
    open_values = [value]
    while open_values:
        value = open_values.pop()
        yield value
        if isinstance(value, (list, dict)):
            open_values += value.values() if isinstance(value, dict) else value


def _problem(entry: dict[str, Any]) -> str:
    """Return the problem of one schema's numbers, with the bounds of its `allOf`."""
    schemas = [entry, *(part for part in _list_of(entry, "allOf") if isinstance(part, dict))]
    pairs = [pair for schema in schemas for pair in schema.items() if pair[0] in BOUNDS]
    bounds = [(name, bound) for name, bound in pairs if _is_number(bound)]

    # single numbers
    literals = [(name, number) for name in LITERALS for number in filter(_is_number, values_in(entry.get(name)))]
    for name, number in (*bounds, *literals):
        num_digits = len(number.normalize().as_tuple().digits)
        is_tiny = number != 0 and -SMALLEST < number < SMALLEST
        if abs(number) > EXACT_WHOLE or is_tiny or num_digits > EXACT_DIGITS and number != int(number):
            return f"{name} {number} is not exact: {EXACT_NUMBERS}"

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
        if isinstance(pattern, str) and ESCAPED.search(_without_choices(pattern)):
            return "a pattern would be cut after its quotation mark, backslash or control character: leave that " \
                   f"character out of {pattern}"
    return ""


def _without_choices(pattern: str) -> str:
    """Return a pattern without its choices of several characters; one that is never closed stays."""
    kept_signs: list[str] = []
    opening = -1  # where the open choice begins in these

    for sign in SIGN.findall(pattern):
        kept_signs.append(sign)

        if sign == "[" and opening < 0:
            opening = len(kept_signs) - 1
        elif sign == "]" and opening >= 0:
            if len(kept_signs) - opening >= CHOICE_SIGNS:
                del kept_signs[opening:]
            opening = -1
    return "".join(kept_signs)


def _list_of(entry: dict[str, Any], name: str) -> list[Any]:
    value = entry.get(name)
    return value if isinstance(value, list) else []


def _is_number(value: Any) -> bool:
    return isinstance(value, Decimal)
