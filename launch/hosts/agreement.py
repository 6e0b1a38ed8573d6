"""What ranks on several hosts write down for each other: its forms, who may write it, and what of it must agree.

It knows nothing about how it travels. Boards have no keys, so anybody in their network may have written an entry: what
has none of these forms is junk, and what people shall read is escaped.
"""
from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from contextlib import suppress
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, Callable, Dict, Sequence

from config.cli import CommandKeys, flat
from config.files import fits
from config.keys import written
from config.presets import ROOT
from config.run_config import RunConfig
from config.schema.fields import integer
from config.schema.untrusted import plain
from launch.hosts.board import Board

CODE = ("config", "model", "pipeline", "tp", "sim", "launch", "eval")  # what decides what a rank computes and says
# What belongs to a board, or to rank 0, whose user asks. All other keys must agree, so a new one is compared too.
LOCAL = frozenset({
    "model_dir", "base_dir", "eagle_dir", "draft_dir", "ssm", "models",  # its folders …
    "data", "output", "results", "hosts",  # … and files
    "prompt", "prompt_ids", "question_file", "template",  # what rank 0 alone is asked
    "device", "threads_per_rank", "debug",  # of one machine
    "master", "wait", "keys",  # how it comes to the rendezvous
    "launch",  # which start of an evaluation it is, by the files of rank 0
})
ENTRY_BYTES = 1 << 20  # bytes of an entry
MOST_RANKS = 1 << 10  # the most of one run
COUNT_LIMIT = 10 ** 18  # counters stay below
DIGITS = 20  # of a whole number

Clean = Callable[[bytes], bytes]  # from the bytes of an entry to the same entry, if it is sound
Facts = Dict[str, Any]  # of one rank, by name
Written = Dict[int, Any]  # what ranks have written about one topic: their facts, or whom they have not reached


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
    with suppress(ValueError):
        return isinstance(value, str) and str(IPv4Address(value)) == value
    return False


RANK = integer(0, MOST_RANKS - 1).fits
ALWAYS = {"host": str, "code": str, "settings": {str}}  # those as a person types them
FACTS = {**ALWAYS, "world": integer(1, MOST_RANKS - 1).fits, "split": str,
         "address": _is_address, "interface": str, "port": integer(1, (1 << 16) - 1).fits}


def _is_facts(value: Any) -> bool:
    """Whether it is all facts of a rank; or what it knew so far, and the error that ended it."""
    known = {**FACTS, "error": str}
    if not isinstance(value, dict) or not value.keys() <= known.keys():
        return False
    wanted = ALWAYS if "error" in value else FACTS
    return fits(value, {**wanted, **{name: known[name] for name in value}})


# --- kinds ------------------------------------------------------------------------------------------------------------

def _json(form: Any) -> Clean:
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


def _form_of(pattern: bytes, what: str = "number") -> Clean:
    def cleaned(raw: bytes) -> bytes:
        if not re.fullmatch(pattern, raw):
            raise Junk(f"it is no {what}")
        return raw

    return cleaned


OWN = r"(?P<own>\d{1,4})"  # the rank that alone may write the entry
OF_ROOT = r"(?P<root>)"  # only rank 0 may; where neither is said, the rank that writes first
BEFORE = r"(?:.*/)?"  # what torch.distributed puts before the names that it is given
_count = _form_of(rb"-?\d{1,18}")
_number = _form_of(rb"-?\d{1,19}(\.\d{1,40})?(e-?\d{1,2})?")
KINDS = (  # of a name that a pattern fits as a whole, the first one counts
    (rf"facts/{OWN}", _json(_is_facts)),
    (rf"ways/{OWN}", _json([RANK])),
    (rf"{OF_ROOT}facts/verdict", _json((str, bool, [(RANK, _is_facts)]))),
    (rf"{OF_ROOT}ways/verdict", _json((str, bool, [(RANK, [RANK])]))),
    (rf"{BEFORE}(?:heartbeat|busy)/{OWN}", _count),
    (rf"{BEFORE}heartbeat/losses(?:/\d+)?", _count),
    (rf"{BEFORE}heartbeat/lost(?:/\d+)?", _line),
    (rf"spare/{OWN}", _json({"host": str, "address": _is_address, "lacks": {str}})),
    (rf"door/{OWN}", _form_of(rb"\d{1,9} (\d{1,3}\.){3}\d{1,3}:\d{1,5}", "door")),
    (rf"{OF_ROOT}(?:epoch|open|hung/\d+)", _count),
    (rf"{BEFORE}split/{OWN}", _line),
    (rf"{BEFORE}clock/{OWN}(?:/ask/\d+)?", _line),
    (rf"{OF_ROOT}{BEFORE}clock/\d+/time/\d+", _number),
    (r".*", bytes),  # what torch.distributed itself writes
)


