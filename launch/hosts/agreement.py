"""What ranks on several hosts tell each other before they start, what must agree, and whether a way leads there.

It knows nothing about how they tell it.
"""
from __future__ import annotations

import hashlib
import socket
from collections import Counter
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from config.presets import ROOT
from config.run_config import RunConfig
from launch.hosts.board import Board
from launch.hosts.entries import Facts
from pipeline.transport import PeerLost

CODE = ("config", "model", "pipeline", "tp", "sim", "launch", "eval")  # what decides what a rank computes and says
# What belongs to a board, or to rank 0, whose user asks. All other keys must agree, so a new one is compared too.
LOCAL = frozenset({
    "model_dir", "base_dir", "eagle_dir", "draft_dir", "models", "data", "output", "results", "hosts",  # its folders
    "prompt", "prompt_ids", "question_file",  # what rank 0 alone is asked
    "device", "threads_per_rank", "debug",  # of one machine
    "master_addr", "master_port", "wait",  # how it came to the rendezvous
    "launch",  # which start of an evaluation it is, by the files of rank 0
})
GIVEN = frozenset({"trace"})  # a folder of each board's own, on all boards or on none
MIXED = ", and dtype= too where some have CUDA and others do not"


class Verdict(NamedTuple):
    """What rank 0 says of a rendezvous: all is well if nothing is `told`; `lost`: a board is missing, not wrong."""

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


def settings(config: RunConfig, **found: Any) -> dict[str, Any]:
    """What must agree, as far as it was typed; `found` is what a key turned out to mean on this board."""
    typed = {option.name: getattr(config, option.name) for option in fields(config) if option.name not in LOCAL}
    return {**typed, **{key: "FOLDER" if typed[key] else "" for key in GIVEN}, **found}


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
        for key in sorted(facts["settings"].keys() | told[0]["settings"].keys()):
            own, other = (_typed(of["settings"].get(key)) for of in (facts, told[0]))
            if own != other:
                remedy = f"type the same keys on all boards{MIXED if key == 'dtype' else ''}"
                return f"{name} was started with {key}={own}, but rank 0 with {other}: {remedy}"
    return ""


def _typed(value: Any) -> str:
    return "none" if value in (None, "") else str(value).lower() if isinstance(value, bool) else str(value)


def judge_ways(told: dict[int, Facts], ways: dict[int, list[int]], names: list[str]) -> str:
    """Who cannot be reached by whom; the rank that most cannot reach is the one to look at."""
    missed = Counter(rank for unreached in ways.values() for rank in unreached if rank in told)
    if not missed:
        return ""
    worst = max(missed, key=lambda rank: (missed[rank], len(ways[rank])))
    facts, others = told[worst], [str(rank) for rank, unreached in ways.items() if worst in unreached]
    return (f"{names[worst]} cannot be reached by rank {', '.join(others)} at its interface {facts['interface']}: name "
            "the interface of the cable in GLOO_SOCKET_IFNAME on that board, or behind interface= in the hosts file, "
            "and look at its firewall")


def open_door(door: socket.socket, rank: int) -> None:
    """Say to everybody who knocks which rank this is, until the door is closed."""
    while door.fileno() >= 0:
        with suppress(OSError):  # whoever knocked has gone already
            follower, _ = door.accept()
            with follower:
                follower.sendall(b"flowspec %d\n" % rank)


def reaches(facts: Facts, rank: int) -> bool:
    """Whether that rank answers at the address that it gave."""
    try:
        with socket.create_connection((facts["address"], facts["port"]), timeout=5) as way:
            return way.recv(64) == b"flowspec %d\n" % rank
    except OSError:
        return False
