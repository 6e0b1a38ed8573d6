"""What ranks on several hosts write down for each other: the kinds of entries, who may write them, and their form.

It knows nothing about how entries travel. Boards have no keys, so anybody in their network may have written one: what
has none of these forms is junk, and what people shall read is escaped.
"""
from __future__ import annotations

import json
import re
from typing import Any, Callable, Dict, NamedTuple

from config.files import fits
from config.schema.untrusted import plain

MOST = 1 << 20  # bytes of an entry
RANKS = 1 << 10  # the most of one run
COUNT = 1 << 62  # counters stay below
DIGITS = 20  # of a whole number
TYPED = (str, int, float, bool)  # what a person types

Facts = Dict[str, Any]  # of one rank, by name


class Junk(ValueError):
    """An entry, or a request, that has none of the known forms."""


def parse(raw: bytes) -> Any:
    """What stands in a piece of JSON."""
    try:
        return json.loads(raw.decode(), parse_int=_digits)
    except (ValueError, RecursionError):
        raise Junk("it is no JSON") from None


def _digits(text: str) -> int:
    if len(text) > DIGITS:  # Python takes its time to read millions of them
        raise Junk("it has too long a number")
    return int(text)


# --- forms ------------------------------------------------------------------------------------------------------------

def _whole(least: int, end: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value < end


def _is_address(value: Any) -> bool:
    parts = value.split(".") if isinstance(value, str) else []
    numbers = [int(part) for part in parts if re.fullmatch("0|[1-9][0-9]{0,2}", part)]
    return len(parts) == len(numbers) == 4 and max(numbers) < 256


def _is_settings(value: Any) -> bool:
    """Whether it is the keys of a configuration, each with a value as a person types it."""
    return isinstance(value, dict) and all(type(entry) in TYPED for entry in value.values())


RANK = _whole(0, RANKS)
ALWAYS = {"host": str, "code": str, "settings": _is_settings}
FACTS = {**ALWAYS, "world": _whole(1, RANKS), "split": str, "address": _is_address, "interface": str,
         "port": _whole(1, 1 << 16)}


def _is_facts(value: Any) -> bool:
    """Whether it is all facts of a rank; or what it knew so far, and the error that ended it."""
    known = {**FACTS, "error": str}
    if not isinstance(value, dict) or not value.keys() <= known.keys():
        return False
    wanted = ALWAYS if "error" in value else FACTS
    form = {name: known[name] for name in value}
    return wanted.keys() <= value.keys() and fits(value, form)


# --- kinds: from the bytes of an entry to the same entry, if it is sound ----------------------------------------------

def _json(form: Any) -> Callable[[bytes], bytes]:
    def cleaned(raw: bytes) -> bytes:
        value = parse(raw)
        if not fits(value, form):
            raise Junk("it has another form")
        return json.dumps(_printable(value)).encode()

    return cleaned


def _printable(value: Any) -> Any:
    if isinstance(value, dict):
        return {plain(key): _printable(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_printable(entry) for entry in value]
    return plain(value) if isinstance(value, str) else value


def _line(raw: bytes) -> bytes:
    return plain(raw.decode(errors="replace")).encode()


def _number(raw: bytes) -> bytes:
    if not re.fullmatch(rb"-?\d{1,19}(\.\d{1,40})?(e-?\d{1,2})?", raw):
        raise Junk("it is no number")
    return raw


def _count(raw: bytes) -> bytes:
    if not re.fullmatch(rb"-?\d{1,19}", raw) or abs(int(raw)) >= COUNT:
        raise Junk("it is no count")
    return raw


class Kind(NamedTuple):
    """Entries whose names match `pattern` belong to the rank that the name ends in (`own`), to rank 0 (`root`), or,
    where neither is said, to the rank that writes first."""

    pattern: str
    clean: Callable[[bytes], bytes]
    root: bool = False

    def owner(self, key: str) -> int | None:
        """The rank that alone may write an entry of this name; None if that is the first to write."""
        if self.root:
            return 0
        found = re.fullmatch(self.pattern, key)
        own = found.groupdict().get("own") if found else None
        return None if own is None else int(own)


OWN = r"(?P<own>\d{1,4})"
BEFORE = r"(?:.*/)?"  # what torch.distributed puts before the names that it is given
KINDS = (
    Kind(rf"facts/{OWN}", _json(_is_facts)),
    Kind(rf"ways/{OWN}", _json([RANK])),
    Kind(r"facts/all", _json([(RANK, _is_facts)]), root=True),
    Kind(r"ways/all", _json([(RANK, [RANK])]), root=True),
    Kind(r"(?:facts|ways)/verdict", _json((str, bool)), root=True),
    Kind(rf"(?:facts|ways)/heard/{OWN}", _count),
    Kind(rf"{BEFORE}heartbeat/{OWN}", _count),
    Kind(rf"{BEFORE}heartbeat/losses", _count),
    Kind(rf"{BEFORE}busy/{OWN}", _count),
    Kind(rf"{BEFORE}heartbeat/lost", _line),
    Kind(rf"{BEFORE}split/{OWN}", _line),
    Kind(rf"{BEFORE}clock/{OWN}(?:/ask/\d+)?", _line),
    Kind(rf"{BEFORE}clock/\d+/time/\d+", _number, root=True),
    Kind(r".*", bytes),  # what torch.distributed itself writes
)


def kind(key: str) -> Kind:
    """The first whose pattern is the whole of a name."""
    return next(found for found in KINDS if re.fullmatch(found.pattern, key, re.S))


def clean(key: str, raw: bytes) -> bytes:
    """The entry as it may be used; raises Junk."""
    try:
        if len(raw) > MOST:
            raise Junk(f"it has more than {MOST} bytes")
        return kind(key).clean(raw)
    except Junk as junk:
        raise Junk(f"{plain(key)}: {junk}") from None
