"""What ranks on several hosts exchange before they start, what must agree, and whether they reach each other.

It knows nothing about how they exchange it.
"""
from __future__ import annotations

import hashlib
import socket
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from config.command import CommandKeys, flat
from config.presets import ROOT
from config.run_config import RunConfig
from launch.hosts.board import Board
from launch.hosts.entries import Facts

CODE = ("config", "model", "pipeline", "tp", "sim", "launch", "eval")  # what decides what a rank computes and says
# What belongs to a board, or to rank 0, whose user asks. All other keys must agree, so a new one is compared too.
LOCAL = frozenset({
    "model_dir", "base_dir", "eagle_dir", "draft_dir", "ssm", "models",  # its folders …
    "data", "output", "results", "hosts",  # … and files
    "prompt", "prompt_ids", "question_file", "template",  # what rank 0 alone is asked
    "device", "threads_per_rank", "debug",  # of one machine
    "master", "wait",  # how it comes to the rendezvous
    "launch",  # which start of an evaluation it is, by the files of rank 0
})
GIVEN = frozenset({"trace"})  # a folder of each board's own, on all boards or on none
MIXED = ", and dtype= too where some have CUDA and others do not"


def code_version(root: Path = ROOT) -> str:
    """A hash of the program's own files: boards whose code differs, if only a little, do not work together."""
    digest = hashlib.sha256()
    paths = [path for folder in CODE for path in (root / folder).rglob("*.py")]
    for path in sorted(paths):
        name = path.relative_to(root).as_posix().encode()
        digest.update(name + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def settings(keys: RunConfig | CommandKeys, **found: Any) -> dict[str, Any]:
    """The keys that must agree, as they were typed; `found` is what a key turned out to mean on this board."""
    typed = {name: value for name, value in flat(keys).items() if name not in LOCAL}
    if typed["draft"] == "suffix":
        typed["draft"] = RunConfig.draft  # for which it stands in where rank 0, which alone knows, has no head
    for name in GIVEN:
        typed[name] = "FOLDER" if typed[name] else ""
    return {**typed, **found}


def judge_facts(written: dict[int, Facts], board: Board) -> str:
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
        own = _typed(facts["settings"].get(key))
        other = _typed(root["settings"].get(key))
        if own != other:
            mixed = MIXED if key == "dtype" else ""
            return f"was started with {key}={own}, but rank 0 with {other}: type the same keys on all boards{mixed}"
    return ""


def _typed(value: Any) -> str:
    if value in (None, ""):
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def judge_ways(written: dict[int, Facts], ways: dict[int, list[int]], names: list[str]) -> str:
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


def open_door(door: socket.socket, rank: int) -> None:
    """Say to everybody who knocks which rank this is, until the door is closed."""
    while door.fileno() >= 0:
        with suppress(OSError):  # the other end has gone already
            other, _ = door.accept()
            with other:
                other.sendall(b"flowspec %d\n" % rank)


def reaches(facts: Facts, rank: int) -> bool:
    """Whether a rank answers, by its number, at the address of its facts."""
    try:
        with socket.create_connection((facts["address"], facts["port"]), timeout=5) as way:
            return way.recv(64) == b"flowspec %d\n" % rank
    except OSError:
        return False
