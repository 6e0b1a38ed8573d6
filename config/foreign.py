"""What strangers wrote: JSON is read, names are looked at before they are used, values are shown without harm.

It knows nothing about what a file means: what its fields may hold is said in `fields.py`.
"""
from __future__ import annotations

import json
import reprlib
from pathlib import Path, PurePosixPath
from typing import Any, Iterable

LARGEST = 100_000_000  # bytes of JSON, as in the header of a safetensors file
DEEPEST = 64  # levels of lists and objects, one in the other
LONGEST = 255  # bytes of a name; no file system takes more
MOST_SHOWN = 200  # characters of a value in a sentence

_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = 80


def shown(value: object) -> str:
    """A value for a sentence: short, and without signs that a terminal obeys."""
    text = _brief.repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def is_name(value: object) -> bool:
    """Whether a tensor or a file may have this name: a text that can be printed as it is."""
    return isinstance(value, str) and value.isprintable() and 0 < len(value.encode()) <= LONGEST


def stays_inside(name: object) -> bool:
    """Whether a file of this name lies in the folder that the name is joined to.

    The name alone is asked. A link may lead out: in a cache of Hugging Face every file is one.
    """
    if not isinstance(name, str) or not is_name(name) or "\\" in name:
        return False
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def parse_json(content: str | bytes, where: object, remedy: str = "copy it again") -> Any:
    """What JSON says. A ValueError names the place and the remedy if it is none, or is nested without end."""
    try:
        found = json.loads(content if isinstance(content, str) else content.decode("utf-8-sig"))
        deep = _is_deep(found)
    except RecursionError:
        deep = True
    except ValueError as error:
        raise ValueError(f"{where} is not JSON ({error}); {remedy}") from None
    if deep:
        raise ValueError(f"{where} has more than {DEEPEST} lists and objects one in the other; {remedy}")
    return found


def parse_object(content: str | bytes, where: object, remedy: str = "copy it again") -> dict[str, Any]:
    """`parse_json`, where only an object makes sense."""
    found = parse_json(content, where, remedy)
    if not isinstance(found, dict):
        raise ValueError(f"{where} is not a JSON object; {remedy}")
    return found


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds."""
    try:
        size = path.stat().st_size
        content = path.read_bytes() if size <= LARGEST else b""
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; copy the folder again, with all of its files") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); make it a file that you may read") from None
    if size > LARGEST:
        raise ValueError(f"{path} has {size} bytes, more than any file of its kind; copy it again")
    return parse_object(content, path)


def _is_deep(content: Any) -> bool:
    level = [content]
    for _ in range(DEEPEST):
        level = [inner for outer in level for inner in _items(outer)]
    return bool(level)


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
