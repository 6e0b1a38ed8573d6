"""What ranks on several hosts write down for each other: the kinds of entries, who may write them, and their form.

It knows nothing about how entries travel. Boards have no keys, so anybody in their network may have written one: what
has none of these forms is junk, and what people shall read is escaped.
"""
from __future__ import annotations

import ipaddress
import json
import math
import re
from typing import Any, Callable, Dict, NamedTuple

from config.schema.untrusted import plain

MOST = 1 << 20  # bytes of an entry
RANKS = 1 << 10  # the most of one run
COUNT = 1 << 62  # counters stay below
DIGITS = 20  # of a whole number

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


# --- forms: from a value to the same value, if it is sound ------------------------------------------------------------

def _is(sound: bool, what: str) -> None:
    if not sound:
        raise Junk(f"it is no {what}")


def _text(value: Any) -> str:
    """A text, fit to be printed."""
    _is(type(value) is str, "text")
    return plain(value)


def _whole(least: int, end: int) -> Callable[[Any], int]:
    """The form of a whole number from `least` up to below `end`."""
    def form(value: Any) -> int:
        _is(type(value) is int and least <= value < end, f"number from {least} to {end - 1}")
        return int(value)
    return form


def _address(value: Any) -> str:
    try:
        return str(ipaddress.IPv4Address(_text(value)))
    except ValueError:
        raise Junk("it is no IPv4 address") from None


def _settings(value: Any) -> dict[str, Any]:
    """The keys of a configuration, each with a value as a person types it."""
    _is(type(value) is dict, "settings")
    found = {}
    for key, entry in value.items():
        _is(type(entry) in (str, int, float, bool), "settings")
        found[plain(key)] = plain(entry) if type(entry) is str else entry
    return found


FACTS: dict[str, Callable[[Any], Any]] = {
    "host": _text,
    "code": _text,
    "settings": _settings,
    "error": _text,
    "world": _whole(1, RANKS),
    "split": _text,
    "address": _address,
    "interface": _text,
    "port": _whole(1, 1 << 16),
}
ALWAYS = {"host", "code", "settings"}


def facts(value: Any) -> Facts:
    """All facts of a rank; or what it knew so far, and the error that ended it."""
    _is(type(value) is dict and set(value) <= set(FACTS), "facts of a rank")
    wanted = ALWAYS if "error" in value else set(FACTS) - {"error"}
    _is(wanted <= set(value), "whole facts of a rank")
    return {name: FACTS[name](entry) for name, entry in value.items()}


def _ranks(value: Any) -> list[int]:
    _is(type(value) is list, "list of ranks")
    return [_whole(0, RANKS)(rank) for rank in value]


def _verdict(value: Any) -> list[Any]:
    _is(type(value) is list, "verdict")
    _is([type(entry) for entry in value] == [str, bool], "verdict")
    return [plain(value[0]), value[1]]


def _of_each_rank(form: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The form of a list of pairs: a rank, and a value of `form`."""
    number = _whole(0, RANKS)

    def listed(value: Any) -> list[Any]:
        _is(type(value) is list, "list of pairs")
        _is(all(type(pair) is list and len(pair) == 2 for pair in value), "list of pairs")
        return [[number(rank), form(entry)] for rank, entry in value]
    return listed


# --- kinds: from the bytes of an entry to the same entry, if it is sound ----------------------------------------------

def _json(form: Callable[[Any], Any]) -> Callable[[bytes], bytes]:
    return lambda raw: json.dumps(form(parse(raw))).encode()


def _line(raw: bytes) -> bytes:
    return plain(raw.decode(errors="replace")).encode()


def _number(raw: bytes) -> bytes:
    try:
        _is(math.isfinite(float(raw)), "finite number")
    except ValueError:
        raise Junk("it is no number") from None
    return raw


def _count(raw: bytes) -> bytes:
    _is(re.fullmatch(rb"-?\d{1,19}", raw) is not None, "count")
    _is(abs(int(raw)) < COUNT, "count")
    return raw


def _opaque(raw: bytes) -> bytes:
    """What torch.distributed itself writes."""
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
    Kind(rf"facts/{OWN}", _json(facts)),
    Kind(rf"ways/{OWN}", _json(_ranks)),
    Kind(r"facts/all", _json(_of_each_rank(facts)), root=True),
    Kind(r"ways/all", _json(_of_each_rank(_ranks)), root=True),
    Kind(r"(?:facts|ways)/verdict", _json(_verdict), root=True),
    Kind(rf"(?:facts|ways)/heard/{OWN}", _count),
    Kind(rf"{BEFORE}heartbeat/{OWN}", _count),
    Kind(rf"{BEFORE}heartbeat/losses", _count),
    Kind(rf"{BEFORE}busy/{OWN}", _count),
    Kind(rf"{BEFORE}heartbeat/lost", _line),
    Kind(rf"{BEFORE}split/{OWN}", _line),
    Kind(rf"{BEFORE}clock/{OWN}(?:/ask/\d+)?", _line),
    Kind(rf"{BEFORE}clock/\d+/time/\d+", _number, root=True),
    Kind(r".*", _opaque),
)


def kind(key: str) -> Kind:
    """The first whose pattern is the whole of a name."""
    return next(found for found in KINDS if re.fullmatch(found.pattern, key, re.S))


def clean(key: str, raw: bytes) -> bytes:
    """The entry as it may be used; raises Junk."""
    _is(len(raw) <= MOST, f"entry of at most {MOST} bytes")
    try:
        return kind(key).clean(raw)
    except Junk as junk:
        raise Junk(f"{plain(key)}: {junk}") from None
