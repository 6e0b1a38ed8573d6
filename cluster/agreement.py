"""The entries that ranks on several hosts write for each other: their forms, their writers, and what must agree.

It knows nothing about how entries are sent. Without keys, anybody in the boards' network may have written an entry: an
entry of no known form is junk, and text for people is escaped.
"""
from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, NamedTuple, Sequence

from cluster.board import Board
from cluster.heartbeat import RankState
from config.cli import CommandKeys, flat
from config.cli import parse as parse_keys
from config.drafts import BEST_DRAFT
from config.files import fits
from config.keys import LOCAL, SHARED, facts_by_name, keys_with, written
from config.presets import ROOT
from config.run_config import RunConfig
from config.schema.fields import integer
from config.schema.untrusted import one_line

# These rooms decide what a rank computes.
CODE_ROOMS = ("config", "model", "pipeline", "cluster", "tp", "sim", "launch")
MIXED_BOARDS_ADVICE = {  # advice for boards that differ in what they have, after the general one
    "dtype": ", and dtype= too where some have CUDA and others do not",
    "kernel": ", and kernel=torch where one has no C compiler",
}
OTHER_CODE = "has other code than rank 0"
MAX_ENTRY_BYTES = 1 << 20
MAX_RANKS = 1 << 10  # of one run
COUNT_LIMIT = 10 ** 18  # counters stay below this
MAX_DIGITS = 20  # of an integer

Clean = Callable[[bytes], bytes]  # from the bytes of an entry to the cleaned entry; raises Junk
RankFacts = Dict[str, Any]  # of one rank, by name
Written = Dict[int, Any]  # what each rank has written about one topic: its facts, or the ranks that it could not reach


class PartFacts(NamedTuple):
    """The facts of a rank's own part of a model."""

    split_id: str
    world: int  # ranks of the split
    number_type: str  # as `dtype=` names it


class Junk(ValueError):
    """An entry, or a request, of no known form."""


def parse(raw: bytes) -> Any:
    """Return the value of a piece of JSON; raises Junk for anything else."""
    try:
        return json.loads(raw.decode(), parse_int=_digits)
    except (ValueError, RecursionError):
        raise Junk("it is not JSON") from None


def _digits(text: str) -> int:
    if len(text) > MAX_DIGITS:  # Python is slow with millions of them
        raise Junk("it has too long a number")
    return int(text)


# --- forms ------------------------------------------------------------------------------------------------------------

def _is_address(value: Any) -> bool:
    with suppress(ValueError):
        return isinstance(value, str) and str(IPv4Address(value)) == value
    return False


RANK = integer(0, MAX_RANKS - 1).fits
OF_ALL_VERSIONS = {"host": str, "code": str}
ALWAYS = {**OF_ALL_VERSIONS, "settings": {str}, "worker": bool}  # settings as a user types them
FACTS = {**ALWAYS, "world": integer(1, MAX_RANKS - 1).fits, "split": str,
         "address": _is_address, "interface": str, "port": integer(1, (1 << 16) - 1).fits}


def _is_facts(value: Any) -> bool:
    """Whether a value is all facts of a rank; or those that it knew when an error ended it, and the error."""
    all_forms = {**FACTS, "error": str}
    if not isinstance(value, dict) or not value.keys() <= all_forms.keys():
        return False

    required_forms = ALWAYS if "error" in value else FACTS
    return fits(value, {**required_forms, **{name: all_forms[name] for name in value}})


def _clean_facts(raw: bytes) -> bytes:
    """Return a rank's facts; of another version, which may know other facts, only what names it."""
    entry = parse(raw)
    if fits(entry, OF_ALL_VERSIONS) and entry["code"] != _own_version():
        names = {name: entry[name] for name in OF_ALL_VERSIONS}
        if _is_address(entry.get("address")):
            names["address"] = entry["address"]
        raw = json.dumps({**names, "settings": {}, "worker": False, "error": OTHER_CODE}).encode()
    return _json_of(_is_facts)(raw)


# --- kinds ------------------------------------------------------------------------------------------------------------

def _json_of(form: Any) -> Clean:
    def clean_entry(raw: bytes) -> bytes:
        value = parse(raw)
        if not fits(value, form):
            raise Junk("it has another form")
        return json.dumps(_printable(value)).encode()

    return clean_entry


