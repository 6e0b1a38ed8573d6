"""Untrusted input: read JSON, check names before use, and escape texts for printing.

It knows nothing about the meaning of a file: `fields.py` defines the values of its fields.
"""
from __future__ import annotations

import json
import re
import reprlib
from collections import Counter
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, Union

Name = Union[str, Path]
LARGEST = 100_000_000  # bytes of JSON, as the limit of a safetensors header
DEEPEST = 64  # levels of nested lists and objects
LONGEST_NAME = 255  # bytes of a name; no file system allows more
LONGEST_TEXT = 1000  # characters of a text that is printed as it is
LONGEST_VALUE = 200  # characters of a value in a sentence
AGAIN = "copy it again"
BYTE_ORDER_MARK = "\ufeff"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tabs and newlines
WHOLE_FOLDER = "copy the folder again, with all of its files, as files that you may read"

_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = 80


# --- showing ----------------------------------------------------------------------------------------------------------

def one_line(text: str) -> str:
    """Escape everything that a terminal could interpret, and cut the middle of a long text, since its end is a fix."""
    if len(text) > LONGEST_TEXT:
        half_length = LONGEST_TEXT // 2
        text = f"{text[:half_length]}...{text[-half_length:]}"
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)


def escaped(text: str) -> str:
    """Escape the control characters of a text, but keep its lines."""
    return CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def short_repr(value: object) -> str:
    """Return a value for use in a message: short, and without characters that a terminal could interpret."""
    text = _brief.repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def reason(error: BaseException | str) -> str:
    """Return the first line of an error's message, or the error's type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# --- names ------------------------------------------------------------------------------------------------------------

def is_name(value: object) -> bool:
    """Return whether a tensor or a file may have this name: a short, printable text."""
    if not isinstance(value, str) or not value.isprintable():
        return False
    return 0 < len(value.encode()) <= LONGEST_NAME


def stays_inside(name: object) -> bool:
    """Return whether a relative name stays inside its folder; links are not checked."""
    if not isinstance(name, str) or not is_name(name) or "\\" in name:
        return False
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


# --- reading ----------------------------------------------------------------------------------------------------------

def read_bytes(path: Name, remedy: str, max_bytes: int | None = None) -> bytes:
    """Read a file. Raises ValueError, ending with the remedy, if it is unreadable or has more than `max_bytes`."""
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is a folder, a device or a pipe: {remedy}")

        num_bytes = path.stat().st_size
        if max_bytes is not None and num_bytes > max_bytes:
            raise ValueError(f"{path} has {num_bytes} bytes, too many for a file of its kind: {remedy}")
        return path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}: {remedy}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): {remedy}") from None


def decoded(data: bytes, source_name: object, remedy: str) -> str:
    """Decode UTF-8, with or without a byte order mark."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        reason_there = f"{error.reason} at byte {error.start}"
        raise ValueError(f"{source_name} is not UTF-8 ({reason_there}): {remedy}") from None


class RepeatedKey(ValueError):
    """An object in JSON with one key twice."""


def parse_json(text: str, source_name: object, remedy: str) -> Any:
    """Parse JSON. Raises ValueError, beginning with `source_name`, if it is invalid, repeats a key or is too deep."""
    try:
        content = json.loads(text, object_pairs_hook=_unique_keys)
        is_deep = _is_deep(content)

    except RecursionError:
        is_deep = True
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text else ""
        raise ValueError(f"{source_name} is not JSON ({error.msg}, {line}column {error.colno}): {remedy}") from None
    except RepeatedKey as error:
        raise ValueError(f"{source_name} is not JSON ({error}): {remedy}") from None
    except ValueError:  # Python reads no integer of more than 4300 digits
        raise ValueError(f"{source_name} has a whole number of thousands of digits: write fewer") from None

    if is_deep:
        raise ValueError(f"{source_name} is nested too deeply (more than {DEEPEST} lists and objects within each "
                         f"other): {remedy}")
    return content


def parse_object(data: bytes, source_name: object, remedy: str = AGAIN) -> dict[str, Any]:
    """Parse bytes of JSON that must be an object. Raises ValueError, beginning with `source_name`, for others."""
    content = parse_json(decoded(data, source_name, remedy), source_name, remedy)
    if not isinstance(content, dict):
        raise ValueError(f"{source_name} is not a JSON object: {remedy}")
    return content


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file of a model's folder."""
    return parse_object(read_bytes(path, WHOLE_FOLDER, LARGEST), path)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Create an object, and refuse repeated keys, since parsers differ in which value they take."""
    values_by_key = dict(pairs)
    if len(values_by_key) < len(pairs):
        [(key, count)] = Counter(key for key, _ in pairs).most_common(1)
        raise RepeatedKey(f"the key {short_repr(key)} occurs {count} times")
    return values_by_key


def _is_deep(content: Any) -> bool:
    """Return whether JSON has more than `DEEPEST` levels."""
    level = [content]
    for _ in range(DEEPEST):
        containers = [value for value in level if isinstance(value, (dict, list))]
        inner_values = (each.values() if isinstance(each, dict) else each for each in containers)
        level = list(chain.from_iterable(inner_values))
    return bool(level)