def _kind(key: str) -> tuple[dict[str, str], Clean]:
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
        if len(raw) > ENTRY_BYTES:
            raise Junk(f"it has more than {ENTRY_BYTES} bytes")
        _, cleaned = _kind(key)
        return cleaned(raw)
    except Junk as junk:
        raise Junk(f"{plain(key)}: {junk}") from None


# --- what must agree --------------------------------------------------------------------------------------------------

def code_version(root: Path = ROOT) -> str:
    """A hash of the program's own files: boards whose code differs, if only a little, do not work together."""
    digest = hashlib.sha256()
    paths = [path for folder in CODE for path in (root / folder).rglob("*.py")]
    for path in sorted(paths):
        name = path.relative_to(root).as_posix().encode()
        digest.update(name + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def settings(keys: RunConfig | CommandKeys, **found: str) -> dict[str, str]:
    """The keys that must agree, as they were typed; `found` is what a key turned out to mean on this board."""
    typed = {name: value for name, value in flat(keys).items() if name not in LOCAL}
    if typed["draft"] == "suffix":
        typed["draft"] = RunConfig.draft  # for which it stands in where rank 0, which alone knows, has no head
    typed["trace"] = "FOLDER" if typed["trace"] else ""  # one of each board's own, on all boards or on none
    return {name: written(value) or "none" for name, value in {**typed, **found}.items()}


def judge_facts(written: Written, board: Board) -> str:
    """The first thing that does not fit, in words; empty if all fits. `written` may lack ranks if one is wrong."""
    for rank, facts in written.items():
        if facts.get("error"):
            return f"{board.named(rank, facts['host'])}: {facts['error']}"
    for rank, facts in written.items():
        wrong = _difference(facts, written[0])
        if wrong:
            return f"{board.named(rank, facts['host'], facts.get('address', ''))} {wrong}"
    return ""


def _difference(facts: Facts, root: Facts) -> str:
    """What a rank has that rank 0 has not, with the fix; empty if all is alike."""
    if facts["code"] != root["code"]:
        return (f"has other code than rank 0 ({facts['code']}, not {root['code']}): bring one version to all boards, "
                "as bash scripts/push.sh code=true does")
    if facts["world"] != root["world"] or facts["split"] != root["split"]:
        return ("holds a part of another split than rank 0's: copy the parts of one split, as bash scripts/push.sh "
                "does")
    keys = facts["settings"].keys() | root["settings"].keys()
    for key in sorted(keys):
        own, other = (each["settings"].get(key, "none") for each in (facts, root))
        if own != other:
            mixed = ", and dtype= too where some have CUDA and others do not" if key == "dtype" else ""
            return f"was started with {key}={own}, but rank 0 with {other}: type the same keys on all boards{mixed}"
    return ""


def judge_ways(written: Written, ways: Written, names: Sequence[str]) -> str:
    """Who cannot be reached by whom; of several, the rank that most others miss. Empty if all reach all.

    `ways` has the ranks that each rank has not reached.
    """
    missed = Counter(rank for unreached in ways.values() for rank in unreached if rank in written)
    if not missed:
        return ""
    worst = max(missed, key=lambda rank: (missed[rank], len(ways[rank])))
    others = ", ".join(str(rank) for rank, unreached in ways.items() if worst in unreached)
    interface = written[worst]["interface"]
    return (f"{names[worst]} cannot be reached by rank {others} at its interface {interface}: name the interface of "
            "the cable in GLOO_SOCKET_IFNAME on that board, or behind interface= in the hosts file, and look at its "
            "firewall")
