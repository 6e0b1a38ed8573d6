"""What strangers wrote: JSON is read, names are looked at before they are used, texts are shown without harm.

It knows nothing about what a file means: what its fields may hold is said in `fields.py`.
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
LARGEST = 100_000_000  # bytes of JSON, as in the header of a safetensors file
DEEPEST = 64  # levels of lists and objects, one in the other
LONGEST_NAME = 255  # bytes of a name; no file system takes more
LONGEST_TEXT = 1000  # characters of a text that is printed as it is
LONGEST_VALUE = 200  # characters of a value in a sentence
AGAIN = "copy it again"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tabs and ends of lines
WHOLE_FOLDER = "copy the folder again, with all of its files, as files that you may read"

_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = 80


# --- showing ----------------------------------------------------------------------------------------------------------

def plain(text: str) -> str:
    """A text of which a terminal obeys no character; of a long one, whose end is a remedy, without the middle."""
    def escaped(sign: str) -> str:
        return sign if sign.isprintable() else ascii(sign)[1:-1]

    if len(text) > LONGEST_TEXT:
        half = LONGEST_TEXT // 2
        text = f"{text[:half]}...{text[-half:]}"
    return "".join(map(escaped, text))


def harmless(text: str) -> str:
    """A text of many lines as it can be printed: control characters that a terminal would obey are escaped."""
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def shown(value: object) -> str:
    """A value for a sentence: short, and without characters that a terminal obeys."""
    text = _brief.repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def reason(error: BaseException | str) -> str:
    """What an error says in its first line; its kind, if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# --- names ------------------------------------------------------------------------------------------------------------

def is_name(value: object) -> bool:
    """Whether a tensor or a file may have this name: a text that can be printed as it is."""
    if not isinstance(value, str) or not value.isprintable():
        return False
    return 0 < len(value.encode()) <= LONGEST_NAME


def stays_inside(name: object) -> bool:
    """Whether a file of this name, by the name alone, lies in the folder it is joined to; a link may lead out."""
    if not isinstance(name, str) or not is_name(name) or "\\" in name:
        return False
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


# --- reading ----------------------------------------------------------------------------------------------------------

def read_bytes(path: Name, remedy: str, most: int | None = None) -> bytes:
    """The content of a file. A ValueError that ends in the remedy if it is none, or has more than `most` bytes."""
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is a folder, a device or a pipe: {remedy}")
        size = path.stat().st_size
        if most is not None and size > most:
            raise ValueError(f"{path} has {size} bytes, more than any file of its kind: {remedy}")
        return path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}: {remedy}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): {remedy}") from None


def decoded(data: bytes, where: object, remedy: str) -> str:
    """A text out of UTF-8, with or without the mark that some editors put in front."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        place = f"{error.reason} at byte {error.start}"
        raise ValueError(f"{where} is not UTF-8 ({place}): {remedy}") from None


def parse_json(text: str, where: object, remedy: str) -> Any:
    """What JSON says; a ValueError that begins with `where` if it is none, repeats a key or is nested without end."""
    try:
        found = json.loads(text, object_pairs_hook=_once)
        deep = _is_deep(found)
    except RecursionError:
        deep = True
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text else ""
        raise ValueError(f"{where} is not JSON ({error.msg}, {line}column {error.colno}): {remedy}") from None
    except ValueError as error:
        raise ValueError(f"{where} is not JSON ({error}): {remedy}") from None
    if deep:
        raise ValueError(f"{where} is nested too deeply (more than {DEEPEST} lists and objects, one in the other): "
                         f"{remedy}")
    return found


def parse_object(data: bytes, where: object, remedy: str = AGAIN) -> dict[str, Any]:
    """What bytes of JSON say, where only an object makes sense; else a ValueError that begins with `where`."""
    found = parse_json(decoded(data, where, remedy), where, remedy)
    if not isinstance(found, dict):
        raise ValueError(f"{where} is not a JSON object: {remedy}")
    return found


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object that a file of a model's folder holds."""
    return parse_object(read_bytes(path, WHOLE_FOLDER, LARGEST), path)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object in which no key stands twice: readers would differ in which of its values they take."""
    found = dict(pairs)
    if len(found) < len(pairs):
        [(name, count)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {shown(name)} stands there {count} times")
    return found


def _is_deep(content: Any) -> bool:
    level = [content]
    for _ in range(DEEPEST):
        inner = (outer.values() if isinstance(outer, dict) else outer for outer in level
                 if isinstance(outer, (dict, list)))
        level = list(chain.from_iterable(inner))
    return bool(level)