def _printable(value: Any) -> Any:
    if isinstance(value, dict):
        return {one_line(key): _printable(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_printable(entry) for entry in value]
    return one_line(value) if isinstance(value, str) else value


def _line(raw: bytes) -> bytes:
    return one_line(raw.decode(errors="replace")).encode()


def _text_of(pattern: bytes, kind_name: str = "number") -> Clean:
    def clean_entry(raw: bytes) -> bytes:
        if not re.fullmatch(pattern, raw):
            raise Junk(f"it is no {kind_name}")
        return raw

    return clean_entry


OF_RANK = r"(?P<rank>\d{1,4})"  # only this rank may write the entry
OF_ROOT = r"(?P<root>)"  # only rank 0 may write it; without OF_RANK and OF_ROOT, the rank that writes first
PREFIXES = r"(?:.*/)?"  # prefixes that torch.distributed adds to names
_count = _text_of(rb"-?\d{1,18}")
_number = _text_of(rb"-?\d{1,19}(\.\d{1,40})?(e-?\d{1,2})?")
ENTRY_KINDS = (  # the first pattern that matches a whole name counts
    (rf"facts/{OF_RANK}", _clean_facts),
    (rf"ways/{OF_RANK}", _json_of([RANK])),
    (rf"{OF_ROOT}facts/verdict", _json_of((str, bool, [(RANK, _is_facts)]))),
    (rf"{OF_ROOT}ways/verdict", _json_of((str, bool, [(RANK, [RANK])]))),
    (rf"{PREFIXES}heartbeat/{OF_RANK}", _count),
    (rf"state/{OF_RANK}", _json_of(dict.fromkeys(RankState._fields, float))),
    (rf"{PREFIXES}heartbeat/losses(?:/\d+)?", _count),
    (rf"{PREFIXES}heartbeat/lost(?:/\d+)?", _line),
    (rf"spare/{OF_RANK}", _json_of({"host": str, "address": _is_address, "lacks": {str}})),
    (rf"door/{OF_RANK}", _text_of(rb"\d{1,9} (\d{1,3}\.){3}\d{1,3}:\d{1,5}", "door")),
    (rf"{OF_ROOT}(?:membership|complete|hung/\d+)", _count),
    (rf"{PREFIXES}split/{OF_RANK}", _line),
    (rf"{PREFIXES}clock/{OF_RANK}(?:/ask/\d+)?", _line),
    (rf"{OF_ROOT}{PREFIXES}clock/\d+/time/\d+", _number),
    (r".*", bytes),  # what torch.distributed itself writes
)


def _kind(key: str) -> tuple[dict[str, str], Clean]:
    """Return what a name says about the writer of its entry, and the function that cleans the entry."""
    matches = ((re.fullmatch(pattern, key, re.S), clean_entry) for pattern, clean_entry in ENTRY_KINDS)
    return next((match.groupdict(), clean_entry) for match, clean_entry in matches if match)


def owner_of(key: str) -> int | None:
    """Return the only rank that may write an entry of this name; None if any may, and the first one then owns it."""
    writer, _ = _kind(key)
    if "root" in writer:
        return 0
    return int(writer["rank"]) if "rank" in writer else None


def clean(key: str, raw: bytes) -> bytes:
    """Return the entry in a form that is safe to use; raises Junk."""
    try:
        if len(raw) > MAX_ENTRY_BYTES:
            raise Junk(f"it has more than {MAX_ENTRY_BYTES} bytes")
        _, clean_entry = _kind(key)
        return clean_entry(raw)
    except Junk as junk:
        raise Junk(f"{one_line(key)}: {junk}") from None


# --- what must agree --------------------------------------------------------------------------------------------------

def code_version(root: Path = ROOT) -> str:
    """Return a hash of the program's own files: boards with different code, if only slightly, do not work together."""
    digest = hashlib.sha256()
    code_paths = [path for room in CODE_ROOMS for kind in ("*.py", "*.[ch]") for path in (root / room).rglob(kind)]
    for path in sorted(code_paths):
        relative_path = path.relative_to(root).as_posix().encode()
        digest.update(relative_path + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


@lru_cache(maxsize=None)
def _own_version() -> str:
    return code_version()


def settings(keys: RunConfig | CommandKeys, **resolved_values: str) -> dict[str, str]:
    """Return the keys that must agree, as typed; some may have been resolved to other values on this board."""
    local_names = keys_with(RunConfig, "scope", LOCAL) | keys_with(type(keys), "scope", LOCAL)
    typed_values = {name: value for name, value in flat(keys).items() if name not in local_names}
    if typed_values["draft"] in ("suffix", BEST_DRAFT):
        # a default may depend on the head, and only rank 0 knows whether there is one
        typed_values["draft"] = RunConfig.draft
    typed_values["trace"] = "FOLDER" if typed_values["trace"] else ""  # a folder on each board; all boards or none

    return {name: written(value) or "none" for name, value in {**typed_values, **resolved_values}.items()}


def adopted(worker: RunConfig, root_settings: Mapping[str, str]) -> RunConfig:
    """Return a worker's keys for a run: rank 0's, but for those of its own machine. Raises ValueError for wrong ones.

    Only keys of a run are taken, and none that names a file.
    """
    adopted_names = []
    key_words = []
    for name, key_facts in sorted(facts_by_name(RunConfig).items()):
        value, names_file = root_settings.get(name), key_facts.names_file
        if key_facts.scope != SHARED or (names_file(value or "") if callable(names_file) else names_file):
            continue
        adopted_names.append(name)

        if value is None:
            continue
        if value == "none" and getattr(RunConfig, name) == "":
            value = ""  # as `settings` writes an empty text
        key_words.append(f"{name}={value}")

    kept_values = {name: value for name, value in vars(worker).items() if name not in adopted_names}
    return replace(parse_keys(key_words), **kept_values)


def judge_facts(written: Written, board: Board) -> str:
    """Return the first disagreement as a message, or an empty string. `written` may lack ranks if one has an error."""
    for rank, rank_facts in written.items():
        if rank_facts["code"] != written[0]["code"]:  # which may be the reason of any error
            name = board.named(rank, rank_facts["host"], rank_facts.get("address", ""))
            return (f"{name} {OTHER_CODE} ({rank_facts['code']}, not {written[0]['code']}): bring one version to all "
                    "boards, as bash scripts/push.sh code=true does")

    for rank, facts in written.items():
        if facts.get("error"):
            return f"{board.named(rank, facts['host'])}: {facts['error']}"

    for rank, facts in written.items():
        difference = _difference(facts, written[0])
        if difference:
            return f"{board.named(rank, facts['host'], facts.get('address', ''))} {difference}"
    return ""


def _difference(facts: RankFacts, root: RankFacts) -> str:
    """Return the difference between a rank and rank 0, with the fix; empty if there is none."""
    if facts["world"] != root["world"] or facts["split"] != root["split"]:
        return ("holds a part of another split than rank 0's: copy the parts of one split, as bash scripts/push.sh "
                "does")

    all_keys = facts["settings"].keys() | root["settings"].keys()
    for key in sorted(all_keys):
        value, root_value = (each["settings"].get(key, "none") for each in (facts, root))
        if value != root_value:
            more_advice = MIXED_BOARDS_ADVICE.get(key, "")
            return (f"was started with {key}={value}, but rank 0 with {root_value}: type the same keys on all "
                    f"boards{more_advice}")

    return ""


def judge_ways(written: Written, ways: Written, names: Sequence[str]) -> str:
    """Return a message on the rank that most others cannot reach; an empty string if all ranks reach each other.

    `ways` has the ranks that each rank could not reach.
    """
    num_missed = Counter(rank for unreached in ways.values() for rank in unreached if rank in written)
    if not num_missed:
        return ""

    worst = max(num_missed, key=lambda rank: (num_missed[rank], len(ways[rank])))
    others = ", ".join(str(rank) for rank, unreached in ways.items() if worst in unreached)
    interface = written[worst]["interface"]
    return (f"{names[worst]} cannot be reached by rank {others} at its interface {interface}: name the interface of "
            "the cable in GLOO_SOCKET_IFNAME on that board, or with interface= in the hosts file, and check its "
            "firewall")
