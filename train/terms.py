"""What decides the result of a training: the settings of its command, and hashes that tell files apart.

What was begun with other terms is refused.
"""
from __future__ import annotations

import hashlib
from argparse import Namespace
from pathlib import Path
from typing import Any, Collection, Mapping

from model.weights.checkpoint import Checkpoint

Terms = Mapping[str, Any]


def digest(content: bytes) -> str:
    """A short hash."""
    return hashlib.sha256(content).hexdigest()[:16]


def mark(source: Checkpoint, name: str = "") -> str:
    """A hash of some weights of that tensor, or the last, which tells one file from another of the same sizes."""
    weights = source.read(name or source.names()[-1]).reshape(-1)[:4096]
    return digest(weights.double().numpy().tobytes())


def settings(args: Namespace, left_out: Collection[str]) -> dict[str, Any]:
    """The words of a command but those that do not decide its result."""
    return {name: value for name, value in vars(args).items() if name not in left_out}


def check(path: Path, found: Terms, wanted: Terms, other: str) -> None:
    """Raise ValueError if what was `found` in a file is not what is `wanted`; `other` is what to give instead."""
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            raise ValueError(f"{path} is of a training with {name}={found.get(name)!r} instead of "
                             f"{wanted.get(name)!r}; give the same command as then, or {other}")
