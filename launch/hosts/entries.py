"""What ranks on several hosts write down for each other: the kinds of entries, who may write them, and their form.

It knows nothing about how entries travel. Boards have no keys, so anybody in their network may have written one: what
has none of these forms is junk, and what people shall read is escaped.
"""
from __future__ import annotations

import json
import re
from typing import Any, Callable, Dict

from config.files import fits
from config.schema.fields import whole
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

def _is_address(value: Any) -> bool:
    parts = value.split(".") if isinstance(value, str) else []
    numbers = [int(part) for part in parts if re.fullmatch("0|[1-9][0-9]{0,2}", part)]
    return len(parts) == len(numbers) == 4 and max(numbers) < 256


def _is_settings(value: Any) -> bool:
    """Whether it is the keys of a configuration, each with a value as a person types it."""
    return isinstance(value, dict) and all(type(entry) in TYPED for entry in value.values())


RANK = whole(0, RANKS - 1).fits
ALWAYS = {"host": str, "code": str, "settings": _is_settings}
FACTS = {**ALWAYS, "world": whole(1, RANKS - 1).fits, "split": str, "address": _is_address, "interface": str,
         "port": whole(1, (1 << 16) - 1).fits}


def _is_facts(value: Any) -> bool:
    """Whether it is all facts of a rank; or what it knew so far, and the error that ended it."""
    known = {**FACTS, "error": str}
    if not isinstance(value, dict) or not value.keys() <= known.keys():
        return False
    wanted = ALWAYS if "error" in value else FACTS
    return fits(value, {**wanted, **{name: known[name] for name in value}})


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


OWN = r"(?P<own>\d{1,4})"  # the rank that alone may write the entry
ROOT = r"(?P<root>)"  # only rank 0 may; where neither is said, the rank that writes first
BEFORE = r"(?:.*/)?"  # what torch.distributed puts before the names that it is given
KINDS = (  # of a name that a pattern fits as a whole, the first one counts
    (rf"facts/{OWN}", _json(_is_facts)),
    (rf"ways/{OWN}", _json([RANK])),
    (rf"{ROOT}facts/all", _json([(RANK, _is_facts)])),
    (rf"{ROOT}ways/all", _json([(RANK, [RANK])])),
    (rf"{ROOT}(?:facts|ways)/verdict", _json((str, bool))),
    (rf"(?:facts|ways)/heard/{OWN}", _count),
    (rf"{BEFORE}(?:heartbeat|busy)/{OWN}", _count),
    (rf"{BEFORE}heartbeat/losses", _count),
    (rf"{BEFORE}heartbeat/lost", _line),
    (rf"{BEFORE}split/{OWN}", _line),
    (rf"{BEFORE}clock/{OWN}(?:/ask/\d+)?", _line),
    (rf"{ROOT}{BEFORE}clock/\d+/time/\d+", _number),
    (r".*", bytes),  # what torch.distributed itself writes
)


def _kind(key: str) -> tuple[dict[str, str], Callable[[bytes], bytes]]:
    """What a name says of who may write its entry, and what makes a sound entry of bytes."""
    found = ((re.fullmatch(pattern, key, re.S), cleaned) for pattern, cleaned in KINDS)
    return next((match.groupdict(), cleaned) for match, cleaned in found if match)


def owner_of(key: str) -> int | None:
    """The rank that alone may write an entry of this name; None if that is the first to write."""
    names, _ = _kind(key)
    if "root" in names:
        return 0
    return int(names["own"]) if "own" in names else None


def clean(key: str, raw: bytes) -> bytes:
    """The entry as it may be used; raises Junk."""
    try:
        if len(raw) > MOST:
            raise Junk(f"it has more than {MOST} bytes")
        _, cleaned = _kind(key)
        return cleaned(raw)
    except Junk as junk:
        raise Junk(f"{plain(key)}: {junk}") from None
