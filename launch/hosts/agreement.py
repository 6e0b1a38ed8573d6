"""What ranks on several hosts tell each other before they start, what must agree, and whether a way leads there.

It knows nothing about how they tell it.
"""
from __future__ import annotations

import hashlib
import socket
from collections import Counter
from pathlib import Path
from typing import Any, Dict, NamedTuple

from config.presets import ROOT
from config.run_config import RunConfig
from launch.hosts.board import Board
from pipeline.transport import PeerLost

CODE = ("config", "model", "pipeline", "tp", "sim", "launch", "eval")  # what decides what a rank computes and says
# Of these follow the type of numbers and the size of caches, which must be alike on all ranks.
SETTINGS = ("dtype", "max_length", "init_total_token", "expand_total_token", "none_expand_size", "init_topk_pipedec",
            "profile")

Facts = Dict[str, Any]  # of one rank, by name; goes over the wire as JSON


class Verdict(NamedTuple):
    """What rank 0 says of a meeting: all is well if nothing is `told`; `lost`: a board is missing, not wrong."""

    told: str = ""
    lost: bool = False

    def enforce(self) -> None:
        if self.told:
            raise PeerLost(self.told) if self.lost else ValueError(self.told)


def code_version(root: Path = ROOT) -> str:
    """A hash of the program's own files: boards whose code differs, if only a little, do not work together."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in CODE for path in (root / folder).rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def settings(config: RunConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in SETTINGS}


def judge_facts(told: dict[int, Facts], board: Board) -> str:
    """The first thing that does not fit, in one sentence; empty if all fits. `told` may lack ranks if one is wrong."""
    for rank, facts in told.items():
        if facts.get("error"):
            return f"{board.named(rank, facts['host'])}: {facts['error']}"
    for rank, facts in told.items():
        name = board.named(rank, facts["host"], facts.get("address", ""))
        if facts["code"] != told[0]["code"]:
            return (f"{name} has other code than rank 0 ({facts['code']}, not {told[0]['code']}): bring one version to "
                    "all boards, as bash scripts/push.sh code=true does")
        if facts["world"] != told[0]["world"] or facts["split"] != told[0]["split"]:
            return (f"{name} holds a part of another split than rank 0's: copy the parts of one split, as bash "
                    "scripts/push.sh does")
        for key, value in facts["settings"].items():
            if value != told[0]["settings"][key]:
                return (f"{name} was started with {key}={value}, but rank 0 with {told[0]['settings'][key]}: type the "
                        "same keys on all boards")
    return ""


def judge_ways(told: dict[int, Facts], ways: dict[int, list[int]], names: list[str]) -> str:
    """Who cannot be reached by whom; the rank that most cannot reach is the one to look at."""
    missed = Counter(rank for unreached in ways.values() for rank in unreached)
    if not missed:
        return ""
    worst = max(missed, key=lambda rank: (missed[rank], len(ways[rank])))
    facts, others = told[worst], [str(rank) for rank, unreached in ways.items() if worst in unreached]
    return (f"{names[worst]} cannot be reached by rank {', '.join(others)} at its interface {facts['interface']}: name "
            "the interface of the cable in GLOO_SOCKET_IFNAME on that board, or behind interface= in the hosts file, "
            "and look at its firewall")


def open_door(door: socket.socket, rank: int) -> None:
    """Say to everybody who knocks which rank this is."""
    while True:
        try:
            guest, _ = door.accept()
        except OSError:
            return  # the meeting is over
        with guest:
            guest.sendall(b"flowspec %d\n" % rank)


def reaches(facts: Facts, rank: int) -> bool:
    """Whether that rank answers at the address that it gave."""
    try:
        with socket.create_connection((facts["address"], facts["port"]), timeout=5) as way:
            return way.recv(64) == b"flowspec %d\n" % rank
    except OSError:
        return False
